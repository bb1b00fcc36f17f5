"""Upper bound on the bytes that a link takes off the device; rows relaxed by it give valid bounds.

Bytes leave in forward only, no faster than the link carries them, not before they are made, and behind nodes or slices.
So while one of those runs, no more are off the device than the link has carried when it begins, and never more than C,
what it carries in all of forward. They come back before backward ends: while one of its operators runs, no more are off
than the link can still bring until then. How long that takes depends on what a plan recomputes, at most R
(`Relief.again_us`). So C is no more than what the link brings in all of backward. While the optimizer steps, none are.

A link that had nothing to do does not make up for it. What segments before cut a keep, less what has left by then, is a
queue, D[a+1] = max(D[a] + kept - bandwidth x time, 0). With S[a] = D[a] + bandwidth x time until a that is
S[a+1] = max(S[a] + kept, floor[a+1]): bytes kept, of which there are at no cut fewer than the link could have taken by
then (`floors`). Where it takes more than it can bring back, C is less than it takes, and floors are that much lower.

Two things must not be said of that queue. An idle link leaves the host's memory free: where that limits C, and not the
link, there are no floors. And a storage that several segments want may leave as soon as it is made, while a program
counts it where the last of them wants it: floors in between are lower by its bytes (`Problem.floor_bytes`).
"""

from __future__ import annotations

import math

import numpy as np

from remat.evaluation.graph import Graph
from remat.offloading.link import Link


def _begins(graph: Graph) -> np.ndarray:
    """Return for every operator of forward the first one of its node or slice, and the end of forward."""
    first = np.array([node.first for node in graph.nodes], dtype=np.int64)
    node, ops = graph.op_node[: graph.forward_end], np.arange(graph.forward_end + 1)
    begins = ops.copy()
    begins[:-1] = np.where(node >= 0, first[node], begins[:-1])
    slices = np.array(sorted(op for node in graph.nodes for op in node.slice_ends), dtype=np.int64)
    latest = np.concatenate([[0], slices])[np.searchsorted(slices, ops, side="right")]
    return np.maximum(begins, latest)


class Relief:
    """The relief of one graph and link; `op_time_us` is the time of every operator.

    again_us    R, upper bound on the time of all recomputations
    in_forward  upper bound on bytes off the device, for every operator of forward and its end
    most_bytes  C
    floors      bytes that the link could have taken, for every operator
    """

    def __init__(self, graph: Graph, op_time_us: np.ndarray, link: Link, again_us: float = math.inf):
        elapsed = np.concatenate([[0.0], np.cumsum(op_time_us[: graph.forward_end])])
        backward = op_time_us[graph.forward_end : graph.backward_end]
        self._left_us = np.concatenate([np.cumsum(backward[::-1])[::-1], [0.0]])
        self._link, self._forward_end, self.again_us = link, graph.forward_end, again_us
        taken = np.array([link.moved_within(time_us) for time_us in elapsed], dtype=np.int64)
        self.most_bytes = min(int(taken[-1]), self.in_backward(graph.forward_end, again_us))
        self.in_forward = np.minimum(taken[_begins(graph)], self.most_bytes)
        is_host_full = link.host_bytes <= taken[-1]
        self.floors = np.maximum(taken - (taken[-1] - (0 if is_host_full else self.most_bytes)), 0)

    def in_backward(self, op: int, again_us: float) -> int:
        """Return the most bytes off the device from `op` of backward on; recomputing takes up to `again_us`."""
        left_us = self._left_us[min(op - self._forward_end, len(self._left_us) - 1)]
        return self._link.moved_within(float(left_us) + min(again_us, self.again_us))
