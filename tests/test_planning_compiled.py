"""A plan made for compiled execution keeps its budget there, and is told as such."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from remat.cli import screen
from remat.costing.costs import estimated_costs
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import NoPlanInTime, PlanMismatch, UsageError
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, RegionRef
from remat.execution.apply import apply
from remat.execution.compiled import execution as compiled_execution
from remat.execution.compiled.fusion import fused
from remat.execution.compiled.replay import replay_compiled
from remat.execution.executions import load
from remat.formulation.search_space import find_space
from remat.planning.budget import Budget
from remat.planning.planner import plan_profile
from remat.recording.fake_step import FakeStep
from remat.validation.validating import validate
from remat.workload.target import TARGETS
from remat.workload.training_loop import TrainingLoop
from tests.command_line import Remat
from tests.studies import compared, traced
from tests.test_applying import batch_of, built, loss_of
from tests.test_cli import stack
from tests.test_generated_code import HALVES
from tests.toys import TRANSFORMER, Transformer, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

LARGER = dataclasses.replace(TRANSFORMER, build=lambda: Transformer(layers=3, width=32), batch_size=32)
CPU = find_planning_device("cpu")


@pytest.fixture(scope="module", autouse=True)
def replays_are_remembered() -> Iterator[None]:
    """A compiled replay takes seconds, and is the same the second time (`test_generated_code.py`)."""
    found: dict[Any, np.ndarray] = {}

    def remembered(step: FakeStep, regions: Sequence[RegionRef], **options: Any) -> np.ndarray:
        key = (id(step), tuple(regions), repr(sorted(options.items())))
        if key not in found:
            found[key] = replay_compiled(step, regions, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_execution, "replay_compiled", remembered)
        yield


def profile_of(graph: Graph) -> Profile:
    """Costs of a data sheet, so that plans do not depend on the clock."""
    return Profile(graph, estimated_costs(graph, TARGETS["h100-80gb"]), dataclasses.replace(CPU.target, name="cpu"))


@pytest.fixture(scope="module")
def larger() -> tuple[FakeStep, Profile]:
    fake, graph = recorded(LARGER)
    return fake, profile_of(graph)


def planned(step: FakeStep, profile: Profile, compiler: str, share: float) -> Plan:
    """A plan for `share` of what the compiled step needs without regions."""
    budget = int(share * replay_compiled(step, (), compiler=compiler).max())
    return plan_profile(profile, Budget(budget, budget), step=step, execution=compiler)


@pytest.fixture(scope="module")
def plan(larger: tuple[FakeStep, Profile]) -> Plan:
    return planned(*larger, "aot_eager", 0.75)


def test_a_plan_for_a_compiler_keeps_the_budget_there_and_promises_what_is_replayed(
    plan: Plan, larger: tuple[FakeStep, Profile]
) -> None:
    step, profile = larger
    peak = int(replay_compiled(step, plan.regions).max()) + profile.graph.unseen_bytes
    assert plan.predicted["peak_bytes"] == peak <= plan.budget_bytes
    assert plan.without_checkpointing["peak_bytes"] > plan.budget_bytes
    assert plan.regions and not any(region.inner for region in plan.regions)
    assert (plan.execution, plan.solver["status"], plan.solver["bound_us"]) == ("aot_eager", "feasible", 0.0)
    assert plan.predicted["judged_by"] == "replay"


def test_it_recomputes_less_than_the_plan_for_eager_execution(plan: Plan, larger: tuple[FakeStep, Profile]) -> None:
    budget = Budget(plan.budget_bytes, plan.budget_bytes)
    eager = plan_profile(larger[1], budget, space=find_space(larger[1].graph, depth=1))
    assert plan.predicted["recompute_time_us"] < eager.predicted["recompute_time_us"]
    assert plan.predicted["evaluator_peak_bytes"] > plan.budget_bytes


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of Inductor's own
def test_a_plan_for_inductor_keeps_the_budget_there() -> None:
    step, graph = recorded(HALVES)
    made = planned(step, profile_of(graph), "inductor", 0.7)
    peak = int(replay_compiled(step, made.regions, compiler="inductor").max())
    assert peak + graph.unseen_bytes == made.predicted["peak_bytes"] <= made.budget_bytes
    assert made.regions


def test_a_step_that_fits_compiled_needs_no_regions(larger: tuple[FakeStep, Profile]) -> None:
    made = planned(*larger, "aot_eager", 1.1)
    assert made.regions == () and made.solver["objective_us"] == 0


@pytest.mark.exhaustive
def test_a_budget_that_no_replay_keeps_is_refused_with_what_is_needed(larger: tuple[FakeStep, Profile]) -> None:
    with pytest.raises(
        NoPlanInTime, match=r"as it runs \(execution aot_eager\)\. Best replayed peak: .* A budget of .* will do"
    ):
        planned(*larger, "aot_eager", 0.01)


@pytest.mark.parametrize(
    ("device", "loop", "message"),
    [
        pytest.param(None, None, "a profile has none; use --model", id="profile"),
        pytest.param(find_planning_device("h200"), None, "h200 is not this machine's", id="target"),
        pytest.param(CPU, TrainingLoop(ranks=2, shard="zero3"), "leave `shard=` out", id="shards"),
    ],
)
def test_what_cannot_be_planned_compiled_is_refused(device: Any, loop: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("inductor").require(device, loop)


def test_an_execution_that_is_not_known_and_a_depth_that_it_does_not_bear_are_refused(
    larger: tuple[FakeStep, Profile],
) -> None:
    with pytest.raises(UsageError, match="execution 'cudagraphs' is not known; choose eager, modules"):
        load("cudagraphs")
    with pytest.raises(UsageError, match='under `execution="inductor"` regions do not nest; leave `depth=2` out'):
        load("inductor").space(larger[1].graph, 2)


def test_a_fused_operator_does_not_read_what_was_just_made(larger: tuple[FakeStep, Profile]) -> None:
    before, after = larger[1], fused(larger[1])
    graph = before.graph
    old, new = before.costs.per_op_us(graph), after.costs.per_op_us(after.graph)
    names = [graph.kinds[kind].name for kind in graph.op_kind]
    assert (new <= old).all() and (new[graph.backward_end :] == old[graph.backward_end :]).all()
    cheaper = {name for name, a, b in zip(names, new, old, strict=True) if a < b}
    assert "aten.native_dropout.default" in cheaper or "aten.mul.Tensor" in cheaper
    assert not any("mm" in name or "attention" in name for name in cheaper)


def test_a_plan_for_a_compiler_warns_where_it_runs_without(plan: Plan) -> None:
    with pytest.warns(UserWarning, match="uncompiled, the step needs other than the planned .* compiled by aot_eager"):
        loss_of(LARGER, apply(built(LARGER), plan), batch_of(LARGER))
    with pytest.raises(PlanMismatch, match="uncompiled, the step needs"):
        loss_of(LARGER, apply(built(LARGER), plan, on_larger="refuse"), batch_of(LARGER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run: Any = torch.compile(apply(built(LARGER), plan), backend="aot_eager")
        loss_of(LARGER, run, batch_of(LARGER)).backward()


@pytest.mark.exhaustive
def test_a_plan_for_a_compiler_is_validated_compiled(plan: Plan) -> None:
    report = validate(LARGER, plan, device="cpu", repeats=1)
    assert report.passed, str(report)
    assert report.gradients_equal and report.recomputed_nodes["observed"] is None
    assert report.measured["peak_bytes"] <= report.predicted["peak_bytes"] <= plan.budget_bytes
    assert report.untouched["peak_bytes"] == plan.without_checkpointing["peak_bytes"]
    assert "nodes      not seen (compiled) recomputed" in str(report)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of Inductor's own
def test_a_plan_for_inductor_is_validated_compiled() -> None:
    step, graph = recorded(HALVES)
    report = validate(HALVES, planned(step, profile_of(graph), "inductor", 0.7), device="cpu", repeats=1)
    assert report.passed, str(report)
    assert report.gradients_equal and report.untouched["peak_bytes"] > report.measured["peak_bytes"]


@pytest.mark.exhaustive
def test_strategies_are_compared_and_the_curve_is_traced_as_the_step_runs_compiled(
    plan: Plan, larger: tuple[FakeStep, Profile]
) -> None:
    step, profile = larger
    budget, names = Budget(plan.budget_bytes, plan.budget_bytes), ["every-block", "exact"]
    found = compared(profile, budget, strategies=names, step=step, execution="aot_eager")
    assert found.execution == "aot_eager" and found.bound_us == 0 and all(row.gap is None for row in found.rows)
    assert found.without_checkpointing["peak_bytes"] == plan.without_checkpointing["peak_bytes"]
    best = found.best
    assert best is not None and best.plan is not None and best.plan.regions == plan.regions
    assert best.peak_bytes == plan.predicted["peak_bytes"]
    curve = traced(profile, points=3, strategies=[], step=step, execution="aot_eager").points
    assert [(point.gap, point.bound_us) for point in curve] == [(None, None)] * len(curve)
    assert all(a.peak_bytes < b.peak_bytes and a.overhead > b.overhead for a, b in itertools.pairwise(curve))
    assert curve[-1].peak_bytes == plan.without_checkpointing["peak_bytes"]


def test_the_screen_says_that_there_is_no_bound(plan: Plan) -> None:
    text = screen.plan_text(plan)
    assert "compiled by aot_eager on cpu" in text
    assert "best replayed under aot_eager, no lower bound" in text
    assert "gap" not in text and "at the peak of its eager execution" in text


def test_the_command_line_plans_for_a_compiler(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "remat.costing.operator_timing.time_operators",
        functools.partial(time_operators, repeats=3, seconds_per_kind=0.0),
    )
    ran = remat(*stack("--target", "cpu", "--compiler", "aot_eager", budget="1GiB"))
    assert ran.exit_code == 0
    assert 'torch.compile(remat.apply(model, "stack.plan.json"), backend="aot_eager")' in ran.stdout
    assert Plan.load("stack.plan.json").execution == "aot_eager"
    refused = remat(*stack("--compiler", "inductor"))
    assert refused.exit_code == 2 and "h100-80gb is not this machine's" in refused.stderr
