"""Search: solve, check, replay, and ask again, until a plan keeps the budget as it will run.

One search for every execution and every strategy. What differs between executions is the replay, and the evaluator's
budget that is asked for next (`Execution.next_budget`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat.costing.profile import Profile
from remat.errors import NoPlanInTime
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region, place
from remat.execution.base import Execution, Try
from remat.formulation import check
from remat.formulation.problem import Problem
from remat.formulation.solution import NONE_NEEDED, Limits, Solution
from remat.planning.assemble import infeasible
from remat.recording.fake_step import FakeStep
from remat.solvers import Solver
from remat.solvers.least_peak import least_peak
from remat.units import gib

OnReplay = Callable[[int, int], None]


class Judge:
    """Peaks by the replay of one execution. Strategies often find the same plan, which is replayed once.

    on_replay  called with the number of a replay and the most that there may be, before each
    """

    def __init__(self, execution: Execution, step: FakeStep, profile: Profile, on_replay: OnReplay | None = None):
        self.execution, self.step, self.profile, self.on_replay = execution, step, profile, on_replay
        self._peaks: dict[tuple[Region, ...], int] = {}

    def peak(self, problem: Problem, regions: tuple[Region, ...]) -> int:
        """Peak bytes of the step as it runs under `regions`, plans of a space of `problem`."""
        if regions not in self._peaks:
            if self.on_replay is not None:
                self.on_replay(len(self._peaks) + 1, self.execution.most_tries)
            self._peaks[regions] = self._replayed(problem, regions)
        return self._peaks[regions]

    @property
    def count(self) -> int:
        """Plans that were replayed."""
        return len(self._peaks)

    @property
    def least_bytes(self) -> int:
        """The least peak among them."""
        return min(self._peaks.values())

    def _replayed(self, problem: Problem, regions: tuple[Region, ...]) -> int:
        """A replay has every state whole. Of one rank's share it says by how much the evaluator is off for all."""
        profile = self.profile
        alive = self.execution.replay(
            self.step,
            problem.graph,
            place(problem.graph, regions, problem.space.modules),
            alignment_bytes=profile.target.alignment_bytes,
            workspace_of=profile.workspace_of(),
        )
        peak = int(alive.max())
        if profile.whole is None:
            return peak
        whole = Memory(profile.whole, profile.costs.workspace_per_op(profile.whole)).curve(regions).peak_bytes
        return problem.memory.curve(regions).peak_bytes + max(peak - whole, 0)


def search(
    problem: Problem, execution: Execution, solve: Callable[[Problem], Solution], judge: Judge | None, limits: Limits
) -> Solution:
    """What `solve` finds for `problem` that keeps its budget as it runs; without `judge` as the evaluator sees it.

    The status is "unknown" where plans were found and none of them keeps the budget. A bound is that of the budget
    asked for: it holds for what is found under smaller ones, whose plans are among those of the larger.
    """
    tries: list[Try] = []
    first: Solution | None = None
    best: Solution | None = None
    asked = problem.budget_bytes if judge is None else execution.first_budget(problem, lambda: _least(problem, limits))
    while True:
        at = problem if asked == problem.budget_bytes else problem.with_budget(asked)
        found = solve(at)
        first = first or found
        if not found.fits:
            break
        check.require(at, found)
        if judge is None:
            return found
        peak = judge.peak(problem, found.regions)
        tries.append(Try(asked, problem.memory.curve(found.regions).peak_bytes, peak))
        if peak <= problem.budget_bytes and (best is None or found.objective_us < best.objective_us):
            best = dataclasses.replace(found, replayed_bytes=peak)
        following = execution.next_budget(problem, tries, lambda: _least(problem, limits))
        if following is None or len(tries) == execution.most_tries or found.interrupted:
            break
        asked = following
    if not tries:
        return first
    if best is None:
        return dataclasses.replace(first, status="unknown", regions=(), bound_us=first.bound_us)
    if not execution.bound_carries:
        return dataclasses.replace(best, status="feasible", bound_us=0.0)
    status = best.status if len(tries) == 1 else "feasible"
    return dataclasses.replace(best, status=status, bound_us=min(first.bound_us, best.objective_us))


def _least(problem: Problem, limits: Limits) -> int:
    return least_peak(problem, limits).peak_bytes


def solve_within(
    problem: Problem, execution: Execution, solver: Solver, judge: Judge | None, limits: Limits
) -> Solution:
    """`search`, by a solver that is exact; the plan of no regions where it keeps the budget.

    Raises Infeasible where no plan keeps the budget that was asked for, NoPlanInTime where none was found.
    """
    trivial = execution.trivial(problem, None if judge is None else lambda: judge.peak(problem, ()))
    if trivial is not None and trivial.solver == NONE_NEEDED:
        return trivial
    asked: list[Solution] = []

    def solve(at: Problem) -> Solution:
        asked.append(trivial if trivial is not None and at is problem else solver(at, limits))
        return asked[-1]

    found = search(problem, execution, solve, judge, limits)
    if found.fits:
        return found
    if asked[0].status == "infeasible":
        raise infeasible(problem, limits)
    if asked[0].status == "unknown":
        raise NoPlanInTime(
            f"no plan within {gib(problem.budget_bytes)} was found in {asked[0].wall_s:.0f} s; raise --time-limit."
        )
    assert judge is not None
    count, needed = judge.count, judge.least_bytes
    enough = min(needed, judge.peak(problem, least_peak(problem, limits).regions))
    raise NoPlanInTime(
        f"no plan was found that keeps {gib(problem.budget_bytes)} as it runs (execution {execution}): of {count} that "
        f"were replayed, the one that needs least needs {gib(needed)}. A budget of {enough}B ({gib(enough)}) will do."
    )
