"""A comparison shows what each strategy achieves under one budget, in order, beside the best that is proved."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, RematError, UsageError, ValidationFailed
from remat.evaluation.plan import device_overhead
from remat.execution.executions import load
from remat.execution.modules.replay import replay_modules
from remat.execution.modules.search_space import find_module_space
from remat.formulation.check import check
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits, Solution
from remat.offloading.link import Link
from remat.planning import comparison as comparing
from remat.planning import strategies
from remat.planning.budget import Budget
from remat.planning.comparison import Comparison, StrategyRow
from remat.planning.estimate import estimate_under
from remat.planning.portfolio import BestPlan
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.planning.search import Judge
from remat.planning.study import Study
from remat.recording.fake_step import FakeStep
from remat.solvers import HEURISTICS, heuristic
from remat.validation.measured_comparison import measure_plans
from remat.workload.training_loop import TrainingLoop
from tests import toys
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.studies import compared, plan_profile, study_of
from tests.test_chunking import LANGUAGE

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

LIMITS = Limits(workers=1)
KEYS = {
    "strategy",
    "fits",
    "peak_bytes",
    "step_time_us",
    "recompute_time_us",
    "overhead",
    "bound_us",
    "gap",
    "measured",
    "status",
    "wall_s",
    "samples_per_s",
    "tokens_per_s",
    "above_bound",
}


@pytest.fixture(scope="module")
def taken() -> tuple[Profile, FakeStep]:
    place = find_planning_device("h100-80gb")
    step = fake_step(toys.TRANSFORMER.sized(64), place)
    return profile_step(step, place), step


@pytest.fixture(scope="module")
def profile(taken: tuple[Profile, FakeStep]) -> Profile:
    return taken[0]


@pytest.fixture(scope="module")
def problem(profile: Profile) -> Problem:
    return Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)


@pytest.fixture(scope="module")
def budget(problem: Problem) -> Budget:
    """The peak of every block recomputed, and a little more."""
    peak = problem.memory.curve(toys.every_block(problem.graph)).peak_bytes
    limit = peak + (problem.memory.peak_without_checkpointing - peak) // 4
    return Budget(limit, limit)


@pytest.fixture(scope="module")
def found(taken: tuple[Profile, FakeStep], budget: Budget) -> Comparison:
    return compared(taken[0], budget, limits=LIMITS, step=taken[1])


def row_of(comparison: Comparison, strategy: str) -> StrategyRow:
    return next(row for row in comparison.rows if row.strategy == strategy)


def test_by_default_the_heuristics_and_the_exact_strategy_are_compared(found: Comparison) -> None:
    assert {row.strategy for row in found.rows} == {*HEURISTICS, "exact"}


def test_what_fits_comes_first_by_its_time_and_what_does_not_last(found: Comparison) -> None:
    fitting = [row for row in found.rows if row.fits]
    assert len(fitting) >= 3 and found.rows[: len(fitting)] == tuple(fitting)
    times = [row.step_time_us or 0 for row in fitting]
    assert times == sorted(times)
    assert found.best is found.rows[0]
    least = min(fitting, key=lambda row: row.recompute_time_us or 0)  # greedy launches fewer kernels, which are longer
    assert least.strategy == "exact"
    assert not row_of(found, "none").fits


def test_a_row_says_what_the_evaluator_says(found: Comparison, problem: Problem) -> None:
    row, regions = row_of(found, "every-block"), tuple(toys.every_block(problem.graph))
    again_us = problem.memory.recompute_time_us(regions, problem.liveness.op_time_ns / 1000)
    assert row.peak_bytes == problem.memory.curve(regions).peak_bytes <= found.budget_bytes
    rounded_us = 0.0005 * problem.graph.op_count  # a problem counts whole nanoseconds for every operator
    assert (found_us := row.recompute_time_us) is not None
    assert found_us == pytest.approx(again_us, abs=rounded_us)
    assert row.plan is not None and row.plan.predicted["judged_by"] == "replay"
    assert row.plan.predicted["device_again_us"] == pytest.approx(found_us)
    assert device_overhead(row.plan) == pytest.approx(found_us / problem.step_time_us)
    assert row.step_time_us and row.samples_per_s
    assert row.samples_per_s == pytest.approx(64 / row.step_time_us * 1e6)
    assert row.tokens_per_s == pytest.approx(row.samples_per_s * toys.LENGTH)


def test_only_exact_strategies_have_a_bound_and_all_are_held_against_it(found: Comparison) -> None:
    exact = row_of(found, "exact")
    assert exact.bound_us == found.bound_us > 0 and exact.gap is not None and exact.gap <= LIMITS.gap
    for row in found.rows:
        if row.strategy != "exact":
            assert (row.bound_us, row.gap) == (None, None)
        if row.fits:
            assert row.above_bound is not None and row.recompute_time_us is not None
            assert row.above_bound == pytest.approx(max(row.recompute_time_us / found.bound_us - 1, 0), abs=1e-9)
            assert row.above_bound >= exact.above_bound - 1e-9 if exact.above_bound is not None else False
            # In its file a plan has the bound that others proved.
            assert row.plan is not None and row.plan.solver["bound_us"] == pytest.approx(found.bound_us)
        else:
            assert row.above_bound is None


def test_what_does_not_fit_shows_how_near_it_comes(found: Comparison, problem: Problem) -> None:
    row = row_of(found, "none")
    assert (row.status, row.fits) == ("unknown", False)
    assert row.peak_bytes == problem.memory.peak_without_checkpointing > found.budget_bytes
    assert row.overhead == 0


def test_it_is_one_document(found: Comparison) -> None:
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert all(set(row) == KEYS for row in data["rows"])
    assert [row["strategy"] for row in data["rows"]] == [row.strategy for row in found.rows]
    assert data["budget_bytes"] == found.budget_bytes
    assert {"model", "target", "costs", "without_checkpointing", "bound_us", "measured_on"} <= set(data)


def test_named_strategies_are_compared_once_each(profile: Profile, budget: Budget) -> None:
    seen = []
    found = compared(
        profile, budget, strategies=["none", "every-block", "none"], on_strategy=lambda *about: seen.append(about)
    )
    assert seen == [("none", 1, 2), ("every-block", 2, 2)]
    assert [row.strategy for row in found.rows] == ["every-block", "none"]
    assert found.bound_us == 0 and all(row.above_bound is None for row in found.rows)  # nobody proved anything


def test_an_unknown_strategy_is_refused(profile: Profile, budget: Budget) -> None:
    with pytest.raises(UsageError, match=r"there is no strategy 'every-blok'.*every-block"):
        compared(profile, budget, strategies=["every-blok"])


def test_a_step_that_fits_needs_no_proof(profile: Profile, problem: Problem) -> None:
    most = problem.memory.peak_without_checkpointing
    found = compared(profile, Budget(most, most), strategies=["none", "exact"])
    assert all(row.fits and row.overhead == 0 and row.above_bound is None for row in found.rows)
    assert row_of(found, "exact").status == "optimal"


def test_where_it_is_proved_that_nothing_fits_the_least_budget_is_named(profile: Profile, problem: Problem) -> None:
    limit = problem.memory.peak_without_checkpointing // 10
    with pytest.raises(Infeasible) as refused:
        compared(profile, Budget(limit, limit), strategies=["none", "exact"], limits=LIMITS)
    least = refused.value.minimum_budget_bytes
    assert least is not None and limit < least
    assert compared(profile, Budget(least, least), strategies=["exact"], limits=LIMITS).rows[0].fits


def test_heuristics_that_do_not_fit_prove_nothing(profile: Profile, problem: Problem) -> None:
    limit = problem.memory.peak_without_checkpointing // 10
    found = compared(profile, Budget(limit, limit), strategies=["none", "every-block"])
    assert found.best is None
    assert [row.strategy for row in found.rows] == ["every-block", "none"]  # by peak


class Frozen(toys.Transformer):
    def __init__(self) -> None:
        super().__init__(layers=3, width=64)
        self.layers.requires_grad_(False)


@pytest.mark.parametrize("offload", ["activations", "weights"])
def test_a_step_that_waits_for_the_host_takes_as_long_in_every_answer(offload: str) -> None:
    """The plan's step time, the rate of its row and its estimate count the same waits."""
    slow = dataclasses.replace(find_planning_device("h100-80gb").target, host_bytes_per_us=1.0)
    workload = dataclasses.replace(toys.TRANSFORMER, build=Frozen, batch_size=8)
    loop = TrainingLoop(weights_on_host=3) if offload == "weights" else None
    step = fake_step(workload, place := PlanningDevice(slow, None), loop=loop)
    profile, link = profile_step(step, place), Link(1.0, 1 << 30) if offload == "activations" else None
    found = compared(profile, Budget(1 << 40, 1 << 40), step=step, link=link, strategies=["every-block"])
    row = row_of(found, "every-block" if link is None else "offload-all")
    assert row.plan is not None and row.step_time_us is not None
    waited_us = row.plan.predicted["weights_wait_us" if link is None else "stall_us"]
    host_us = row.plan.predicted.get("host_us", 0.0)
    assert waited_us > 2 * host_us and row.step_time_us > waited_us
    assert row.samples_per_s == pytest.approx(8 / row.step_time_us * 1e6)
    assert estimate_under(row.plan, profile).speed.update_time_us == pytest.approx(row.step_time_us)


# Solvers that go wrong


def answering(monkeypatch: pytest.MonkeyPatch, **solutions: Solution | BaseException) -> None:
    """Let strategies by name give these; the others are as they are."""
    load = strategies.load

    def loaded(name: str) -> Any:
        given = solutions.get(name.replace("-", "_"))
        if given is None:
            return load(name)

        def solve(problem: Problem, limits: Limits) -> Solution:
            if isinstance(given, BaseException):
                raise given
            return given

        return solve

    monkeypatch.setattr(strategies, "load", loaded)


def test_a_plan_that_does_not_hold_is_no_row(
    profile: Profile, budget: Budget, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = tuple(toys.every_block(problem.graph))
    answering(monkeypatch, exact=Solution("liar", "optimal", blocks, objective_us=1.0, bound_us=1.0))
    with pytest.raises(RematError, match=r"solver liar gave a plan that does not hold: .*claims 1\.000 us"):
        compared(profile, budget, strategies=["exact"])


def test_no_plan_in_time_is_a_row_without_numbers(
    profile: Profile, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, exact=Solution("slow", "unknown", bound_us=1.0, wall_s=2.0))
    row = compared(profile, budget, strategies=["exact", "every-block"]).rows[-1]
    assert (row.strategy, row.status, row.fits, row.bound_us, row.wall_s) == ("exact", "unknown", False, 1.0, 2.0)
    assert row.peak_bytes is None and row.step_time_us is None and row.tokens_per_s is None and row.plan is None


def test_an_interrupt_keeps_the_rows_so_far(profile: Profile, budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, sqrt_n=KeyboardInterrupt())
    found = compared(profile, budget, strategies=["every-block", "sqrt-n", "none"])
    assert found.interrupted and [row.strategy for row in found.rows] == ["every-block"]
    with pytest.raises(KeyboardInterrupt):
        compared(profile, budget, strategies=["sqrt-n"])


def test_where_the_replay_needs_more_less_is_asked_for(
    taken: tuple[Profile, FakeStep], budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Judge.peak
    monkeypatch.setattr(Judge, "peak", lambda *args: replay(*args) + 1000)
    row = compared(taken[0], budget, strategies=["exact"], limits=LIMITS, step=taken[1]).rows[0]
    assert row.peak_bytes is not None and row.peak_bytes + 1000 <= budget.limit_bytes


def test_the_limit_of_each_strategy_is_that_of_the_forms_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, best = [], comparing.fastest

    def watched(study: Study, budget_bytes: int, limits: Limits) -> BestPlan:
        seen.append(limits.time_s)
        return best(study, budget_bytes, limits)

    monkeypatch.setattr(comparing, "fastest", watched)
    forms = FormChoice(slices=(2,), most_row_slices=0)
    comparing.compare(
        LANGUAGE.sized(64), budget="95%step", target="h100-80gb", time_limit=5.0, strategies=["exact"], forms=forms
    )
    assert seen == [5.0]


def test_a_study_under_another_budget_is_under_that_without_a_link_too(profile: Profile, budget: Budget) -> None:
    study = study_of(profile, limit=budget, link=Link(1.0, 1 << 30))
    assert study.without_link.budget == study.with_losses_whole.budget == budget
    other = study.within(Budget(1, 1))
    assert other.without_link.budget == other.with_losses_whole.budget == Budget(1, 1)


# Whole modules


def test_replays_are_numbered_each_once(taken: tuple[Profile, FakeStep], budget: Budget) -> None:
    seen: list[int] = []
    plan_profile(taken[0], budget, step=taken[1], execution="modules", on_replay=seen.append, limits=LIMITS)
    assert seen == [*range(1, len(seen) + 1)] and seen


@pytest.fixture(scope="module")
def of_modules(taken: tuple[Profile, FakeStep], budget: Budget) -> Comparison:
    return compared(taken[0], budget, limits=LIMITS, step=taken[1], execution="modules")


def test_plans_of_modules_are_compared_with_each_other(of_modules: Comparison, found: Comparison) -> None:
    assert of_modules.execution == of_modules.to_json()["execution"] == "modules"
    best = of_modules.best
    assert best is not None and best.step_time_us is not None and found.best is not None
    assert best.step_time_us >= (found.best.step_time_us or 0)  # fewer plans
    for row in of_modules.rows:
        if row.plan is not None and row.strategy != "none" and row.fits:
            assert row.plan.execution == "modules"
            assert all(region.module and not region.saved and not region.inner for region in row.plan.regions)
    layers = row_of(of_modules, "every-block").plan
    assert layers is not None and [region.module for region in layers.regions] == [f"layers.{i}" for i in range(4)]


def test_the_peak_of_a_plan_of_modules_is_the_untraced_replays(
    taken: tuple[Profile, FakeStep], of_modules: Comparison, budget: Budget
) -> None:
    profile, step = taken
    row = row_of(of_modules, "exact")
    assert row.plan is not None
    replayed = replay_modules(
        step,
        row.plan.regions,
        alignment_bytes=profile.target.alignment_bytes,
        workspace_of=profile.workspace_of(),
    )
    assert row.peak_bytes == int(replayed.max()) + profile.graph.unseen_bytes <= budget.limit_bytes


def test_a_region_that_is_no_module_does_not_hold(profile: Profile, problem: Problem) -> None:
    space = find_module_space(profile.graph)
    posed = load("modules").pose(profile, space, 1 << 62)
    joined = toys.all_in_one(problem.graph)[0]
    assert "is not the forward of a module" in check(posed, Solution("any", "feasible", (joined,)))[0]
    assert heuristic.plan_of(posed, [joined]) == ()


# On the device at hand


@dataclasses.dataclass(frozen=True)
class FakeReport:
    batch_size: int
    seq_len: int | None
    passed: bool = True
    device: str = "a device"

    @property
    def measured(self) -> dict[str, int]:
        return {"peak_bytes": 10 * self.batch_size, "step_time_us": self.batch_size, "reserved_bytes": 0}


def test_all_that_fits_is_measured_at_one_size(found: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []

    def validate(workload: Any, plan: Any, **options: Any) -> FakeReport:
        """The plan of `exact` bears half the batch that others do."""
        most = 8 if plan == row_of(found, "exact").plan else 16
        ran.append((workload.batch_size, len(plan.regions)))
        return FakeReport(min(workload.batch_size, most), workload.seq_len)

    monkeypatch.setattr("remat.validation.measured_comparison.validate", validate)
    measured = measure_plans(found, toys.TRANSFORMER.sized(64))
    assert measured.measured_on == {"device": "a device", "batch_size": 8, "seq_len": toys.LENGTH}
    for row in measured.rows:
        assert row.measured == ({"peak_bytes": 80, "step_time_us": 8} if row.fits else None)
    different = len({row.plan.regions for row in found.rows if row.fits and row.plan})
    assert len([size for size, _ in ran if size == 8]) <= different  # equal plans run once
    assert measured.failures == ()


def test_a_measurement_that_fails_is_said_and_the_others_go_on(
    found: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, blocks = row_of(found, "exact").plan, row_of(found, "every-block").plan
    assert exact is not None and blocks is not None

    def validate(workload: Any, plan: Any, **options: Any) -> FakeReport:
        if plan == exact:
            raise ValidationFailed("out of memory.")
        return FakeReport(workload.batch_size, workload.seq_len, passed=plan.regions != blocks.regions)

    monkeypatch.setattr("remat.validation.measured_comparison.validate", validate)
    measured = measure_plans(found, toys.TRANSFORMER.sized(64))
    assert row_of(measured, "exact").measured is None
    assert row_of(measured, "every-block").measured == {"peak_bytes": 640, "step_time_us": 64}
    assert "exact: out of memory." in measured.failures
    assert "every-block: the measurement contradicts the plan." in measured.failures


def test_an_interrupted_measurement_keeps_what_was_measured(found: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def validate(workload: Any, plan: Any, **options: Any) -> FakeReport:
        if ran:
            raise KeyboardInterrupt
        ran.append(plan)
        return FakeReport(workload.batch_size, workload.seq_len)

    monkeypatch.setattr("remat.validation.measured_comparison.validate", validate)
    measured = measure_plans(found, toys.TRANSFORMER.sized(64))
    assert measured.interrupted and len(measured.rows) == len(found.rows)
    shown = [row.plan.regions for row in measured.rows if row.measured is not None and row.plan is not None]
    assert set(shown) == {ran[0].regions}
