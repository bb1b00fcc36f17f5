"""State carried from forward to forward: training under a plan is bitwise equal, and planning leaves no trace."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat._torch.dynamo import frames_traced
from remat.capture.anchors import Signature
from remat.capture.model_state import ModelState
from remat.capture.settling import EarlyObservations, settle
from remat.costing.device_allocator import measure_peak
from remat.errors import CaptureError, PlanMismatch
from remat.evaluation.graph import STATE
from remat.evaluation.identity import LOOSE_BYTES
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from remat.execution.eager.graph_as_planned import OTHER_MODEL
from remat.execution.eager.planned_graphs import PlannedGraphs
from remat.execution.first_step import FirstStep
from remat.recording.record import record
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests import helpers_with_state
from tests.carrying import (
    CARRYING,
    CLASSES,
    COUNTING,
    ROWS,
    WIDTH,
    Banked,
    Buffered,
    Counting,
    Half,
    Queue,
    Stack,
    Tabled,
    forget,
    names_of,
    workload,
)
from tests.fingerprints import left_by
from tests.toys import all_in_one, every_block, pairs_of_segments, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


@pytest.fixture(autouse=True)
def nothing_carried() -> Iterator[None]:
    forget()
    yield
    forget()


def tight(work: Workload) -> Plan:
    """Regions of every two segments, and a budget that is just theirs."""
    graph = recorded(work)[1]
    return plan_by_hand(graph, pairs_of_segments(graph))


QUEUE = workload(Queue)


@pytest.fixture(scope="module")
def queue_plan() -> Plan:
    return tight(QUEUE)


def trained(
    work: Workload, plan: Plan | None, steps: int, between: Callable[[nn.Module, int], None] = lambda model, i: None
) -> tuple[list[torch.Tensor], nn.Module]:
    """Losses and last parameters of a training from one seed, and the model."""
    forget()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = work.build()
    if plan is not None:
        apply(model, plan)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for i in range(steps):
        between(model, i)
        with torch.autocast("cpu", torch.bfloat16, enabled=work.autocast is not None):
            loss = work.step(model, work.batch(work.batch_size, None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters())], model


def is_bitwise(work: Workload, plan: Plan, steps: int, **options: Any) -> nn.Module:
    expected, _ = trained(work, None, steps, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the budget, which early forwards do not keep
        found, model = trained(work, plan, steps, **options)
    assert [i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if not torch.equal(one, other)] == []
    return model


# Training

FEW = {"queue", "averages", "hooked", "banked"}


@pytest.mark.parametrize("name", names_of(CARRYING, FEW))
def test_a_model_that_carries_state_trains_bit_by_bit_as_without_a_plan(name: str) -> None:
    work = workload(CARRYING[name])
    plan = tight(work)
    assert plan.regions
    model = is_bitwise(work, plan, 12)
    assert counts_of(model).regions >= 7 * len(plan.regions)


class Helped(Stack):
    """Names helper functions, which alone name what they keep: a counter, a meter, a generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = helpers_with_state.dictionary() + helpers_with_state.METER.update(0.1)
        return super().forward(x + helpers_with_state.drawn()) * (0.5 + 0.02 * scale)


def step_with_helper(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * helpers_with_state.dictionary())


def kept_by_helpers() -> tuple[int, float, list[int]]:
    state = helpers_with_state
    return state.COUNTS["n"], state.METER.mean, state.TORCHS.get_state().tolist()


def test_what_helpers_keep_is_as_without_a_plan_and_validation_leaves_it() -> None:
    work = workload(Helped, step=step_with_helper)
    plan = tight(work)
    at = kept_by_helpers()
    report = validate(work, plan, device="cpu")
    assert report.passed and kept_by_helpers() == at
    states = []
    for planned in (None, plan):
        state = ModelState(Helped())
        found = trained(work, planned, 4)[0]
        states.append((found, kept_by_helpers()))
        state.put_back()
    assert states[0][1] == states[1][1] and all(map(torch.equal, states[0][0], states[1][0]))


def test_what_helpers_of_a_planned_step_keep_is_as_without_a_plan() -> None:
    work = workload(Stack, step=step_with_helper)
    plan = tight(work.with_planned_step())
    found = []
    for step in (work.step, remat.planned_step(work.step, plan)):
        helpers_with_state.COUNTS["n"] = 0
        torch.manual_seed(0)
        model = work.build()
        found.append([step(model, work.batch(ROWS, None)).item() for _ in range(3)])
        assert helpers_with_state.COUNTS["n"] == 3
    assert found[0] == found[1]


@pytest.mark.often("buffered", "cached", "averages")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CARRYING)
def test_fifty_steps_within_three_quarters_of_the_step_are_bitwise_and_validate(name: str) -> None:
    work = workload(CARRYING[name], batch_size=512)
    plan = remat.plan(work, target="cpu", budget="85%step", exact=True)
    assert plan.regions
    is_bitwise(work, plan, 50)
    forget()
    report = validate(work, plan, device="cpu")
    assert report.passed, str(report)
    predicted, measured = (of["peak_bytes"] for of in (report.predicted, report.measured))
    assert abs(measured - predicted) < 2048  # Python numbers that autograd keeps


@pytest.mark.fast("amp")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "amp"])
def test_what_is_carried_from_micro_batch_to_micro_batch_is_too(autocast: torch.dtype | None) -> None:
    work = workload(Banked, autocast=autocast)
    plan = tight(work)

    def accumulated(planned: Plan | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = work.build() if planned is None else apply(work.build(), planned)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                losses.append(work.step(model, work.batch(work.batch_size, None)))
            losses[-1].backward()
        return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, accumulated(None), accumulated(plan)))


@pytest.mark.exhaustive
def test_a_step_that_calls_the_model_twice_carries_from_one_to_the_other() -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(model(x), labels) + F.cross_entropy(model(0.9 * x), labels)

    work = workload(Buffered, step=step)
    is_bitwise(work, tight(work), 6)


class Normalized(Stack):
    """Batch norm, which keeps the averages that it has written: its backward reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def test_averages_that_the_first_call_saved_are_as_they_were_when_the_second_has_been_verified() -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(model(x), labels) + F.cross_entropy(model(0.9 * x), labels)

    work = workload(Normalized, step=step)
    graph = recorded(work)[1]
    regions = pairs_of_segments(graph)
    is_bitwise(work, plan_by_hand(graph, regions[len(regions) // 2 :]), 2)  # the norm is in none


@pytest.mark.exhaustive
def test_a_memory_that_the_script_empties_now_and_then_runs_its_first_forward_each_time() -> None:
    def between(model: nn.Module, i: int) -> None:
        if i % 3 == 0:
            model.past = None  # type: ignore[assignment]

    work = workload(Buffered)
    plan = tight(work)
    model = is_bitwise(work, plan, 9, between=between)
    assert counts_of(model).regions == 6 * len(plan.regions)


class Turning(Stack):
    """A loop that yields stands at the same place each time, and has another number there."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = self.turning()

    def turning(self) -> Iterator[float]:
        turn = 0
        while True:
            yield 1 + 0.1 * (turn % 3)
            turn += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = next(self.turns)
        for layer in self.layers:
            x = layer(x) * scale
        y: torch.Tensor = self.head(x)
        return y


class Cycling(Turning):
    def turning(self) -> Iterator[float]:
        return itertools.cycle([1.0, 1.1, 1.2])


@pytest.mark.parametrize("model", [Turning, Cycling])
def test_what_gives_a_value_once_and_a_forward_takes_from_is_refused_by_name(model: type[Turning]) -> None:
    """It trained with other numbers: the check of the first step took from it too."""
    with pytest.raises(CaptureError, match=r"`turns` of the model is a Python generator.*Keep the values in"):
        recorded(workload(model))


def test_a_plan_is_applied_in_the_middle_of_a_training(queue_plan: Plan) -> None:

    def between(model: nn.Module, i: int) -> None:
        if i == 5:
            apply(model, queue_plan)

    expected, _ = trained(QUEUE, None, 9)
    found, model = trained(QUEUE, None, 9, between)
    assert all(map(torch.equal, expected, found))
    assert counts_of(model).regions == 4 * len(queue_plan.regions)


@pytest.mark.exhaustive
def test_evaluation_between_steps_carries_as_it_does_without_a_plan() -> None:
    def between(model: nn.Module, i: int) -> None:
        with torch.no_grad():
            model.eval()(torch.ones(64, 32))
        model.train()

    is_bitwise(work := workload(Banked), tight(work), 5, between=between)


# Early forwards


def test_early_forwards_are_told_of_once_with_their_bytes(queue_plan: Plan) -> None:
    assert queue_plan.about["early_forwards"] == 4 and queue_plan.about["carried"] == {"queue": "tensor"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(QUEUE, queue_plan, 6)
    (said,) = [str(each.message) for each in caught if "gradients are there" not in str(each.message)]
    assert "`queue`" in said and "run without the plan" in said and "than the budget of" in said


@pytest.mark.filterwarnings("ignore")  # of the budget, which early forwards do not keep
def test_early_forwards_are_verified_and_the_first_planned_one(
    queue_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward without a queue is early; with a short one the graph is the planned one."""
    verified: list[bool] = []
    run = FirstStep._prepared

    def noted(self: FirstStep, *args: Any) -> Any:
        verified.append(True)
        return run(self, *args)

    monkeypatch.setattr(FirstStep, "_prepared", noted)
    trained(QUEUE, queue_plan, 7)
    assert len(verified) == 1 + 1


def test_early_forwards_that_keep_the_budget_are_not_told_of(queue_plan: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(QUEUE, dataclasses.replace(queue_plan, budget_bytes=1 << 40), 6)


def test_early_forwards_are_refused_where_what_takes_more_is(queue_plan: Plan) -> None:
    model = apply(QUEUE.build(), queue_plan, on_larger="refuse")
    with pytest.raises(PlanMismatch, match=r"`queue`.*run without the plan"):
        QUEUE.step(model, QUEUE.batch(QUEUE.batch_size, None))


def test_a_plan_that_knows_of_no_early_forwards_refuses_them_and_leaves_no_trace_of_looking_again(
    queue_plan: Plan,
) -> None:
    about = {
        name: value
        for name, value in queue_plan.about.items()
        if name not in ("early_graphs", "early_forwards", "carried")
    }
    model = apply(QUEUE.build(), dataclasses.replace(queue_plan, about=about))
    with pytest.raises(PlanMismatch, match="graph differs"):
        QUEUE.step(model, QUEUE.batch(QUEUE.batch_size, None))
    assert len(model.queue) == 1  # type: ignore[arg-type]  # of the forward that was refused


def test_a_table_that_is_made_once_is_made_before_the_first_step_which_keeps_the_budget() -> None:
    work = workload(Tabled)
    plan = tight(work)
    assert plan.about["early_forwards"] == 1 and "carried" not in plan.about
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*of gradients are there")
        model = is_bitwise(work, plan, 1)
    assert counts_of(model).regions == len(plan.regions)


class Target(Stack):
    """Compares with a copy of its layers, which the first forward makes, as BYOL's target network in a library."""

    def __init__(self) -> None:
        super().__init__()
        self.target: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.target is None:
            self.target = nn.Sequential(*copy.deepcopy(self.layers)).requires_grad_(False)
        with torch.no_grad():
            seen = self.target(x)
        return super().forward(x) - seen.mean(-1, keepdim=True)


class CopyingStep:
    """Compares with a copy of the model, which the first step makes."""

    target: nn.Module | None = None

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.target is None:
            self.target = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            seen = self.target(batch[0])
        return F.mse_loss(model(batch[0]), seen + 1)


def test_a_model_that_the_first_step_copies_is_planned() -> None:
    work = dataclasses.replace(workload(Stack), step=CopyingStep())
    report = validate(work, tight(work), device="cpu")
    assert report.passed, str(report)


@pytest.mark.exhaustive
def test_a_network_that_the_first_forward_copies_is_planned_without_a_warning_of_torchs() -> None:
    work = workload(Target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = tight(work)
    assert plan.regions
    is_bitwise(work, plan, 4)
    report = validate(work, plan, device="cpu")
    assert report.passed, str(report)


class Waves(nn.Module):
    """Keeps a table from the first forward on that is a hundredth of what the step needs."""

    table: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(WAVES).float().cos()
        return self.table


class Waved(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.waves()[:WIDTH])


WAVES = 256


def test_a_small_table_is_made_before_the_first_step_too_and_nothing_is_told_of_another_model() -> None:
    plan = tight(work := workload(Waved))
    assert LOOSE_BYTES <= 4 * WAVES < 16 * WAVES < OTHER_MODEL * plan.predicted["peak_bytes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(work, plan, 2)
    is_bitwise(work, plan, 2)


class Calibrated(Stack):
    """Is calibrated by its first batch, from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        if scale is None:
            self.scale = x.detach().std(0)
            return super().forward(x)
        return super().forward(self.layers[0](x) / scale)


def test_what_is_made_once_and_changes_the_result_is_not_made_before_the_first_step() -> None:
    is_bitwise(work := workload(Calibrated), tight(work), 4)


class Checkpointed(torch.autograd.Function):
    """A block whose backward runs it again, as guided-diffusion writes it."""

    @staticmethod
    def forward(ctx: Any, block: Callable[..., torch.Tensor], x: torch.Tensor, *parameters: nn.Parameter) -> Any:
        ctx.block, ctx.given = block, (x, *parameters)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *parameters = ctx.given
        with torch.enable_grad():
            y = ctx.block(x := x.detach().requires_grad_())
        return None, *torch.autograd.grad(y, (x, *parameters), gradient)


class CheckpointedHalf(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Checkpointed.apply(super().forward, x, *self.parameters())
        return y


class Looped(nn.Sequential):
    """A loop, which Dynamo gives up for good once a graph breaks in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class GivenUp(nn.Module):
    """The first loop is a graph until the second breaks one."""

    def __init__(self) -> None:
        super().__init__()
        blocks = Looped(nn.Linear(WIDTH, WIDTH)), Looped(Half(), CheckpointedHalf(), nn.Dropout(0.1)), Looped(Half())
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


GIVEN_UP = workload(GivenUp, batch_size=512)


@pytest.fixture(scope="module")
def given_up_plan() -> Plan:
    return remat.plan(GIVEN_UP, target="cpu", budget="85%step", exact=True)


@pytest.mark.exhaustive
def test_a_loop_that_dynamo_gives_up_after_its_first_trace_keeps_the_budget_from_the_first_step_on(
    given_up_plan: Plan,
) -> None:
    plan = given_up_plan
    assert plan.regions and plan.about["early_forwards"] == 1 and "carried" not in plan.about
    expected, _ = trained(GIVEN_UP, None, 3)
    peaks: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        model = apply(GIVEN_UP.build(), plan, verify_first_step=False)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for _ in range(3):
            batch = GIVEN_UP.batch(GIVEN_UP.batch_size, None)

            def step() -> None:
                loss = GIVEN_UP.step(model, batch)  # noqa: B023
                loss.backward()
                losses.append(loss.item())

            peaks.append(measure_peak(step, torch.device("cpu"), requested=True))
            optimizer.step()
            optimizer.zero_grad()
    assert losses == [loss.item() for loss in expected[:3]] and len(set(peaks)) == 1
    assert counts_of(model).regions == 3 * len(plan.regions)
    report = validate(GIVEN_UP, plan, device="cpu", repeats=1)
    assert report.passed and report.measured["peak_bytes"] == plan.predicted["peak_bytes"]


@pytest.mark.exhaustive
def test_it_is_given_up_again_where_kernels_change_and_the_forward_is_traced_anew(given_up_plan: Plan) -> None:
    def between(model: nn.Module, step: int) -> None:
        torch.backends.cuda.enable_flash_sdp(step != 2)

    model = is_bitwise(GIVEN_UP, given_up_plan, 4, between=between)
    assert counts_of(model).regions == 4 * len(given_up_plan.regions)


def test_a_planned_graph_may_be_another_call_of_an_early_forward(
    given_up_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedGraphs, "_rehearse", lambda self, running: None)
    assert counts_of(is_bitwise(GIVEN_UP, given_up_plan, 3)).regions < 3 * len(given_up_plan.regions)
    with pytest.warns(UserWarning, match=r"later ones, which the plan is for: such forwards run without the plan"):
        trained(GIVEN_UP, given_up_plan, 1)


class Replacing(Stack):
    """Replaces its layers in its first forward and draws new weights for them, as BigBird does with short rows.

    Dynamo breaks its graph there, in a loop, and gives up the whole function.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if type(layer) is Half:
                self.layers[i] = Normed(layer)
            x = self.layers[i](x)
        y: torch.Tensor = self.head(F.dropout(x, 0.5))
        return y


class Normed(Half):
    def __init__(self, half: Half) -> None:
        super().__init__()
        self.up, self.down = half.up, half.down


@pytest.mark.exhaustive
def test_a_forward_is_traced_anew_once_its_model_has_replaced_a_layer() -> None:
    plan = tight(work := workload(Replacing))
    assert plan.about["early_graphs"] and "carried" not in plan.about
    model = is_bitwise(work, plan, 4)
    assert counts_of(model).regions == 3 * len(plan.regions)


class GivenUpAndNoted(GivenUp):
    """Notes a number of each forward, which no other reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.noted = y.detach().mean()
        return y


class ScriptedStep:
    """A step whose captures have one graph and whose later forwards have others, beside a tensor that changes."""

    known_functions: frozenset[str] = frozenset()

    def __init__(self, later: Iterator[str]):
        self.model, self.calls, self.early = nn.Module(), types.SimpleNamespace(answers=None), EarlyObservations()
        self._later, self.signatures = later, tuple[Signature, ...]()

    def capture_anew(self, answers: Any) -> None:
        self.signatures = (Signature("traced", ()),)

    def run_again(self) -> None:
        self.signatures = (Signature(next(self._later), ()),)

    def run_untraced(self) -> None:
        raise AssertionError

    def forward(self) -> torch.Tensor:
        return torch.zeros(())

    def state(self) -> Any:
        return types.SimpleNamespace(changes=lambda statistics: {"noted": "tensor"}, shared_names=())


def test_what_is_carried_makes_no_other_graph_where_each_capture_does() -> None:
    step = ScriptedStep(itertools.repeat("later"))
    settle(step, step.run_again)
    assert step.early.by_traces and [graphs[0].key for graphs in step.early.history[:3]] == ["traced", "later", "later"]
    turning = ScriptedStep(itertools.cycle(("later", "later", "other")))
    with pytest.raises(CaptureError, match="another graph in every step"):
        settle(turning, turning.run_again)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_loop_that_dynamo_gives_up_is_no_other_graph_because_of_what_is_carried() -> None:
    case = workload(GivenUpAndNoted, batch_size=4)
    _, graph = recorded(case)
    assert graph.about["early_by_traces"] and graph.about["early_forwards"] == 1 and "noted" in graph.about["carried"]
    plan = plan_by_hand(graph, every_block(graph))
    model = is_bitwise(case, dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"]), 2)
    assert counts_of(model).regions == 2 * len(plan.regions)


class Endless(Stack):
    """Reads all that it ever kept."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.past:
            x = x + torch.stack(self.past).mean(0)
        self.past.append(x.detach())
        return super().forward(x)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_forward_that_is_another_graph_for_ever_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"another graph in every step.*`past`.*fixed size"):
        recorded(workload(Endless))


# Counters

FEW_COUNTERS = {"decay", "object", "dropout", "several-graphs", "buffer-read-twice"}


@pytest.mark.parametrize("name", names_of(COUNTING, FEW_COUNTERS))
def test_numbers_that_a_forward_changes_are_left_open(name: str) -> None:
    work = workload(COUNTING[name])
    plan = tight(work)
    counts = []

    def between(model: nn.Module, i: int) -> None:
        counts.append(frames_traced())

    model = is_bitwise(work, plan, 12, between=between)
    *_, planned_after_four, last = counts[16], counts[-1]
    assert planned_after_four == last  # none is traced anew
    assert counts_of(model).regions >= 11 * len(plan.regions)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COUNTING)
def test_a_model_that_counts_validates(name: str) -> None:
    work = workload(COUNTING[name], batch_size=512)
    plan = remat.plan(work, target="cpu", budget="75%step", exact=True)
    is_bitwise(work, plan, 50)
    report = validate(work, plan, device="cpu")
    assert report.passed, str(report)


def _told_apart(model: Counting) -> float:
    model.steps += 1
    return float(torch.tensor(0.5, device="meta").numel()) * hash((model.steps, "a")) / hash((model.steps, "a"))


@pytest.mark.exhaustive
def test_a_counter_that_a_trace_cannot_leave_open_is_told_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.execution.eager.fitting_graphs.MANY_TRACES", 4)
    work = workload(functools.partial(Counting, _told_apart))
    plan = tight(work)
    assert plan.about["carried"] == {"steps": "number"}
    with pytest.warns(UserWarning, match=r"traced 4 times, because of what it changes .*`steps`.*register_buffer"):
        trained(work, plan, 5)


# Containers


class Relative(Stack):
    """Reads the first number of a list that grows for ever, as GradNorm does its first losses."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.history.append(y.detach().norm())
        return y / self.history[0]


class WarmingUp(Relative):
    """Takes another way until a list has a number of items."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Stack.forward(self, x)
        if len(self.history) < 5:
            self.history.append(y.detach().norm())
            y = y * 0.5
        return y


class Recent(Stack):
    """Compares with the oldest of the last three, once there are three."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[torch.Tensor] = collections.deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.recent.append(y.detach().mean())
        return y + self.recent[0] if len(self.recent) == 3 else y


class InTurn(Stack):
    """Takes the rates of a dictionary in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = collections.OrderedDict((number, torch.tensor(0.5 + number)) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rates.move_to_end(next(iter(self.rates)))
        return super().forward(x) * next(iter(self.rates.values()))


class Visited(Stack):
    """Keeps the numbers of its forwards in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.count = set[int](), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(self.count)
        self.count += 1
        return super().forward(x) * (0.5 if 2 in self.seen else 1.0)


CONTAINERS = {kind.__name__.lower(): kind for kind in (Relative, WarmingUp, Recent, InTurn, Visited)}


@pytest.mark.parametrize("name", names_of(CONTAINERS, {"relative", "warmingup", "recent"}))
def test_a_container_that_a_forward_changes_and_reads_is_as_without_a_plan(name: str) -> None:
    work = workload(CONTAINERS[name])
    plan = tight(work)
    model = is_bitwise(work, plan, 9)
    assert counts_of(model).regions >= 3 * len(plan.regions) > 0


def test_forwards_that_only_append_to_a_list_are_traced_once() -> None:
    work, counts = workload(CARRYING["statistics"]), list[int]()
    is_bitwise(work, tight(work), 5, between=lambda model, i: counts.append(frames_traced()))
    assert counts[6] == counts[9]


# No trace


@pytest.mark.parametrize("name", names_of({**CARRYING, **COUNTING}, {"queue", "hooked", "attribute"}))
def test_planning_and_applying_leave_no_trace_in_a_model(name: str) -> None:
    torch.manual_seed(0)
    model = {**CARRYING, **COUNTING}[name]()
    work = workload(lambda: model, batch_size=512)  # the model itself, as scripts do that build one before they plan
    work.step(model, work.batch(work.batch_size, None)).backward()
    model.zero_grad()

    target = "cpu" if name == "truncated" else "h100-80gb"  # where nobody knows what cuDNN keeps of a recurrent layer

    def planned() -> None:
        apply(model, remat.plan(work, target=target, budget="99.9%step", exact=True))

    assert left_by(model, planned) == {}
    assert left_by(model, lambda: work.step(model, work.batch(512, None))) != {} or name == "tabled"


def test_records_of_a_model_that_counts_are_of_one_step() -> None:
    step, graph = recorded(workload(COUNTING["attribute"]))
    traced = frames_traced()
    assert [node.op for node in record(step, whole=graph).nodes] == [node.op for node in graph.nodes]
    assert frames_traced() == traced


LATEST: list[torch.Tensor] = []


def test_what_a_step_leaves_in_a_global_is_gone_in_the_next_one_and_no_state() -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        LATEST[:] = [model(batch[0])]
        return F.cross_entropy(LATEST[0], batch[1])

    assert STATE not in recorded(workload(Stack, step=step))[1].fixed_bytes


# Executions


@pytest.mark.exhaustive
def test_a_module_that_carries_something_is_no_region_of_modules() -> None:
    from remat.execution.modules.search_space import eligible_modules

    graph = recorded(workload(COUNTING["layers"]))[1]
    assert [path for _, _, path in eligible_modules(graph) if path.count(".") == 1] == []
    graph = recorded(workload(CARRYING["shared"]))[1]
    assert eligible_modules(graph) == ()


# A branch that a number takes now and then


class NowAndThen(Stack):
    """Restarts an average every `often` forwards, which it counts in an attribute or in a buffer."""

    average: torch.Tensor
    counted: torch.Tensor

    def __init__(self, often: int, *, in_buffer: bool) -> None:
        super().__init__()
        self.often, self.in_buffer, self.steps = often, in_buffer, 0
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("counted", torch.tensor(0))

    def count(self) -> int:
        if self.in_buffer:
            self.counted += 1
            return int(self.counted)
        self.steps += 1
        return self.steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count() % self.often == 0:
            with torch.no_grad():
                self.average.copy_(x[0])
        return super().forward(x - self.average)


@pytest.mark.parametrize("in_buffer", [False, True])
def test_a_forward_that_takes_another_way_now_and_then_runs_without_the_plan_and_is_told_of(in_buffer: bool) -> None:
    work = workload(functools.partial(NowAndThen, 20, in_buffer=in_buffer))
    plan = tight(work)
    expected, _ = trained(work, None, 43)
    with pytest.warns(UserWarning, match=r"another graph than planned, probably by a number .*copy_"):
        found, model = trained(work, plan, 43)
    assert all(map(torch.equal, expected, found))
    assert counts_of(model).regions >= 41 * len(plan.regions)


def test_it_is_refused_where_what_takes_more_is() -> None:
    work = workload(functools.partial(NowAndThen, 20, in_buffer=True))
    plan = tight(work)
    torch.manual_seed(0)
    model = apply(work.build(), plan, on_larger="refuse")
    for _ in range(19):
        work.step(model, work.batch(work.batch_size, None))
    with pytest.raises(PlanMismatch, match=r"whose graph differs from this model's .* copy_"):
        work.step(model, work.batch(work.batch_size, None))


class Skipping(Counting):
    """Leaves out its first layer from the forward of number `first` on."""

    def __init__(self) -> None:
        super().__init__(lambda model: 1 / (1 + model.steps))
        self.first = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers[int(self.steps >= self.first) :]:
            x = layer(x)
        y: torch.Tensor = self.head(x) * self.count(self)
        return y


def wrapped(model: Skipping) -> None:
    layer: Any = model.layers[0]
    layer.up = nn.Sequential(layer.up, nn.Identity())


def patched(model: Skipping) -> None:
    model.layers[0].forward = lambda x: 2 * x


def skipping(model: Skipping) -> None:
    model.first = 0


@pytest.mark.parametrize(
    ("change", "why", "is_by_a_number"),
    [
        (wrapped, r"linear in layers.0.up.0, and was linear in layers.0.up when planned; use", False),
        (patched, r"layer_norm in layers.1.norm, .*; layers.0 has a forward that its class has not; use", False),
        (
            skipping,
            r"layer_norm in layers.1.norm, .*; a number that the model changes may be why \(`steps`\); use",
            True,
        ),
    ],
)
def test_a_number_is_blamed_only_where_it_may_be_why(change: Any, why: str, is_by_a_number: bool) -> None:
    work = workload(Skipping)
    model = apply(work.build(), tight(work), on_larger="refuse")
    change(model)
    with pytest.raises(PlanMismatch, match=why) as error:
        work.step(model, work.batch(ROWS, None))
    assert ("a number that the model changes" in str(error.value)) == is_by_a_number


class FromThenOn(NowAndThen):
    def count(self) -> int:
        return 0 if super().count() >= self.often else 1


def test_a_way_that_is_taken_from_then_on_is_refused_after_a_while() -> None:
    work = workload(functools.partial(FromThenOn, 20, in_buffer=True))
    plan = tight(work)
    model = apply(work.build(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(19 + 3):  # the first, and one in eight
            work.step(model, work.batch(work.batch_size, None))
        with pytest.raises(PlanMismatch, match="whose graph differs from this model's"):
            work.step(model, work.batch(work.batch_size, None))


class Optional(Counting):
    """An option that a script turns on and off, or an argument, beside a counter that decides no branch."""

    option = False

    def __init__(self) -> None:
        super().__init__(lambda model: 1 / (1 + model.steps))

    def forward(self, x: torch.Tensor, *, turned: bool = False) -> torch.Tensor:
        self.steps += 1
        y = super().forward(x)
        return y.cumsum(0) if self.option or turned else y


def test_an_option_that_is_turned_on_again_and_again_is_refused_the_second_time() -> None:
    work = workload(Optional)
    model = apply(work.build(), tight(work))
    assert isinstance(model, Optional)
    with pytest.warns(UserWarning, match="another graph"):
        for i in range(3):
            model.option = i == 1
            work.step(model, work.batch(work.batch_size, None))
    model.option = True
    with pytest.raises(PlanMismatch, match=r"cumsum"):
        work.step(model, work.batch(work.batch_size, None))


def test_an_argument_that_was_not_given_when_planned_is_refused_by_name() -> None:
    work = workload(Optional)
    model, batch = apply(work.build(), tight(work)), work.batch(work.batch_size, None)
    work.step(model, batch)
    with pytest.raises(PlanMismatch, match=r"turned is given, and was not when planned"):
        model(batch[0], turned=True)


@pytest.mark.parametrize("in_buffer", [False, True])
def test_a_way_that_is_taken_every_few_forwards_is_refused_by_the_name_of_the_number(in_buffer: bool) -> None:
    name = "counted" if in_buffer else "steps"
    with pytest.raises(CaptureError, match=rf"two graphs .* each changes `{name}`, and follows it"):
        recorded(workload(functools.partial(NowAndThen, 5, in_buffer=in_buffer)))


class Annealed(Stack):
    """Lowers a temperature from the `since`-th forward on, before its layers or within one of them."""

    temperature: torch.Tensor

    def __init__(self, since: int, *, within: bool, once: bool = False) -> None:
        super().__init__()
        self.since, self.within, self.once, self.steps = since, within, once, 0
        self.register_buffer("temperature", torch.tensor(2.0))

    def anneal(self) -> None:
        self.steps += not self.once or self.steps <= self.since
        if self.steps == self.since if self.once else self.steps >= self.since:
            self.temperature.mul_(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.within:
            self.anneal()
        for layer in self.layers:
            assert isinstance(layer, Half)
            y = layer.up(layer.norm(x))
            if self.within and layer is self.layers[0]:
                self.anneal()
            x = x + layer.down(F.gelu(y / self.temperature))
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("once", [False, True])
def test_a_region_begins_behind_a_write_to_a_number_that_was_not_planned(once: bool) -> None:
    since = 1 if once else 20
    work = workload(functools.partial(Annealed, since, within=False, once=once))
    plan = tight(work)
    model = is_bitwise(work, plan, since + 3)
    assert counts_of(model).regions == (since + 3) * len(plan.regions)


@pytest.mark.parametrize("once", [False, True])
def test_a_write_to_a_number_within_a_region_makes_another_graph(once: bool) -> None:
    since = 1 if once else 32  # of 31, four may be of another graph
    work = workload(functools.partial(Annealed, since, within=True, once=once))
    graph = recorded(work)[1]
    plan = plan_by_hand(graph, all_in_one(graph))
    model = is_bitwise(work, plan, since + 3)
    assert counts_of(model).regions == (3 if once else since - 1) * len(plan.regions)


class Widening(Stack):
    """As many experts as a number says, which doubles every `often` forwards."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self.often, self.steps = often, 0
        self.inner, self.outer = (nn.Parameter(torch.randn(256, WIDTH) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        size = 8 * 2 ** (self.steps // self.often)
        return super().forward(x + F.gelu(x @ self.inner[:size].t()) @ self.outer[:size])


def test_sizes_that_a_number_enlarges_in_one_graph_are_told_of() -> None:
    work = workload(functools.partial(Widening, 20))
    graph = recorded(work)[1]
    plan = plan_by_hand(graph, pairs_of_segments(graph))
    plan = dataclasses.replace(plan, budget_bytes=plan.budget_bytes + 2 * ROWS * 8 * 4)  # for 16 experts, not for 32
    with pytest.warns(UserWarning, match=r"sizes follow a number that the model or the loop changes") as told:
        found, _ = trained(work, plan, 45)
    assert len([each for each in told if "sizes follow" in str(each.message)]) == 1
    assert all(map(torch.equal, trained(work, None, 45)[0], found))
    model = apply(work.build(), plan, on_larger="refuse")
    for _ in range(39):
        work.step(model, work.batch(work.batch_size, None))
    for _ in range(2):
        with pytest.raises(PlanMismatch, match="sizes follow a number"):
            work.step(model, work.batch(work.batch_size, None))


class Masked(Stack):
    """Experts that a mask chooses, which every forward enlarges."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(64) < 8)
        self.inner, self.outer = (nn.Parameter(torch.randn(64, WIDTH) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.mask.nonzero().squeeze(-1)
        self.mask.copy_(torch.arange(64, device=x.device) < chosen.numel() + 1)
        return super().forward(x + F.gelu(x @ self.inner[chosen].t()) @ self.outer[chosen])


def test_a_mask_that_forwards_enlarge_is_followed_where_it_decides_a_size() -> None:
    with pytest.raises(CaptureError, match="`mask`"):
        recorded(workload(Masked))
