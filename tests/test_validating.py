"""Validation confirms a good plan, names what is wrong with a bad one, and says what it could not do here."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat.validation.validating as validation
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import PlanningDevice
from remat.errors import PlanMismatch, UsageError, ValidationFailed
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan
from remat.execution.eager.region_tape import RegionTape
from remat.recording.fake_step import FakeStep
from remat.validation import prediction, sizes
from remat.validation.kernel_log import MOST_DIFFERENCES, KernelLog, kernel_differences
from remat.validation.report import Report
from remat.validation.sums import most_ratio
from remat.validation.training import Training, collect, release_memory
from remat.validation.validating import validate
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests import toys
from tests.toys import (
    CHOICES,
    CONVNET,
    CPU,
    TRANSFORMER_BF16,
    Transformer,
    all_in_one,
    every_block,
    graph_of,
    plan_by_hand,
    plan_for,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

TRANSFORMER = toys.SHORT
WORKLOADS = {**toys.WORKLOADS, "transformer": TRANSFORMER}
KEYS = {
    "measured",
    "predicted",
    "untouched",
    "loss_equal",
    "gradients_equal",
    "gradients_bitwise",
    "gradients_near",
    "groups_near",
    "max_gradient_error",
    "within_budget",
    "recomputed_nodes",
    "offloads",
    "kernels_equal",
    "kernel_differences",
    "device",
    "batch_size",
    "seq_len",
    "notes",
    "passed",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    be_quick(monkeypatch, cache)


def be_quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Times are not what is tested here: measure costs as fast as may be, apart from the user's cache."""
    fast = functools.partial(time_operators, cache=cache, repeats=3, seconds_per_kind=0.0)
    monkeypatch.setattr(prediction, "time_operators", fast)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module", autouse=True)
def recorded_once() -> Iterator[None]:
    """A step is the same under every plan: the validations of this file share its record."""
    steps: dict[Any, FakeStep] = {}
    graphs: dict[Any, Graph] = {}
    make, look = sizes.fake_step, sizes.record

    def step_of(workload: Workload, place: PlanningDevice, **how: Any) -> FakeStep:
        key = (workload, repr(place), repr(how))
        if key not in steps:
            steps[key] = make(workload, place, **how)
        return steps[key]

    def graph_of_step(step: FakeStep, **how: Any) -> Graph:
        key = (step, repr(how))
        if key not in graphs:
            graphs[key] = look(step, **how)
        return graphs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "fake_step", step_of)
        patch.setattr(sizes, "record", graph_of_step)
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Every block of the transformer a region, with a budget that leaves room."""
    graph = graph_of(TRANSFORMER)
    return plan_by_hand(graph, every_block(graph), budget_bytes=1 << 20)


def on_cpu(workload: Workload, plan: Plan, **options: Any) -> Report:
    return validate(workload, plan, device="cpu", repeats=1, **options)


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int, workload: Workload) -> None:
    """Let the steps have `free` bytes beside the copies of parameters that a CPU keeps for the comparison."""
    state = 2 * sum(p.numel() * p.element_size() for p in workload.build().parameters())
    monkeypatch.setattr(sizes, "_free_bytes", lambda place: free + state)


# Good plans


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("transformer", "every-block"),
        ("transformer", "nothing"),
        ("transformer-amp", "half-saved"),
        ("convnet", "nested"),
    ],
)
def test_a_good_plan_passes(name: str, choice: str, cache: Path) -> None:
    graph, workload = graph_of(WORKLOADS[name]), WORKLOADS[name]
    costs = time_operators(graph.kinds, CPU, cache=cache, repeats=3, seconds_per_kind=0.0)
    regions = tuple(CHOICES[choice](graph))
    plan = plan_by_hand(graph, regions, costs)
    report = on_cpu(workload, dataclasses.replace(plan, budget_bytes=plan.budget_bytes + 1024))
    assert report.passed, report
    assert (report.loss_equal, report.gradients_equal, report.max_gradient_error) == (True, True, 0.0)
    assert report.recomputed_nodes == {
        name: Memory(graph).recomputed_nodes(regions) for name in ("planned", "observed")
    }
    assert report.untouched["fits"]
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=0.005)
    assert report.untouched["peak_bytes"] == pytest.approx(plan.without_checkpointing["peak_bytes"], rel=0.005)
    assert report.predicted["peak_bytes"] == plan.predicted["peak_bytes"]
    assert "reserved_bytes" not in report.measured


@pytest.fixture(scope="module")
def validated(plan: Plan, cache: Path) -> tuple[Report, bool]:
    """(the report of that plan, whether the caller's random states stayed)"""
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch, cache)
        found = on_cpu(TRANSFORMER, plan)
    return found, (torch.rand(1), random.random()) == expected


@pytest.fixture
def report(validated: tuple[Report, bool]) -> Report:
    return validated[0]


def test_the_random_state_of_the_caller_stays(validated: tuple[Report, bool]) -> None:
    report, stayed = validated
    assert report.passed and stayed


def test_the_json_document_has_these_keys_and_no_others(report: Report) -> None:
    document = report.to_json()
    assert set(document) == KEYS
    assert set(document["measured"]) == set(document["predicted"]) == {"peak_bytes", "step_time_us"}
    assert set(document["untouched"]) == {"peak_bytes", "step_time_us", "fits"}
    assert (document["passed"], document["batch_size"], document["seq_len"]) == (True, 4, 8)
    assert document["device"].startswith("cpu")


@pytest.mark.exhaustive
def test_a_step_without_an_optimizer(plan: Plan) -> None:
    assert on_cpu(dataclasses.replace(TRANSFORMER, optimizer=None), plan).passed


@pytest.mark.exhaustive
def test_gradients_that_accumulate_are_counted(plan: Plan, report: Report) -> None:
    several = on_cpu(TRANSFORMER, dataclasses.replace(plan, about={**plan.about, "accumulation": 4}))
    assert several.passed
    parameters = sum(p.numel() * p.element_size() for p in Transformer().parameters())
    once = report.measured["peak_bytes"]
    assert once < several.measured["peak_bytes"] <= once + parameters


# Bad plans


@pytest.mark.exhaustive
def test_a_peak_above_the_budget_fails(plan: Plan, report: Report) -> None:
    measured = report.measured["peak_bytes"]
    short = on_cpu(TRANSFORMER, dataclasses.replace(plan, budget_bytes=measured - 1))
    assert (short.within_budget, short.passed) == (False, False)
    assert "EXCEEDED" in str(short)


@pytest.mark.exhaustive
def test_a_wrong_gradient_fails(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: RegionTape, key: int, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)  # the recomputation draws other numbers than forward did

    monkeypatch.setattr(RegionTape, "random", forgetful)
    report = on_cpu(TRANSFORMER, plan)
    assert report.loss_equal
    assert not report.gradients_equal
    assert report.max_gradient_error > 1e-3
    assert not report.passed
    assert "gradients  DIFFERENT" in str(report)


def test_nodes_that_are_not_recomputed_fail(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "recomputed_nodes", lambda self, regions: 1)
    report = on_cpu(TRANSFORMER, plan)
    assert (report.recomputed_nodes["observed"] or 0) > (report.recomputed_nodes["planned"] or 0) == 1
    assert not report.passed


def is_traced(x: torch.Tensor) -> bool:
    """A predicate that is handed a tensor: it asks whether data can be read, and hears the truth."""
    return torch.compiler.is_compiling()


class Asks(Transformer):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        loss = super().forward(ids, labels)
        return loss.square() if is_traced(loss) else loss * loss


@pytest.mark.exhaustive
def test_a_captured_program_that_runs_other_kernels_fails() -> None:
    workload = dataclasses.replace(TRANSFORMER, name="asks", build=functools.partial(Asks, layers=2))
    report = on_cpu(workload, plan_for(workload, budget_bytes=1 << 20))
    assert not report.kernels_equal
    assert any("baseline none; planned aten.pow" in line for line in report.kernel_differences)
    assert not report.passed


@torch.jit.script
def turned(x, y):  # type: ignore[no-untyped-def]
    """Two rotations, whose kernels TorchScript runs in an order of its own."""
    left, right = torch.cat((-x[..., 4:], x[..., :4]), -1), torch.cat((-y[..., 4:], y[..., :4]), -1)
    return x * 0.5 + left, y * 0.25 + right


def turned_by_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.add(*turned(x, x.square()))


def scaled_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.log(np.linspace(1.0, 2.0, 8))).float()


@pytest.mark.parametrize(
    ("function", "note"),
    [
        pytest.param(turned_by_torch, "The plan runs TorchScript's turned as traced", id="torchscript"),
        pytest.param(scaled_by_numpy, "The plan runs NumPy's linspace, log as traced", id="numpy"),
    ],
)
def test_functions_whose_kernels_tracing_makes_anew_are_compared_as_traced(
    function: Callable[[torch.Tensor], torch.Tensor], note: str
) -> None:
    class Layer(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + function(super().forward(x))

    def build() -> nn.Module:
        return nn.Sequential(*(Layer(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))

    workload = Workload("traced", build, lambda n, _: torch.randn(n, 8), lambda m, x: m(x).square().mean(), 32)
    graph = graph_of(workload)
    report = on_cpu(workload, plan_by_hand(graph, all_in_one(graph), budget_bytes=1 << 20))
    assert report.passed, report
    assert report.recomputed_nodes["observed"]
    assert any(said.startswith(note) for said in report.notes)


class Unpacks(Transformer):
    """Iterating over a tensor is one `unbind` in eager mode, and would be several `select` when captured."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        even, odd = ids.unflatten(1, (2, -1)).transpose(0, 1)
        left, right = self.embed(even * 1), self.embed(odd * 1)
        first, second = torch.stack([left, right])
        return super().forward(ids, labels) + (first * second).mean()


@pytest.mark.exhaustive
def test_a_captured_program_that_iterates_over_a_tensor_runs_the_same_kernels() -> None:
    workload = dataclasses.replace(TRANSFORMER, name="unpacks", build=functools.partial(Unpacks, layers=2))
    report = on_cpu(workload, plan_for(workload, budget_bytes=1 << 20))
    assert report.kernel_differences == () and report.passed


@pytest.mark.parametrize(
    ("untouched", "planned", "differences"),
    [
        pytest.param("abc", "abc", (), id="equal"),
        pytest.param("abc", "abd", ("kernel 2: baseline c; planned d",), id="replaced"),
        pytest.param("abc", "ab", ("kernel 2: baseline c; planned none",), id="short"),
        pytest.param("abc", "abcc", ("kernel 3: baseline none; planned c",), id="long"),
        pytest.param("abcde", "ae", ("kernel 1: baseline b, c and 1 more; planned none",), id="many"),
    ],
)
def test_differences_of_kernels(untouched: str, planned: str, differences: tuple[str, ...]) -> None:
    assert kernel_differences(list(untouched), list(planned)) == differences


def test_only_the_first_differences_are_listed() -> None:
    assert len(kernel_differences(list("axbxcxdxexfx"), list("aybyxcydyeyfy"))) == MOST_DIFFERENCES


def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatch, match=r"made for 'toy-transformer', whose graph differs from that of 'toy-conv"):
        on_cpu(CONVNET, plan)


@pytest.mark.exhaustive
def test_a_plan_for_another_dtype_policy_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatch, match="for autocast to None, this workload has autocast to bfloat16"):
        on_cpu(TRANSFORMER_BF16, plan)


# Other devices and batches


@pytest.mark.exhaustive
@pytest.mark.parametrize("changed", ["target", "batch", "shard"])
def test_a_plan_made_for_another_step_is_predicted_anew(changed: str, plan: Plan) -> None:
    workload = TRANSFORMER.sized(batch_size=2) if changed == "batch" else TRANSFORMER
    if changed == "target":
        plan = dataclasses.replace(plan, target="h100-80gb", predicted={**plan.predicted, "peak_bytes": 1})
    if changed == "shard":  # a rank keeps less than the whole step that runs here
        plan = dataclasses.replace(plan, about={**plan.about, "ranks": 4, "shard": "zero3"})
    report = on_cpu(workload, dataclasses.replace(plan, budget_bytes=1))
    assert report.passed, report
    assert report.limit == ("limit", report.predicted["peak_bytes"])
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=0.005)
    assert any("predicted anew" in note for note in report.notes)


@pytest.mark.exhaustive
def test_a_plan_for_other_versions_on_the_same_device_is_held_against_its_budget(plan: Plan) -> None:
    report = validate(TRANSFORMER, dataclasses.replace(plan, target=f"{plan.target},torch=2.11"), device="cpu")
    assert any("compared with the plan's budget" in note for note in report.notes)
    assert any("torch=2.11" in note for note in report.notes)


@pytest.mark.exhaustive
def test_a_larger_batch_than_planned_is_run_where_it_is_asked_for(plan: Plan) -> None:
    limited = dataclasses.replace(plan, about={**plan.about, "batch_elements": 1})
    assert on_cpu(TRANSFORMER.sized(batch_size=6), limited).batch_size == 6


@pytest.mark.exhaustive
def test_the_batch_is_halved_until_the_planned_step_fits(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(TRANSFORMER.sized(batch_size=8))
    half = Memory(graph).peak_without_checkpointing  # room for the untouched step at 8, and the planned one at 16
    with_free_bytes(monkeypatch, half, TRANSFORMER)
    report = on_cpu(TRANSFORMER.sized(batch_size=64), plan)
    assert report.passed, report
    assert report.batch_size in (8, 16)
    assert report.notes[0].startswith("Batch size 64 is too much for this device: the planned step needs")


@pytest.mark.exhaustive
def test_gradients_are_compared_where_the_untouched_step_fits(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(TRANSFORMER.sized(batch_size=16))
    planned = Memory(graph).curve(every_block(graph)).peak_bytes
    with_free_bytes(monkeypatch, planned, TRANSFORMER)
    report = on_cpu(TRANSFORMER.sized(batch_size=16), plan)
    assert report.passed, report
    assert report.batch_size == 16
    assert not report.untouched["fits"]
    assert report.untouched["peak_bytes"] > planned
    assert "does not fit: predicted" in str(report)
    assert "does not fit at batch size 16: gradients and kernels are compared at " in report.notes[-1]


@pytest.mark.exhaustive
def test_an_untouched_step_that_runs_out_of_memory_is_compared_at_half(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = validation._first_step

    def small_device(training: Any, kernels: Any) -> Any:
        if "forward" not in training.model.__dict__ and len(training.batch[0]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return genuine(training, kernels)

    monkeypatch.setattr(validation, "_first_step", small_device)
    report = on_cpu(TRANSFORMER, plan)
    assert report.passed, report
    assert (report.batch_size, report.untouched["fits"]) == (4, False)
    assert any("compared at 2" in note for note in report.notes)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["device", "host"],
)
def test_a_model_that_runs_out_of_memory_while_it_is_built_says_so(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_room(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(validation, "Training", no_room)
    with pytest.raises(UsageError, match=r"does not fit on cpu.* before its first step, in which .* KiB are there"):
        on_cpu(TRANSFORMER, plan)


def test_what_only_allocates_is_no_kernel() -> None:
    """torch 2.11's checkpoint makes two empty tensors for each region."""
    x = torch.ones(2, 2)
    with KernelLog() as log:
        torch.empty(0)
        torch.empty((0,), requires_grad=True)
        torch.empty_like(x)
        x.new_empty(3)
        torch.empty_strided((2, 2), (1, 2))
        torch.ones(2)
        x * 2
    assert [kernel.partition("(")[0] for kernel in log.found] == ["aten.mul"]


def test_a_mask_that_the_model_makes_itself_is_no_kernel_and_random_numbers_are() -> None:
    with KernelLog() as log:
        mask = torch.ones(2, 2).to(torch.bool)  # which eager mode looks at, and drops
        x = torch.rand(2, 2)
        torch.nn.functional.dropout(x, 0.5)
        x.to(torch.bfloat16)[mask].sum()
    found = [kernel.partition("(")[0] for kernel in log.found]
    assert found[0] == "aten.rand.default" and "aten.ones.default" not in found
    assert any("bernoulli" in kernel for kernel in found) and found[-3] == "aten._to_copy.default"


@pytest.mark.parametrize(
    "scaled",
    [
        pytest.param(lambda x, drawn: x * drawn, id="times"),
        pytest.param(lambda x, drawn: drawn * x, id="times-the-tensor"),
        pytest.param(lambda x, drawn: drawn - x, id="minus-the-tensor"),
        pytest.param(lambda x, drawn: x.clamp(max=drawn), id="clamp"),
        pytest.param(lambda x, drawn: x / drawn + drawn, id="divided-and-added"),
    ],
)
def test_numbers_that_python_draws_are_the_kernels_that_numbers_are(
    scaled: Callable[[torch.Tensor, Any], torch.Tensor],
) -> None:
    def kernels(drawn: Any) -> list[str]:
        x = torch.linspace(-1, 1, 4).requires_grad_()
        with KernelLog() as log:
            scaled(x, drawn).backward(torch.ones(4))
        return log.found

    drawn = 0.7379646270918914
    assert kernels(drawn) == kernels(torch.tensor(drawn, dtype=torch.float64)) != kernels(0.5)


@pytest.mark.exhaustive
def test_a_model_that_scales_by_python_s_random_numbers_passes() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + random.uniform(0.5, 1.5) * layer(x)
            return x

    noisy = Workload("noisy", Noisy, lambda n, _: torch.randn(n, 8), lambda m, x: m(x).square().mean(), batch_size=32)
    graph = graph_of(noisy)
    report = on_cpu(noisy, plan_by_hand(graph, every_block(graph), budget_bytes=1 << 20))
    assert report.passed, report
    assert report.recomputed_nodes["observed"]


@pytest.mark.exhaustive
def test_a_planned_step_that_runs_out_of_memory_fails(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: Any, training: Any) -> Any:
        raise torch.OutOfMemoryError("no room for 1 GiB")

    monkeypatch.setattr(validation._Validation, "_planned", no_room)
    with pytest.raises(ValidationFailed, match=r"runs out of memory on cpu.* at batch size 4: no room"):
        on_cpu(TRANSFORMER, plan)


@pytest.mark.exhaustive
def test_a_step_that_takes_too_long_is_run_at_a_smaller_batch(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BEARABLE_S", 1e-9)
    report = on_cpu(TRANSFORMER, plan)
    assert report.batch_size == 1
    assert "a step is estimated to take" in report.notes[0]


def test_a_device_too_small_for_one_sample_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_bytes(monkeypatch, 1000, TRANSFORMER)
    with pytest.raises(UsageError, match=r"planned step needs .* and 1000 B may be used at batch size 1"):
        on_cpu(TRANSFORMER, plan)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there_is_refused(device: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f"device='{device}'"):
        validate(TRANSFORMER, plan, device=device)


# Kernels that do not repeat themselves (Rule 5)


def noisy(amount: float) -> nn.Module:
    """Gradients that differ from run to run, as those of kernels with atomic additions do."""
    model = Transformer(layers=2)
    urandom = random.SystemRandom()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * torch.tensor(1 + amount * urandom.choice([-1, 1])))
    return model


@pytest.mark.exhaustive
def test_gradients_as_far_apart_as_two_untouched_steps_count_as_equal() -> None:
    workload = dataclasses.replace(TRANSFORMER, name="noisy", build=functools.partial(noisy, 1e-5))
    quiet = dataclasses.replace(workload, build=functools.partial(Transformer, layers=2))
    report = on_cpu(workload, plan_for(quiet, budget_bytes=1 << 20))
    assert report.max_gradient_error > 0
    assert report.gradients_equal
    assert report.passed
    assert any("not deterministic" in note for note in report.notes)


# Printing


def test_a_report_prints_aligned() -> None:
    report = Report(
        workload="toy",
        device="cpu",
        batch_size=4,
        seq_len=8,
        measured={"peak_bytes": 3 << 30, "step_time_us": 250_000},
        predicted={"peak_bytes": 3 << 30, "step_time_us": 20_000_000},
        untouched={"peak_bytes": 5 << 30, "step_time_us": 90_000, "fits": True},
        limit=("budget", 4 << 30),
        loss_equal=True,
        gradients_equal=True,
        max_gradient_error=0.0,
        recomputed_nodes={"planned": 7, "observed": 7},
        kernel_differences=(),
        notes=("A sentence.",),
    )
    assert str(report).splitlines() == [
        "toy on cpu, batch size 4, sequence length 8",
        "                    peak        step",
        "  measured      3.00 GiB    250.0 ms",
        "  predicted     3.00 GiB      20.0 s",
        "  baseline      5.00 GiB    90.00 ms",
        "  budget        4.00 GiB        kept",
        "  loss       equal",
        "  gradients  equal, largest error 0",
        "  nodes      7 recomputed, 7 planned",
        "  kernels    equal",
        "  note: A sentence.",
        "passed",
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("name", WORKLOADS)
def test_on_a_gpu(name: str) -> None:
    plan = plan_by_hand(graph_of(WORKLOADS[name]), every_block(graph_of(WORKLOADS[name])))
    report = validate(WORKLOADS[name], plan, device="cuda")
    assert report.loss_equal and report.gradients_equal and report.kernels_equal, report
    assert report.recomputed_nodes["planned"] == report.recomputed_nodes["observed"]
    assert report.measured["reserved_bytes"] >= report.measured["peak_bytes"]


def requested_bytes(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


@pytest.mark.cuda
def test_on_a_gpu_a_steady_step_is_that_of_a_loop() -> None:
    """Libraries keep their workspaces from one step to the next, and only they make up the difference to the first."""
    load, device = TRANSFORMER_BF16, torch.device("cuda", 0)
    release_memory(device)
    others = requested_bytes("current")
    training = Training(load, device, 0, TrainingLoop())
    training.begin_again()
    for _ in range(3):
        collect(device)
        torch.cuda.reset_peak_memory_stats()
        training.step()
    looped = requested_bytes("peak") - others
    assert training.measure_steady_step(1, 1)[1] == looped
    assert training.measure_steady_step(1, 1)[1] == looped, "also after libraries let go of theirs"
    training.step()
    assert training.peak_of_update(1) == looped


@pytest.mark.cuda
def test_on_a_gpu_a_plan_for_another_device_is_predicted_with_its_libraries() -> None:
    plan = plan_by_hand(graph_of(TRANSFORMER_BF16), every_block(graph_of(TRANSFORMER_BF16)))
    report = validate(TRANSFORMER_BF16, dataclasses.replace(plan, target="cpu"), device="cuda")
    assert "predicted anew" in " ".join(report.notes)
    assert report.measured["peak_bytes"] <= report.predicted["peak_bytes"]
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-3)


@pytest.mark.parametrize("numbers", [1, 2, 4, 16, 96])
def test_chance_alone_seldom_breaks_the_promise_of_sums_however_few_their_numbers(numbers: int) -> None:
    roundings = torch.randn(2, 20_000, numbers, generator=torch.Generator().manual_seed(0)).norm(dim=2)
    assert (roundings[0] > most_ratio(numbers) * roundings[1]).double().mean() < 0.01


def test_sums_of_many_numbers_are_given_little_for_chance() -> None:
    assert most_ratio(100_000) < 1.12
