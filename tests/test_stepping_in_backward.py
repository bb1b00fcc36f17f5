"""The optimizer's step inside backward: bitwise the ordinary step, and memory is what was planned."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.cli.commands.options import StepOptions
from remat.costing.planning_device import find_planning_device
from remat.errors import CaptureError, PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.apply import apply
from remat.execution.eager.replay import replay
from remat.formulation.search_space import legal_cuts
from remat.host.optimizer_state import OffloadedState, offload_optimizer
from remat.host.step_in_backward import is_stepped_in_backward, step_in_backward, stepping_of
from remat.planning.profiling import fake_step, profile_step
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.optimizers import MasterWeights
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import WHERE_LATE
from tests.offloads import FAULTS, Fault, late_copies
from tests.test_offloading_optimizers import WIDTH, cases, made_of, optimizer_of, same, trained, untouched
from tests.toys import TRANSFORMER, TRANSFORMER_BF16, every_block, nested, plan_by_hand

STEPPING = TrainingLoop(step_in_backward=True)


# Numbers


@pytest.mark.any_device
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("name", "form"), list(cases()))
def test_every_optimizer_steps_as_without(name: str, form: dict[str, Any], on_host: bool) -> None:
    """Every one of torch.optim in every form; on the host, nothing arrives before it is waited for."""
    plain, state = untouched(name, tuple(form.items()))
    model = made_of()
    optimizer = optimizer_of(name, model, form)
    if on_host:
        OffloadedState(optimizer, late_copies(), 1)
    step_in_backward(optimizer)
    trained(model, optimizer)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert same(state, optimizer.state_dict())


@WHERE_LATE
@pytest.mark.any_device
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "brings back before it is out"])
def test_a_copy_that_nobody_waits_for_is_seen(fault: Fault) -> None:
    _, state = untouched("AdamW", ())
    model = made_of()
    optimizer = optimizer_of("AdamW", model, {})
    OffloadedState(optimizer, late_copies(fault), 1)
    trained(model, step_in_backward(optimizer))
    assert not same(state, optimizer.state_dict())


class Tied(nn.Module):
    """One weight three times, one that is used in every second step, one that never is, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.thrice, self.sometimes, self.never, self.frozen = (nn.Linear(8, 8) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.thrice.weight
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.frozen(self.tied(self.thrice(torch.tanh(self.thrice(x)))))
        return self.sometimes(x) if self.forwards % 2 else x


def trained_tied(step: Callable[[torch.optim.Optimizer], Any], form: dict[str, Any]) -> tuple[Tied, dict[str, Any]]:
    model = Tied()
    (first, *rest) = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1, "weight_decay": 0.3}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, amsgrad=True, **form)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    step(optimizer)
    for number in range(6):
        torch.manual_seed(number)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, optimizer.state_dict()


@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("step", [step_in_backward, lambda each: step_in_backward(offload_optimizer(each))])
def test_tied_and_absent_gradients_groups_schedules_and_loaded_states(step: Any, form: dict[str, Any]) -> None:
    (plain, state), (model, found) = trained_tied(lambda _: None, form), trained_tied(step, form)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert same(state, found) and len(state["state"]) == 5
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_a_new_group_and_a_gradient_that_no_backward_made() -> None:
    models = [made_of(), made_of()]
    for model, stepping in zip(models, (False, True), strict=True):
        first, second, *rest = model.parameters()
        optimizer = torch.optim.Adam([first, second])
        if stepping:
            step_in_backward(optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(1, WIDTH)).square().mean()
            loss.backward()
            return loss.item()

        assert isinstance(optimizer.step(closure), float)
        optimizer.add_param_group({"params": rest, "lr": 0.1})
        trained(model, optimizer, 3)
        optimizer.zero_grad()
        first.grad = torch.ones_like(first)
        optimizer.step()
        first.grad = None
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize("form", [{}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("step", [step_in_backward, lambda each: step_in_backward(offload_optimizer(each))])
def test_parameters_that_change_their_group_are_stepped_as_in_their_new_one(step: Any, form: dict[str, Any]) -> None:
    def run(change: Callable[[list[Any]], None], step: Any) -> nn.Module:
        model = made_of()
        first, second, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first, second]}, {"params": rest, "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, **form)
        step(optimizer)
        trained(model, optimizer, 2)
        change(optimizer.param_groups)
        trained(model, optimizer, 2)
        model.zero_grad()
        return model

    def regrouped(groups: list[Any]) -> None:
        groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5})

    for change in (regrouped, list.reverse, list.pop):
        plain, found = run(change, lambda _: None), run(change, step)
        assert all(map(torch.equal, plain.parameters(), found.parameters())), change


def hook_all(model: nn.Module, clip: Callable[[nn.Parameter], None]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


def test_before_clips_each_gradient_as_a_hook_does() -> None:
    def clip(parameter: nn.Parameter) -> None:
        nn.utils.clip_grad_value_([parameter], 1e-4)

    models = [made_of(), made_of()]
    for model, stepping in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if stepping:
            assert step_in_backward(step_in_backward(optimizer, clip), clip) is optimizer
        else:
            hook_all(model, clip)
        trained(model, optimizer)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_what_is_let_go_of_and_what_is_copied_steps_as_ever() -> None:
    model, plain = made_of(), made_of()
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters()))
    assert all(map(is_stepped_in_backward, model.parameters())) and stepping_of(copy.deepcopy(optimizer)) is None
    stepping = stepping_of(optimizer)
    assert stepping is not None
    stepping.let_go()
    trained(model, optimizer)
    trained(plain, torch.optim.AdamW(plain.parameters()))
    assert all(map(torch.equal, plain.parameters(), model.parameters())) and next(model.parameters()).grad is not None
    del optimizer, stepping
    model.zero_grad()
    step_in_backward(torch.optim.AdamW(model.parameters()))  # nobody holds it
    model(torch.ones(1, WIDTH)).sum().backward()
    assert next(model.parameters()).grad is not None


def test_weights_are_freed_with_their_optimizer() -> None:
    model = made_of()
    trained(model, step_in_backward(torch.optim.AdamW(model.parameters())))
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)


# Refusals


def test_accumulation_is_refused_before_a_weight_changes() -> None:
    model = made_of()
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, WIDTH)).sum().backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UsageError, match="cannot be accumulated over micro-batches"):
        model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_second_optimizer_is_refused_before_a_weight_changes_until_the_first_is_gone() -> None:
    model = made_of()
    first = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    trained(model, first)
    before = [parameter.clone() for parameter in model.parameters()]
    second = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.2))
    with pytest.raises(UsageError, match=r"are stepped in backward by another one too.*No weight has changed"):
        model(torch.ones(1, WIDTH)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    del first
    trained(model, second)
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_learning_rate_that_changes_after_backward_is_refused() -> None:
    model = made_of()
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(UsageError, match="lr of parameter group 0 changed between backward and"):
        optimizer.step()


def test_a_hook_that_came_later_and_changes_the_learning_rate_is_refused() -> None:
    model = made_of()
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters()))

    def warm_up(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    optimizer.register_step_pre_hook(warm_up)
    model(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(UsageError, match="lr of parameter group 0 changed between backward and"):
        optimizer.step()


def test_a_group_that_is_taken_out_after_backward_is_refused() -> None:
    model = made_of()
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.param_groups.pop()
    with pytest.raises(UsageError, match="taken out of the optimizer between backward and"):
        optimizer.step()


def test_a_parameter_that_is_moved_after_backward_is_refused_where_its_settings_differ() -> None:
    model = made_of()
    first, *rest = model.parameters()
    groups: list[Any] = [{"params": [first]}, {"params": rest, "lr": 0.1}]
    optimizer = step_in_backward(torch.optim.AdamW(groups))
    model(torch.ones(1, WIDTH)).sum().backward()
    first_group, second_group = optimizer.param_groups
    first_group["params"].append(second_group["params"].pop())
    with pytest.raises(UsageError, match="lr of parameter group 0 changed between backward and"):
        optimizer.step()


def test_optimizers_that_step_in_backward_may_share_a_frozen_parameter() -> None:
    model = made_of()
    frozen, first, *rest = model.parameters()
    frozen.requires_grad_(False)
    optimizers = [step_in_backward(torch.optim.AdamW([frozen, *own])) for own in ([first], rest)]
    before = [each.clone() for each in (first, *rest)]
    model(torch.ones(1, WIDTH)).sum().backward()
    for each in optimizers:
        each.step()
    assert not any(map(torch.equal, before, (first, *rest)))


def test_a_parameter_that_was_taken_out_may_have_another_optimizer_that_steps_in_backward() -> None:
    model = made_of()
    first, *rest = model.parameters()
    optimizer = step_in_backward(torch.optim.AdamW([{"params": [first]}, {"params": rest}]))
    trained(model, optimizer, 1)
    optimizer.param_groups.pop()
    optimizer.step()
    other, before = step_in_backward(torch.optim.AdamW(rest)), [each.clone() for each in rest]
    model(torch.ones(1, WIDTH)).sum().backward()
    for each in (optimizer, other):
        each.step()
    assert not any(map(torch.equal, before, rest))


class Failing(torch.autograd.Function):
    """Its backward runs out of memory."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError


def test_a_backward_that_failed_is_told_of_before_another_steps() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = step_in_backward(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    settings = copy.deepcopy(optimizer.state_dict())

    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            second(Failing.apply(first(torch.ones(1, 2)))).sum().backward()
        optimizer.zero_grad()

    def train() -> None:
        second(first(torch.ones(1, 2))).sum().backward()

    fail()
    before = [*map(torch.clone, [*first.parameters(), *second.parameters()])]
    with pytest.raises(
        UsageError, match=r": 2 of 4 parameters have stepped already\..* failed, .* checkpoint, or call"
    ):
        train()
    assert all(map(torch.equal, before, [*first.parameters(), *second.parameters()]))
    for go_on in (optimizer.step, lambda: optimizer.load_state_dict(settings)):
        go_on()
        train()
        optimizer.step()
        fail()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_parameters_of_ddp_are_refused_before_a_weight_changes(
    late: bool, static: bool, alone_in_a_group: None
) -> None:
    """Also where the model is wrapped after the call, as `accelerate.prepare` does."""
    model = made_of().cpu()
    before = [*map(torch.clone, model.parameters())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if late:
        step_in_backward(optimizer)
    parallel = DistributedDataParallel(model, static_graph=static)
    step_in_backward(optimizer)
    with pytest.raises(UsageError, match=r"ranks would diverge\. .* No weight has changed"):
        parallel(torch.ones(1, WIDTH)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))


def test_ddp_that_comes_after_the_first_step_is_refused_by_the_next(alone_in_a_group: None) -> None:
    model = made_of().cpu()
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    trained(model, optimizer, 1)
    with pytest.raises(UsageError, match=r"have gradients again, .* Weights have changed"):
        trained(DistributedDataParallel(model), optimizer, 1)


def test_ddp_that_is_gone_or_of_another_model_or_ignores_the_parameters_passes(alone_in_a_group: None) -> None:
    model, other = made_of().cpu(), nn.Linear(2, 2)
    DistributedDataParallel(model)
    both = nn.ModuleDict({"model": model, "other": other})
    names = [name for name, _ in both.named_parameters() if name.startswith("model")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    alive = DistributedDataParallel(both), DistributedDataParallel(other)
    trained(model, step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1)), 2)
    assert all(each.training for each in alive)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_is_refused_before_a_weight_changes(fused: bool) -> None:
    model = made_of().cpu()
    before = [*map(torch.clone, model.parameters())]
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters(), fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match=r"a GradScaler scales gradients .* No weight has changed"):
        scaler.scale(model(torch.ones(1, WIDTH)).sum()).backward()
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_that_comes_after_the_first_step_is_refused_by_the_next(unscales: bool, fused: bool) -> None:
    model, scaler = made_of().cpu(), torch.amp.GradScaler("cpu")
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters(), fused=fused))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(torch.ones(1, WIDTH)).sum()).backward()
    off.step(optimizer)
    scaler.scale(model(torch.ones(1, WIDTH)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match=r"a GradScaler scales gradients .* Weights have changed"):
        scaler.step(optimizer)


def test_an_optimizer_that_is_let_go_of_works_with_a_gradient_scaler() -> None:
    model, scaler = made_of().cpu(), torch.amp.GradScaler("cpu")
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    stepping = stepping_of(optimizer)
    assert stepping is not None
    stepping.let_go()
    scaler.scale(model(torch.full((1, WIDTH), torch.inf)).sum()).backward()
    before = [*map(torch.clone, model.parameters())]
    scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS cannot step in backward: its step may need all"),
        (lambda parameters: torch.optim.SparseAdam(list(parameters)), "SparseAdam cannot .*: its gradients are sparse"),
        (lambda parameters: MasterWeights(parameters, torch.optim.AdamW), "MasterWeights cannot step in backward"),
        (lambda parameters: type("Mine", (torch.optim.AdamW,), {})(parameters), "Mine cannot step in backward"),
        (lambda parameters: torch.optim.SGD(parameters, differentiable=True), "differentiable=True"),
    ],
)
def test_an_optimizer_that_may_need_all_gradients_is_refused(
    make: Callable[[Any], torch.optim.Optimizer], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        step_in_backward(make(made_of().parameters()))


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        ({"accumulation": 2}, "accumulation=2`: gradients of micro-batches are summed before the step"),
        ({"clip_grad_norm": True}, "the norm of all gradients is known when backward has ended"),
        ({"ddp": True}, "ranks sum gradients"),
        ({"ranks": 2, "shard": "zero3"}, "ranks sum gradients"),
    ],
)
def test_a_loop_that_needs_all_gradients_is_refused(loop: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        TrainingLoop(step_in_backward=True, **loop)


# The plan


class Deep(nn.Module):
    """Gradients are most of what a step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


DEEP = Workload("deep", Deep, lambda samples, _: torch.randn(samples, 64), lambda model, x: model(x), batch_size=4)
LAYER_BYTES = 4 * (64 * 64 + 64)


def with_adamw(workload: Workload) -> Workload:
    return dataclasses.replace(workload, optimizer=torch.optim.AdamW)


def recorded(workload: Workload, loop: TrainingLoop, target: str = "cpu") -> tuple[FakeStep, Graph]:
    place = find_planning_device(target)
    step = fake_step(with_adamw(workload), place, loop=loop)
    return step, record(step, alignment_bytes=place.target.alignment_bytes)


@pytest.mark.parametrize("target", ["cpu", "h100-80gb"])
def test_gradients_never_pile_up(target: str) -> None:
    """Seven of eight layers' gradients, and the foreach optimizer's temporaries for as many, are not there."""
    peaks = {}
    for loop in (TrainingLoop(), STEPPING):
        _, graph = recorded(DEEP, loop, target)
        memory = Memory(graph)
        peaks[loop] = memory.curve(()).peak_bytes
        alive = graph.storages.size_bytes[list(graph.parameter_gradients)]
        assert alive.sum() >= 8 * LAYER_BYTES
    least = 7 if target == "cpu" else 14
    kept = 8 * 4 * 64 * 4  # by autograd, for every layer's backward
    assert peaks[TrainingLoop()] - peaks[STEPPING] >= least * LAYER_BYTES - kept


@pytest.mark.fast("deep-none-True")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("choose", [lambda graph: (), every_block, nested], ids=["none", "blocks", "nested"])
@pytest.mark.parametrize("workload", [TRANSFORMER_BF16, DEEP], ids=lambda each: each.name)
def test_the_evaluator_equals_the_replay(workload: Workload, choose: Any, offload: bool) -> None:
    step, graph = recorded(workload, dataclasses.replace(STEPPING, offload_optimizer=offload))
    regions = choose(graph)
    assert graph.op_count == graph.backward_end
    replayed = replay(step, to_refs(graph, regions)) + graph.unseen_bytes
    assert np.array_equal(replayed, Memory(graph).curve(regions).alive_bytes)


@pytest.mark.exhaustive
@pytest.mark.often("toy-transformer-amp-True", "deep-False")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("workload", [DEEP, TRANSFORMER_BF16], ids=lambda each: each.name)
def test_the_measured_peak_is_the_predicted_one(workload: Workload, offload: bool) -> None:
    place, loop = find_planning_device("cpu"), dataclasses.replace(STEPPING, offload_optimizer=offload)
    profile = profile_step(fake_step(with_adamw(workload), place, loop=loop), place)
    plan = plan_by_hand(profile.graph, every_block(profile.graph), profile.costs)
    report = remat.validate(with_adamw(workload), plan, repeats=1)
    assert report.passed and report.gradients_bitwise, str(report)
    measured, predicted = report.measured["peak_bytes"], report.predicted["peak_bytes"]
    assert measured == pytest.approx(predicted, rel=1e-4)


@pytest.mark.exhaustive
def test_training_is_told_where_gradients_pile_up_and_the_plan_counts_on_none() -> None:
    made = with_adamw(TRANSFORMER)
    _, graph = recorded(TRANSFORMER, STEPPING)
    plan = plan_by_hand(graph, every_block(graph))
    assert TrainingLoop.of(plan.about) == STEPPING == TrainingLoop.of(Plan.from_json(plan.to_json()).about)
    model, batch = made.build().train(), made.batch(made.batch_size, made.seq_len)
    apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        made.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.warns(UserWarning, match=r"of \d+ are not: .* Say `remat\.step_in_backward\(optimizer\)` once"):
        step()
    apply(model, plan, on_larger="refuse")
    with pytest.raises(PlanMismatch, match=r"remat\.step_in_backward"):
        for _ in range(2):
            step()
    step_in_backward(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_hooks_of_a_script_that_step_in_backward_are_no_reason_to_warn() -> None:
    made = with_adamw(TRANSFORMER)
    _, graph = recorded(TRANSFORMER, STEPPING)
    model, batch = made.build().train(), made.batch(made.batch_size, made.seq_len)
    apply(model, plan_by_hand(graph, every_block(graph)))
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def stepped(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            made.step(model, batch).backward()


class Biased(nn.Module):
    """Layers that end in the sum with a bias: its gradient is whole before anything of the layer is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(3)])
        self.biases = nn.ParameterList([torch.zeros(16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = layer(torch.tanh(torch.tanh(x))) + bias
        return x.square().mean()


def test_no_region_is_recomputed_with_a_parameter_that_was_stepped() -> None:
    made = dataclasses.replace(DEEP, build=Biased, batch=lambda samples, _: torch.randn(samples, 16))
    _, whole = recorded(made, TrainingLoop())
    step, graph = recorded(made, STEPPING)
    behind = [i + 1 for i, node in enumerate(graph.nodes) if "add" in node.op]
    assert len(behind) == 3 and set(behind) <= set(legal_cuts(whole)) and not set(behind) & set(legal_cuts(graph))
    first, second, _ = behind
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        replay(step, to_refs(graph, (Region(first, second),)))
    step, graph = recorded(made, STEPPING)
    kept = (Region(first, second - 1),)
    replayed = replay(step, to_refs(graph, kept)) + graph.unseen_bytes
    assert np.array_equal(replayed, Memory(graph).curve(kept).alive_bytes)


def test_the_option_has_two_values() -> None:
    assert StepOptions(optimizer_step="backward").loop(TrainingLoop()) == STEPPING
    assert StepOptions(optimizer_step="whole").loop(STEPPING) == TrainingLoop()
    with pytest.raises(UsageError, match="--optimizer-step is whole or backward, not 'backwards'"):
        StepOptions(optimizer_step="backwards").loop(STEPPING)


def test_an_optimizer_that_steps_in_backward_needs_such_a_loop() -> None:
    workload = dataclasses.replace(DEEP, optimizer=lambda each: step_in_backward(torch.optim.SGD(each), print))
    with pytest.raises(UsageError, match=r"TrainingLoop\(step_in_backward=True\)"):
        record(fake_step(workload, find_planning_device("cpu")))


def sgd_with(before: Any, parameters: Any) -> torch.optim.Optimizer:
    return step_in_backward(torch.optim.SGD(parameters), before)


def test_what_before_makes_is_recorded() -> None:
    def with_before(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(torch.cat([parameter.grad, parameter.grad]).chunk(2)[0])

    peaks = []
    for before in (None, with_before):
        make = functools.partial(sgd_with, before)
        made = dataclasses.replace(DEEP, optimizer=make)
        graph = record(fake_step(made, find_planning_device("cpu"), loop=STEPPING))
        peaks.append(Memory(graph).curve(()).peak_bytes)
    assert peaks[1] - peaks[0] >= LAYER_BYTES


def test_a_step_that_accumulates_within_backward_is_refused() -> None:
    def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x).backward()
        return model(x)

    with pytest.raises(UsageError, match="cannot be accumulated"):
        record(fake_step(with_adamw(dataclasses.replace(DEEP, step=twice)), find_planning_device("cpu"), loop=STEPPING))


@pytest.mark.exhaustive
def test_micro_batches_are_not_accumulated_to_fit() -> None:
    found = remat.fit(with_adamw(DEEP), global_batch=8, budget="1GiB", target="h100-80gb", loop=STEPPING, exact=True)
    assert found.best.accumulation == 1
