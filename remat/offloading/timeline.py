"""The timeline of a step for copies: the times and nodes at which a copy may begin and end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remat.evaluation.evaluator import Memory, Recomputation
from remat.evaluation.graph import OUTSIDE, Graph
from remat.evaluation.plan import Region


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A storage that may be on the host between forward and backward.

    node, save     its place for the executor, see `OffloadRef`
    ready_us       when its copy out may begin       local_end  operators run in forward up to its last reader
    asked_at       position at which backward first needs it
    """

    storage: int
    size_bytes: int
    node: int
    save: int | None
    ready_us: float
    local_end: int
    asked_at: int


class Border(NamedTuple):
    """A place where a copy out may end: operators run so far, and the node or slice before it."""

    op: int
    node: int
    after_slices: int = 0


class _Index:
    """Indices of a graph that do not depend on the regions."""

    def __init__(self, graph: Graph):
        self.rows_of: dict[int, list[int]] = {}  # for every storage the saves of it
        self.valued: dict[int, list[int]] = {}  # for every storage the captured nodes whose value is one tensor in it
        self.last_user: dict[int, int] = {}  # for every node the last that takes its value, in any graph call
        for row, storage in enumerate(graph.saved_tensors.storage.tolist()):
            self.rows_of.setdefault(storage, []).append(row)
        for i, node in enumerate(graph.nodes):
            if node.call != OUTSIDE and node.single_tensor and len(node.values) == 1:
                self.valued.setdefault(node.values[0], []).append(i)
            for source in node.inputs:
                self.last_user[source] = i
        self.changed = {u for node in graph.nodes for producer in node.mutates for u in graph.nodes[producer].values}
        self.calls = np.array([node.call for node in graph.nodes], dtype=np.int64)


@functools.lru_cache(maxsize=8)
def _index_of(graph: Graph) -> _Index:
    return _Index(graph)


class Timeline:
    """The step under `regions`; times are those of the operators that run, in microseconds.

    A copy ends at a *border* of forward: behind a node outside regions or a slice of it, or behind a region. It begins
    to come back at an *event* of backward: a region is recomputed, or something is asked for that a node outside
    regions saved. Two events of one position have no order that the record knows; such positions are left out.
    """

    def __init__(self, memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray):
        self.memory, self.graph, self.regions = memory.offloading(()), memory.graph, tuple(regions)
        self._index = _index_of(self.graph)
        self.recomputations: list[Recomputation] = self.memory.recomputations(regions)
        self.position, ops, _ = self.memory.timeline(self.recomputations)
        self.lives = self.memory.lives(regions)
        times = np.where(self.lives.executed, op_time_us[ops], 0.0)
        self.starts_us = np.concatenate([[0.0], np.cumsum(times)])  # of every position

    @property
    def forward_us(self) -> float:
        return float(self.starts_us[self.graph.forward_end])

    @functools.cached_property
    def _region_of(self) -> dict[int, Region]:
        return {node: region for region in self.regions for node in range(region.first, region.end)}

    @functools.cached_property
    def _saved_in(self) -> dict[int, Region]:
        """The region of every storage that a region saves."""
        return {int(u): region for region in self.regions for u in self.memory.saved_storages(region)}

    @functools.cached_property
    def borders(self) -> list[Border]:
        """The borders in order; of several at one place the first."""
        found: dict[int, Border] = {}
        for i, node in enumerate(self.graph.nodes):
            region = self._region_of.get(i)
            if node.call == OUTSIDE or (region is not None and i != region.end - 1):
                continue
            for number, op in enumerate(node.slice_ends if region is None else (), start=1):
                found.setdefault(op, Border(op, i, number))
            found.setdefault(node.end, Border(node.end, i))
        return sorted(found.values())

    @functools.cached_property
    def events(self) -> list[tuple[int, int]]:
        """(position, node) of every event, in order."""
        tops = [r for r in self.recomputations if r.level == 0]
        found = {r.start: r.region.first for r in tops if self.graph.nodes[r.region.first].call != OUTSIDE}
        taken = {r.trigger for r in self.recomputations}
        table = self.graph.saved_tensors
        earliest: dict[int, int] = {}
        for node, asked in zip(table.node.tolist(), table.unpack.tolist(), strict=True):
            if asked >= 0 and node not in self._region_of and self.graph.nodes[node].call != OUTSIDE:
                earliest[node] = min(earliest.get(node, asked), asked)
        for node, asked in earliest.items():
            if asked not in taken:
                found.setdefault(int(self.position(np.array(asked))), node)
        return sorted(found.items())

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The candidates by the time at which they are ready."""
        found = [candidate for u in self._kept.tolist() if (candidate := self._candidate(u)) is not None]
        return sorted(found, key=lambda candidate: (candidate.ready_us, candidate.storage))

    @property
    def kept_bytes(self) -> int:
        """The bytes of all candidates."""
        return sum(candidate.size_bytes for candidate in self.candidates)

    @functools.cached_property
    def _requests(self) -> np.ndarray:
        return self.memory.first_requests(self.regions, self.recomputations, self.position)

    @functools.cached_property
    def _kept(self) -> np.ndarray:
        """Storages made by a captured node that do not change, and that only backward reads.

        Some are gone by then: a region that has saved them is recomputed, and runs no operator that needs them.
        """
        graph = self.graph
        storages = graph.storages
        count = len(storages.birth)
        asked = self._requests < np.iinfo(np.int64).max
        kept = asked & (storages.node >= 0) & (storages.death < graph.forward_end)
        kept &= self.lives.death[:count] >= self._requests
        kept[list(self._index.changed)] = False
        kept[self._index.calls[np.maximum(storages.node, 0)] == OUTSIDE] = False
        return np.arange(count)[kept]

    def _candidate(self, storage: int) -> Candidate | None:
        known = self._as_value(storage) or self._as_save(storage)
        saved_in = self._saved_in.get(storage)
        if known is None or (saved_in is not None and (saved_in.inner or known[0] not in saved_in.saved)):
            return None
        node, save, ready = known
        table = self.graph.storages
        return Candidate(
            storage,
            int(table.size_bytes[storage]),
            node,
            save,
            float(self.starts_us[ready]),
            int(table.death[storage]) + 1,
            int(self._requests[storage]),
        )

    def ready_at(self, candidate: Candidate) -> int:
        """Return the position at which its copy out may begin."""
        return int(np.searchsorted(self.starts_us[: self.graph.forward_end + 1], candidate.ready_us))

    def _as_value(self, storage: int) -> tuple[int, None, int] | None:
        """Return (node, None, operators run when it exists) for a storage as a node's value; None if impossible.

        The node is the first whose value it is, and which keeps it or which a node outside of its region takes.
        """
        ends: list[tuple[int, int]] = []
        for i in self._index.valued.get(storage, ()):
            region = self._region_of.get(i)
            if region is None:
                ends.append((int(self.memory.node_end[i]), i))
            elif i in region.saved or self._index.last_user.get(i, i) >= region.end:
                ends.append((int(self.memory.node_end[region.end - 1]), i))
        if not ends:
            return None
        ready, node = min(ends)
        return node, None, ready

    def _as_save(self, storage: int) -> tuple[int, int, int] | None:
        """Return (node, number among its saves, operators run before it) of the first save outside regions."""
        table = self.graph.saved_tensors
        for row in self._index.rows_of.get(storage, ()):
            node = int(table.node[row])
            if node not in self._region_of and self.graph.nodes[node].call != OUTSIDE:
                first = int(np.searchsorted(table.node, node))
                return node, row - first, int(self.memory.node_end[node])
        return None
