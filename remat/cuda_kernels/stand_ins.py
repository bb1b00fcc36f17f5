"""Stand-ins for kernels of CUDA that a CPU build of torch lacks.

On the CPU `_fused_rms_norm` is a sum of parts, and `native_layer_norm` keeps 16-bit statistics. These have the shapes
of CUDA's kernels and no arithmetic: they run on fake tensors only, as `torch.ops.remat`.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.cuda_kernels.autocast import LOW_PRECISION, Tensor

torch.library.define(
    "remat::native_layer_norm", "(Tensor x, int dims, Tensor? w, Tensor? b) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "remat::native_layer_norm_backward",
    "(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor? w, Tensor? b) -> (Tensor, Tensor?, Tensor?)",
)
torch.library.define("remat::_fused_rms_norm", "(Tensor x, int dims, Tensor? w) -> (Tensor, Tensor)")
torch.library.define(
    "remat::_fused_rms_norm_backward", "(Tensor g, Tensor x, Tensor rstd, Tensor? w) -> (Tensor, Tensor?)"
)


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _row_statistic(x: Tensor, dims: int) -> Tensor:
    """Make one number a row, float32 for 16-bit inputs."""
    dtype = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
    return x.new_empty(*x.shape[: x.dim() - dims], *[1] * dims, dtype=dtype)


@torch.library.register_fake("remat::native_layer_norm")
def _layer_norm_fake(x: Tensor, dims: int, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
    return _contiguous_like(x), _row_statistic(x, dims), _row_statistic(x, dims)


@torch.library.register_fake("remat::native_layer_norm_backward")
def _layer_norm_backward_fake(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None
) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else _contiguous_like(t) for t in (x, w, b))


@torch.library.register_fake("remat::_fused_rms_norm")
def _rms_norm_fake(x: Tensor, dims: int, w: Tensor | None) -> tuple[Tensor, ...]:
    return _contiguous_like(x), _row_statistic(x, dims)


@torch.library.register_fake("remat::_fused_rms_norm_backward")
def _rms_norm_backward_fake(g: Tensor, x: Tensor, rstd: Tensor, w: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else _contiguous_like(t) for t in (x, w))


def _layer_norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, w, b = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, *output[1:], w, b)


def _layer_norm_grad(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    x, w, b = torch.ops.remat.native_layer_norm_backward(g, *ctx.saved_tensors)
    return x, None, w, b


def _rms_norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, w = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], w)


def _rms_norm_grad(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    x, w = torch.ops.remat._fused_rms_norm_backward(g, *ctx.saved_tensors)
    return x, None, w


torch.library.register_autograd("remat::native_layer_norm", _layer_norm_grad, setup_context=_layer_norm_save)
torch.library.register_autograd("remat::_fused_rms_norm", _rms_norm_grad, setup_context=_rms_norm_save)
