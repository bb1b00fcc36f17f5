"""Offloads at random, and copies as late as they may be: what an executor must bear."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from remat.evaluation.plan import Offload
from remat.host.copies import Copies, Copy, InstantCopies, StreamCopies, unseen
from remat.offloading.schedule import offload
from remat.offloading.timeline import Timeline
from tests.devices import DEVICE

Fault = Literal["lets go before the copy out", "uses before the copy back", "brings back before it is out"]
FAULTS: tuple[Fault, ...] = (
    "lets go before the copy out",
    "uses before the copy back",
    "brings back before it is out",
)
# Where copies have streams of their own, these are two more.
ORDERS = ("copies out before it is computed", "brings back where compute still reads")
POISON = 0xFF  # as every byte of a float it is no number


def random_offloads(draw: random.Random, timeline: Timeline, share: float = 0.5) -> tuple[Offload, ...]:
    """Some candidates, released at any border and fetched at any event, be it too late or too early."""
    found = []
    for candidate in timeline.candidates:
        ready = timeline.ready_at(candidate)
        borders = [border for border in timeline.borders if border.op >= max(candidate.local_end, ready)]
        if borders and timeline.events and draw.random() < share:
            _, event = draw.choice(timeline.events)
            found.append(offload(candidate, draw.choice(borders), event))
    return tuple(sorted(found))


class LateCopies(InstantCopies):
    """Nothing arrives until somebody waits for it; what is let go of, and what is new, is poison.

    What was there when a copy began, on the device or on the host, must be there when it ends: it may be read at any
    time between.

    fault  what the executor that asks for these copies is made to forget
    """

    def __init__(self, fault: Fault | None = None):
        self._fault = fault

    def out(self, flat: Tensor, host: Any, offset: int) -> Callable[[], None]:
        begun = bytes_of(flat).copy()  # not in torch's memory, which tests measure

        def copy() -> None:
            assert np.array_equal(begun, bytes_of(flat)), "written to while it was being copied"
            super(LateCopies, self).out(flat, host, offset)

        return self._late("lets go before the copy out", copy)

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return poisoned(super().room_for(elements, dtype, device))

    def back(self, host: Any, offset: int, flat: Tensor) -> Callable[[], None]:
        if self._fault == "brings back before it is out":
            with unseen():
                host[offset : offset + flat.nbytes].fill_(POISON)
        begun = bytes_of(host[offset : offset + flat.nbytes]).copy()

        def copy() -> None:
            assert np.array_equal(begun, bytes_of(host[offset : offset + flat.nbytes])), (
                "written to on the host meanwhile"
            )
            super(LateCopies, self).back(host, offset, flat)

        return self._late("uses before the copy back", copy)

    def wait(self, copy: Callable[[], None]) -> None:
        copy()

    def let_go(self, flat: Tensor) -> None:
        poisoned(flat)

    def _late(self, fault: Fault, copy: Callable[[], None]) -> Callable[[], None]:
        return (lambda: None) if self._fault == fault else copy


class LateStreams(StreamCopies):
    """Copies on streams, which the card runs as late as events allow (`tests/devices.py`).

    fault  as for `LateCopies`, or one of ORDERS
    """

    def __init__(self, fault: str | None = None, shares_host: bool = True):
        super().__init__(DEVICE, shares_host and fault != "brings back before it is out")
        self._fault = fault

    def out(self, flat: Tensor, host: Any, offset: int) -> Copy:
        if self._fault == "brings back before it is out":  # memory of a model that is gone may hold the right bytes
            with unseen():
                host[offset : offset + flat.nbytes].fill_(POISON)
        with self._without_waiting("copies out before it is computed"):
            copy = super().out(flat, host, offset)
        return None if self._fault in ("lets go before the copy out", "brings back before it is out") else copy

    def back(self, host: Any, offset: int, flat: Tensor) -> Copy:
        with self._without_waiting("brings back where compute still reads"):
            copy = super().back(host, offset, flat)
        return None if self._fault == "uses before the copy back" else copy

    def wait(self, copy: Copy) -> None:
        if copy is not None:
            super().wait(copy)

    def abandon(self, copy: Copy) -> None:
        if copy is not None:
            super().abandon(copy)

    @contextlib.contextmanager
    def _without_waiting(self, fault: str) -> Iterator[None]:
        """The copy's stream does not wait for compute, nor for the other stream."""
        if self._fault != fault:
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)
            yield


def late_copies(fault: Fault | None = None, *, shares_host: bool = True) -> Copies:
    """Copies that end as late as they may, wherever tests run."""
    return LateCopies(fault) if DEVICE.type == "cpu" else LateStreams(fault, shares_host)


def bytes_of(flat: Tensor) -> np.ndarray:
    with unseen():
        return flat.view(torch.uint8).numpy()


def poisoned(flat: Tensor) -> Tensor:
    with unseen():
        flat.view(torch.uint8).fill_(POISON)
    return flat
