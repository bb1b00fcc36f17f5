"""When what is begun has to stop: tables, filters, labels and programs look at the clock as they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from remat.formulation.solution import Limits
from remat.work import worked_s


class OutOfTime(Exception):
    """A deadline has passed."""


class Deadline(NamedTuple):
    """A time `at_s` by the clock `now` of some limits."""

    at_s: float = math.inf
    now: Callable[[], float] = worked_s

    @classmethod
    def of(cls, limits: Limits, started: float, share: float = 1.0) -> Deadline:
        """Return the end of a share of the time limit that began at `started`."""
        return cls(math.inf if limits.time_s is None else started + share * limits.time_s, limits.now)

    def in_at_most(self, seconds: float) -> Deadline:
        """Return the deadline in `seconds`, or this one if it comes first."""
        return Deadline(min(self.at_s, self.now() + seconds), self.now)

    @property
    def is_past(self) -> bool:
        return self.now() > self.at_s

    def check(self) -> None:
        """Raise OutOfTime if it is past."""
        if self.is_past:
            raise OutOfTime


NEVER = Deadline()
