"""Work: time as a search counts it, so that its plan depends neither on the machine nor on what else runs there.

Each part of a search says how much it has done, in about the seconds that this takes on one core of 2026: 0.7 to 1.6 of
the CPU time on eight models (`python -m benchmarks counted_work`). Searches end by these seconds. Only a time limit
that the caller sets is wall time.
"""

from __future__ import annotations

import threading


class _Work(threading.local):
    seconds = 0.0


_WORK = _Work()


def work(seconds: float) -> None:
    """Count work of about `seconds`."""
    _WORK.seconds += seconds


def worked_s() -> float:
    """Return the seconds of work that this thread has counted; only differences mean anything."""
    return _WORK.seconds
