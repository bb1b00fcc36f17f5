"""When what is begun has to stop: tables, filters, labels and programs look at the clock as they are made."""

from __future__ import annotations

import math
import time

from remat.formulation.solution import Limits


class OutOfTime(Exception):
    """A deadline has passed."""


def deadline_of(limits: Limits, started: float, share: float = 1.0) -> float:
    """When a share of the time limit is over that began at `started`, in seconds of the monotonic clock."""
    return math.inf if limits.time_s is None else started + share * limits.time_s


def check_time(deadline_s: float) -> None:
    """Raises OutOfTime after `deadline_s`."""
    if time.monotonic() > deadline_s:
        raise OutOfTime
