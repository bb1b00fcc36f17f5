"""Search: solve, check, replay, and ask again, until a plan keeps the budget as it will run.

One search for every execution and every strategy. What differs between executions is the replay, and the evaluator's
budget that is asked for next (`Execution.next_budget`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.evaluator import Curve, Memory
from remat.evaluation.form import form_of
from remat.evaluation.plan import Offload, Region, to_refs
from remat.execution.base import MOST_TRIES, Execution, Try
from remat.formulation import check
from remat.formulation.problem import Problem
from remat.formulation.solution import NONE_NEEDED, Limits, Solution
from remat.offloading.refs import to_offload_refs
from remat.planning.refusals import infeasible, not_found
from remat.recording.fake_step import FakeStep
from remat.solvers import Solver
from remat.solvers.least_peak import LeastPeak, least_peak
from remat.units import gib

OnReplay = Callable[[int], None]


class Judge:
    """Peaks by the replay of one execution. Strategies often find the same plan, which is replayed once.

    on_replay  called with the number of a replay, from 1, before each
    """

    def __init__(self, execution: Execution, step: FakeStep, profile: Profile, on_replay: OnReplay | None = None):
        self.execution, self.step, self.profile, self.on_replay = execution, step, profile, on_replay
        self._peaks: dict[tuple[tuple[Region, ...], tuple[Offload, ...]], int] = {}

    def peak(self, problem: Problem, regions: tuple[Region, ...], offloads: tuple[Offload, ...] = ()) -> int:
        """Return the peak bytes of the step as it runs under a plan."""
        key = regions, offloads
        if key not in self._peaks:
            if self.on_replay is not None:
                self.on_replay(len(self._peaks) + 1)
            self._peaks[key] = self._replayed(problem, regions, offloads)
        return self._peaks[key]

    def _replayed(self, problem: Problem, regions: tuple[Region, ...], offloads: tuple[Offload, ...]) -> int:
        """Replay the plan, and return the peak of one rank.

        A replay holds whole states. For one rank, its excess over the evaluator is added to the rank's share.
        """
        profile = self.profile
        with self.step.in_form(form_of(problem.graph.about)):
            alive = self.execution.replay(
                self.step,
                problem.graph,
                to_refs(problem.graph, regions, problem.space.modules),
                alignment_bytes=profile.target.alignment_bytes,
                workspace_of=profile.workspace_of(),
                offloads=to_offload_refs(problem.memory, regions, offloads),
            )
        if profile.whole is None:
            return int(alive.max())
        whole = Memory(profile.whole, profile.costs.workspace_per_op(profile.whole)).curve(regions)
        return share_of_peak(alive, whole, problem.memory.curve(regions))


def share_of_peak(alive: np.ndarray, whole: Curve, share: Curve) -> int:
    """Return the peak of one rank: its `share` plus the replay's excess over `whole` at every operator.

    alive  bytes at every operator of the replay. If it ran other operators, the excess at the peak applies throughout
    """
    seen = share.alive_bytes[share.executed]
    if not len(alive) == len(seen) == whole.executed.sum():
        return share.peak_bytes + max(int(alive.max()) - whole.peak_bytes, 0)
    above = np.maximum(alive - whole.alive_bytes[whole.executed], 0)
    return max(share.peak_bytes, int((seen + above).max()))


def search(
    problem: Problem,
    execution: Execution,
    solve: Callable[[Problem, Limits], Solution],
    judge: Judge | None,
    limits: Limits,
    *,
    may_need_none: bool,
) -> Solution:
    """Search with `solve` for a plan of `problem` that keeps its budget as it runs; without `judge` as evaluated.

    may_need_none  take the plan of no regions if it keeps the budget: nothing is better
    limits         of the whole search; if several plans may have to be tried, each gets half of the remaining time

    If plans were found and none of them keeps the budget, the status is "unknown", with the plan of least peak and its
    `replayed_bytes`. The bound is that of the requested budget: it holds under smaller budgets too, whose plans are
    among those of the larger one.
    """
    if judge is not None:  # `below_us` was meant for plans that are not replayed
        limits = dataclasses.replace(limits, below_us=math.inf)
    started, share = limits.now(), 1.0 if execution.runs_as_evaluated or judge is None else 0.5
    trivial = None
    if may_need_none:
        trivial = execution.trivial(problem, None if judge is None else lambda: judge.peak(problem, ()))
        if trivial is not None and trivial.solver == NONE_NEEDED:
            return trivial
    tries: list[Try] = []
    replayed: list[Solution] = []
    first: Solution | None = None
    asked = problem.budget_bytes
    while True:
        at = problem if asked == problem.budget_bytes else problem.with_budget(asked)
        found = trivial if trivial is not None and first is None else solve(at, limits.left(started, share))
        first = first or found
        if not found.fits:
            break
        found = dataclasses.replace(found, offloads=at.offloads_of(found.regions))
        check.require(at, found)
        if judge is None:
            return found
        replayed.append(as_it_runs(problem, found, judge))
        tries.append(Try(asked, _evaluated(problem, found), replayed[-1].replayed_bytes or 0))
        following = execution.next_budget(problem, tries)
        if following is None or len(tries) == MOST_TRIES or found.interrupted:
            break
        asked = following
    if not replayed:
        return first
    kept = [each for each in replayed if (each.replayed_bytes or 0) <= problem.budget_bytes]
    if not kept:
        nearest = min(replayed, key=lambda each: each.replayed_bytes or 0)
        return dataclasses.replace(nearest, status="unknown", bound_us=first.bound_us, interrupted=found.interrupted)
    best = min(kept, key=lambda each: each.objective_us)
    status = best.status if len(tries) == 1 else "feasible"
    bound_us = min(first.bound_us, best.objective_us)
    return dataclasses.replace(best, status=status, bound_us=bound_us, interrupted=found.interrupted)


def as_it_runs(problem: Problem, found: Solution, judge: Judge) -> Solution:
    """Set `replayed_bytes` of `found`."""
    peak = judge.peak(problem, found.regions, found.offloads)
    # A replay does not see fetches between two operators, while saved values are returned.
    peak = max(peak, _evaluated(problem, found)) if found.offloads else peak
    return dataclasses.replace(found, replayed_bytes=peak)


def _evaluated(problem: Problem, found: Solution) -> int:
    return problem.memory.offloading(found.offloads).curve(found.regions).peak_bytes


def least_as_it_runs(problem: Problem, least: LeastPeak, judge: Judge | None) -> Solution:
    """Return the plan with the least peak, offloading all that the link carries, with its peak as it runs."""
    problem = problem.with_budget(least.peak_bytes)
    regions, offloads = least.regions, problem.offloads_of(least.regions)
    found = Solution("least-peak", "feasible", regions, problem.objective_us(regions), offloads=offloads)
    if judge is None:
        return dataclasses.replace(found, replayed_bytes=least.peak_bytes)
    return as_it_runs(problem, found, judge)


def refused(problem: Problem, least: LeastPeak, judge: Judge | None) -> Infeasible:
    """Refuse a budget that no plan keeps, with the least one that a plan keeps as it runs."""
    return infeasible(problem, least, least_as_it_runs(problem, least, judge).replayed_bytes)


def solve_within(
    problem: Problem, execution: Execution, solver: Solver, judge: Judge | None, limits: Limits
) -> Solution:
    """Search with an exact solver.

    Raises Infeasible if no plan keeps the requested budget, NoPlanInTime if none was found.
    """
    started = limits.now()
    found = search(problem, execution, solver, judge, limits, may_need_none=True)
    spent_s = limits.now() - started
    if found.fits:
        return found
    if found.interrupted:
        raise KeyboardInterrupt
    least = least_peak(problem, limits)
    if found.status == "infeasible" or (found.replayed_bytes is None and least.bound_bytes > problem.budget_bytes):
        raise refused(problem, least, judge)

    if judge is None or found.replayed_bytes is None:
        raise not_found(problem, limits, spent_s, lambda: least_as_it_runs(problem, least, judge).replayed_bytes or 0)
    nearest = least_as_it_runs(problem, least, judge)
    enough = nearest.replayed_bytes or 0
    if enough <= problem.budget_bytes:  # where budgets that allow for an excess are below the least peak
        kept = {name: getattr(found, name) for name in ("solver", "bound_us", "wall_s")}
        return dataclasses.replace(nearest, **kept)
    raise NoPlanInTime(
        f"no plan was found that keeps {gib(problem.budget_bytes)} as it runs (execution {execution}). Best replayed "
        f"peak: {gib(min(found.replayed_bytes, enough))}. A budget of {enough}B ({gib(enough)}) will do."
    )
