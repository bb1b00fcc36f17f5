"""Forward and backward once more, within an optimizer's step, on fake tensors.

An optimizer that asks for a closure (sharpness-aware minimisation) runs the step again with its own tensors alive
beside it. Nothing runs here a second time: gradients are made, and what is alive meanwhile that is neither a gradient
nor kept from step to step is noted. It counts as there all the time, so a plan's peak is that of the repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from remat.recording.tracker import Tracker


class RepeatedStep:
    """The closure for the optimizer of `parameters`."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device):
        self._parameters, self._device = parameters, device
        self._tracker: Tracker | None = None
        self._first = 0
        self._beside: list[set[int]] = []

    def begin(self, tracker: Tracker) -> None:
        """Note that a step of the optimizer begins, under `tracker`."""
        self._tracker, self._first, self._beside = tracker, len(tracker.storages), []

    def __call__(self) -> torch.Tensor:
        """Stand in for an optimizer's closure: make gradients, and return a loss."""
        assert self._tracker is not None
        for parameter in self._parameters:
            parameter.grad = None
        made = enumerate(self._tracker.storages[self._first :], self._first)
        alive = {index for index, storage in made if storage.death is None}
        self._beside.append(alive - {self._tracker.storage_of(parameter) for parameter in self._parameters})
        for parameter in self._parameters:
            parameter.grad = torch.empty_like(parameter)
        return torch.empty((), device=self._device)

    def beside_bytes(self, state: Iterable[torch.Tensor]) -> int:
        """Return the peak bytes beside a repetition in the last step, without gradients and `state`."""
        tracker = self._tracker
        if tracker is None or not self._beside:
            return 0
        # SAM makes its kept tensor the parameter again: meanwhile that storage existed beside the parameter's own.
        now_parameters = {tracker.storage_of(parameter) for parameter in self._parameters}
        kept = {tracker.storage_of(tensor) for tensor in state} - now_parameters
        return max(sum(tracker.storages[index].size_bytes for index in found - kept) for found in self._beside)
