"""The table: name of a dispatcher entry -> its rule on a CUDA device. (Rules 5 and 8-17, `substitute.py`)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

import remat.cuda_kernels.stand_ins  # noqa: F401  its definitions are called through torch.ops
from remat._torch.recording import memory_format_of
from remat._torch.training import in_lean_mode
from remat.capture import composites_on_fakes
from remat.cuda_kernels.attention import attention, dropout
from remat.cuda_kernels.autocast import (
    LOW_PRECISION,
    Call,
    Device,
    Tensor,
    asked_dtype,
    cast,
    eligible,
    float32,
    float32_result,
    lower_precision,
    promote,
)
from remat.cuda_kernels.cross_entropy import cross_entropy
from remat.errors import CaptureError

RMS_NORM_IN_FLOAT32 = TorchVersion(torch.__version__) >= "2.12"  # on the list of ATen/autocast_mode.h since then

aten = torch.ops.aten
Rule = Callable[..., Any]


def name_of(function: Call) -> str:
    """Return the dispatcher's name: `Tensor.__pow__` and `operator.pow` are pow, `torch.special.exp2` is exp2."""
    name = function.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return name.removeprefix("special_")


def softmax(device: Device, function: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run softmax or log-softmax by Rule 5."""
    asked = asked_dtype(args, kwargs)
    if asked is None and device.autocast and eligible(input):
        asked = kwargs["dtype"] = torch.float32
    if input.dtype == torch.float16 and asked == torch.float32:
        dim = kwargs["dim"] if "dim" in kwargs else args[0]
        kernel = aten._log_softmax if "log" in name_of(function) else aten._softmax
        return kernel(input, dim, True)
    return function(input, *args, **kwargs)


def linear(device: Device, function: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run linear by Rule 8.

    torch adds the bias out of place for any subclass of Tensor, such as fakes, and under any dispatch mode: also on the
    device where a region saves what it is part of.
    """
    if device.autocast:
        input, weight, bias = cast((input, weight, bias), device.autocast)
    if bias is None or input.dim() == 2 or input.is_contiguous():
        return function(input, weight, bias)
    product = torch.matmul(input, weight.t())
    return product.add(bias) if in_lean_mode() else product.add_(bias)


def divide(device: Device, function: Call, numerator: Any, denominator: Any) -> Any:
    """Divide by Rule 16."""
    if not isinstance(numerator, Tensor):
        return float32(device, function, numerator, denominator)
    return function(numerator, denominator)


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
    """Run batch norm by Rule 9. Autocast leaves it alone: it runs in the dtype of its input."""
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
        input = input.contiguous(memory_format=memory_format_of(input))
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
    """Run layer norm by Rule 10."""
    if device.autocast:
        input, weight, bias = cast((input, weight, bias), torch.float32)
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
    """Run RMS norm by Rule 11. CUDA is unfused, as the CPU is, for mixed dtypes and channels-last inputs."""
    if device.autocast and RMS_NORM_IN_FLOAT32:
        input, weight = cast((input, weight), torch.float32)
    same_dtype = weight is None or weight.dtype == input.dtype
    if same_dtype and memory_format_of(input) == torch.contiguous_format and not input.is_complex():
        return torch.ops.remat._fused_rms_norm(input, len(normalized_shape), weight)[0]
    return function(input, normalized_shape, weight, eps)


def histc(device: Device, function: Call, input: Tensor, bins: int = 100, *args: Any, **kwargs: Any) -> Tensor:
    """Run histc by Rule 14. torch's shape function for fakes on the CPU refuses integers."""
    if input.is_floating_point():
        return function(input, bins, *args, **kwargs)
    return input.new_empty(bins)


def one_hot(device: Device, function: Call, input: Tensor, num_classes: int = -1) -> Tensor:
    """Run one_hot by Rule 17."""
    if composites_on_fakes.is_one_hot(input, num_classes):
        return composites_on_fakes.one_hot(input, num_classes)
    return function(input, num_classes)


def lstm_cell(
    device: Device,
    function: Call,
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run an LSTM's cell by Rule 15."""
    state, cell = hx
    if device.autocast:
        input, state, cell, w_ih, w_hh, b_ih, b_hh = cast((input, state, cell, w_ih, w_hh, b_ih, b_hh), device.autocast)
    gates, gates_h = torch.matmul(input, w_ih.t()), torch.matmul(state, w_hh.t())
    state, cell, _ = aten._thnn_fused_lstm_cell(gates, gates_h, cell, b_ih, b_hh)
    return state, cell


def gru_cell(
    device: Device,
    function: Call,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Run a GRU's cell by Rule 15."""
    if device.autocast:
        input, hx, w_ih, w_hh, b_ih, b_hh = cast((input, hx, w_ih, w_hh, b_ih, b_hh), device.autocast)
    gates, gates_h = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    state: Tensor = torch.ops.remat._thnn_fused_gru_cell(gates, gates_h, hx, b_ih, b_hh)[0]
    return state


def refuse(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Refuse a function by Rule 13."""
    raise CaptureError(
        f"`{name_of(function)}` cannot be planned for a CUDA device from here: its kernels are not modelled. "
        "Profile the workload on the device itself."
    )


def refuse_under_autocast(device: Device, function: Call, *args: Any, **kwargs: Any) -> Any:
    """Refuse a function by Rule 13 if CUDA's autocast refuses it too."""
    if device.autocast:
        raise CaptureError(
            f"`{name_of(function)}` is an error under CUDA's autocast. Use `binary_cross_entropy_with_logits`."
        )
    return function(*args, **kwargs)


# The table


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION_NAMES = _names(
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot addbmm baddbmm bmm chain_matmul
    linalg_multi_dot rnn_tanh_cell rnn_relu_cell
    """
)

FLOAT32_NAMES = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow square rdiv softplus
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

CASTS = (lower_precision, float32, float32_result, promote, divide, refuse_under_autocast)

RULES: dict[str, Rule] = {
    **dict.fromkeys(LOWER_PRECISION_NAMES, lower_precision),
    "autocast": lower_precision,
    **dict.fromkeys(FLOAT32_NAMES, float32),
    **dict.fromkeys(FLOAT32_RESULT_NAMES, float32_result),
    **dict.fromkeys(PROMOTE_NAMES, promote),
    "softmax": softmax,
    "log_softmax": softmax,
    "dropout": dropout,
    "scaled_dot_product_attention": attention,
    "linear": linear,
    "batch_norm": batch_norm,
    "truediv": divide,
    "gru_cell": gru_cell,
    "histc": histc,
    "layer_norm": layer_norm,
    "lstm_cell": lstm_cell,
    "one_hot": one_hot,
    "rms_norm": rms_norm,
    "cross_entropy_loss": cross_entropy,
    "binary_cross_entropy": refuse_under_autocast,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), refuse),
}

# Python functions of torch that call nothing of the above: both devices dispatch them alike.
ALIKE_NAMES = frozenset(
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
