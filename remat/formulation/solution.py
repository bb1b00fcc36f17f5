"""Limits that a solver is given besides the problem, and the solution that it returns."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from remat.evaluation.plan import Offload, Region
from remat.evaluation.plan import Status as Status
from remat.formulation.clock import Clock
from remat.work import worked_s

NO_TIME_S = 1e-6  # so little is left of a time limit by rounding
SMALL_GAP = 0.005  # so little is not worth more time than `Clock.small_gap_s`
NONE_NEEDED, TRACING_ALONE = "none needed", "tracing alone"  # solvers of plans without regions


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a solver.

    Attributes:
        time_s: Seconds by `now`, None without limit. HiGHS takes them as wall time.
        seed: Seed of random choices.
        workers: Number of threads.
        gap: Relative gap at which a plan counts as optimal.
        on_progress: Called with (objective_us, bound_us) whenever either improves.
        start: A plan of the same space to continue from, within this budget or not.
        below_us: Objective that a plan has to be below to be useful, in microseconds; the solver may stop if none is.
        close_us: Microseconds of an objective above its bound that need no proof, if they are a gap below 0.5 % too.
        clock: Seconds for each part of planning, if `time_s` does not end it first.
        now: The time that all these seconds are of. By default wall time if `time_s` is given, else counted work
            (`remat/work.py`): the same plan on every machine, busy or not. `dataclasses.replace` keeps it.

    Example:
        >>> remat.plan(workload, budget="20GiB", limits=remat.Limits(time_s=30, workers=4))
    """

    time_s: float | None = None
    seed: int = 0
    workers: int = 2
    gap: float = 0.001
    on_progress: Callable[[float, float], None] | None = None
    start: tuple[Region, ...] | None = None
    below_us: float = math.inf
    close_us: float = 0.0
    clock: Clock = Clock()
    now: Callable[[], float] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.now is None:
            object.__setattr__(self, "now", worked_s if self.time_s is None else time.monotonic)

    @property
    def counts_work(self) -> bool:
        return self.now is worked_s

    def suffices(self, objective_us: float, bound_us: float) -> bool:
        """Return whether a plan is close enough to its bound to end a search."""
        left_us, least_us = objective_us - bound_us, max(objective_us, 1.0)
        if math.isinf(objective_us):  # there is no plan yet
            return False
        return left_us <= self.gap * least_us or left_us <= min(SMALL_GAP * least_us, self.close_us)

    def in_wall_time(self, time_s: float) -> Limits:
        """Limit the wall time to `time_s` seconds."""
        return dataclasses.replace(self, time_s=time_s, now=time.monotonic)

    def at_most(self, time_s: float) -> Limits:
        """Limit the time to `time_s` seconds; infinity changes nothing."""
        if math.isinf(time_s):
            return self
        return dataclasses.replace(self, time_s=time_s if self.time_s is None else min(self.time_s, time_s))

    def by_default(self, time_s: float | None) -> Limits:
        """Limit the time to `time_s` seconds if it has no limit."""
        return self if self.time_s is not None or time_s is None else self.at_most(time_s)

    def left(self, started: float, share: float = 1.0) -> Limits:
        """Limit the time to a share of its rest, counted from `started` (`now`)."""
        if self.time_s is None:
            return self
        left_s = self.time_s - (self.now() - started)
        return dataclasses.replace(self, time_s=share * left_s if left_s > NO_TIME_S else 0.0)


@dataclasses.dataclass(frozen=True)
class Solution:
    """Regions in graph order; objective and bound in microseconds of recomputation.

    status       "infeasible" is proved; "unknown": no plan within the budget was found, in time or at all; a
                 heuristic's `regions` are then the nearest plan of its kind
    interrupted  whether the user pressed Ctrl-C
    replayed_bytes  the peak of its plan by the replay, None if it was not replayed
    offloads     storages that its plan has on the host between forward and backward
    stall_us     time that its step waits for their copies; part of the objective
    """

    solver: str
    status: Status
    regions: tuple[Region, ...] = ()
    objective_us: float = 0.0
    bound_us: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False
    replayed_bytes: int | None = None
    offloads: tuple[Offload, ...] = ()
    stall_us: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether `regions` are a plan that keeps the budget."""
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        return gap_of(self.objective_us, self.bound_us)


def gap_of(price_us: float, bound_us: float, cheapest_us: float = 0.0) -> float:
    """Return the distance of a plan from its bound, as a share of its price beyond `cheapest_us`, of at least 1 us.

    cheapest_us  price of the cheapest form without recomputation, negative where fusing makes the step faster
    """
    return max(price_us - bound_us, 0.0) / max(price_us - cheapest_us, 1.0)
