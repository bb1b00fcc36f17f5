"""Tensors beside a parameter: what a library keeps in attributes of it and needs for it to mean anything.

bitsandbytes keeps the scales of a 4-bit weight so (`weight.quant_state`, an object that holds tensors and another such
object). They are neither parameters nor buffers, take memory like those, and a fake of the weight needs fakes of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

HOLDERS = ("quant_state",)  # attributes of parameters that hold tensors


def tensors_beside(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that attributes of `parameter` hold."""
    for name in HOLDERS:
        yield from _held(getattr(parameter, name, None))


def carry_over(parameter: torch.Tensor, twin: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copy the attributes of `parameter` to `twin`, with `make` applied to tensors in them."""
    if not any(hasattr(parameter, name) for name in HOLDERS):
        return
    for name, value in vars(parameter).items():
        setattr(twin, name, _made_of(value, make) if name in HOLDERS else value)


def _held(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for inner in vars(value).values():
            yield from _held(inner)


def _made_of(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return make(value)
    if not any(True for _ in _held(value)):
        return value
    made = copy.copy(value)
    for name, inner in vars(value).items():
        setattr(made, name, _made_of(inner, make))
    return made
