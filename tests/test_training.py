"""Events around a model in real training change nothing under a plan: hooks, exceptions, adapters, odd steps.

Every claim is a function that trains a model and gives back what came of it; it is run on the untouched model and on
one with a plan, under the same seeds, and the tensors must be equal bit for bit. Regions must have been entered.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat.errors import PlanMismatch
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Prediction
from remat.execution.apply import apply, counts_of
from remat.execution.reports import OnLarger
from remat.workload.workload import Workload
from tests import tricky_layers
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.toys import (
    CHOICES,
    CONVNET,
    SHORT,
    VOCAB,
    Transformer,
    graph_of,
    half_saved,
    plan_by_hand,
    plan_for,
    tokens,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD),
]

Came = list[Tensor]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(SHORT)


def built(workload: Workload = SHORT) -> Any:
    torch.manual_seed(0)
    return workload.build()


def batch(samples: int = 4, length: int = 8, seed: int = 100) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return tokens(samples, length)


def backward(model: Any, given: tuple[Tensor, Tensor] | None = None, seed: int = 1) -> None:
    given = given or batch()
    torch.manual_seed(seed)
    model(*given).backward()


def gradients(model: nn.Module) -> Came:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(left: Came, right: Came) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# One function a claim: what is done to a model, and what came of it.


def hooks_of_the_model(model: Any) -> Came:
    seen: Came = []
    model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model.register_forward_hook(lambda module, given, out: out * 2)
    backward(model)
    return gradients(model) + seen


def hooks_of_parameters(model: Any) -> Came:
    seen: Came = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    backward(model)
    return gradients(model) + seen


def optimizer_in_backward(model: Any) -> Came:
    """Each parameter is updated, and its gradient let go, as soon as it is there."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def update(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        backward(model, batch(seed=seed), seed)
    return [p.detach() for p in model.parameters()]


def clipping_and_scheduling(model: Any) -> Came:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in range(2):
        backward(model, seed=seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def double_backward(model: Any) -> Came:
    """A penalty on the gradients."""
    torch.manual_seed(1)
    loss = model(*batch())
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum((grad.square().sum() for grad in first), torch.zeros(())).backward()
    return gradients(model)


def some_gradients(model: Any) -> Came:
    torch.manual_seed(1)
    loss = model(*batch())
    found = torch.autograd.grad(loss, list(model.layers[3].parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*found, *gradients(model)]


def two_forwards_then_backward(model: Any) -> Came:
    torch.manual_seed(1)
    first, second = model(*batch()), model(*batch(seed=7))
    (first + 2 * second).backward()
    return gradients(model)


def backwards_in_the_other_order(model: Any) -> Came:
    torch.manual_seed(1)
    first, second = model(*batch()), model(*batch(seed=7))
    first.backward()
    second.backward()
    return gradients(model)


def a_backward_too_many(model: Any) -> Came:
    torch.manual_seed(1)
    loss = model(*batch())
    loss.backward()
    with pytest.raises(RuntimeError, match=r"a second time|recompute twice"):
        loss.backward()
    model.zero_grad()
    backward(model)
    return gradients(model)


def sizes_that_change(model: Any) -> Came:
    for samples, length in ((4, 8), (2, 8), (4, 5), (1, 3), (4, 8)):
        backward(model, batch(samples, length))
    return gradients(model)


def training_and_evaluation(model: Any) -> Came:
    seen = []
    for seed in range(2):
        backward(model.train(), seed=seed)
        with torch.no_grad():
            seen.append(model.eval()(batch()[0]))
    return gradients(model) + seen


def freezing_between_steps(model: Any) -> Came:
    seen = []
    for trainable in (True, False, True):
        model.layers[0].requires_grad_(trainable)
        model.zero_grad()
        backward(model)
        seen += gradients(model)
    return seen


def another_dropout_rate(model: Any) -> Came:
    for layer in model.layers:
        layer.dropout = 0.5
    backward(model)
    return gradients(model)


def one_layer_in_evaluation(model: Any) -> Came:
    model.layers[1].eval()
    backward(model)
    return gradients(model)


def weights_loaded_between_steps(model: Any) -> Came:
    backward(model)
    model.load_state_dict({name: value + 0.1 for name, value in copy.deepcopy(model.state_dict()).items()})
    model.zero_grad()
    backward(model)
    return gradients(model)


def an_error_in_a_hook_of_backward(model: Any) -> Came:
    def fail(grad: Tensor) -> None:
        raise KeyError("the user's")

    hook = model.layers[1].up.weight.register_hook(fail)
    with pytest.raises(KeyError, match="the user's"):
        backward(model)
    hook.remove()
    model.zero_grad()
    backward(model)
    return gradients(model)


def an_error_in_a_layer(model: Any) -> Came:
    """Before the first step, and again between two."""

    def fail(module: nn.Module, given: Any) -> None:
        raise KeyError("the user's")

    for _ in range(2):
        hook = model.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="the user's"):
            backward(model)
        hook.remove()
        model.zero_grad()
        backward(model)
    return gradients(model)


def an_index_out_of_range(model: Any) -> Came:
    ids, labels = batch()
    with pytest.raises(IndexError):
        model(ids + VOCAB, labels)
    backward(model)
    return gradients(model)


def saves_on_the_host(model: Any) -> Came:
    with torch.autograd.graph.save_on_cpu():
        backward(model)
    return gradients(model)


def looking_for_anomalies(model: Any) -> Came:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            backward(model)
    return gradients(model)


def checkpointed_as_a_whole(model: Any) -> Came:
    """The caller's own checkpoint around the model."""
    torch.manual_seed(1)
    torch.utils.checkpoint.checkpoint(model, *batch(), use_reentrant=False).backward()
    return gradients(model)


def other_parameters(model: Any) -> Came:
    named = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    torch.func.functional_call(model, named, batch()).backward()
    return [p.grad for p in named.values() if p.grad is not None]


CLAIMS = [
    hooks_of_the_model,
    hooks_of_parameters,
    optimizer_in_backward,
    clipping_and_scheduling,
    double_backward,
    some_gradients,
    two_forwards_then_backward,
    backwards_in_the_other_order,
    a_backward_too_many,
    sizes_that_change,
    training_and_evaluation,
    freezing_between_steps,
    another_dropout_rate,
    one_layer_in_evaluation,
    weights_loaded_between_steps,
    an_error_in_a_hook_of_backward,
    an_error_in_a_layer,
    an_index_out_of_range,
    saves_on_the_host,
    looking_for_anomalies,
    checkpointed_as_a_whole,
    other_parameters,
]
# "nested" takes its own turn where a region's inner ones could get out of step.
NESTED = [double_backward, some_gradients, two_forwards_then_backward, an_error_in_a_hook_of_backward]


@pytest.mark.fast(
    "a-backward-too-many",
    "an-error-in-a-hook-of-backward",
    "freezing-between-steps",
    "other-parameters",
    "saves-on-the-host",
    "two-forwards-then-backward",
    "training-and-evaluation",
)
@pytest.mark.filterwarnings("ignore:this is forward number")
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__.replace("_", "-"))
def test_comes_out_as_without_a_plan(claim: Callable[[Any], Came], graph: Graph) -> None:
    expected = claim(built())
    for choice in ("half-saved", "nested") if claim in NESTED else ("half-saved",):
        model = apply(built(), plan_by_hand(graph, CHOICES[choice](graph)))
        assert equal(claim(model), expected), choice
        assert counts_of(model).regions > 0


# Hooks inside the model are part of its graph: a plan is made with them.


class Hooked(Transformer):
    """Each layer with a hook of one kind, as its user would register it; `seen` is what they saw."""

    def __init__(self, kind: str) -> None:
        super().__init__(layers=2)
        self.seen: Came = []
        for layer in self.layers:
            getattr(layer, f"register_{kind}")(getattr(self, kind))

    def forward_hook(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        self.seen.append(out.detach())
        return out * 2

    def forward_pre_hook(self, module: nn.Module, given: Any) -> Any:
        return (given[0] + 1,)

    def full_backward_hook(self, module: nn.Module, into: Any, out: Any) -> None:
        self.seen.append(out[0].clone())

    def full_backward_pre_hook(self, module: nn.Module, out: Any) -> Any:
        return (out[0] * 2,)


@dataclasses.dataclass
class UsersCompiler:
    """A backend of the user's own: how often it compiled, and how often what it gave has run."""

    compiled: int = 0
    ran: int = 0

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph_module(*args)

        return run


@pytest.mark.exhaustive
def test_an_error_leaves_all_that_the_user_compiled(graph: Graph) -> None:
    """A function, and the same class of model without a plan."""
    users = UsersCompiler()
    ours: list[Any] = [lambda x: x.square(), built()]
    square, twin = (torch.compile(each, backend=users) for each in ours)

    def use() -> tuple[int, int]:
        ran = users.ran
        square(torch.ones(2))
        twin(*batch()).backward()
        return users.compiled, users.ran - ran

    compiled, ran = use()
    an_error_in_a_layer(apply(built(), plan_by_hand(graph, CHOICES["every-block"](graph))))
    assert use() == (compiled, ran) and ran >= 2


@pytest.mark.fast("full_backward_pre_hook")
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_layers_that_the_plan_was_made_with_run_once_a_step(kind: str) -> None:
    workload = dataclasses.replace(SHORT, build=lambda: Hooked(kind))
    found = graph_of(workload)
    untouched, model = built(workload), built(workload)
    apply(model, plan_by_hand(found, tricky_layers.largest(found)))
    for each in (untouched, model):
        backward(each)
    assert equal(gradients(model) + model.seen, gradients(untouched) + untouched.seen)
    assert counts_of(model).regions > 0


def test_hooks_that_the_plan_does_not_know_are_named(graph: Graph) -> None:
    model = apply(built(), plan_by_hand(graph, half_saved(graph)))
    backward(model)
    hook = model.layers[1].register_forward_hook(lambda module, given, out: out * 2)  # after the first step
    with pytest.raises(PlanMismatch, match=r"make a plan for this model with its hooks \(on layers.1\)"):
        backward(model)
    hook.remove()
    backward(model)


def test_a_transform_that_nothing_can_be_captured_under_is_refused_by_name(graph: Graph) -> None:
    model = apply(built(), plan_by_hand(graph, half_saved(graph)))
    named = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(PlanMismatch, match=r"this forward made 0; .* torch.func transform"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, batch()))(named)
    backward(model)  # trains as before


# Scaled losses, adapters


def scaled(model: nn.Module, workload: Workload) -> tuple[Came, list[float]]:
    """fp16 autocast with a GradScaler, whose first scale is too large: that step is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    came: Came = []
    scales = []
    for seed in range(4):
        torch.manual_seed(seed)
        given = workload.batch(workload.batch_size, None)
        with torch.autocast("cpu", torch.float16):
            loss = workload.step(model, given)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        came += [grad.nan_to_num(7.0) for grad in (loss.detach(), *gradients(model))]
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return came, scales


@pytest.mark.exhaustive
def test_fp16_with_a_grad_scaler_is_as_without_a_plan() -> None:
    workload = dataclasses.replace(CONVNET, autocast=torch.float16)
    expected, scales = scaled(built(workload), workload)
    model = apply(built(workload), plan_for(workload, half_saved))
    found, found_scales = scaled(model, workload)
    assert equal(found, expected)
    assert found_scales == scales == [2.0**12, 2.0**13, 2.0**14, 2.0**15]
    assert counts_of(model).regions > 0


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank one beside it, and dropout before that, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.randn(layer.out_features, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(F.dropout(x, 0.1, self.training), self.down), self.up)


class WithAdapters(Transformer):
    """A frozen transformer whose projections have adapters; only they are trained."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.requires_grad_(False)
        for layer in self.layers:
            layer.qkv, layer.up = Adapted(layer.qkv), Adapted(layer.up)  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["every-block", "half-saved", "nested"])
def test_adapters_on_a_frozen_model_are_trained_as_without_a_plan(choice: str) -> None:
    workload = dataclasses.replace(SHORT, name="adapted", build=WithAdapters)
    model = apply(built(workload), plan_for(workload, CHOICES[choice]))
    untouched = built(workload)
    for each in (untouched, model):
        backward(each)
    assert len(gradients(model)) == 4 * len(model.layers)
    assert equal(gradients(model), gradients(untouched))
    assert counts_of(model).regions > 0


# Steps that are larger than planned


def test_a_larger_batch_is_told_its_peak(graph: Graph) -> None:
    state = {"parameters": 30, "optimizer state": 60, "buffers": 0, "gradients": 10}
    plan = plan_by_hand(graph, half_saved(graph))
    predicted: Prediction = {**plan.predicted, "peak_bytes": 2**30 + 100, "breakdown": {**state, "activations": 2**30}}
    model = apply(built(), dataclasses.replace(plan, predicted=predicted))
    with pytest.warns(UserWarning, match=r"will exceed the planned 1.00 GiB and be about 2.00 GiB"):
        backward(model, batch(samples=8))


@pytest.mark.exhaustive
def test_more_parameters_to_train_than_planned_are_told_of() -> None:
    workload = dataclasses.replace(SHORT, name="adapted", build=WithAdapters)
    plan = plan_for(workload, half_saved)
    ways: tuple[OnLarger, ...] = ("warn", "refuse")
    for on_larger in ways:
        model = apply(built(workload), plan, on_larger=on_larger)
        backward(model)
        model.zero_grad()
        model.requires_grad_(True)
        if on_larger == "refuse":
            with pytest.raises(PlanMismatch, match=r"parameters require gradients, .* did when the plan was made"):
                backward(model)
        else:
            with pytest.warns(UserWarning, match="parameters require gradients") as caught:
                backward(model)
            assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.exhaustive
def test_dropout_that_was_off_when_planned_is_refused() -> None:
    """There is no room for its mask."""
    found = graph_of(dataclasses.replace(SHORT, build=lambda: Transformer(layers=2, dropout=0.0)))
    model = apply(built(), plan_by_hand(found, tricky_layers.largest(found)))
    with pytest.raises(PlanMismatch, match="draws random numbers, and did not when planned"):
        backward(model)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the flags' other settings
@pytest.mark.parametrize(
    "around",
    [functools.partial(sdpa_kernel, SDPBackend.MATH), functools.partial(torch.backends.mkldnn.flags, enabled=False)],
    ids=["attention", "mkldnn"],
)
def test_kernels_that_a_script_chooses_for_the_forward_are_those_of_its_recomputation(
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Another kernel of attention saves other tensors, and torch's checkpoint refuses these."""

    def step(model: Any, given: Any) -> Tensor:
        with around():
            return SHORT.step(model, given)

    came, build = [], functools.partial(Transformer, dropout=0.0)  # with dropout a CPU has one kernel of attention
    workload = dataclasses.replace(SHORT, build=build, step=step)
    for planned in (False, True):
        model = apply(built(workload), plan_for(workload)) if planned else built(workload)
        step(model, batch()).backward()
        came.append(gradients(model))
    assert equal(*came)
    assert not planned or counts_of(model).regions
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.mkldnn.enabled


def test_autocast_that_comes_later_is_refused(graph: Graph) -> None:
    model = apply(built(), plan_by_hand(graph, half_saved(graph)))
    backward(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanMismatch, match="for no autocast, this forward runs"):
        backward(model)


def test_parameters_of_another_dtype_that_come_later_are_refused(graph: Graph) -> None:
    model = apply(built(), plan_by_hand(graph, half_saved(graph), budget_bytes=1 << 40))
    backward(model)
    with pytest.raises(PlanMismatch, match=r"for parameters of \['float32'\], this model has \['float64'\]"):
        backward(model.double())


# Ten steps; two hundred are in `benchmarks/curves.py`


def test_the_curve_of_loss_over_ten_steps_is_that_of_the_untouched_model(graph: Graph) -> None:
    curves = []
    for planned in (False, True):
        model = apply(built(), plan_by_hand(graph, half_saved(graph))) if planned else built()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for number in range(10):
            given = batch(seed=number)
            torch.manual_seed(number)
            loss = model(*given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 10
