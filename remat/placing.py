"""Placing: find a plan's regions in the graph at hand.

A plan names nodes by their ordinals in the graph calls that it was made for, and holds those calls' identity
(`identity.py`). A graph that is the same, however spelled, has a counterpart of every anchor, and the regions are moved
there:

Rule 1  A border stays right behind the last node before it that both graphs have. Where no region may begin or end
        there (a context is open, a tuple crosses), it moves on, as far as the next node that both have.
Rule 2  A save whose node has no counterpart is dropped: there is nothing to keep. Only loose nodes have none.
Rule 3  Which nodes of a region draw random numbers or update state is read off the graph at hand; what the plan
        lists is added.

Between two anchors lie views, and what costs little: on which side of a border they fall changes no bytes worth a rule.

A plan of file version 1 has no identity; it fits a graph of the same fingerprint, as it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torch import fx

from remat.anchors import Reading, identity_of, module_path, read
from remat.circumstances import differences
from remat.errors import PlanMismatch
from remat.graph import Graph, fingerprint
from remat.identity import Difference, Fit, compare
from remat.plans import PlacedRegion, Plan, Region
from remat.replay import regions_by_call
from remat.rewrite import CallRegion, called, captured_nodes
from remat.space import legal_cuts


@dataclasses.dataclass(frozen=True)
class Unlike:
    """Why a graph is not that of a graph call of the plan; without `difference` it is not known where they differ."""

    call: int
    nodes: int
    difference: Difference | None = None

    def __str__(self) -> str:
        where = f"graph call {self.call}, {self.nodes} nodes"
        return f"({where})" if self.difference is None else f"({where}): {self.difference}"


class Placer:
    """The regions of one plan in the graphs that a model is captured as."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._planned = regions_by_call(plan.regions)

    @property
    def call_count(self) -> int:
        return len(self._plan.fingerprints)

    def fit(self, call: int, graph_module: fx.GraphModule, *, same_shapes: bool = False) -> Fit | Unlike:
        """Where the nodes of graph call number `call` of the plan are in `graph_module`."""
        nodes = len(captured_nodes(graph_module))
        if call >= self.call_count:
            return Unlike(call, nodes)
        if not self._plan.identities:
            alike = fingerprint_of(graph_module) == self._plan.fingerprints[call]
            return Fit(tuple(range(nodes)), nodes) if alike else Unlike(call, nodes)
        fit = compare(self._plan.identities[call], identity_of(graph_module), same_shapes=same_shapes)
        return Unlike(call, nodes, fit) if isinstance(fit, Difference) else fit

    def fits_some(self, graph_module: fx.GraphModule) -> bool:
        """Whether `graph_module` is that of any graph call of the plan."""
        return bool(self.every(graph_module))

    def every(self, graph_module: fx.GraphModule) -> dict[int, tuple[CallRegion, ...]]:
        """The regions of every graph call of the plan that `graph_module` is."""
        return {
            call: self.regions(call, graph_module)
            for call in range(self.call_count)
            if isinstance(self.fit(call, graph_module), Fit)
        }

    def regions(self, call: int, graph_module: fx.GraphModule) -> tuple[CallRegion, ...]:
        """The regions of graph call number `call` in `graph_module`; raises PlanMismatch where it is another graph."""
        regions = self._planned.get(call, ())
        fit = self.fit(call, graph_module)
        if isinstance(fit, Unlike):
            raise PlanMismatch(f"another graph than planned for {fit}; make a plan for this model.")
        if not regions or not self._plan.identities:
            return regions
        reading = read(graph_module)
        if fit.is_exact:
            reading = dataclasses.replace(reading, cuts=None)
        return tuple(_moved(region, fit, reading) for region in regions)


def fingerprint_of(graph_module: fx.GraphModule) -> str:
    """Fingerprint of a captured graph, as `Graph.fingerprints` has it."""
    nodes = captured_nodes(graph_module)
    ordinal = {node: i for i, node in enumerate(nodes)}
    return fingerprint(
        (called(n), module_path(n), sorted({ordinal[i] for i in n.all_input_nodes if i in ordinal})) for n in nodes
    )


def _moved(region: CallRegion, fit: Fit, reading: Reading) -> CallRegion:
    """`region`, in ordinals of the graph at hand."""
    first = _position(region.first, fit, reading.cuts)
    end = _position(region.last + 1, fit, reading.cuts)
    saved = frozenset(fit.to[i] for i in region.saved) - {-1}
    inside = frozenset(range(first, end)) - saved
    random = frozenset(fit.to[i] for i in region.random)
    if -1 in random:
        raise PlanMismatch("a node that drew random numbers when planned is not in this graph; plan again.")
    return CallRegion(
        first,
        end - 1,
        saved=saved,
        random=inside & (random | reading.random),
        once=inside & (frozenset(fit.to[i] for i in region.once) | reading.once),
        inner=tuple(_moved(inner, fit, reading) for inner in region.inner),
    )


def _position(planned: int, fit: Fit, cuts: Collection[int] | None) -> int:
    """Where a border is here. (Rule 1) In the same graph, of which no `cuts` are given, it is where it was."""
    candidates = fit.positions(planned)
    for position in candidates:
        if cuts is None or position in cuts:
            return position
    raise PlanMismatch(
        f"no region may begin or end at nodes {candidates.start} to {candidates.stop - 1} of this graph, where one of "
        "the plan does; make a plan for this model."
    )


# In a recorded graph


def require_regions_in(plan: Plan, graph: Graph) -> tuple[Region, ...]:
    """The regions of `plan` in a step recorded here; raises PlanMismatch where it is of another model."""
    regions = regions_in(plan, graph)
    if isinstance(regions, Unlike):
        said = [f"{regions}", *differences(plan.about, graph.about)]
        raise PlanMismatch(
            f"the plan was made for {plan.about.get('workload')!r}, whose graph differs from that of "
            f"{graph.about['workload']!r} here {'; '.join(said)}; use it as planned, or make a plan for this model."
        )
    return regions


def regions_in(plan: Plan, graph: Graph) -> tuple[Region, ...] | Unlike:
    """The regions of `plan` in a step recorded here, or why it is another's."""
    if len(graph.call_nodes) != len(plan.fingerprints):
        return Unlike(min(len(graph.call_nodes), len(plan.fingerprints)), len(graph.nodes))
    if not plan.identities or not graph.identities:
        if graph.fingerprints != plan.fingerprints:
            return Unlike(0, len(graph.nodes))
        fits: list[Fit | Difference] = [Fit(tuple(range(len(m))), len(m)) for m in graph.call_nodes]
    else:
        same_shapes = plan.about.get("batch") == graph.about.get("batch")
        fits = [compare(a, b, same_shapes=same_shapes) for a, b in zip(plan.identities, graph.identities, strict=True)]
    for call, fit in enumerate(fits):
        if isinstance(fit, Difference):
            return Unlike(call, len(graph.call_nodes[call]), fit)
    found = [fit for fit in fits if isinstance(fit, Fit)]
    cuts = frozenset(legal_cuts(graph)) if plan.regions_are == "nodes" else None
    return tuple(_placed_in(region, graph, found, cuts) for region in plan.regions)


def _placed_in(region: PlacedRegion, graph: Graph, fits: Sequence[Fit], cuts: frozenset[int] | None) -> Region:
    nodes, fit = graph.call_nodes[region.call], fits[region.call]
    here = None
    if cuts is not None and not fit.is_exact:
        here = {i for i, node in enumerate(nodes) if node in cuts} | {len(nodes)}
    first, end = (_position(p, fit, here) for p in (region.first.ordinal, region.last.ordinal + 1))
    saved = (fit.to[ref.ordinal] for ref in region.saved)
    return Region(
        nodes[first],
        nodes[end - 1] + 1,
        tuple(sorted(nodes[i] for i in saved if i >= 0)),
        tuple(_placed_in(inner, graph, fits, cuts) for inner in region.inner),
    )
