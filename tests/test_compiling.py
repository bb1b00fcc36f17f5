"""A planned model that is compiled trains as the untouched one does, and recomputes what was planned."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat._torch.inductor import rng_state_operators
from remat.costing.device_allocator import measure_peak
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region
from remat.execution.apply import apply, counts_of
from remat.execution.compiled import partitioning
from remat.execution.compiled.compiling import INDUCTOR
from remat.execution.compiled.replay import _CompiledTracker, replay_compiled
from remat.execution.compiled.tags import RECOMPUTED
from remat.recording.fake_step import FakeStep
from remat.recording.known_values import KnownValues
from remat.workload.workload import Workload
from tests import toys
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.test_applying import batch_of, built, gradients, loss_of, same
from tests.toys import (
    CHOICES,
    CONVNET,
    CPU,
    Transformer,
    every_block,
    graph_of,
    plan_by_hand,
    recorded,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

LAYERS = 2
SHORT = functools.partial(Transformer, layers=LAYERS)
TRANSFORMER = dataclasses.replace(toys.TRANSFORMER, build=SHORT)
WORKLOADS = {
    "transformer": TRANSFORMER,
    "transformer-amp": dataclasses.replace(toys.TRANSFORMER_BF16, build=SHORT),
    "convnet": CONVNET,
}
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {name: graph_of(workload) for name, workload in WORKLOADS.items()}


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The backward graphs that were compiled."""
    found: list[fx.GraphModule] = []
    split = partitioning.min_cut

    def noting(*args: Any, **kwargs: Any) -> Any:
        forward, backward = split(*args, **kwargs)
        found.append(copy.deepcopy(backward))
        return forward, backward

    monkeypatch.setattr(partitioning, "min_cut", noting)
    return found


def recomputed(backward: fx.GraphModule, *names: str) -> int:
    return sum(
        node.meta.get("recompute") == RECOMPUTED and any(name in str(node.target) for name in names)
        for node in backward.graph.nodes
    )


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


# What is computed


@pytest.mark.fast("convnet-half-saved")
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("transformer", "first-dropout-saved"),
        ("transformer-amp", "half-saved"),
        ("convnet", "half-saved"),
        pytest.param("transformer", "pairs-of-segments", marks=pytest.mark.exhaustive),
        pytest.param("transformer", "half-saved", marks=pytest.mark.exhaustive),
        pytest.param("convnet", "every-block", marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_and_module_state_are_bitwise_those_of_the_untouched_model(
    name: str, choice: str, graphs: dict[str, Graph]
) -> None:
    workload, regions = WORKLOADS[name], CHOICES[choice](graphs[name])
    untouched, model = built(workload), apply(built(workload), plan_by_hand(graphs[name], regions))
    expected, got = compiled(untouched), compiled(model)
    for each in (expected, got):
        for seed in range(2):
            loss_of(workload, each, batch_of(workload), seed).backward()
    assert same(gradients(model), gradients(untouched))
    assert same(list(model.buffers()), list(untouched.buffers()))
    assert counts_of(model).regions == 2 * len(regions)


@pytest.mark.fast("products-saved")
# A block has the products qkv, out, up and down; the operator that makes a dropout's mask takes down's output.
@pytest.mark.parametrize(
    ("choice", "products", "gelus"),
    [
        pytest.param("nothing", 0, 0, id="nothing"),
        pytest.param("every-block", 4 * LAYERS, LAYERS, id="every-block"),
        pytest.param("saved-matmuls", 0, LAYERS, id="products-saved"),
    ],
)
def test_backward_computes_again_what_the_plan_says(
    choice: str, products: int, gelus: int, graphs: dict[str, Graph], backwards: list[fx.GraphModule]
) -> None:
    model = apply(built(TRANSFORMER), plan_by_hand(graphs["transformer"], CHOICES[choice](graphs["transformer"])))
    loss_of(TRANSFORMER, compiled(model), batch_of(TRANSFORMER)).backward()
    if choice == "nothing":
        assert backwards == []  # no region, no need of a partition of our own
        return
    assert recomputed(backwards[0], "addmm") == products
    assert recomputed(backwards[0], "gelu.default") == gelus


def test_a_normalisation_is_computed_again_though_its_statistics_leave_the_region(
    graphs: dict[str, Graph], backwards: list[fx.GraphModule]
) -> None:
    model = apply(built(CONVNET), plan_by_hand(graphs["convnet"], every_block(graphs["convnet"])))
    loss_of(CONVNET, compiled(model), batch_of(CONVNET)).backward()
    assert recomputed(backwards[0], "batch_norm") == 2 * 3  # two in each of three blocks


LARGER = dataclasses.replace(TRANSFORMER, build=lambda: Transformer(layers=6, width=32), batch_size=32)


@pytest.fixture(scope="module")
def larger() -> tuple[FakeStep, Graph]:
    return recorded(LARGER)


@pytest.mark.exhaustive
def test_the_peak_is_the_one_replayed_under_aot_eager(larger: tuple[FakeStep, Graph]) -> None:
    fake, graph = larger
    plan = plan_by_hand(graph, every_block(graph))
    model, batch = apply(built(LARGER), plan), batch_of(LARGER)
    run = compiled(model)

    def step() -> None:
        loss_of(LARGER, run, batch).backward()
        model.zero_grad()

    step()
    replayed = int(replay_compiled(fake, plan.regions).max())
    assert graph.fixed_total + measure_peak(step, CPU) == replayed + graph.unseen_bytes
    assert replayed < plan.predicted["peak_bytes"]
    # Checkpointing that is lost would show here:
    assert replayed < int(replay_compiled(fake, ()).max()) * 0.5


# The planned model under torch.compile


@pytest.fixture
def plan(graphs: dict[str, Graph]) -> Plan:
    return plan_by_hand(graphs["transformer"], every_block(graphs["transformer"]))


def test_evaluation_and_smaller_batches_work_as_ever(plan: Plan) -> None:
    untouched, model = built(TRANSFORMER), apply(built(TRANSFORMER), plan)
    run = compiled(model)
    for each in (untouched, model):
        each.eval()
    ids, _ = batch_of(TRANSFORMER)
    assert torch.equal(run(ids), untouched(ids))
    assert counts_of(model).regions == 0
    for each in (untouched, model):
        each.train()
    for samples in (TRANSFORMER.batch_size, 2):
        loss_of(TRANSFORMER, run, batch_of(TRANSFORMER, samples)).backward()
        loss_of(TRANSFORMER, untouched, batch_of(TRANSFORMER, samples)).backward()
    assert same(gradients(model), gradients(untouched))
    assert counts_of(model).regions == 2 * LAYERS


@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
def test_a_model_compiled_in_place_and_a_compiled_function_around_it_keep_the_plan(plan: Plan) -> None:
    model = apply(built(TRANSFORMER), plan)
    around = torch.compile(lambda *batch: 2 * model(*batch), backend="aot_eager")
    around(*batch_of(TRANSFORMER)).backward()
    assert counts_of(model).regions == LAYERS
    model.compile(backend="aot_eager")
    model(*batch_of(TRANSFORMER)).backward()
    assert counts_of(model).regions == 2 * LAYERS


def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    run = compiled(apply(Transformer(layers=LAYERS + 1), plan))
    with pytest.raises(PlanMismatch, match="whose graph differs from this model's"):
        run(*batch_of(TRANSFORMER))


def test_nested_regions_are_refused(graphs: dict[str, Graph]) -> None:
    nested = plan_by_hand(graphs["transformer"], CHOICES["nested"](graphs["transformer"]))
    with pytest.raises(UsageError, match=r"this plan nests regions.*`depth=1`"):
        compiled(apply(built(TRANSFORMER), nested))(*batch_of(TRANSFORMER))


def test_a_compiler_that_would_drop_regions_is_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="kept by the compilers inductor and aot_eager, not by 'eager'"):
        torch.compile(apply(built(TRANSFORMER), plan), backend="eager")(*batch_of(TRANSFORMER))


def test_a_trace_in_one_piece_is_refused(plan: Plan) -> None:
    run = torch.compile(apply(built(TRANSFORMER), plan), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'leave fullgraph=True out.*backend="remat"'):
        run(*batch_of(TRANSFORMER))


class Breaking(nn.Module):
    """One layer, three graph calls; the first two are calls of the same graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(x).square().mean()


BREAKING = Workload(
    "breaking", Breaking, lambda size, length: (torch.randn(size, 8),), lambda m, b: m(*b), batch_size=4
)


@pytest.fixture
def broken() -> tuple[Plan, int]:
    """A plan whose first two calls have different regions, and the third none."""
    graph = graph_of(BREAKING)
    assert len(graph.fingerprints) == 3
    assert graph.fingerprints[0] == graph.fingerprints[1]
    return plan_by_hand(graph, (Region(0, 3), Region(3, 6, saved=(3,)))), 2


@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
def test_each_call_of_one_graph_has_its_own_regions(broken: tuple[Plan, int], backwards: list[fx.GraphModule]) -> None:
    plan, regions = broken
    untouched, model = built(BREAKING), apply(built(BREAKING), plan)
    for each in (untouched, compiled(model)):
        loss_of(BREAKING, each, batch_of(BREAKING)).backward()
    assert same(gradients(model), gradients(untouched))
    assert counts_of(model).regions == regions
    assert sorted({recomputed(backward, "addmm") for backward in backwards}) == [0, 1]


@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
def test_a_backend_cannot_tell_calls_of_one_graph_apart(broken: tuple[Plan, int]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="different regions for different calls"):
        under_backend(broken[0], built(BREAKING))(*batch_of(BREAKING))


# The backend


def under_backend(plan: Plan | Path, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"plan": plan, "inner": "aot_eager", **options}
    return torch.compile(model or built(TRANSFORMER), backend="remat", options=options)


def test_the_backend_keeps_the_regions_of_a_plan_file(
    tmp_path: Path, plan: Plan, backwards: list[fx.GraphModule]
) -> None:
    plan.save(tmp_path / "toy.plan.json")
    untouched = built(TRANSFORMER)
    run = under_backend(tmp_path / "toy.plan.json")
    for each in (untouched, run):
        loss_of(TRANSFORMER, each, batch_of(TRANSFORMER)).backward()
    assert same(gradients(run), gradients(untouched))
    assert recomputed(backwards[0], "addmm") == 4 * LAYERS
    with torch.no_grad():
        run(*batch_of(TRANSFORMER))
    assert len(backwards) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"plan": None}, "the backend needs a plan", id="no-plan"),
        pytest.param({"inner": "eager"}, "has no inner 'eager'", id="inner"),
        pytest.param({"max_autotune": True}, "has no option 'max_autotune'", id="option"),
    ],
)
def test_the_backend_says_what_it_cannot_take(options: dict[str, Any], message: str, plan: Plan) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        under_backend(**{"plan": plan, **options})(*batch_of(TRANSFORMER))


def test_the_backend_refuses_a_plan_made_for_another_compiler(plan: Plan) -> None:
    for_inductor = dataclasses.replace(plan, execution="inductor")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"PlanMismatch.*compiled by inductor"):
        under_backend(for_inductor)(*batch_of(TRANSFORMER))


def test_the_backend_refuses_a_graph_that_the_plan_does_not_know(plan: Plan) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"PlanMismatch.*has no such graph"):
        under_backend(plan, Transformer(layers=LAYERS + 1))(*batch_of(TRANSFORMER))


# Inductor


class Wide(nn.Module):
    """Two layers whose inside is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


WIDE = Workload("wide", Wide, lambda size, length: (torch.randn(size, 8),), lambda m, b: m(*b), batch_size=256)


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of Inductor's own
def test_inductor_keeps_the_regions_and_needs_what_its_replay_says() -> None:
    fake, graph = recorded(WIDE)
    plan = plan_by_hand(graph, every_block(graph))
    replayed = int(replay_compiled(fake, plan.regions, compiler=INDUCTOR).max())  # and lends no code to what follows
    untouched, model = built(WIDE), apply(built(WIDE), plan)
    run: Any = torch.compile(model)
    batch = batch_of(WIDE)
    loss_of(WIDE, untouched, batch).backward()
    loss_of(WIDE, run, batch).backward()
    for got, expected in zip(gradients(model), gradients(untouched), strict=True):
        torch.testing.assert_close(got, expected)
    model.zero_grad()
    peak = graph.fixed_total + measure_peak(lambda: loss_of(WIDE, run, batch).backward(), CPU)
    assert peak == replayed + graph.unseen_bytes
    assert peak < 0.8 * plan.without_checkpointing["peak_bytes"]
    assert counts_of(model).regions == 4


def test_a_random_operator_with_a_generator_of_its_own_is_tracked() -> None:
    """As AOTAutograd hands dropout's generator from forward to backward on CUDA."""
    *_, run_with_own = rng_state_operators()
    with FakeTensorMode(), KnownValues().followed(), _CompiledTracker() as tracker:
        made, mask = run_with_own(torch.ops.aten.native_dropout.default, torch.ones(8), 0.5, True, rng_state=None)
    assert tracker.op_count == 2, "what it is given is made, and the operator runs"
    assert (made.shape, mask.dtype) == ((8,), torch.bool)
