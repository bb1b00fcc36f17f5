"""Refused sizes: batches that the model's own code does not take, whatever the memory.

Batch normalization refuses one value a channel, a queue of negatives refuses batches that do not divide it, a loss over
pairs refuses odd ones. A search tries sizes that were not given, so such a size is left out, and the search goes on
with others (`windows.neighbours`).

Rule 1  A size is refused if the step's own code, untraced, raises an error on a batch of that size. Other reasons why
        a step cannot be captured hold at every size, and end the search.
Rule 2  Sizes between two records are computed, not run. So a search takes every size for granted, until one that is
        recorded is refused. Then it begins again, and runs the forward once for each size that it looks at.
Rule 3  Most models that are particular take the multiples of a size. If all that was tried agrees with that, for the
        workload's own size, a search between two multiples ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from remat.costing.planning_device import PlanningDevice
from remat.errors import CaptureError
from remat.evaluation.plan import Plan
from remat.evaluation.refused import REFUSED_SIZES, RefusedSize, say_refused, to_json
from remat.planning.profiling import fake_step
from remat.planning.windows import divisors, neighbours
from remat.recording.step_refusals import StepFails
from remat.workload.workload import Workload

T = TypeVar("T")
SEVERAL_REFUSED = 6  # sizes, after which a rule is seen in them (Rule 3)


def with_refused(plan: Plan, refused: Iterable[RefusedSize]) -> Plan:
    """Return `plan`, which names the sizes that its search left out."""
    named = to_json([*refused])
    return dataclasses.replace(plan, about={**plan.about, REFUSED_SIZES: named}) if named else plan


class SizeRefused(CaptureError):
    """The model's own code refuses the size of a batch."""


def error_at(workload: Workload, place: PlanningDevice) -> str | None:
    """Return the error of the step's own code on its batch, in a line; None if there is none. (Rule 1)"""
    try:
        fake_step(workload, place).run_untraced()
    except StepFails as error:
        return error.said
    except CaptureError:
        return None
    return None


class TakenSizes:
    """The batch sizes that a step takes, as far as they were tried."""

    def __init__(self, workload: Workload, place: PlanningDevice):
        self._workload, self._place = workload, place
        self._errors: dict[int, str | None] = {}
        self._own = divisors(workload.batch_size)

    @property
    def refused(self) -> list[RefusedSize]:
        """The refused sizes, the smallest first."""
        length = self._workload.seq_len
        return [RefusedSize(size, length, error) for size, error in sorted(self._errors.items()) if error is not None]

    @contextlib.contextmanager
    def recorded_at(self, size: int) -> Iterator[None]:
        """Record a step within. Raises SizeRefused in place of another CaptureError if the model refuses the size."""
        try:
            yield
        except CaptureError as error:
            if self._look(size) is None:
                raise
            raise self._refuses() from error
        self._errors[size] = None

    def require(self, size: int) -> None:
        """Raise SizeRefused if the model refuses `size`."""
        if self._look(size) is not None:
            raise self._refuses()

    def takes(self, size: int) -> bool:
        """Return whether the model takes `size`; granted until any was refused. (Rule 2)"""
        return not self.refused or self._look(size) is None

    def near(self, size: int, low: int, high: int) -> int | None:
        """Return a size between `low` and `high`, near `size`, that the model takes; None if there seems to be none.

        Where it is refused, multiples of the workload's own size come before other neighbours, and alone once the model
        seems to take nothing else. (Rule 3)
        """
        if low < size < high and self.takes(size):
            return size
        own, tried = self._workload.batch_size, neighbours(size, low, high, self._own)
        if self.takes(own):
            multiples = [each for each in (size // own * own, -(-size // own) * own) if low < each < high]
            tried = iter(multiples) if self._takes_multiples_alone() else itertools.chain(multiples, tried)
        return next(filter(self.takes, tried), None)

    def _takes_multiples_alone(self) -> bool:
        """Return whether the model refused several sizes, and takes a size if it is a multiple of its own. (Rule 3)"""
        is_multiple = {size: size % self._workload.batch_size == 0 for size in self._errors}
        return len(self.refused) >= SEVERAL_REFUSED and all(
            is_multiple[size] == (error is None) for size, error in self._errors.items()
        )

    def found(self, search: Callable[[], T]) -> T:
        """Return what `search` finds; it begins again where it took a size for granted. (Rule 2)"""
        try:
            return search()
        except SizeRefused:
            return search()

    def refusal(self) -> CaptureError:
        """Return the refusal of a model that takes none of the sizes that were tried; its error if the own is one."""
        own = self._workload.batch_size
        if (error := self._look(own)) is not None:
            return CaptureError(
                f"the step of {self._workload.name!r} fails on a batch of its own size, {own}: {error}. So it does on "
                "all others that were tried."
            )
        return CaptureError(
            f"{self._workload.name!r} takes no batch of a size that was tried: {say_refused(self.refused)}. Choose a "
            "global batch that is a multiple of a size that it takes, or plan the step at such a size (`remat.plan`)."
        )

    def _look(self, size: int) -> str | None:
        if size not in self._errors:
            self._errors[size] = error_at(self._workload.sized(size), self._place)
        return self._errors[size]

    def _refuses(self) -> SizeRefused:
        return SizeRefused(f"{self._workload.name!r} does not take every batch size: {say_refused(self.refused)}.")
