"""MLPs in slices: results and gradients equal the eager baseline's, except sums of weights inside.

Predictions equal measurements, and a plan uses chunks where they pay.

The oracle is the untouched model. Sums are held to float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

import remat
from remat.capture.dynamo import GraphCalls
from remat.chunking.chunk import chunk, chunked_rows
from remat.chunking.chunked_rows import FEWEST_ROWS, ChunkedRows, row_slices
from remat.chunking.rows import find_row_runs
from remat.cli.screen import plan_text
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import CaptureError, Infeasible, RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Form, form_of
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.eager.replay import replay
from remat.execution.executions import load
from remat.fusion import fused_group
from remat.planning.forms import StepForms
from remat.planning.planner import plan
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.tracker import Tracker
from remat.validation.sums import NEAR
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.cached import cached
from tests.examples import examples
from tests.fuzzing import few_rows, verdicts
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.interpreted import interpreted
from tests.toys import CPU, every_block, plan_by_hand

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread"), pytest.mark.every_slice]

WIDTH, WIDE, LENGTH = 16, 96, 80


class Half(nn.Module):
    """The half of a block that acts by row; what subclasses make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(Half):
    """As in Llama: two products that widen, an RMS norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = self.norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Split(Half):
    """As in Phi: one product makes both."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class Flattened(Half):
    """As in GPT-2: rows are flattened for each product, by `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList([0.1 * torch.randn(WIDTH, WIDE), 0.1 * torch.randn(WIDE, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.kernels
        wide = torch.addmm(self.up.bias, self.norm(x).view(-1, WIDTH), up).view(*x.shape[:-1], WIDE)
        return x + torch.addmm(self.down.bias, torch.tanh(wide).view(-1, WIDE), down).view(x.shape)


class Adapted(Half):
    """A frozen product with a low-rank one beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed) + 0.5 * self.high(self.low(normed))))


ROWS = (Half, Gated, Split, Flattened, Adapted)


class Dropped(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))


class Placed(Half):
    """A number for every position lies in between."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)) + self.place))


class Mixed(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).softmax(dim=1))


class Averaged(Half):
    """Batch normalisation of what is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.statistics(self.up(self.norm(x)).flatten(0, 1)).view(*x.shape[:-1], WIDE))


class Written(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x)), inplace=True))


class Shown(Half):
    """Somebody else reads what is wide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.up(self.norm(x)))
        return x + self.down(wide) + wide.square().mean()


class Masked(Half):
    """It takes a second value with rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.roll(1, dims=1)[..., :1]
        return x + self.down(F.gelu(self.up(self.norm(x)) * mask))


class Reciprocal(Half):
    """A number is divided by what is made: the derivative asks for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1.0 / (9.0 + self.down(F.gelu(self.up(self.norm(x)))))


class TwoShifts(Half):
    """The gradients of two values that are added are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([torch.randn(WIDE), torch.randn(WIDE)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.shifts
        return x + self.down(F.gelu(self.up(self.norm(x)) + (one + other)))


class SharedBias(Half):
    """A product's bias is added once more: autocast casts it for the product alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)) + self.up.bias))


class ByHand(Half):
    """The input is read twice inside, and by the residual, behind a dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x + F.dropout(self.down(F.silu(self.up(normed))), 0.1, self.training)


class Transposed(Half):
    """Rows come, and are given on, in another order than they lie in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) + self.down(F.gelu(self.up(self.norm(x.transpose(0, 1)))))).transpose(0, 1)


class Keyworded(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.flatten(input=self.norm(x), start_dim=0, end_dim=1)
        return x + self.down(F.gelu(input=self.up(flat))).reshape(x.shape)


class Flat(Half):
    """Fewer dimensions come out than went in, and the next node sees that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.down(F.gelu(self.up(self.norm(x).flatten(0, 1))))
        return x + (flat.cumsum(0) * 0.01).view(x.shape)


class Windows(Half):
    """In between there are more dimensions, of the same rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self.up(self.norm(x)).view(x.shape[0], 2, LENGTH // 2, WIDE)
        return x + self.down(F.gelu(windows)).view(x.shape)


class Overwritten(Half):
    """The residual is written over, and no gradient asks for it: the weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x += self.down(F.silu(self.up(x)))
        return x


class OneRow(Half):
    """A product of a vector, added to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.film = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.down(F.gelu(self.up(self.norm(x)))) + self.film(self.vector))


class SmallBatch(Half):
    """A table with a row for every position, cast first: of one sample it has as many rows as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, LENGTH, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)) + self.place.to(x.dtype)))


class ByNames(Half):
    """`addmm` with every argument by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        wide = torch.addmm(input=self.up.bias, mat1=rows, mat2=self.up.weight.t())
        return x + self.down(F.gelu(wide)).view(x.shape)


class FlatBias(Half):
    """Biases of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList([torch.randn(1, WIDE), torch.randn(1, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.biases
        wide = F.linear(self.norm(x), self.up.weight, first)
        return x + F.linear(F.gelu(wide), self.down.weight, second)


class Aliased(Half):
    """The value read twice is the residual under another name: a cast to its own dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x.float()
        normed = same * torch.rsqrt(same.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x + self.down(F.silu(self.up(normed))).cumsum(1)


class Squared(Half):
    """An RMS norm of torch's own, which may read its input twice; the residual is added elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,), self.norm.weight)))).cumsum(1)


class Viewed(Half):
    """A view that is read twice, of a value that is read besides: gradients are added up at the view first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        flat = normed.view(-1, WIDTH)
        return x + self.down((self.up(flat) * torch.sigmoid(self.gate(flat))).view(*x.shape[:-1], WIDE)) * normed


class Parted(Half):
    """A part of the columns goes straight into a product."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDE // 2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x))[..., : WIDE // 2])


class InPlaceByPosition(Half):
    """The run's input is overwritten afterwards, and nothing else keeps it: its weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        made = self.down(F.silu(self.up(x)))
        return F.leaky_relu(x, 0.1, True) + made


class Averaging(Half):
    """A running mean is updated by every forward, and what takes it away keeps nothing."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean((0, 1)))
        return x + self.down(F.gelu(self.up(x - self.mean)))


class Across(Half):
    """The gradient of what it gives comes in another order than rows lie in, and goes on into a `celu`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.celu(x)
        x = x + self.down(F.gelu(self.up(x)))
        return F.conv1d(x.transpose(1, 2), torch.full((WIDTH, WIDTH, 1), 0.1)).transpose(1, 2)


ODD = (
    *(Reciprocal, TwoShifts, SharedBias, ByHand, Transposed, Keyworded, Flat, Windows, Overwritten, OneRow),
    *(SmallBatch, Dropped, Placed, Shown, Masked, ByNames, FlatBias, Aliased, Squared, Viewed, Parted),
    *(InPlaceByPosition, Averaging, Across),
)
NOT_ROWS = (Dropped, Placed, Mixed, Averaged, Written, Shown, Masked)


class Model(nn.Module):
    """Layers that mix rows, each followed by a half that does not, and a loss."""

    def __init__(self, half: type[Half], layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mixers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.halves = nn.ModuleList([half() for _ in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mixer, half in zip(self.mixers, self.halves, strict=True):
            x = x + mixer(x).cumsum(1).tanh()
            x = half(x)
        return x.float().square().mean()


def batch(samples: int, length: int | None) -> torch.Tensor:
    return torch.randint(50, (samples, length or LENGTH))


def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids)
    return loss


def workload(half: type[Half], samples: int = 16) -> Workload:
    return Workload(half.__name__, functools.partial(Model, half), batch, step, batch_size=samples, seq_len=LENGTH)


def captured(half: type[Half], layers: int = 3) -> fx.GraphModule:
    made = dataclasses.replace(workload(half), build=functools.partial(Model, half, layers))
    fake = FakeStep(made, device=CPU)
    fake.warm_up()
    ((_, graph_module),) = fake.graphs.distinct
    return graph_module


# Which runs are found


@pytest.mark.parametrize("half", ROWS, ids=lambda half: half.__name__)
def test_what_acts_by_row_is_found_from_the_norm_to_the_residual(half: type[Half]) -> None:
    runs = find_row_runs(captured(half))
    assert len(runs) == 3
    first, *_ = runs
    assert first.text.endswith(("linear,add)", "addmm,add)"))
    assert (first.rows, first.given.meta["example_value"].shape[-1]) == (16 * LENGTH, WIDTH)
    assert len(first.unmade) == 1  # the product before the residual's addition


@pytest.mark.parametrize("half", NOT_ROWS, ids=lambda half: half.__name__)
def test_what_mixes_rows_or_has_another_reader_is_left_whole(half: type[Half]) -> None:
    graph_module = captured(half)
    assert find_row_runs(graph_module) == []
    assert chunked_rows(chunk(graph_module, {}, 2)) == []


def test_a_dropout_that_is_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Half, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.0, self.training))

    monkeypatch.setattr(Dropped, "forward", forward)
    assert len(find_row_runs(captured(Dropped))) == 3


# What slices compute


@dataclasses.dataclass
class Stepped:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def stepped(model: nn.Module, forward: Callable[..., Any], autocast: bool, samples: int = 16) -> Stepped:
    model.zero_grad()
    torch.manual_seed(3)
    ids = batch(samples, LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = forward(ids)
    loss.backward()
    return Stepped(loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def in_slices(model: nn.Module, slices: int) -> GraphCalls:
    """The forward of `model`, its halves in slices."""

    def run(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        return chunk(graph_module, {}, slices)(*args)

    return GraphCalls(model.forward, run)


class Swish(Half):
    """A learned number comes first, and then a weight with one number a column."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.gate = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(self.norm(x))
        return x + self.down(torch.sigmoid(self.gate) * wide * torch.sigmoid(self.slope * wide))


class Parallel(Half):
    """A norm for two: the MLP begins with a product."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.mix(normed).cumsum(1).tanh() + self.down(F.gelu(self.up(normed)))


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_groups_inside_of_chunked_mlps_run_every_length_by_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeStep(workload(Swish), device=CPU)
    with fake.in_form(Form(rows=3, fused=True)):
        made = plan_by_hand(record(fake), ())
    closed: list[Any] = []
    lower = fused_group.lower

    def noted(*given: Any) -> Any:
        closed.append(given)
        return lower(*given)

    monkeypatch.setattr(fused_group, "lower", noted)
    torch.manual_seed(0)
    untouched = Model(Swish).train()
    with interpreted():
        model = remat.apply(copy.deepcopy(untouched), made, on_larger="warn")
        for samples in (16, 9, 12, 7, 15):
            one, two = (stepped(untouched, untouched, False, samples), stepped(model, model, False, samples))
            for name, gradient in one.gradients.items():
                assert torch.allclose(gradient, two.gradients[name], rtol=1e-4, atol=1e-6), name
            if samples in (16, 9):  # the first two are captured, the second with open sizes
                closed.clear()
    assert closed == []


@pytest.mark.exhaustive
def test_groups_inside_keep_no_copy_of_the_rows_under_autocast() -> None:
    """As they would: autocast keeps the cast of every leaf."""
    fake = fake_step(
        dataclasses.replace(workload(Parallel), autocast=torch.bfloat16), find_planning_device("h100-80gb")
    )
    peaks = []
    for fused in (False, True):
        with fake.in_form(Form(rows=4, fused=fused)):
            graph = record(fake)
        alive = Memory(graph).curve(tuple(every_block(graph))).alive_bytes
        peaks.append(alive[: graph.forward_end].max())
    assert peaks[1] <= peaks[0]


def one_by_one(tracker: Tracker, what: Any) -> contextlib.AbstractContextManager[bool]:
    return contextlib.nullcontext(False)


@pytest.mark.fast("Gated-h100-80gb", "Adapted-cpu")
@pytest.mark.parametrize("target", ["cpu", "h100-80gb"])
@pytest.mark.parametrize("half", ROWS, ids=lambda half: half.__name__)
def test_a_slice_that_is_repeated_is_noted_as_if_it_ran(
    half: type[Half], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are five slices in each of three layers; the last slice is shorter."""
    made = dataclasses.replace(workload(half), autocast=None if target == "cpu" else torch.bfloat16)
    fake = fake_step(made, find_planning_device(target))
    record(fake)
    with fake.in_form(Form(rows=5)):
        found, curve = noted(fake)
        monkeypatch.setattr(Tracker, "known", one_by_one)
        alone, alone_curve = noted(fake)
    assert found == alone
    assert curve == alone_curve


class Alternating(Model):
    """Halves alike, in 16 bits; every second one runs under autocast, in which CUDA widens `softplus`."""

    def __init__(self) -> None:
        super().__init__(Soft)
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, (mixer, half) in enumerate(zip(self.mixers, self.halves, strict=True)):
            x = x + mixer(x).cumsum(1).tanh()
            with torch.autocast("cuda", torch.bfloat16, enabled=number % 2 == 1):
                x = half(x)
        return x.float().square().mean()


class Soft(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.softplus(self.up(self.norm(x))))


@pytest.mark.cuda
def test_a_slice_is_not_repeated_under_another_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_step(dataclasses.replace(workload(Soft), build=Alternating), find_planning_device("cuda"))
    record(fake)
    with fake.in_form(Form(rows=5)):
        found = noted(fake)
        monkeypatch.setattr(Tracker, "known", one_by_one)
        assert noted(fake) == found


def noted(fake: FakeStep) -> tuple[Any, list[int]]:
    """The record of a step, column by column, and the bytes alive under a plan of every block."""
    graph = record(fake)
    columns = [each.tolist() for part in (graph.storages, graph.saved_tensors) for each in vars(part).values()]
    regions = to_refs(graph, tuple(every_block(graph)))
    rows = (graph.nodes, graph.op_kind.tolist(), graph.op_node.tolist(), [kind.key for kind in graph.kinds])
    return (rows, columns, graph.parameters, graph.parameter_gradients), replay(fake, regions).tolist()


POLICIES = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}


@pytest.mark.fast("Gated-autocast", "Split-float32", "Flattened-bfloat16", "Adapted-autocast")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("half", ROWS, ids=lambda half: half.__name__)
def test_loss_and_gradients_are_the_untouched_ones_but_for_sums(half: type[Half], policy: str) -> None:
    dtype, autocast = POLICIES[policy]
    torch.manual_seed(0)
    model = Model(half).to(dtype).train()
    plain = stepped(model, model, autocast)
    double = copy.deepcopy(model).double()
    exact = stepped(double, double, False)
    found = stepped(model, in_slices(model, 4), autocast)
    assert torch.equal(plain.loss, found.loss)
    assert plain.gradients.keys() == found.gradients.keys()
    for name, gradient in plain.gradients.items():
        if not name.startswith("halves"):
            assert torch.equal(gradient, found.gradients[name]), name
        else:
            assert found.gradients[name].dtype == gradient.dtype
            truth = exact.gradients[name]
            apart, own = ((each.double() - truth).norm() for each in (found.gradients[name], gradient))
            assert apart <= 1.5 * own + 1e-6 * truth.norm(), name  # `sums.py` holds sums alone to float64


@pytest.mark.fast("TwoShifts-float32-16", "SharedBias-autocast-16", "Flat-float32-16", "SmallBatch-float32-1")
@pytest.mark.parametrize("samples", [16, 1])
@pytest.mark.parametrize("policy", ["float32", "autocast"])
@pytest.mark.parametrize("half", ODD, ids=lambda half: half.__name__)
def test_odd_halves_are_left_whole_or_right(half: type[Half], policy: str, samples: int) -> None:
    _, autocast = POLICIES[policy]
    torch.manual_seed(0)
    model = Model(half).train()
    twin = copy.deepcopy(model)
    plain = stepped(twin, twin, autocast, samples)
    with few_rows():
        found = stepped(model, in_slices(model, 3), autocast, samples)
    assert torch.equal(plain.loss, found.loss)
    assert plain.gradients.keys() == found.gradients.keys()
    for name, gradient in plain.gradients.items():
        apart = (found.gradients[name].double() - gradient.double()).norm()
        inside = name.startswith("halves")
        assert apart <= inside * (0.05 if autocast else 1e-5) * gradient.double().norm(), name


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_what_is_cut_of_the_odd_halves() -> None:
    """Where some are cut, it is these: a rule that left all whole would pass the test above."""
    found = {half.__name__: len(find_row_runs(captured(half, 1))) for half in ODD}
    cut = {name for name, runs in found.items() if runs}
    assert cut >= {"Reciprocal", "TwoShifts", "ByHand", "Transposed", "Flat", "Windows", "OneRow", "Viewed", "Across"}
    assert not cut & {"SharedBias", "Overwritten", "Keyworded", "Dropped", "Placed", "Shown", "Masked"}
    assert not cut & {"ByNames", "FlatBias", "Parted", "InPlaceByPosition", "Averaging"}


@pytest.mark.parametrize("samples", [129, 131, 257])
def test_a_few_rows_that_are_left_over_go_with_those_before(samples: int) -> None:
    sizes = [cut.stop - cut.start for cut in row_slices(samples, 2)]
    assert sum(sizes) == samples and min(sizes) >= min(samples, FEWEST_ROWS)


def test_what_the_graph_gives_out_too_is_left_whole() -> None:
    """Its reader is not seen: another graph, or a caller who writes to it."""
    assert len(find_row_runs(captured(Half))) == 3
    fake = FakeStep(dataclasses.replace(workload(Half), build=Telling, step=told), device=CPU)
    fake.warm_up()
    ((_, graph_module),) = fake.graphs.distinct
    assert len(find_row_runs(graph_module)) == 2


class Telling(Model):
    """It gives what its last half takes out as well."""

    def __init__(self) -> None:
        super().__init__(Half)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for mixer, half in zip(self.mixers, self.halves, strict=True):
            taken = x = x + mixer(x).cumsum(1).tanh()
            x = half(x)
        return x.float().square().mean(), taken


def told(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids)[0]
    return loss


def test_backward_under_autocast_is_that_of_the_untouched_step() -> None:
    gradients = []
    for sliced in (False, True):
        torch.manual_seed(0)
        model = Model(Half).train()
        forward = in_slices(model, 4) if sliced else model
        loss = forward(batch(16, LENGTH))
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        named = model.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None and not name.startswith("halves")})
    one, other = gradients
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def calls(rows: int = 256, width: int = WIDTH) -> tuple[ChunkedRows, torch.Tensor, list[torch.Tensor]]:
    """A run by itself, rows for it, and what is beside them."""
    (function, *_) = chunked_rows(chunk(captured(Half), {}, 2))
    torch.manual_seed(0)
    half = Half()
    beside = [half.norm.weight, half.norm.bias, half.up.weight, half.up.bias, half.down.weight, half.down.bias]
    return function, torch.randn(rows, width, requires_grad=True), list(beside)


def test_backward_twice_needs_the_graph_to_be_retained() -> None:
    run, rows, beside = calls()
    loss = run(rows, *beside).sum()
    loss.backward(retain_graph=True)
    first = rows.grad.clone() if rows.grad is not None else None
    loss.backward()
    assert first is not None and rows.grad is not None and torch.equal(rows.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused() -> None:
    run, rows, beside = calls()
    (first,) = torch.autograd.grad(run(rows, *beside).sum(), rows, retain_graph=True)
    assert first.shape == rows.shape
    with pytest.raises(RematError, match="first derivatives only"):
        torch.autograd.grad(run(rows, *beside).sum(), rows, create_graph=True)


def test_rows_without_gradient_and_frozen_weights_get_none() -> None:
    run, rows, beside = calls()
    run(rows.detach(), *beside).sum().backward()
    assert all(each.grad is not None for each in beside)
    for each in beside:
        each.grad = None
        each.requires_grad_(False)
    run(rows, *beside).sum().backward()
    assert rows.grad is not None and all(each.grad is None for each in beside)
    assert run(rows.detach(), *beside).grad_fn is None


def test_the_result_may_be_written_to() -> None:
    run, rows, beside = calls()
    plain = run(rows, *beside) * 3.0
    (expected,) = torch.autograd.grad(plain.sum(), rows)
    written = run(rows, *beside)
    written *= 3.0
    (found,) = torch.autograd.grad(written.sum(), rows)
    assert torch.equal(plain, written) and torch.equal(expected, found)


def test_rows_that_are_written_to_before_backward_are_an_error() -> None:
    run, rows, beside = calls()
    given = rows * 1.0
    made = run(given, *beside).sum()
    given.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()


# What they need


@pytest.mark.often(
    *("Adapted--cpu-plain", "Adapted-amp-cpu-fused", "Gated-amp-h100-80gb-fused", "Split--h100-80gb-plain"),
    *("Half--cpu-plain", "Half--h100-80gb-fused", "Flattened-amp-h100-80gb-plain"),
)
@pytest.mark.fast("Adapted--cpu-plain")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("target", ["cpu", "h100-80gb"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "amp"])
@pytest.mark.parametrize("half", ROWS, ids=lambda half: half.__name__)
def test_the_evaluator_s_bytes_are_the_replay_s(
    half: type[Half], autocast: torch.dtype | None, target: str, fused: bool
) -> None:
    place = find_planning_device(target)
    fake = fake_step(dataclasses.replace(workload(half), autocast=autocast), place)
    fake.warm_up()
    with fake.in_form(Form(rows=3, fused=fused)):
        from tests.test_chunking import recorded_here

        profile = profile_step(fake, place) if target != "cpu" else recorded_here(fake)
        graph, costs = profile.graph, profile.costs
        runs = [i for i, node in enumerate(graph.nodes) if node.op.startswith("chunked_rows(")]
        assert len(runs) == 3
        ending = tuple(Region(i - 3, i + 1) for i in runs)  # each ends in a run: early stop is in front of it
        around = (Region(runs[0] - 3, runs[2] + 1),)
        nested = (Region(runs[0] - 3, runs[2] + 1, inner=ending),)
        for each in ((), ending, around, nested):
            alive = replay(
                fake,
                to_refs(graph, each),
                alignment_bytes=place.target.alignment_bytes,
                workspace_of=costs.workspace_of(graph),
            )
            evaluated = Memory(graph, costs.workspace_per_op(graph)).curve(each)
            assert np.array_equal(alive + graph.unseen_bytes, evaluated.alive_bytes)


@pytest.mark.exhaustive
@given(number=st.integers(0, 10**9))
@settings(
    max_examples=examples(3, 12),
    phases=(Phase.explicit, Phase.generate),  # a smaller number is no smaller model
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_random_model_with_mlps_in_slices_keeps_its_promises_under_random_plans(number: int) -> None:
    with few_rows():
        assert [row for row in verdicts(number, 3, Form(rows=3)) if row["failures"]] == []


@pytest.mark.exhaustive
def test_a_region_that_ends_in_a_run_stops_in_front_of_it() -> None:
    place = find_planning_device("h100-80gb")
    fake = fake_step(workload(Gated), place)
    fake.warm_up()
    with fake.in_form(Form(rows=2)):
        graph = profile_step(fake, place).graph
    run = next(i for i, node in enumerate(graph.nodes) if node.op.startswith("chunked_rows("))
    curve = Memory(graph).curve((Region(run - 3, run + 1),))
    again = set(graph.op_node[curve.op[curve.region >= 0]].tolist())
    assert again and run not in again


# Plans


@cached
def tight() -> tuple[int, int]:
    """(the least that any plan needs with MLPs whole, and with MLPs in slices), on an H100."""
    least = []
    for exact in (True, False):
        with pytest.raises(Infeasible) as refused:
            plan(workload(Gated), budget=1, target="h100-80gb", exact=exact)
        assert refused.value.minimum_budget_bytes is not None
        least.append(refused.value.minimum_budget_bytes)
    return least[0], least[1]


@pytest.mark.exhaustive
def test_a_plan_cuts_mlps_where_nothing_else_fits() -> None:
    whole, cut = tight()
    assert cut < whole
    made = plan(workload(Gated), budget=(whole + cut) // 2, target="h100-80gb")
    assert form_of(made.about).rows >= 2
    assert made.predicted["peak_bytes"] <= made.budget_bytes
    assert made.predicted["form_time_us"] > 0
    assert "MLPs" in plan_text(made)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_fused_plan_cuts_mlps_where_nothing_else_fits_and_fuses_inside_of_them() -> None:
    with pytest.raises(Infeasible) as refused:
        plan(workload(Gated), budget=1, target="h100-80gb", numerics="rounding")
    least = refused.value.minimum_budget_bytes
    assert least is not None
    assert least <= tight()[1]  # fusing may only lower it
    made = plan(workload(Gated), budget=least, target="h100-80gb", numerics="rounding")
    form = form_of(made.about)
    assert form.fused
    assert form.rows >= 2
    assert made.predicted["peak_bytes"] <= made.budget_bytes


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "amp"])
@pytest.mark.parametrize("half", [Gated, Split], ids=lambda half: half.__name__)
def test_groups_inside_of_chunked_mlps_keep_the_predicted_peak_and_are_near_float64(
    half: type[Half], autocast: torch.dtype | None
) -> None:
    load = dataclasses.replace(workload(half), autocast=autocast)
    fake = FakeStep(load, device=CPU)
    with fake.in_form(Form(rows=4, fused=True)):
        graph = record(fake)
        costs = time_operators(graph.kinds, CPU)
    for regions in ((), tuple(every_block(graph))):
        peak = Memory(graph, costs.workspace_per_op(graph)).curve(regions).peak_bytes
        report = validate(load, plan_by_hand(graph, regions, costs, budget_bytes=peak), repeats=1)
        assert report.passed, str(report)
        assert report.gradients_near
        assert any("silu" in text for text in report.groups_near), "of the MLP's inside"
        assert report.measured["peak_bytes"] == peak


def test_mlps_whose_chunks_cannot_be_recorded_are_left_whole_with_a_warning() -> None:
    step = FakeStep(workload(Gated, samples=2), device=CPU)
    profile = profile_step(step, find_planning_device("h100-80gb"))

    def refused(form: Form) -> Profile:
        raise CaptureError("a kernel takes no chunk of its rows.")

    forms = StepForms(load("eager"), step, profile, FormChoice(row_numbers=1), profile_in=refused)
    with pytest.warns(UserWarning, match="MLPs are not chunked: a kernel takes no chunk of its rows.$"):
        assert list(forms.with_rows()) == []


@pytest.mark.exhaustive
def test_where_a_plan_is_cheaper_mlps_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = tight()
    made = plan(workload(Gated), budget=4 * whole, target="h100-80gb")
    assert form_of(made.about).rows == 0


@functools.cache
def planned() -> Plan:
    """A plan for this CPU with MLPs in slices, and regions."""
    place = find_planning_device("cpu")
    found = workload(Gated, samples=64)
    fake = fake_step(found, place)
    whole = profile_step(fake, place)
    with fake.in_form(Form(rows=4)):
        profile = profile_step(fake, place)
    least = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    regions = [Region(i - 3, i + 1) for i, n in enumerate(profile.graph.nodes) if n.op.startswith("chunked_rows(")]
    budget = least.curve(tuple(regions)).peak_bytes
    assert budget < Memory(whole.graph).curve(tuple(every_block(whole.graph))).peak_bytes
    from remat.planning.budget import Budget
    from tests.studies import plan_profile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.planning.forms.round_alike", lambda *about: True)
        choice = FormChoice(row_numbers=64 * LENGTH * WIDE // 4)
        return plan_profile(whole, Budget(budget, budget), step=fake, forms=choice)


@pytest.mark.exhaustive
def test_a_plan_with_mlps_in_slices_validates() -> None:
    made = planned()
    assert form_of(made.about).rows == 4
    report = validate(workload(Gated, samples=64), made, repeats=1)
    assert report.passed, str(report)
    assert report.gradients_near and all(name.startswith("halves.") for name in report.gradients_near)
    weights = [name for name in report.gradients_near if name.endswith(("up.weight", "gate.weight", "down.weight"))]
    assert all(report.gradients_near[name] <= NEAR for name in weights)
    assert report.measured["peak_bytes"] == pytest.approx(made.predicted["peak_bytes"], rel=0.0005)
    assert report.measured["peak_bytes"] <= made.budget_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", ["rows", "sums"])
def test_wrong_gradients_of_a_run_fail_its_validation(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    made, right = planned(), ChunkedRows.gradients

    def gradients(self: ChunkedRows, *given: Any, **under: Any) -> Any:
        of_rows, sums = right(self, *given, **under)
        if wrong == "rows":
            return None if of_rows is None else of_rows * (1 + 1e-6), sums
        return of_rows, [None if each is None else each * (1 + 1e-4) for each in sums]

    monkeypatch.setattr(ChunkedRows, "gradients", gradients)
    report = validate(workload(Gated, samples=64), made, repeats=1)
    assert not report.passed and not report.gradients_equal


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:the first step under the plan is not verified. .* no room")
def test_a_saved_plan_trains_at_every_batch_size(tmp_path: Path) -> None:
    path = tmp_path / "rows.plan.json"
    planned().save(path)
    torch.manual_seed(0)
    untouched = Model(Gated).train()
    model = remat.apply(copy.deepcopy(untouched), str(path))
    for samples, length in ((64, LENGTH), (7, LENGTH), (5, 33), (64, 40)):
        ids = batch(samples, length)
        expected, found = step(untouched, ids), step(model, ids)
        assert torch.equal(expected, found)
        expected.backward()
        found.backward()
        for one, other in zip(untouched.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)  # a bias of `Gated`'s norm gets none
            if one.grad is not None and other.grad is not None:
                assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
        untouched.zero_grad()
        model.zero_grad()
    model.eval()
    assert torch.equal(step(untouched.eval(), ids), step(model, ids))
