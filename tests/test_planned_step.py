"""A plan for a step whose loss is computed outside of the model's forward: bitwise, in slices where that pays."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.costing.planning_device import find_planning_device
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import chunks_of
from remat.evaluation.graph import STATE
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.studies import plan_profile
from tests.toys import Block, all_in_one, every_block, graph_of, plan_by_hand

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH, CLASSES, LENGTH, SAMPLES = 16, 640, 48, 24


class Language(nn.Module):
    """Ids to logits: the loss is somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList([Block(WIDTH, 0.1) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def batch(samples: int, length: int | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(CLASSES, (samples, length or LENGTH))
    return {"ids": ids, "labels": ids.roll(-1, dims=1)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits.view(-1, CLASSES), batch["labels"].view(-1))


OUTSIDE = Workload("outside", Language, batch, step, batch_size=SAMPLES, seq_len=LENGTH)
PLANNED = OUTSIDE.with_planned_step()
HOWEVER_LITTLE = FormChoice(slices=(2,), most_row_slices=0, worth=0.0)


@functools.cache
def planned() -> Plan:
    """A plan for this CPU with less memory than the logits leave."""
    place = find_planning_device("cpu")
    fake = fake_step(PLANNED, place)
    profile = profile_step(fake, place)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    budget = int(0.93 * memory.curve(tuple(every_block(profile.graph))).peak_bytes)
    return plan_profile(profile, Budget(budget, budget), step=fake, forms=HOWEVER_LITTLE)


@pytest.mark.exhaustive
def test_a_loss_outside_of_the_model_is_cut_and_validates() -> None:
    made = planned()
    assert chunks_of(made.about)
    report = validate(PLANNED, made, repeats=1)
    assert report.passed, str(report)
    assert set(report.gradients_near) == {"model.head.weight"}


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_rows_that_are_selected_before_the_loss_are_no_other_kernels() -> None:
    """Labels of the next token: the last row has none, and in slices it is left out before there are logits."""

    def shifted(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(given["ids"])[:, :-1].float().reshape(-1, CLASSES)
        return F.cross_entropy(logits, given["ids"][:, 1:].reshape(-1))

    workload = dataclasses.replace(OUTSIDE, step=shifted, autocast=torch.bfloat16).with_planned_step()
    place = find_planning_device("cpu")
    fake = fake_step(workload, place)
    profile = profile_step(fake, place)
    budget = int(0.9 * Memory(profile.graph).peak_without_regions)
    made = plan_profile(profile, Budget(budget, budget), step=fake, forms=HOWEVER_LITTLE)
    assert chunks_of(made.about)
    report = validate(workload, made, repeats=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda planned: pickle.loads(pickle.dumps(planned))])
def test_a_copy_of_a_planned_step_trains_the_model_that_it_is_given(copied: Any) -> None:
    graph = graph_of(PLANNED)
    planned_step = remat.planned_step(step, plan_by_hand(graph, every_block(graph)))
    torch.manual_seed(0)
    model, given = Language().train(), batch(SAMPLES, LENGTH)
    assert planned_step(model, given).requires_grad
    copied(planned_step)(model, given).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", ["plan", "file"])
def test_a_planned_step_trains_as_the_step_does(tmp_path: Path, kept: str) -> None:
    plan: Any = planned()
    if kept == "file":
        plan.save(plan := tmp_path / "step.plan.json")
    torch.manual_seed(0)
    model = Language().train()
    other = copy.deepcopy(model)
    names = list(model.state_dict())
    planned_step = remat.planned_step(step, plan)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
    for samples, length in ((SAMPLES, LENGTH), (SAMPLES, LENGTH), (5, 31)):
        given = batch(samples, length)
        torch.manual_seed(1)
        expected = step(model, given)
        torch.manual_seed(1)
        found = planned_step(other, given)
        assert torch.equal(expected, found)
        expected.backward()
        found.backward()
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            if name == "head.weight":
                assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-7)
                two.grad = one.grad.clone()  # so that the steps after it can be compared
            assert torch.equal(one.grad, two.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(other.state_dict()) == names and "forward" not in vars(other)
    given = batch(3, LENGTH)
    assert torch.equal(step(model.eval(), given), planned_step(other.eval(), given))
    with torch.no_grad():
        assert torch.equal(model.train()(given["ids"]).isnan(), other.train()(given["ids"]).isnan())


@pytest.mark.exhaustive
def test_parts_that_are_in_evaluation_mode_stay_so() -> None:
    model = Language().train()
    model.layers[0].eval()
    remat.planned_step(step, planned()).of(model)
    assert not model.layers[0].training and model.layers[1].training


def test_what_belongs_elsewhere_is_refused_and_says_where_to() -> None:
    whole = dataclasses.replace(planned(), about={k: v for k, v in planned().about.items() if k != "with_step"})
    with pytest.raises(UsageError, match=r"give it to remat\.apply"):
        remat.planned_step(step, whole)
    with pytest.raises(UsageError, match=r"remat\.planned_step\(step, plan\)"):
        remat.apply(Language(), planned())
    with pytest.raises(UsageError, match="needs a function"):
        remat.planned_step(3, planned())  # type: ignore[arg-type]


def test_another_step_than_planned_is_refused() -> None:
    def penalised(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return step(model, given) + model(given["ids"]).square().mean()

    with pytest.raises(PlanMismatch):
        remat.planned_step(penalised, planned())(Language().train(), batch(SAMPLES, LENGTH))


def test_a_planned_step_that_is_gone_lets_go_of_its_model() -> None:
    model = Language().train()
    planned_step = remat.planned_step(step, planned())
    planned_step(model, batch(2, LENGTH)).backward()
    gone = weakref.ref(model)
    del model, planned_step
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


class Distilled:
    """A step that is an object, and keeps a teacher and a count."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.teacher, self.calls = nn.Linear(8, 8).requires_grad_(False), 0

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (model(x) - self.teacher(x)).square().mean()


class Criterion(nn.Module):
    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()


@pytest.mark.parametrize("step", [Distilled(), Criterion()], ids=lambda step: type(step).__name__)
def test_a_step_may_be_an_object_that_is_called(step: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    workload = Workload("object", build, lambda samples, _: torch.ones(samples, 8), step, batch_size=64)
    graph = graph_of(workload)
    assert getattr(step, "calls", 0) == 0
    model, planned = build(), apply(build(), plan_by_hand(graph, all_in_one(graph)))
    for each in (model, planned):
        step(each, workload.batch(64, None)).backward()
    assert counts_of(planned).regions > 0
    for p, q in zip(model.parameters(), planned.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_a_planned_step_counts_the_teacher_of_its_object_and_leaves_it_as_it_is() -> None:
    step, model = (
        Distilled(),
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)),
    )
    workload = Workload("object", lambda: copy.deepcopy(model), lambda n, _: torch.ones(n, 8), step, batch_size=64)
    graph = graph_of(workload.with_planned_step())
    assert graph.fixed_bytes[STATE] == sum(p.nbytes for p in step.teacher.parameters())
    step(model, workload.batch(64, None)).backward()  # with numbers, not with fakes


def test_code_without_a_file_or_a_module_is_planned() -> None:
    made: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(
        "def act(x): return torch.tanh(x)\n"
        "class Made(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(8, 8)\n"
        "    def forward(self, x): return act(self.layer(x))\n",
        made,
    )
    build = made["Made"]
    workload = Workload("made", build, lambda n, _: torch.ones(n, 8), lambda m, x: m(x).sum(), batch_size=4)
    assert build.__module__ is None or build.__module__ == "builtins"
    assert graph_of(workload).nodes


class TwoTasks(Language):
    def forward(self, ids: torch.Tensor, task: str = "next") -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        y: torch.Tensor = self.head(x) if task == "next" else x.mean(1)
        return y


def test_a_loop_with_two_tasks_has_a_plan_of_a_step_for_each() -> None:
    tasks = ("next", "mean")

    def of(task: str) -> Workload:
        def step(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
            return model(given["ids"], task).square().mean()

        return dataclasses.replace(OUTSIDE, build=TwoTasks, step=step)

    def plan_of(workload: Workload) -> Plan:
        graph = graph_of(workload)
        return plan_by_hand(graph, every_block(graph))

    torch.manual_seed(0)
    model, given = TwoTasks().train(), batch(SAMPLES, LENGTH)
    other = copy.deepcopy(model)
    alone = apply(copy.deepcopy(model), plan_of(of("next")))
    alone(given["ids"], "next")
    with pytest.raises(PlanMismatch, match="where the loop changes task, make a plan of the whole step for each value"):
        alone(given["ids"], "mean")
    steps = {task: remat.planned_step(of(task).step, plan_of(of(task).with_planned_step())) for task in tasks}
    for task in (*tasks, *tasks):
        for run, on in ((steps[task], model), (of(task).step, other)):
            torch.manual_seed(1)
            run(on, given).backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)
