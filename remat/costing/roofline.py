"""Roofline: how long a kernel takes on a target that is not at hand (Williams et al. 2009), from its signature.

A kernel takes a launch, and then as long as its arithmetic or its traffic, whichever is longer, at the share of the
target's peaks that kernels of its family reach. Few parameters, none for a model:

Rule 1  Products are cut into tiles, one a multiprocessor at a time: the last round is partly empty (NVIDIA's *Matrix
        Multiplication Background User's Guide*). Of some tile shapes, and of splits of the inner dimension where tiles
        are few, the fastest is taken, as cuBLAS's heuristics try to. Short inner dimensions lose the prologue.
Rule 2  Rows of 16-bit matrices that are no multiple of 16 bytes are loaded in smaller pieces (the same guide).
Rule 3  Convolutions are products of patches; float32 ones go by TF32, as torch's defaults say, products do not. cuDNN
        brings channels last and back where they come first. Grouped ones leave the tensor cores, and float32 ones of
        few input channels. A bias is a pass of its own.
Rule 4  Fused attention has rates of its own, forward and backward, by kernel and width of heads; half of it is left out
        where it is causal; short sequences do not fill it.
Rule 5  Some kernels read their arguments again: `_AGAIN` says how often traffic counts. Softmax does where a row is too
        long for the chip. Some are two kernels.
Rule 6  Pointwise kernels load 16-bit numbers one by one where arguments are strided, broadcast or of several dtypes:
        then elements count, not bytes. Pooling reads whole windows.
Rule 7  What fits L2 moves faster: the kernel before left it there.
Rule 8  A layer norm runs a row in a block: few rows leave processors idle, and short rows take a least time.

What is left out: communication, and clocks of a card that is held below its rated power. The host's share is in
`host_time.py`. Every parameter says where it is from. "Fitted" ones were chosen by the runs marked "fit" in
`benchmarks/published_runs.py`, all of them together. "Measured" ones are of kernels marked "fit" in
`benchmarks/measured/` (KernelBench and Liger on an H100, Phantora on an L40S); both are held to the others there.

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
    full     arithmetic of large products in float32 without TF32
    l2       traffic that fits L2 beside traffic that does not (Rule 7)
    single   elements per microsecond and processor where a kernel loads 16-bit numbers one by one (Rule 6)
    """

    product: float
    flash: float
    cudnn: float
    efficient: float
    stream: float
    full: float
    l2: float
    single: float


# Flash attention on an A100: 73 % (Dao 2023, FlashAttention-2, section 4.1). On an H100, for torch's kernel and for
# cuDNN's: 370 and 610 of 989 teraflops (Shah et al. 2024, FlashAttention-3, figure 5, which times both).
# Memory-efficient attention: assumed. GeForce cards run above their rated clock, so their shares are high. Ada's
# product, stream and L2, Hopper's float32 and L2, and elements loaded one by one on both and on Ampere: measured.
_AMPERE = _Shares(0.78, 0.73, 0.73, 0.40, 0.85, 0.78, 1.4, 1600)
_HOPPER = _Shares(0.65, 0.37, 0.61, 0.20, 0.88, 0.78, 1.4, 2700)
_ADA = _Shares(0.64, 0.73, 0.73, 0.40, 0.765, 0.64, 6.5, 3400)
_GEFORCE = _Shares(1.0, 0.73, 0.73, 0.40, 0.95, 1.0, 1.4, 3400)
_SHARES = {80: _AMPERE, 86: _GEFORCE, 89: _ADA, 90: _HOPPER}

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))  # rows, columns, share
# By bytes of a number: of the inner dimension, the parts that it may be cut into, and what each tile loses of it.
_MOST_SPLITS = {2: 32, 4: 256}
_PROLOGUE = {2: 64, 4: 32}
_SHORTEST = 256  # inner dimension of one split
_LOADS = {16: 1.0, 8: 0.85, 4: 0.7, 2: 0.5}  # by the largest power of two bytes that divides every row: assumed
_PATCHES = 0.8  # of a product's rate, where its rows are patches: fitted
_GROUPED = 0.25  # of the fp32 rate, in grouped convolutions: assumed
_DEPTHWISE = 0.03  # the same, of one channel a group where channels come first
_FEW_CHANNELS = 4  # of the input, up to which float32 convolutions do not use TF32
_VOLUMES, _TRANSPOSED_VOLUMES = 0.7, 0.35  # of a convolution's rate, in three dimensions
_WINDOW = 5100  # elements of windows that pooling reads per microsecond and processor
_ROW_US = 0.2  # of a processor, for each row of a layer norm
_ROW_BYTES = 6600  # per microsecond that one row of a layer norm reaches: one block runs it
_BACKWARD = 0.86  # attention's rate beside forward's: 63 % and 73 % of the A100's peak (Dao 2023, section 4.1)
_NARROW = 0.85  # attention whose heads are 64 wide or less (Dao 2023, figure 4)
_FILLED = 256  # keys at which attention reaches half of its rate (the same figure)

# Passes over memory beside those over each argument and result once. Layer norm reads its input for the sums and again
# for the result, 3 passes for 2; backward in two kernels, 7 for 3 (ATen/native/cuda/layer_norm_kernel.cu; measured: 1.6
# and 2.35). Fused RMS norm: measured in bfloat16. Softmax backward multiplies first, in a kernel of its own, 6 for 3;
# log-softmax backward reads the gradient twice, 4 for 3 (ATen/native/cuda/SoftMax.cu).
_AGAIN = {
    "_softmax_backward_data": 2.0,
    "_log_softmax_backward_data": 1.33,
    "native_layer_norm": 1.6,
    "native_layer_norm_backward": 2.35,
    "_fused_rms_norm": 1.6,
    "_fused_rms_norm_backward": 2.8,
    "native_batch_norm": 1.9,
    "native_batch_norm_backward": 1.67,
    "cudnn_batch_norm": 1.2,
    "cudnn_batch_norm_backward": 1.3,
    "native_group_norm": 1.95,
    "native_group_norm_backward": 1.95,
    "embedding": 3.0,
    "embedding_dense_backward": 4.8,
    "cumsum": 1.75,
    "cumprod": 1.75,
    "logsumexp": 6.0,
    "smooth_l1_loss": 2.0,
    "huber_loss": 2.0,
    "mse_loss": 2.0,
}
_PLANES = 2.7  # cuDNN's batch norm where float32 channels come first
_ON_CHIP = 100_000  # bytes of a row that softmax keeps; it reads longer ones three times
_KEPT = 0.9  # of L2 that one kernel leaves to the next
_PICKED_US = 0.0034  # of one row's loss, which one block makes (ATen/native/cuda/Loss.cu)
_PICKED_BEFORE_US = 0.034  # before torch 2.8 (pytorch #149548), by 32 threads
_INDEXING = ("embedding", "index", "gather", "index_select", "scatter", "index_put", "index_add")
_POOLING = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
_TWICE = ("_softmax_backward_data", "native_layer_norm_backward", "_fused_rms_norm_backward")  # two kernels
_SOFTMAX = ("_softmax", "_log_softmax")
_REDUCING = ("sum", "mean", "norm", "linalg_vector_norm", "amax", "var", "var_mean")
_COPYING = ("clone", "copy_", "_to_copy", "cat")
_REDUCED, _PERMUTED = 0.95, 0.65  # of what pointwise kernels reach: assumed


def kernel_us(kind: OpKind, target: Target) -> float:
    """Time of one call of `kind`, in microseconds."""
    if not kind.moved_bytes and not kind.flops:
        return 0.0  # it only allocates
    if kind.name == FROM_HOST and target.host_bytes_per_us:
        return target.launch_us + kind.moved_bytes / target.host_bytes_per_us
    if not target.capability or target.efficiency == 1.0:
        arithmetic, traffic = kind.flops / _rate(kind.dtype, target), kind.moved_bytes / target.bytes_per_us
        return max(max(arithmetic, traffic) / target.efficiency, target.launch_us)
    launches = 2 if operator_name(kind) in (*_TWICE, *_REDUCING) else 1
    return launches * target.launch_us + max(_arithmetic_us(kind, target), _traffic_us(kind, target))


def _rate(dtype: str, target: Target) -> float:
    return target.flops_per_us.get(dtype, target.flops_per_us["float32"])


def _shares(target: Target) -> _Shares:
    return _GEFORCE if target.geforce else _SHARES.get(target.capability, _HOPPER)


def operator_name(kind: OpKind) -> str:
    """The operator's name, one for a kernel of ATen and for its stand-in under `remat::` (`stand_ins.py`)."""
    return kind.name.removeprefix("aten.").removeprefix("remat.").partition(".")[0]


_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bool": 1, "uint8": 1}


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
        return _ITEM_BYTES.get(self.dtype, 2)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill one stretch of memory, in whichever order."""
        pairs = sorted((step, size) for step, size in zip(self.stride, self.shape, strict=True) if size > 1)
        expected = 1
        for step, size in pairs:
            if step != expected:
                return False
            expected *= size
        return True

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
    name, args = operator_name(kind), kind.signature[0]
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
    if 1 in (rows, columns):
        return 0.0
    shares = _shares(target)
    rate = _rate(left.dtype, target) * (shares.full if _is_full(left.dtype, target) else shares.product)
    if left.item_bytes == 2:
        lengths = left.row_bytes, right.row_bytes, columns * left.item_bytes
        rate *= min(_LOADS[math.gcd(length, 16)] for length in lengths)
    size = 2 if left.item_bytes == 2 else 4
    return count * 2 * rows * columns * inner / (rate * _filled(count, rows, columns, inner, target, size))


def _is_full(dtype: str, target: Target) -> bool:
    """Whether products of `dtype` leave the tensor cores."""
    return dtype == "float32" and target.flops_per_us["float32"] != target.flops_per_us.get("tf32")


def _filled(count: int, rows: int, columns: int, inner: int, target: Target, size: int = 2) -> float:
    """Return the share of the rate of full rounds of large tiles that the best cut of a product reaches. (Rule 1)"""
    processors = max(target.processors, 1)
    best = 0.0
    for tall, wide, share in _TILES:
        tiles = count * -(-rows // tall) * -(-columns // wide)
        used = count * rows * columns / (tall * wide)
        for splits in (1 << power for power in range(_MOST_SPLITS[size].bit_length())):
            part = inner / splits
            if splits > 1 and part < _SHORTEST:
                break
            rounds = -(-tiles * splits // processors)
            best = max(best, share * used * splits / (rounds * processors) * part / (part + _PROLOGUE[size]))
    return best


def _convolution_us(kind: OpKind, target: Target, *, backward: bool) -> float:
    """Rule 3."""
    args, shares = kind.signature[0], _shares(target)
    image, weight = _Tensor.of(args[1 if backward else 0]), _Tensor.of(args[2 if backward else 1])
    transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
    once = _convolved(_Tensor.of(args[0]), weight) if backward and not transposed else kind.flops
    wanted = [bool(asked) for asked in args[10][:2]] if backward and not transposed else [True]
    channels_first = _is_channels_first(image)
    stream = target.bytes_per_us * shares.stream
    bias_us = _bias_bytes(kind, backward=backward) / stream
    if groups > 1:
        share = _DEPTHWISE if channels_first and weight.shape[1] == 1 else _GROUPED
        return once * sum(wanted) / (target.flops_per_us["float32"] * share) + bias_us
    volumes = len(weight.shape) == 5
    few = kind.dtype == "float32" and image.shape[1] <= _FEW_CHANNELS and not volumes
    rate = _rate("tf32" if kind.dtype == "float32" and not few else kind.dtype, target) * shares.product * _PATCHES
    if volumes:
        rate *= _TRANSPOSED_VOLUMES if transposed else _VOLUMES
    outputs, inputs = weight.shape[0], math.prod(weight.shape[1:])
    pixels = max(once // (2 * outputs * inputs), 1)
    cuts = [(pixels, inputs, outputs), (outputs, inputs, pixels)] if len(wanted) > 1 else [(pixels, outputs, inputs)]
    arithmetic = sum(once / (rate * _filled(1, *cut, target)) for cut, asked in zip(cuts, wanted, strict=True) if asked)
    return arithmetic + bias_us + (2 * kind.moved_bytes / stream if channels_first else 0.0)


def _is_channels_first(image: _Tensor) -> bool:
    return image.shape[1] > 1 and image.stride[1] != 1


def _bias_bytes(kind: OpKind, *, backward: bool) -> int:
    """Return the bytes moved by the pass that adds a bias to the result, or that sums the gradient for it."""
    args = kind.signature[0]
    if backward:
        return _Tensor.of(args[0]).size_bytes if args[10][2] else 0
    if args[2] is None:
        return 0
    return 2 * (kind.moved_bytes - sum(_Tensor.of(argument).size_bytes for argument in args[:3]))


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
    name, shares = operator_name(kind), _shares(target)
    stream = target.bytes_per_us * shares.stream
    if not kind.flops and kind.moved_bytes < _KEPT * target.l2_bytes:
        stream *= shares.l2
    if name in _REDUCING:
        stream *= _REDUCED
    elif name in _COPYING and _permutes(kind):
        stream *= _PERMUTED
    elif name == "nll_loss_forward":
        once = _PICKED_BEFORE_US if (0, 0) < target.torch_release < (2, 8) else _PICKED_US
        return once * math.prod(_tensors(kind)[1].shape)
    elif name in _POOLING:
        return max(kind.moved_bytes / stream, _windows(kind) / (_WINDOW * max(target.processors, 1)))
    elif name == "native_layer_norm":
        rows = _normalised_rows(kind)
        stream = min(stream, rows * _ROW_BYTES)
        return max(kind.moved_bytes * _AGAIN[name] / stream, _ROW_US * rows / max(target.processors, 1))
    elif name in _SOFTMAX:
        return kind.moved_bytes * _softmax_again(kind) / stream
    again = _AGAIN.get(name, 1.0)
    if name == "cudnn_batch_norm" and (image := _tensors(kind)[0]).item_bytes == 4 and _is_channels_first(image):
        again = _PLANES
    us = kind.moved_bytes * again / stream
    if kind.flops or name in _AGAIN or name in _REDUCING or name in _INDEXING:
        return us
    return max(us, _loaded_singly(kind) / (shares.single * max(target.processors, 1)))


def _tensors(kind: OpKind) -> list[_Tensor]:
    """The tensors among the positional arguments."""
    return [_Tensor.of(a) for a in kind.signature[0] if isinstance(a, dict) and "tensor" in a]


def _windows(kind: OpKind) -> int:
    """Elements that the windows of a pooling kernel hold together."""
    image, kernel = _tensors(kind)[0], kind.signature[0][1]
    indices = 8 if operator_name(kind).endswith("with_indices") else 0
    results = (kind.moved_bytes - image.size_bytes) // (image.item_bytes + indices)
    dims = 3 if "3d" in operator_name(kind) else 2
    return int(results * math.prod(kernel if len(kernel) == dims else kernel * dims))


def _normalised_rows(kind: OpKind) -> int:
    x, shape = _tensors(kind)[0], kind.signature[0][1]
    return math.prod(x.shape[: len(x.shape) - (len(shape) if isinstance(shape, list) else shape)])


def _softmax_again(kind: OpKind) -> float:
    """3 reads and a write of rows that do not stay on the chip, else one of each. (Rule 5)"""
    tensor, dim = _tensors(kind)[0], kind.signature[0][1]
    return 2.0 if tensor.shape and tensor.shape[dim] * tensor.item_bytes > _ON_CHIP else 1.0


def _loaded_singly(kind: OpKind) -> int:
    """Elements of a pointwise kernel that loads 16-bit numbers one by one, else 0. (Rule 6)"""
    tensors = [tensor for tensor in _tensors(kind) if math.prod(tensor.shape) > 1]
    if not any(tensor.item_bytes == 2 for tensor in tensors):
        return 0
    first = tensors[0]
    alike = all(t.shape == first.shape and t.stride == first.stride and t.dtype == first.dtype for t in tensors)
    cast = kind.name == "aten._to_copy.default"
    return 0 if alike and first.is_dense and not cast else max(math.prod(t.shape) for t in tensors)


def _permutes(kind: OpKind) -> bool:
    """Whether the first argument does not lie in memory in the order of its dimensions."""
    first = next(iter(_tensors(kind)), None)
    if first is None:
        return False
    steps = [step for step, size in zip(first.stride, first.shape, strict=True) if size > 1]
    return steps != sorted(steps, reverse=True)
