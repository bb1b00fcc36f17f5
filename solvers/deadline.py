"""When what is begun has to stop: tables, filters, labels and programs look at the clock as they are made."""

from __future__ import annotations

import math
import time

from remat.formulation.solution import Limits


class OutOfTime(Exception):
    """A deadline has passed."""


def deadline_of(limits: Limits, started: float, share: float = 1.0) -> float:
    """Return when a share of the time limit that began at `started` ends, in seconds of the monotonic clock."""
    return math.inf if limits.time_s is None else started + share * limits.time_s


def check_time(deadline_s: float) -> None:
    """Raise OutOfTime after `deadline_s`."""
    if time.monotonic() > deadline_s:
        raise OutOfTime
