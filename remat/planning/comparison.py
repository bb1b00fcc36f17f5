"""Compare: one step under one budget, planned by several strategies and judged by one evaluator.

A row is what a strategy achieves, never what it claims: its plan goes through `check`, its numbers are the
evaluator's, and with a step at hand the replay must accept it too. The best bound that any of them proves is set
beside all of them, because they choose from the same space of plans.

Where regions are modules, strategies that join layers or save inside them have no plan of their own. Where the step
does not run as the evaluator says (`Execution.is_exact`), a peak is the replay's, as in planning.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.form import CAPTURED, form_of
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Prediction, Region
from remat.execution import executions
from remat.execution.base import Execution
from remat.execution.executions import EAGER
from remat.formulation import check
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.offloading.link import Link
from remat.offloading.schedule import stall_us, stashed_offloads
from remat.offloading.timeline import Timeline
from remat.planning.assemble import assemble, infeasible
from remat.planning.budget import Budget
from remat.planning.links import require_offloads
from remat.planning.search import Draft, Judge, draft, search
from remat.planning.variants import PATIENCE_S, Effort, Variant, Variants, fastest, priced, require_fusible
from remat.recording.fake_step import FakeStep
from remat.shown import Shown
from remat.solvers import EXACT, HEURISTICS, WITHOUT, every_block, load
from remat.solvers.least_peak import least_peak
from remat.units import gib, ms

DEFAULT = (*HEURISTICS, "exact")
NO_LIMIT = 1 << 62
COLUMNS = ("strategy", "fits", "peak", "step", "added", "gap")
LOSS_WHOLE = "exact-whole-loss"  # what "exact" finds that leaves losses whole, where it cuts them
UNFUSED = "exact-unfused"  # what "exact" finds for the step as captured, where groups are fused
FUSE_ONLY = "fuse-only"  # groups fused, and nothing recomputed
KEPT = "exact-no-offload"  # what "exact" finds that leaves all on the device, where it may go to the host
OFFLOAD_ALL = "offload-all"  # nothing recomputed, all that autograd keeps on the host, as TRL's activation_offloading
OFFLOAD_INPUTS = "offload-inputs"  # every block, its input on the host, as Unsloth's gradient checkpointing
LIGER_LIKE = "liger-like"  # every block, and losses in as many slices as Liger-Kernel's fused head takes


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

    @property
    def shown(self) -> tuple[str, ...]:
        """Its cells under `COLUMNS`."""
        peak = "-" if self.peak_bytes is None else gib(self.peak_bytes)
        time = "-" if self.step_time_us is None else ms(self.step_time_us)
        added = "-" if self.overhead is None else f"{100 * self.overhead:+.1f} %"
        gap = "-" if self.gap is None else f"{100 * self.gap:.2f} %"
        return self.strategy, "yes" if self.fits else "no", peak, time, added, gap

    def to_json(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "plan"]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading(Shown):
    """What stands above a table of plans: the step, the target, where its costs are from, and the step as it is."""

    about: dict[str, Any]
    target: str
    costs: str
    without_checkpointing: dict[str, Any]
    execution: str

    @staticmethod
    def fields_of(profile: Profile, problem: Problem, execution: Execution) -> dict[str, Any]:
        return {
            "about": profile.graph.about,
            "target": profile.target.name,
            "costs": profile.costs.source,
            "without_checkpointing": problem.without_checkpointing,
            "execution": execution.name,
        }

    def heading_json(self) -> dict[str, Any]:
        return {
            "model": self.about["workload"],
            "target": self.target,
            "costs": self.costs,
            "without_checkpointing": self.without_checkpointing,
            "execution": self.execution,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Heading):
    """The rows, best first.

    bound_us     the best that is proved: no plan within the budget recomputes for less; 0 where nothing is
    measured_on  device, batch_size and seq_len of what was measured: a device may bear less than was planned for
    failures     what a measurement contradicts, one sentence each
    interrupted  somebody pressed Ctrl-C: strategies or measurements are missing
    """

    _header: ClassVar[tuple[str, ...]] = COLUMNS

    budget_bytes: int
    rows: tuple[Row, ...]
    bound_us: float
    measured_on: dict[str, Any] | None = None
    failures: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @property
    def _title(self) -> str:
        return f"{self.about['workload']} on {self.target} within {gib(self.budget_bytes)}, costs {self.costs}"

    @property
    def _shown(self) -> list[tuple[str, ...]]:
        return [row.shown for row in self.rows]

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
    execution: str = EAGER,
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    variants: Variants | None = None,
    on_strategy: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """What each strategy makes of `profile` under `budget`; with `step`, every plan that fits is also replayed.

    strategies   names in `solvers.STRATEGIES`; by default the quick ones
    limits       for each strategy on its own
    execution    how the step will run, as in `planner.plan`
    exact        leave losses whole, as in `planner.plan`; else, where "exact" is among the strategies and cuts them
                 because that pays, there are two rows more: `LOSS_WHOLE` and `LIGER_LIKE`
    link         to the host's memory, for offloads of the exact strategies; three rows more: `KEPT`, `OFFLOAD_ALL` and
                 `OFFLOAD_INPUTS`
    fuse         fuse groups, as in `planner.plan`; two rows more: `UNFUSED` and `FUSE_ONLY`
    variants     of the step, to use again what was recorded for another budget
    on_strategy  called with the name of each before it begins, its number from 1, and how many there are

    Raises Infeasible where it is proved that no plan fits, UsageError for an unknown strategy.
    """
    names, limits = tuple(dict.fromkeys(strategies or DEFAULT)), limits or Limits()
    for name in names:
        load(name)
    how = executions.load(execution)
    profile = how.price(profile)
    problem = how.pose(profile, how.space(profile.graph), budget.limit_bytes)
    judge = None if step is None else Judge(how, step, profile)
    solutions: dict[str, Solution] = {}
    interrupted = False
    if link is not None:
        require_offloads(how, None if step is None else step.loop)
    linked = problem if link is None else how.pose(profile, problem.space, budget.limit_bytes, link)
    for number, name in enumerate(names, start=1):
        if on_strategy is not None:
            on_strategy(name, number, len(names))
        try:
            solutions[name] = solution_of(linked if name in EXACT else problem, how, name, judge, limits)
            interrupted = solutions[name].interrupted
        except KeyboardInterrupt:
            if not solutions:
                raise
            interrupted = True
        if interrupted:
            break
    if link is not None and not interrupted:
        solutions |= {name: offloaded_by_hand(problem, link, name) for name in (OFFLOAD_ALL, OFFLOAD_INPUTS)}
        with contextlib.suppress(KeyboardInterrupt):
            if "exact" in solutions:
                if on_strategy is not None:
                    on_strategy(KEPT, len(names), len(names))
                solutions[KEPT] = solution_of(problem, how, "exact", judge, limits)
    rows, bound_us = rows_of(problem, solutions, profile, how, judge), best_bound(solutions)
    if fuse:
        require_fusible(how, None if step is None else step.loop, exact=exact)
    if step is not None and not exact and not interrupted and "exact" in solutions:
        variants = variants or Variants(how, step, profile, fuse=fuse)
        rows, bound_us = _with_forms(rows, bound_us, variants, how, linked, limits, link)
    if not any(row.fits for row in rows) and any(row.status == "infeasible" for row in rows):
        raise infeasible(linked, limits)
    untouched = how.without_plan(problem, None if judge is None else lambda: judge.peak(problem, ()))
    heading = Heading.fields_of(profile, problem, how)
    heading["without_checkpointing"] = {**heading["without_checkpointing"], "peak_bytes": untouched}
    return Comparison(
        budget_bytes=budget.limit_bytes,
        rows=rows,
        bound_us=bound_us if how.bound_carries else 0.0,
        interrupted=interrupted,
        **heading,
    )


def _with_forms(
    rows: tuple[Row, ...],
    bound_us: float,
    variants: Variants,
    how: Execution,
    whole_problem: Problem,
    limits: Limits,
    link: Link | None,
) -> tuple[tuple[Row, ...], float]:
    """The rows, with what other forms make of the step where that pays; and the bound of all of it.

    whole_problem  of the step as captured
    """
    limit_bytes = whole_problem.budget_bytes
    whole = next(row for row in rows if row.strategy == "exact")

    def attempt(variant: Variant, effort: Effort, name: str = "exact") -> Draft:
        found = variant.profile
        link_of_it = link if name in EXACT else None
        problem = how.pose(found, how.space(found.graph), limit_bytes, link_of_it, like=whole_problem)
        within = effort.within(limits, problem)

        def solved(judge: Judge | None) -> Solution:
            solution = solution_of(problem, how, name, judge, within)
            if solution.fits:
                return solution
            if solution.status == "infeasible" or least_peak(problem, within).bound_bytes > limit_bytes:
                raise infeasible(problem, within)
            raise NoPlanInTime(f"no plan of the step with {variant.form} keeps the budget.")

        return draft(
            problem,
            solved(None),
            variant.judge,
            lambda solution, judge: assemble(problem, solution, found, how, judge),
            lambda: solved(variant.judge),
        )

    def untouched(effort: Effort) -> Draft:
        if whole.plan is None or not whole.fits:
            raise NoPlanInTime("no plan of the step as captured keeps the budget.")
        plan = whole.plan
        return Draft(plan, lambda: plan)

    try:
        best = fastest(untouched, variants, attempt)
    except (Infeasible, NoPlanInTime):
        return rows, bound_us
    if form_of(best.about) == CAPTURED:
        return rows, bound_us
    bound_us = best.solver["bound_us"]
    found = [_row_of(best, "exact", variants, bound_us)]
    others = [(variants.like_liger, "every-block", LIGER_LIKE)] if variants.are_losses else []
    others += [(variants.fused, FUSE_ONLY, FUSE_ONLY)] if variants.fuse else []
    for variant_of, strategy, name in others:
        with contextlib.suppress(Infeasible, NoPlanInTime):
            variant = variant_of()
            made = priced(attempt(variant, Effort(PATIENCE_S), strategy).judged(), variant)
            found.append(_row_of(made, name, variants, bound_us))
    captured = UNFUSED if variants.fuse else LOSS_WHOLE
    for row in rows:
        name = captured if row is whole else row.strategy
        above = _above(row.recompute_time_us, bound_us) if row.fits else None
        found.append(dataclasses.replace(row, strategy=name, above_bound=above))
    return tuple(sorted(found, key=lambda row: row.rank)), bound_us


def offloaded_by_hand(problem: Problem, link: Link, name: str) -> Solution:
    """What people offload without a plan (`OFFLOAD_ALL` or `OFFLOAD_INPUTS`), and what their steps wait for."""
    regions = every_block.regions(problem) if name == OFFLOAD_INPUTS else ()
    timeline = Timeline(problem.memory, regions, problem.liveness.op_time_ns / NS)
    inputs = {u for region in regions for u in problem.memory.inputs(region.first, region.end)}
    offloads = stashed_offloads(timeline, link, inputs if regions else None)
    fits = problem.memory.offloading(offloads).curve(regions).peak_bytes <= problem.budget_bytes
    stalled = stall_us(timeline, offloads, link)
    objective_us = problem.objective_ns(regions) / NS + stalled
    status: Status = "feasible" if fits else "unknown"
    return Solution(name, status, regions, objective_us, offloads=offloads, stall_us=stalled)


def _above(price_us: float | None, bound_us: float) -> float | None:
    """How far a price is above the bound, as a share of it; None where that says nothing."""
    return None if price_us is None or bound_us <= 0 else max(price_us / bound_us - 1, 0.0)


def _samples_per_s(profile: Profile, graph: Graph, recompute_us: float) -> float | None:
    """Of one rank, over all micro-batches of an optimizer step."""
    about = graph.about
    update_us = profile.costs.update_time_us(graph, about["accumulation"], recompute_us)
    return about["batch_size"] * about["accumulation"] / update_us * 1e6 if update_us else None


def _row_of(plan: Plan, name: str, variants: Variants, bound_us: float) -> Row:
    """The row of a plan that cuts losses."""
    about, predicted, price_us = plan.about, plan.predicted, plan.solver["objective_us"]
    profile = variants.profile_of(plan)
    samples_per_s = _samples_per_s(profile, profile.graph, predicted["recompute_time_us"])
    return Row(
        strategy=name,
        status=plan.solver["status"],
        fits=True,
        peak_bytes=predicted["peak_bytes"],
        step_time_us=predicted["step_time_us"],
        recompute_time_us=predicted["recompute_time_us"],
        overhead=predicted["overhead"],
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * about["seq_len"] if samples_per_s and about["seq_len"] else None,
        bound_us=plan.solver["bound_us"] if name == "exact" else None,
        gap=plan.solver["gap"] if name == "exact" else None,
        above_bound=_above(price_us, bound_us),
        wall_s=plan.solver["wall_s"],
        plan=plan,
    )


def solve(problem: Problem, name: str, limits: Limits) -> Solution:
    """The solution of the strategy `name`; a plan that does not hold raises."""
    if name == FUSE_ONLY:
        fits = problem.memory.peak_without_regions <= problem.budget_bytes
        return Solution(FUSE_ONLY, "feasible" if fits else "unknown")
    solution = load(name)(problem, limits)
    if solution.fits:
        solution = dataclasses.replace(solution, offloads=problem.offloads_of(solution.regions))
    if has_plan(name, solution):
        check.require(problem if solution.fits else problem.with_budget(NO_LIMIT), solution)
    return solution


def solution_of(problem: Problem, how: Execution, name: str, judge: Judge | None, limits: Limits) -> Solution:
    """What `name` makes of `problem` as the step runs."""
    if name == WITHOUT:  # it is not replayed: people run it untraced, and compiled where all is
        peak = how.without_plan(problem, None if judge is None else lambda: judge.peak(problem, ()))
        return Solution(WITHOUT, "feasible" if peak <= problem.budget_bytes else "unknown", replayed_bytes=peak)

    return search(problem, how, lambda at, limits: solve(at, name, limits), judge, limits, exact=name in EXACT)


def peak_of(problem: Problem, name: str, regions: tuple[Region, ...]) -> int:
    """Peak by the evaluator of what `name` proposes."""
    memory = problem.memory
    return memory.peak_without_checkpointing if name == WITHOUT else memory.curve(regions).peak_bytes


def has_plan(name: str, solution: Solution) -> bool:
    """Whether the regions mean something: a heuristic shows its nearest plan where none of its kind fits."""
    return solution.fits or name in (*HEURISTICS, OFFLOAD_ALL, OFFLOAD_INPUTS)


def best_bound(solutions: dict[str, Solution]) -> float:
    """Microseconds that every plan within the budget recomputes for."""
    return max((solution.bound_us for name, solution in solutions.items() if name in EXACT), default=0.0)


def rows_of(
    problem: Problem, solutions: dict[str, Solution], profile: Profile, how: Execution, judge: Judge | None
) -> tuple[Row, ...]:
    """The rows, best first; `judge` is what replayed the plans that fit, if anything did."""
    bound_us = best_bound(solutions)
    rows = (_row(problem, name, solution, profile, bound_us, how, judge) for name, solution in solutions.items())
    return tuple(sorted(rows, key=lambda row: row.rank))


def _row(
    problem: Problem,
    name: str,
    solution: Solution,
    profile: Profile,
    best_bound_us: float,
    how: Execution,
    judge: Judge | None,
) -> Row:
    plan, exact, about = None, name in EXACT, profile.graph.about
    fits = solution.fits
    if has_plan(name, solution):
        # In its file, a plan without a proof of its own gets the one that others made.
        asked = judge if fits or not how.is_exact else None
        proved = dataclasses.replace(
            solution,
            bound_us=min(best_bound_us, solution.objective_us) if how.bound_carries else 0.0,
            replayed_bytes=None if asked is None else asked.peak(problem, solution.regions, solution.offloads),
        )
        plan = assemble(problem, proved, profile, how, asked)
    predicted: Prediction = plan.predicted if plan is not None else {}
    step_us, again_us = predicted.get("step_time_us"), predicted.get("recompute_time_us")
    added_us = None if again_us is None else again_us + predicted.get("stall_us", 0.0)
    samples_per_s = None
    if step_us is not None and added_us is not None:
        samples_per_s = _samples_per_s(profile, problem.graph, added_us)
    return Row(
        strategy=name,
        status=solution.status,
        fits=fits,
        peak_bytes=solution.replayed_bytes if name == WITHOUT else predicted.get("peak_bytes"),
        step_time_us=step_us,
        recompute_time_us=again_us,
        overhead=predicted.get("overhead"),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * about["seq_len"] if samples_per_s and about["seq_len"] else None,
        bound_us=solution.bound_us if exact and how.bound_carries else None,
        gap=solution.gap if exact and fits and how.bound_carries else None,
        above_bound=_above(added_us, best_bound_us) if fits else None,
        wall_s=round(solution.wall_s, 3),
        plan=plan,
    )
