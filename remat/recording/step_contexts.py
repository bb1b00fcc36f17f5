"""The contexts in which parts of a step on fake tensors run: autocast, the device's kernels, histories of views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat._torch.elsewhere import autocast_elsewhere
from remat.capture.attention_masks import Masks, eager_attention_masks
from remat.capture.elsewhere import CaptureDevice
from remat.recording.view_histories import ViewHistories

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class StepContexts:
    """The contexts of one step.

    device     the device that tensors pretend to be on    autocast  of the workload
    elsewhere  the device whose kernels run, if that is not `device`
    casting    where kernels are substituted: context of autocast and recomputations, with the emulated cache of casts
    kernels    context that gives untraced code the kernels of `elsewhere`
    views      histories of views, renewed around graphs and untraced forwards
    """

    def __init__(
        self,
        device: torch.device,
        autocast: torch.dtype | None,
        elsewhere: CaptureDevice | None,
        casting: Context | None,
    ):
        self.device, self.autocast, self.elsewhere, self._casting = device, autocast, elsewhere, casting
        self.kernels: Context = contextlib.nullcontext if elsewhere is None else elsewhere.kernels
        self.views = ViewHistories()
        self._outside: Any = None  # the kernels of untraced code, while a forward or a backward runs

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Enter autocast, which models may query while they are traced, with the emulated cache of casts."""
        with self.own_autocast(), autocast_context(self.device, self.autocast):
            yield

    def own_autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a step may enter autocast itself, also that of a device that is not at hand."""
        around = self._casting or contextlib.nullcontext
        return autocast_elsewhere(self.elsewhere, around) if self.elsewhere else contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Enter the context of captured graphs: substituted kernels do their own casts."""
        off = torch.autocast(self.device.type, enabled=False) if self._casting else contextlib.nullcontext()
        with off, self._outside_paused(), self.views:
            yield

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Enter the context of recomputations."""
        with (self._casting or contextlib.nullcontext)(), self._outside_paused(), self.views:
            yield

    @contextlib.contextmanager
    def untraced(self, masks: Masks) -> Iterator[None]:
        """Enter the context of an untraced forward on a batch of `masks`."""
        with self.outside(), self.views, eager_attention_masks(masks):
            yield

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Run code that is not traced with the device's kernels: the step's own, and what is between two graphs.

        In backward these are hooks, functions with a backward of their own, and checkpoints of the step's own. Compiled
        functions among them run uncompiled: generated kernels would read memory that fake tensors do not have.
        """
        if self._outside is not None:
            yield
            return
        with torch.compiler.set_stance("force_eager"), self.kernels() as self._outside:
            try:
                yield
            finally:
                self._outside = None

    @contextlib.contextmanager
    def _outside_paused(self) -> Iterator[None]:
        """Run a captured graph, whose nodes have the device's kernels."""
        if self._outside is None:
            yield
            return
        before, self._outside.is_paused = self._outside.is_paused, True
        try:
            yield
        finally:
            self._outside.is_paused = before


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of the autocast that is active; None if there is none."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of autocast to `dtype` on `device`; none if `dtype` is None."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()
