"""Written parameters: what a forward writes into the parameters of its model, undone.

A teacher that follows its student, a codebook, a spectral norm: some forwards write into parameters, in place or by
giving them other data. Parameters are too large to be copied before every forward that is run beside training. So a
parameter is copied to the host when it is about to be written into, and data that was taken from one is held meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from remat._torch.training import UnseenMode, is_wrapper, without_modes
from remat.capture.schemas import written


class NoRoom(BaseException):
    """Ends a forward in front of a write that there is no room to undo; no other code catches it."""


class WrittenParameters(UnseenMode):
    """Notes writes into parameters of `model` while it is entered; `put_back` undoes them afterwards.

    room_bytes  for copies of parameters that are on the host themselves, where another forward raises NoRoom
    """

    def __init__(self, model: nn.Module, room_bytes: float = math.inf):
        super().__init__()
        self._room_bytes = room_bytes
        with without_modes():
            self._data = [(p, p.data) for p in model.parameters() if not is_wrapper(p)]
        self._of_storage: dict[int, list[torch.Tensor]] = {}
        for _, data in self._data:
            if data.layout is torch.strided:
                self._of_storage.setdefault(_storage(data), []).append(data)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written(func, args, kwargs):
            if tensor.layout is torch.strided and not is_wrapper(tensor):
                for data in self._of_storage.pop(_storage(tensor), ()):
                    self._room_bytes -= data.nbytes if data.device.type == "cpu" else 0
                    if self._room_bytes < 0:
                        raise NoRoom
                    self._copies.append((data, data.to("cpu", copy=True)))
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        """Give every parameter its former data, and the data their former values."""
        with torch.no_grad(), without_modes():
            for data, numbers in self._copies:
                data.copy_(numbers)
            for parameter, data in self._data:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
