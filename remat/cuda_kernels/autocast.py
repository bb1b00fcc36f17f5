"""Casts: what autocast casts on a CUDA device, and the copies of weights that it keeps. (Rules 1-4, `substitute.py`)"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Tensor = torch.Tensor
Call = Callable[..., Any]
LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class CudnnAttention:
    """Limits of cuDNN's attention: any dropout, or multiples of 1/16; the widest heads; two shapes beside."""

    any_dropout: bool = False
    widest: int = 128
    wide_heads: bool = False


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that rules depend on: the autocast dtype, and cuDNN's attention if it is tried first."""

    autocast: torch.dtype | None
    cudnn_attention: CudnnAttention | None = None


class _WeightCasts:
    """The copies of weights that the outermost autocast context keeps: id -> (weight, copy).

    The weight is held as well, so that its id stays its own.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.copies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


_weight_casts = _WeightCasts()


@contextlib.contextmanager
def weight_cast_cache() -> Iterator[None]:
    """Cast each float32 leaf that requires a gradient once, and keep the copy until the outermost exit."""
    _weight_casts.depth += 1
    try:
        yield
    finally:
        _weight_casts.depth -= 1
        if _weight_casts.depth == 0:
            _weight_casts.copies.clear()


def enter_autocast(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Replace `_enter_autocast` in a graph: casts are decided already, only the cache is opened."""
    context = weight_cast_cache()
    context.__enter__()
    return context


def exit_autocast(context: contextlib.AbstractContextManager[None]) -> None:
    """Replace `_exit_autocast` in a graph."""
    context.__exit__(None, None, None)


def dtype_of_region(
    outer: torch.dtype | None,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.dtype | None:
    if not enabled:
        return None
    return dtype or outer or torch.get_autocast_dtype(device_type)


def eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(values: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Cast every tensor of `values` that autocast casts to `dtype`.

    The last argument is cast first, as compiled C++ does (gcc evaluates the arguments of a call from right to left); a
    list of tensors is one argument, and is cast from the left. The order decides which casts are alive together.
    """
    return tuple(reversed([tree_map(functools.partial(cast_one, dtype=dtype), value) for value in reversed(values)]))


def cast_call(
    args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of a call; keyword arguments come last in its signature."""
    named = cast([*kwargs.values()], dtype)
    return cast(args, dtype), dict(zip(kwargs, named, strict=True))


def cast_one(value: Any, dtype: torch.dtype) -> Any:
    """Cast `value` if it is a tensor that autocast casts."""
    if not eligible(value) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and _weight_casts.depth):
        return value.to(dtype)
    key = (id(value), dtype)
    if key not in _weight_casts.copies:
        _weight_casts.copies[key] = value, value.to(dtype)
    return _weight_casts.copies[key][1]


def lower_precision(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Run a function in the autocast dtype, by Rule 1."""
    if device.autocast:
        args, kwargs = cast_call(args, kwargs, device.autocast)
    return function(*args, **kwargs)


def float32(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Run a function in float32 under autocast, by Rule 2."""
    if device.autocast:
        args, kwargs = cast_call(args, kwargs, torch.float32)
    return function(*args, **kwargs)


def float32_result(device: Device, function: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Ask a function for a float32 result under autocast, by Rule 3."""
    if device.autocast and eligible(input) and asked_dtype(args, kwargs) is None:
        kwargs["dtype"] = torch.float32
    return function(input, *args, **kwargs)


def promote(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Run a function in its widest dtype under autocast, by Rule 4."""
    if device.autocast:
        tensors = [value for value in tree_leaves((args, kwargs)) if eligible(value)]
        widest = torch.float32 if any(t.dtype == torch.float32 for t in tensors) else device.autocast
        args, kwargs = cast_call(args, kwargs, widest)
    return function(*args, **kwargs)


def asked_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    positional = next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    return positional or kwargs.get("dtype")
