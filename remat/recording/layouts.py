"""Layouts: strides of results that kernels choose otherwise than their fakes do.

A convolution copies an argument whose layout is not that of the others, and a result keeps its layout until the next
copy. So where a fake is laid out as the real result is not, the copy is predicted in the wrong place, or not at all:
the gradient of `mse_loss` is contiguous whatever the network's layout, and that of its fake is not.

Which operators differ was found by running some 330 of them, forward and backward, in six layouts, on the CPU and on
PyTorch's CUDA build (torch 2.13); `tests/test_layouts.py` repeats it. They stand in a table, for a plan may be for a
device that is not there. Running each kind of call once on a small tensor was rejected for that, and because small
arguments cannot be made for any operator.

Left out: convolutions in one dimension, and fused RMS norm's backward, whose inputs are transposed, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from remat._torch.recording import elementwise_strides, memory_format_of

aten = torch.ops.aten
Strides = Sequence[int]
Layout = Callable[[Any, torch.Tensor], Strides]  # the strides of a result, from the arguments and its fake


def _plain(args: Any, out: torch.Tensor) -> Strides:
    return torch.empty_like(out, memory_format=torch.contiguous_format).stride()


def _in_format_of(place: int) -> Layout:
    """Lay the result out in the memory format of an argument."""
    return lambda args, out: torch.empty_like(out, memory_format=memory_format_of(args[place])).stride()


def _like(place: int) -> Layout:
    """Lay the result out as an argument of its shape."""
    return lambda args, out: (torch.empty_like(args[place]) if args[place].shape == out.shape else out).stride()


def _elementwise(args: Any, out: torch.Tensor) -> Strides:
    """Lay the result out as a kernel does that passes over its arguments in order: the first one decides."""
    given = torch.broadcast_tensors(*(value for value in args if isinstance(value, torch.Tensor)))
    return _plain(args, out) if all(each.is_contiguous() for each in given) else elementwise_strides(*given)


def _rolled(args: Any, out: torch.Tensor) -> Strides:
    return (_in_format_of(0) if args[2:] and args[2] else _plain)(args, out)


def _by_noise(args: Any, out: torch.Tensor) -> Strides:
    _, _, noise, _, _, training, _ = args
    return torch.empty_like(noise).stride() if training else out.stride()


def _normalised_backward(args: Any, out: torch.Tensor) -> Strides:
    """Lay a gradient out as CUDA does without cuDNN: only training has a kernel for channels that come last."""
    layout = memory_format_of(args[1])
    return (_in_format_of(1) if args[7] and args[1].is_contiguous(memory_format=layout) else _plain)(args, out)


_ON_ALL: dict[Any, Layout] = {
    aten._log_softmax_backward_data.default: _plain,
    aten.binary_cross_entropy.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.elu_backward.default: _elementwise,
    aten.glu_backward.default: _plain,
    aten.hardsigmoid_backward.default: _elementwise,
    aten.hardswish_backward.default: _elementwise,
    aten.hardtanh_backward.default: _elementwise,
    aten.huber_loss_backward.default: _plain,
    aten.log_sigmoid_backward.default: _like(0),
    aten.logit_backward.default: _elementwise,
    aten.mse_loss_backward.default: _plain,
    aten.native_layer_norm_backward.default: _plain,
    aten.pow.Scalar: _plain,
    aten.rrelu_with_noise.default: _plain,
    aten.rrelu_with_noise_backward.default: _by_noise,
    aten.smooth_l1_loss_backward.default: _plain,
    aten.softplus_backward.default: _elementwise,
    aten.upsample_bilinear2d.default: _in_format_of(0),
    aten.xlogy.Tensor: _elementwise,
}
_LAYOUTS: dict[str, dict[Any, Layout]] = {
    "cpu": {
        **_ON_ALL,
        aten.channel_shuffle.default: _in_format_of(0),
        aten.log_sigmoid_forward.default: _plain,
        aten.max_unpool2d.default: _in_format_of(0),
        aten.native_batch_norm.default: _in_format_of(0),
        aten.native_batch_norm_backward.default: _in_format_of(1),
        aten.native_group_norm.default: _in_format_of(0),
        aten.native_group_norm_backward.default: _in_format_of(1),
        aten.reflection_pad2d_backward.default: _in_format_of(1),
        aten.reflection_pad3d.default: _in_format_of(0),
        aten.reflection_pad3d_backward.default: _in_format_of(1),
        aten.replication_pad2d_backward.default: _in_format_of(1),
        aten.replication_pad3d.default: _in_format_of(0),
        aten.replication_pad3d_backward.default: _in_format_of(1),
        aten.roll.default: _rolled,
        aten.upsample_bicubic2d.default: _in_format_of(0),
        aten.upsample_nearest2d.default: _in_format_of(0),
    },
    "cuda": {
        **_ON_ALL,
        aten.native_batch_norm_backward.default: _normalised_backward,
        aten.pixel_shuffle.default: _plain,
        aten.pixel_unshuffle.default: _plain,
        aten.reflection_pad2d.default: _plain,
        aten.replication_pad2d.default: _plain,
        aten.upsample_trilinear3d.default: _in_format_of(0),
    },
}

# Of dimensions of size 1, by whose strides a convolution of one channel or one pixel chooses its layout, fakes keep
# strides that kernels make anew: in views, and in elementwise results of contiguous tensors of one shape.
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_KEEP_STRIDES = {aten.clone.default, aten.hardtanh.default}


def laid_out(func: Any, args: Any, out: Any, kernels_of: str | None = None) -> Any:
    """Correct the strides of `out`, and of further results of its shape, to those of the real kernel.

    kernels_of  type of the device whose kernel it is, if not that of `out`
    """
    first = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(first, FakeTensor):
        return out
    layout = _LAYOUTS.get(kernels_of or first.device.type, {}).get(func)
    if layout is None:
        return out
    strides = layout(args, first)
    if isinstance(out, torch.Tensor):
        return _with_strides(out, strides)
    return tuple(
        _with_strides(each, strides) if isinstance(each, torch.Tensor) and each.shape == first.shape else each
        for each in out
    )


def _with_strides(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)


def with_ones_laid_out(func: Any, args: Any, out: Any) -> Any:
    """Correct the strides of dimensions of size 1 to those of the real kernel, on any device."""
    if not isinstance(out, FakeTensor) or 1 not in out.shape:
        return out
    if func in _VIEWS:
        step = args[0].stride(-1) if args[0].dim() else 1
    elif _is_elementwise_in_order(func, args, out):
        step = 1
    else:
        return out
    strides: list[int] = []
    for size, stride in zip(reversed(out.shape), reversed(out.stride()), strict=True):
        strides.insert(0, step if size == 1 else stride)
        step = size * strides[0]
    return _with_strides(out, strides)


def _is_elementwise_in_order(func: Any, args: Any, out: torch.Tensor) -> bool:
    """Return whether a kernel passes over contiguous tensors of the result's shape alone (`TensorIterator.cpp`)."""
    if torch.Tag.pointwise not in func.tags or func._schema.is_mutable or func in _KEEP_STRIDES:
        return False
    wrapped = func._overloadname == "Scalar"
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, torch.Tensor):
            wrapped |= value.shape != out.shape or not value.is_contiguous()
        else:
            wrapped |= isinstance(argument.type, torch.TensorType)  # a number in a tensor's place
    return not wrapped
