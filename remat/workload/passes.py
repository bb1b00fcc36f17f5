"""Passes: which forwards of a model belong to one backward.

A step calls its model once or more often, and then a backward goes through all of it. Who counts the forwards has to
know where the next step begins: after a backward, or after a step that was left half way (an exception, a loss that
is not differentiated). `Pass` notices both. It hooks onto the gradient functions of what a forward returns, and keeps
none of them alive.

A backward that makes a graph of its own (`create_graph=True`) is a part of its step, which differentiates inside. It
ends a pass only where all forwards of the step were made. Forwards whose outputs need no gradient do not tell.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat._torch.training import keeps_graph, when_backward_ends
from remat.workload.held_outputs import output_tensors


def _nobody() -> None:
    """Stand for a weak reference whose function is gone."""


@dataclasses.dataclass
class _BackwardSeen:
    """Whether a backward went through the pass: one that makes no graph, one that keeps this one, or any.

    making_graph  one that makes a graph (`create_graph=True`)
    in_autocast   one that makes no graph ran inside of `torch.autocast`, which keeps casts of weights
    when_over     a weak reference to a function to call when a backward has ended that makes no graph and keeps none
    """

    last: bool = False
    kept: bool = False
    making_graph: bool = False
    in_autocast: bool = False
    any: bool = False
    is_awaited: bool = False  # the end of a backward, to call `when_over`
    when_over: Callable[[], Callable[[], None] | None] = _nobody


class _Hook:
    """Called before a backward goes through one forward; lives as long as the graph of that forward."""

    def __init__(self, seen: _BackwardSeen):
        self._seen = seen

    def __call__(self, gradients: Any) -> None:
        self._seen.any = True
        if not (self._seen.is_awaited or torch.is_grad_enabled() or keeps_graph()):
            self._seen.is_awaited = True
            if (when_over := self._seen.when_over()) is not None:
                when_backward_ends(when_over)
        self._seen.last = self._seen.last or not torch.is_grad_enabled()
        self._seen.making_graph = self._seen.making_graph or torch.is_grad_enabled()
        self._seen.kept = self._seen.kept or (keeps_graph() and not torch.is_grad_enabled())
        if not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
            devices = {gradient.device.type for gradient in gradients if gradient is not None}
            within = any(map(torch.is_autocast_enabled, filter(torch.amp.is_autocast_available, devices)))
            self._seen.in_autocast = self._seen.in_autocast or within


class Pass:
    """The forwards that no backward has followed yet.

    count  their number
    next   number of the planned forward that comes next
    """

    def __init__(self) -> None:
        self._when_over: Callable[[], Callable[[], None] | None] = _nobody
        self.begin()

    def notify(self, when_over: Callable[[], Callable[[], None] | None]) -> None:
        """Set what to call when a backward has ended that makes no graph and keeps none, by a weak reference."""
        self._when_over = self._seen.when_over = when_over

    def begin(self) -> None:
        self.count = self.next = 0
        self._seen = _BackwardSeen(when_over=self._when_over)
        self._graphs: list[weakref.ref[_Hook]] = []

    def add(self, outputs: Any) -> None:
        """Note that a forward has returned `outputs`."""
        self.count += 1
        functions = {t.grad_fn for _, t in output_tensors(outputs) if t.grad_fn is not None}
        if functions:
            hook = _Hook(self._seen)
            for function in functions:
                function.register_prehook(hook)
            self._graphs.append(weakref.ref(hook))

    def goes_on(self) -> None:
        """Note that the pass that has ended was within a step, whose forwards go on."""
        self._seen = _BackwardSeen(when_over=self._when_over)
        self._graphs = []

    @property
    def is_kept(self) -> bool:
        """Whether a backward went through the forwards that kept their graph for another (`retain_graph=True`)."""
        return self._seen.kept

    @property
    def is_differentiated_twice(self) -> bool:
        """Whether a backward through the forwards made a graph of its own (`create_graph=True`)."""
        return self._seen.making_graph

    @property
    def is_in_autocast(self) -> bool:
        """Whether a backward through the forwards ran inside of `torch.autocast`."""
        return self._seen.in_autocast

    def is_over(self, forwards: int) -> bool:
        """Return whether the next forward belongs to another step; a whole step has `forwards`."""
        if self._seen.last:
            return True
        if self.count >= forwards and (self._seen.any or not self._graphs):
            return True
        return bool(self._graphs) and all(graph() is None for graph in self._graphs)
