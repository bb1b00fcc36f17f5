"""Attention on a CUDA device: which kernel is taken, its call, and its dropout. (Rules 6 and 7 of `substitute.py`)"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch

from remat.cuda_kernels.autocast import LOW_PRECISION, Call, CudnnAttention, Device, Tensor, cast
from remat.workload.target import Target

aten = torch.ops.aten


def dropout(device: Device, function: Call, input: Tensor, p: float, train: bool) -> Tensor:
    """Run dropout by Rule 6. Dropout in place or of whole features has no row: CUDA fuses neither."""
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout(input, p, True)[0]
    return function(input, p, train)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The arguments of one call of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


Takes = Callable[[_Attention], bool]


def attention(
    device: Device,
    function: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention by Rule 7.

    Raises RuntimeError where the script allows none of the kernels that take the call.
    """
    if device.autocast:
        query, key, value, attn_mask = cast((query, key, value, attn_mask), device.autocast)
    call = _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for is_allowed, takes, run in _kernels(device.cudnn_attention):
        if is_allowed() and takes(call):
            return run(call)
    raise RuntimeError("No available kernel. Aborting execution.")  # as torch says


def _kernels(
    cudnn: CudnnAttention | None,
) -> Iterable[tuple[Callable[[], bool], Takes, Callable[[_Attention], Tensor]]]:
    """Return the kernels in the order in which CUDA tries them: whether a script allows one, what it takes, its call.

    `sdpa_kernel` and `torch.backends.cuda.enable_flash_sdp` allow them.
    """
    allowed = torch.backends.cuda
    by_cudnn = (allowed.cudnn_sdp_enabled, functools.partial(_cudnn_takes, cudnn or CudnnAttention()), _cudnn_attention)
    others = (
        (allowed.flash_sdp_enabled, _flash_takes, _flash_attention),
        (allowed.mem_efficient_sdp_enabled, _efficient_takes, _efficient_attention),
        (allowed.math_sdp_enabled, lambda _: True, _unfused_attention),
    )
    return (*others, by_cudnn) if cudnn is None else (by_cudnn, *others)


def _fused_takes(call: _Attention, dtypes: tuple[torch.dtype, ...], *, gqa: bool, one_kv: bool = True) -> bool:
    """Return whether a call meets the requirements of every fused attention kernel."""
    query, key, _ = call.tensors
    if any(t.dim() != 4 or t.dtype != query.dtype or t.shape[0] != query.shape[0] for t in call.tensors):
        return False
    heads = [t.shape[1] for t in call.tensors]
    if call.enable_gqa and gqa:
        heads_fit = heads[0] % heads[1] == 0 == heads[0] % heads[2] and (heads[1] == heads[2] or not one_kv)
    else:
        heads_fit = heads[0] == heads[1] == heads[2]
    dense = call.tensors if call.mask is None else (*call.tensors, call.mask)
    return (
        query.dtype in dtypes
        and heads_fit
        and query.shape[2] > 0
        and key.shape[2] > 0
        and all(t.stride(-1) == 1 for t in dense)
    )


def _flash_takes(call: _Attention) -> bool:
    query, key, value = call.tensors
    return (
        call.mask is None
        and _fused_takes(call, LOW_PRECISION, gqa=True)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and (not call.is_causal or query.shape[2] == key.shape[2])
    )


def _efficient_takes(call: _Attention) -> bool:
    query, key, value = call.tensors
    alignment = 8 if query.dtype in LOW_PRECISION else 4
    return (
        _fused_takes(call, (*LOW_PRECISION, torch.float32), gqa=False)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def cudnn_attention_of(target: Target) -> CudnnAttention | None:
    """Return the limits of cuDNN's attention on `target`; None if it is not tried first.

    sdp_utils.cpp: heads up to 256 wide on compute capability 9.0 with cuDNN 9.10.0 or later (seen with torch 2.11 on an
    H100, and with 2.13's CUDA build); elsewhere two shapes from 2.14 on with a cuDNN after 9.22.0.
    `check_cudnn_dropout` is there from torch 2.12 on.
    """
    if not target.prefers_cudnn:
        return None
    return CudnnAttention(
        any_dropout=target.torch_release < (2, 12),
        widest=256 if target.capability == 90 and target.cudnn >= (9, 10) else 128,
        wide_heads=target.torch_release >= (2, 14) and target.cudnn > (9, 22, 0) and target.capability != 107,
    )


def _cudnn_takes(cudnn: CudnnAttention, call: _Attention) -> bool:
    query, key, value = call.tensors
    widths = query.shape[-1], value.shape[-1]
    return (
        _fused_takes(call, LOW_PRECISION, gqa=True, one_kv=False)
        and (max(widths) <= cudnn.widest or (cudnn.wide_heads and widths in ((192, 128), (256, 256))))
        and query.shape[-1] % 8 == 0 == value.shape[-1] % 8
        and key.shape[2] > 1
        and (cudnn.any_dropout or (call.dropout_p * 16).is_integer())
        and (call.dropout_p == 0 or query.shape[2] > 1)
        and (call.mask is None or (call.mask.dim() in (2, 4) and not call.mask.requires_grad))
    )


def _flash_attention(call: _Attention) -> Tensor:
    """Run flash attention: heads are padded to a multiple of eight, and the padded tensors are saved."""
    size = call.query.shape[-1]
    padded = [torch.nn.functional.pad(t, (0, -size % 8)) if size % 8 else t for t in call.tensors]
    scale = size**-0.5 if call.scale is None else call.scale
    output = aten._scaled_dot_product_flash_attention(*padded, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return output[..., :size] if size % 8 else output


def _cudnn_attention(call: _Attention) -> Tensor:
    bias = _additive(call.mask, call.query.dtype, -65504.0)
    return aten._scaled_dot_product_cudnn_attention(
        *call.tensors, bias, _needs_grad(call), call.dropout_p, call.is_causal, False, scale=call.scale
    )[0]


def _efficient_attention(call: _Attention) -> Tensor:
    """Run efficient attention: the bias gets rows of a multiple of eight, then is expanded without a copy."""
    bias = _additive(call.mask, call.query.dtype)
    if bias is not None:
        if any(stride % 8 for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            length = bias.shape[-1]
            bias = torch.nn.functional.pad(bias, (0, 8 - length % 8))[..., :length]
        bias = bias.expand(*call.query.shape[:3], call.key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        *call.tensors, bias, _needs_grad(call), call.dropout_p, call.is_causal, scale=call.scale
    )[0]


def _unfused_attention(call: _Attention) -> Tensor:
    """Run `_scaled_dot_product_attention_math` step by step: its dropout and its sums differ on fakes.

    As in C++, the copies of `query`, `key` and `value` live until it returns.
    """
    dtype = call.query.dtype
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    upcast = dtype in LOW_PRECISION and not reduced
    query, key, value = (t.float() if upcast else t for t in call.tensors)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    root = abs(scale) ** 0.5
    scaled = query * (-root if scale < 0 else root)
    mask = _additive(call.mask, dtype)
    if call.is_causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(lower, query.dtype)
    keys, values = key, value
    if call.enable_gqa and query.shape[-3] != key.shape[-3]:
        keys = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        values = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(scaled, keys.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if call.dropout_p > 0:
        weights = dropout(Device(None), torch.dropout, weights, call.dropout_p, True)
    outputs = weights.to(dtype), torch.matmul(weights, values).to(dtype)  # evaluated from right to left, as by gcc
    return outputs[1]


def _additive(mask: Tensor | None, dtype: torch.dtype, minimum: float = -torch.inf) -> Tensor | None:
    """Turn a bool mask into one that is added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), minimum, torch.scalar_tensor(0.0, dtype=dtype))


def _needs_grad(call: _Attention) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)
