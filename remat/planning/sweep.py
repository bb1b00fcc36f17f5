"""Sweep: the whole trade of one step between memory and time, from the least feasible peak to no checkpointing.

Rule 1  More budget never costs more: a plan of a smaller budget is one of a larger budget too, so where a search ends
        with a worse plan than a neighbour has, the neighbour's stays.
Rule 2  A bound proved for a larger budget holds for every smaller one.
Rule 3  A strategy's plan under one budget is its plan under every budget down to the peak of that plan, so a strategy
        is asked again only below it.
Rule 4  Between two budgets the optimum lies between their plans. Half of the points are evenly apart; each of the
        others goes where least is known: into the largest such rectangle of bytes and time.
Rule 5  Where the step may run in other forms (`variants.py`), each budget is that of the form of least price: added
        time, recomputed or the form's own. A form is searched unless its own time, or what is proved of it for a larger
        budget, already says that it costs more. What the step as captured can do is a strategy beside the curve.

Plans are judged by the evaluator and by `check`. No plan is handed out here: `remat plan` replays the one chosen.
Where a step does not run as the evaluator says, every plan is replayed, and the curve is that of the replays.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from remat.costing.profile import Profile
from remat.errors import RematError
from remat.evaluation.form import CAPTURED, Form
from remat.evaluation.plan import Region
from remat.execution import executions
from remat.execution.base import Execution
from remat.execution.executions import EAGER
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.offloading.link import Link
from remat.planning.comparison import (
    FUSE_ONLY,
    KEPT,
    LIGER_LIKE,
    LOSS_WHOLE,
    UNFUSED,
    WITHOUT,
    Heading,
    solve,
)
from remat.planning.links import require_offloads
from remat.planning.search import Judge
from remat.planning.variants import Variant, Variants, require_fusible
from remat.recording.fake_step import FakeStep
from remat.solvers import EXACT, HEURISTICS, every_block, load
from remat.solvers.least_peak import least_peak
from remat.units import gib, ms

COLUMNS = ("budget", "peak", "added", "gap", "regions")
CURVE = "exact"  # the strategy whose plans are the curve


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan of one strategy under one budget.

    recompute_time_us, form_time_us  what it adds to the step: recomputation, and what the form takes longer than the
                   step as captured (negative where fusing makes it faster); `overhead` is their share of the step
    bound_us, gap  what is proved of both together; None for heuristics
    host_bytes     of activations that lie on the host between forward and backward
    form, slices   in which the step runs, for a person; into how many slices losses are cut, 0 where they are whole
    rows           into how many MLPs are, likewise
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
    form_time_us: float = 0.0
    form: str = str(CAPTURED)
    slices: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Heading):
    """`points` is the curve, by rising budget; `others` are the distinct plans of each other strategy, likewise.

    forms        that the curve is the least of, for a person
    interrupted  somebody pressed Ctrl-C: budgets or strategies are missing
    """

    _header: ClassVar[tuple[str, ...]] = COLUMNS

    points: tuple[Point, ...]
    others: tuple[Point, ...]
    forms: tuple[str, ...] = (str(CAPTURED),)
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
            "forms": list(self.forms),
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
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    on_point: Callable[[str, int, int], None] | None = None,
    on_variant: Callable[[Form], None] | None = None,
) -> Sweep:
    """The curve at up to `points` budgets, and what other strategies reach under the same.

    limits      for each point       strategies  names in `solvers.STRATEGIES`, by default the heuristics
    step        what is recorded in other forms, and replayed where the execution is not as the evaluator says; without
                it the curve is that of the step as captured
    execution   how the step will run, as in `planner.plan`
    exact       leave losses whole; else, where slices pay, what the curve is without is a strategy, `LOSS_WHOLE`, and
                so is `LIGER_LIKE`
    fuse        fuse groups, as in `planner.plan`; two strategies more: `UNFUSED` and `FUSE_ONLY`
    link        to the host's memory, for offloads; what the curve is without them is a strategy then, `KEPT`
    on_point    called before each solution with its strategy, its number from 1, and how many there may be
    on_variant  see `variants.Variants`

    Raises UsageError for an unknown strategy, and where groups cannot be fused.
    """
    names = [name for name in dict.fromkeys(HEURISTICS if strategies is None else strategies) if name != CURVE]
    for name in names:
        load(name)
    how = executions.load(execution)
    if link is not None:
        require_offloads(how, None if step is None else step.loop)
        names.append(KEPT)
    if fuse:
        require_fusible(how, None if step is None else step.loop, exact=exact)
    profile = how.price(profile)
    trace = _Trace(profile, how, limits or Limits(), on_point or (lambda *about: None), link)
    variants = None
    if step is not None and not exact:
        variants = Variants(how, step, profile, on_variant=on_variant, fuse=fuse)
    interrupted = False
    try:
        for variant in (*variants, *variants.with_rows()) if variants else ():
            trace.may_run_as(variant.form, variant.profile, variant.extra_us)
        trace.find_curve(points)
        if variants is not None and trace.curve_has_forms:
            trace.show_captured(UNFUSED if fuse else LOSS_WHOLE)
            trace.show_by_hand(variants)
        for name in names:
            trace.find_others(name)
    except KeyboardInterrupt:
        if not trace.curve:
            raise
        interrupted = True
    curve, others = _with_bounds(_monotone(trace.curve)), trace.others
    if step is not None and not how.is_exact:
        judge = Judge(how, step, profile)
        curve, others = _falling(trace.replayed(curve, judge)), trace.replayed(others, judge)
    return Sweep(
        points=tuple(map(trace.point, curve)),
        others=tuple(map(trace.point, others)),
        forms=tuple(str(form.form) for form in trace.forms),
        interrupted=interrupted,
        **Heading.fields_of(profile, trace.problem, how),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """The step in one form, whatever the budget.

    extra_us     what it takes longer than as captured, without recomputation
    least_plan   one that needs least, or least of those known: `least_bytes`; none keeps less than `bound_bytes`
    found        what the curve's strategy does with it, by rising budget
    """

    form: Form
    problem: Problem
    extra_us: float
    bound_bytes: int
    least_bytes: int
    least_plan: tuple[Region, ...]
    found: list[_Solved] = dataclasses.field(default_factory=list)

    def peak(self, solution: Solution) -> int:
        return self.problem.memory.offloading(solution.offloads).curve(solution.regions).peak_bytes

    def recompute_us(self, regions: tuple[Region, ...]) -> float:
        return self.problem.memory.recompute_time_us(regions, self.problem.liveness.op_time_ns / NS)

    def start(self, budget: int) -> tuple[Region, ...]:
        """A plan to begin from: that of the next smaller budget."""
        at = bisect.bisect(self.found, budget, key=lambda solved: solved.budget_bytes)
        return self.found[at - 1].solution.regions if at else self.least_plan

    def least_us(self, budget: int) -> float:
        """What its plans within `budget` are known to cost at least. (Rule 2)"""
        if budget < self.bound_bytes:
            return math.inf
        return max([self.extra_us, *(solved.bound_us for solved in self.found if solved.budget_bytes >= budget)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Solved:
    """What a strategy does under a budget: its plan, for the step in a form, the peak of that, and what is proved.

    bound_us  what every plan that the strategy looked among adds to the step as captured at least
    """

    strategy: str
    budget_bytes: int
    solution: Solution
    form: _Form
    peak_bytes: int
    bound_us: float

    @classmethod
    def by(cls, strategy: str, budget_bytes: int, solution: Solution, form: _Form) -> _Solved:
        bound_us = solution.bound_us + form.extra_us
        return cls(strategy, budget_bytes, solution, form, form.peak(solution), bound_us)

    @property
    def price_us(self) -> float:
        """What the plan adds to the step as captured."""
        return self.solution.objective_us + self.form.extra_us

    def at(self, budget_bytes: int, wall_s: float) -> _Solved:
        """The same plan under another budget, of which it proves nothing."""
        solution = dataclasses.replace(self.solution, status="feasible", wall_s=wall_s)
        return dataclasses.replace(self, budget_bytes=budget_bytes, solution=solution, bound_us=-math.inf)

    def proved(self, bound_us: float) -> _Solved:
        """With what is proved of its budget besides."""
        return dataclasses.replace(self, bound_us=min(max(self.bound_us, bound_us), self.price_us))


class _Trace:
    """A step under many budgets, and what is found so far.

    forms  that it may run in, the captured one first        curve  by rising budget
    """

    def __init__(
        self,
        profile: Profile,
        how: Execution,
        limits: Limits,
        on_point: Callable[[str, int, int], None],
        link: Link | None = None,
    ):
        self.how, self.limits, self.on_point, self._link = how, limits, on_point, link
        self.forms: list[_Form] = []
        self.curve: list[_Solved] = []
        self.others: list[_Solved] = []
        self.may_run_as(CAPTURED, profile, 0.0)

    @property
    def captured(self) -> _Form:
        return self.forms[0]

    @property
    def problem(self) -> Problem:
        """Of the step as captured."""
        return self.captured.problem

    def may_run_as(self, form: Form, profile: Profile, extra_us: float) -> None:
        captured = self.problem if self.forms else None
        problem = self.how.pose(profile, self.how.space(profile.graph), 0, self._link, captured)
        self.forms.append(_Form(form, problem, extra_us, *self._least_peak(problem)))

    def _least_peak(self, problem: Problem) -> tuple[int, int, tuple[Region, ...]]:
        """What every plan needs, the least budget that is known to do, and a plan that keeps it."""
        least = least_peak(problem, self.limits)
        if least.bound_bytes >= (1 - self.limits.gap) * least.peak_bytes:
            return least.bound_bytes, least.peak_bytes, least.regions
        # It ran out of time, and a heuristic may know better: each shows the plan that comes nearest to 0 bytes.
        plans = [least.regions, *(solve(problem, name, self.limits).regions for name in HEURISTICS)]
        # with all that the link carries
        return least.bound_bytes, *min((problem.curve(plan).peak_bytes, plan) for plan in plans)

    def find_curve(self, points: int) -> None:
        least, most = min(form.least_bytes for form in self.forms), self.problem.memory.peak_without_regions
        evenly = np.linspace(least, most, max(points // 2, 2)).astype(int).tolist()
        for budget in sorted({*evenly, most}):
            self._add_point(budget, points)
        while len(self.curve) < points and (between := _largest_gap(self.curve)) is not None:
            self._add_point(between, points)

    def _add_point(self, budget: int, points: int) -> None:
        """Solve for one more budget."""
        self.on_point(CURVE, len(self.curve) + 1, points)
        found = self._least_priced(CURVE, budget)
        assert found is not None, "no budget is below the least of all forms"
        at = bisect.bisect(self.curve, budget, key=lambda solved: solved.budget_bytes)
        self.curve.insert(at, found)
        if found.solution.interrupted:
            raise KeyboardInterrupt

    def _least_priced(self, name: str, budget: int) -> _Solved | None:
        """The plan of the form of least price, with what is proved of all forms; None where there is none. (Rule 5)"""
        best: _Solved | None = None
        bounds_us, interrupted = [math.inf], False
        for form in self.forms:
            least_us = form.least_us(budget) if name == CURVE else form.extra_us
            bounds_us.append(least_us)
            if form.least_bytes > budget or interrupted or (best is not None and least_us >= best.price_us):
                continue
            solved = self._solved(form, name, budget)
            if solved is None:
                continue
            bounds_us[-1], interrupted = max(least_us, solved.bound_us), solved.solution.interrupted
            if best is None or solved.price_us < best.price_us:
                best = solved
        if best is None:
            return None
        solution = dataclasses.replace(best.solution, interrupted=interrupted)
        return dataclasses.replace(best, solution=solution, bound_us=min(*bounds_us, best.price_us))

    def _solved(self, form: _Form, name: str, budget: int) -> _Solved | None:
        """What an exact strategy does with one form, going on from the plan of the next smaller budget."""
        start = form.start(budget)
        found = self._solve(form, budget, name, dataclasses.replace(self.limits, start=start))
        if name == KEPT:
            return _Solved.by(name, budget, found, form) if found.fits else None
        if found.status == "infeasible":
            raise RematError(f"solver {found.solver} says that no plan keeps {budget} bytes, but one does.")
        if found.status == "unknown":
            found = dataclasses.replace(
                found,
                status="feasible",
                regions=start,
                objective_us=form.recompute_us(start),
                offloads=form.problem.with_budget(budget).offloads_of(start),
            )
        solved = _Solved.by(name, budget, found, form)
        at = bisect.bisect(form.found, budget, key=lambda each: each.budget_bytes)
        form.found.insert(at, solved)
        return solved

    def _solve(self, form: _Form, budget: int, name: str, limits: Limits) -> Solution:
        problem = form.problem.with_budget(budget)
        if name == KEPT:
            problem, name = problem.without_link(), CURVE
        trivial = self.how.trivial(problem, None) if name in EXACT else None
        return trivial or solve(problem, name, limits)

    @property
    def curve_has_forms(self) -> bool:
        return any(solved.form is not self.captured for solved in self.curve)

    def show_captured(self, name: str) -> None:
        """What the step as captured does under the budgets of the curve, from its own least one on."""
        form = self.captured
        if all(solved.budget_bytes != form.least_bytes for solved in form.found):
            self._solved(form, CURVE, form.least_bytes)
        plans = {solved.peak_bytes: dataclasses.replace(solved, strategy=name) for solved in _monotone(form.found)}
        self.others += plans.values()

    def show_by_hand(self, variants: Variants) -> None:
        """What people run in another form without a plan: every block beside Liger-Kernel's head, or groups fused."""
        made: list[tuple[str, Callable[[], Variant], Callable[[Problem], tuple[Region, ...]]]] = []
        if variants.are_losses:
            made.append((LIGER_LIKE, variants.like_liger, every_block.regions))
        if variants.fuse:
            made.append((FUSE_ONLY, variants.fused, lambda problem: ()))
        for name, variant_of, regions_of in made:
            try:
                variant = variant_of()
            except RematError:  # the step, or a later graph, reads the logits
                continue
            problem = self.how.pose(variant.profile, self.how.space(variant.profile.graph), 0)
            regions = regions_of(problem)
            least = problem.curve(regions).peak_bytes
            form = _Form(variant.form, problem, variant.extra_us, 0, least, regions)
            solution = Solution(name, "feasible", regions, form.recompute_us(regions))
            self.others.append(_Solved.by(name, least, solution, form))

    def find_others(self, name: str) -> None:
        """The distinct plans of a strategy under the budgets of the curve. (Rule 3)"""
        as_it_is = self.problem.memory.peak_without_checkpointing
        peak, at = as_it_is + 1, len(self.others)
        budgets = sorted({*(solved.budget_bytes for solved in self.curve), as_it_is})
        for number, budget in enumerate(reversed(budgets), start=1):
            if budget >= peak:
                continue
            self.on_point(name, number, len(budgets))
            solved = self._least_priced(name, budget) if name == KEPT else self._captured_by(name, budget)
            if solved is None:
                continue
            if solved.solution.fits:
                solved = dataclasses.replace(solved, peak_bytes=as_it_is) if name == WITHOUT else solved
                peak = solved.peak_bytes
                self.others.insert(at, solved)
            if solved.solution.interrupted:
                raise KeyboardInterrupt

    def _captured_by(self, name: str, budget: int) -> _Solved:
        return _Solved.by(name, budget, self._solve(self.captured, budget, name, self.limits), self.captured)

    def replayed(self, found: Sequence[_Solved], judge: Judge) -> list[_Solved]:
        """`found`, each under the least budget that it keeps as it runs."""
        peaks = [judge.peak(solved.form.problem, solved.solution.regions) for solved in found]
        return [
            dataclasses.replace(
                solved,
                budget_bytes=peak,
                peak_bytes=peak,
                solution=dataclasses.replace(solved.solution, status="feasible"),
                bound_us=self._bound_us(peak, solved, found),
            )
            for peak, solved in zip(peaks, found, strict=True)
        ]

    def _bound_us(self, budget: int, solved: _Solved, found: Sequence[_Solved]) -> float:
        """What is proved for plans that keep `budget` as they run. (Rule 2)"""
        if not self.how.bound_carries or solved.strategy not in EXACT:
            return 0.0
        bounds = (other.bound_us for other in found if other.budget_bytes >= budget)
        return min(max(bounds, default=0.0), solved.price_us)

    def point(self, solved: _Solved) -> Point:
        solution, form, step_us = solved.solution, solved.form, self.problem.step_time_us
        sizes = form.problem.graph.storages.size_bytes
        again_us = form.recompute_us(solution.regions)
        added_us = again_us + solution.stall_us + form.extra_us
        proves = solved.strategy in EXACT and self.how.bound_carries
        gap = self._gap(solved)
        status = solution.status
        if solved.strategy == CURVE:
            status = "optimal" if self.how.is_exact and gap <= self.limits.gap else "feasible"
        return Point(
            strategy=solved.strategy,
            budget_bytes=solved.budget_bytes,
            peak_bytes=solved.peak_bytes,
            step_time_us=step_us + added_us,
            recompute_time_us=again_us,
            overhead=added_us / step_us if step_us else 0.0,
            status=status,
            bound_us=solved.bound_us if proves else None,
            gap=gap if proves else None,
            regions=len(solution.regions),
            saved=sum(len(region.saved) for region in solution.regions),
            wall_s=round(solution.wall_s, 3),
            host_bytes=int(sum(sizes[each.storage] for each in solution.offloads)),
            form_time_us=form.extra_us,
            form=str(form.form),
            slices=max((chunk.slices for chunk in form.form.chunks), default=0),
            rows=form.form.rows,
        )

    def _gap(self, solved: _Solved) -> float:
        """How far the plan may be from the best, as a share of what it costs beyond the cheapest form."""
        cheapest_us = min(form.extra_us for form in self.forms)
        return max(solved.price_us - solved.bound_us, 0.0) / max(solved.price_us - cheapest_us, 1.0)


def _largest_gap(curve: Sequence[_Solved]) -> int | None:
    """The budget in the middle of where least is known, None where all is. (Rule 4)"""

    def area(pair: tuple[_Solved, _Solved]) -> float:
        left, right = pair
        return (right.peak_bytes - left.budget_bytes) * (left.price_us - right.price_us)

    left, right = max(itertools.pairwise(curve), key=area, default=(curve[0], curve[0]))
    between = (left.budget_bytes + right.peak_bytes) // 2
    return between if area((left, right)) > 0 and left.budget_bytes < between < right.peak_bytes else None


def _falling(curve: Sequence[_Solved]) -> list[_Solved]:
    """Of plans as they run those that no other beats in both peak and price, by rising peak."""
    found: list[_Solved] = []
    for solved in sorted(curve, key=lambda each: (each.peak_bytes, each.price_us)):
        if not found or solved.price_us < found[-1].price_us:
            found.append(solved)
    return found


def _monotone(curve: Sequence[_Solved]) -> list[_Solved]:
    """The curve, each point with the best plan of its own budget and all smaller ones. (Rule 1)"""
    found: list[_Solved] = []
    for solved in curve:
        if found and found[-1].price_us < solved.price_us:
            solved = found[-1].at(solved.budget_bytes, solved.solution.wall_s).proved(solved.bound_us)
        found.append(solved)
    return found


def _with_bounds(curve: Sequence[_Solved]) -> list[_Solved]:
    """The curve, each point with the best bound of its own budget and all larger ones. (Rule 2)"""
    bound_us, found = -math.inf, []
    for solved in reversed(curve):
        bound_us = max(bound_us, solved.bound_us)
        found.append(solved.proved(bound_us))
    return found[::-1]
