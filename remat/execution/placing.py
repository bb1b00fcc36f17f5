"""Placing: find a plan's regions in the graph at hand.

A plan names nodes by their ordinals in the graph calls that it was made for, and holds those calls' identity
(`identity.py`). A graph that is the same, however spelled, has a counterpart of every anchor, and the regions are moved
there:

Rule 1  A border stays right behind the last node before it that both graphs have. Where no region may begin or end
        there (a context is open, a tuple crosses), it moves on, as far as the next node that both have.
Rule 2  A save whose node has no counterpart is dropped: there is nothing to keep. Only loose nodes have none.
Rule 3  Which nodes of a region draw random numbers or update state is read off the graph at hand; what the plan
        lists is added.

Rule 4  A number of the model (a temperature in a buffer) that only the graph at hand writes is written outside of
        regions, before those that touch it: a recomputation would find another one, or write it again. A region begins
        behind such a write where one may. Where it cannot, this is another graph.

Between two anchors lie views, and what costs little: on which side of a border they fall changes no bytes worth a rule.

A plan of file version 1 has no identity; it fits a graph of the same fingerprint only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from remat.capture.anchors import Reading, identity_at, identity_of, module_path, read, writes_into_state
from remat.capture.nodes import called, captured_nodes
from remat.errors import PlanMismatch
from remat.evaluation.graph import fingerprint
from remat.evaluation.identity import Difference, Fit, GraphMismatch, NodeId, Places, compare, position_of
from remat.evaluation.plan import Plan
from remat.evaluation.writes import holds_or_leaves
from remat.execution.eager.offloading import CallOffloads, offloads_in
from remat.execution.eager.rewrite import CallRegion
from remat.execution.eager.rewritten_calls import regions_by_call


@dataclasses.dataclass(frozen=True)
class Growth:
    """Bytes that a graph needs above the planned, and the node that makes most of them."""

    more_bytes: int
    more_of: NodeId | None


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
        if not isinstance(fit, Difference) and (held := self._held_write(call, graph_module, fit)) is not None:
            fit = Difference(held, None, identity_of(graph_module)[held], writes_state=True)
        return GraphMismatch(call, nodes, fit) if isinstance(fit, Difference) else fit

    def growth(self, call: int, graph_module: fx.GraphModule, sizes: Mapping[Any, int], *, same_shapes: bool) -> Growth:
        """Return the bytes that a graph that fits graph call `call` needs above the planned at open `sizes`.

        same_shapes  whether the batch is the planned one. If not, what is smaller is set off: the sums of what regions
                     leave, and of what the largest region makes, are compared.
        """
        if call >= len(self._plan.identities):
            return Growth(0, None)
        planned, found = self._plan.identities[call], identity_at(graph_module, sizes)
        fit = compare(planned, found, same_shapes=True)
        if isinstance(fit, Difference) or fit.more_of is None:
            return Growth(0, None)
        if same_shapes:
            return Growth(fit.more_bytes, fit.more_of)
        more = {i: found[j].made_bytes for i, j in enumerate(fit.to) if j >= 0 and planned[i].made_bytes}
        needs = [self._sums(call, size) for size in ({i: planned[i].made_bytes for i in more}, more)]
        return Growth(max(needs[1] - needs[0], 0), fit.more_of)

    def _sums(self, call: int, made_bytes: Mapping[int, int]) -> int:
        """Return the bytes that nodes outside of regions and saved ones make, with those of the largest region."""
        regions = self._planned.get(call, ())
        inside = {i for region in regions for i in range(region.first, region.last + 1) if i not in region.saved}
        most = (sum(made_bytes.get(i, 0) for i in range(region.first, region.last + 1)) for region in regions)
        return sum(size for i, size in made_bytes.items() if i not in inside) + max(most, default=0)

    def _held_write(self, call: int, graph_module: fx.GraphModule, fit: Fit) -> int | None:
        """Return the first write into the model's state that was not planned and hinders a region, if any. (Rule 4)"""
        if fit.is_exact or not (regions := self._planned.get(call, ())):
            return None
        if not (written := _new_writes(graph_module, fit)):
            return None
        cuts = read(graph_module).cuts
        for region in regions:
            try:
                first = position_of(region.first, fit, self._begins(fit, cuts, written))
                end = position_of(region.last + 1, fit, cuts)
            except PlanMismatch:  # said where the regions are placed
                continue
            for write, touching in written.items():
                if first <= write and any(first <= node < end for node in touching):
                    return write
        return None

    def _begins(self, fit: Fit, cuts: Collection[int] | None, written: Collection[int]) -> Collection[int] | None:
        """Return the positions of `cuts` where regions begin, behind writes that were not planned where one may."""
        if cuts is None or not written or self._plan.offloads:  # offloads name the nodes that begin regions
            return cuts
        new = _without_counterpart(fit)
        before = set[int]()
        for write in written:
            first = next(i for i in range(write, -2, -1) if i not in new) + 1
            gap = range(first, next(i for i in range(write, fit.count + 1) if i not in new) + 1)
            if any(position in cuts for position in gap if position > write):
                before.update(range(first, write + 1))
        return frozenset(cuts) - before

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
        begins = self._begins(fit, reading.cuts, _new_writes(graph_module, fit))
        return tuple(_moved(region, fit, reading, begins) for region in regions)

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


def _without_counterpart(fit: Fit) -> frozenset[int]:
    """Return the ordinals of the nodes that only the graph at hand has."""
    return frozenset(range(fit.count)).difference(fit.to)


def _new_writes(graph_module: fx.GraphModule, fit: Fit) -> dict[int, frozenset[int]]:
    """Return writes into the model's state that only the graph at hand has, each with the nodes that touch it."""
    return {} if fit.is_exact else writes_into_state(graph_module, sorted(_without_counterpart(fit)))


def _moved(region: CallRegion, fit: Fit, reading: Reading, begins: Collection[int] | None = None) -> CallRegion:
    """Translate `region` into ordinals of the graph at hand; it begins at one of `begins`, by default of all cuts."""
    first = position_of(region.first, fit, reading.cuts if begins is None else begins)
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
        inner=tuple(_moved(inner, fit, reading, begins) for inner in region.inner),
    )
