"""State of a model on fake tensors: its buffers have no data but the known values of flags and counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from remat._torch.training import without_modes
from remat.capture.holders import NUMBER
from remat.capture.model_state import ModelState, Numbers
from remat.recording.known_values import KnownValues


class StateOnFakes(ModelState):
    """The state of `model` and `step` at the moment of construction, with the numbers that `known` follows."""

    def __init__(self, model: nn.Module, step: Callable[..., Any], known: KnownValues):
        super().__init__(model, data=False, step=step)
        self._known, self._values = known, known.of_buffers()

    def put_back(self) -> None:
        super().put_back()
        self.putting_flags_back()()

    def putting_flags_back(self) -> Callable[[], None]:
        """Return a function that restores the flags alone."""
        return functools.partial(self._known.give_buffers, self._values)

    def changes(self, *, statistics: bool = True) -> dict[str, str]:
        now, was = (flags_of(self.model, self._known, values) for values in (self._known.of_buffers(), self._values))
        changed = [path for path, value in now.items() if was.get(path) != value]
        return {**dict.fromkeys(changed, NUMBER), **super().changes(statistics=statistics)}


class NumbersOnFakes(Numbers):
    """The numbers of a state of some `names`, and all its flags."""

    def __init__(self, state: StateOnFakes | None, names: Collection[str], *, lists: Collection[str] = ()):
        super().__init__(state, names, lists=lists)
        self._put_flags_back = None if state is None else state.putting_flags_back()  # no tensors of the state

    def put_back(self) -> None:
        super().put_back()
        if self._put_flags_back is not None:
            self._put_flags_back()


def flags_of(
    model: nn.Module, known: KnownValues, values: Mapping[torch.UntypedStorage, torch.Tensor]
) -> dict[str, list[Any]]:
    """Return those of the `values` of buffers of `model` that code reads numbers of, by path."""
    asked = {path: buffer.untyped_storage() for path, buffer in model.named_buffers() if known.is_asked(buffer)}
    with without_modes():
        return {path: values[storage].flatten().tolist() for path, storage in asked.items() if storage in values}
