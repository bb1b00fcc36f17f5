"""What a link takes off the device at most, whatever the plan: how far rows may be relaxed, for a bound to stay one.

Bytes leave in forward only, no faster than the link carries them, and not before they are made. So until backward ends
at most C are off the device, what the link carries in all of forward; while the optimizer steps, none.

A link that had nothing to do does not make up for it. What segments before cut a keep, less what has left by then, is a
queue, D[a+1] = max(D[a] + kept - bandwidth x time, 0). With S[a] = D[a] + bandwidth x time until a that is
S[a+1] = max(S[a] + kept, floor[a+1]): bytes kept, of which there are at no cut fewer than the link could have taken by
then (`floor_bytes`).

Two things must not be said of that queue. An idle link leaves the host's memory free: where that limits C, and not the
link, there are no floors. And a storage that several segments want may leave as soon as it is made, while a program
counts it where the last of them wants it: floors in between are lower by its bytes (`Problem.floor_bytes`).
"""

from __future__ import annotations

import numpy as np

from remat.evaluation.graph import Graph
from remat.offloading.link import Link


class Relief:
    """For one graph and link; `op_time_us` is the time of every operator."""

    def __init__(self, graph: Graph, op_time_us: np.ndarray, link: Link):
        elapsed = np.concatenate([[0.0], np.cumsum(op_time_us[: graph.forward_end])])
        self._carried = np.array([link.moved_within(time_us) for time_us in elapsed], dtype=np.int64)
        self.most_bytes = int(self._carried[-1])  # C
        self._is_host_full = link.host_bytes <= self.most_bytes
        self._backward_end = graph.backward_end

    def at(self, op: np.ndarray) -> np.ndarray:
        """Bytes off the device at most while operators run."""
        return np.where(op < self._backward_end, self.most_bytes, 0)

    def floor_bytes(self, op: int) -> int:
        """What the link could have taken when operator `op` of forward begins."""
        return 0 if self._is_host_full else int(self._carried[min(op, len(self._carried) - 1)])
