"""Sweep: the whole trade of one step between memory and time, from the least feasible peak to no checkpointing.

Rule 1  More budget never costs more: a plan of a smaller budget is one of a larger budget too, so where a search ends
        with a worse plan than a neighbour has, the neighbour's stays.
Rule 2  A bound proved for a larger budget holds for every smaller one.
Rule 3  A strategy's plan under one budget is its plan under every budget down to the peak of that plan, so a strategy
        is asked again only below it.
Rule 4  Between two budgets the optimum lies between their plans. Half of the points are evenly apart; each of the
        others goes where least is known: into the largest such rectangle of bytes and time.
Rule 5  Where the step may run in other forms, each budget has the portfolio's plan of least price, however little it
        saves (`portfolio.py`, with `worth` 0). The plans of the captured step are a strategy beside the curve.

Plans are judged by the evaluator and by `check`. No plan is handed out here: `remat plan` replays the one chosen.
Where a step does not run as the evaluator says, every plan is replayed, and the curve is that of the replays.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from remat.capture.generators import generators_kept
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.form import CAPTURED_FORM, Form
from remat.evaluation.plan import Region
from remat.formulation.solution import Solution, Status, gap_of
from remat.planning.forms import StepForm
from remat.planning.heading import Heading
from remat.planning.layers_on_host import weights_wait_us
from remat.planning.planner import studied
from remat.planning.portfolio import fastest
from remat.planning.request import PlanRequest, RequestKeywords
from remat.planning.strategies import FUSE_ONLY, LOSS_WHOLE, NO_OFFLOAD, UNFUSED, forms_by_hand, proves, solve
from remat.planning.study import FoundPlan, Study
from remat.solvers import EXACT, HEURISTICS, NO_CHECKPOINTING, every_block, load
from remat.units import gib, ms
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

OnPoint = Callable[[str, int, int], None]

COLUMNS = ("budget", "peak", "added", "gap", "regions")
CURVE = "exact"  # the strategy whose plans are the curve


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The plan of one strategy under one budget.

    step_time_us   time of the device, even if the host takes longer
    recompute_time_us, form_time_us  time that recomputation and the form add to the captured step (the form's is
                   negative if fusing makes it faster); `overhead` is their share of the step
    bound_us, gap  proved for both times together; None for heuristics
    host_bytes     activations on the host between forward and backward
    form, slices   name of the form, for a person; number of chunks of losses, 0 if they are whole
    rows           number of chunks of MLPs
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
    form: str = str(CAPTURED_FORM)
    slices: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Heading):
    """`points` is the curve, by rising budget; `others` are the distinct plans of each other strategy by rising budget.

    forms        that the curve is the least of, for a person
    interrupted  the user pressed Ctrl-C: budgets or strategies are missing
    """

    _header: ClassVar[tuple[str, ...]] = COLUMNS

    points: tuple[CurvePoint, ...]
    others: tuple[CurvePoint, ...]
    forms: tuple[str, ...] = (str(CAPTURED_FORM),)
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

    def by_strategy(self) -> dict[str, list[CurvePoint]]:
        """Group the points of the other strategies by strategy."""
        found: dict[str, list[CurvePoint]] = {}
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


@generators_kept()
def sweep(
    workload: Workload,
    *,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    points: int = 20,
    strategies: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_point: OnPoint | None = None,
    on_form: Callable[[Form], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Sweep:
    """Trace the least added time of the step of `workload` against its peak, at up to `points` budgets.

    Args:
        workload: The training step.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        points: Number of budgets.
        strategies: Names in `remat.solvers.STRATEGIES` to solve beside the curve, by default the heuristics.
        on_progress: Called with (done, total) while costs are measured.
        on_point: Called before each point, see `sweep_study`.
        on_form: Called with a form of the step before it is recorded.
        **wanted: More arguments of `remat.plan`; limits hold for each point, by default
            `Clock.each_s`, and a budget is ignored.

    Returns:
        The curve, with other strategies beside it; prints as a table.

    Raises:
        CaptureError: The model cannot be captured.
        UsageError: An argument is wrong.

    Example:
        >>> curve = remat.sweep(workload, points=8)
        >>> [(point.peak_bytes, point.overhead) for point in curve.points]
    """
    request = dataclasses.replace(PlanRequest.of(**wanted), budget=None, headroom=None)
    place = find_planning_device(target, costs)
    study = studied(workload, request, place, loop, on_progress=on_progress, on_form=on_form)
    return sweep_study(study, points=points, strategies=strategies, on_point=on_point)


def sweep_study(
    study: Study, *, points: int = 20, strategies: Sequence[str] | None = None, on_point: OnPoint | None = None
) -> Sweep:
    """Trace the curve of a study, and the plans of other strategies under the same budgets.

    Beside the strategies there are the rows of `comparison.py` without one of the means (`LOSS_WHOLE`, `UNFUSED`,
    `NO_OFFLOAD`), and of steps that people run without a planner (`LIGER_LIKE`, `FUSE_ONLY`).

    strategies  names in `solvers.STRATEGIES`, by default the heuristics
    on_point    called before each solution with its strategy, its number from 1, and the maximum number

    Raises UsageError for an unknown strategy.
    """
    names = [name for name in dict.fromkeys(HEURISTICS if strategies is None else strategies) if name != CURVE]
    for name in names:
        load(name)
    if study.link is not None:
        names.append(NO_OFFLOAD)
    trace = _Trace(study, on_point or (lambda *about: None))
    interrupted = False
    try:
        trace.find_forms()
        trace.find_curve(points)
        if trace.curve_has_forms:
            trace.show_captured(UNFUSED if study.request.fuses else LOSS_WHOLE)
            trace.show_by_hand()
        for name in names:
            trace.find_others(name)
    except KeyboardInterrupt:
        if not trace.curve:
            raise
        interrupted = True
    curve, others = _with_bounds(_monotone(trace.curve)), trace.others
    if study.step is not None and not study.how.runs_as_evaluated:
        curve, others = _falling(trace.replayed(curve)), trace.replayed(others)
    heading = Heading.fields_of(study)
    heading["without_checkpointing"]["step_time_us"] = study.device_time_us
    return Sweep(
        points=tuple(map(trace.point, curve)),
        others=tuple(map(trace.point, others)),
        forms=tuple(str(at.form) for at in trace.forms),
        interrupted=interrupted,
        **heading,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _SolvedPoint:
    """A strategy's plan under a budget, the peak of that plan, and its proved bound.

    bound_us  the least that any plan in the strategy's space adds to the captured step
    """

    strategy: str
    budget_bytes: int
    found: FoundPlan
    peak_bytes: int
    bound_us: float

    @property
    def price_us(self) -> float:
        """The time that the plan adds to the step without a plan."""
        return self.found.price_us

    def at(self, budget_bytes: int, wall_s: float) -> _SolvedPoint:
        """Return the same plan under another budget, without a proof."""
        solution = dataclasses.replace(self.found.solution, status="feasible", wall_s=wall_s)
        found = dataclasses.replace(self.found, solution=solution)
        return dataclasses.replace(self, budget_bytes=budget_bytes, found=found, bound_us=-math.inf)

    def proved(self, bound_us: float) -> _SolvedPoint:
        """Return the point with the further proof for its budget."""
        return dataclasses.replace(self, bound_us=min(max(self.bound_us, bound_us), self.price_us))


class _Trace:
    """A step under many budgets, and the plans found so far.

    forms  that it may run in, the captured one first        curve  by rising budget
    """

    def __init__(self, study: Study, on_point: OnPoint):
        self._study, self._on_point = study, on_point
        limits = study.request.limits
        clock = dataclasses.replace(limits.clock, first_s=math.inf)  # a search has all the time
        self._limits = dataclasses.replace(limits.by_default(clock.each_s), clock=clock)
        self.forms: list[StepForm] = [study.captured]
        self.curve: list[_SolvedPoint] = []
        self.others: list[_SolvedPoint] = []

    def find_forms(self) -> None:
        forms = self._study.forms
        self.forms += [*forms, *forms.with_rows()] if forms is not None else []

    def _least_bytes(self, at: StepForm) -> int:
        """Return the least budget that is known to suffice."""
        least = self._study.least(at, self._limits)
        if least.bound_bytes < (1 - self._limits.gap) * least.peak_bytes:
            # It ran out of time, and a heuristic may be better: each returns the plan that comes nearest to 0 bytes.
            problem = self._study.problem(at, 0)
            for name in HEURISTICS:
                self._study.know_plan(at, solve(problem, name, self._limits).regions)
        return self._study.least_known_bytes(at)

    def find_curve(self, points: int) -> None:
        least = min(map(self._least_bytes, self.forms))
        most = self._study.problem(self._study.captured, 0).memory.peak_without_regions
        evenly = np.linspace(least, most, max(points // 2, 2)).astype(int).tolist()
        for budget in sorted({*evenly, most}):
            self._add_point(budget, points)
        while len(self.curve) < points and (between := _largest_gap(self.curve)) is not None:
            self._add_point(between, points)

    def _add_point(self, budget: int, points: int) -> None:
        """Solve for one more budget."""
        self._on_point(CURVE, len(self.curve) + 1, points)
        solved = self._least_priced(self._study, CURVE, budget)
        at = bisect.bisect(self.curve, budget, key=lambda each: each.budget_bytes)
        self.curve.insert(at, solved)
        if solved.found.solution.interrupted:
            raise KeyboardInterrupt

    def _least_priced(self, study: Study, name: str, budget: int) -> _SolvedPoint:
        """Find the plan of least price among all forms, with the proof for all forms. (Rule 5)"""
        outcome = fastest(study, budget, self._limits, judged=False, worth=0.0)
        solution = dataclasses.replace(outcome.found.solution, interrupted=outcome.interrupted)
        found = dataclasses.replace(outcome.found, solution=solution)
        return _SolvedPoint(name, budget, found, outcome.peak_bytes, outcome.floor_us)

    @property
    def curve_has_forms(self) -> bool:
        return any(solved.found.at is not self._study.captured for solved in self.curve)

    def show_captured(self, name: str) -> None:
        """Add the plans of the unchanged form under the budgets of the curve, from its own least budget on."""
        study, at = self._study, self._study.captured
        self._on_point(name, 1, 1)
        first = study.solve(at, study.least_known_bytes(at), self._limits)  # seldom by the plan of least peak
        budgets = {study.least_known_bytes(at), *(solved.budget_bytes for solved in self.curve)}
        known = [(budget, best) for budget in sorted(budgets) if (best := study.best_known(at, budget)) is not None]
        solved = [self._solved(name, budget, FoundPlan(at, best, self._limits)) for budget, best in known]
        self.others += {each.peak_bytes: each for each in _monotone(solved)}.values()
        if first.interrupted:
            raise KeyboardInterrupt

    def _solved(self, name: str, budget: int, found: FoundPlan) -> _SolvedPoint:
        return _SolvedPoint(name, budget, found, self._study.peak_bytes(found), found.bound_us)

    def show_by_hand(self) -> None:
        """Add plans in forms that people run without a planner: every block with a Liger-like head, or fused groups."""
        for name, at, strategy in forms_by_hand(self._study):
            problem = self._study.without_link.problem(at, 0)
            regions = () if strategy == FUSE_ONLY else every_block.regions(problem)
            solution = Solution(name, "feasible", regions, self._recompute_us(at, regions))
            self.others.append(
                self._solved(name, problem.curve(regions).peak_bytes, FoundPlan(at, solution, self._limits))
            )

    def _recompute_us(self, at: StepForm, regions: tuple[Region, ...]) -> float:
        problem = self._study.problem(at, 0)
        return problem.memory.recompute_time_us(regions, problem.liveness.op_time_us)

    def find_others(self, name: str) -> None:
        """Find the distinct plans of a strategy under the budgets of the curve. (Rule 3)"""
        as_it_is = self._study.problem(self._study.captured, 0).memory.peak_without_checkpointing
        peak, place = as_it_is + 1, len(self.others)
        budgets = sorted({*(solved.budget_bytes for solved in self.curve), as_it_is})
        for number, budget in enumerate(reversed(budgets), start=1):
            if budget >= peak:
                continue
            self._on_point(name, number, len(budgets))
            solved = self._by(name, budget)
            if solved is None:
                continue
            if solved.found.solution.fits:
                solved = dataclasses.replace(solved, peak_bytes=as_it_is) if name == NO_CHECKPOINTING else solved
                peak = solved.peak_bytes
                self.others.insert(place, solved)
            if solved.found.solution.interrupted:
                raise KeyboardInterrupt

    def _by(self, name: str, budget: int) -> _SolvedPoint | None:
        """Solve with a strategy under a budget; None if there is no plan without offloads."""
        if name == NO_OFFLOAD:
            try:
                return self._least_priced(self._study.without_link, NO_OFFLOAD, budget)
            except (Infeasible, NoPlanInTime):
                return None
        at, study = self._study.captured, self._study if name in EXACT else self._study.without_link
        problem = study.problem(at, budget)
        trivial = study.how.trivial(problem, None) if name in EXACT else None
        return self._solved(name, budget, FoundPlan(at, trivial or solve(problem, name, self._limits), self._limits))

    def replayed(self, found: Iterable[_SolvedPoint]) -> list[_SolvedPoint]:
        """Replay `found`, and give each plan the least budget that it keeps."""
        found, study = list(found), self._study
        peaks = []
        for solved in found:
            judge = study.judge(solved.found.at)
            assert judge is not None
            peaks.append(judge.peak(study.problem(solved.found.at, 0), solved.found.solution.regions))
        return [
            dataclasses.replace(
                solved,
                budget_bytes=peak,
                peak_bytes=peak,
                found=dataclasses.replace(
                    solved.found, solution=dataclasses.replace(solved.found.solution, status="feasible")
                ),
                bound_us=self._bound_us(peak, solved, found),
            )
            for peak, solved in zip(peaks, found, strict=True)
        ]

    def _bound_us(self, budget: int, solved: _SolvedPoint, found: Sequence[_SolvedPoint]) -> float:
        """Return the bound that is proved for plans that keep `budget` as they run. (Rule 2)"""
        if not proves(solved.strategy):
            return 0.0
        bounds = (other.bound_us for other in found if other.budget_bytes >= budget)
        return min(max(bounds, default=0.0), solved.price_us)

    def point(self, solved: _SolvedPoint) -> CurvePoint:
        solution, at, step_us = solved.found.solution, solved.found.at, self._study.device_time_us
        sizes, form = at.profile.graph.storages.size_bytes, at.form
        again_us = self._recompute_us(at, solution.regions)
        weights_us = weights_wait_us(at.profile, self._study.problem(at, 0).memory, solution.regions)
        added_us = again_us + solution.stall_us + weights_us + at.extra_us
        gap = gap_of(solved.price_us, solved.bound_us, min(at.extra_us for at in self.forms))
        status = solution.status
        if solved.strategy == CURVE:
            status = "optimal" if self._study.how.runs_as_evaluated and gap <= self._limits.gap else "feasible"
        return CurvePoint(
            strategy=solved.strategy,
            budget_bytes=solved.budget_bytes,
            peak_bytes=solved.peak_bytes,
            step_time_us=step_us + added_us,
            recompute_time_us=again_us,
            overhead=added_us / step_us if step_us else 0.0,
            status=status,
            bound_us=solved.bound_us if proves(solved.strategy) else None,
            gap=gap if proves(solved.strategy) else None,
            regions=len(solution.regions),
            saved=sum(len(region.saved) for region in solution.regions),
            wall_s=round(solution.wall_s, 3),
            host_bytes=int(sum(sizes[each.storage] for each in solution.offloads)),
            form_time_us=at.extra_us,
            form=str(form),
            slices=form.slices,
            rows=form.rows,
        )


def _largest_gap(curve: Sequence[_SolvedPoint]) -> int | None:
    """Return the middle budget of the largest unknown range of the curve; None if all is known. (Rule 4)"""

    def area(pair: tuple[_SolvedPoint, _SolvedPoint]) -> float:
        left, right = pair
        return (right.peak_bytes - left.budget_bytes) * (left.price_us - right.price_us)

    left, right = max(itertools.pairwise(curve), key=area, default=(curve[0], curve[0]))
    between = (left.budget_bytes + right.peak_bytes) // 2
    return between if area((left, right)) > 0 and left.budget_bytes < between < right.peak_bytes else None


def _falling(curve: Sequence[_SolvedPoint]) -> list[_SolvedPoint]:
    """Select plans that no other beats in both peak and price, by rising peak."""
    found: list[_SolvedPoint] = []
    for solved in sorted(curve, key=lambda each: (each.peak_bytes, each.price_us)):
        if not found or solved.price_us < found[-1].price_us:
            found.append(solved)
    return found


def _monotone(curve: Sequence[_SolvedPoint]) -> list[_SolvedPoint]:
    """Give each point of the curve the best plan of its own and all smaller budgets. (Rule 1)"""
    found: list[_SolvedPoint] = []
    for solved in curve:
        if found and found[-1].price_us < solved.price_us:
            solved = found[-1].at(solved.budget_bytes, solved.found.solution.wall_s).proved(solved.bound_us)
        found.append(solved)
    return found


def _with_bounds(curve: Sequence[_SolvedPoint]) -> list[_SolvedPoint]:
    """Give each point of the curve the best bound of its own and all larger budgets. (Rule 2)"""
    bound_us, found = -math.inf, []
    for solved in reversed(curve):
        bound_us = max(bound_us, solved.bound_us)
        found.append(solved.proved(bound_us))
    return found[::-1]
