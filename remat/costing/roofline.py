"""Roofline: how long a kernel takes on a target that is not at hand (Williams et al. 2009), from its signature.

A kernel takes a launch, and then as long as its arithmetic or its traffic, whichever is longer, at the share of the
target's peaks that kernels of its family reach. Few parameters, none for a model:

Rule 1  Products are cut into tiles, one a multiprocessor at a time: the last round is partly empty (NVIDIA's *Matrix
        Multiplication Background User's Guide*). Of some tile shapes, and of splits of the inner dimension where tiles
        are few, the fastest is taken, as cuBLAS's heuristics try to. Short inner dimensions lose the prologue.
Rule 2  Rows of 16-bit matrices that are no multiple of 16 bytes are loaded in smaller pieces (the same guide).
Rule 3  Convolutions are products of patches; float32 ones go by TF32, as torch's defaults say, products do not. cuDNN
        brings channels last and back where they come first. Grouped ones leave the tensor cores.
Rule 4  Fused attention has rates of its own, forward and backward, by kernel and width of heads; half of it is left out
        where it is causal; short sequences do not fill it.
Rule 5  Some kernels read their arguments again: `_AGAIN` says how often traffic counts.

What is left out: what the host needs to launch kernels (models of many tiny ones are slower), communication, and clocks
of a card that is held below its rated power. Every parameter says where it is from; "fitted" ones were chosen by the
runs marked "fit" in `benchmarks/published_runs.py`, all of them together, and are held to the others there.

Rejected: fitting by model or by operator, which reproduces the training data and predicts nothing; a simulation of the
memory hierarchy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from remat.evaluation.graph import FROM_HOST, OpKind
from remat.workload.target import Target


@dataclasses.dataclass(frozen=True)
class _Shares:
    """Of a generation's peaks what its kernels reach.

    product  arithmetic of large aligned products; fitted, below the best that a single shape reaches (0.87 on an A100,
             0.80 on an H100: Bekman, ml-engineering, table of maximum achievable matmul FLOPS, August 2026)
    flash, cudnn, efficient  arithmetic of attention forward, heads 128 wide, long sequences
    stream   bandwidth of pointwise kernels; what large copies reach, fitted for GeForce cards
    """

    product: float
    flash: float
    cudnn: float
    efficient: float
    stream: float


# Flash attention on an A100: 73 % (Dao 2023, FlashAttention-2, section 4.1). On an H100, for torch's kernel and for
# cuDNN's: 370 and 610 of 989 teraflops (Shah et al. 2024, FlashAttention-3, figure 5, which times both).
# Memory-efficient attention: assumed. GeForce cards run above their rated clock, so their shares are high.
_AMPERE = _Shares(0.78, 0.73, 0.73, 0.40, 0.85)
_HOPPER = _Shares(0.65, 0.37, 0.61, 0.20, 0.88)
_GEFORCE = _Shares(1.0, 0.73, 0.73, 0.40, 0.95)
_SHARES = {80: _AMPERE, 86: _GEFORCE, 89: _GEFORCE, 90: _HOPPER}

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))  # rows, columns, share
_SPLITS = (1, 2, 4, 8, 16, 32)
_PROLOGUE = 64  # of the inner dimension, lost for each tile
_SHORTEST = 256  # inner dimension of one split
_LOADS = {16: 1.0, 8: 0.85, 4: 0.7, 2: 0.5}  # by the largest power of two bytes that divides every row: assumed
_PATCHES = 0.8  # of a product's rate, where its rows are patches: fitted
_GROUPED = 0.25  # of the fp32 rate, in grouped convolutions: assumed
_BACKWARD = 0.86  # attention's rate beside forward's: 63 % and 73 % of the A100's peak (Dao 2023, section 4.1)
_NARROW = 0.85  # attention whose heads are 64 wide or less (Dao 2023, figure 4)
_FILLED = 256  # keys at which attention reaches half of its rate (the same figure)

# Normalisations and log-softmax of long rows find their sums first and read again: 3 passes for 2 forward, 5 for 3
# backward. cuDNN's batch normalisation keeps part of it on the chip: fitted. Embedding's backward sums in parts.
_AGAIN = {
    "_log_softmax": 1.5,
    "_log_softmax_backward_data": 1.67,
    "native_layer_norm_backward": 1.67,
    "native_batch_norm": 1.5,
    "native_batch_norm_backward": 1.67,
    "cudnn_batch_norm": 1.2,
    "cudnn_batch_norm_backward": 1.3,
    "native_group_norm": 1.5,
    "native_group_norm_backward": 1.67,
    "_fused_rms_norm_backward": 1.67,
    "embedding_dense_backward": 2.0,
}
_REDUCING = ("sum", "mean", "norm", "linalg_vector_norm", "amax", "var", "var_mean")
_COPYING = ("clone", "copy_", "_to_copy", "cat")
_REDUCED, _PERMUTED = 0.8, 0.65  # of what pointwise kernels reach: assumed


def kernel_us(kind: OpKind, target: Target) -> float:
    """Time of one call of `kind`, in microseconds."""
    if kind.name == FROM_HOST and target.host_bytes_per_us:
        return target.launch_us + kind.moved_bytes / target.host_bytes_per_us
    if not target.capability or target.efficiency == 1.0:
        arithmetic, traffic = kind.flops / _rate(kind.dtype, target), kind.moved_bytes / target.bytes_per_us
        return max(max(arithmetic, traffic) / target.efficiency, target.launch_us)
    return target.launch_us + max(_arithmetic_us(kind, target), _traffic_us(kind, target))


def _rate(dtype: str, target: Target) -> float:
    return target.flops_per_us.get(dtype, target.flops_per_us["float32"])


def _shares(target: Target) -> _Shares:
    return _SHARES.get(target.capability, _HOPPER)


def _name(kind: OpKind) -> str:
    """The operator's name, one for a kernel of ATen and for its stand-in under `remat::` (`stand_ins.py`)."""
    return kind.name.removeprefix("aten.").removeprefix("remat.").partition(".")[0]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of a signature."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(argument: dict[str, Any]) -> _Tensor:
        shape, stride, dtype = argument["tensor"]
        return _Tensor(tuple(shape), tuple(stride), dtype)

    @property
    def item_bytes(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def row_bytes(self) -> int:
        """Distance between the rows of a matrix, whichever way they lie."""
        pairs = zip(self.stride[-2:], self.shape[-2:], strict=True)
        return max((step for step, size in pairs if size > 1), default=1) * self.item_bytes


# Arithmetic

_OPERANDS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_addmm_activation": (1, 2)}
_CAUSAL = {  # position of `is_causal`
    "flash_attention": 4,
    "flash_attention_backward": 11,
    "efficient_attention": 6,
    "efficient_attention_backward": 11,
    "cudnn_attention": 6,
    "cudnn_attention_backward": 14,
}


def _arithmetic_us(kind: OpKind, target: Target) -> float:
    if not kind.flops:
        return 0.0
    name, args = _name(kind), kind.signature[0]
    if name in _OPERANDS:
        left, right = (_Tensor.of(args[position]) for position in _OPERANDS[name])
        return _product_us(left, right, target)
    if name in ("convolution", "convolution_backward"):
        return _convolution_us(kind, target, backward=name.endswith("backward"))
    if (kernel := name.removeprefix("_scaled_dot_product_")) in _CAUSAL:
        return _attention_us(kind, kernel, target)
    return kind.flops / (_rate(kind.dtype, target) * _shares(target).product)


def _product_us(left: _Tensor, right: _Tensor, target: Target) -> float:
    """Rules 1 and 2."""
    (rows, inner), columns, count = left.shape[-2:], right.shape[-1], math.prod(left.shape[:-2])
    rate = _rate(left.dtype, target) * _shares(target).product
    if left.item_bytes == 2:
        lengths = left.row_bytes, right.row_bytes, columns * left.item_bytes
        rate *= min(_LOADS[math.gcd(length, 16)] for length in lengths)
    return count * 2 * rows * columns * inner / (rate * _filled(count, rows, columns, inner, target))


def _filled(count: int, rows: int, columns: int, inner: int, target: Target) -> float:
    """Of the rate of full rounds of large tiles what the best cut of a product keeps. (Rule 1)"""
    processors = max(target.processors, 1)
    best = 0.0
    for tall, wide, share in _TILES:
        tiles = count * -(-rows // tall) * -(-columns // wide)
        used = count * rows * columns / (tall * wide)
        for splits in _SPLITS:
            part = inner / splits
            if splits > 1 and part < _SHORTEST:
                break
            rounds = -(-tiles * splits // processors)
            best = max(best, share * used * splits / (rounds * processors) * part / (part + _PROLOGUE))
    return best


def _convolution_us(kind: OpKind, target: Target, *, backward: bool) -> float:
    """Rule 3."""
    args, shares = kind.signature[0], _shares(target)
    image, weight = _Tensor.of(args[1 if backward else 0]), _Tensor.of(args[2 if backward else 1])
    transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
    once = _convolved(_Tensor.of(args[0]), weight) if backward and not transposed else kind.flops
    wanted = [bool(asked) for asked in args[10][:2]] if backward and not transposed else [True]
    if groups > 1:
        return once * sum(wanted) / (target.flops_per_us["float32"] * _GROUPED)
    rate = _rate("tf32" if kind.dtype == "float32" else kind.dtype, target) * shares.product * _PATCHES
    outputs, inputs = weight.shape[0], math.prod(weight.shape[1:])
    pixels = max(once // (2 * outputs * inputs), 1)
    cuts = [(pixels, inputs, outputs), (outputs, inputs, pixels)] if len(wanted) > 1 else [(pixels, outputs, inputs)]
    arithmetic = sum(once / (rate * _filled(1, *cut, target)) for cut, asked in zip(cuts, wanted, strict=True) if asked)
    channels_first = image.shape[1] > 1 and image.stride[1] != 1
    return arithmetic + (2 * kind.moved_bytes / (target.bytes_per_us * shares.stream) if channels_first else 0.0)


def _convolved(gradient: _Tensor, weight: _Tensor) -> int:
    """Operations of one of the two products of a convolution's backward; torch's counter leaves groups out."""
    return 2 * math.prod(gradient.shape) * math.prod(weight.shape[1:])


def _attention_us(kind: OpKind, kernel: str, target: Target) -> float:
    """Rule 4."""
    args, backward = kind.signature[0], kernel.endswith("_backward")
    query, key = (_Tensor.of(args[position + backward]) for position in (0, 1))
    causal = len(args) > _CAUSAL[kernel] and args[_CAUSAL[kernel]] is True
    work = 0.5 if causal else 1.0
    keys = key.shape[2] * work
    share = getattr(_shares(target), kernel.partition("_")[0]) * keys / (keys + _FILLED)
    share *= (_BACKWARD if backward else 1.0) * (_NARROW if query.shape[-1] <= 64 else 1.0)
    return kind.flops * work / (_rate(kind.dtype, target) * share)


# Traffic


def _traffic_us(kind: OpKind, target: Target) -> float:
    name, stream = _name(kind), target.bytes_per_us * _shares(target).stream
    if name in _REDUCING:
        stream *= _REDUCED
    elif name in _COPYING and _permutes(kind):
        stream *= _PERMUTED
    return kind.moved_bytes * _AGAIN.get(name, 1.0) / stream


def _permutes(kind: OpKind) -> bool:
    """Whether the first argument does not lie in memory in the order of its dimensions."""
    first = next((a for a in kind.signature[0] if isinstance(a, dict) and "tensor" in a), None)
    if first is None:
        return False
    tensor = _Tensor.of(first)
    steps = [step for step, size in zip(tensor.stride, tensor.shape, strict=True) if size > 1]
    return steps != sorted(steps, reverse=True)
