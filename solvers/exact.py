"""The default: exact where it can be proved in time, and never without a plan once there is one.

First the best heuristic, so that there is a plan from the start. Then the chain (`chain_dp.py`), which in most models
proves its own plan in a second. Where its bound and its plan do not meet, because storages cross the chain, CP-SAT
(`cp_sat.py`) goes on from that plan and that bound, among the runs that the chain could not exclude; where the chain
found no plan, from the one with the least peak. A search that is interrupted or runs out of time gives its best plan.
"""

from __future__ import annotations

import dataclasses
import time

from remat.problem import NS, Problem
from remat.solution import Limits, Solution
from remat.solvers import chain_dp, chen_greedy, cp_sat, every_block, first_k, none, save_matmuls
from remat.solvers.chain_dp import SMALL_GAP

SEARCH_S = 40.0  # of the search for a better plan than the chain's, where nobody set a time limit
MANY_RUNS = 500  # where SMALL_GAP is to be gained among so many, the search is not worth its time
STARTS = (none.solve, every_block.solve, first_k.solve, save_matmuls.solve, chen_greedy.solve)


def solve(problem: Problem, limits: Limits) -> Solution:
    """The plan with least recompute time within the budget, with a bound; see `Solution` for the statuses."""
    started = time.monotonic()
    start = limits.start if limits.start is not None else _best_heuristic(problem, limits).regions
    found = chain_dp.explore(problem, dataclasses.replace(limits, start=start))
    chain = found.solution(limits)
    if chain.status in ("optimal", "infeasible") or chain.interrupted:
        return dataclasses.replace(chain, wall_s=time.monotonic() - started)
    if chain.status == "unknown":
        chain = _least_peak(problem, limits, chain)
    many = found.useful is None or len(found.useful) > MANY_RUNS
    if chain.status == "optimal" or (chain.status == "feasible" and many and chain.gap <= SMALL_GAP):
        return dataclasses.replace(chain, wall_s=time.monotonic() - started)
    if limits.on_progress is not None:
        limits.on_progress(chain.objective_us, chain.bound_us)
    if limits.time_s is not None:
        left: float | None = max(limits.time_s - (time.monotonic() - started), 0.0)
    else:
        left = SEARCH_S if chain.status == "feasible" else None
    searched = cp_sat.solve(problem, dataclasses.replace(limits, time_s=left), start=chain, keep=found.useful)
    return dataclasses.replace(searched, wall_s=time.monotonic() - started)


def _best_heuristic(problem: Problem, limits: Limits) -> Solution:
    proposals = [heuristic(problem, limits) for heuristic in STARTS]
    fitting = [solution for solution in proposals if solution.status == "feasible"]
    return min(fitting, key=lambda solution: solution.objective_us, default=proposals[0])


def _least_peak(problem: Problem, limits: Limits, chain: Solution) -> Solution:
    """`chain`, or the plan with the least peak if that keeps the budget: then there is a plan."""
    highest = problem.with_budget(problem.memory.peak_without_checkpointing)
    peak, regions, _ = cp_sat.least_peak(highest, limits)
    if peak > problem.budget_bytes:
        return chain
    objective_us = problem.objective_ns(regions) / NS
    found = dataclasses.replace(chain, status="feasible", regions=regions, objective_us=objective_us)
    return dataclasses.replace(found, status="optimal") if found.gap <= limits.gap else found
