"""Windows: the samples of one rank in one optimizer step, the ways to cut them, and the search for a largest size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

from remat.evaluation.plan import Region

SEVERAL = 2  # micro-batches: from the second on, all are alike
MOST_SAMPLES = 1 << 20  # samples in a micro-batch, or steps of a sequence
GROWTH = 16  # times a size, within which others are neighbours


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


Near = Callable[[int, int, int], int | None]  # size, low, high -> a size between them to try, None for none


def itself(size: int, low: int, high: int) -> int | None:
    return size


def neighbours(size: int, low: int, high: int, units: Collection[int] = ()) -> Iterator[int]:
    """Yield sizes between `low` and `high`, near `size`: itself, smaller ones, then larger ones.

    Smaller and larger ones are powers of two and `units`, and the nearest multiples of these: a model that does not
    take every size takes such ones.
    """
    high = min(high, GROWTH * max(size, *units, 1) + 1)
    every = {*(1 << power for power in range(high.bit_length())), *units}
    below = {size // unit * unit for unit in every} | {unit for unit in every if unit < size}
    above = {-(-size // unit) * unit for unit in every} - below
    for each in (*sorted(below, reverse=True), *sorted(above)):
        if low < each < high:
            yield each


def between(low: int, high: int, fits: Callable[[int], bool], near: Near = itself) -> int:
    """Return the largest number that fits, if `low` does and `high` does not; `near` gives those that may be tried."""
    while high - low > 1:
        middle = near((low + high) // 2, low, high)
        if middle is None:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(fits: Callable[[int], bool], most: int = MOST_SAMPLES, guess: int = 1, near: Near = itself) -> int:
    """Return the largest number from 1 to `most` that fits, searched in doubling steps from `guess`; 0 for none."""
    first, far = min(max(guess, 1), most), 1
    found = near(first, 0, most + 1)
    if found is None:
        return 0
    known = found
    if fits(known):
        while known + far <= most:
            further = near(known + far, known, min(2 * (known + far), most) + 1)
            if further is None or not fits(further):
                return between(known, further or known + far, fits, near)
            known, far = further, 2 * far
        return between(known, most + 1, fits, near)
    while known > far:
        nearer = near(known - far, 0, known)
        if nearer is None or fits(nearer):
            return between(nearer or 0, known, fits, near)
        known, far = nearer, 2 * far
    return between(0, known, fits, near)


def even_window(micro_batch: int, accumulates: bool) -> Window:
    """Return a window of micro-batches of one size."""
    return Window(micro_batch * (SEVERAL if accumulates else 1), micro_batch)
