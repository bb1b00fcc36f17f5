"""Sweep: the whole trade of one step between memory and time, from the least feasible peak to no checkpointing.

Rule 1  More budget never costs more: a plan of a smaller budget is one of a larger budget too, so where a search ends
        with a worse plan than a neighbour has, the neighbour's stays.
Rule 2  A bound proved for a larger budget holds for every smaller one.
Rule 3  A strategy's plan under one budget is its plan under every budget down to the peak of that plan, so a strategy
        is asked again only below it.
Rule 4  Between two budgets the optimum lies between their plans. Half of the points are evenly apart; each of the
        others goes where least is known: into the largest such rectangle of bytes and time.

Plans are judged by the evaluator and by `check`. No plan is handed out here: `remat plan` replays the one chosen.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remat.comparing import Heading, peak_of, solve
from remat.errors import RematError
from remat.keeping import NS
from remat.module_space import pose, space_of
from remat.plans import Region, RegionKind
from remat.profiling import Profile
from remat.solution import Limits, Solution, Status
from remat.solvers import EXACT, HEURISTICS, load
from remat.space import Space

CURVE = "exact"  # the strategy whose plans are the curve


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan of one strategy under one budget.

    bound_us, gap  what is proved; None for heuristics
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Heading):
    """`points` is the curve, by rising budget; `others` are the distinct plans of each other strategy, likewise.

    interrupted  somebody pressed Ctrl-C: budgets or strategies are missing
    """

    points: tuple[Point, ...]
    others: tuple[Point, ...]
    interrupted: bool = False

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
    regions: RegionKind = "nodes",
    on_point: Callable[[str, int, int], None] | None = None,
) -> Sweep:
    """The curve at up to `points` budgets, and what other strategies reach under the same.

    limits      for each point       strategies  names in `solvers.STRATEGIES`, by default the heuristics
    regions     what regions are, as in `planning.plan`
    on_point    called before each solution with its strategy, its number from 1, and how many there may be
    """
    names = [name for name in dict.fromkeys(HEURISTICS if strategies is None else strategies) if name != CURVE]
    for name in names:
        load(name)
    trace = _Trace(profile, space_of(profile.graph, regions), limits or Limits(), on_point or (lambda *about: None))
    interrupted = False
    try:
        trace.find_curve(points)
        for name in names:
            trace.find_others(name)
    except KeyboardInterrupt:
        if not trace.curve:
            raise
        interrupted = True
    return Sweep(
        points=tuple(map(trace.point, _with_bounds(_monotone(trace.curve, trace.limits), trace.limits))),
        others=tuple(map(trace.point, trace.others)),
        interrupted=interrupted,
        **Heading.fields_of(profile, trace.problem),
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

    def __init__(self, profile: Profile, space: Space, limits: Limits, on_point: Callable[[str, int, int], None]):
        self.limits, self.on_point = limits, on_point
        self.problem = pose(profile.graph, profile.costs, space, 0)
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
        from remat.solvers.least_peak import least_peak

        least = least_peak(self.problem, self.limits)
        if least.bound_bytes >= (1 - self.limits.gap) * least.peak_bytes:
            return least.peak_bytes, least.regions
        # It ran out of time, and a heuristic may know better: each shows the plan that comes nearest to 0 bytes.
        plans = [least.regions, *(solve(self.problem, name, self.limits).regions for name in HEURISTICS)]
        return min((self._peak(plan), plan) for plan in plans)

    def _add_point(self, budget: int, points: int, least_plan: tuple[Region, ...]) -> None:
        """Solve for one more budget, going on from the plan of the next smaller one."""
        self.on_point(CURVE, len(self.curve) + 1, points)
        at = bisect.bisect(self.curve, budget, key=lambda solved: solved.budget_bytes)
        start = self.curve[at - 1].solution.regions if at else least_plan
        found = solve(self.problem.with_budget(budget), CURVE, dataclasses.replace(self.limits, start=start))
        if found.status == "infeasible":
            raise RematError(f"solver {found.solver} says that no plan keeps {budget} bytes, but one does.")
        if found.status == "unknown":
            found = dataclasses.replace(found, status="feasible", regions=start, objective_us=self._again_us(start))
        self.curve.insert(at, _Solved(CURVE, budget, found, self._peak(found.regions)))
        if found.interrupted:
            raise KeyboardInterrupt

    def find_others(self, name: str) -> None:
        """The distinct plans of a strategy under the budgets of the curve. (Rule 3)"""
        as_it_is = self.problem.memory.peak_without_checkpointing
        peak, at = as_it_is + 1, len(self.others)
        budgets = sorted({*(solved.budget_bytes for solved in self.curve), as_it_is})
        for number, budget in enumerate(reversed(budgets), start=1):
            if budget >= peak:
                continue
            self.on_point(name, number, len(budgets))
            found = solve(self.problem.with_budget(budget), name, self.limits)
            if found.status in ("optimal", "feasible"):
                peak = peak_of(self.problem, name, found.regions)
                self.others.insert(at, _Solved(name, budget, found, peak))
            if found.interrupted:
                raise KeyboardInterrupt

    def _peak(self, regions: tuple[Region, ...]) -> int:
        return self.problem.memory.curve(regions).peak_bytes

    def _again_us(self, regions: tuple[Region, ...]) -> float:
        return self.problem.memory.recompute_time_us(regions, self.problem.op_time_ns / NS)

    def point(self, solved: _Solved) -> Point:
        solution, step_us = solved.solution, self.problem.step_time_us
        again_us, proves = self._again_us(solution.regions), solved.strategy in EXACT
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
        )


def _largest_gap(curve: Sequence[_Solved]) -> int | None:
    """The budget in the middle of where least is known, None where all is. (Rule 4)"""

    def area(pair: tuple[_Solved, _Solved]) -> float:
        left, right = pair
        return (right.peak_bytes - left.budget_bytes) * (left.solution.objective_us - right.solution.objective_us)

    left, right = max(itertools.pairwise(curve), key=area, default=(curve[0], curve[0]))
    between = (left.budget_bytes + right.peak_bytes) // 2
    return between if area((left, right)) > 0 and left.budget_bytes < between < right.peak_bytes else None


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
