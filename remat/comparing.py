"""Compare: one step under one budget, planned by several strategies and judged by one evaluator.

A row is what a strategy achieves, never what it claims: its plan goes through `check`, its numbers are the
evaluator's, and with a step at hand the replay must accept it too. The best bound that any of them proves is set
beside all of them, because they choose from the same space of plans.

Where regions are modules, strategies that join layers or save inside them have no plan of their own, and a peak is the
untraced replay's, as in planning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remat import check
from remat.errors import ValidationFailed
from remat.module_space import pose, space_of
from remat.planning import Budget, assemble, infeasible, replay_peak, without_regions
from remat.plans import Plan, Region, RegionKind
from remat.problem import Problem
from remat.profiling import Profile
from remat.record import FakeStep
from remat.solution import Limits, Solution, Status
from remat.solvers import EXACT, HEURISTICS, WITHOUT, load

if TYPE_CHECKING:
    from remat.report import Report
    from remat.workload import Workload

DEFAULT = (*HEURISTICS, "exact")
NO_LIMIT = 1 << 62
MEASURED, SIZE = ("peak_bytes", "step_time_us"), ("device", "batch_size", "seq_len")  # of a Report


@dataclasses.dataclass(frozen=True)
class Row:
    """What one strategy makes of the step. None where it found no plan at all, or cannot know.

    fits         the peak keeps the budget; where not, the plan is the nearest that a heuristic comes to it
    samples_per_s, tokens_per_s  of one rank, over all micro-batches of an optimizer step
    overhead     recompute_time_us over the step time without checkpointing
    bound_us     what the strategy itself proves, and `gap` how far its plan is from that
    above_bound  recompute_time_us over the best bound of the comparison, less 1; None where that is 0
    measured     peak_bytes and step_time_us of the planned step, run at the size of `Comparison.measured_on`
    plan         None where there is none
    """

    strategy: str
    status: Status
    fits: bool
    peak_bytes: int | None
    step_time_us: float | None
    recompute_time_us: float | None
    overhead: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    bound_us: float | None
    gap: float | None
    above_bound: float | None
    wall_s: float
    measured: dict[str, int] | None = None
    plan: Plan | None = dataclasses.field(default=None, repr=False)

    @property
    def rank(self) -> tuple[bool, bool, float, bool]:
        """What fits by time, then what does not by peak, then what has no plan; among equals first what is proved."""
        by = self.step_time_us if self.fits else self.peak_bytes
        return not self.fits, by is None, by or 0.0, self.bound_us is None

    def to_json(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "plan"]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading:
    """What stands above a table of plans: the step, the target, where its costs are from, and the step as it is."""

    about: dict[str, Any]
    target: str
    costs: str
    without_checkpointing: dict[str, Any]
    regions_are: RegionKind

    @staticmethod
    def fields_of(profile: Profile, problem: Problem) -> dict[str, Any]:
        return {
            "about": profile.graph.about,
            "target": profile.target.name,
            "costs": profile.costs.source,
            "without_checkpointing": problem.without_checkpointing,
            "regions_are": problem.space.kind,
        }

    def heading_json(self) -> dict[str, Any]:
        return {
            "model": self.about["workload"],
            "target": self.target,
            "costs": self.costs,
            "without_checkpointing": self.without_checkpointing,
            "regions_are": self.regions_are,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Heading):
    """The rows, best first.

    bound_us     the best that is proved: no plan within the budget recomputes for less; 0 where nothing is
    measured_on  device, batch_size and seq_len of what was measured: a device may bear less than was planned for
    failures     what a measurement contradicts, one sentence each
    interrupted  somebody pressed Ctrl-C: strategies or measurements are missing
    """

    budget_bytes: int
    rows: tuple[Row, ...]
    bound_us: float
    measured_on: dict[str, Any] | None = None
    failures: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.heading_json(),
            "budget_bytes": self.budget_bytes,
            "bound_us": self.bound_us,
            "rows": [row.to_json() for row in self.rows],
            "measured_on": self.measured_on,
            "failures": list(self.failures),
            "interrupted": self.interrupted,
        }


def compare(
    profile: Profile,
    budget: Budget,
    *,
    strategies: Sequence[str] | None = None,
    limits: Limits | None = None,
    step: FakeStep | None = None,
    regions: RegionKind = "nodes",
    on_strategy: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """What each strategy makes of `profile` under `budget`; with `step`, every plan that fits is also replayed.

    strategies   names in `solvers.STRATEGIES`; by default the quick ones
    limits       for each strategy on its own
    regions      what regions are, as in `planning.plan`
    on_strategy  called with the name of each before it begins, its number from 1, and how many there are

    Raises Infeasible where it is proved that no plan fits, UsageError for an unknown strategy.
    """
    names, limits = tuple(dict.fromkeys(strategies or DEFAULT)), limits or Limits()
    for name in names:
        load(name)
    problem = pose(profile.graph, profile.costs, space_of(profile.graph, regions), budget.limit_bytes)
    judge = _Judge(profile, step)
    solutions: dict[str, Solution] = {}
    interrupted = False
    for number, name in enumerate(names, start=1):
        if on_strategy is not None:
            on_strategy(name, number, len(names))
        try:
            solutions[name] = judge.solution(problem, name, limits)
            interrupted = solutions[name].interrupted
        except KeyboardInterrupt:
            if not solutions:
                raise
            interrupted = True
        if interrupted:
            break
    rows = rows_of(problem, solutions, profile, judge.peak if step is not None else None)
    if not any(row.fits for row in rows) and any(row.status == "infeasible" for row in rows):
        raise infeasible(problem, limits)
    return Comparison(
        budget_bytes=budget.limit_bytes,
        rows=rows,
        bound_us=best_bound(solutions),
        interrupted=interrupted,
        **Heading.fields_of(profile, problem),
    )


def solve(problem: Problem, name: str, limits: Limits) -> Solution:
    """The solution of the strategy `name`; a plan that does not hold raises."""
    if name in EXACT and (trivial := without_regions(problem)) is not None:
        return trivial
    solution = load(name)(problem, limits)
    if has_plan(name, solution):
        keeps = solution.status in ("optimal", "feasible")
        check.require(problem if keeps else problem.with_budget(NO_LIMIT), solution)
    return solution


def peak_of(problem: Problem, name: str, regions: tuple[Region, ...]) -> int:
    """Peak by the evaluator of what `name` proposes."""
    memory = problem.memory
    return memory.peak_without_checkpointing if name == WITHOUT else memory.curve(regions).peak_bytes


def has_plan(name: str, solution: Solution) -> bool:
    """Whether the regions mean something: a heuristic shows its nearest plan where none of its kind fits."""
    return solution.status in ("optimal", "feasible") or name in HEURISTICS


@dataclasses.dataclass
class _Judge:
    """Solves, and has the replay agree where there is a step; strategies often find the same plan."""

    profile: Profile
    step: FakeStep | None
    replayed: dict[tuple[Region, ...], int] = dataclasses.field(default_factory=dict)

    def solution(self, problem: Problem, name: str, limits: Limits, limit_bytes: int | None = None) -> Solution:
        """What `name` makes of `problem`, whose plan the replay finds within `limit_bytes`, by default its budget."""
        found = solve(problem, name, limits)
        if self.step is None or found.status not in ("optimal", "feasible"):
            return found
        limit_bytes = problem.budget_bytes if limit_bytes is None else limit_bytes
        excess = self.peak(problem, found.regions) - limit_bytes
        if excess <= 0:
            return found
        # As in planning: the evaluator was wrong by as much, so ask for that much less; the bound still holds.
        tighter = self.solution(problem.with_budget(problem.budget_bytes - excess), name, limits, limit_bytes)
        status: Status = "feasible" if tighter.status == "optimal" else tighter.status
        return dataclasses.replace(
            tighter, status="unknown" if status == "infeasible" else status, bound_us=found.bound_us
        )

    def peak(self, problem: Problem, regions: tuple[Region, ...]) -> int:
        """Peak by the replay, each plan replayed once."""
        assert self.step is not None
        if regions not in self.replayed:
            self.replayed[regions] = replay_peak(self.step, problem, regions, self.profile)
        return self.replayed[regions]


def best_bound(solutions: dict[str, Solution]) -> float:
    """Microseconds that every plan within the budget recomputes for."""
    return max((solution.bound_us for name, solution in solutions.items() if name in EXACT), default=0.0)


ReplayedPeak = Callable[[Problem, tuple[Region, ...]], int]


def rows_of(
    problem: Problem, solutions: dict[str, Solution], profile: Profile, replayed: ReplayedPeak | None
) -> tuple[Row, ...]:
    """The rows, best first; `replayed` is what replayed the plans that fit, if anything did."""
    bound_us = best_bound(solutions)
    rows = (_row(problem, name, solution, profile, bound_us, replayed) for name, solution in solutions.items())
    return tuple(sorted(rows, key=lambda row: row.rank))


def _row(
    problem: Problem,
    name: str,
    solution: Solution,
    profile: Profile,
    best_bound_us: float,
    replayed: ReplayedPeak | None,
) -> Row:
    plan, exact, about = None, name in EXACT, profile.graph.about
    plain_bytes = problem.memory.peak_without_checkpointing
    fits = solution.status in ("optimal", "feasible")
    if has_plan(name, solution):
        # In its file, a plan without a proof of its own gets the one that others made.
        judged = replayed is not None and (fits or problem.space.kind == "modules")
        proved = dataclasses.replace(
            solution,
            bound_us=min(best_bound_us, solution.objective_us),
            replayed_bytes=replayed(problem, solution.regions) if replayed is not None and judged else None,
        )
        plan = assemble(problem, proved, profile, replayed=judged and fits)
    predicted: dict[str, Any] = plan.predicted if plan is not None else {}
    step_us, again_us = predicted.get("step_time_us"), predicted.get("recompute_time_us")
    samples_per_s = None
    if step_us is not None and again_us is not None:
        update_us = profile.costs.update_time_us(problem.graph, about["accumulation"], again_us)
        samples_per_s = about["batch_size"] * about["accumulation"] / update_us * 1e6 if update_us else None
    return Row(
        strategy=name,
        status=solution.status,
        fits=fits,
        peak_bytes=plain_bytes if name == WITHOUT else predicted.get("peak_bytes"),
        step_time_us=step_us,
        recompute_time_us=again_us,
        overhead=predicted.get("overhead"),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * about["seq_len"] if samples_per_s and about["seq_len"] else None,
        bound_us=solution.bound_us if exact else None,
        gap=solution.gap if exact and fits else None,
        above_bound=max(again_us / best_bound_us - 1, 0.0) if fits and again_us is not None and best_bound_us else None,
        wall_s=round(solution.wall_s, 3),
        plan=plan,
    )


# On the device at hand


def measure(
    comparison: Comparison,
    workload: Workload,
    *,
    on_strategy: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Validate every plan that fits, all of them at one size: the largest that this device bears for each."""
    # The longest step first, which is the likeliest to need a smaller size than the others.
    fitting = [row for row in reversed(comparison.rows) if row.fits]
    reports, failures, interrupted = _validated(fitting, workload, on_strategy or (lambda name: None), on_progress)
    measured = {name: _measured_by(name, report) for name, report in reports.items()}
    where = [{name: getattr(report, name) for name in SIZE} for report in reports.values()]
    return dataclasses.replace(
        comparison,
        rows=tuple(dataclasses.replace(row, measured=measured.get(row.strategy)) for row in comparison.rows),
        measured_on=where[0] if where else None,
        failures=tuple(f"{name}: {what}" for name, what in failures.items()),
        interrupted=comparison.interrupted or interrupted,
    )


def _measured_by(name: str, report: Report) -> dict[str, int]:
    """Peak and time of the step under the strategy `name`: of the untouched one where that is what people run."""
    found = report.untouched if name == WITHOUT and report.untouched["fits"] else report.measured
    return {key: found[key] for key in MEASURED}


def _validated(
    rows: Sequence[Row],
    workload: Workload,
    on_strategy: Callable[[str], None],
    on_progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Report], dict[str, str], bool]:
    """(a report by strategy, all at one size; what failed by strategy; interrupted). Equal plans run once."""
    from remat.validating import validate

    reports: dict[str, Report] = {}
    failures: dict[str, str] = {}
    size = workload.batch_size, workload.seq_len
    while row := next((row for row in rows if row.strategy not in reports | failures), None):
        assert row.plan is not None
        on_strategy(row.strategy)
        same = [other.strategy for other in rows if other.plan and other.plan.regions == row.plan.regions]
        try:
            report = validate(workload.sized(*size), row.plan, on_progress=on_progress)
        except ValidationFailed as error:
            failures |= dict.fromkeys(same, str(error))
            continue
        except KeyboardInterrupt:
            return reports, failures, True
        if (report.batch_size, report.seq_len) != size:  # too much for this plan: begin again at what it bears
            size = report.batch_size, report.seq_len
            reports, failures = {}, {}
        reports |= dict.fromkeys(same, report)
        if not report.passed:
            failures |= dict.fromkeys(same, "the measurement contradicts the plan.")
    return reports, failures, False
