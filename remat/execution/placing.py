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

A plan of file version 1 has no identity; it fits a graph of the same fingerprint only.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from remat.capture.anchors import Reading, identity_of, module_path, read
from remat.capture.nodes import called, captured_nodes
from remat.errors import PlanMismatch
from remat.evaluation.graph import fingerprint
from remat.evaluation.identity import Difference, Fit, GraphMismatch, Places, compare, position_of
from remat.evaluation.plan import Plan
from remat.evaluation.writes import holds_or_leaves
from remat.execution.eager.offloading import CallOffloads, offloads_in
from remat.execution.eager.rewrite import CallRegion
from remat.execution.eager.rewritten_calls import regions_by_call


class Placer:
    """The regions of one plan in the graphs that a model is captured as."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._planned = regions_by_call(plan.regions)

    @property
    def call_count(self) -> int:
        return len(self._plan.fingerprints)

    def fit(self, call: int, graph_module: fx.GraphModule, *, same_shapes: bool = False) -> Fit | GraphMismatch:
        """Find the nodes of graph call number `call` of the plan in `graph_module`."""
        nodes = len(captured_nodes(graph_module))
        if call >= self.call_count:
            return GraphMismatch(call, nodes)
        if not self._plan.identities:
            is_same = fingerprint_of(graph_module) == self._plan.fingerprints[call]
            return Fit(tuple(range(nodes)), nodes) if is_same else GraphMismatch(call, nodes)
        fit = compare(self._plan.identities[call], identity_of(graph_module), same_shapes=same_shapes)
        return GraphMismatch(call, nodes, fit) if isinstance(fit, Difference) else fit

    def fits_some(self, graph_module: fx.GraphModule) -> bool:
        """Return whether `graph_module` is the graph of any graph call of the plan."""
        return any(isinstance(self.fit(call, graph_module), Fit) for call in range(self.call_count))

    def regions(self, call: int, graph_module: fx.GraphModule) -> tuple[CallRegion, ...]:
        """Return the regions of graph call `call` in `graph_module`. Raises PlanMismatch if it is another graph."""
        regions = self._planned.get(call, ())
        fit = self.fit(call, graph_module)
        if isinstance(fit, GraphMismatch):
            raise PlanMismatch(f"another graph than planned for {fit}; make a plan for this model.")
        if not regions or not self._plan.identities:
            return regions
        reading = read(graph_module)
        if fit.is_exact:
            reading = dataclasses.replace(reading, cuts=None, apart=())  # the plan was checked for it
        return tuple(_moved(region, fit, reading) for region in regions)

    def offloads(self, call: int, graph_module: fx.GraphModule) -> CallOffloads:
        """Return the offloads of graph call `call` in `graph_module`. Raises PlanMismatch if a node is missing."""
        fit = self.fit(call, graph_module)
        if isinstance(fit, GraphMismatch):
            raise PlanMismatch(f"another graph than planned for {fit}; make a plan for this model.")
        if not self._plan.identities or fit.is_exact:
            return offloads_in(call, self._plan.offloads)
        firsts = {(call, region.first) for region in self._planned.get(call, ())}
        places = Places({call: fit}, {call: read(graph_module).cuts}, firsts)
        return offloads_in(call, self._plan.offloads, places)


def fingerprint_of(graph_module: fx.GraphModule) -> str:
    """Return the fingerprint of a captured graph, as in `Graph.fingerprints`."""
    nodes = captured_nodes(graph_module)
    ordinal = {node: i for i, node in enumerate(nodes)}
    return fingerprint(
        (called(n), module_path(n), sorted({ordinal[i] for i in n.all_input_nodes if i in ordinal})) for n in nodes
    )


def _moved(region: CallRegion, fit: Fit, reading: Reading) -> CallRegion:
    """Translate `region` into ordinals of the graph at hand."""
    first = position_of(region.first, fit, reading.cuts)
    end = position_of(region.last + 1, fit, reading.cuts)
    saved = frozenset(fit.to[i] for i in region.saved) - {-1}
    inside = frozenset(range(first, end)) - saved
    random = frozenset(fit.to[i] for i in region.random)
    if -1 in random:
        raise PlanMismatch("a node that drew random numbers when planned is not in this graph; plan again.")
    if not all(holds_or_leaves(range(first, end), touching) for touching in reading.apart):
        raise PlanMismatch("a region would hold some of the writes to a tensor in this graph; plan again.")
    return CallRegion(
        first,
        end - 1,
        saved=saved,
        random=inside & (random | reading.random),
        once=inside & (frozenset(fit.to[i] for i in region.once) | reading.once),
        inner=tuple(_moved(inner, fit, reading) for inner in region.inner),
    )
