"""Workspaces: what kernels of a CUDA target allocate beyond their outputs, by formula, and what libraries keep.

Fakes do not show these bytes, and a target by name is not at hand to measure them (`operator_timing.py` does where it
is). So the families that matter in training have a formula each, read in the sources that its docstring names. Two
kinds:

* A *workspace* lives during one operator: `FORMULAS`, one function a family, from the signature of the kind.
* *Library workspaces* last: cuBLAS is given one for every handle and stream when it is first used, and a handle belongs
  to a thread. Forward runs in the caller's thread and backward in one of autograd's, so a step that multiplies in both
  keeps two. They are fixed bytes of the step, which `max_memory_allocated` counts.

Copies of arguments (`argument_copies.py`) add to the first kind. For convolutions and recurrent layers cuDNN chooses
an algorithm, with its workspace, by heuristics: of the first there is an estimate, of the second nothing. They are
named by `without_formula`, and every printed plan for a target says so. Everything else is taken to need nothing, as
pointwise kernels do.

Held to an H100 (torch 2.11): of 4,686 kinds of calls that are no convolution, 4,653 take what is said here within
2 KiB, and all but one within 1 MiB. Of 534 convolutions 497 take no more.

Rejected: fitting formulas to measurements where the sources of a kernel can be read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from remat.costing.reductions import Reduction
from remat.evaluation.argument_copies import adds_up, copies_of
from remat.evaluation.described_tensor import ITEM_BYTES, DescribedTensor, argument
from remat.evaluation.graph import LIBRARY_WORKSPACES, Graph, OpKind
from remat.evaluation.libraries import threads_that_multiply
from remat.units import KIB, MIB
from remat.workload.target import Target

_ROWS = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu
_FEW_INDICES = 3072
_MOST_THREADS = 1024
_INDEX_BYTES = 8
_MAXIMUM = 2  # mode of bags
_COUNTED = ("bool", "int32", "int16", "int8", "uint8")
_FEW_KEYS = 256  # which are sorted at once
_FLOAT_BYTES = 4
_WARP = 32
_SUMMED = 100  # pixels of one of the weight's gradients that cuDNN adds up, at least
_PARTIALS, _PARTIAL_BYTES = 512, 32 * MIB  # the most of these, and their most bytes
_TAP_BYTES, _PLANE = 32, 14 * 14  # of each tap of a grouped convolution's backward, for every so many pixels
_MANY_ROWS, _MOST_BLOCKS = 64 * 1024, 32 * 1024  # of layer norm's backward
_SUM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4}  # of the numbers that accumulate


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def flash_attention_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of `dq_accum`, `softmax_d`, and for grouped heads expanded dk and dv.

    `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp and `_flash_attention_backward` in
    attention_backward.cu, torch 2.11 to 2.15; algorithms that need not be deterministic.
    """
    query, key = argument(kind, 1), argument(kind, 2)
    batch, heads, length, size = query.shape
    padded = _up(length, 128)
    size_padded = _up(size, 32 if size <= 128 else 64)
    total = batch * padded * heads * (size_padded + 1) * _FLOAT_BYTES
    if key.shape[1] != heads:
        total += 2 * batch * key.shape[2] * heads * size * query.item_bytes
    return total


def cudnn_attention_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes that cuDNN's frontend adds, `dQ_accum` and `softmax_sum`; its engine may ask for more.

    `CompositeSDPABackwardNode` in node/scaled_dot_product_flash_attention.h of cudnn-frontend 1.23; cuDNN >= 9.0.
    The gradients of grouped keys and values are made for every query head, then summed: measured on an H100, where
    18 kinds of calls agree to 256 bytes.
    """
    query, key, value = (argument(kind, position) for position in (1, 2, 3))
    batch, heads, length, size = query.shape
    expanded = 0
    if key.shape[1] < heads:
        expanded = batch * heads * key.shape[2] * (size + value.shape[-1]) * query.item_bytes
    return batch * heads * length * (size + 1) * _FLOAT_BYTES + expanded


def efficient_attention(kind: OpKind, target: Target) -> int:
    """Return the bytes of an fp32 output to accumulate in, if 16-bit values have more than 128 columns.

    `_efficient_attention_forward` in attention.cu and `kNeedsOutputAccumulatorBuffer` in
    mem_eff_attention/kernel_forward.h, torch 2.11 to 2.15.
    """
    query, value = argument(kind, 0), argument(kind, 2)
    width = value.shape[-1]
    return query.numel // query.shape[-1] * width * _FLOAT_BYTES if width > 128 and value.item_bytes == 2 else 0


def efficient_attention_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of `delta` and fp32 blocks of dq; wide 16-bit heads add dk and dv.

    For fp32, `delta` is the sum of a product of gradient and output.

    `_efficient_attention_backward` in attention_backward.cu, `Params::workspace_size` in
    mem_eff_attention/kernel_backward.h and the kernels of kernels/cutlassB.h for compute capability 8.0 and up, torch
    2.11 to 2.15.
    """
    query, key, value = (argument(kind, position) for position in (1, 2, 3))
    batch, heads, length, size = query.shape
    wide = max(size, value.shape[-1])
    rows, columns = (64, 64) if wide <= 64 else (128, 128 if query.item_bytes == 2 and wide <= 128 else 64)
    blocks = -(-length // rows) * -(-size // columns) * (rows * columns * _FLOAT_BYTES + 16)
    if query.item_bytes == 2 and wide > 128:
        splits = max(min(-(-key.shape[2] // columns), 200 // (batch * heads)), 1)
        blocks += splits * columns * (_up(size, rows) + _up(value.shape[-1], rows)) * _FLOAT_BYTES
    delta = batch * heads * length * _FLOAT_BYTES
    product = 0 if query.item_bytes == 2 else value.shape[-1] * delta
    return max(delta + batch * heads * blocks, 2 * delta + product)


def embedding_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of sorted indices, segments, and fp32 rows, one per partial segment or per row of the table.

    `embedding_dense_backward_cuda` in aten/src/ATen/native/cuda/Embedding.cu and `embedding_backward_cuda_kernel` in
    EmbeddingBackwardKernel.cu, torch 2.11 to 2.15. The buffers of sorting are freed before the rows are made.
    """
    gradient, indices, rows = argument(kind, 0), argument(kind, 1), int(kind.signature[0][2])
    by_frequency = bool(kind.signature[0][4])
    if indices.numel <= _FEW_INDICES and not by_frequency:
        return 0
    return _sorted_into_rows(gradient, indices, rows, by_frequency, target)


def bags_backward(kind: OpKind, target: Target) -> int:
    """Return the same bytes for bags that are summed or averaged, however few indices they have.

    `embedding_bag_backward_cuda_sum_avg` in aten/src/ATen/native/cuda/EmbeddingBag.cu, torch 2.11 to 2.15. A maximum is
    added atomically.
    """
    gradient, indices = argument(kind, 0), argument(kind, 1)
    rows, by_frequency, mode, sparse = kind.signature[0][6:10]
    if mode == _MAXIMUM or sparse or not indices.numel:
        return 0
    return _sorted_into_rows(gradient, indices, int(rows), bool(by_frequency), target)


def _sorted_into_rows(
    gradient: DescribedTensor, indices: DescribedTensor, rows: int, by_frequency: bool, target: Target
) -> int:
    count, width, index_bytes = indices.numel, gradient.shape[-1], indices.item_bytes
    segments = min(count, rows)
    partial = count // _ROWS + segments
    columns = count * (3 + by_frequency) + 2 * segments + partial
    sorting = _sorting_bytes(count, 4 if rows <= _FEW_KEYS else 5, target, index_bytes)
    if _is_fused(segments, partial, width, target):
        accumulated = rows * width * _FLOAT_BYTES if gradient.item_bytes < _FLOAT_BYTES else 0
        return max((columns + partial) * index_bytes + accumulated, sorting)
    return max(columns * index_bytes + partial * width * max(gradient.item_bytes, _FLOAT_BYTES), sorting)


def _is_fused(segments: int, partial: int, width: int, target: Target) -> bool:
    """Return whether few long segments are added atomically, without partial rows (pytorch #172454, January 2026)."""
    padded = _up(width, 32)
    blocks = -(-segments * padded // min(padded, _MOST_THREADS))
    return blocks < 4 * target.processors and partial > 4 * blocks


def convolution(kind: OpKind, target: Target) -> int:
    """Return the usual maximum of cuDNN in forward: channels-last copies of input, result and weight.

    It copies nothing that is channels last already or in groups, and no planes that a product reads directly. Its
    heuristics may need less, and rarely more: see the top of this file. Fitted to 16-bit calls on an H100, cuDNN 9.19.
    """
    given, weight = argument(kind, 0), argument(kind, 1)
    if kind.signature[0][8] > 1 or _has_channels_last(given, weight) or _is_product(kind, given, weight, 3):
        return 0
    result = kind.moved_bytes - given.size_bytes - weight.size_bytes
    return _padded(given) + max(result, 0) + _padded(weight)


def convolution_backward(kind: OpKind, target: Target) -> int:
    """Return the usual maximum of cuDNN in backward: such copies, and partial sums of the weight's gradient."""
    gradient, given, weight = (argument(kind, position) for position in range(3))
    planes = math.prod(given.shape[2:])
    if kind.signature[0][9] > 1:
        each = given.numel // planes * math.prod(weight.shape[2:]) * _TAP_BYTES
        return max(each, min(-(-planes // _PLANE) * each, target.processors * MIB))
    if _is_product(kind, given, weight, 4):
        return given.shape[0] * weight.numel * _FLOAT_BYTES
    parts = min(gradient.numel // gradient.shape[1] // _SUMMED, _PARTIALS)
    partial = _padded(weight) + min(parts * _padded(weight), _PARTIAL_BYTES)
    if _has_channels_last(given, weight):
        return 2 * given.size_bytes + partial
    return _padded(gradient) + _padded(given) + partial


def _has_channels_last(given: DescribedTensor, weight: DescribedTensor) -> bool:
    """Return whether PyTorch gives all tensors of a convolution a channels-last layout before cuDNN sees them."""
    return len(given.shape) == 4 and any(each.is_channels_last and not each.is_contiguous for each in (given, weight))


def _padded(tensor: DescribedTensor) -> int:
    """Return the bytes of a tensor with its channels padded to eight."""
    return tensor.size_bytes // tensor.shape[1] * _up(tensor.shape[1], 8)


def _is_product(kind: OpKind, given: DescribedTensor, weight: DescribedTensor, at: int) -> bool:
    """Return whether a convolution of single pixels is a product without a copy: its planes are aligned rows."""
    stride, padding = kind.signature[0][at : at + 2]
    planes, taps = math.prod(given.shape[2:]), math.prod(weight.shape[2:])
    return taps == 1 and set(stride) == {1} and not any(padding) and planes * given.item_bytes % 16 == 0


def product_with_4_bits(kind: OpKind, target: Target) -> int:
    """Return the bytes of the dequantised weight, and of its fp32 scales, twice since they are quantised too.

    `_dequant_linear_fallback` in bitsandbytes/backends/cuda/ops.py, 0.50, which runs from 1,537 rows on. For fewer a
    kernel of its own may run, which needs none of it.
    """
    (given, packed), block = (argument(kind, position) for position in range(2)), kind.signature[0][4]
    weights = 2 * packed.numel
    return weights * given.item_bytes + 2 * (weights // block) * _FLOAT_BYTES


def reduction(kind: OpKind, target: Target) -> int:
    """Return the bytes of the partial results of a sum that several blocks share (`reductions.py`)."""
    args, options = kind.signature
    shape, stride, dtype = args[0]["tensor"]
    result = (options.get("dtype") or {"dtype": dtype})["dtype"]
    if dtype in _COUNTED and kind.name.startswith("aten.sum."):
        return argument(kind, 0).numel * _INDEX_BYTES  # as int64
    if dtype not in _SUM_BYTES or result not in (dtype, "float32"):
        return 0
    dims = next((arg for arg in args[1:] if isinstance(arg, list)), ())
    sizes = ITEM_BYTES[dtype], _SUM_BYTES[dtype], ITEM_BYTES[result]
    return Reduction(shape, stride, dims, *sizes).workspace_bytes(target)


def variance(kind: OpKind, target: Target) -> int:
    """Return the bytes of a variance's partial results, which are `WelfordData` (`native/SharedReduceOps.h`).

    That is a mean, a sum of squares, and two counts. Threads load two numbers at once: `std_var_kernel_impl` in
    cuda/ReduceMomentKernel.cu.
    """
    shape, stride, dtype = kind.signature[0][0]["tensor"]
    if dtype not in _SUM_BYTES:
        return 0
    dims = next((arg for arg in kind.signature[0][1:] if isinstance(arg, list)), ())
    sizes = ITEM_BYTES[dtype], 4 * _SUM_BYTES[dtype], ITEM_BYTES[dtype]
    return Reduction(shape, stride, dims, *sizes, vector=2).workspace_bytes(target)


def layer_norm_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of weight and bias gradients by blocks of rows, if rows are many, and of their sum.

    `LaunchGammaBetaBackwardCUDAKernel` in aten/src/ATen/native/cuda/layer_norm_kernel.cu, torch 2.8 to 2.15.
    """
    _, _, normalized, _, _, weight, bias, wanted = kind.signature[0]
    width = math.prod(normalized)
    rows, columns = argument(kind, 1).numel // width, -(-width // _WARP)
    sums = [part for part, is_wanted in ((weight, wanted[1]), (bias, wanted[2])) if part is not None and is_wanted]
    if rows <= _MANY_ROWS or width // _WARP >= target.processors // 2 or not sums:
        return 0
    blocks, item_bytes = min(_MOST_BLOCKS // columns, -(-rows // _WARP)), argument(kind, 1).item_bytes
    added = Reduction((blocks, width), (width, 1), (0,), item_bytes, _FLOAT_BYTES, item_bytes).workspace_bytes(target)
    return (len(sums) * blocks + 1) * width * item_bytes + added


def recurrent_cell_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of the sum of the gates' gradients, which is a bias's (`native/cuda/RNN.cu`)."""
    *_, workspace, has_bias = kind.signature[0]
    (rows, columns), _, dtype = workspace["tensor"]
    width = columns // 5 * 3 if "gru" in kind.name else columns  # a GRU's is of five values, for three gates
    sizes = ITEM_BYTES[dtype], _SUM_BYTES[dtype], ITEM_BYTES[dtype]
    return Reduction((rows, width), (width, 1), (0,), *sizes).workspace_bytes(target) if has_bias else 0


def softmax_backward(kind: OpKind, target: Target) -> int:
    """Return the bytes of gradient times result: `softmax_backward_cuda_out` in cuda/SoftMax.cu, torch 2.11 to 2.15."""
    gradient, output = argument(kind, 0), argument(kind, 1)
    return output.numel * max(gradient.item_bytes, output.item_bytes)


def _of_first(times: int) -> Callable[[OpKind, Target], int]:
    """Return a formula of `times` the first argument's bytes, for operators made of others that hold it in between."""
    return lambda kind, target: times * argument(kind, 0).size_bytes


def logsumexp(kind: OpKind, target: Target) -> int:
    """Return the bytes of exponents, and of each row's maximum: `logsumexp_out_impl` in native/ReduceOps.cpp."""
    given, dims = argument(kind, 0), kind.signature[0][1]
    return given.size_bytes + given.size_bytes // math.prod(given.shape[dim] for dim in dims)


def safe_softmax(kind: OpKind, target: Target) -> int:
    """Return the bytes of masks of elements and of rows: `_safe_softmax` in native/transformers/attention.cpp."""
    given, dim = argument(kind, 0), int(kind.signature[0][1])
    return given.numel + given.numel // given.shape[dim]


def masked_scatter(kind: OpKind, target: Target) -> int:
    """Return the bytes of a position for each number, of an expanded mask, and of CUB's sum.

    `masked_scatter_cuda` in cuda/IndexKernel.cpp, torch 2.11 to 2.15; CUB's bytes are a little more than PyTorch's CUDA
    build asked for, from 12,288 to 4,194,304 numbers.
    """
    count, mask = argument(kind, 0).numel, argument(kind, 1)
    expanded = 0 if mask.numel == count and mask.is_contiguous else count
    return count * _INDEX_BYTES + expanded + count // 50 + 1280


def index_put(kind: OpKind, target: Target) -> int:
    """Return the bytes of sorting, if it accumulates: `index_put_with_sort_kernel` in cuda/Indexing.cu.

    The formula holds for torch 2.11 to 2.15.
    """
    if not adds_up(kind):
        return 0
    indices = kind.signature[0][1]
    indexed = zip(argument(kind, 0).shape, indices, strict=False)
    count = max(math.prod(index["tensor"][0]) for index in indices if index is not None)
    keys = math.prod(size for size, index in indexed if index is not None)
    return _sorting_bytes(count, 4 if keys <= _FEW_KEYS else 6, target)


def _sorting_bytes(count: int, columns: int, target: Target, index_bytes: int = _INDEX_BYTES) -> int:
    """Return the bytes of sorting: indices and positions, before, after and in between, and CUB's workspace.

    The number of columns, and a little more than CUB's bytes, are those that PyTorch's CUDA build asked for, from 64 to
    16,777,216 indices. CUDA 13.0's CUB, in the wheels of torch 2.11, takes a column more (measured on an H100).
    """
    columns += _is_before_2_12(target)
    return columns * count * index_bytes + count // 3 + 4096


FORMULAS: dict[str, Callable[[OpKind, Target], int]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": flash_attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": cudnn_attention_backward,
    "aten._thnn_fused_lstm_cell_backward_impl.default": recurrent_cell_backward,
    "remat._thnn_fused_gru_cell_backward.default": recurrent_cell_backward,
    "aten._safe_softmax.default": safe_softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient_attention,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_attention_backward,
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten._embedding_bag_backward.default": bags_backward,
    "aten.binary_cross_entropy_with_logits.default": _of_first(2),  # native/Loss.cpp
    "aten.embedding_dense_backward.default": embedding_backward,
    "bitsandbytes.gemm_4bit.default": product_with_4_bits,
    "aten.im2col.default": _of_first(1),  # cuda/Im2Col.cu
    "aten.index_put.default": index_put,
    "aten.linalg_vector_norm.default": reduction,
    "aten.logsumexp.default": logsumexp,
    "aten.masked_scatter.default": masked_scatter,
    "aten.mean.default": reduction,
    "aten.mean.dim": reduction,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.smooth_l1_loss.default": _of_first(1),  # native/BinaryOps.cpp
    "aten.mse_loss.default": _of_first(1),
    "aten.huber_loss.default": _of_first(1),
    "aten.sum.default": reduction,
    "aten.sum.dim_IntList": reduction,
    **{f"aten.{name}.correction": variance for name in ("std", "std_mean", "var", "var_mean")},
}

MEASURED_ONLY = ("convolution", "cudnn_convolution", "miopen_convolution", "_cudnn_rnn", "mkldnn_rnn")


def workspace_bytes(kind: OpKind, target: Target) -> int:
    """Return the kernel's workspace: known, or by formula on a CUDA target; else 0."""
    if kind.workspace_bytes:
        return kind.workspace_bytes
    if target.device != "cuda":
        return 0
    formula = FORMULAS.get(kind.name)
    return sum(copies_of(kind)) + (formula(kind, target) if formula else 0)


def without_formula(kinds: Sequence[OpKind]) -> tuple[str, ...]:
    """List by name the operators of a step whose workspace is known only if it is measured."""
    names = {kind.name.removeprefix("aten.").partition(".")[0] for kind in kinds}
    return tuple(sorted(name for name in names if name.startswith(MEASURED_ONLY)))


# What lasts


def cublas_bytes(target: Target) -> int:
    """Return the bytes of cuBLAS's workspace for one handle and stream, as torch sets it, and of cublasLt's.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9 (10 and 12
    from torch 2.12 on: pytorch #175344), else :4096:2:16:8. cublasLt shares it (pytorch #168175) in torch 2.13; in 2.11
    it has 1 MiB of its own, from the first product with a bias on (measured on an H100).
    `CUBLAS_WORKSPACE_CONFIG` counts as it is set here. `TORCH_CUBLASLT_UNIFIED_WORKSPACE` changes it too.
    """
    beside = MIB if _is_before_2_12(target) else 0
    if chosen := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):  # sizes in KiB, counts
        return sum(int(size) * int(count) for size, count in chosen) * KIB + beside
    major = target.capability // 10
    if major == 9 or (major in (10, 12) and target.torch_release >= (2, 12)):
        return 32 * MIB + beside
    return 2 * 4 * MIB + 8 * MIB // 64 + beside


def _is_before_2_12(target: Target) -> bool:
    """Return whether the target is known to train with a torch older than 2.12."""
    return bool(target.torch) and target.torch_release < (2, 12)


def with_libraries(graph: Graph, bytes_per_handle: int) -> Graph:
    """Add to `graph` the workspaces that libraries keep from the first step on."""
    size = threads_that_multiply(graph) * bytes_per_handle
    if not size:
        return graph
    fixed: dict[str, Any] = {**graph.fixed_bytes, LIBRARY_WORKSPACES: size}
    first = graph.first_step_bytes and graph.first_step_bytes + size
    untraced = graph.untraced_bytes + size
    return dataclasses.replace(graph, fixed_bytes=fixed, first_step_bytes=first, untraced_bytes=untraced)
