"""Kernel results: dtypes and storages of results that kernels choose otherwise than their fakes do.

Which operators differ was found by running some 200 layers, losses and functions of torch, forward and backward, under
autocast to bfloat16 and float16 and with weights of 16 bits, on the CPU (torch 2.13). `tests/test_kernel_results.py`
runs those that differ, and their like. Strides have a module of their own (`layouts.py`).

Rule 1  A normalization whose parameters have another dtype than its input keeps its statistics in that of the first of
        them (`param_scalar_type` in `native/cpu/mixed_data_type.h`). With fp32 statistics, the fake of group norm's
        gradient is fp32 too; the kernel's is as its input.
Rule 2  The norms of half-precision weights are kept in fp32, on every device (`WeightNorm.cpp`, `WeightNorm.cu`); fakes
        do so for bfloat16 alone.
Rule 3  On the CPU, bags that are summed need no table of their embeddings, in bfloat16 neither; a table that is made is
        made one entry longer (`EmbeddingBag.cpp`). CUDA's kernel always makes the table, and places of a maximum for
        that alone (`EmbeddingBag.cu`), as its fakes do.
Rule 4  Some losses are reduced into the first of their elements, on every device: the scalar keeps the memory of all
        (`Loss.cpp`). Folding columns into an image makes a tensor like the columns and shrinks it, which keeps its
        memory (`Col2Im.cpp`, `Col2Im.cu`).
Rule 5  Two results of an operator are two tensors, also the gradients of an LSTM's two biases, which are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_REDUCED_IN_PLACE = {
    aten.binary_cross_entropy.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
}
_FOLD = aten.col2im.default
_PARAMETERS_AT = {  # in the arguments of normalizations
    aten.native_batch_norm.default: slice(1, 5),
    aten.native_group_norm.default: slice(1, 3),
    aten.native_layer_norm.default: slice(2, 4),
}
_BAGS = aten._embedding_bag.default
_SUM, _MAXIMUM = 0, 2  # modes of bags
_MODE, _PADDING = 4, 8  # arguments of bags


def as_kernel(func: Any, args: Any, out: Any, kernels_of: str | None = None) -> Any:
    """Correct `out` to what the real kernel makes, where the fake kernel differs.

    kernels_of  type of the device whose kernel it is, if not that of `out`
    """
    if func in _REDUCED_IN_PLACE and isinstance(out, FakeTensor) and out.dim() == 0:  # Rule 4
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return out.new_empty(elements).as_strided((), ())
    if func is _FOLD and isinstance(out, FakeTensor) and args[0].numel() > out.numel():
        return out.new_empty(args[0].numel()).as_strided(out.shape, out.stride())
    if isinstance(out, tuple) and len(out) > len({*map(id, out)}):
        out = _apart(out)
    if not isinstance(out, (tuple, list)) or not isinstance(out[0], FakeTensor):
        return out
    correct = _EVERYWHERE.get(func)
    if correct is None and out[0].device.type == "cpu":
        correct = _bagged_on_cuda if kernels_of == "cuda" and func is _BAGS else _ON_CPU.get(func)
    return out if correct is None else correct(func, args, out)


def _normalized(func: Any, args: Any, out: Any) -> Any:
    value, *statistics = out
    dtype = next((each.dtype for each in args[_PARAMETERS_AT[func]] if each is not None), value.dtype)
    if statistics[0].dtype == dtype:
        return out
    return value, *(each.to(dtype) for each in statistics)


def _group_norm_backward(func: Any, args: Any, out: Any) -> Any:
    _, given = args[:2]
    gradient, *others = out
    return out if gradient.dtype == given.dtype else (gradient.to(given.dtype), *others)


def _weight_norm(func: Any, args: Any, out: Any) -> Any:
    value, norms = out
    return (value, norms.float()) if norms.dtype == torch.float16 else out


def _bagged(func: Any, args: Any, out: Any) -> Any:
    value, table, *others = out
    mode, padding = (
        args[place] if len(args) > place else default for place, default in ((_MODE, _SUM), (_PADDING, -1))
    )
    contiguous = args[0].stride(1) == 1 and value.stride(1) == 1
    if mode == _SUM and padding < 0 and contiguous and args[0].dtype == torch.bfloat16:
        return value, table.new_empty(0), *others
    return (value, table.new_empty(len(table) + 1)[:-1], *others) if len(table) else out


def _bagged_on_cuda(func: Any, args: Any, out: Any) -> Any:
    value, _, _, places = out
    indices, offsets = args[1:3]
    mode = args[_MODE] if len(args) > _MODE else _SUM
    table = places.new_empty(len(indices))
    return value, table, places.new_empty(len(offsets)), places if mode == _MAXIMUM else places.new_empty(0)


_Correct = Callable[[Any, Any, Any], Any]
_ON_CPU: dict[Any, _Correct] = {
    **dict.fromkeys(_PARAMETERS_AT, _normalized),
    aten.native_group_norm_backward.default: _group_norm_backward,
    _BAGS: _bagged,
}
_EVERYWHERE: dict[Any, _Correct] = {aten._weight_norm_interface.default: _weight_norm}


def _apart(out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace repeated tensors of `out` by tensors of their own. (Rule 5)"""
    again = [any(value is before for before in out[:place]) for place, value in enumerate(out)]
    return tuple(
        torch.empty_like(value) if second and isinstance(value, FakeTensor) else value
        for value, second in zip(out, again, strict=True)
    )
