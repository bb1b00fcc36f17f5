"""The figure "without checkpointing" is that of the step without a plan, which is not traced.

`Hoarding` keeps a value in a local variable until its forward ends. A trace lets go of it; Python does not.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from remat.cli.screen import plan_text
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import TRACED_ONLY
from remat.evaluation.plan import Plan
from remat.formulation.solution import NONE_NEEDED, TRACING_ALONE
from remat.planning.budget import Budget
from remat.planning.estimate import estimate_of
from remat.planning.micro_batches import RUNGS
from remat.planning.profiling import fake_step, profile_step
from remat.recording.fake_step import FakeStep
from remat.units import gib
from remat.validation.training import Training, undisturbed
from remat.validation.validating import validate
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached
from tests.small_models import TEST_SIZES
from tests.studies import compared, fit_all, plan_profile, traced
from tests.toys import CPU, TRANSFORMER, Transformer

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

KEPT = 768  # floats a token


class Hoarding(Transformer):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        kept = torch.ones(*ids.shape, KEPT)  # only its shape is used, but it is alive until the forward ends
        return super().forward(ids, labels) + 0 * kept.shape[0]


TOY = dataclasses.replace(
    TRANSFORMER, name="hoarding", build=functools.partial(Hoarding, layers=2), batch_size=8, seq_len=32
)
MORE = 8 * 32 * KEPT * 4  # bytes of what `Hoarding` keeps


def measured(workload: Workload, loop: TrainingLoop, plan: Plan | None = None) -> int:
    """Peak of a steady-state step on the CPU, under `plan` if there is one."""
    from remat.execution.apply import apply

    with undisturbed(CPU):
        training = Training(workload, CPU, 0, loop)
        training.begin_again()
        if plan is not None:
            apply(training.model, plan)
        training.step()
        return training.measure_steady_step(1, 1)[1]


@cached
def profiled(target: str = "cpu", loop: TrainingLoop | None = None) -> tuple[Profile, FakeStep, PlanningDevice]:
    place = find_planning_device(target)
    step = fake_step(TOY, place, loop=loop or TrainingLoop())
    return profile_step(step, place), step, place


def planned(budget: int) -> Plan:
    profile, step, _ = profiled()
    return plan_profile(profile, Budget(budget, budget), step=step)


@pytest.fixture(scope="module")
def memory() -> Memory:
    profile, _, _ = profiled()
    return Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))


@pytest.fixture(scope="module")
def between(memory: Memory) -> int:
    """A budget that the step keeps traced, and not otherwise."""
    assert memory.peak_without_checkpointing - memory.peak_without_regions > MORE // 2
    return (memory.peak_without_checkpointing + memory.peak_without_regions) // 2


@pytest.mark.parametrize("accumulation", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_step_without_checkpointing_is_predicted_as_it_runs(accumulation: int) -> None:
    loop = TrainingLoop(accumulation=accumulation)
    profile, _, _ = profiled("cpu", loop)
    predicted = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
    found = measured(TOY, loop)
    assert found <= predicted <= 1.001 * found


@pytest.mark.exhaustive
@pytest.mark.often("qwen3-moe-4")
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", TEST_SIZES)
def test_so_is_that_of_every_family(name: str, accumulation: int) -> None:
    workload, place, loop = TEST_SIZES[name](), find_planning_device("cpu"), TrainingLoop(accumulation=accumulation)
    profile = profile_step(fake_step(workload, place, loop=loop), place)
    plan = plan_profile(profile, Budget(1 << 40, 1 << 40))
    predicted, found = plan.without_checkpointing["peak_bytes"], measured(workload, loop)
    assert found <= predicted <= 1.001 * found


# Plans


def test_nothing_is_needed_where_the_untraced_step_fits(memory: Memory) -> None:
    plan = planned(memory.peak_without_checkpointing)
    assert plan.solver["name"] == NONE_NEEDED and plan.regions == ()
    assert measured(TOY, TrainingLoop()) <= plan.budget_bytes
    assert "no checkpointing needed" in plan_text(plan)


@pytest.mark.exhaustive
def test_a_plan_that_helps_by_tracing_alone_says_that_it_must_be_applied(memory: Memory, between: int) -> None:
    plan = planned(between)
    assert plan.regions == () and plan.predicted["recompute_time_us"] == 0
    assert (plan.solver["name"], plan.solver["status"]) == (TRACING_ALONE, "optimal")
    assert measured(TOY, TrainingLoop()) > plan.budget_bytes >= measured(TOY, TrainingLoop(), plan)
    text = plan_text(plan)
    assert "no checkpointing needed" not in text
    assert "apply this plan: the step fits because" in text and gib(memory.peak_without_checkpointing) in text
    report = validate(TOY, plan, device="cpu")
    assert report.passed and report.untouched["peak_bytes"] > plan.budget_bytes >= report.measured["peak_bytes"]


@pytest.mark.exhaustive
def test_below_the_traced_peak_something_is_recomputed(memory: Memory) -> None:
    assert planned(memory.peak_without_regions - 1).regions


def test_modules_are_not_traced_so_they_have_to_recompute_where_tracing_alone_would_do(between: int) -> None:
    profile, step, _ = profiled()
    plan = plan_profile(profile, Budget(between, between), step=step, execution="modules")
    assert plan.regions  # what `Hoarding` keeps stays there
    assert measured(TOY, TrainingLoop(), plan) <= between


def test_a_profile_file_knows_it_and_an_older_one_does_not(between: int, tmp_path: Path) -> None:
    profile, _, _ = profiled()
    profile.save(tmp_path / "toy.json")
    loaded = plan_profile(Profile.load(tmp_path / "toy.json"), Budget(between, between))
    assert loaded.without_checkpointing == planned(between).without_checkpointing
    assert loaded.solver["name"] == TRACING_ALONE
    data = profile.graph.to_json()
    del data["untraced_bytes"]
    old = dataclasses.replace(profile, graph=type(profile.graph).from_json(data))
    assert estimate_of(old).peaks.eager_bytes is None


@pytest.mark.exhaustive
def test_a_model_that_runs_traced_only_is_planned_all_the_same() -> None:
    class Asking(Transformer):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                self.embed.weight.sum().item()
            return super().forward(ids, labels)

    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(dataclasses.replace(TOY, build=Asking), place), place)
    assert "item()" in profile.graph.about[TRACED_ONLY]
    plan = plan_profile(profile, Budget(1 << 40, 1 << 40))
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    assert plan.without_checkpointing["peak_bytes"] == memory.peak_without_regions
    assert "for the traced step; the untraced step may need more" in plan_text(plan)


# Everywhere else


def test_in_a_comparison_and_on_a_curve_no_checkpointing_is_the_untraced_step(memory: Memory, between: int) -> None:
    profile, step, _ = profiled()
    found = compared(profile, Budget(between, between), strategies=["none", "exact"], step=step)
    exact, none = found.rows
    assert found.without_checkpointing["peak_bytes"] == none.peak_bytes == memory.peak_without_checkpointing
    assert (exact.strategy, exact.fits, none.fits) == ("exact", True, False)
    assert exact.plan is not None and exact.plan.solver["name"] == TRACING_ALONE
    curve = traced(profile, points=4, strategies=["none"])
    assert [point.peak_bytes for point in curve.others] == [memory.peak_without_checkpointing]
    assert curve.points[-1].peak_bytes == memory.peak_without_regions


@pytest.mark.exhaustive
def test_one_ranks_share_takes_as_much_more_as_the_whole() -> None:
    for loop in (TrainingLoop(), TrainingLoop(ranks=4, shard="zero3")):
        profile, _, _ = profiled("h100-80gb", loop)
        memory = Memory(profile.graph)
        more = memory.peak_without_checkpointing - memory.peak_without_regions
        whole = Memory(profile.whole or profile.graph)
        assert more == whole.peak_without_checkpointing - whole.peak_without_regions > 0


@pytest.mark.exhaustive
def test_the_ladder_of_a_fit_is_what_runs_without_a_plan() -> None:
    place = find_planning_device("h100-80gb")
    profile, _, _ = profiled("h100-80gb")
    memory = Memory(profile.graph)
    limit = (memory.peak_without_checkpointing + memory.peak_without_regions) // 2
    found = fit_all(TOY, place, Budget(limit, limit), TOY.batch_size)
    as_is = found.rungs[RUNGS[0]]
    assert as_is is not None and not as_is.fits
    # To what rounding to 512 bytes comes to in a toy: sizes are scaled from two records.
    assert as_is.peak_bytes == pytest.approx(memory.peak_without_checkpointing, rel=0.005)
    assert found.best.micro_batch == TOY.batch_size and found.plan.solver["name"] == TRACING_ALONE
