"""A plan with plans for shorter batches: each batch runs under the first that holds it, and trains bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.costing.device_allocator import measure_peak
from remat.costing.planning_device import find_planning_device
from remat.errors import NoPlanInTime, UsageError
from remat.evaluation.plan import Plan
from remat.execution.apply import counts_of, planned_forward
from remat.execution.eager.planned_graphs import PlannedGraphs
from remat.execution.forwards import holds
from remat.planning.planner import studied
from remat.planning.request import PlanRequest
from remat.planning.shorter import with_shorter
from remat.workload.workload import Workload
from tests.cached import cached
from tests.command_line import Remat
from tests.test_fitting import WIDE
from tests.toys import CONVNET, CPU, planned_graphs

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

MODEL = """\
import dataclasses
from tests.test_lengths import TEXT

def text():
    return dataclasses.replace(TEXT, name="text")
"""
LONGEST, LENGTHS = 32, (8, 16)
ROWS = 16
TEXT = WIDE.sized(batch_size=ROWS, seq_len=LONGEST)
EACH = remat.FormChoice(worth=-1.0)  # of measured times, which vary


@cached
def planned() -> Plan:
    return remat.plan(TEXT, budget="50%step", target="cpu", lengths=LENGTHS, forms=EACH)


def ran(model: nn.Module) -> list[int]:
    """How many regions were entered, by plan, shortest first."""
    main = planned_forward(model)
    return [each.counts.regions for each in (*main.shorter, main)]


def steps(model: nn.Module, lengths: tuple[int, ...], workload: Workload = TEXT) -> list[torch.Tensor]:
    """Train on batches of those lengths; return losses and the last gradients."""
    found = []
    for number, length in enumerate(lengths):
        torch.manual_seed(number)
        model.zero_grad()
        loss = workload.step(model, workload.batch(workload.batch_size, length))
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def built() -> nn.Module:
    torch.manual_seed(0)
    return TEXT.build().train()


# Planning


@pytest.mark.exhaustive
def test_shorter_batches_have_plans_that_recompute_less() -> None:
    plan = planned()
    assert [each.about["seq_len"] for each in plan.shorter] == [*LENGTHS]
    again = [each.predicted["recompute_time_us"] for each in (*plan.shorter, plan)]
    assert again == sorted(again) and again[0] == 0 < again[-1]
    assert all(each.predicted["peak_bytes"] <= plan.budget_bytes for each in plan.shorter)


@pytest.mark.exhaustive
def test_a_length_that_saves_no_time_has_no_plan_of_its_own() -> None:
    assert remat.plan(TEXT, budget="100%step", target="cpu", lengths=LENGTHS).shorter == ()


@pytest.mark.exhaustive
def test_a_length_without_a_plan_in_time_runs_under_the_next() -> None:
    made = planned()
    alone = dataclasses.replace(made, shorter=())

    def planned_at(length: int, request: Any) -> Plan:
        if length == LENGTHS[1]:
            raise NoPlanInTime("no plan")
        return made.shorter[0]

    study = studied(TEXT, PlanRequest(budget="60%step"), find_planning_device("cpu"))
    assert with_shorter(alone, study, LENGTHS, planned_at).shorter == made.shorter[:1]


@pytest.mark.parametrize(
    ("workload", "options", "says"),
    [
        pytest.param(TEXT, {"lengths": (LONGEST,)}, "32 is not", id="not-shorter"),
        pytest.param(TEXT, {"lengths": (0,)}, "0 is not", id="nothing"),
        pytest.param(CONVNET, {"lengths": (8,)}, "no sequence length", id="images"),
        pytest.param(TEXT, {"lengths": (8,), "execution": "modules"}, "run in eager mode", id="modules"),
        pytest.param(
            TEXT,
            {"lengths": (8,), "offload": "activations", "target": "h100-80gb"},
            "offload the optimizer only",
            id="host",
        ),
    ],
)
def test_lengths_that_make_no_sense_are_refused_by_name(workload: Workload, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        remat.plan(workload, **{"budget": "1GiB", "target": "cpu", **options})


# Training


@pytest.mark.exhaustive
def test_each_batch_runs_under_the_first_plan_that_holds_it() -> None:
    model = remat.apply(built(), planned())
    per_plan = [len(each.regions) for each in (*planned().shorter, planned())]
    counts = [0, 0, 0]
    for length, number in ((32, 2), (16, 1), (5, 0), (9, 1), (17, 2), (8, 0)):
        steps(model, (length,))
        counts[number] += per_plan[number]
        assert ran(model) == counts


@pytest.mark.exhaustive
def test_training_is_bitwise_that_without_a_plan() -> None:
    lengths = (32, 8, 16, 30, 7)
    found = steps(remat.apply(built(), planned()), lengths)
    assert all(map(torch.equal, found, steps(built(), lengths)))


@pytest.mark.exhaustive
def test_no_warning_in_training_on_many_lengths() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(remat.apply(built(), planned()), (32, 8, 16, 16, 32, 32))


@pytest.mark.exhaustive
def test_two_forwards_before_a_backward_are_noticed_across_plans() -> None:
    model = remat.apply(built(), planned())
    losses = [TEXT.step(model, TEXT.batch(ROWS, 32))]
    with pytest.warns(UserWarning, match="forward number 2 since the last backward"):
        losses.append(TEXT.step(model, TEXT.batch(ROWS, 8)))


def test_a_batch_that_no_plan_holds_warns_once() -> None:
    model = remat.apply(built(), planned())
    with pytest.warns(UserWarning, match="this batch has") as seen:
        for _ in range(2):
            model.zero_grad()
            TEXT.step(model, TEXT.batch(2 * ROWS, 32)).backward()
    assert len(seen) == 1, [str(each.message) for each in seen]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_all_plans(again: Any) -> None:
    model = again(remat.apply(built(), planned()))
    assert all(map(torch.equal, steps(model, (32, 8)), steps(built(), (32, 8))))
    main = planned_graphs(model)
    assert [isinstance(each, PlannedGraphs) and each.main is main for each in main.shorter] == [True, True]


def test_an_evaluation_interrupts_the_measurement_of_every_plan() -> None:
    model = remat.apply(built(), planned())
    main = planned_forward(model)
    every = (main, *main.shorter)
    for each in every:
        each.second_step._there = 1
        each._root.settled = True
    with torch.no_grad():
        TEXT.step(model.eval(), TEXT.batch(ROWS, 8))
    assert not any(each.second_step._there or each._root.settled for each in every)


def test_counts_and_validation_are_of_the_plan_that_runs() -> None:
    model = remat.apply(built(), planned())
    steps(model, (32, 16))
    assert counts_of(model).regions == sum(ran(model)) > ran(model)[-1]
    assert [planned().at_length(n) for n in (5, 8, 9)] == [planned().shorter[i] for i in (0, 0, 1)]
    assert planned().at_length(17) == dataclasses.replace(planned(), shorter=()) == planned().at_length(None)


@dataclasses.dataclass
class Batch:
    """A batch whose tensors a plan does not see."""

    tokens: Any


@pytest.mark.exhaustive
def test_a_length_that_the_arguments_do_not_show_has_no_plan() -> None:
    hidden = dataclasses.replace(
        TEXT, batch=lambda rows, length: Batch(TEXT.batch(rows, length)), step=lambda m, b: TEXT.step(m, b.tokens)
    )
    plan = remat.plan(hidden.with_planned_step(), budget="60%step", target="cpu", lengths=LENGTHS, forms=EACH)
    assert plan.shorter == ()


def test_removing_the_plan_removes_all() -> None:
    model = remat.remove(remat.apply(built(), planned()))
    assert "forward" not in model.__dict__


@pytest.mark.exhaustive
def test_measured_peaks_are_within_the_budget_at_every_length() -> None:
    plan = planned()
    model = remat.apply(built(), plan, verify_first_step=False)
    assert TEXT.optimizer is not None
    optimizer: Any = TEXT.optimizer(model.parameters())

    def step() -> None:
        TEXT.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for length in (32, 16, 12, 8, 32):
        batch = TEXT.batch(TEXT.batch_size, length)
        step()
        fixed = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batch[0]))
        fixed += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        assert fixed + measure_peak(step, CPU) <= plan.budget_bytes


def images(size: int, side: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert side is not None
    return torch.randn(size, 3, side, side), torch.randint(10, (size,))


def crops(size: int, number: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert number is not None
    return torch.randn(size * number, 3, 16, 16), torch.randint(10, (size * number,))


def of_images(batch: Any) -> Workload:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU())]

    def build() -> nn.Module:
        torch.manual_seed(0)
        ends = nn.Conv2d(3, 16, 3, padding=1), *copy.deepcopy(layers), nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*ends, nn.Flatten(), nn.Linear(16, 10)).train()

    def step(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(given[0]), given[1])

    return Workload("images", build, batch, step, batch_size=4, seq_len=32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [images, crops])
def test_a_length_is_as_well_the_side_of_images_or_their_number(batch: Any) -> None:
    workload = of_images(batch)
    plan = remat.plan(workload, budget="60%step", target="cpu", lengths=(28,), forms=EACH)
    planned, plain = remat.apply(workload.build(), plan), workload.build()
    found = steps(planned, (28, 32, 20), workload)
    assert all(map(torch.equal, found, steps(plain, (28, 32, 20), workload)))
    assert ran(planned) == [2 * len(plan.shorter[0].regions), len(plan.regions)] and all(ran(planned))


# The command line


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_the_command_plans_shows_and_validates_every_length(remat: Remat) -> None:
    Path("text.py").write_text(MODEL)
    said = remat("plan", "--model", "text.py:text", "--budget", "64%step", "--target", "cpu", "--lengths", "4, 8,16")
    assert said.exit_code == 0 and "each batch uses the first plan with enough tokens" in said.stdout
    assert "no plan of its own for 4" in said.stdout
    data = json.loads(remat("show", "text.plan.json", "--json").stdout)
    lengths = [each["about"]["seq_len"] for each in data["shorter"]]
    assert lengths and lengths[-1] == 16
    found = remat("validate", "text.plan.json", "--json")
    assert found.exit_code == 0
    reports = json.loads(found.stdout)
    assert [reports["passed"], *(each["passed"] for each in reports["shorter"])] == [True, *(True for _ in lengths)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "says"), [("32", "32 is not"), ("many", "whole numbers of tokens"), ("8,", "whole numbers of tokens")]
)
def test_the_command_refuses_lengths_that_make_no_sense(given: str, says: str, remat: Remat) -> None:
    Path("text.py").write_text(MODEL)
    said = remat("plan", "--model", "text.py:text", "--budget", "1GiB", "--target", "cpu", "--lengths", given)
    assert said.exit_code == 2 and says in said.stderr


# Files


def test_a_plan_file_keeps_the_plans_of_shorter_batches(tmp_path: Path) -> None:
    planned().save(tmp_path / "many.plan.json")
    assert Plan.load(tmp_path / "many.plan.json") == planned()
    schema = importlib.resources.files("remat.evaluation") / "plan.schema.json"
    fastjsonschema = pytest.importorskip("fastjsonschema")
    fastjsonschema.validate(json.loads(schema.read_text()), json.loads((tmp_path / "many.plan.json").read_text()))


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"x": "int64 4x16"}, True),
        ({"x": "int64 4x17"}, False),
        ({"x": "int64 8x8"}, False),
        ({"x": "int64 4x16", "mask": "bool 4x99"}, False),
        ({"x": "int64 4x16", "n": "3"}, False),
        ({"x": "int32 4x16"}, False),
        ({"x": "int64 4x16", "steps": "9"}, True),
        ({"x": "int64 4x16", "steps": "17"}, False),
        ({"x": "int64 4x16", "scale": "0.5"}, True),
        ({"x": "int64 4x16", "scale": "0.7"}, False),
        ({"x": "Batch()"}, False),
        ({}, False),
        ({"x": "int64 64"}, False),
        ({"y": "int64 4x16"}, False),
        ({"x": "list(int64 4x16, int64 4)"}, False),
    ],
)
def test_a_plan_holds_batches_that_are_larger_in_nothing(given: dict[str, str], fits: bool) -> None:
    assert holds({"x": "int64 4x16", "steps": "16", "scale": "0.5"}, given) is fits
