"""Windows: the samples of one rank in one optimizer step, the ways to cut them, and the search for a largest size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from remat.evaluation.plan import Region

SEVERAL = 2  # micro-batches: from the second on, all are alike
MOST_SAMPLES = 1 << 20  # samples in a micro-batch, or steps of a sequence


@dataclasses.dataclass(frozen=True)
class Window:
    """The samples of one rank in one optimizer step, in equal micro-batches; the last may be smaller."""

    samples: int
    micro_batch: int

    @property
    def accumulation(self) -> int:
        return -(-self.samples // self.micro_batch)

    @property
    def last(self) -> int:
        """Size of the last micro-batch."""
        return self.samples - (self.accumulation - 1) * self.micro_batch

    @property
    def weights(self) -> tuple[float, ...]:
        """The factors of each micro-batch's mean loss: the loss is averaged over the samples."""
        sizes = [self.micro_batch] * (self.accumulation - 1) + [self.last]
        return tuple(size / self.samples for size in sizes)


@dataclasses.dataclass(frozen=True)
class BatchCandidate:
    """One way to run the global batch on this budget.

    strategy       "none", "every-block", "offload-all" or "exact"
    time_us        of one optimizer step on a rank; None if it does not fit
    regions, gap   of its plan
    slices         number of chunks of the loss; 0: whole  fused  whether groups are fused
    offloaded_bytes  activations that go to the host in every micro-batch
    """

    strategy: str
    micro_batch: int
    accumulation: int
    last: int
    peak_bytes: int
    time_us: float | None
    overhead: float | None
    regions: tuple[Region, ...] = dataclasses.field(default=(), repr=False)
    gap: float | None = None
    slices: int = 0
    fused: bool = False
    offloaded_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether it keeps the budget."""
        return self.time_us is not None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits, "regions": len(self.regions)}


def samples_that_fit(limit_bytes: int, fixed_bytes: float, bytes_per_sample: float) -> int:
    """Return floor((limit - fixed) / per sample), at least 0: the samples that fit beside fixed bytes."""
    return max(int((limit_bytes - fixed_bytes) // bytes_per_sample), 0)


def divisors(count: int) -> list[int]:
    """List the divisors of `count`, the largest first."""
    return [size for size in range(count, 0, -1) if count % size == 0]


def between(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(fits: Callable[[int], bool], most: int = MOST_SAMPLES, guess: int = 1) -> int:
    """Return the largest number from 1 to `most` that fits, searched in doubling steps from `guess`; 0 for none."""
    known, far = min(max(guess, 1), most), 1
    if fits(known):
        while known + far <= most and fits(known + far):
            known, far = known + far, 2 * far
        return between(known, min(known + far, most + 1), fits)
    while known > far and not fits(known - far):
        known, far = known - far, 2 * far
    return between(max(known - far, 0), known, fits)


def even_window(micro_batch: int, accumulates: bool) -> Window:
    """Return a window of micro-batches of one size."""
    return Window(micro_batch * (SEVERAL if accumulates else 1), micro_batch)
