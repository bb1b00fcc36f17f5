"""Attributes of parameters and buffers: they are kept beside the numbers, and a forward may read them.

bitsandbytes keeps the scales of a 4-bit weight so (`weight.quant_state`, an object that holds tensors and another such
object), mup the widths of a layer (`weight.infshape`), `nn.Buffer` whether it is saved, and people a mask or a gain. A
fake of the weight needs them too. Tensors among them take memory as parameters do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from remat._torch.step_fakes import names_of_fakes

HOLDERS = ("quant_state",)  # attributes of parameters that are objects which hold tensors


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a library keeps in an object beside `parameter` what it needs for it to mean anything."""
    return any(hasattr(parameter, name) for name in HOLDERS)


def names_beside(tensor: torch.Tensor) -> list[str]:
    """List the attributes of `tensor` that are not torch's own."""
    return [name for name in vars(tensor) if name not in names_of_fakes()] if vars(tensor) else []


def tensors_beside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that are attributes of `tensor`, and those of its `HOLDERS`."""
    for name in names_beside(tensor):
        value = vars(tensor)[name]
        if name in HOLDERS or isinstance(value, torch.Tensor):
            yield from _held(value)


def carry_over(tensor: torch.Tensor, twin: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copy the attributes of `tensor` to `twin`, with `make` applied to those that are tensors."""
    for name in names_beside(tensor):
        value = vars(tensor)[name]
        is_made = name in HOLDERS or isinstance(value, torch.Tensor)
        vars(twin)[name] = _made_of(value, make) if is_made else value


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
