"""The default: exact where it can be proved in time, and never without a plan once there is one.

First the chain (`chain_dp.py`), which in most models proves its own plan in a second. Where its bound and its plan do
not meet, because storages cross the chain, CP-SAT (`cp_sat.py`) goes on from that plan and that bound; where the chain
found none, from the plan with the least peak. If no plan is found in time, or the search is interrupted, the best
heuristic that fits is the answer.
"""

from __future__ import annotations

import dataclasses
import time

from remat.problem import NS, Problem
from remat.solution import Limits, Solution
from remat.solvers import chain_dp, cp_sat, every_block, none, sqrt_n

PATIENCE_S = 40.0  # of the search for a better plan than the chain's, where nobody set a time limit
HEURISTICS = (none.solve, every_block.solve, sqrt_n.solve)


def solve(problem: Problem, limits: Limits) -> Solution:
    """The plan with least recompute time within the budget, with a bound; see `Solution` for the statuses."""
    started = time.monotonic()
    start = chain_dp.solve(problem, limits)
    if start.status in ("optimal", "infeasible") or start.interrupted:
        return start if start.status != "unknown" else _best_heuristic(problem, limits, start, started)
    if start.status == "unknown":
        start = _least_peak(problem, limits, start)
        if start.status == "optimal":
            return dataclasses.replace(start, wall_s=time.monotonic() - started)
    if limits.on_progress is not None:
        limits.on_progress(start.objective_us, start.bound_us)
    if limits.time_s is not None:
        left: float | None = max(limits.time_s - start.wall_s, 0.0)
    else:
        left = PATIENCE_S if start.status == "feasible" else None
    found = cp_sat.solve(problem, dataclasses.replace(limits, time_s=left), start=start)
    if found.status == "unknown":
        return _best_heuristic(problem, limits, found, started)
    return dataclasses.replace(found, wall_s=time.monotonic() - started)


def _least_peak(problem: Problem, limits: Limits, start: Solution) -> Solution:
    """`start`, or the plan with the least peak if that keeps the budget: then there is a plan."""
    highest = problem.with_budget(problem.memory.peak_without_checkpointing)
    peak, regions, _ = cp_sat.least_peak(highest, limits)
    if peak > problem.budget_bytes:
        return start
    objective_us = problem.objective_ns(regions) / NS
    found = dataclasses.replace(start, status="feasible", regions=regions, objective_us=objective_us)
    return dataclasses.replace(found, status="optimal") if found.gap <= limits.gap else found


def _best_heuristic(problem: Problem, limits: Limits, failed: Solution, started: float) -> Solution:
    proposals = [heuristic(problem, limits) for heuristic in HEURISTICS]
    fitting = [solution for solution in proposals if solution.status == "feasible"]
    best = min(fitting, key=lambda solution: solution.objective_us, default=failed)
    return dataclasses.replace(best, bound_us=failed.bound_us, wall_s=time.monotonic() - started)
