"""Copies between a device and the host on fake tensors, which have no data to copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remat.host.copies import InstantCopies
from remat.recording.tracker import Tracker


class TrackedCopies(InstantCopies):
    """The tracker sees memory come and go, and no operator."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker

    def host(self, size_bytes: int) -> Any:
        return self._tracker.elsewhere(size_bytes)

    def out(self, flat: Tensor, host: Any, offset: int) -> None:
        pass

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._tracker.allocated(elements, dtype, device)

    def back(self, host: Any, offset: int, flat: Tensor) -> None:
        pass


class TrackedStateCopies(TrackedCopies):
    """Copies of an optimizer's state: a fetch is an operator, since the step waits for it.

    State that leaves meanwhile goes in the other direction, and takes no longer.
    """

    def back(self, host: Any, offset: int, flat: Tensor) -> None:
        self._tracker.note_copy(flat.nbytes)
