"""Writes in place of training are predicted as such, though fakes make new tensors; and no others are.

Each toy's peak is at the operator in question, whose tensor takes a mebibyte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat.capture.anchors import Reading
from remat.errors import PlanMismatch
from remat.evaluation.evaluator import Memory
from remat.evaluation.identity import Fit
from remat.evaluation.plan import Region, to_refs
from remat.execution import placing
from remat.execution.apply import apply, counts_of
from remat.execution.eager.replay import replay
from remat.execution.eager.rewrite import CallRegion
from remat.formulation.search_space import legal_cuts
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.validation.training import Training
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.fuzzing import workspaces
from tests.graphs import may_be_region
from tests.toys import plan_by_hand

# Dynamo makes an instance of a custom autograd function, and torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

CPU = torch.device("cpu")
WIDTH = 512  # a matrix of it takes a mebibyte


class Toy(nn.Module):
    """`function` of a matrix that depends on a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class OutOfPlace(torch.autograd.Function):
    """Its backward is Python's, and writes nothing in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = gradients[0] * 2
        return torch.zeros_like(first).scatter_add(1, torch.zeros_like(first, dtype=torch.long), first)


def accumulated(x: Tensor) -> Tensor:
    return (x * 2).sum() + (x * 3).sum() + (x * 4).sum()


def added_to_itself(x: Tensor) -> Tensor:
    """Both gradients are one tensor, which the engine must not write to."""
    y = x * 2
    return ((y + y) * 3).sum()


def expanded(x: Tensor) -> Tensor:
    """The first gradient to arrive is expanded from one number: there is nothing to write to."""
    return x.sum() + (x * 3).sum()


def reshaped(x: Tensor) -> Tensor:
    """The first gradient to arrive is a view, whose base the view's history holds; a third is added in place."""
    y = x * 2
    return (y.view(-1) * 2).sum() + (y.view(-1) * 3).sum() + (y.view(-1) * 4).sum()


def tied(x: Tensor) -> Tensor:
    """A head's weight and an embedding's are one: the head's gradient is a transposed view, and arrives first."""
    y = x * 2
    return F.linear(F.embedding(torch.arange(8).view(2, 4), y), y).sum()


def gathered(x: Tensor) -> Tensor:
    return (x.gather(1, torch.arange(WIDTH).expand(WIDTH, WIDTH).flip(1)) * 2).sum()


def indexed(x: Tensor) -> Tensor:
    return (x[torch.arange(WIDTH).flip(0)] * 2).sum()


def selected(x: Tensor) -> Tensor:
    return (x.sort(dim=1).values * 2).sum()


def attended(x: Tensor) -> Tensor:
    """With dropout the CPU has no fused kernel."""
    q = x[:, :8].reshape(1, 1, WIDTH, 8)
    mask = torch.zeros(WIDTH, WIDTH)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1).sum()


def told_apart_by_weight(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.zeros(WIDTH, WIDTH), pos_weight=torch.ones(WIDTH))


def told_apart(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH))


def largest(x: Tensor) -> Tensor:
    return x.max() + 0 * x.median()


def reflected(x: Tensor) -> Tensor:
    return torch.linalg.householder_product(x[:, :64], x[0, :48]).sum()


def transposed(x: Tensor) -> Tensor:
    """A linear layer of what is not contiguous adds its bias to a product."""
    tokens = x[:, :8].reshape(2, WIDTH // 2, 8).transpose(0, 1)
    return F.linear(tokens, torch.ones(WIDTH, 8), torch.ones(WIDTH)).sum()


def transposed_by_hand(x: Tensor) -> Tensor:
    tokens = x[:, :8].reshape(2, WIDTH // 2, 8).transpose(0, 1)
    return (tokens @ torch.ones(WIDTH, 8).t() + torch.ones(WIDTH)).sum()


def attended_across(x: Tensor) -> Tensor:
    """Keys and values are linear layers of a context whose batch comes first."""
    context, width = torch.ones(2, 2048, 8).transpose(0, 1), 64
    query, square, kv = x[:1, : 2 * width].reshape(1, 2, width), torch.ones(width, width), torch.ones(width, 8)
    found, _ = F.multi_head_attention_forward(
        *(query, context, context, width, 1, None, torch.ones(3 * width), None, None, False, 0.0, square, None),
        use_separate_proj_weight=True,
        q_proj_weight=square,
        k_proj_weight=kv,
        v_proj_weight=kv,
    )
    return found.sum()


def scattered_by_the_model(x: Tensor) -> Tensor:
    with torch.no_grad():
        ones = torch.zeros(WIDTH, WIDTH).scatter(1, torch.zeros(WIDTH, WIDTH, dtype=torch.long), 1.0)
    return (x * ones).sum()


def python_s_own_function(x: Tensor) -> Tensor:
    return OutOfPlace.apply(x).sum()


TOYS = [
    accumulated,
    added_to_itself,
    expanded,
    reshaped,
    tied,
    gathered,
    indexed,
    selected,
    attended,
    told_apart_by_weight,
    largest,
    reflected,
    transposed,
    transposed_by_hand,
    attended_across,
    scattered_by_the_model,
    python_s_own_function,
]


def toy(function: Callable[..., Any], name: str = "") -> Workload:
    return Workload(
        name or function.__name__,
        lambda: Toy(function),
        lambda batch_size, _: torch.randn(batch_size, WIDTH),
        lambda model, batch: model(batch).sum(),
        batch_size=WIDTH,
        optimizer=None,
    )


@pytest.mark.parametrize("function", TOYS, ids=lambda function: function.__name__)
def test_the_predicted_peak_is_the_measured_one(function: Callable[..., Any]) -> None:
    """Without regions, to less than a hundredth of the tensor in question; also by the replay, and never below."""
    workload = toy(function)
    step = FakeStep(workload, device=CPU)
    graph = record(step)
    known = workspaces(graph)
    per_op = np.array([known.get(kind.key, 0) for kind in graph.kinds])[graph.op_kind]
    predicted = Memory(graph, per_op).peak_without_checkpointing
    assert predicted == int(replay(step, (), workspace_of=known).max()) + graph.unseen_bytes
    training = Training(workload, CPU, 0, TrainingLoop())  # traced below, so that no local variable holds anything
    apply(training.model, plan_by_hand(graph, ()), verify_first_step=False)
    training.step()
    _, measured = training.measure_steady_step(1, 1)
    assert 0 <= predicted - measured < 4 * WIDTH * WIDTH / 100


@pytest.mark.parametrize(
    "function", [gathered, attended, transposed, scattered_by_the_model], ids=lambda function: function.__name__
)
def test_a_recomputation_is_judged_alike(function: Callable[..., Any]) -> None:
    step = FakeStep(toy(function), device=CPU)
    graph = record(step)
    cuts = legal_cuts(graph)
    end = max(cut for cut in cuts if may_be_region(graph, cuts[0], cut))
    curve = Memory(graph).curve((Region(cuts[0], end),))
    assert (curve.region >= 0).any()
    replayed = replay(step, to_refs(graph, (Region(cuts[0], end),)))
    np.testing.assert_array_equal(replayed, curve.alive_bytes[curve.executed] - graph.unseen_bytes)


# What is written in place through the whole forward


class Solver(nn.Module):
    """Writes its states into slots, as solvers of differential equations do, or adds them up."""

    def __init__(self, keeps: str, *, spelled_otherwise: bool = False) -> None:
        super().__init__()
        self.change, self.keeps = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), keeps
        self.spelled_otherwise = spelled_otherwise
        self.back = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.zeros(8, *x.shape) if self.keeps == "slots" else torch.zeros_like(x)
        for i in range(8):
            x = x + (1 - self.back(self.change(x.view(*x.shape) if self.spelled_otherwise else x)))
            if self.keeps == "slots":
                states[i] = x
            else:
                states += x
        return states


@pytest.mark.fast("slots")
@pytest.mark.parametrize("keeps", ["slots", "sum"])
def test_steps_between_writes_in_place_may_be_made_again(keeps: str) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    workload = Workload(keeps, lambda: Solver(keeps), lambda samples, _: torch.randn(samples, 4), step, 256)
    plan = remat.plan(workload, budget="40%step", target="cpu", numerics="bitwise")
    assert len(plan.regions) >= 7
    report = remat.validate(workload, plan, device="cpu")
    assert report.passed, str(report)

    def gradients(model: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
        step(model, torch.randn(256, 4)).backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(Solver(keeps))
    other = remat.apply(Solver(keeps, spelled_otherwise=True), plan)
    assert all(map(torch.equal, gradients(other), expected)) and counts_of(other).regions == len(plan.regions)
    with torch.device("cpu"):  # a mode, under which Dynamo spells operators otherwise
        assert all(map(torch.equal, gradients(remat.apply(Solver(keeps), plan)), expected))


def test_a_region_that_would_hold_some_of_the_writes_is_refused() -> None:
    region, fit = CallRegion(2, 5), Fit(tuple(range(20)), 20)
    reading = Reading(None, frozenset(), frozenset(), [frozenset({6, 12, 18})])
    assert placing._moved(region, fit, reading) == region
    with pytest.raises(PlanMismatch, match="some of the writes"):
        placing._moved(CallRegion(5, 9), fit, reading)


def test_unfused_attention_adds_its_mask_in_place() -> None:
    """Nowhere the peak, since the softmax that follows takes as much."""
    graph = record(FakeStep(toy(attended), device=CPU))
    alive = Memory(graph).curve(()).alive_bytes
    names = [graph.kinds[kind].name for kind in graph.op_kind[: graph.forward_end]]
    added = names.index("aten.add.Tensor")
    assert names[added - 1] == "aten.bmm.default"
    assert alive[added] <= alive[added - 1]


def test_the_gradient_of_logits_is_computed_in_one_tensor() -> None:
    """Nowhere the peak here: the loss itself takes two."""
    graph = record(FakeStep(toy(told_apart), device=CPU))
    alive = Memory(graph).curve(()).alive_bytes
    names = [graph.kinds[kind].name for kind in graph.op_kind]
    first = names.index("aten.sigmoid.default")
    assert names[first + 1 : first + 4] == ["aten.sub.Tensor", "aten.mul.Tensor", "aten.mul.Tensor"]
    assert (alive[first + 1 : first + 4] == alive[first]).all()
