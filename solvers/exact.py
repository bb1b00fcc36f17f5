"""The default: exact where it can be proved in time, and never without a plan once there is one.

First the chain (`chain_dp.py`), which in most models proves its own plan in a second. Where its bound and its plan do
not meet, because storages cross the chain or time ran out, CP-SAT (`cp_sat.py`) goes on from that plan and that bound.
"""

from __future__ import annotations

import dataclasses
import time

from remat.problem import Problem
from remat.solution import Limits, Solution
from remat.solvers import chain_dp, cp_sat


def solve(problem: Problem, limits: Limits) -> Solution:
    """The plan with least recompute time within the budget, with a bound; see `Solution` for the statuses."""
    started = time.monotonic()
    start = chain_dp.solve(problem, limits)
    if start.status in ("optimal", "infeasible"):
        return start
    left = None if limits.time_s is None else max(limits.time_s - start.wall_s, 0.0)
    if limits.on_progress is not None:
        limits.on_progress(start.objective_us, start.bound_us)
    found = cp_sat.solve(problem, dataclasses.replace(limits, time_s=left), start=start)
    return dataclasses.replace(found, wall_s=time.monotonic() - started)
