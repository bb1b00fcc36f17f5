"""Batches whose shape changes from step to step: traced twice, not once a shape, and otherwise as without a plan."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional as F

import remat
from remat.capture.dynamic_shapes import move_sizes_first
from remat.capture.dynamo import GraphCalls
from remat.capture.nodes import captured_nodes
from remat.costing.device_allocator import measure_peak
from remat.errors import CaptureError
from remat.execution.apply import apply, counts_of, planned_forward
from remat.execution.eager import fitting_graphs
from remat.formulation.solution import Limits
from remat.models.common import packed, padded
from remat.planning.request import FormChoice
from remat.recording.step_contexts import autocast_context
from remat.validation.kernel_log import KernelLog
from remat.workload.workload import Workload
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.small_models import TEST_SIZES
from tests.toys import (
    CHOICES,
    CPU,
    TRANSFORMER,
    Transformer,
    every_block,
    graph_of,
    half_saved,
    plan_by_hand,
    planned_graphs,
    tokens,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD),
]

SHORT = dataclasses.replace(TRANSFORMER, build=functools.partial(Transformer, layers=2))
LONG = dataclasses.replace(SHORT, seq_len=64)


def built(workload: Workload) -> Any:
    torch.manual_seed(0)
    return workload.build()


def gradients(workload: Workload, model: Any, samples: int, length: int | None) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(100)
    batch = workload.batch(samples, length)
    torch.manual_seed(1)
    with autocast_context(CPU, workload.autocast):
        loss = workload.step(model, batch)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def traces(model: nn.Module) -> int:
    return len(planned_graphs(model)._fitting)


# However many shapes there are


@pytest.mark.parametrize(
    "choice", ["half-saved", pytest.param("nested", marks=[pytest.mark.exhaustive, pytest.mark.nightly])]
)
def test_thirty_lengths_are_traced_twice_and_train_as_without_a_plan(choice: str) -> None:
    graph = graph_of(LONG)
    untouched, model = built(LONG), apply(built(LONG), plan_by_hand(graph, CHOICES[choice](graph)))
    for length in range(64, 34, -1):
        assert equal(gradients(LONG, model, 4, length), gradients(LONG, untouched, 4, length))
    assert traces(model) == 2
    assert counts_of(model).regions == 30 * len(CHOICES[choice](graph))


@pytest.mark.exhaustive
def test_a_smaller_batch_and_a_batch_of_one_are_two_traces_more() -> None:
    graph = graph_of(LONG)
    untouched, model = built(LONG), apply(built(LONG), plan_by_hand(graph, half_saved(graph)))
    for samples, length in [(4, 64), (4, 60), (3, 60), (2, 31), (1, 9), (1, 63), (4, 64)]:
        assert equal(gradients(LONG, model, samples, length), gradients(LONG, untouched, samples, length))
    assert traces(model) == 4


@pytest.mark.exhaustive
@pytest.mark.often("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_kernels_at_a_shape_that_was_not_traced_are_those_of_the_untouched_model(name: str) -> None:
    pytest.importorskip("transformers")
    workload = TEST_SIZES[name]().sized(batch_size=4)
    length = workload.seq_len and 32
    workload = workload.sized(seq_len=length)
    graph = graph_of(workload)
    untouched, model = built(workload), apply(built(workload), plan_by_hand(graph, half_saved(graph)))
    sizes = [(4, length), (3, length and 24), (2, length and 20)]
    for samples, shorter in sizes:
        expected, found = KernelLog(), KernelLog()
        known = traces(model)
        planned_forward(model).watch(observe=False, recompute_context=found.paused)
        with expected:
            left = gradients(workload, untouched, samples, shorter)
        with found:
            right = gradients(workload, model, samples, shorter)
        assert equal(left, right)
        assert counts_of(model).regions > 0
    assert traces(model) == known == 2  # the last shape was not traced
    assert found.found == expected.found


CHUNKED = FormChoice(worth=-1.0)  # a loss in chunks, whatever times are measured meanwhile


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [padded, packed])
def test_a_loss_in_chunks_of_padded_or_packed_text_trains_at_other_lengths(
    masked: Callable[[Workload], Workload],
) -> None:
    pytest.importorskip("transformers")
    alone = dataclasses.replace(TEST_SIZES["gpt2"](), optimizer=None)
    workload = masked(alone.sized(2, 32)).sized(2, 96)
    plan = remat.plan(workload, budget="50%step", target="cpu", limits=Limits(time_s=5), forms=CHUNKED)
    assert plan.about["chunks"]  # its logits are withheld, by a node in front of the graph's inputs
    model, untouched = apply(built(workload), plan), built(workload)
    for length in (96, 80, 75):
        left, right = (gradients(workload, each, 2, length) for each in (model, untouched))
        assert max((a - b).norm() / b.norm() for a, b in zip(left, right, strict=True)) < 0.01
    assert traces(model) == 2


@pytest.mark.exhaustive
def test_a_number_that_changes_from_step_to_step_is_not_traced_anew() -> None:
    """As the count of tokens that a loss is divided by."""
    workload = dataclasses.replace(
        SHORT, build=lambda: Divided(layers=2), step=lambda m, b: m(*b, count=int(b[0].numel()))
    )
    graph = graph_of(workload)
    untouched, model = built(workload), apply(built(workload), plan_by_hand(graph, half_saved(graph)))
    for length in (8, 7, 6, 5, 4):
        assert equal(gradients(workload, model, 4, length), gradients(workload, untouched, 4, length))
    assert traces(model) == 2


class Divided(Transformer):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids, labels) * 32 / count


# The promise is about the planned shape, whatever came before it


WIDE = dataclasses.replace(TRANSFORMER, build=lambda: Transformer(width=64), batch_size=16, seq_len=64, optimizer=None)


@pytest.mark.exhaustive
def test_the_planned_shape_has_the_predicted_peak_when_it_was_not_traced_by_itself() -> None:
    graph = graph_of(WIDE)
    plan = plan_by_hand(graph, half_saved(graph))
    model = apply(built(WIDE), plan)
    for samples, length in [(8, 32), (7, 24), (16, 64)]:
        gradients(WIDE, model, samples, length)
    known = traces(model)
    model.zero_grad()
    batch = WIDE.batch(16, 64)
    peak = graph.fixed_total + measure_peak(lambda: WIDE.step(model, batch).backward(), CPU)
    assert peak == pytest.approx(plan.predicted["peak_bytes"], rel=0.001)
    assert traces(model) == known


class Reading(Transformer):
    """A size is read off an activation, as a whole, and one that is less than any of the batch's."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layers[0](self.embed(ids))
        return super().forward(ids, labels) + 0 * (torch.ones(x.size()).sum() + torch.ones(x[:, 2:].size()).sum())


class Looping(Transformer):
    """A size is read in order to count by it."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(ids.shape[1]):
            pass
        return super().forward(ids, labels)


class Noisy(Transformer):
    """Noise on the embeddings as large as a tensor of the batch's sizes says (NEFTune): open, they break the graph."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        most = 0.1 / torch.sqrt(torch.tensor(x.size(1) * x.size(2)))
        x = x + torch.zeros_like(x).uniform_(-most, most)  # type: ignore[arg-type]
        return super().forward(ids, labels) + 0 * self.layers[0](x).sum()


class Smoothed(Transformer):
    """Labels are smoothed, and attention is scaled, by the length of the batch."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x, length = self.embed(ids), ids.shape[1]
        x = self.layers[1](F.scaled_dot_product_attention(x, x, x, scale=1 / math.sqrt(length)))
        logits = self.head(self.layers[0](x))
        assert labels is not None
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=min(0.3, 1 / length))


def two_of(kind: type[Transformer]) -> tuple[Any, Any]:
    """Untouched, and with a plan."""
    workload = dataclasses.replace(LONG, build=lambda: kind(layers=2))
    graph = graph_of(workload)
    return built(workload), apply(built(workload), plan_by_hand(graph, every_block(graph)))


@pytest.mark.exhaustive
def test_sizes_that_are_read_off_activations_stay_open() -> None:
    untouched, model = two_of(Reading)
    for length in (64, 60, 50, 64, 40):
        assert equal(gradients(LONG, model, 4, length), gradients(LONG, untouched, 4, length))
    assert traces(model) == 2


# Where sizes cannot be left open


@pytest.mark.exhaustive
def test_a_graph_that_depends_on_a_size_is_traced_for_every_shape() -> None:
    untouched, model = two_of(Looping)
    for length in (64, 60, 50, 64, 40):
        assert equal(gradients(LONG, model, 4, length), gradients(LONG, untouched, 4, length))
    assert counts_of(model).regions == 5 * len(planned_forward(model).plan.regions)
    assert traces(model) > 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(64, 60, 50, 60, 64), (48, 64, 32)], ids=["planned-first", "shorter-first"])
@pytest.mark.parametrize("kind", [Noisy, Smoothed])
def test_numbers_that_are_computed_out_of_sizes_train_as_without_a_plan(
    kind: type[Transformer], lengths: tuple[int, ...]
) -> None:
    untouched, model = two_of(kind)
    for length in lengths:
        assert equal(gradients(LONG, model, 4, length), gradients(LONG, untouched, 4, length))
    assert counts_of(model).regions == len(lengths) * len(planned_forward(model).plan.regions)


def test_a_graph_that_breaks_for_open_sizes_alone_runs_nothing_of_it() -> None:
    """So that it can be traced for each of them: of a part, random numbers would have been drawn."""
    calls: list[int] = []

    def run(call: int, graph_module: torch.fx.GraphModule, args: tuple[Any, ...]) -> Any:
        calls.append(call)
        return graph_module(*args)

    graphs = GraphCalls(Noisy(layers=1).forward, run, fits=lambda graph_module: True)
    batch, shorter = tokens(4, 64), tokens(4, 60)
    graphs(*batch)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        graphs(*shorter)
    assert calls == [0] and torch.equal(torch.get_rng_state(), before)


def test_a_size_that_a_trace_has_fixed_is_a_number() -> None:
    """Of a tensor that the graph makes, among others: it was taken for a node, and nodes behind it for others."""
    environment = ShapeEnv()
    size = environment.create_unspecified_symint_and_symbol(29, ConstantSource("size"), DimDynamic.DYNAMIC)
    assert int(size) == 29  # fixes it
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(torch.sin, (given,))
    sizes = graph.call_method("size", (made,))
    graph.output(graph.call_method("view", (made, sizes)))
    sizes.meta["example_value"] = torch.Size([8, size])  # type: ignore[list-item]
    graph_module = torch.fx.GraphModule({}, graph)
    assert move_sizes_first(graph_module)
    assert [node.name for node in captured_nodes(graph_module)] == ["sin", "view"]


@pytest.mark.exhaustive
def test_many_traces_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting_graphs, "MANY_TRACES", 3)
    model = two_of(Looping)[1]
    for length in (64, 60):
        model(*tokens(4, length))
    with pytest.warns(UserWarning, match="this forward was traced 3 times.*Pad batches to a few lengths") as caught:
        model(*tokens(4, 50))
    assert [warning.filename for warning in caught] == [__file__]
    model(*tokens(4, 40))  # a second warning would be an error here


class Scored(nn.Module):
    """Attention whose scores are as large as the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query in self.queries:
            x = x + (query(x) @ x.transpose(1, 2)).softmax(-1) @ x
        return x


SCORED = Workload(
    "scored",
    Scored,
    lambda samples, length: torch.randn(samples, length or 32, 8),
    lambda model, batch: model(batch).square().mean(),
    batch_size=16,
    seq_len=32,
)


@pytest.mark.parametrize("first", [(16, 32), (8, 40)])
def test_longer_rows_of_a_batch_that_is_no_larger_are_told_of(first: tuple[int, int]) -> None:
    graph = graph_of(SCORED)
    model = apply(built(SCORED), plan_by_hand(graph, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples, length in [first, (16, 32), (32, 16), (8, 32)]:
            SCORED.step(model, SCORED.batch(samples, length))
    with pytest.warns(UserWarning, match="sizes follow the shape of this batch"):
        SCORED.step(model, SCORED.batch(4, 128))
