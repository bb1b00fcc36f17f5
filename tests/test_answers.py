"""Code that asks whether it is being traced is captured as it runs in eager mode; what cannot be is named."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import remat.validation.validating as validation
from remat.capture.dynamo import GraphCalls, dynamo_settings
from remat.capture.eager_answers import Answers
from remat.capture.grouped_products import grouped_products
from remat.capture.settling import install_recording_hooks, recording_models
from remat.errors import CaptureError, PlanMismatch
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.execution.apply import apply, counts_of
from remat.recording.fake_step import FakeStep
from remat.workload.workload import Workload
from tests.toys import CPU, TRANSFORMER, every_block, plan_by_hand, recorded, step

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH = 8


def is_torchdynamo_compiling() -> bool:
    """As transformers has it."""
    try:
        return torch.compiler.is_compiling()
    except Exception:
        return False


def is_tracing(tensor: torch.Tensor | None = None) -> bool:
    return is_torchdynamo_compiling() or (tensor is None and torch.jit.is_tracing())


def _can_use_fast(weight: torch.Tensor) -> bool:
    return not (is_torchdynamo_compiling() and weight.dtype == torch.float32)


PREDICATES: dict[str, Callable[[], bool]] = {
    "is_compiling": lambda: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda: torch.compiler.is_exporting(),
    "a library's": is_torchdynamo_compiling,
    "a library's of a library's": is_tracing,
    "in a helper": lambda: not _can_use_fast(torch.ones(1)),
}


class Branches(nn.Module):
    """Sums in another order where `asks` says so."""

    def __init__(self, asks: Callable[[], bool]):
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.asks = asks

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = x * 3 if self.asks() else x + x + x
        return (self.head(torch.tanh(x)) * scale).square().sum()


class Reads(Branches):
    """Reads a number off a tensor in eager mode, and a constant elsewhere."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = x * 3 if torch.compiler.is_compiling() else x * (3 * scale.sum().item() / scale.numel())
        return self.head(torch.tanh(x)).square().sum()


def workload_of(build: Callable[[], nn.Module]) -> Workload:
    def batch(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, WIDTH), torch.full((samples, WIDTH), 1.5)

    return Workload("branches", build, batch, step, batch_size=4)


def losses(workload: Workload) -> tuple[list[torch.Tensor], Any]:
    """Loss and gradients without and with a plan of no regions, and the plan."""
    plan = plan_by_hand(recorded(workload)[1], ())
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = workload.build()
        if planned:
            apply(model, plan, verify_first_step=False)
        torch.manual_seed(1)
        loss = workload.step(model, workload.batch(4, None))
        loss.backward()
        found.append(
            torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
        )
    return found, plan


@pytest.mark.parametrize("asks", PREDICATES.values(), ids=PREDICATES)
def test_the_eager_branch_is_captured(asks: Callable[[], bool]) -> None:
    workload = workload_of(lambda: Branches(asks))
    graph = recorded(workload)[1]
    assert sum(node.op == "add" for node in graph.nodes) == 2  # x + x + x
    (untouched, planned), plan = losses(workload)
    assert torch.equal(untouched, planned) and plan.about["traced_branches"] == {}


def test_nobody_asks_a_driver_that_is_not_there_whether_a_cuda_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    def recording() -> bool:  # as libraries ask
        try:
            return torch.cuda.is_current_stream_capturing()
        except Exception:
            return False

    monkeypatch.setattr("torch.cuda.graphs._cuda_isCurrentStreamCapturing", no_driver)
    (untouched, planned), plan = losses(workload_of(lambda: Branches(recording)))
    assert torch.equal(untouched, planned) and len(plan.fingerprints) == 1


@pytest.mark.filterwarnings("ignore:a training forward")
def test_a_model_that_warns_is_one_graph() -> None:
    def asks() -> bool:
        warnings.warn("a training forward", stacklevel=2)
        return False

    assert len(recorded(workload_of(lambda: Branches(asks)))[1].fingerprints) == 1


def test_a_model_that_logs_is_one_graph_and_dynamo_can_write_its_settings_to_its_own_log() -> None:
    logger = logging.getLogger(__name__)

    def asks() -> bool:
        logger.warning("a training forward")
        return False

    assert len(recorded(workload_of(lambda: Branches(asks)))[1].fingerprints) == 1
    with dynamo_settings():
        found = torch._dynamo.config.get_config_copy()["ignore_logging_functions"]
    assert "warning" in json.loads(json.dumps(found)) and not isinstance(found, set)  # which torch 2.11 sorts


@pytest.mark.exhaustive
def test_a_branch_that_cannot_be_traced_is_named_by_the_plan_and_caught_by_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    workload = workload_of(lambda: Reads(bool))
    (untouched, planned), plan = losses(workload)
    asker = f"{__name__}.Reads.forward"
    assert plan.about["traced_branches"] == {asker: "is_compiling"} and len(plan.fingerprints) == 1
    assert not torch.equal(untouched, planned)
    assert f"{asker} asks is_compiling, and its eager branch cannot be traced" in str(plan)
    report = validation.validate(workload, plan, device="cpu")
    assert not report.passed and not report.gradients_equal
    assert any(asker in note for note in report.notes)


class Broken(Branches):
    """Breaks where it asks nothing."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = x * 3 if self.asks() else x + x + x
        torch._dynamo.graph_break()
        return self.head(torch.tanh(x)).square().sum()


def test_a_break_elsewhere_gives_no_branch_up() -> None:
    (untouched, planned), plan = losses(workload_of(lambda: Broken(is_torchdynamo_compiling)))
    assert torch.equal(untouched, planned)
    assert plan.about["traced_branches"] == {} and len(plan.fingerprints) == 2


def plus_or_minus(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.compiler.is_compiling() else x - 1


def test_what_others_compile_hears_what_dynamo_says_meanwhile_and_after() -> None:
    compiled = torch.compile(plus_or_minus, backend="eager")
    found: list[torch.Tensor] = []

    def run(call: int, graph_module: torch.fx.GraphModule, args: tuple[Any, ...]) -> Any:
        found.append(compiled(torch.zeros(1)))
        return graph_module(*args)

    captured = GraphCalls(plus_or_minus, run, answers=Answers())
    assert captured(torch.zeros(1)) == -1 and found == [1]
    torch._dynamo.reset()
    assert compiled(torch.zeros(1)) == 1


def test_a_predicate_that_is_handed_a_tensor_asks_whether_its_data_can_be_read() -> None:
    def forward(mask: torch.Tensor) -> torch.Tensor:
        return mask + 1 if is_tracing(mask) else mask * mask.sum().item()

    captured = GraphCalls(forward, lambda call, graph, args: graph(*args), answers=Answers())
    assert captured(torch.zeros(1)) == 1 and captured.count == 1


def test_a_torch_that_answers_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.variables.TorchInGraphFunctionVariable._get_handlers")
    with pytest.raises(CaptureError, match="keeps its answer to"):
        GraphCalls(plus_or_minus, lambda call, graph, args: graph(*args), answers=Answers())(torch.zeros(1))


def test_grouped_products_are_faked_in_every_type_that_their_kernels_take_and_only_meanwhile() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def product(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
        rows, experts = torch.ones(count, 8, dtype=dtype), torch.ones(2, 8, 16, dtype=dtype)
        return torch.nn.functional.grouped_mm(rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32))

    own = torch._meta_registrations._meta_grouped_mm_common
    with FakeTensorMode(), grouped_products():
        fakes = {dtype: product(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    for dtype, fake in fakes.items():
        real = product(dtype)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert torch._meta_registrations._meta_grouped_mm_common is own
    if TorchVersion(torch.__version__) < "2.14":  # torch 2.15 takes them itself
        with FakeTensorMode(), pytest.raises(RuntimeError, match="BF16"):
            product(torch.float32, count=7)  # the shapes of calls are cached


# models that their first forward completes


class Lazy(nn.Module):
    """Makes its table when it is first needed, after a dropout and a normalisation that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.nn.functional.dropout(self.inner(x), 0.5, self.training))
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype, device=x.device).cos().square()
        return (self.head(torch.tanh(x * self.table)) * scale).square().sum()


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "a second graph differs"])
def test_a_model_that_completes_itself_runs_its_first_forward_under_the_plan(breaks: bool) -> None:
    class Model(Lazy):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if breaks:
                x = torch.nn.functional.dropout(x, 0.5, self.training)
                torch._dynamo.graph_break()
            return super().forward(x, scale)

    workload = workload_of(Model)
    graph = recorded(workload)[1]
    assert "arange" not in {node.op for node in graph.nodes}
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = workload.build()
        if planned:
            apply(model, plan_by_hand(graph, [region_of(graph)]))
        torch.manual_seed(1)
        batch = workload.batch(4, None)
        losses = []
        for _ in range(2):
            losses.append(workload.step(model, batch))
            losses[-1].backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*losses, *gradients, *model.buffers(), torch.get_rng_state()])
    assert all(map(torch.equal, *found))
    assert counts_of(model).regions == 2


class Rescaled(nn.Module):
    """Changes itself for evaluation, and back in the first forward of training after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rescaled = False

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.rescaled == self.training:
            with torch.no_grad():
                for layer in (self.inner, self.head):
                    layer.weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training
        return (self.head(torch.tanh(self.inner(x))) * scale).square().sum()


def test_a_model_that_evaluations_change_runs_every_later_step_under_the_plan() -> None:
    workload = workload_of(Rescaled)
    graph = recorded(workload)[1]
    plan = plan_by_hand(graph, [region_of(graph)])
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = workload.build()
        if planned:
            apply(model, plan)
        torch.manual_seed(1)
        batch = workload.batch(4, None)
        losses = []
        for _ in range(3):
            losses.append(workload.step(model.train(), batch))
            losses[-1].backward()
            with torch.no_grad():
                losses.append(workload.step(model.eval(), batch))
        found.append([*losses, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))
    assert counts_of(model).regions == 3


def region_of(graph: Graph) -> Region:
    """A region of the last graph call's nodes between its linear layers."""
    linear = [v for v, node in enumerate(graph.nodes) if node.op == "linear"]
    return Region(linear[0], linear[-1])


def test_a_model_that_is_another_is_refused_after_one_more_look() -> None:
    plan = plan_by_hand(recorded(workload_of(Lazy))[1], ())
    model = apply(Branches(is_torchdynamo_compiling), plan)
    with pytest.raises(PlanMismatch, match="graph differs"):
        step(model, (torch.randn(4, WIDTH), torch.ones(4, WIDTH)))


# transformers


def mixture() -> Workload:
    """A mixture of experts whose first forward installs hooks that record the router's logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
        use_cache=False,
    )

    def batch(samples: int, length: int | None) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (samples, length or 16))
        return {"input_ids": ids, "labels": ids}

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model.train()

    return Workload("mixture", build, batch, loss_of, batch_size=2, seq_len=16)


def one_step(workload: Workload, model: nn.Module, train: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(2)
    batch = workload.batch(2, 16)
    if not train:
        with torch.no_grad():
            model.eval()
            workload.step(model, batch)
        model.train()
        return []
    model.zero_grad()
    loss = workload.step(model, batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_plan_fits_wherever_in_a_run_it_is_applied_to_a_model_that_installs_hooks() -> None:
    workload = mixture()
    graph = recorded(workload)[1]
    assert len(graph.fingerprints) == 1 and graph.about["recording_models"] == ["model"]
    assert any("grouped_mm" in kind.name for kind in graph.kinds)  # as in eager mode
    plan = plan_by_hand(graph, every_block(graph))
    expected = one_step(workload, workload.build())

    def agrees(model: nn.Module) -> bool:
        return all(map(torch.equal, one_step(workload, model), expected))

    fresh = apply(workload.build(), plan)
    assert agrees(fresh)
    one_step(workload, fresh, train=False)
    assert agrees(fresh)  # trained, evaluated, trained

    evaluated = workload.build()
    one_step(workload, evaluated, train=False)
    assert agrees(apply(evaluated, plan))

    applied = apply(workload.build(), plan)
    one_step(workload, applied, train=False)
    assert agrees(applied)

    resumed = apply(workload.build(), plan)
    resumed.load_state_dict(fresh.state_dict())
    assert agrees(resumed)


def test_hooks_that_cannot_be_installed_are_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = mixture()
    model = workload.build()
    monkeypatch.setattr("transformers.utils.output_capturing.maybe_install_capturing_hooks", None)
    with pytest.raises(CaptureError, match="cannot be asked to install them"):
        install_recording_hooks(model, ["model"])
    monkeypatch.undo()
    install_recording_hooks(model, ["model"])
    assert recording_models(model) == ["model"]


def test_the_forward_that_shows_a_model_to_be_settled_is_that_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, forward = [], FakeStep.forward  # what a step itself notes is put back

    def counted(step: FakeStep) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(step)

    monkeypatch.setattr(FakeStep, "forward", counted)
    made = FakeStep(TRANSFORMER, device=CPU)
    rise, tracker = made.warm_up()
    assert len(calls) == 2 and rise > 0
    again, other = made.warm_up()
    assert len(calls) == 3
    assert (again, other.op_count) == (rise, tracker.op_count)
