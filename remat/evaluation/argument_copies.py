"""Copies that CUDA's kernels make of arguments that are laid out otherwise than they need them.

They are made before the results, in the order of the arguments, and let go of with the operator. Fakes do not show
them. Read in the sources of torch 2.11 to 2.15 that each function names, and held to what PyTorch's CUDA build asks for
(tests/test_workspaces.py).
"""

from __future__ import annotations

from collections.abc import Callable

from remat.evaluation.described_tensor import DescribedTensor, argument
from remat.evaluation.graph import OpKind


def copies_of(kind: OpKind) -> tuple[int, ...]:
    """Return the bytes of each copy that a CUDA kernel of this kind makes of its arguments."""
    copied = _COPIES.get(kind.name)
    return () if copied is None else tuple(copied(kind))


def _unless(fits: Callable[[DescribedTensor], bool], *positions: int) -> Callable[[OpKind], list[int]]:
    """Return a function that lists the bytes of the arguments at these positions that do not fit."""

    def copied(kind: OpKind) -> list[int]:
        given = [argument(kind, position) for position in positions]
        return [each.size_bytes for each in given if not fits(each)]

    return copied


def _contiguous(*positions: int) -> Callable[[OpKind], list[int]]:
    return _unless(lambda each: each.is_contiguous, *positions)


def _roll(kind: OpKind) -> list[int]:
    """List the copies of a roll: `roll_common` in TensorTransformations.h makes one for each dimension but the last."""
    args = kind.signature[0]
    rolled = max(len(args[2]) if len(args) > 2 else 0, 1)
    return _contiguous(0)(kind) if rolled == 1 else [(rolled - 1) * argument(kind, 0).size_bytes]


def _convolution(*positions: int) -> Callable[[OpKind], list[int]]:
    """Return a function that lists copies into cuDNN's layout: channels last if input or weight have it.

    `determine_backend_memory_format` and `_convolution` in native/Convolution.cpp, `cudnn_convolution_backward` in
    cudnn/ConvShared.cpp.
    """

    def copied(kind: OpKind) -> list[int]:
        given = [argument(kind, position) for position in positions]
        has_planes = len(given[-1].shape) > 3  # one dimension has no such layout
        if has_planes and any(each.is_channels_last and not each.is_contiguous for each in given[-2:]):
            return [each.size_bytes for each in given if not each.is_channels_last]
        return [each.size_bytes for each in given if not each.is_contiguous]

    return copied


def _added_values(kind: OpKind) -> list[int]:
    """List the copies of an accumulating `index_put`: `index_put_with_sort_kernel` in cuda/Indexing.cu."""
    return _contiguous(2)(kind) if adds_up(kind) else []


def adds_up(kind: OpKind) -> bool:
    """Return whether an `index_put` accumulates."""
    args = kind.signature[0]
    return len(args) > 3 and bool(args[3])


def _by_token(*positions: int) -> Callable[[OpKind], list[int]]:
    """Return a function that lists copies of tensors not by token: transformers/cuda/attention_backward.cu."""
    return _unless(lambda each: each.is_by_token, *positions)


def _by_planes(kind: OpKind) -> list[int]:
    """List copies of image gradients neither contiguous nor channels last: cuda/UpSample*.cu, cuda/*Pool2d.cu."""
    return _unless(lambda each: each.is_contiguous or each.is_channels_last, 0)(kind)


def _matrices(*positions: int) -> Callable[[OpKind], list[int]]:
    """Return a function that lists copies of matrices with gaps: `prepare_matrix_for_cublas` in cuda/Blas.cpp."""
    return _unless(_is_for_cublas, *positions)


def _is_for_cublas(given: DescribedTensor) -> bool:
    (rows, columns), (down, along) = given.shape[-2:], given.stride[-2:]
    return (along == 1 and down >= max(columns, 1)) or (down == 1 and along >= max(rows, 1))


_COPIES: dict[str, Callable[[OpKind], list[int]]] = {
    "aten._log_softmax.default": _contiguous(0),  # cuda/SoftMax.cu
    "aten._log_softmax_backward_data.default": _contiguous(0, 1),
    "aten._scaled_dot_product_efficient_attention_backward.default": _by_token(0),
    "aten._scaled_dot_product_flash_attention_backward.default": _by_token(0, 4),
    "aten._softmax.default": _contiguous(0),
    "aten._softmax_backward_data.default": _contiguous(1),
    "aten.addmm.default": _matrices(1, 2),
    "aten.avg_pool2d_backward.default": _by_planes,
    "aten.baddbmm.default": _matrices(1, 2),
    "aten.bmm.default": _matrices(0, 1),
    "aten.col2im.default": _contiguous(0),  # cuda/Col2Im.cu
    "aten.convolution.default": _convolution(0, 1),
    "aten.convolution_backward.default": _convolution(0, 1, 2),
    "aten.cumsum.default": _contiguous(0),  # cuda/ScanKernels.cpp
    "aten.embedding.default": _contiguous(1),  # native/Embedding.cpp
    "aten.embedding_dense_backward.default": _contiguous(0, 1),  # cuda/Embedding.cu
    "aten.im2col.default": _contiguous(0),  # cuda/Im2Col.cu
    "aten.index_put.default": _added_values,
    "aten.max_pool2d_with_indices_backward.default": _by_planes,
    "aten.mm.default": _matrices(0, 1),
    "aten.native_layer_norm.default": _contiguous(0),  # cuda/layer_norm_kernel.cu
    "aten.native_layer_norm_backward.default": _contiguous(0, 1),
    "aten.reflection_pad2d_backward.default": _contiguous(0),  # cuda/ReflectionPad.cu
    "aten.roll.default": _roll,
    "aten.upsample_bicubic2d_backward.default": _contiguous(0),
    "aten.upsample_bilinear2d_backward.default": _by_planes,
    "aten.upsample_nearest2d_backward.default": _by_planes,
}
