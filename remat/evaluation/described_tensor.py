"""A tensor as an operator's signature describes it: its shape, its strides and its type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from remat.evaluation.graph import OpKind

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
}


@dataclasses.dataclass(frozen=True)
class DescribedTensor:
    """A tensor as an operator's signature describes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(argument: dict[str, Any]) -> DescribedTensor:
        shape, stride, dtype = argument["tensor"]
        return DescribedTensor(tuple(shape), tuple(stride), dtype)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.dtype, 1)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """Sizes and steps of the dimensions that have more than one place."""
        return tuple((size, step) for size, step in zip(self.shape, self.stride, strict=True) if size > 1)

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill one stretch of memory, in whichever order."""
        expected = 1
        for step, size in sorted((step, size) for size, step in self.layout):
            if step != expected:
                return False
            expected *= size
        return True

    @property
    def is_scattered(self) -> bool:
        """Whether elements that are neighbours by their place are none in memory."""
        return bool(self.layout) and self.layout[-1][1] > 1

    @property
    def is_permuted(self) -> bool:
        """Whether it does not lie in memory in the order of its dimensions."""
        steps = [step for _, step in self.layout]
        return steps != sorted(steps, reverse=True)

    @property
    def row_bytes(self) -> int:
        """Distance between the rows of a matrix, whichever way they lie."""
        pairs = zip(self.stride[-2:], self.shape[-2:], strict=True)
        return max((step for step, size in pairs if size > 1), default=1) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        return self._has_strides_of(range(len(self.shape)))

    @property
    def is_channels_last(self) -> bool:
        return self._has_strides_of((0, *range(2, len(self.shape)), 1))

    @property
    def is_by_token(self) -> bool:
        """Whether (batch, heads, length, size) is laid out as a contiguous (batch, length, heads, size)."""
        return self._has_strides_of((0, 2, 1, 3))

    def _has_strides_of(self, order: Sequence[int]) -> bool:
        """Return whether memory has the dimensions in this order, without gaps; those of size 1 may be anywhere."""
        step = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.stride[dim] != step:
                return False
            step *= self.shape[dim]
        return True


def argument(kind: OpKind, position: int) -> DescribedTensor:
    """Return the tensor that an operator is given at a position."""
    return DescribedTensor.of(kind.signature[0][position])
