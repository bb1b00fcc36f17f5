"""What a CUDA device would dispatch to, executed on fake CPU tensors.

Fake tensors on device "cuda" need a CUDA build of torch, and a step on fake CPU tensors dispatches the CPU's
kernels: another attention, another dropout mask, another autocast list, other bytes. So the *calls* of a
captured graph are replaced: each becomes the same call as CUDA makes it under `torch.autocast("cuda")`, with
the kernels that CUDA selects. Those run forward and backward on fakes of any device, and save what they save
on a GPU. The CPU's own autocast must be off while such a graph runs.

The one table is `RULES`: name of a dispatcher entry -> rule. Python functions of torch (`F.normalize`,
`F.multi_head_attention_forward`, `Tensor.norm`) have no row of their own: they are run as they are, and the
entries that they call are looked up. Composite C++ functions hide their inner calls, so those that matter
have a rule each. Rules are numbered:

  Rule 1   lower_precision  casts all floating tensors to the autocast dtype
  Rule 2   float32          casts them to float32
  Rule 3   float32_result   asks for a float32 result, unless a dtype was asked for
  Rule 4   promote          casts them to the widest among them
  Rule 5   softmax          rule 3; float16 -> float32 is one kernel on CUDA, without a copy of the input
  Rule 6   dropout          keeps a bool mask, fused, where 0 < p < 1
  Rule 7   attention        flash, memory-efficient, cuDNN or unfused, in the order that CUDA tries them
  Rule 8   linear           rule 1; adds the bias in place where the input cannot be flattened
  Rule 9   batch_norm       cuDNN's, if it takes these dtypes
  Rule 10  layer_norm       rule 2; statistics are float32, also for 16-bit inputs
  Rule 11  rms_norm         rule 2; one fused kernel, which saves the input and one number a row
  Rule 12  cross_entropy    log-softmax in the dtype of the logits, then rule 2 for the loss
  Rule 13  refuse           what is not modelled, by name

The dispatcher's own lists are in `ATen/autocast_mode.h`, the choice of attention in `sdp_utils.cpp`; both are
followed as of torch 2.13. A `TorchDispatchMode` was rejected: casts must be seen by autograd. So were
overriding kernels of the AutocastCPU key, which is global to the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from remat.errors import CaptureError

aten = torch.ops.aten
Tensor = torch.Tensor
Call = Callable[..., Any]
Rule = Callable[..., Any]
LOW_PRECISION = (torch.float16, torch.bfloat16)


def substitute(
    graph_module: torch.fx.GraphModule, autocast: torch.dtype | None, *, cudnn_attention: bool = False
) -> None:
    """Replace, in place, what the nodes call by what CUDA calls; nodes keep number, order and names.

    autocast         dtype of the `torch.autocast` around the step, None without
    cudnn_attention  whether the device prefers cuDNN's attention to flash attention, as compute capabilities
                     9 and 10 do
    """
    regions = [autocast]
    for node in graph_module.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            regions.append(_dtype_of_region(autocast, *node.args, **node.kwargs))
            node.target = enter_autocast
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            regions.pop()
            node.target = exit_autocast
        else:
            function = _called(node)
            if function is not None and _differs(function, regions[-1]):
                _retarget(node, _on_cuda(function, Device(regions[-1], cudnn_attention)))
    graph_module.recompile()


@dataclasses.dataclass(frozen=True)
class Device:
    """What a rule must know: the autocast dtype, and whether cuDNN's attention is tried first."""

    autocast: torch.dtype | None
    cudnn_attention: bool = False


@dataclasses.dataclass(frozen=True)
class OnCuda:
    """A function of torch as CUDA would run it: the target of a substituted node."""

    function: Call
    device: Device

    @property
    def __name__(self) -> str:  # fx writes it into the code of the graph
        return f"cuda_{_name(self.function)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.function, self.device, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_path, (*_path(self.function), self.device)


def run(function: Call, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch as CUDA would."""
    if _is_python(function):
        with _Inside(device):
            return _without_overrides(function)(*args, **kwargs)
    rule = RULES.get(_name(function))
    return rule(device, function, *args, **kwargs) if rule else function(*args, **kwargs)


class _Inside(TorchFunctionMode):
    """Applies the table to whatever a Python function of torch calls."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, self.device, args, kwargs or {})


class Untraced(TorchFunctionMode):
    """Applies the table to an untraced forward, whose autocast is what `torch.autocast("cpu", ...)` says."""

    def __init__(self, *, cudnn_attention: bool = False) -> None:
        super().__init__()
        self.cudnn_attention = cudnn_attention

    def __torch_function__(self, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if not _differs(func, autocast):
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return run(func, Device(autocast, self.cudnn_attention), args, kwargs or {})


# ---- casts -----------------------------------------------------------------------------------------------


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
    """Stands for `_enter_autocast` in a graph: casts are decided already, only the cache is opened."""
    context = weight_cast_cache()
    context.__enter__()
    return context


def exit_autocast(context: contextlib.AbstractContextManager[None]) -> None:
    """Stands for `_exit_autocast` in a graph."""
    context.__exit__(None, None, None)


def _dtype_of_region(
    outer: torch.dtype | None,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.dtype | None:
    if not enabled:
        return None
    return dtype or outer or torch.get_autocast_dtype(device_type)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """`values` with every tensor that autocast casts cast to `dtype`."""
    return tree_map(functools.partial(_cast_one, dtype), values)


def _cast_one(dtype: torch.dtype, value: Any) -> Any:
    if not _eligible(value) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and _weight_casts.depth):
        return value.to(dtype)
    key = (id(value), dtype)
    if key not in _weight_casts.copies:
        _weight_casts.copies[key] = value, value.to(dtype)
    return _weight_casts.copies[key][1]


def lower_precision(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Rule 1."""
    if device.autocast:
        args, kwargs = _cast((args, kwargs), device.autocast)
    return function(*args, **kwargs)


def float32(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Rule 2."""
    if device.autocast:
        args, kwargs = _cast((args, kwargs), torch.float32)
    return function(*args, **kwargs)


def float32_result(device: Device, function: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rule 3."""
    if device.autocast and _eligible(input) and _asked_dtype(args, kwargs) is None:
        kwargs["dtype"] = torch.float32
    return function(input, *args, **kwargs)


def promote(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Rule 4."""
    if device.autocast:
        tensors = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if _eligible(value)]
        widest = torch.float32 if any(t.dtype == torch.float32 for t in tensors) else device.autocast
        args, kwargs = _cast((args, kwargs), widest)
    return function(*args, **kwargs)


def _asked_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    positional = next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    return positional or kwargs.get("dtype")


# ---- kernels ---------------------------------------------------------------------------------------------


def softmax(device: Device, function: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Rule 5: softmax and log-softmax."""
    asked = _asked_dtype(args, kwargs)
    if asked is None and device.autocast and _eligible(input):
        asked = kwargs["dtype"] = torch.float32
    if input.dtype == torch.float16 and asked == torch.float32:
        dim = kwargs["dim"] if "dim" in kwargs else args[0]
        kernel = aten._log_softmax if "log" in _name(function) else aten._softmax
        return kernel(input, dim, True)
    return function(input, *args, **kwargs)


def dropout(device: Device, function: Call, input: Tensor, p: float, train: bool) -> Tensor:
    """Rule 6. Dropout in place and of whole features is not fused on CUDA either, and has no row."""
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout(input, p, True)[0]
    return function(input, p, train)


def linear(device: Device, function: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rule 8. torch adds the bias out of place for any subclass of Tensor, and fakes are one."""
    if device.autocast:
        input, weight, bias = _cast((input, weight, bias), device.autocast)
    if bias is None or input.dim() == 2 or input.is_contiguous():
        return function(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def batch_norm(
    device: Device,
    function: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Rule 9. Autocast leaves batch norm alone: it runs in the dtype of its input."""
    has_statistics = running_mean is not None and running_var is not None
    if (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (has_statistics or (running_mean is None and running_var is None and training))
        and input.dim() >= 3
        and input.shape[0] <= (880801 if training else 65535)
        and 0 < input.numel() < 2**31 - 1
    ):
        input = input.contiguous(memory_format=suggest_memory_format(input))
        return aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]
    return function(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)


def layer_norm(
    device: Device,
    function: Call,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Rule 10."""
    if device.autocast:
        input, weight, bias = _cast((input, weight, bias), torch.float32)
    if input.dtype in LOW_PRECISION:
        return torch.ops.remat.native_layer_norm(input, len(normalized_shape), weight, bias)[0]
    return function(input, normalized_shape, weight, bias, eps, cudnn_enable)


def rms_norm(
    device: Device,
    function: Call,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Rule 11. CUDA is unfused, as the CPU is, for mixed dtypes and channels-last inputs."""
    if device.autocast:
        input, weight = _cast((input, weight), torch.float32)
    same_dtype = weight is None or weight.dtype == input.dtype
    if same_dtype and suggest_memory_format(input) == torch.contiguous_format and not input.is_complex():
        return torch.ops.remat._fused_rms_norm(input, len(normalized_shape), weight)[0]
    return function(input, normalized_shape, weight, eps)


def cross_entropy(
    device: Device, function: Call, input: Tensor, target: Tensor, weight: Tensor | None = None, *rest: Any
) -> Tensor:
    """Rule 12. The C++ function asks log-softmax for the dtype of the logits, which autocast respects.

    `rest` is reduction, ignore_index, label_smoothing. Soft targets and label smoothing have no `nll_loss`
    alone in them; their sums are approximated by casting the logits.
    """
    if not device.autocast or not _eligible(input) or input.dtype == torch.float32:
        return function(input, target, weight, *rest)
    label_smoothing = rest[2] if len(rest) > 2 else 0.0
    if input.shape == target.shape or label_smoothing > 0:
        return function(*_cast((input, target, weight), torch.float32), *rest)
    logs = torch.log_softmax(input, 0 if input.dim() == 1 else 1, input.dtype)
    logs, weight = _cast((logs, weight), torch.float32)
    return torch._C._nn.nll_loss_nd(logs, target, weight, *rest[:2])


def refuse(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Rule 13."""
    raise CaptureError(
        f"`{_name(function)}` cannot be planned for a CUDA device from here: its kernels are not modelled. "
        "Profile the workload on the device itself."
    )


def refuse_under_autocast(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Rule 13, for what CUDA's autocast refuses too."""
    if device.autocast:
        raise CaptureError(
            f"`{_name(function)}` is an error under CUDA's autocast. Use `binary_cross_entropy_with_logits`."
        )
    return function(*args, **kwargs)


# ---- attention -------------------------------------------------------------------------------------------


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
    """Rule 7."""
    if device.autocast:
        query, key, value, attn_mask = _cast((query, key, value, attn_mask), device.autocast)
    call = _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if device.cudnn_attention and _cudnn_takes(call):
        return _cudnn_attention(call)
    if _flash_takes(call):
        return _flash_attention(call)
    if _efficient_takes(call):
        return _efficient_attention(call)
    return _unfused_attention(call)


def _fused_takes(call: _Attention, dtypes: tuple[torch.dtype, ...], *, gqa: bool, one_kv: bool = True) -> bool:
    """What every fused kernel asks for."""
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


def _cudnn_takes(call: _Attention) -> bool:
    query, key, value = call.tensors
    return (
        _fused_takes(call, LOW_PRECISION, gqa=True, one_kv=False)
        and max(query.shape[-1], value.shape[-1]) <= 128
        and query.shape[-1] % 8 == 0 == value.shape[-1] % 8
        and key.shape[2] > 1
        and (call.dropout_p * 16).is_integer()
        and (call.dropout_p == 0 or query.shape[2] > 1)
        and (call.mask is None or (call.mask.dim() in (2, 4) and not call.mask.requires_grad))
    )


def _flash_attention(call: _Attention) -> Tensor:
    """Heads are padded to a multiple of eight, outside of the kernel, and the padded tensors are saved."""
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
    """The bias is laid out in rows of a multiple of eight, then expanded without a copy."""
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
    """`_scaled_dot_product_attention_math`, step by step: its dropout and its sums differ on fakes."""
    dtype = call.query.dtype
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    upcast = dtype in LOW_PRECISION and not reduced
    query, key, value = (t.float() if upcast else t for t in call.tensors)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    root = abs(scale) ** 0.5
    query = query * (-root if scale < 0 else root)
    mask = _additive(call.mask, dtype)
    if call.is_causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(lower, query.dtype)
    if call.enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if call.dropout_p > 0:
        weights = dropout(Device(None), torch.dropout, weights, call.dropout_p, True)
    return torch.matmul(weights, value).to(dtype)


def _additive(mask: Tensor | None, dtype: torch.dtype, minimum: float = -torch.inf) -> Tensor | None:
    """A bool mask as one that is added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), minimum, torch.scalar_tensor(0.0, dtype=dtype))


def _needs_grad(call: _Attention) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)


# ---- kernels that a CPU build of torch lacks -------------------------------------------------------------
# On the CPU `_fused_rms_norm` is a sum of parts, and `native_layer_norm` keeps 16-bit statistics. These have
# the shapes of CUDA's kernels and no arithmetic: they run on fake tensors only.

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
    """One number a row, float32 for 16-bit inputs."""
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


# ---- the table -------------------------------------------------------------------------------------------


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION_NAMES = _names(
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot addbmm baddbmm bmm chain_matmul
    linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """
)

FLOAT32_NAMES = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)

FLOAT32_RESULT_NAMES = _names(
    """
    prod cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_norm sum norm
    """
)

PROMOTE_NAMES = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)

CASTS = (lower_precision, float32, float32_result, promote, refuse_under_autocast)

RULES: dict[str, Rule] = {
    **dict.fromkeys(LOWER_PRECISION_NAMES, lower_precision),
    **dict.fromkeys(FLOAT32_NAMES, float32),
    **dict.fromkeys(FLOAT32_RESULT_NAMES, float32_result),
    **dict.fromkeys(PROMOTE_NAMES, promote),
    "softmax": softmax,
    "log_softmax": softmax,
    "dropout": dropout,
    "scaled_dot_product_attention": attention,
    "linear": linear,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "cross_entropy_loss": cross_entropy,
    "binary_cross_entropy": refuse_under_autocast,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), refuse),
}

# Python functions of torch that call nothing of the above: both devices dispatch them alike.
ALIKE = frozenset(
    _names(
        """
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d alpha_dropout celu dropout1d dropout2d dropout3d elu embedding
        feature_alpha_dropout fold glu hardsigmoid hardswish hardtanh leaky_relu mish pad relu relu6
        selu sigmoid silu tanh threshold unfold split meshgrid broadcast_tensors broadcast_shapes
        """
    )
)

# The methods of Tensor written in Python that call something of the above.
PYTHON_METHODS = frozenset({Tensor.norm, Tensor.__rpow__})


# ---- finding and replacing calls -------------------------------------------------------------------------


def _name(function: Call) -> str:
    """The dispatcher's name: `Tensor.__pow__` and `operator.pow` are pow, `torch.special.exp2` is exp2."""
    name = function.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return name.removeprefix("special_")


def _is_python(function: Call) -> bool:
    if not isinstance(function, types.FunctionType) or function.__name__ in ALIKE:
        return False
    # Where its body was written: `max_pool2d` is a wrapper from elsewhere, and calls nothing of the table.
    home = function.__globals__.get("__name__")
    return function in PYTHON_METHODS or home in ("torch.nn.functional", "torch.functional")


def _is_torch(function: Call) -> bool:
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, types.MethodDescriptorType) or module.split(".")[0] in ("torch", "_operator")


def _differs(function: Call, autocast: torch.dtype | None) -> bool:
    """Whether CUDA may run this function differently from the CPU."""
    if not hasattr(function, "__name__") or not _is_torch(function):
        return False
    if _is_python(function):
        return True
    rule = RULES.get(_name(function))
    return rule is not None and (autocast is not None or rule not in CASTS)


def _called(node: torch.fx.Node) -> Call | None:
    if node.op == "call_function" and callable(node.target):
        return node.target
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return None


@functools.cache
def _on_cuda(function: Call, device: Device) -> OnCuda:
    """One object for equal targets, so that the code of a graph names it once."""
    return OnCuda(function, device)


def _retarget(node: torch.fx.Node, target: OnCuda) -> None:
    """Make `node` call a function; the graph finds nodes by operation and target: both change at once."""
    table = node.graph._find_nodes_lookup_table
    table.remove(node)
    node.op = "call_function"
    node.target = target
    if node not in table:
        table.insert(node)


@functools.cache
def _without_overrides(function: types.FunctionType) -> Call:
    """A Python function of torch that runs its own body, whatever `__torch_function__` is active."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **never}, function.__name__, None, function.__closure__
    )
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False


_HOMES: dict[str, Any] = {
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": Tensor,
    "torch": torch,
    "torch._C._nn": torch._C._nn,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.functional": torch.functional,
    "operator": operator,
}


def _path(function: Call) -> tuple[str, str]:
    """Where a function of torch is found: the builtin ones do not pickle by themselves."""
    for home, owner in _HOMES.items():
        for name in (function.__name__, _name(function)):
            if getattr(owner, name, None) is function or getattr(owner, name, None) == function:
                return home, name
    raise CaptureError(f"`{function!r}` is a function of torch that has no public name.")


def _from_path(home: str, name: str, device: Device) -> OnCuda:
    return _on_cuda(getattr(_HOMES[home], name), device)
