"""A loss in slices: the loss and all gradients equal the eager baseline's, except sums of a head's own weights.

Predictions equal measurements, and a plan uses chunks where they pay.

The oracle is the untouched model. Sums are held to float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

import remat
from remat.capture.dynamo import GraphCalls
from remat.chunking.chunk import chunk, chunked_losses
from remat.chunking.chunked_loss import ALIGNED_PIECE, ALIGNED_ROWS, ChunkedLoss, HeadInputs, cuts
from remat.chunking.heads import find_heads, whole_losses
from remat.chunking.products import round_alike
from remat.chunking.withheld import WithheldLogits
from remat.cli.screen import plan_text
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, NoPlanInTime, PlanMismatch, RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Chunk, Form, chunks_of
from remat.evaluation.plan import Plan, to_refs
from remat.execution.eager.replay import replay
from remat.execution.executions import load
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.planning.forms import StepForm, StepForms, why_whole
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice, PlanRequest
from remat.planning.search import Judge
from remat.planning.study import Study
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.solvers.least_peak import least_peak
from remat.validation.sums import NEAR, SumsSeen
from remat.validation.validating import validate
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached
from tests.examples import examples
from tests.studies import forms_of, plan_profile
from tests.toys import CPU, Block

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread"), pytest.mark.every_slice]

WIDTH, CLASSES, LENGTH, IGNORED = 16, 640, 48, -100


class Language(nn.Module):
    """Blocks and a head with many classes; `loss` makes the loss of logits and labels."""

    def __init__(self, loss: Callable[..., torch.Tensor], layers: int = 2, bias: bool = True, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList([Block(WIDTH, dropout) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": self.loss(logits, labels), "logits": logits}


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def cast_first(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().reshape(-1, CLASSES), labels.reshape(-1))


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(logits / 20.0) * 20.0
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def ignoring_zero(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.clamp(min=0).view(-1), ignore_index=0)


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="sum") / (labels != IGNORED).sum()


def capped_after_selection(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = 30 * torch.tanh(logits[:, :-1].float() / 30)
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def scaled_and_masked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    unused, scale = torch.arange(CLASSES, device=logits.device) >= CLASSES - 5, torch.full((1, 1, 1), 0.7)
    logits = (1.5 - logits * scale.to(logits.dtype)).masked_fill(unused, -1e4)
    return plain(torch.where(unused, -2e4, logits), labels)


def of_log_softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1).view(-1, CLASSES), labels.view(-1))


def averaged_outside(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = (labels != IGNORED).float()
    losses = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none")
    return (losses.view(labels.shape[0], -1) * kept).sum() / kept.sum()


LOSSES = (
    *(plain, cast_first, capped, shifted, ignoring_zero, summed),
    *(capped_after_selection, scaled_and_masked, of_log_softmax, averaged_outside),
)


SELECTING = (shifted, capped_after_selection)  # the last rows are left out of the weight's sum


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), weight=torch.ones(CLASSES))


def used_twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return plain(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()


def mixing_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return plain(logits - logits.mean(1, keepdim=True), labels)


def random_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return plain(F.dropout(logits, 0.1), labels)


def of_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), F.one_hot(labels.clamp(min=0).view(-1), CLASSES).float())


def outside_autocast(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return plain(logits.float(), labels)


def selected_after_flattening(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES)[:-1], labels.view(-1)[1:])


def written_meanwhile(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels.clamp_(min=0)
    return plain(logits, labels)


def tripled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (plain(logits, labels) + 1.0) / 3


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return plain(logits, labels) ** 2


NOT_CHUNKED = (
    *(smoothed, weighted, used_twice, mixing_rows, random_rows, of_probabilities),
    *(outside_autocast, selected_after_flattening, written_meanwhile, tripled, squared),
)


WHY = {
    "smoothed": "labels are smoothed",
    "weighted": "classes have weights",
    "used_twice": "`logsumexp` reads the logits too",
    "mixing_rows": "and both need a gradient",
    "random_rows": "(dropout) between the logits and the loss has no rule",
    "of_probabilities": "labels are not class indices",
    "outside_autocast": "autocast or no_grad begins or ends",
    "selected_after_flattening": "selected after the logits were flattened",
    "written_meanwhile": "writes in place",
    "tripled": "something other than a sum reads the loss",
    "squared": "something other than a sum reads the loss",
}


def batch(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(CLASSES, (samples, length or LENGTH))
    labels = torch.randint(CLASSES, (samples, length or LENGTH))
    labels[:, :5] = IGNORED
    return ids, labels


def step(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(*given)["loss"]
    return loss


LANGUAGE = Workload("language", functools.partial(Language, plain), batch, step, batch_size=6, seq_len=LENGTH)
MIXED = dataclasses.replace(LANGUAGE, name="language-amp", autocast=torch.bfloat16)


def captured(loss: Callable[..., torch.Tensor], model: type[Language] = Language) -> fx.GraphModule:
    """The graph of the model with `loss`, traced on fake tensors."""
    fake = FakeStep(dataclasses.replace(LANGUAGE, build=functools.partial(model, loss)), device=CPU)
    fake.warm_up()
    ((_, graph_module),) = fake.graphs.distinct
    return graph_module


# Which heads are found


@pytest.mark.fast("ignoring_zero")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_is_found_by_what_its_nodes_do(loss: Callable[..., torch.Tensor]) -> None:
    (head,) = find_heads(captured(loss))
    assert head.logits_bytes == 6 * LENGTH * CLASSES * 4


@pytest.mark.fast("smoothed", "mixing_rows", "tripled")
@pytest.mark.parametrize("loss", NOT_CHUNKED)
def test_what_has_no_rule_is_left_whole(loss: Callable[..., torch.Tensor]) -> None:
    graph_module = captured(loss)
    assert find_heads(graph_module) == []
    (left,) = whole_losses(graph_module)
    assert WHY[loss.__name__] in left.why and left.logits_bytes


class Overwriting(Language):
    """Writes into the rows of its logits before their loss, as an activation asked by position to do so does."""

    def __init__(self, loss: Callable[..., torch.Tensor]):
        super().__init__(loss)
        self.head.requires_grad_(False)  # its product keeps no rows

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = 1.5 * self.embed(ids)
        logits = self.head(x)
        beside = nn.Hardswish(inplace=True)(x).mean()
        return {"loss": plain(logits, labels) + beside}


def test_a_loss_whose_rows_are_overwritten_is_left_whole() -> None:
    assert find_heads(captured(plain, Overwriting)) == []


class ByOperator(Language):
    """Its logits are a product with the transposed weight."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.head.weight.T

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.product(x)
        return {"loss": self.loss(logits, labels), "logits": logits}


class ByMatmul(ByOperator):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.head.weight.t())


@pytest.mark.parametrize("kind", [ByOperator, ByMatmul])
def test_a_product_with_a_transposed_weight_makes_logits_too(kind: type[Language]) -> None:
    torch.manual_seed(0)
    model = kind(plain)
    untouched, found = stepped(model, model.forward, False), stepped(model, in_slices(model, 3), False)
    assert torch.equal(found.loss, untouched.loss)
    for name, gradient in untouched.gradients.items():
        if not name.startswith("head."):
            assert torch.equal(found.gradients[name], gradient), name
    graph_module = captured(plain, kind)
    assert len(find_heads(graph_module)) == 1 and whole_losses(graph_module) == []


@pytest.mark.exhaustive
def test_a_plan_and_a_refusal_say_why_a_loss_is_left_whole() -> None:
    workload = dataclasses.replace(LANGUAGE, build=functools.partial(Language, used_twice))
    plan = remat.plan(workload, budget="90%step", target="cpu")
    assert plan.about["whole_losses"] == ["`logsumexp` reads the logits too (`logits`)"]
    assert "not chunked: `logsumexp` reads the logits too" in plan_text(plan)
    with pytest.raises(remat.Infeasible, match="The loss is not chunked: `logsumexp` reads the logits too"):
        remat.plan(workload, budget="1MiB", target="cpu")


def read_by_the_step(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    found: dict[str, torch.Tensor] = model(*given)
    model.correct = found["logits"].argmax(-1).eq(given[1]).float().mean()
    return found["loss"]


def test_a_refusal_says_that_the_step_reads_the_logits() -> None:
    workload = dataclasses.replace(LANGUAGE, build=functools.partial(ByOperator, plain), step=read_by_the_step)
    with pytest.raises(
        remat.Infeasible, match=r"The loss is not chunked: the step reads the logits, or the forward does after a"
    ):
        remat.plan(workload, budget="1MiB", target="cpu")


class Ungraded(Language):
    """Makes its logits where nothing gets a gradient, and a loss that learns by another way."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        with torch.no_grad():
            logits = self.head(x)
        return {"loss": self.loss(logits, labels) + x.square().mean(), "logits": logits}


def test_logits_without_gradient_are_left_whole() -> None:
    fake = FakeStep(dataclasses.replace(LANGUAGE, build=functools.partial(Ungraded, plain)), device=CPU)
    fake.warm_up()
    assert list(fake.graphs.heads) == []


def test_a_graph_without_such_a_head_is_left_as_it_is() -> None:
    graph_module = captured(plain)
    assert chunked_losses(chunk(graph_module, {1: 2})) == []
    assert len(chunked_losses(chunk(graph_module, {0: 2}))) == 1


def test_a_loss_may_be_added_to() -> None:
    def with_penalty(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return plain(logits, labels) + 0.5 * torch.ones(()) + 2.0

    assert len(find_heads(captured(with_penalty))) == 1


# What slices compute


@dataclasses.dataclass
class Stepped:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def stepped(model: nn.Module, forward: Callable[..., Any], autocast: bool, scale: float = 1.0) -> Stepped:
    model.zero_grad()
    torch.manual_seed(3)
    given = batch(6, 77)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = forward(*given)["loss"]
    (scale * loss).backward()
    return Stepped(loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def in_slices(model: nn.Module, slices: int) -> GraphCalls:
    """The forward of `model`, its loss in slices."""

    def run(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        return chunk(graph_module, {0: slices})(*args)

    return GraphCalls(model.forward, run)


POLICIES = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}


@pytest.mark.fast("shifted-autocast", "capped-float32", "summed-bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_the_untouched_ones_but_for_sums(loss: Callable[..., torch.Tensor], policy: str) -> None:
    dtype, autocast = POLICIES[policy]
    torch.manual_seed(0)
    model = Language(loss).to(dtype)
    untouched = stepped(model, model.forward, autocast)
    for slices in (1, 3):
        found = stepped(model, in_slices(model, slices), autocast)
        assert torch.equal(found.loss, untouched.loss)
        for name, gradient in untouched.gradients.items():
            if not name.startswith("head."):
                assert torch.equal(found.gradients[name], gradient), name
        if slices == 1 and loss not in SELECTING:
            assert torch.equal(found.gradients["head.weight"], untouched.gradients["head.weight"])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_the_loss_multiplies_exactly_where_it_is_a_power_of_two(policy: str) -> None:
    dtype, autocast = POLICIES[policy]
    torch.manual_seed(0)
    model = Language(cast_first).to(dtype)
    untouched = stepped(model, model.forward, autocast, scale=0.25)
    found = stepped(model, in_slices(model, 2), autocast, scale=0.25)
    assert torch.equal(found.gradients["embed.weight"], untouched.gradients["embed.weight"])


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm())


@settings(max_examples=examples(10, 25))
@given(
    st.integers(128, 200),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["mean", "sum"]),
    st.integers(0, 1000),
)
def test_sums_are_as_near_to_float64_as_the_untouched_ones(
    rows_a_slice: int, slices: int, dtype: torch.dtype, reduction: str, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = rows_a_slice * slices  # products of a few rows take other kernels
    x, weight = torch.randn(rows, 24, dtype=dtype), (0.2 * torch.randn(130, 24)).to(dtype)
    labels = torch.randint(130, (rows,))
    labels[::5] = IGNORED
    head = loss_of(slices, reduction)
    wanted = True, True, False
    with torch.no_grad():
        losses, of_rows, sums = head.run(HeadInputs(x, weight, None, labels, (), ()), wanted)
        precise = HeadInputs(x.double(), weight.double(), None, labels, (), ())
        _, _, truth = head.in_float64().run(precise, wanted)
    leaf_x, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(F.linear(leaf_x, leaf_weight).float(), labels, reduction=reduction)
    loss.backward()
    assert loss.equal(head.reduced(losses, labels, ()))
    assert of_rows is not None and leaf_x.grad is not None and leaf_weight.grad is not None
    assert torch.equal(of_rows, leaf_x.grad)
    assert sums.weight is not None and truth.weight is not None
    # In bfloat16 the untouched sum is rounded once, at its end, and each slice's too.
    floor = torch.finfo(dtype).eps * float(truth.weight.norm())
    assert distance(sums.weight, truth.weight) <= max(NEAR * distance(leaf_weight.grad, truth.weight), floor)


@pytest.mark.parametrize("factors", [(1 / 128, 1.0), (1.0, 1 / 128), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["one-backward", "first-in-first-out"])
def test_a_head_that_runs_twice_may_be_as_far_as_both_of_its_sums(factors: tuple[float, float], apart: bool) -> None:
    """Rows and their opposites: the sums nearly cancel, so that their rounding is more than the dtype's own."""
    torch.manual_seed(0)
    model, head = nn.Linear(16, 130, bias=False), loss_of(4, "mean")
    seen = SumsSeen(model, contextlib.nullcontext)
    runs = []
    for _ in factors:
        half, labels = 1e-3 * torch.randn(256, 16), torch.randint(130, (256,))
        runs.append((torch.cat([half, -half]), labels.repeat(2)))
    gradients = []
    for each in (head.whole(), head):
        if each is head:
            seen.watch(head.watch)
        losses = [
            factor * each(x, model.weight, None, labels) for factor, (x, labels) in zip(factors, runs, strict=True)
        ]
        for loss in losses if apart else [torch.stack(losses).sum()]:
            loss.backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
        model.weight.grad.zero_()
    assert not torch.equal(*gradients)
    assert seen.too_far(["weight"], gradients[:1], gradients[1:]) == []
    gradients[1] *= 1.01
    assert seen.too_far(["weight"], gradients[:1], gradients[1:]) == ["weight"]


def loss_of(slices: int, reduction: str) -> ChunkedLoss:
    """A head that casts logits to float32."""

    def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    traced = fx.symbolic_trace(losses)
    opened, scaled = fx.symbolic_trace(lambda logits: logits.float()), fx.symbolic_trace(lambda loss: loss)
    return ChunkedLoss(opened, traced, traced, scaled, slices, IGNORED, reduction)


def test_backward_twice_needs_the_graph_to_be_retained() -> None:
    torch.manual_seed(0)
    model = Language(plain, dropout=0.0)
    loss = in_slices(model, 2)(*batch(4, 40))["loss"]
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * first[name]) for name, p in model.named_parameters() if p.grad is not None)
    with pytest.raises(RematError, match="twice"):
        loss.backward()


def test_what_slices_save_passes_by_the_hooks_around_the_forward() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        in_slices(Language(plain), 2)(*batch(4, 40))


@pytest.mark.cuda
def test_a_piece_is_let_go_of_before_the_next_is_made() -> None:
    """A device's thread of autograd holds the last gradient for a moment: pieces are differentiated on this one."""
    threads: list[int] = []
    head = loss_of(2, "mean")
    losses = head.row_losses

    def watched(opened: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        opened.register_hook(lambda gradient: threads.append(threading.get_ident()))
        return losses(opened, labels)

    head.row_losses = watched  # type: ignore[assignment]
    rows, weight = (torch.randn(size, 16, device="cuda", requires_grad=True) for size in (512, 64))
    head(rows, weight, None, torch.randint(64, (512,), device="cuda")).backward()
    assert {*threads} == {threading.get_ident()}


def test_second_derivatives_are_refused() -> None:
    model = Language(plain, dropout=0.0)
    loss = in_slices(model, 2)(*batch(4, 40))["loss"]
    with pytest.raises(RematError, match="create_graph"):
        torch.autograd.grad(loss, model.embed.weight, create_graph=True)


@pytest.mark.parametrize(("factor", "warned"), [(0.25, False), (65536.0, False), (1 / 3, True)])
def test_a_factor_that_rounds_is_told_of_once(factor: float, warned: bool) -> None:
    model = Language(plain)
    forward = in_slices(model, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            (forward(*batch(4, 40))["loss"] * factor).backward()
    assert len([each for each in seen if "power of two" in str(each.message)]) <= int(warned) * 2
    assert any("power of two" in str(each.message) for each in seen) == warned


def test_frozen_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    model = Language(plain)
    model.head.requires_grad_(False)
    untouched = stepped(model, model.forward, autocast=True)
    found = stepped(model, in_slices(model, 3), autocast=True)
    assert found.gradients.keys() == untouched.gradients.keys()
    assert all(torch.equal(found.gradients[name], untouched.gradients[name]) for name in untouched.gradients)


def test_logits_are_withheld_and_say_so() -> None:
    logits = in_slices(Language(plain), 2)(*batch(4, 40))["logits"]
    assert isinstance(logits, WithheldLogits)
    assert isinstance(copy.deepcopy(logits), WithheldLogits)
    assert not hasattr(logits, "dtype")  # as libraries ask that convert outputs
    reading: Sequence[Callable[[Any], Any]] = (
        lambda found: found.argmax(-1),
        lambda found: found[0],
        lambda found: found + 1,
        lambda found: torch.softmax(found, -1),
        lambda found: F.softmax(found, -1),
        lambda found: found.shape,
    )
    for read in reading:
        with pytest.raises(RematError, match="the logits do not exist"):
            read(logits)


# What slices take


@pytest.mark.exhaustive
@pytest.mark.often("language-a100-80gb", "language-amp-cpu", "language-amp-h100-80gb")
@pytest.mark.parametrize("target", ["cpu", "a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("workload", [LANGUAGE, MIXED], ids=lambda workload: workload.name)
def test_the_evaluator_s_peak_is_the_replay_s(workload: Workload, target: str) -> None:
    place = find_planning_device(target)
    fake = fake_step(workload, place)
    fake.warm_up()
    for slices in (1, 4):
        with fake.in_form(Form((Chunk(0, 0, slices),))):
            profile = profile_step(fake, place) if target != "cpu" else recorded_here(fake)
            graph, costs = profile.graph, profile.costs
            regions = regions_of(profile)
            for each in ((), regions):
                alive = replay(
                    fake,
                    to_refs(graph, each),
                    alignment_bytes=place.target.alignment_bytes,
                    workspace_of=costs.workspace_of(graph),
                )
                evaluated = Memory(graph, costs.workspace_per_op(graph)).curve(each).alive_bytes
                assert np.array_equal(alive + graph.unseen_bytes, evaluated)


@pytest.mark.exhaustive
@pytest.mark.parametrize("slices", [1, 4])
def test_what_slices_save_for_their_own_backward_is_alive_within_them_and_no_save(slices: int) -> None:
    """Taken for saves, no row of the forward would count them: no bound would meet its plan."""
    fake = fake_step(LARGER, find_planning_device("h100-80gb"))
    fake.warm_up()
    with fake.in_form(Form((Chunk(0, 0, slices),))):
        graph = record(fake)
    unpacked = graph.saved_tensors.unpack
    assert len(unpacked) and np.all((unpacked < 0) | (unpacked >= graph.forward_end))


def recorded_here(fake: FakeStep) -> Any:
    """A profile of the CPU without timing anything."""
    from remat.costing.costs import estimated_costs
    from remat.costing.profile import Profile

    graph, target = record(fake), find_planning_device("cpu").target
    return Profile(graph, estimated_costs(graph, target), target)


def regions_of(profile: Any) -> tuple[Any, ...]:
    from tests.toys import every_block

    return tuple(every_block(profile.graph))


# Plans


# Of a toy, slices that are many and small take most of the time; here it is memory that counts.
CHOICE = FormChoice(slices=(2,), worth=0.0)
plan = functools.partial(remat.plan, forms=CHOICE)


@cached
def tight(workload: Workload = LANGUAGE) -> tuple[int, int]:
    """(the least that the loss whole needs, what it needs without checkpointing), on an H100."""
    with pytest.raises(Infeasible) as refused:
        plan(workload, budget=1, target="h100-80gb", exact=True)
    assert refused.value.minimum_budget_bytes is not None
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(workload, place), place)
    return refused.value.minimum_budget_bytes, Memory(profile.graph).peak_without_checkpointing


LARGER = LANGUAGE.sized(64)


def test_a_plan_cuts_the_loss_where_nothing_else_fits() -> None:
    least, _ = tight(LARGER)
    with pytest.raises(Infeasible):
        plan(LARGER, budget=least - 1, target="h100-80gb", exact=True)
    made = plan(LARGER, budget=least - 1, target="h100-80gb")
    assert [each.slices for each in chunks_of(made.about)] == [2]
    assert made.predicted["peak_bytes"] < least
    assert made.solver["bound_us"] <= made.solver["objective_us"]
    assert "no plan without them (--exact) fits" in plan_text(made)


def test_the_least_budget_is_the_same_whatever_was_asked_for() -> None:
    """Also below what the optimizer step needs, which is the same however the loss is computed."""
    least, _ = tight(LARGER)
    made = plan(LARGER, budget=least - 1, target="h100-80gb")
    for budget in (1, made.predicted["peak_bytes"] // 2):
        with pytest.raises(Infeasible) as refused:
            plan(LARGER, budget=budget, target="h100-80gb")
        assert refused.value.minimum_budget_bytes is not None
        assert refused.value.minimum_budget_bytes < least


def test_where_nothing_is_recomputed_the_loss_is_left_whole() -> None:
    made = plan(LARGER, budget="60GiB", target="h100-80gb")
    assert chunks_of(made.about) == ()


@pytest.mark.exhaustive
def test_slices_that_gain_too_little_are_told_of_and_the_bound_is_of_the_loss_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, _ = tight(LARGER)
    whole = plan(LARGER, budget=budget, target="h100-80gb", exact=True)
    recorded = StepForms._recorded
    monkeypatch.setattr(StepForms, "_recorded", lambda *args: dataclasses.replace(recorded(*args), extra_us=0.0))
    sliced = plan(LARGER, budget=budget, target="h100-80gb")
    assert chunks_of(sliced.about), "slices that cost nothing are better"
    made = plan(LARGER, budget=budget, target="h100-80gb", forms=dataclasses.replace(CHOICE, worth=1e6))
    assert chunks_of(made.about) == () and made.solver["bound_us"] == whole.solver["bound_us"]
    assert made.predicted["sliced_overhead"] == pytest.approx(sliced.predicted["overhead"])
    assert f"(overhead {100 * sliced.predicted['overhead']:.1f} % if chunked)" in plan_text(made)


@pytest.mark.exhaustive
def test_the_price_of_slices_is_told_and_never_above_that_of_the_loss_whole() -> None:
    least, most = tight(LARGER)
    budget = (least + most) // 2
    whole = plan(LARGER, budget=budget, target="h100-80gb", exact=True)
    made = plan(LARGER, budget=budget, target="h100-80gb")
    assert made.solver["objective_us"] <= whole.solver["objective_us"]
    if chunks_of(made.about):
        assert made.predicted["overhead"] <= whole.predicted["overhead"]
        assert f"+{100 * whole.predicted['overhead']:.1f} %" in plan_text(made)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loop": TrainingLoop(accumulation=3)}, "no power of two"),
        ({"loop": TrainingLoop(shard="zero3", ranks=2)}, "sharded"),
    ],
)
def test_the_loss_is_left_whole_where_slices_would_change_gradients(changes: dict[str, Any], why: str) -> None:
    fake = FakeStep(LANGUAGE, device=CPU, **changes)
    found = why_whole(load("eager"), fake)
    assert found is not None and why in found


MANY = dataclasses.replace(CHOICE, slices=(1, 2, 4))


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slices of what is replayed, while a step may run in several numbers of them that cost nothing."""
    recorded = StepForms._recorded
    free = lambda self, form: dataclasses.replace(recorded(self, form), extra_us=0.0)  # noqa: E731
    monkeypatch.setattr(StepForms, "_recorded", free)
    replayed: list[int] = []
    peak = Judge.peak

    def noted(self: Judge, problem: Problem, *args: Any) -> int:
        replayed.append(max((each.slices for each in chunks_of(problem.graph.about)), default=0))
        return peak(self, problem, *args)

    monkeypatch.setattr(Judge, "peak", noted)
    return replayed


@pytest.mark.exhaustive
def test_of_plans_in_many_forms_only_the_one_that_is_taken_is_replayed(forms: list[int]) -> None:
    made = plan(LARGER, budget=tight(LARGER)[0], target="h100-80gb", forms=MANY)
    (chunk,) = chunks_of(made.about)
    assert made.predicted["judged_by"] == "replay"
    assert made.predicted["peak_bytes"] <= made.budget_bytes
    assert set(forms) == {chunk.slices}


@pytest.mark.exhaustive
def test_a_plan_that_needs_more_as_it_runs_gives_way_to_the_next_best(
    forms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight(LARGER)[0]
    expected = plan(LARGER, budget=budget, target="h100-80gb", forms=MANY)
    best = chunks_of(expected.about)
    peak = Judge.peak

    def too_much(self: Judge, problem: Problem, *args: Any) -> int:
        return peak(self, problem, *args) + (budget if chunks_of(problem.graph.about) == best else 0)

    monkeypatch.setattr(Judge, "peak", too_much)
    made = plan(LARGER, budget=budget, target="h100-80gb", forms=MANY)
    assert chunks_of(made.about) != best
    assert made.predicted["judged_by"] == "replay"
    assert made.solver["objective_us"] >= expected.solver["objective_us"] >= made.solver["bound_us"]


@pytest.mark.exhaustive
def test_where_every_faster_plan_needs_more_as_it_runs_the_one_of_least_peak_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak, seen = Judge.peak, set[int]()

    def too_much(self: Judge, problem: Problem, regions: Any, *rest: Any) -> int:
        seen.add(least := least_peak(problem, Limits()).peak_bytes)
        found = peak(self, problem, regions, *rest)
        return found if found <= least else found + (1 << 30)

    monkeypatch.setattr(Judge, "peak", too_much)
    with pytest.raises(Infeasible) as caught:
        plan(LARGER, budget="1KiB", target="h100-80gb", exact=True)
    assert caught.value.minimum_budget_bytes is not None
    budget = int(1.05 * caught.value.minimum_budget_bytes)
    made = plan(LARGER, budget=budget, target="h100-80gb", exact=True)
    assert made.predicted["peak_bytes"] in seen and made.solver["status"] == "feasible"


@pytest.mark.exhaustive
def test_a_search_that_is_interrupted_claims_no_proof_of_forms_that_it_did_not_try(
    forms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight(LARGER)[0]
    best = plan(LARGER, budget=budget, target="h100-80gb", forms=MANY)

    def interrupted(self: StepForms, form: Form) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepForms, "of", interrupted)
    made = plan(LARGER, budget=budget, target="h100-80gb", forms=MANY)
    assert made.solver["interrupted"]
    assert made.solver["objective_us"] > best.solver["objective_us"] >= made.solver["bound_us"]
    assert made.solver["status"] == "feasible"


@pytest.mark.exhaustive
def test_a_form_that_ran_out_of_time_is_not_said_to_be_infeasible(
    forms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss whole is, and so may be coarse slices; of finer ones nothing is known."""
    solve = Study.solve

    def without_time(self: Study, at: StepForm, *about: Any) -> Solution:
        if not at.form.chunks or at.form.chunks[0].slices == 1:
            return solve(self, at, *about)
        raise NoPlanInTime("no plan was found in time.")

    monkeypatch.setattr(Study, "solve", without_time)
    with pytest.raises(NoPlanInTime):
        plan(LARGER, budget="70MiB", target="h100-80gb", forms=MANY)


@pytest.mark.exhaustive
def test_a_region_that_another_form_lacks_is_no_plan_to_begin_from() -> None:
    fake = fake_step(LARGER, find_planning_device("h100-80gb"))
    study = Study(profile_step(fake, find_planning_device("h100-80gb")), PlanRequest(forms=CHOICE), fake)
    assert study.forms is not None
    sliced = study.forms.in_slices(2)
    problem, captured = study.problem(sliced, 1 << 40), study.problem(study.captured, 1 << 40)
    regions = [run.region for run in captured.runs if run.region is not None]
    within_both, reaching = regions[0], max(regions, key=lambda region: region.end)
    assert reaching.end > len(sliced.profile.graph.nodes)
    for region, start in ((within_both, (within_both,)), (reaching, None)):
        begin = study.captured, Solution("by hand", "feasible", (region,))
        assert study._transferred(begin, problem) == start


def test_float16_and_other_executions_leave_the_loss_whole() -> None:
    half = FakeStep(dataclasses.replace(LANGUAGE, autocast=torch.float16), device=CPU)
    assert why_whole(load("eager"), half) is not None
    assert why_whole(load("modules"), FakeStep(LANGUAGE, device=CPU)) is not None
    assert why_whole(load("eager"), FakeStep(LANGUAGE, device=CPU)) is None


@functools.cache
def planned(workload: Workload) -> Plan:
    """A plan for this CPU that cuts the loss alone, whatever MLPs in chunks would cost by the times measured here."""
    place = find_planning_device("cpu")
    fake = fake_step(workload, place)
    profile = profile_step(fake, place)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    least = memory.curve(regions_of(profile)).peak_bytes
    from remat.planning.budget import Budget

    limit = int(0.93 * least)
    alone = dataclasses.replace(CHOICE, most_row_slices=1)
    return plan_profile(profile, Budget(limit, limit), step=fake, forms=alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", [LARGER, MIXED.sized(64)], ids=lambda workload: workload.name)
def test_a_plan_in_slices_validates(workload: Workload) -> None:
    made = planned(workload)
    assert chunks_of(made.about)
    report = validate(workload, made, repeats=1)
    assert report.passed, str(report)
    assert set(report.gradients_near) == {"head.weight", "head.bias"}
    assert not report.gradients_bitwise
    assert all(ratio <= NEAR for ratio in report.gradients_near.values())
    assert report.measured["peak_bytes"] == pytest.approx(made.predicted["peak_bytes"], rel=0.0005)
    assert report.measured["peak_bytes"] <= made.budget_bytes


@pytest.mark.exhaustive
def test_slices_that_round_otherwise_on_this_device_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.planning.forms.round_alike", lambda shape, slices, dtype, device: slices == 1)
    fake = fake_step(LARGER, find_planning_device("cpu"))
    profile = profile_step(fake, find_planning_device("cpu"))
    assert [found.form.chunks[0].slices for found in forms_of(fake, profile, FormChoice(slices=(1, 2)))] == [1]


def test_slices_of_one_size_round_as_all_rows_do_and_are_seen_to() -> None:
    assert round_alike((512, 64, 32), 1, torch.float32, CPU)
    assert round_alike((10**7, 10**5, 10**4), 2, torch.float32, CPU) is None
    assert round_alike((2048, 256, 32), 2, torch.bfloat16, CPU) in (True, False)


@pytest.mark.exhaustive
def test_wrong_gradients_of_a_chunked_plan_fail_its_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the rows is made half as large again: everything before the head trains wrongly."""
    made, run = planned(LARGER), ChunkedLoss.run

    def wrong(self: ChunkedLoss, given: HeadInputs, wanted: tuple[bool, bool, bool]) -> Any:
        losses, of_rows, sums = run(self, given, wanted)
        return losses, None if of_rows is None else of_rows * 1.5, sums

    monkeypatch.setattr(ChunkedLoss, "run", wrong)
    report = validate(LARGER, made, repeats=1)
    assert not report.gradients_equal
    assert not report.passed


@pytest.mark.exhaustive
def test_wrong_sums_of_a_chunked_plan_fail_its_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two slices is off by a ten-thousandth."""
    made, run = planned(LARGER), ChunkedLoss.run

    def wrong(self: ChunkedLoss, given: HeadInputs, wanted: tuple[bool, bool, bool]) -> Any:
        losses, of_rows, sums = run(self, given, wanted)
        if self.slices == 2 and sums.weight is not None:
            sums.weight *= 1.0001
        return losses, of_rows, sums

    monkeypatch.setattr(ChunkedLoss, "run", wrong)
    report = validate(LARGER, made, repeats=1)
    assert not report.gradients_equal
    assert report.gradients_near["head.weight"] > NEAR


@pytest.mark.exhaustive
def test_a_step_that_reads_logits_is_planned_with_its_loss_whole() -> None:
    def reading(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        outputs = model(*given)
        loss: torch.Tensor = outputs["loss"] + 0.0 * outputs["logits"].mean()
        return loss

    workload = dataclasses.replace(LARGER, step=reading)
    made = plan(workload, budget=sum(tight(workload)) // 2, target="h100-80gb")
    assert chunks_of(made.about) == ()


@pytest.mark.exhaustive
def test_a_head_that_takes_more_is_another_graph() -> None:
    def in_double(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return plain(logits.double(), labels)

    model = remat.apply(Language(in_double), planned(LARGER))
    with pytest.raises(PlanMismatch, match="chunked_loss"):
        model(*batch(64, LENGTH))


@pytest.mark.exhaustive
def test_a_saved_plan_in_slices_trains_at_every_batch_size(tmp_path: Any) -> None:
    made = planned(LARGER)
    made.save(tmp_path / "a.plan.json")
    torch.manual_seed(0)
    model = Language(plain)
    untouched = copy.deepcopy(model)
    remat.apply(model, tmp_path / "a.plan.json")
    for samples, length in ((64, LENGTH), (7, LENGTH), (64, 40), (1, 3)):
        torch.manual_seed(samples)
        given = batch(samples, length)
        if length <= 5:
            given[1][:, -1] = 1
        losses = []
        for each in (untouched, model):
            each.zero_grad()
            torch.manual_seed(1)
            loss = each(*given)["loss"]
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for (name, one), other in zip(untouched.named_parameters(), model.parameters(), strict=True):
            assert name.startswith("head.") or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    model.eval()
    assert model(*given)["logits"].shape == (1, 3, CLASSES)


def test_another_loss_than_planned_is_refused_by_name() -> None:
    model = remat.apply(Language(smoothed), planned(LARGER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlanMismatch, match="chunked_loss"):
            model(*batch(64, LENGTH))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 900))
def test_slices_are_all_rows_once_and_nearly_equal(first: int, rows: int, most: int) -> None:
    found = list(cuts(first, first + rows, most))
    assert [row for each in found for row in range(each.start, each.stop)] == list(range(first, first + rows))
    sizes = [each.stop - each.start for each in found]
    unit = next((unit for unit in (ALIGNED_ROWS, ALIGNED_PIECE) if min(sizes) >= 7 * unit), 1)
    assert max(sizes) - min(sizes) <= (2 * unit if unit > 1 else 1)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(64, 900))
def test_pieces_begin_where_compiled_code_copies_nothing(first: int, rows: int, most: int) -> None:
    """A row of an odd number of 16-bit classes is no multiple of 16 bytes; eight of them are."""
    found = list(cuts(first, first + rows, most))
    assert rows < 64 * len(found) or all((each.start - first) * 2 % 16 == 0 for each in found)
