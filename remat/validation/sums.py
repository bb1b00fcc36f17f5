"""Gradients that chunked losses and chunked runs of nodes sum slice by slice, held to float64.

They are not bitwise those of the eager baseline, whose sums run over all rows at once. The promise is that they are no
further from the truth: for every weight of one, the distance of its sum from the same sum in float64 is at most
`NEAR` times that of the sum over all rows at once, or what chance explains (`most_ratio`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat.chunking.chunked_loss import ChunkedLoss, HeadInputs, MakeContext, Sums, Watch
from remat.chunking.chunked_rows import ChunkedRows

NEAR = 1.1
CHANCE = 3.0  # standard deviations of the logarithm of a ratio
EXACT = 1e-12  # of a gradient's norm: sums in float64 are no more exact


def most_ratio(numbers: int) -> float:
    """Return the largest ratio of two distances from float64 that a promise of `NEAR` allows.

    Both are norms of as many roundings as there are `numbers`, n. Their ratio varies though neither way to add is the
    better one: its square has the F distribution with n and n degrees of freedom, whose logarithm has the variance
    2 psi'(n / 2). So the logarithm of the ratio has about 1 / n for many numbers, 5 / 2 for a single one: of a norm's
    16 weights the ratio says little, of one number next to nothing.
    """
    variance = float(torch.special.polygamma(1, torch.tensor(numbers / 2, dtype=torch.float64, device="cpu"))) / 2
    return NEAR * math.exp(CHANCE * math.sqrt(variance))


@dataclasses.dataclass
class _Distances:
    """Euclidean norms of one gradient: its distance from float64 in slices and at once, and its own norm."""

    in_slices: float
    at_once: float
    norm: float
    numbers: int

    @property
    def ratio(self) -> float:
        floor = EXACT * self.norm
        return max(self.in_slices, floor) / max(self.at_once, floor) if self.norm else 1.0

    def times(self, factor: float) -> _Distances:
        return _Distances(self.in_slices * factor, self.at_once * factor, self.norm * factor, self.numbers)

    def plus(self, other: _Distances) -> _Distances:
        """Return upper bounds for the sum of this gradient and another of the same weight."""
        apart, at_once = self.in_slices + other.in_slices, self.at_once + other.at_once
        return _Distances(apart, at_once, self.norm + other.norm, self.numbers)

    @property
    def is_near(self) -> bool:
        return self.ratio <= most_ratio(self.numbers)


class SumsSeen:
    """Collects the sums of heads and chunked rows of one planned step; `watch` attaches it.

    unseen  context in which runs are computed again: none of its kernels belongs to the step
    """

    def __init__(self, model: nn.Module, unseen: Callable[[], contextlib.AbstractContextManager[Any]]):
        self._unseen = unseen
        self._names = {_key(p): name for name, p in model.named_parameters()}
        self._found: dict[str, _Distances] = {}

    def watch(self, watch: Watch) -> None:
        watch.on_sums, watch.on_rows = self._compare, self._compare_rows

    def _compare_rows(
        self,
        run: ChunkedRows,
        rows: Tensor,
        beside: Sequence[Any],
        gradient: Tensor,
        sums: Sequence[Tensor | None],
        under: MakeContext,
    ) -> None:
        """Compute the distances of `sums` from the run's inputs."""
        wanted = [False, *(found is not None for found in sums)]
        with self._unseen():
            *_, at_once = run.untouched(rows, beside, gradient, wanted, under=under)
            with under():
                taken = [_as_product_takes(run, i, each) for i, each in enumerate(beside)]
            with torch.autocast(rows.device.type, enabled=False):
                exactly = rows.double(), taken
                *_, exact = run.untouched(*exactly, gradient.double(), wanted, precise=True)
            for each, found, whole, truth in zip(beside, sums, at_once, exact, strict=True):
                name = self._names.get(_key(each))
                if name is not None and found is not None and whole is not None and truth is not None:
                    self._note(name, _distances(found, whole, truth))

    def _note(self, name: str, distances: _Distances) -> None:
        """Remember the distances of a gradient; if several runs add to it, bounds for their sum."""
        if (before := self._found.get(name)) is not None:
            distances = before.plus(distances)
        self._found[name] = distances

    def _compare(self, head: ChunkedLoss, given: HeadInputs, sums: Sums) -> Callable[[Tensor], None]:
        """Compute the distances of `sums` from the head's inputs; backward scales them by the gradient of the loss."""
        wanted = False, sums.weight is not None, sums.bias is not None
        with torch.no_grad():
            _, _, at_once = head.whole().run(given, wanted)
            with torch.autocast(given.rows.device.type, enabled=False):
                _, _, exact = head.in_float64().run(_in_float64(head, given), wanted)
        compared: dict[str, _Distances] = {}
        for weight, found, whole, truth in (
            (given.weight, sums.weight, at_once.weight, exact.weight),
            (given.bias, sums.bias, at_once.bias, exact.bias),
        ):
            if weight is not None and found is not None and whole is not None and truth is not None:
                compared[self._names[_key(weight)]] = _distances(found, whole, truth)

        def note(gradient: Tensor) -> None:
            for name, distances in compared.items():
                self._note(name, distances.times(abs(float(gradient))))

        return note

    @property
    def ratios(self) -> dict[str, float]:
        """For every parameter whose gradient is summed in slices, its relative distance from float64."""
        return {name: found.ratio for name, found in self._found.items()}

    def too_far(
        self, names: Sequence[str], untouched: Iterable[Tensor | None], planned: Iterable[Tensor | None]
    ) -> list[str]:
        """List the parameters whose promise is broken.

        Their ratio is too large, or a planned gradient is further from the baseline's than both sums are from float64.
        """
        broken = [name for name, found in self._found.items() if not found.is_near]
        for name, one, other in zip(names, untouched, planned, strict=True):
            if (found := self._found.get(name)) is None or name in broken:
                continue
            if one is None or other is None or apart(one, other) > _allowed(found, one):
                broken.append(name)
        return broken


def _in_float64(head: ChunkedLoss, given: HeadInputs) -> HeadInputs:
    """Convert the inputs of a head to float64: weights after their cast."""
    bias = None if given.bias is None else head.cast(given.bias).double()
    return dataclasses.replace(given, rows=given.rows.double(), weight=head.cast(given.weight).double(), bias=bias)


def _distances(found: Tensor, whole: Tensor, truth: Tensor) -> _Distances:
    return _Distances(apart(found, truth), apart(whole, truth), float(truth.norm()), truth.numel())


def _as_product_takes(run: ChunkedRows, i: int, value: Tensor) -> Tensor:
    """Convert an input beside the rows of a run to float64: weights after their cast."""
    return (run.cast(value) if i in run.weights else value).double()


def _allowed(found: _Distances, gradient: Tensor) -> float:
    """Return the distance allowed by the triangle inequality and two roundings to the dtype."""
    rounding = 2 * torch.finfo(gradient.dtype).eps * float(gradient.double().norm())
    return found.in_slices + found.at_once + rounding


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


def _key(tensor: Tensor) -> int:
    return tensor.data_ptr()
