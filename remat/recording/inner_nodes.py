"""The order of a backward that goes through the graph of an inner one, on a device whose autograd has its own thread.

Of the nodes that are ready, autograd runs the one of the highest number first, and every thread numbers the nodes that
it makes. On a CPU one thread makes them all. On CUDA an inner backward (`create_graph=True`) runs in a thread of the
device. Where forward makes more nodes a step than the inner backward, the numbers of that thread soon fall behind, and
its nodes wait for all ready ones of forward. Within the first steps the numbers overlap, in orders that are not
recorded. Where the inner backward makes more, its numbers are ahead, as on a CPU.
"""

from __future__ import annotations

import torch

from remat._torch.recording import autograd_node, next_sequence_number, nodes_behind

AHEAD = 1 << 40  # by which the numbers of forward's nodes are raised


class InnerNodes:
    """The numbers of the nodes that inner backwards of one forward make."""

    def __init__(self) -> None:
        self._first = self._next = next_sequence_number()
        self._numbers: set[int] = set()

    def note(self) -> None:
        """Note the nodes that autograd has made since this was last called, if a backward runs."""
        made = range(self._next, next_sequence_number())
        self._next = made.stop
        if made and autograd_node() is not None:
            self._numbers.update(made)

    def run_last(self, loss: torch.Tensor) -> None:
        """Let the backward of `loss` run these nodes as a device does."""
        made = self._next - self._first
        if not self._numbers or 2 * len(self._numbers) > made:
            return
        for node in nodes_behind([loss.grad_fn]):
            if (number := node._sequence_nr()) < AHEAD and number not in self._numbers:
                node._set_sequence_nr(number + AHEAD)
