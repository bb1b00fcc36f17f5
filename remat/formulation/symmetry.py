"""Isomorphic segments: the same operators, times, sizes, lives and saves at another place of the step.

Models repeat their layers. Two runs are isomorphic if their segments are, pairwise. They have the same bytes of their
own at the same operators, counted from where the run's forward and its backward begin. They differ by what the step
holds at that place whatever the plan. So a run's shape is found once for all runs isomorphic to it (`Problem.runs`).

Everything that `Memory` reads about a run is part of a segment's signature, with operators counted from the
segment's own first forward and first backward operator. Storages from outside are named by how far back they were
made, except those that some segment takes from afar (a mask, rotary tables, an encoder's output): these are named
themselves, everywhere. Being too strict costs time; being too lax would cost the truth, so
`tests/test_isomorphic.py` compares shared shapes with those computed for every single run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.writes import LONG_LIFE
from remat.formulation.search_space import Segment

NEAR = 3  # segments, or LONG_LIFE of them if that is more


def classes(
    memory: Memory,
    segments: Sequence[Segment],
    backward_of: Sequence[tuple[int, int]],
    op_time_ns: np.ndarray,
    local_bytes: np.ndarray,
) -> list[int]:
    """Return a number for every segment, equal for isomorphic ones.

    backward_of  for every segment its backward operators [first, end)
    op_time_ns   for every operator
    local_bytes  alive during every operator if nothing were kept for backward
    """
    signatures = _Signatures(memory, segments, backward_of, op_time_ns, local_bytes)
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(signatures.of(s), len(numbers)) for s in range(len(segments))]


class _Signatures:
    def __init__(
        self,
        memory: Memory,
        segments: Sequence[Segment],
        backward_of: Sequence[tuple[int, int]],
        op_time_ns: np.ndarray,
        local_bytes: np.ndarray,
    ):
        graph = memory.graph
        self.graph, self.memory, self.segments = graph, memory, segments
        self.windows, self.op_time_ns = backward_of, op_time_ns
        self.near = max(NEAR, int(LONG_LIFE * len(segments)))
        self.segment_of_node = np.repeat(np.arange(len(segments)), [s.end - s.first for s in segments])
        self.forward = [int(memory.node_first[s.first]) for s in segments] + [graph.forward_end]
        self.low = np.searchsorted(graph.storages.birth, self.forward).tolist()
        self.rise = np.diff(local_bytes, prepend=local_bytes[0])
        self.dying = np.bincount(graph.storages.death, graph.storages.size_bytes, minlength=graph.op_count)
        self.taken = self._taken()
        self.first_saved = np.searchsorted(
            graph.saved_tensors.node, [s.first for s in segments] + [segments[-1].end]
        ).tolist()
        self.afar = self._afar()
        self.far_deaths, self.unique = self._far_ends()

    def of(self, s: int) -> Hashable:
        mark = s if s in self.unique or self.graph.inner else -1  # backwards within the forward are in no signature
        return (mark, *self._nodes(s), *self._operators(s), *self._storages(s), *self._saves(s), *self._inputs(s))

    def _nodes(self, s: int) -> tuple[Hashable, ...]:
        segment, begin = self.segments[s], self.forward[s]
        nodes = self.graph.nodes[segment.first : segment.end]
        return (
            segment.plain,
            *((n.first - begin, n.end - begin, n.effect, n.in_context, n.decides) for n in nodes),
            *((u, at - begin) for n in nodes for u, at in zip(n.reused, n.reused_at, strict=True)),
        )

    def _operators(self, s: int) -> tuple[Hashable, ...]:
        """Return keys of the forward operators' needs, and of the changes of the step's own bytes in backward."""
        forward, (first, end) = slice(self.forward[s], self.forward[s + 1]), self.windows[s]
        return (
            self.op_time_ns[forward].tobytes(),
            self.memory.workspace_bytes[forward].tobytes(),
            self.graph.is_made_again[forward].tobytes(),
            self.rise[first:end].tobytes(),
            self.dying[first - 1 : end].tobytes(),
        )

    def _storages(self, s: int) -> tuple[Hashable, ...]:
        table, made = self.graph.storages, slice(self.low[s], self.low[s + 1])
        return (
            table.size_bytes[made].tobytes(),
            (table.birth[made] - self.forward[s]).tobytes(),
            (table.node[made] - self.segments[s].first).tobytes(),
            table.cast[made].tobytes(),
            tuple(self._death(u, s, s) for u in range(made.start, made.stop)),
        )

    def _death(self, storage: int, made: int, seen_from: int) -> tuple[str, int]:
        """Return the last operator of a storage's local life, relative to a segment, unless it is far away."""
        death = int(self.graph.storages.death[storage])
        if death >= self.graph.forward_end:
            return "backward", death - self.windows[seen_from][0]
        if death in self.far_deaths:
            return "far", death
        return "forward", death - self.forward[made]

    def _saves(self, s: int) -> tuple[Hashable, ...]:
        table, rows = self.graph.saved_tensors, slice(self.first_saved[s], self.first_saved[s + 1])
        window = self.windows[s][0]

        def in_backward(ops: np.ndarray) -> bytes:
            return np.where(ops >= self.graph.forward_end, ops - window, -(1 << 40)).tobytes()

        return (
            (table.node[rows] - self.segments[s].first).tobytes(),
            table.copy_bytes[rows].tobytes(),
            (table.at[rows] - self.forward[s]).tobytes(),
            in_backward(table.unpack[rows]),
            in_backward(table.used[rows]),
            in_backward(table.release[rows]),
            tuple(self._name(int(u), s) for u in table.storage[rows]),
        )

    def _inputs(self, s: int) -> tuple[Hashable, ...]:
        return tuple((at, self._name(u, s)) for at, u in self.taken[s])

    def _name(self, storage: int, s: int) -> Hashable:
        """Return a storage's name relative to segment `s`."""
        if storage < 0 or storage in self.afar:
            return storage
        made = self._made(storage)
        size = int(self.graph.storages.size_bytes[storage])
        return s - made, storage - self.low[made], size, self._death(storage, made, s)

    def _made(self, storage: int) -> int:
        return int(self.segment_of_node[self.graph.storages.node[storage]])

    def _far_ends(self) -> tuple[set[int], set[int]]:
        """Return operators that end the life of a storage from far before, and segments that are like no other.

        These are the operators' segments, and those that make a cast for others. Whatever ends at such an operator, be
        it from near, is named by it: the weight casts of all layers end with the forward.
        """
        reused = {int(self.graph.storages.node[u]) for node in self.graph.nodes for u in node.reused}
        table = self.graph.storages
        forward = np.flatnonzero((table.death < self.graph.forward_end) & (table.node >= 0))
        ends = np.searchsorted(self.forward, table.death[forward], side="right") - 1
        far = ends - self.segment_of_node[table.node[forward]] > self.near
        unique = {*ends[far].tolist(), *(int(self.segment_of_node[node]) for node in reused)}
        return set(table.death[forward[far]].tolist()), unique

    def _taken(self) -> list[list[tuple[int, int]]]:
        """Return for every segment its inputs from earlier ones, as (position of the taking node, storage)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.segments]
        for i, node in enumerate(self.graph.nodes):
            s = int(self.segment_of_node[i])
            for source in node.inputs:
                if source < self.segments[s].first:
                    found[s] += [(i - self.segments[s].first, u) for u in self.graph.nodes[source].values]
        return found

    def _afar(self) -> set[int]:
        """Return the storages that some segment takes or saves from segments that are not near."""
        table = self.graph.saved_tensors
        saved = zip(self.segment_of_node[table.node].tolist(), table.storage.tolist(), strict=True)
        taken = ((s, u) for s, found in enumerate(self.taken) for _, u in found)
        return {u for s, u in (*saved, *taken) if u >= 0 and s - self._made(u) > self.near}
