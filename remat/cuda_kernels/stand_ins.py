"""Stand-ins for kernels of CUDA that a CPU build of torch lacks.

On the CPU `_fused_rms_norm` is a sum of parts, `native_layer_norm` keeps 16-bit statistics, and a GRU's cell has no
fused kernel. These have the shapes of CUDA's kernels and no arithmetic: they run on fake tensors only, as
`torch.ops.remat`.
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
torch.library.define(
    "remat::_thnn_fused_gru_cell",
    "(Tensor gates, Tensor gates_h, Tensor hx, Tensor? b, Tensor? b_h) -> (Tensor, Tensor)",
)
torch.library.define(
    "remat::_thnn_fused_gru_cell_backward",
    "(Tensor g, Tensor workspace, bool has_bias) -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)",
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


@torch.library.register_fake("remat::_thnn_fused_gru_cell")
def _gru_cell_fake(
    gates: Tensor, gates_h: Tensor, hx: Tensor, b: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    return _contiguous_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


@torch.library.register_fake("remat::_thnn_fused_gru_cell_backward")
def _gru_cell_backward_fake(g: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = workspace.shape[0], 3 * g.shape[1]
    of_gates, of_biases = ([workspace.new_empty(*shape) for _ in range(2)] for shape in ((rows, width), (width,)))
    return *of_gates, _contiguous_like(g), *(of_biases if has_bias else (None, None))


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


def _gru_cell_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the inputs too, as ATen does: backward of backward computes the gates again."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _gru_cell_grad(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    *_, bias, workspace = ctx.saved_tensors
    return tuple(torch.ops.remat._thnn_fused_gru_cell_backward(g, workspace, bias is not None))


torch.library.register_autograd("remat::native_layer_norm", _layer_norm_grad, setup_context=_layer_norm_save)
torch.library.register_autograd("remat::_fused_rms_norm", _rms_norm_grad, setup_context=_rms_norm_save)
torch.library.register_autograd("remat::_thnn_fused_gru_cell", _gru_cell_grad, setup_context=_gru_cell_save)
