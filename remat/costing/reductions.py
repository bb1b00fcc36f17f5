"""Reductions on CUDA: what a sum that several blocks of threads share allocates for their partial results.

Where rows are added up (the gradient of a bias), every thread has columns of its own, and few columns keep few blocks
busy. So the rows are divided among blocks, up to 64 and more, and each writes what it has found for all its threads:
of 4,096 rows of 4,096 numbers in 16 bits, 32 MiB, these are 128 MiB.

`ReduceConfig` and `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh, `TensorIteratorBase::reorder_dimensions`
and `coalesce_dimensions` in aten/src/ATen/TensorIterator.cpp, torch 2.11 to 2.15.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from remat.workload.target import Target

_WARP, _MOST_THREADS = 32, 512
_VECTOR = 4
_LEAST_VALUES, _MOST_VALUES = 16, 256  # for a thread
_SEMAPHORE_BYTES = 4
_MOST_BYTES = (1 << 31) - 1  # of offsets in 32 bits
_THREADS_OF_PROCESSOR = {75: 1024, 86: 1536, 89: 1536, 120: 1536}  # by capability; elsewhere
_THREADS = 2048

_Dimension = tuple[int, int]  # size and stride, in numbers


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum of a tensor over `dims`.

    item_bytes    bytes of one number of the tensor
    sum_bytes     bytes of one number while adding up
    result_bytes  bytes of one number of the result: 2 GiB or more are added up part by part, in `sum_bytes`
    vector        numbers that a thread loads at once where neighbours are added up
    """

    shape: Sequence[int]
    stride: Sequence[int]
    dims: Collection[int]
    item_bytes: int
    sum_bytes: int
    result_bytes: int
    vector: int = _VECTOR

    def workspace_bytes(self, target: Target) -> int:
        """Return the bytes that its kernel allocates beside its result, on a CUDA target."""
        if not target.processors or not math.prod(self.shape):
            return 0
        rank = len(self.shape)
        added = {dim % rank for dim in self.dims} if self.dims else set(range(rank))
        shape = self._within_32_bits()
        apart = math.prod(shape) < math.prod(self.shape) and self.result_bytes < self.sum_bytes
        results = math.prod(size for i, size in enumerate(self.shape) if i not in added)
        sizes = [(i in added, (shape[i], self.stride[i])) for i in reversed(range(rank)) if shape[i] > 1]
        reduced = sorted((d for is_added, d in sizes if is_added), key=lambda d: d[1])
        kept = [d for is_added, d in sizes if not is_added]  # as the result has them, the last first
        parts = self._of(_coalesced(reduced), _coalesced(kept), target)
        return parts + (self.sum_bytes * results if apart else 0)

    def _within_32_bits(self) -> list[int]:
        """Return the shape that one kernel adds up: larger tensors are halved first."""
        shape = list(self.shape)
        while self.item_bytes * sum((n - 1) * s for n, s in zip(shape, self.stride, strict=True)) >= _MOST_BYTES:
            widest = max(range(len(shape)), key=lambda i: (shape[i] - 1) * self.stride[i])
            shape[widest] = -(-shape[widest] // 2)
        return shape

    def _of(self, reduced: list[_Dimension], kept: list[_Dimension], target: Target) -> int:
        inputs, outputs = (math.prod(size for size, _ in dims) for dims in (reduced, kept))
        along = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
        width, height = (inputs, outputs) if along else (outputs, inputs)
        vector = 1
        if along and reduced and reduced[0][1] == 1 and width >= 128 and len(reduced) == 1:
            width //= self.vector
        elif not along and kept[0][1] == 1:
            vector = math.gcd(_VECTOR, kept[0][0], *(stride for _, stride in (*reduced, *kept[1:])))
            width //= vector
        block_width, block_height = _block(width, height, _MOST_THREADS // vector)
        step_input, step_output = (block_width, 1) if along else (1, block_width)
        if -(-inputs // step_input) < min(16 * block_height, _MOST_VALUES):  # each warp has its own outputs
            return 0
        step_input *= block_height
        values, blocks = -(-inputs // step_input), -(-(outputs // vector) // step_output)
        threads = _THREADS_OF_PROCESSOR.get(target.capability, _THREADS)
        wanted = target.processors * (threads // (block_width * block_height))
        if values < _MOST_VALUES or blocks > wanted:
            return 0
        shared_by = max(min(-(-wanted // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
        if shared_by == 1:
            return 0
        partial = self.sum_bytes * outputs * shared_by * (1 if along else block_width * vector)
        return partial + _SEMAPHORE_BYTES * blocks


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the threads of a block along both dimensions: powers of two, at most `most` in all."""
    wide, high = (min(1 << (max(extent, 1).bit_length() - 1), most) for extent in (width, height))
    block_height = min(high, most // min(wide, _WARP))
    return min(wide, most // block_height), block_height


def _coalesced(dims: Sequence[_Dimension]) -> list[_Dimension]:
    """Merge neighbouring dimensions that are contiguous; in a contiguous result they always are."""
    found: list[_Dimension] = []
    for size, stride in dims:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found
