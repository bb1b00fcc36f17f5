"""Sweep: the whole trade of one step between memory and time, from the least feasible peak to no checkpointing.

Rule 1  More budget never costs more: a plan of a smaller budget is one of a larger budget too, so where a search ends
        with a worse plan than a neighbour has, the neighbour's stays.
Rule 2  A bound proved for a larger budget holds for every smaller one.
Rule 3  A strategy's plan under one budget is its plan under every budget down to the peak of that plan, so a strategy
        is asked again only below it.
Rule 4  Between two budgets the optimum lies between their plans. Half of the points are evenly apart; each of the
        others goes where least is known: into the largest such rectangle of bytes and time.

Plans are judged by the evaluator and by `check`. No plan is handed out here: `remat plan` replays the one chosen.
Where a step does not run as the evaluator says, every plan is replayed, and the curve is that of the replays.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from remat.costing.profile import Profile
from remat.errors import RematError
from remat.evaluation.plan import Region
from remat.execution import executions
from remat.execution.base import Execution
from remat.execution.executions import EAGER
from remat.formulation.liveness import NS
from remat.formulation.solution import Limits, Solution, Status
from remat.offloading.link import Link
from remat.planning.comparison import KEPT, WITHOUT, Heading, solve
from remat.planning.links import require_offloads
from remat.planning.search import Judge
from remat.recording.fake_step import FakeStep
from remat.solvers import EXACT, HEURISTICS, load
from remat.solvers.least_peak import least_peak
from remat.units import gib, ms

COLUMNS = ("budget", "peak", "added", "gap", "regions")
CURVE = "exact"  # the strategy whose plans are the curve


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan of one strategy under one budget.

    bound_us, gap  what is proved; None for heuristics
    host_bytes     of activations that lie on the host between forward and backward
    """

    strategy: str
    budget_bytes: int
    peak_bytes: int
    step_time_us: float
    recompute_time_us: float
    overhead: float
    status: Status
    bound_us: float | None
    gap: float | None
    regions: int
    saved: int
    wall_s: float
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Heading):
    """`points` is the curve, by rising budget; `others` are the distinct plans of each other strategy, likewise.

    interrupted  somebody pressed Ctrl-C: budgets or strategies are missing
    """

    _header: ClassVar[tuple[str, ...]] = COLUMNS

    points: tuple[Point, ...]
    others: tuple[Point, ...]
    interrupted: bool = False

    @property
    def _title(self) -> str:
        plain = self.without_checkpointing
        step = f"{gib(plain['peak_bytes'])} and {ms(plain['step_time_us'])} without checkpointing"
        return f"{self.about['workload']} on {self.target}, costs {self.costs}: {step}"

    @property
    def _shown(self) -> list[tuple[str, ...]]:
        return [
            (
                gib(point.budget_bytes),
                gib(point.peak_bytes),
                f"{100 * point.overhead:+.1f} %",
                "-" if point.gap is None else f"{100 * point.gap:.2f} %",
                f"{point.regions}",
            )
            for point in self.points
        ]

    def by_strategy(self) -> dict[str, list[Point]]:
        """The points of every other strategy that has any."""
        found: dict[str, list[Point]] = {}
        for point in self.others:
            found.setdefault(point.strategy, []).append(point)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            **self.heading_json(),
            "points": [dataclasses.asdict(point) for point in self.points],
            "others": [dataclasses.asdict(point) for point in self.others],
            "interrupted": self.interrupted,
        }


def sweep(
    profile: Profile,
    *,
    points: int = 20,
    limits: Limits | None = None,
    strategies: Sequence[str] | None = None,
    step: FakeStep | None = None,
    execution: str = EAGER,
    link: Link | None = None,
    on_point: Callable[[str, int, int], None] | None = None,
) -> Sweep:
    """The curve at up to `points` budgets, and what other strategies reach under the same.

    limits      for each point       strategies  names in `solvers.STRATEGIES`, by default the heuristics
    step        what is replayed, where the execution is not as the evaluator says
    execution   how the step will run, as in `planner.plan`
    link        to the host's memory, for offloads; what the curve is without them is a strategy then, `KEPT`
    on_point    called before each solution with its strategy, its number from 1, and how many there may be
    """
    names = [name for name in dict.fromkeys(HEURISTICS if strategies is None else strategies) if name != CURVE]
    for name in names:
        load(name)
    how = executions.load(execution)
    if link is not None:
        require_offloads(how, step)
        names.append(KEPT)
    profile = how.price(profile)
    trace = _Trace(profile, how, limits or Limits(), on_point or (lambda *about: None), link)
    interrupted = False
    try:
        trace.find_curve(points)
        for name in names:
            trace.find_others(name)
    except KeyboardInterrupt:
        if not trace.curve:
            raise
        interrupted = True
    curve, others = _with_bounds(_monotone(trace.curve, trace.limits), trace.limits), trace.others
    if step is not None and not how.is_exact:
        judge = Judge(how, step, profile)
        curve, others = _falling(trace.replayed(curve, judge)), trace.replayed(others, judge)
    return Sweep(
        points=tuple(map(trace.point, curve)),
        others=tuple(map(trace.point, others)),
        interrupted=interrupted,
        **Heading.fields_of(profile, trace.problem, how),
    )


@dataclasses.dataclass(frozen=True)
class _Solved:
    """The solution of a strategy under a budget, and the peak of its plan."""

    strategy: str
    budget_bytes: int
    solution: Solution
    peak_bytes: int


class _Trace:
    """One problem under many budgets, and what is found so far; `curve` is sorted by budget."""

    def __init__(
        self,
        profile: Profile,
        how: Execution,
        limits: Limits,
        on_point: Callable[[str, int, int], None],
        link: Link | None = None,
    ):
        self.how, self.limits, self.on_point = how, limits, on_point
        self.problem = how.pose(profile, how.space(profile.graph), 0, link)
        self.most_bytes = self.problem.memory.peak_without_regions
        self.curve: list[_Solved] = []
        self.others: list[_Solved] = []

    def find_curve(self, points: int) -> None:
        least, plan = self._least_peak()
        evenly = np.linspace(least, self.most_bytes, max(points // 2, 2)).astype(int).tolist()
        for budget in sorted({*evenly, self.most_bytes}):
            self._add_point(budget, points, plan)
        while len(self.curve) < points and (between := _largest_gap(self.curve)) is not None:
            self._add_point(between, points, plan)

    def _least_peak(self) -> tuple[int, tuple[Region, ...]]:
        """The least budget that is known to do, and a plan that keeps it."""
        least = least_peak(self.problem, self.limits)
        if least.bound_bytes >= (1 - self.limits.gap) * least.peak_bytes:
            return least.peak_bytes, least.regions
        # It ran out of time, and a heuristic may know better: each shows the plan that comes nearest to 0 bytes.
        plans = [least.regions, *(solve(self.problem, name, self.limits).regions for name in HEURISTICS)]
        return min((self.problem.curve(plan).peak_bytes, plan) for plan in plans)  # with all that the link carries

    def _add_point(self, budget: int, points: int, least_plan: tuple[Region, ...]) -> None:
        """Solve for one more budget, going on from the plan of the next smaller one."""
        self.on_point(CURVE, len(self.curve) + 1, points)
        at = bisect.bisect(self.curve, budget, key=lambda solved: solved.budget_bytes)
        start = self.curve[at - 1].solution.regions if at else least_plan
        found = self._solve(budget, CURVE, dataclasses.replace(self.limits, start=start))
        if found.status == "infeasible":
            raise RematError(f"solver {found.solver} says that no plan keeps {budget} bytes, but one does.")
        if found.status == "unknown":
            offloads = self.problem.with_budget(budget).offloads_of(start)
            again_us = self._again_us(start)
            found = dataclasses.replace(
                found, status="feasible", regions=start, objective_us=again_us, offloads=offloads
            )
        self.curve.insert(at, _Solved(CURVE, budget, found, self._peak(found)))
        if found.interrupted:
            raise KeyboardInterrupt

    def _solve(self, budget: int, name: str, limits: Limits) -> Solution:
        problem = self.problem.with_budget(budget)
        if name == KEPT:
            problem, name = problem.without_link(), CURVE
        trivial = self.how.trivial(problem, None) if name in EXACT else None
        return trivial or solve(problem, name, limits)

    def find_others(self, name: str) -> None:
        """The distinct plans of a strategy under the budgets of the curve. (Rule 3)"""
        as_it_is = self.problem.memory.peak_without_checkpointing
        peak, at = as_it_is + 1, len(self.others)
        budgets = sorted({*(solved.budget_bytes for solved in self.curve), as_it_is})
        for number, budget in enumerate(reversed(budgets), start=1):
            if budget >= peak:
                continue
            self.on_point(name, number, len(budgets))
            found = self._solve(budget, name, self.limits)
            if found.status in ("optimal", "feasible"):
                peak = as_it_is if name == WITHOUT else self._peak(found)
                self.others.insert(at, _Solved(name, budget, found, peak))
            if found.interrupted:
                raise KeyboardInterrupt

    def _peak(self, solution: Solution) -> int:
        return self.problem.memory.offloading(solution.offloads).curve(solution.regions).peak_bytes

    def _again_us(self, regions: tuple[Region, ...]) -> float:
        return self.problem.memory.recompute_time_us(regions, self.problem.liveness.op_time_ns / NS)

    def replayed(self, found: Sequence[_Solved], judge: Judge) -> list[_Solved]:
        """`found`, each under the least budget that it keeps as it runs."""
        peaks = [judge.peak(self.problem, solved.solution.regions) for solved in found]
        return [
            dataclasses.replace(
                solved,
                budget_bytes=peak,
                peak_bytes=peak,
                solution=dataclasses.replace(
                    solved.solution, status="feasible", bound_us=self._bound_us(peak, solved, found)
                ),
            )
            for peak, solved in zip(peaks, found, strict=True)
        ]

    def _bound_us(self, budget: int, solved: _Solved, found: Sequence[_Solved]) -> float:
        """What is proved for plans that keep `budget` as they run. (Rule 2)"""
        if not self.how.bound_carries or solved.strategy not in EXACT:
            return 0.0
        bounds = (other.solution.bound_us for other in found if other.budget_bytes >= budget)
        return min(max(bounds, default=0.0), solved.solution.objective_us)

    def point(self, solved: _Solved) -> Point:
        solution, step_us = solved.solution, self.problem.step_time_us
        sizes = self.problem.graph.storages.size_bytes
        again_us = self._again_us(solution.regions)
        proves = solved.strategy in EXACT and self.how.bound_carries
        return Point(
            strategy=solved.strategy,
            budget_bytes=solved.budget_bytes,
            peak_bytes=solved.peak_bytes,
            step_time_us=step_us + again_us,
            recompute_time_us=again_us,
            overhead=again_us / step_us if step_us else 0.0,
            status=solution.status,
            bound_us=solution.bound_us if proves else None,
            gap=solution.gap if proves else None,
            regions=len(solution.regions),
            saved=sum(len(region.saved) for region in solution.regions),
            wall_s=round(solution.wall_s, 3),
            host_bytes=int(sum(sizes[each.storage] for each in solution.offloads)),
        )


def _largest_gap(curve: Sequence[_Solved]) -> int | None:
    """The budget in the middle of where least is known, None where all is. (Rule 4)"""

    def area(pair: tuple[_Solved, _Solved]) -> float:
        left, right = pair
        return (right.peak_bytes - left.budget_bytes) * (left.solution.objective_us - right.solution.objective_us)

    left, right = max(itertools.pairwise(curve), key=area, default=(curve[0], curve[0]))
    between = (left.budget_bytes + right.peak_bytes) // 2
    return between if area((left, right)) > 0 and left.budget_bytes < between < right.peak_bytes else None


def _falling(curve: Sequence[_Solved]) -> list[_Solved]:
    """Of plans as they run those that no other beats in both peak and recomputation, by rising peak."""
    found: list[_Solved] = []
    for solved in sorted(curve, key=lambda each: (each.peak_bytes, each.solution.objective_us)):
        if not found or solved.solution.objective_us < found[-1].solution.objective_us:
            found.append(solved)
    return found


def _monotone(curve: Sequence[_Solved], limits: Limits) -> list[_Solved]:
    """The curve, each point with the best plan of its own budget and all smaller ones. (Rule 1)"""
    found: list[_Solved] = []
    for solved in curve:
        if found and found[-1].solution.objective_us < solved.solution.objective_us:
            best, own = found[-1], solved.solution
            kept = dataclasses.replace(best.solution, bound_us=0.0, wall_s=own.wall_s)
            solved = dataclasses.replace(
                solved, solution=_proved(kept, own.bound_us, limits), peak_bytes=best.peak_bytes
            )
        found.append(solved)
    return found


def _with_bounds(curve: Sequence[_Solved], limits: Limits) -> list[_Solved]:
    """The curve, each point with the best bound of its own budget and all larger ones. (Rule 2)"""
    bound_us, found = 0.0, []
    for solved in reversed(curve):
        bound_us = max(bound_us, solved.solution.bound_us)
        found.append(dataclasses.replace(solved, solution=_proved(solved.solution, bound_us, limits)))
    return found[::-1]


def _proved(solution: Solution, bound_us: float, limits: Limits) -> Solution:
    """`solution` with a bound that holds for its budget, if that is higher than its own."""
    bound_us = min(max(bound_us, solution.bound_us), solution.objective_us)
    found = dataclasses.replace(solution, status="feasible", bound_us=bound_us)
    return dataclasses.replace(found, status="optimal") if found.gap <= limits.gap else found
