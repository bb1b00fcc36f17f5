"""Roofline: estimate a kernel's time on an absent target from its signature (Williams et al. 2009).

A kernel takes a launch, and then as long as its arithmetic or its traffic, whichever is longer, at the share of the
target's peaks that kernels of its family reach. Few parameters, none for a model:

Rule 1  Products are cut into tiles, one a multiprocessor at a time: the last round is partly empty (NVIDIA's *Matrix
        Multiplication Background User's Guide*). Of some tile shapes, and of splits of the inner dimension where tiles
        are few, the fastest is taken, as cuBLAS's heuristics try to. Short inner dimensions lose the prologue.
Rule 2  Rows of 16-bit matrices that are no multiple of 16 bytes are loaded in smaller pieces (the same guide); on
        Hopper older kernels do that, which are slower by far, most of all where the result's rows are odd.
Rule 3  Convolutions are products of patches; float32 ones go by TF32, as torch's defaults say, products do not. cuDNN
        brings channels last and back where they come first, in kernels of their own, unless a convolution of single
        pixels is a product as it lies. Grouped ones leave the tensor cores, and those of few input channels. A bias is
        a pass of its own.
Rule 4  Fused attention has rates of its own, forward and backward, by kernel and width of heads; half of it is left out
        where it is causal; short sequences do not fill it. Dropout draws a number for every score.
Rule 5  Some kernels read their arguments again: `_EXTRA_PASSES` says how often traffic counts. Softmax does where a
        row is too long for the chip. Some are several kernels.
Rule 6  Pointwise kernels load numbers one by one where arguments are strided, broadcast or of several dtypes: then
        elements count, not bytes. Copies that gather scattered elements are slower still. Pooling reads whole windows.
Rule 7  What fits L2 moves faster: the kernel before left it there, or many rows are read from one small table.
Rule 8  Sums take their time where few blocks share them, whatever their traffic: a layer norm's of a row, a batch
        norm's of a channel, and those of columns, which blocks cut among them and meet in memory.
Rule 9  An operator on lists of tensors is a kernel for every so many blocks, and each waits for its last one. The
        gradient of a table sorts its indices.

What is left out: communication, and clocks of a card that is held below its rated power. The host's share is in
`host_time.py`. Every parameter says where it is from. "Fitted" ones were chosen by the runs marked "fit" in
`benchmarks/published_runs.py`, all of them together. "Measured" ones are of kernels marked "fit" in
`benchmarks/measured/` (our own, KernelBench's and Liger's on an H100, Phantora's on an L40S); both are held to the
others there.

Rejected: fitting by model or by operator, which reproduces the training data and predicts nothing; a simulation of the
memory hierarchy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from remat.costing.reached_shares import is_before, rate_of, shares_of
from remat.evaluation.described_tensor import DescribedTensor
from remat.evaluation.graph import FROM_HOST, OpKind
from remat.workload.target import Target

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))  # rows, columns, share
# By bytes of a number: of the inner dimension, the parts that it may be cut into, and what each tile loses of it.
_MOST_SPLITS = {2: 32, 4: 256}
_PROLOGUE = {2: 64, 4: 32}
_SHORTEST = 256  # inner dimension of one split
_GROUPED = 0.25  # of the fp32 rate, in grouped convolutions: assumed
_DEPTHWISE = 0.03  # the same, of one channel a group where channels come first
_FEW_CHANNELS = 4  # of the input, up to which convolutions leave the tensor cores, but for 16 bits with channels last
_VOLUMES, _TRANSPOSED_VOLUMES = 0.7, 0.35  # of a convolution's rate, in three dimensions
# Kernels of a convolution by whether it is a backward and whether it is copied: small ones take no less. Measured.
_CONVOLVED = {(False, False): 1, (False, True): 5, (True, False): 4, (True, True): 12}
_WINDOW, _WINDOW_BACKWARD = 5100, 1600  # elements of windows that pooling goes over per microsecond and processor
# Attention's backward beside its forward: 63 % and 73 % of the A100's peak (Dao 2023, section 4.1); last: measured.
_BACKWARD = {"flash": 0.86, "cudnn": 0.86, "efficient": 1.0}
_WIDE = {128: 0.2, 64: 0.6}  # the same of memory-efficient attention whose heads are wider: measured, by two kernels
_NARROW = 0.85  # attention whose heads are 64 wide or less (Dao 2023, figure 4)
# Keys at which attention reaches half of its rate (the same figure; cuDNN's: measured).
_FILLED = {"flash": 256, "efficient": 256, "cudnn": 512}
_DRAWN = 9000  # scores that cuDNN's attention draws random numbers for, per microsecond and processor

# Passes over memory beside those over each argument and result once. Layer norm reads its input for the sums and again
# for the result, 3 passes for 2; backward in two kernels, 7 for 3 (ATen/native/cuda/layer_norm_kernel.cu; measured: 1.6
# and 2.35). Fused RMS norm: measured in bfloat16. Softmax backward multiplies first, in a kernel of its own, 6 for 3;
# log-softmax backward reads the gradient twice, 4 for 3 (ATen/native/cuda/SoftMax.cu).
_EXTRA_PASSES = {
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
    "_safe_softmax": 2.75,
    "native_dropout": 1.3,
    "cumsum": 1.75,
    "cumprod": 1.75,
    "logsumexp": 6.0,
    "smooth_l1_loss": 2.0,
    "huber_loss": 2.0,
    "mse_loss": 2.0,
}
_PLANES = 2.7  # cuDNN's batch norm where float32 channels come first
_EMBEDDED, _EMBEDDED_BEFORE = 1.15, 3.0  # the same of an embedding, from torch 2.8 on and before
_ON_CHIP = 100_000  # bytes of a row that softmax keeps, twice that of 16 bits; it reads longer ones three times
_IN_WARP, _HALVES = 1024, 1.55  # numbers of a row that a warp keeps; passes over longer rows of 16 bits: measured
_PICKED_US = 0.0034  # of one row's loss, which one block makes (ATen/native/cuda/Loss.cu)
_PICKED_BEFORE_US = 0.034  # before torch 2.8 (pytorch #149548), by 32 threads
_L2_SHARE = 0.9  # of L2 that one kernel leaves to the next

# Rule 8, all measured. A layer norm: time of a processor for a row, and of a row in the gradient of its weights, which
# few blocks sum up to so many rows (ATen/native/cuda/layer_norm_kernel.cu).
_ROW_US = 0.2
_ROW_BYTES = 6600  # per microsecond that one row reaches: one block runs it
_WEIGHTS_US, _WEIGHTS_ROWS = 0.004, 65536
# A batch norm: elements per microsecond that a block sums, which has a channel, and those of a processor together.
_CHANNEL = {"native_batch_norm": 1050, "native_batch_norm_backward": 550}
_CHANNELS = 1700
# Sums of columns of over `_CUT` rows: once, and for each row of as many columns as `_NARROWEST` or fewer.
_MEET_US, _COLUMN_US, _CUT, _NARROWEST = 10.0, 0.0004, 1024, 128

# Rule 9, measured. Of each kernel on lists, until its last block ends; its elements in a block, blocks, and tensors by
# the number of lists (ATen/native/cuda/MultiTensorApply.cuh).
_LAST_US = 5.0
_CHUNK, _BLOCKS, _LISTED = 65536, 320, {1: 110, 2: 64, 3: 48, 4: 36}
# Of the gradient of a table: one of at most `_FEW` indices; sorting more; one of those, of rows as wide as `_WIDE_ROW`.
_INDEX_US, _FEW, _SORTED_US, _SORTED_INDEX_US, _WIDE_ROW = 0.036, 3072, 80.0, 0.0145, 256

_INTEGERS = ("int64", "int32", "uint8")
_MASKED = ("native_dropout_backward",)  # whose kernel loads masks and numbers together
_INDEXING = ("embedding", "index", "gather", "index_select", "scatter", "index_put", "index_add")
_POOLING = (
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
)
_FUSED = "fused"  # groups that Triton compiles: they load several numbers at once for all shapes
_TWICE = ("_softmax_backward_data", "native_layer_norm_backward", "_fused_rms_norm_backward")  # two kernels
_SOFTMAX = ("_softmax", "_log_softmax")
_REDUCING = ("sum", "mean", "norm", "linalg_vector_norm", "amax", "var", "var_mean")
_COPYING = ("clone", "copy_", "_to_copy", "cat")
_REDUCED, _PERMUTED = 0.95, 0.65  # of the rate of pointwise kernels: assumed


def kernel_us(kind: OpKind, target: Target) -> float:
    """Return the time of one call of `kind`, in microseconds."""
    if not kind.moved_bytes and not kind.flops:
        return 0.0  # it only allocates
    if kind.name == FROM_HOST and target.host_bytes_per_us:
        return target.launch_us + kind.moved_bytes / target.host_bytes_per_us
    if not target.capability or target.efficiency == 1.0:
        arithmetic, traffic = kind.flops / rate_of(kind.dtype, target), kind.moved_bytes / target.bytes_per_us
        return max(max(arithmetic, traffic) / target.efficiency, target.launch_us)
    return _launches(kind, target) * target.launch_us + max(_arithmetic_us(kind, target), _traffic_us(kind, target))


def _launches(kind: OpKind, target: Target) -> int:
    """Return the number of kernels of an operator, as far as known."""
    name = operator_name(kind)
    if name in ("convolution", "convolution_backward"):
        return _CONVOLVED[name.endswith("_backward"), _is_copied(kind, target)]
    return 2 if name in (*_TWICE, *_REDUCING) else 1


def operator_name(kind: OpKind) -> str:
    """Return the operator's name, the same for a kernel of ATen and its stand-in under `remat::` (`stand_ins.py`)."""
    return kind.name.removeprefix("aten.").removeprefix("remat.").partition(".")[0]


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
        left, right = (DescribedTensor.of(args[position]) for position in _OPERANDS[name])
        return _product_us(left, right, target)
    if name in ("convolution", "convolution_backward"):
        return _convolution_us(kind, target, backward=name.endswith("backward"))
    if (kernel := name.removeprefix("_scaled_dot_product_")) in _CAUSAL:
        return _attention_us(kind, kernel, target)
    return kind.flops / (rate_of(kind.dtype, target) * shares_of(target).product)


def _product_us(left: DescribedTensor, right: DescribedTensor, target: Target) -> float:
    """Return the arithmetic time of a product. (Rules 1 and 2)"""
    (rows, inner), columns, count = left.shape[-2:], right.shape[-1], math.prod(left.shape[:-2])
    if 1 in (rows, columns):
        return 0.0
    shares = shares_of(target)
    rate = rate_of(left.dtype, target) * (shares.full if _is_full(left.dtype, target) else shares.product)
    if left.item_bytes == 2:
        loaded = min(shares.loaded[_power(operand.row_bytes)] for operand in (left, right))
        rate *= min(loaded, shares.stored[_power(columns * left.item_bytes)])
    size = 2 if left.item_bytes == 2 else 4
    return count * 2 * rows * columns * inner / (rate * _filled(count, rows, columns, inner, target, size))


def _power(row_bytes: int) -> int:
    """Index into `Shares.loaded`: 0 for rows that are multiples of 2 bytes, 3 for multiples of 16."""
    return math.gcd(row_bytes, 16).bit_length() - 2


def _is_full(dtype: str, target: Target) -> bool:
    """Return whether products of `dtype` run outside the tensor cores."""
    return dtype == "float32" and target.flops_per_us["float32"] != target.flops_per_us.get("tf32")


def _filled(count: int, rows: int, columns: int, inner: int, target: Target, size: int = 2) -> float:
    """Return the best tiling's rate, as a share of the rate of full rounds of large tiles. (Rule 1)"""
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
    """Return the time of a convolution. (Rule 3)"""
    args, shares = kind.signature[0], shares_of(target)
    image, weight = DescribedTensor.of(args[1 if backward else 0]), DescribedTensor.of(args[2 if backward else 1])
    transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
    once = _convolved(DescribedTensor.of(args[0]), weight) if backward and not transposed else kind.flops
    wanted = [bool(asked) for asked in args[10][:2]] if backward and not transposed else [True]
    channels_first = _is_channels_first(image)
    stream = target.bytes_per_us * shares.stream
    bias_us = _bias_bytes(kind, backward=backward) / stream
    if groups > 1:
        share = _DEPTHWISE if channels_first and weight.shape[1] == 1 else _GROUPED
        return once * sum(wanted) / (target.flops_per_us["float32"] * share) + bias_us
    volumes = len(weight.shape) == 5
    few = image.shape[1] <= _FEW_CHANNELS and not volumes and (kind.dtype == "float32" or channels_first)
    dtype = "float32" if few else "tf32" if kind.dtype == "float32" else kind.dtype
    rate = rate_of(dtype, target) * shares.product * shares.patches
    if volumes:
        rate *= _TRANSPOSED_VOLUMES if transposed else _VOLUMES
    if few and kind.dtype != "float32":
        return once * sum(wanted) / rate + bias_us + 2 * kind.moved_bytes / (stream * _PERMUTED)
    outputs, inputs = weight.shape[0], math.prod(weight.shape[1:])
    pixels = max(once // (2 * outputs * inputs), 1)
    cuts = [(pixels, inputs, outputs), (outputs, inputs, pixels)] if len(wanted) > 1 else [(pixels, outputs, inputs)]
    arithmetic = sum(once / (rate * _filled(1, *cut, target)) for cut, asked in zip(cuts, wanted, strict=True) if asked)
    reached = stream * (_PERMUTED if image.item_bytes == 2 else 1.0)
    return arithmetic + bias_us + (2 * kind.moved_bytes / reached if _is_copied(kind, target) else 0.0)


def _is_copied(kind: OpKind, target: Target) -> bool:
    """Return whether channels come first and cuDNN copies the tensors to have them last."""
    args, backward = kind.signature[0], operator_name(kind).endswith("_backward")
    image, weight = DescribedTensor.of(args[1 if backward else 0]), DescribedTensor.of(args[2 if backward else 1])
    if not _is_channels_first(image) or args[9 if backward else 8] > 1:
        return False
    return is_before(target, (2, 8)) or not _is_product(image, weight, args[4:6] if backward else args[3:5])


def _is_product(image: DescribedTensor, weight: DescribedTensor, stride_padding: list[list[int]]) -> bool:
    """Return whether a convolution of single pixels is a product without a copy: its planes are aligned rows."""
    pixels = math.prod(weight.shape[2:]) == 1 and set(stride_padding[0]) == {1} and set(stride_padding[1]) == {0}
    return pixels and math.prod(image.shape[2:]) * image.item_bytes % 16 == 0


def _is_channels_first(image: DescribedTensor) -> bool:
    return image.shape[1] > 1 and image.stride[1] != 1


def _bias_bytes(kind: OpKind, *, backward: bool) -> int:
    """Return the bytes moved by the pass that adds a bias, or in backward sums its gradient."""
    args = kind.signature[0]
    if backward:
        return DescribedTensor.of(args[0]).size_bytes if args[10][2] else 0
    if args[2] is None:
        return 0
    return 2 * (kind.moved_bytes - sum(DescribedTensor.of(argument).size_bytes for argument in args[:3]))


def _convolved(gradient: DescribedTensor, weight: DescribedTensor) -> int:
    """Count the operations of one of the two products of a convolution's backward; torch's counter ignores groups."""
    return 2 * math.prod(gradient.shape) * math.prod(weight.shape[1:])


def _attention_us(kind: OpKind, kernel: str, target: Target) -> float:
    """Return the time of attention by Rule 4."""
    args, backward = kind.signature[0], kernel.endswith("_backward")
    query, key = (DescribedTensor.of(args[position + backward]) for position in (0, 1))
    causal = len(args) > _CAUSAL[kernel] and args[_CAUSAL[kernel]] is True
    work, by, shares = 0.5 if causal else 1.0, kernel.partition("_")[0], shares_of(target)
    keys = key.shape[2] * work
    share = shares.full if _is_full(kind.dtype, target) else getattr(shares, by)
    share *= keys / (keys + _FILLED[by])
    share *= (_BACKWARD[by] if backward else 1.0) * (_NARROW if query.shape[-1] <= 64 else 1.0)
    if backward and by == "efficient":
        share *= next((less for width, less in _WIDE.items() if query.shape[-1] > width), 1.0)
    arithmetic = kind.flops * work / (rate_of(kind.dtype, target) * share)
    dropped = by == "cudnn" and len(args) > _CAUSAL[kernel] - 1 and args[_CAUSAL[kernel] - 1]
    drawn = math.prod(query.shape[:3]) * keys if dropped else 0.0
    return arithmetic + drawn / (_DRAWN * max(target.processors, 1))


# Traffic


def _traffic_us(kind: OpKind, target: Target) -> float:
    name, shares = operator_name(kind), shares_of(target)
    stream = target.bytes_per_us * shares.stream
    if not kind.flops and kind.moved_bytes < _L2_SHARE * target.l2_bytes:
        stream *= shares.l2
    if name in _OPERANDS and _has_columns(kind):
        return kind.moved_bytes / (stream * shares.written)
    if name == "convolution_backward" and sum(kind.signature[0][10][:2]) > 1:
        return (kind.moved_bytes + _tensors(kind)[0].size_bytes) / (stream * shares.written)
    if name in _OWN:
        return _OWN[name](kind, target, stream)
    if name.startswith("_foreach"):
        return kind.moved_bytes / stream + _LAST_US * _launches_of_many(kind)
    if name in _COPYING and _permutes(kind):
        stream *= shares.permuted
    us = kind.moved_bytes * _EXTRA_PASSES.get(name, 1.0) / stream
    if kind.flops or name in _EXTRA_PASSES or name in _INDEXING or name == _FUSED:
        return us
    return max(us, _loosely_us(kind, target, stream))


def _has_columns(kind: OpKind) -> bool:
    """Return whether a product has several rows and columns, and so is tiled."""
    left, right = (kind.signature[0][position]["tensor"][0] for position in _OPERANDS[operator_name(kind)])
    return 1 not in (left[-2], right[-1])


def _picked_us(kind: OpKind, target: Target, stream: float) -> float:
    once = _PICKED_BEFORE_US if is_before(target, (2, 8)) else _PICKED_US
    return once * math.prod(_tensors(kind)[1].shape)


def _pooled_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of pooling: its windows' elements, all counted, or its traffic."""
    name, first = operator_name(kind), _tensors(kind)[0]
    backward, dims = name.endswith("_backward"), 3 if "3d" in name else 2
    kernel = kind.signature[0][2 if backward else 1]
    result_bytes = first.item_bytes + (8 if "with_indices" in name else 0)
    results = math.prod(first.shape) if backward else (kind.moved_bytes - first.size_bytes) // result_bytes
    windows = results * math.prod(kernel if len(kernel) == dims else kernel * dims)
    rate = _WINDOW_BACKWARD if backward else _WINDOW
    return max(kind.moved_bytes / stream, windows / (rate * max(target.processors, 1)))


def _layer_norm_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of layer norm: few rows leave processors idle, short ones take a minimum time. (Rule 8)"""
    again, rows = kind.moved_bytes * _EXTRA_PASSES["native_layer_norm"], _normalised_rows(kind)
    slowest = max(again / stream, again / (rows * _ROW_BYTES), _ROW_US * rows / max(target.processors, 1))
    return slowest + _copied_first_us(kind, target)


def _layer_norm_backward_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of two kernels: the input's gradient, and the weights', whose columns few blocks sum. (Rule 8)"""
    once, rows = kind.moved_bytes / stream, math.prod(_tensors(kind)[2].shape)
    weights = max(once, _WEIGHTS_US * rows if rows <= _WEIGHTS_ROWS else 0.0)
    return once * (_EXTRA_PASSES["native_layer_norm_backward"] - 1) + weights + _copied_first_us(kind, target)


def _softmax_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of softmax: three reads and a write of long rows, else one of each. (Rule 5)"""
    tensor, dim = _tensors(kind)[0], kind.signature[0][1]
    row, halves = tensor.shape[dim] if tensor.shape else 1, tensor.item_bytes == 2
    if row * tensor.item_bytes > (2 * _ON_CHIP if halves else _ON_CHIP):
        return kind.moved_bytes * 2.0 / stream
    return kind.moved_bytes * (_HALVES if halves and row > _IN_WARP else 1.0) / stream


def _batch_norm_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of batch norm: with channels first, one block sums a channel, and rereads it. (Rule 8)"""
    name, tensors, args = operator_name(kind), _tensors(kind), kind.signature[0]
    image = tensors[0]
    training = args[7 if name.endswith("_backward") else 5]
    if not training or not _is_channels_first(image):
        return kind.moved_bytes * _EXTRA_PASSES[name] / stream
    summed = min(image.shape[1] * _CHANNEL[name], _CHANNELS * max(target.processors, 1))
    return math.prod(image.shape) / summed + kind.moved_bytes / stream


def _cudnn_norm_us(kind: OpKind, target: Target, stream: float) -> float:
    image = _tensors(kind)[0]
    again = _PLANES if image.item_bytes == 4 and _is_channels_first(image) else _EXTRA_PASSES[operator_name(kind)]
    return kind.moved_bytes * again / stream


def _reduced_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of a sum: long columns are divided among blocks, which exchange sums in memory. (Rule 8)"""
    tensors, args = _tensors(kind), kind.signature[0]
    us = kind.moved_bytes / (stream * _REDUCED)
    dims = args[1] if len(args) > 1 and isinstance(args[1], list) else []
    shape = tensors[0].shape if tensors else ()
    dims = [dim % len(shape) for dim in dims] if shape else []
    rows = math.prod(shape[dim] for dim in dims)
    columns = 0 in dims and len(shape) - 1 not in dims
    if not columns or rows <= _CUT:
        return us
    width = math.prod(shape) // rows
    return us + _MEET_US + _COLUMN_US * rows / math.sqrt(max(width / _NARROWEST, 1.0))


def _gathered_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of lookups: a table that fits L2 is read from there. (Rule 7)"""
    name, table = operator_name(kind), _tensors(kind)[0]
    moved = float(kind.moved_bytes)
    if table.size_bytes < _L2_SHARE * target.l2_bytes:
        moved = min(moved, moved / 2 + table.size_bytes)
    again = _EXTRA_PASSES.get(name, 1.0)
    if name == "embedding":
        again = _EMBEDDED_BEFORE if is_before(target, (2, 8)) else _EMBEDDED
    return moved * again / stream


def _table_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of a table's gradient: few indices are scanned one by one, more are sorted first. (Rule 9)"""
    gradient, indices = _tensors(kind)[:2]
    count = math.prod(indices.shape)
    sums_us = _SORTED_INDEX_US * count * min(gradient.shape[-1] / _WIDE_ROW, 1.0)
    return kind.moved_bytes / stream + (_INDEX_US * count if count <= _FEW else _SORTED_US + sums_us)


def _put_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of an `index_put`, which sorts its indices if it accumulates. (Rule 9)"""
    args = kind.signature[0]
    sorts = len(args) > 3 and args[3] is True
    return kind.moved_bytes / stream + (_SORTED_US if sorts else 0.0)


def _rolled_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of a roll: a kernel for each dimension, which computes every element's place."""
    dims = max(len(kind.signature[0][1]), 1)
    elements = math.prod(_tensors(kind)[0].shape)
    return dims * max(kind.moved_bytes / stream, elements / (shares_of(target).cast * max(target.processors, 1)))


def _padded_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of padding: zeros, and a copy into a part of them."""
    given = _tensors(kind)[0]
    wider = [int(size) for size in kind.signature[0][1]]
    if operator_name(kind) == "constant_pad_nd" and max(wider, default=0) <= 0:
        return max(kind.moved_bytes / stream, _loosely_us(kind, target, stream) if any(wider) else 0.0)
    zeros = max(kind.moved_bytes - given.size_bytes, 0)
    singly = math.prod(given.shape) / (shares_of(target).single * max(target.processors, 1))
    return zeros / stream + max(2 * given.size_bytes / stream, singly if any(wider) else 0.0)


_Own = Callable[[OpKind, Target, float], float]
_OWN: dict[str, _Own] = {
    "nll_loss_forward": _picked_us,
    **dict.fromkeys(_POOLING, _pooled_us),
    "native_layer_norm": _layer_norm_us,
    "native_layer_norm_backward": _layer_norm_backward_us,
    "native_batch_norm": _batch_norm_us,
    "native_batch_norm_backward": _batch_norm_us,
    "cudnn_batch_norm": _cudnn_norm_us,
    **dict.fromkeys(_SOFTMAX, _softmax_us),
    **dict.fromkeys(_REDUCING, _reduced_us),
    **dict.fromkeys(("embedding", "index", "gather", "index_select"), _gathered_us),
    "embedding_dense_backward": _table_us,
    "index_put": _put_us,
    "roll": _rolled_us,
    "slice_backward": _padded_us,
    "constant_pad_nd": _padded_us,
}


def _tensors(kind: OpKind) -> list[DescribedTensor]:
    """List the tensors among the positional arguments, and in lists among them."""
    found = [item for a in kind.signature[0] for item in (a if isinstance(a, list) else [a])]
    return [DescribedTensor.of(a) for a in found if isinstance(a, dict) and "tensor" in a]


def _launches_of_many(kind: OpKind) -> int:
    """Count the kernels that an operator on lists is cut into (ATen/native/cuda/MultiTensorApply.cuh)."""
    lists = [a for a in kind.signature[0] if isinstance(a, list) and a and isinstance(a[0], dict)]
    sizes = [math.prod(DescribedTensor.of(a).shape) for a in lists[0]] if lists else []
    chunks = sum(-(-size // _CHUNK) for size in sizes)
    return max(-(-chunks // _BLOCKS), -(-len(sizes) // _LISTED[min(len(lists), 4)])) if sizes else 0


def _normalised_rows(kind: OpKind) -> int:
    x, shape = _tensors(kind)[0], kind.signature[0][1]
    return math.prod(x.shape[: len(x.shape) - (len(shape) if isinstance(shape, list) else shape)])


def _copied_first_us(kind: OpKind, target: Target) -> float:
    """Return the time of the copies that a norm makes of images whose rows are scattered."""
    rate = shares_of(target).scattered * max(target.processors, 1)
    return sum(math.prod(t.shape) / rate for t in _tensors(kind) if rate and t.is_scattered)


def _loosely_us(kind: OpKind, target: Target, stream: float) -> float:
    """Return the time of a pointwise kernel that loads numbers one by one; 0 for any other. (Rule 6)"""
    shares, joins = shares_of(target), operator_name(kind) == "cat"
    tensors = [t for t in _tensors(kind) if math.prod(t.shape) > 1 and t.dtype not in _INTEGERS]
    numbers = [t for t in tensors if t.dtype != "bool"]
    if not numbers or (shares.loose == 1.0 and all(t.item_bytes > 2 for t in numbers)):
        return 0.0
    arranges = shares.scattered > 0 and _arranges(kind, tensors)
    if not arranges and (joins or _loads_together(kind, target, tensors, numbers)):
        return 0.0
    rate = shares.cast if joins or len({t.dtype for t in numbers}) > 1 else shares.single
    if arranges and any(tensor.is_scattered for tensor in tensors):
        rate = shares.scattered
    elements = sum(math.prod(t.shape) for t in tensors) if joins else _broadcast(tensors)
    return max(kind.moved_bytes / (stream * shares.loose), elements / (rate * max(target.processors, 1)))


def _arranges(kind: OpKind, tensors: list[DescribedTensor]) -> bool:
    """Return whether a copy has another order in memory than its argument."""
    name = operator_name(kind)
    if name == "cat":
        return any(tensor.is_scattered or not tensor.is_dense for tensor in tensors)
    return (name == "clone" and _permutes(kind)) or (name == "copy_" and len({t.layout for t in tensors}) > 1)


def _loads_together(
    kind: OpKind, target: Target, tensors: list[DescribedTensor], numbers: list[DescribedTensor]
) -> bool:
    """Return whether several numbers are loaded at once: all tensors have one layout and one type."""
    first, cast = numbers[0], kind.name == "aten._to_copy.default"
    if cast and (first.item_bytes == 2 or is_before(target, (2, 8))):
        return False
    alike = all(tensor.layout == first.layout for tensor in tensors) and first.is_dense
    masked = len(numbers) < len(tensors) and operator_name(kind) not in _MASKED
    return alike and not masked and len({tensor.dtype for tensor in numbers}) == 1


def _broadcast(tensors: list[DescribedTensor]) -> int:
    """Return the number of elements of a pointwise kernel's result."""
    shapes = [tensor.shape[::-1] for tensor in tensors]
    return math.prod(max(sizes) for sizes in itertools.zip_longest(*shapes, fillvalue=1))


def _permutes(kind: OpKind) -> bool:
    """Return whether the first argument's order in memory differs from the order of its dimensions."""
    first = next(iter(_tensors(kind)), None)
    return first is not None and first.is_permuted
