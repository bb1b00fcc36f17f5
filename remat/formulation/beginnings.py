"""Beginnings: how many segments two steps have alike, from the first on.

Forms of one step (`planning/forms.py`) differ in the loss head. All before it does the same in each of them, at the
same forward operators, and its backward comes last, at operators that count alike from the end of backward. Runs of
such segments have the same shapes, so those of one problem hold in the other (`Problem`, `like`).

Alike is whatever `Memory` reads about a run, compared column by column and exactly. Only what outlives these segments
and ends before their backward begins may end elsewhere: there no run of theirs is looked at. Fewer segments demand
less, so their number is found by bisection.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

import numpy as np

from remat.evaluation.graph import Node
from remat.formulation.liveness import Liveness
from remat.formulation.search_space import Segment


@dataclasses.dataclass(frozen=True, eq=False)
class Beginnings:
    """The first segments of a step, as many as asked for.

    backward_of  for every segment its backward operators [first, end)
    local_bytes  alive during every operator if nothing were kept for backward
    """

    liveness: Liveness
    backward_of: list[tuple[int, int]]
    local_bytes: np.ndarray

    def alike(self, other: Beginnings) -> int:
        """Count the segments with which both begin."""
        most = min(len(self.backward_of), len(other.backward_of))
        return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not self._are_alike(other, count))

    def _are_alike(self, other: Beginnings, count: int) -> bool:
        if self._parts(count) != other._parts(count):
            return False
        columns = zip(self._columns(count), other._columns(count), strict=True)
        return all(np.array_equal(one, another) for one, another in columns)

    def _parts(self, count: int) -> tuple[tuple[Segment, ...], tuple[Node, ...], dict[int, int]]:
        """Return the segments, their nodes, and those nodes that may be saved."""
        segments = self.liveness.space.segments[:count]
        end = segments[-1].end
        saves = {node: time for node, time in self.liveness.save_time_ns.items() if node < end}
        return segments, tuple(self.liveness.graph.nodes[:end]), saves

    def _columns(self, count: int) -> Iterator[np.ndarray]:
        graph, memory = self.liveness.graph, self.liveness.memory
        segments, table, saved = self.liveness.space.segments, graph.storages, graph.saved_tensors
        ops = int(memory.node_first[segments[count].first]) if count < len(segments) else graph.forward_end
        begin, end = self.backward_of[count - 1][0], graph.backward_end

        forward = slice(ops)
        yield from (self.liveness.op_time_ns[forward], memory.workspace_bytes[forward])
        yield from (graph.is_made_again[forward], graph.op_node[forward])

        made = slice(int(np.searchsorted(table.birth, ops)))
        yield from (table.size_bytes[made], table.birth[made], table.node[made], table.cast[made])
        yield from (np.minimum(table.death[made], ops), np.maximum(table.death[made], begin - 1) - end)

        rows = slice(int(np.searchsorted(saved.node, segments[count - 1].end)))
        yield from (saved.node[rows], saved.storage[rows], saved.copy_bytes[rows], saved.at[rows])
        for column in (saved.unpack[rows], saved.used[rows], saved.release[rows]):
            in_forward = column < graph.forward_end
            yield from (in_forward, np.where(in_forward, column, column - end))

        backward = slice(begin - 1, end)
        dying = np.bincount(table.death, table.size_bytes, minlength=graph.op_count)
        yield np.array(self.backward_of[:count]) - end
        yield np.diff(self.local_bytes[begin - 1 : end + 1])  # without a backward, counted from the next one
        yield from (memory.workspace_bytes[backward], dying[backward])
