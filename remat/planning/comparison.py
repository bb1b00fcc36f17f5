"""Compare: one step under one budget, planned by several strategies and judged by one evaluator.

A row is what a strategy achieves, never what it claims: its plan goes through `check`, its numbers are the
evaluator's, and with a step at hand the replay must accept it too. The best bound that any of them proves is set
beside all of them, because they choose from the same space of plans.

Where regions are modules, strategies that join layers or save inside them have no plan of their own. Where the step
does not run as the evaluator says (`Execution.runs_as_evaluated`), a peak is the replay's, as in planning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Unpack

from remat.capture.generators import generators_kept
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.plan import Plan, Prediction
from remat.formulation.solution import Solution, Status, gap_of
from remat.planning.assemble import assemble, proof_of
from remat.planning.budget import require_budget
from remat.planning.heading import Heading
from remat.planning.planner import refused_in_full, studied
from remat.planning.portfolio import BestPlan, fastest
from remat.planning.request import PlanRequest, RequestKeywords
from remat.planning.strategies import (
    LOSS_WHOLE,
    NO_OFFLOAD,
    OFFLOAD_ALL,
    OFFLOAD_INPUTS,
    UNFUSED,
    best_bound,
    forms_by_hand,
    has_plan,
    offloaded_by_hand,
    proves,
    strategy_solution,
)
from remat.planning.study import FoundPlan, Study
from remat.solvers import EXACT, HEURISTICS, NO_CHECKPOINTING, load
from remat.units import gib, ms
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

OnStrategy = Callable[[str, int, int], None]

DEFAULT = (*HEURISTICS, "exact")
COLUMNS = ("strategy", "fits", "peak", "step", "added", "gap")


@dataclasses.dataclass(frozen=True)
class StrategyRow:
    """The result of one strategy. A field is None without a plan, or if the value is unknown.

    fits         whether the peak keeps the budget; if not, the plan is the nearest that a heuristic finds
    step_time_us, overhead  of the device or the host, whichever takes longer; so are the next two
    samples_per_s, tokens_per_s  of one rank, over all micro-batches of an optimizer step
    bound_us     lower bound that the strategy itself proves; `gap` is its plan's distance from it
    above_bound  recompute_time_us over the best bound of the comparison, less 1; None if that is 0
    measured     peak_bytes and step_time_us of the planned step, run at the size of `Comparison.measured_on`
    plan         its plan; None if there is none
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
        """The sort key: fitting plans by time, then others by peak, then those without a plan; proved ones first."""
        by = self.step_time_us if self.fits else self.peak_bytes
        return not self.fits, by is None, by or 0.0, self.bound_us is None

    @property
    def shown(self) -> tuple[str, ...]:
        """The row's cells under `COLUMNS`."""
        peak = "-" if self.peak_bytes is None else gib(self.peak_bytes)
        time = "-" if self.step_time_us is None else ms(self.step_time_us)
        added = "-" if self.overhead is None else f"{100 * self.overhead:+.1f} %"
        gap = "-" if self.gap is None else f"{100 * self.gap:.2f} %"
        return self.strategy, "yes" if self.fits else "no", peak, time, added, gap

    def to_json(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "plan"]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Heading):
    """The rows, best first.

    bound_us     the best proved lower bound on the recompute time of plans within the budget; 0 if none
    measured_on  device, batch_size and seq_len of the measured step, which may be smaller than the planned one
    failures     contradictions by a measurement, one sentence each
    interrupted  whether the user pressed Ctrl-C: strategies or measurements are missing
    """

    _header: ClassVar[tuple[str, ...]] = COLUMNS

    budget_bytes: int
    rows: tuple[StrategyRow, ...]
    bound_us: float
    measured_on: dict[str, Any] | None = None
    failures: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> StrategyRow | None:
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


@generators_kept()
def compare(
    workload: Workload,
    *,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    strategies: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_strategy: OnStrategy | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Comparison:
    """Plan the step of `workload` by several strategies under one budget.

    Args:
        workload: The training step.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        strategies: Names in `remat.solvers.STRATEGIES`, by default the quick ones.
        on_progress: Called with (done, total) while costs are measured.
        on_strategy: Called before each strategy, see `compare_study`.
        **wanted: More arguments of `remat.plan`, `budget` among them; limits hold for each strategy, by
            default `Clock.each_s`.

    Returns:
        A comparison with a row for each strategy; prints as a table.

    Raises:
        Infeasible: No plan fits.
        CaptureError: The model cannot be captured.
        UsageError: An argument is wrong.

    Example:
        >>> print(remat.compare(workload, budget="20GiB", strategies=["every-block", "exact"]))
    """
    request, place = PlanRequest.of(**wanted), find_planning_device(target, costs)
    require_budget(request.budget)
    study = studied(workload, request, place, loop, on_progress=on_progress)
    return compare_study(study, strategies=strategies, on_strategy=on_strategy)


def compare_study(
    study: Study, *, strategies: Sequence[str] | None = None, on_strategy: OnStrategy | None = None
) -> Comparison:
    """Plan one step by several strategies under the budget of `study`.

    If there is a step, every plan that fits is replayed.
    Beside the strategies there are rows for the best plans without one of the means (`LOSS_WHOLE`, `UNFUSED`,
    `NO_OFFLOAD`), and for steps that people run without a planner (`LIGER_LIKE`, `FUSE_ONLY`, `OFFLOAD_ALL`,
    `OFFLOAD_INPUTS`).

    strategies   names in `solvers.STRATEGIES`; by default the quick ones
    on_strategy  called before each one with its name, its number from 1, and the number of strategies

    Raises Infeasible if it is proved that no plan fits, UsageError for an unknown strategy.
    """
    names = tuple(dict.fromkeys(strategies or DEFAULT))
    for name in names:
        load(name)
    budget = study.budget
    assert budget is not None
    with refused_in_full(study, budget):
        return _Comparing(study, budget.limit_bytes, on_strategy or (lambda *about: None)).run(names)


class _Comparing:
    """The rows of a comparison, as they are found."""

    def __init__(self, study: Study, budget_bytes: int, on_strategy: OnStrategy):
        self._study, self._budget_bytes, self._on_strategy = study, budget_bytes, on_strategy
        limits = study.request.limits
        self._limits, self._at = limits.by_default(limits.clock.each_s), study.captured
        self._problem = study.problem(self._at, budget_bytes)
        self._solutions: dict[str, Solution] = {}  # of the step as captured
        self._cheapest_us = 0.0  # price of the cheapest form without recomputation
        self._interrupted = False

    def run(self, names: Sequence[str]) -> Comparison:
        study = self._study
        self._solve_each(names)
        if study.link is not None and not self._interrupted:
            self._solve_beside_offloads(len(names))
        outcome = self._best_of_forms()
        if outcome is None:
            bound_us = best_bound(self._solutions)
            rows = [self._row(name, found, bound_us) for name, found in self._named()]
        else:
            bound_us = outcome.bound_us
            rows = [self._row("exact", outcome.found, bound_us, outcome)]
            if not self._interrupted:
                with self._keeping_rows():
                    rows.extend(self._by_hand(bound_us))
            captured = UNFUSED if study.request.fuses else LOSS_WHOLE
            for name, found in self._named():
                row = self._row(name, found, bound_us)
                rows.append(dataclasses.replace(row, strategy=captured if name == "exact" else name))
        is_refused = any(row.status == "infeasible" for row in rows) and not any(row.fits for row in rows)
        if is_refused and not self._interrupted:  # else forms may be missing that fit
            raise study.refused(self._at, self._budget_bytes, self._limits)
        return Comparison(
            budget_bytes=self._budget_bytes,
            rows=tuple(sorted(rows, key=lambda row: row.rank)),
            bound_us=bound_us,
            interrupted=self._interrupted,
            **Heading.fields_of(study),
        )

    def _named(self) -> Iterable[tuple[str, FoundPlan]]:
        for name, solution in self._solutions.items():
            yield name, FoundPlan(self._at, solution, self._limits)

    @contextlib.contextmanager
    def _keeping_rows(self) -> Iterator[None]:
        """Let Ctrl-C end the comparison if it has rows."""
        try:
            yield
        except KeyboardInterrupt:
            if not self._solutions:
                raise
            self._interrupted = True

    def _solve_each(self, names: Sequence[str]) -> None:
        with self._keeping_rows():
            for number, name in enumerate(names, start=1):
                self._on_strategy(name, number, len(names))
                study = self._study if name in EXACT else self._study.without_link
                self._keep(name, strategy_solution(study, self._at, name, self._budget_bytes, self._limits))

    def _keep(self, name: str, found: Solution) -> None:
        self._solutions[name] = found
        if found.interrupted:
            raise KeyboardInterrupt

    def _solve_beside_offloads(self, count: int) -> None:
        """Solve without offloads, and find the offloads that people run without a plan."""
        link, alone = self._study.link, self._study.without_link
        assert link is not None
        problem = alone.problem(self._at, self._budget_bytes)
        self._solutions |= {name: offloaded_by_hand(problem, link, name) for name in (OFFLOAD_ALL, OFFLOAD_INPUTS)}
        if "exact" not in self._solutions:
            return
        with self._keeping_rows():
            self._on_strategy(NO_OFFLOAD, count, count)
            self._keep(NO_OFFLOAD, strategy_solution(alone, self._at, "exact", self._budget_bytes, self._limits))

    def _best_of_forms(self) -> BestPlan | None:
        """Return the best plan of another form than the captured one, if it pays."""
        if self._interrupted or "exact" not in self._solutions or not self._study.has_forms:
            return None
        outcome = None
        with self._keeping_rows(), contextlib.suppress(Infeasible, NoPlanInTime):
            outcome = fastest(self._study, self._budget_bytes, self._limits)
            self._cheapest_us, self._interrupted = outcome.cheapest_us, outcome.interrupted
        return None if outcome is None or outcome.found.at is self._at else outcome

    def _by_hand(self, bound_us: float) -> Iterator[StrategyRow]:
        """Yield rows of what people run in another form without a plan."""
        limits = self._limits.at_most(self._limits.clock.longer_s)
        for name, at, strategy in forms_by_hand(self._study):
            solution = strategy_solution(self._study.without_link, at, strategy, self._budget_bytes, limits)
            if solution.fits:
                yield self._row(name, FoundPlan(at, solution, limits), bound_us)

    def _row(self, name: str, found: FoundPlan, best_bound_us: float, outcome: BestPlan | None = None) -> StrategyRow:
        """Make the row of a strategy.

        best_bound_us  the best bound of the comparison, which a plan without its own proof stores
        """
        how, solution = self._study.how, found.solution
        fits, bound_us, gap = solution.fits, found.bound_us, solution.gap
        status = solution.status if outcome is None else outcome.status
        if outcome is not None:
            bound_us, gap = outcome.bound_us, outcome.gap
        plan: Plan | None = None
        predicted: Prediction = {}
        if has_plan(name, solution):
            asked = self._study.judge(found.at) if fits or not how.runs_as_evaluated else None
            if asked is not None and solution.replayed_bytes is None:
                peak_bytes = asked.peak(self._study.problem(found.at, 0), solution.regions, solution.offloads)
                solution = dataclasses.replace(solution, replayed_bytes=peak_bytes)
            found = dataclasses.replace(found, solution=solution, is_judged=asked is not None)
            proved_us = min(best_bound_us, found.price_us)
            apart = gap if outcome is not None else gap_of(found.price_us, proved_us, self._cheapest_us)
            proof = proof_of(found, status=status, bound_us=proved_us, gap=apart)
            plan = assemble(self._study, found, self._budget_bytes, proof=proof)
            predicted = plan.predicted
        about = found.at.profile.graph.about
        again_us = predicted.get("recompute_time_us")
        added_us = samples_per_s = None
        if again_us is not None:
            stalled_us = predicted.get("stall_us", 0.0)
            added_us = again_us + stalled_us + found.at.extra_us
            samples_per_s = self._samples_per_s(found, stalled_us + predicted.get("weights_wait_us", 0.0))
        return StrategyRow(
            strategy=name,
            status=status,
            fits=fits,
            peak_bytes=solution.replayed_bytes if name == NO_CHECKPOINTING else predicted.get("peak_bytes"),
            step_time_us=predicted.get("step_time_us"),
            recompute_time_us=again_us,
            overhead=predicted.get("overhead"),
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * about["seq_len"] if samples_per_s and about["seq_len"] else None,
            bound_us=bound_us if proves(name) else None,
            gap=gap if proves(name) and fits else None,
            above_bound=_above(added_us, best_bound_us) if fits else None,
            wall_s=round(solution.wall_s, 3),
            plan=plan,
        )

    def _samples_per_s(self, found: FoundPlan, waited_us: float) -> float | None:
        """Return samples per second of one rank, over all micro-batches of an optimizer step."""
        profile, regions = found.at.profile, found.solution.regions
        about, accumulation = profile.graph.about, profile.graph.about["accumulation"]
        memory = self._study.problem(found.at, 0).memory
        device_us = profile.device_time_us(memory, regions, accumulation, waited_us)
        update_us = max(device_us, profile.host_time_us(memory, regions, accumulation))
        return about["batch_size"] * accumulation / update_us * 1e6 if update_us else None


def _above(price_us: float | None, bound_us: float) -> float | None:
    """Return the share by which a price exceeds the bound; None if that says nothing."""
    return None if price_us is None or bound_us <= 0 else max(price_us / bound_us - 1, 0.0)
