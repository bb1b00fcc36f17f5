"""The requests of a kernel's workspace, in parts: a free block may hold a part of the whole.

Costs and formulas (`costing/workspaces.py`) know a sum. Three families that most steps have take much of it in several
requests, and the bytes that the allocator reserves depend on them. Parts follow from the signature and the sum alone,
so that they hold for measured workspaces too. Held to the requests of PyTorch's CUDA build (tests/test_requests.py).
"""

from __future__ import annotations

from collections.abc import Callable

from remat.evaluation.described_tensor import argument
from remat.evaluation.graph import OpKind

_ROWS = 128  # to a multiple of which flash attention rounds the length
_EMBEDDING_ROWS = 10  # of a partial segment, at most
_FLOAT_BYTES, _INDEX_BYTES = 4, 8
_BLOCK_BYTES = 512  # partial results are those of whole blocks of threads


def parts_of(kind: OpKind, size_bytes: int) -> tuple[int, ...]:
    """Divide `size_bytes` into the requests that a kernel of this kind makes, in order."""
    family = next((parts for name, parts in _FAMILIES.items() if kind.name.startswith(name)), None)
    parts = () if family is None else family(kind, size_bytes)
    return parts if parts and min(parts) > 0 else (size_bytes,)


def _flash_attention_backward(kind: OpKind, size_bytes: int) -> tuple[int, ...]:
    """Return the bytes of `softmax_d`, then of `dq_accum` and the rest."""
    batch, heads, length, _ = argument(kind, 1).shape
    first = batch * heads * -(-length // _ROWS) * _ROWS * _FLOAT_BYTES
    return first, size_bytes - first


def _efficient_attention_backward(kind: OpKind, size_bytes: int) -> tuple[int, ...]:
    """Return the bytes of `delta`, then of blocks of dq, dk and dv."""
    query = argument(kind, 1)
    delta = query.numel // query.shape[-1] * _FLOAT_BYTES
    return delta, size_bytes - delta


def _sum(kind: OpKind, size_bytes: int) -> tuple[int, ...]:
    """Return the bytes of partial results, then of a semaphore for each block."""
    semaphores = size_bytes % _BLOCK_BYTES
    return size_bytes - semaphores, semaphores


def _embedding_backward(kind: OpKind, size_bytes: int) -> tuple[int, ...]:
    """Return the bytes of columns of indices, then of a row for each partial segment."""
    gradient, count = argument(kind, 0), argument(kind, 1).numel
    partial = count // _EMBEDDING_ROWS + min(count, int(kind.signature[0][2]))
    rows, last, column = partial * gradient.shape[-1] * _FLOAT_BYTES, partial * _INDEX_BYTES, count * _INDEX_BYTES
    columns, rest = divmod(size_bytes - rows - last, column)
    return (*[column] * columns, *([rest] if rest else []), last, rows) if columns > 0 else ()


_FAMILIES: dict[str, Callable[[OpKind, int], tuple[int, ...]]] = {
    "aten._scaled_dot_product_flash_attention_backward.": _flash_attention_backward,
    "aten._scaled_dot_product_efficient_attention_backward.": _efficient_attention_backward,
    "aten.embedding_dense_backward.": _embedding_backward,
    "aten.linalg_vector_norm.": _sum,
    "aten.mean.": _sum,
    "aten.sum.": _sum,
}
