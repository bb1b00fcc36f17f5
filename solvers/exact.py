"""The default: exact where it can be proved in time, and never without a plan once there is one.

First a heuristic's guess, so that there is a plan from the start; where it does not fit, the plan with the least peak
(`least_peak.py`), or the verdict that there is none. Then the chain (`chain_dp.py`), which in most models
proves its own plan in a second. Where its bound and its plan do not meet, because storages cross the chain, the program
(`program.py`) is solved among the runs that the chain could not exclude, from the best plan known, be it a heuristic's,
and that bound. Few runs are SCIP's, whose relaxation is
strong there; many are CP-SAT's, which improves plans and tells of it. (HiGHS is faster still on few, but cannot be
interrupted.) A search that is interrupted or runs out of time gives its best plan.

With a link to the host, the plan without offloads comes first, and the search begins from it. A plan that recomputes
for longer than the best known plan is no better, and one that recomputes for less gives the link less time to bring
things back: so a better plan makes the problem tighter, and it is solved once more.

Those searches need OR-tools. Where it is not installed, the best plan is the answer, with the chain's bound.
"""

from __future__ import annotations

import dataclasses
import math
import time

from remat.formulation.problem import Problem
from remat.formulation.solution import SMALL_GAP, Limits, Solution
from remat.solvers import chain_dp, chen_greedy, equal_regions, every_block, first_k, greedy, has_ortools, save_matmuls
from remat.solvers.deadline import Deadline
from remat.solvers.heuristic import Proposal, excess_bytes, fewest_that_fit, recompute_ns
from remat.solvers.least_peak import least_peak

CHAIN_SHARE = 0.8  # of a time limit: the search in the remaining time rarely proves more
ALONE_SHARE = 0.4  # of a time limit, for the plan without offloads: the one with them is never slower
ROUNDS = (0.5, 0.7, 1.0)  # of the rest of the chain's time, with a link
ROUND_REDUCTION = 0.98  # of the recompute time: another round needs at least this reduction
INNER_SHARE = 0.2  # of the remaining time, where a step runs backward inside: its bound is too loose to close
LATE_SHARE = 0.3  # of a time limit: with less left no other search is begun
MANY_RUNS = 500  # with more runs, a search for the last SMALL_GAP is not worth its time
MANY_TRANSITIONS = 20_000  # too many even to tell which runs are useful, for that gap
QUICK = (first_k.solve, save_matmuls.solve, chen_greedy.solve, greedy.solve)


def solve(problem: Problem, limits: Limits) -> Solution:
    """Find the plan with least recompute time within the budget, with a bound; see `Solution` for the statuses."""
    wall_s, started = time.monotonic(), limits.now()
    start = limits.start if limits.start is not None else _guess(problem)
    if problem.link is not None:
        alone = solve(problem.without_link(), dataclasses.replace(limits.left(started, ALONE_SHARE), below_us=math.inf))
        if alone.status == "optimal" and alone.objective_us == 0:
            return alone
        if alone.interrupted:  # its bound is one on plans without offloads
            return dataclasses.replace(alone, status="feasible" if alone.fits else "unknown", bound_us=0.0)
        start = _better(problem, start, alone.regions) if alone.fits else start
    if excess_bytes(problem, start):
        try:
            least = least_peak(problem, limits.left(started, 0.5), fits_bytes=problem.budget_bytes)
        except KeyboardInterrupt:
            return Solution("exact", "unknown", wall_s=time.monotonic() - wall_s, interrupted=True)
        if least.bound_bytes > problem.budget_bytes:
            return Solution("least-peak", "infeasible", wall_s=time.monotonic() - wall_s)
        start = least.regions
    if not excess_bytes(problem, start):
        _tell(limits, problem.objective_us(start), 0.0)
    problem, found, solution = _by_chains(problem, limits.left(started, CHAIN_SHARE), start)
    try:
        if not _is_final(solution, limits):
            solution = _by_heuristics(problem, limits, solution, started)
        if not _is_final(solution, limits):
            solution = _searched(problem, limits, found, solution, started)
    except KeyboardInterrupt:
        solution = dataclasses.replace(solution, interrupted=True)
    return dataclasses.replace(solution, wall_s=time.monotonic() - wall_s)


def _tell(limits: Limits, objective_us: float, bound_us: float) -> None:
    if limits.on_progress is not None:
        limits.on_progress(objective_us, bound_us)


def _is_late(limits: Limits, started: float) -> bool:
    """Return whether too little of the time limit is left to begin anything."""
    return limits.time_s is not None and (limits.left(started).time_s or 0.0) < LATE_SHARE * limits.time_s


def _is_final(solution: Solution, limits: Limits) -> bool:
    is_of_no_use = solution.fits and solution.bound_us >= limits.below_us
    is_close = solution.fits and limits.suffices(solution.objective_us, solution.bound_us)
    return is_of_no_use or is_close or solution.status in ("optimal", "infeasible") or solution.interrupted


def _by_chain(problem: Problem, limits: Limits) -> tuple[chain_dp.Incumbent, Solution]:
    found = chain_dp.explore(problem, limits)
    return found, found.solution(limits)


def _by_chains(problem: Problem, limits: Limits, start: Proposal) -> tuple[Problem, chain_dp.Incumbent, Solution]:
    """Solve along chains, and return the result with the problem as it was last tightened."""
    started, fits = limits.now(), not excess_bytes(problem, start)
    most_us = problem.objective_us(start) if fits else math.inf
    for share in ROUNDS if problem.link is not None else (1.0,):
        tight = problem.recomputing_at_most(most_us)
        found, solution = _by_chain(tight, dataclasses.replace(limits.left(started, share), start=start))
        if _is_final(solution, limits) or not solution.fits or solution.objective_us > ROUND_REDUCTION * most_us:
            break
        start, most_us = solution.regions, solution.objective_us
    return tight, found, solution


def _better(problem: Problem, one: Proposal, other: Proposal) -> Proposal:
    """Return the faster plan that keeps the budget; only the first of the two may exceed it."""
    if excess_bytes(problem, one) or problem.objective_ns(one) >= problem.objective_ns(other):
        return other
    return one


def _guess(problem: Problem) -> Proposal:
    """Return a heuristic's plan that keeps the budget, if one is quickly found."""
    if problem.space.modules is not None:
        return ()
    families = [every_block.regions(problem), *save_matmuls.policies(problem)]
    found = [fewest_that_fit(problem, regions) for regions in families]
    if problem.graph.inner:
        found.append(equal_regions.cheapest(problem))
    fitting = [plan for plan in found if plan is not None]
    return min(fitting, key=lambda plan: recompute_ns(problem, plan), default=())


def _by_heuristics(problem: Problem, limits: Limits, solution: Solution, started: float) -> Solution:
    """Return `solution`, or a heuristic's plan if that is better; heuristics ignore that regions must be modules."""
    if problem.space.modules is not None:
        return solution
    for heuristic in QUICK:
        if solution.fits and _is_late(limits, started):
            break
        plan = heuristic(problem, limits)
        if plan.status == "feasible":
            solution = _with_plan(problem, limits, solution, plan.regions)
    return solution


def _with_plan(problem: Problem, limits: Limits, solution: Solution, regions: Proposal) -> Solution:
    """Return `solution` with another plan that keeps the budget, if that plan is better."""
    objective_us = problem.objective_us(regions)
    if solution.status != "unknown" and solution.objective_us <= objective_us:
        return solution
    found = dataclasses.replace(solution, status="feasible", regions=regions, objective_us=objective_us)
    return dataclasses.replace(found, status="optimal") if found.gap <= limits.gap else found


def _searched(problem: Problem, limits: Limits, found: chain_dp.Incumbent, start: Solution, started: float) -> Solution:
    """Improve `start` by the program, if that is worth the time and OR-tools is installed."""
    if not has_ortools() or limits.left(started).time_s == 0 or (start.fits and _is_late(limits, started)):
        return start
    small = start.status == "feasible" and start.gap <= SMALL_GAP
    if small and found.transition_count() > MANY_TRANSITIONS:
        return start
    useful = found.useful(Deadline.of(limits, started, 1 - LATE_SHARE))
    if start.fits and _is_late(limits, started):
        return start
    if small and (useful is None or len(useful) > MANY_RUNS):
        return start
    _tell(limits, start.objective_us, start.bound_us)
    search = limits.left(started, INNER_SHARE if problem.graph.inner else 1.0)
    if start.status == "feasible":
        search = search.by_default(limits.clock.program_s)
    from remat.solvers import cp_sat, milp

    if useful is not None and len(useful) <= MANY_RUNS:
        return milp.solve(problem, search, start=start, keep=useful, engine="scip")
    return cp_sat.solve(problem, search, start=start, keep=useful)
