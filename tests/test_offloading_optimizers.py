"""The optimizer's state on the host: numbers are bitwise those without, and memory is what was planned."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
from remat.costing.planning_device import find_planning_device
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import FROM_HOST, OPTIMIZER_STATE, Graph
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, planned_forward
from remat.execution.eager.replay import replay
from remat.host import optimizer_state
from remat.host.copies import InstantCopies
from remat.host.optimizer_state import OffloadedState, can_be_offloaded, offload_optimizer, offloaded_state
from remat.planning.links import beside_state, link_of, loop_with, state_on_host, state_wait_us
from remat.planning.profiling import fake_step, profile_step
from remat.recording.record import record
from remat.workload.optimizers import MasterWeights, optimizers
from remat.workload.target import TARGETS
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached
from tests.devices import DEVICE, WHERE_LATE
from tests.offloads import FAULTS, Fault, LateCopies, late_copies
from tests.small_models import TEST_SIZES
from tests.toys import SHORT

WIDTH = 40
PARTS = [1, 8000, 1 << 20]  # bytes: every parameter alone, two or three, all of a group together
FORMS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def made_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
    ).to(DEVICE)


def groups_of(model: nn.Module, *, matrices: bool = False) -> list[dict[str, Any]]:
    """Two groups with learning rates of their own."""
    parameters = [p for p in model.parameters() if p.dim() == 2 or not matrices]
    return [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:]}]


def cases() -> Iterator[Any]:
    for name, kind in optimizers().items():
        if name in ("LBFGS", "SparseAdam"):
            continue
        for form in FORMS:
            if all(option in inspect.signature(kind).parameters for option in form):
                yield pytest.param(name, form, id="-".join([name, *(f"{k}={v}" for k, v in form.items())]))


def optimizer_of(name: str, model: nn.Module, form: dict[str, Any]) -> torch.optim.Optimizer:
    extra: dict[str, Any] = {"SGD": {"lr": 1e-3, "momentum": 0.9}}.get(name, {})
    return optimizers()[name](groups_of(model, matrices=name == "Muon"), **form, **extra)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        x, y = torch.randn(16, WIDTH).to(DEVICE), torch.randn(16, WIDTH).to(DEVICE)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def same(left: Any, right: Any) -> bool:
    """Bit by bit, whatever is nested in what."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@functools.cache
def untouched(name: str, form: tuple[tuple[str, bool], ...]) -> tuple[nn.Module, dict[str, Any]]:
    model = made_of()
    optimizer = optimizer_of(name, model, dict(form))
    trained(model, optimizer)
    return model, optimizer.state_dict()


@pytest.mark.any_device
@pytest.mark.parametrize("part_bytes", PARTS)
@pytest.mark.parametrize(("name", "form"), list(cases()))
def test_every_optimizer_steps_as_without(name: str, form: dict[str, Any], part_bytes: int) -> None:
    """Every one of torch.optim in every form; nothing arrives before it is waited for, what is let go of is poison."""
    plain, state = untouched(name, tuple(form.items()))
    model = made_of()
    optimizer = optimizer_of(name, model, form)
    OffloadedState(optimizer, late_copies(), part_bytes)
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
    trained(model, optimizer)
    assert not same(state, optimizer.state_dict())


class Counting(InstantCopies):
    """Bytes of state on the device that came from the host, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = self.came = 0

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.now += elements * dtype.itemsize
        self.came += elements * dtype.itemsize
        self.most = max(self.most, self.now)
        return super().room_for(elements, dtype, device)

    def let_go(self, flat: torch.Tensor) -> None:
        self.now -= flat.nbytes


def test_no_more_than_two_parts_are_on_the_device() -> None:
    model = made_of()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 2])
    state = OffloadedState(optimizer, part_bytes=1)
    trained(model, optimizer, 1)
    state.copies = copies = Counting()
    trained(model, optimizer, 2)
    of_a_part = 2 * WIDTH * WIDTH * 4  # two moments of a matrix
    assert copies.now == 0 and copies.most == 2 * of_a_part
    assert {each.dim() for each in state.on_device()} == {0}  # step counters


# What stands around a step


def test_hooks_and_closures_run_once_a_step_and_move_nothing() -> None:
    model, seen = made_of(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    state = OffloadedState(optimizer, part_bytes=1)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    trained(model, optimizer, 1)
    seen.clear()
    state.copies = copies = Counting()

    def closure() -> float:
        seen.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(1, WIDTH)).square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) is not None
    assert seen == ["before", "closure", "after"]
    assert copies.came == state.host_bytes


def test_a_hook_that_changes_gradients_is_heard_by_every_part() -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], 1e-4)

    models = [made_of(), made_of()]
    for model, offloaded in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        optimizer.register_step_pre_hook(clip)
        trained(model, optimizer)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("offloaded_first", [True, False])
def test_a_hook_that_changes_groups_is_heard(pre: bool, offloaded_first: bool) -> None:
    def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        counts.append(len(optimizer.state_dict()["param_groups"]))

    models, counts = [made_of(), made_of()], list[int]()
    rates = []
    for model, offloaded in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if offloaded and offloaded_first:
            OffloadedState(optimizer, LateCopies(), 1)
        (optimizer.register_step_pre_hook if pre else optimizer.register_step_post_hook)(decay)
        if offloaded and not offloaded_first:
            OffloadedState(optimizer, LateCopies(), 1)
        trained(model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert rates[0] == rates[1] and set(counts) == {1}


@pytest.mark.parametrize("offloaded_first", [True, False])
def test_a_scheduler_may_be_built_before_or_after(offloaded_first: bool) -> None:
    models = [made_of(), made_of()]
    for model, offloaded in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(groups_of(model))
        if offloaded and offloaded_first:
            offload_optimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        if offloaded and not offloaded_first:
            offload_optimizer(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                trained(model, optimizer, 1, step)
                scheduler.step()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_a_gradient_scaler_skips_a_step_as_ever() -> None:
    model = made_of()
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trained(model, optimizer, 1)
    before = copy.deepcopy(model)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, WIDTH), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not all(map(torch.equal, before.parameters(), model.parameters()))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_saved_state_is_loaded_and_training_goes_on_as_if_nothing_had_been() -> None:
    plain, model = made_of(), made_of()
    optimizer = torch.optim.AdamW(groups_of(plain))
    trained(plain, optimizer, 6)
    first = offload_optimizer(torch.optim.AdamW(groups_of(model)))
    trained(model, first, 3)
    saved = copy.deepcopy(first.state_dict())
    second = offload_optimizer(torch.optim.AdamW(groups_of(model)))
    second.load_state_dict(saved)
    found = offloaded_state(second)
    assert found is not None and found.host_bytes == 2 * 3 * WIDTH * WIDTH * 4
    trained(model, second, 3, begin=3)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert same(optimizer.state_dict(), second.state_dict())


def test_state_that_is_there_moves_when_it_is_asked_to() -> None:
    model, plain = made_of(), made_of()
    for each, offloaded in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(each.parameters())
        trained(each, optimizer, 2)
        if offloaded:
            found = offloaded_state(offload_optimizer(offload_optimizer(optimizer)))
            assert found is not None and found.host_bytes == 2 * 3 * WIDTH * WIDTH * 4
        trained(each, optimizer, 2, begin=2)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model, plain = made_of(), made_of()
    for each, offloaded in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(each.parameters())
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        trained(each, optimizer, 2)
        next(each.parameters()).requires_grad_(False)
        next(each.parameters()).grad = None
        trained(each, optimizer, 2, begin=2)
        optimizer.add_param_group({"params": [extra := nn.Parameter(torch.ones(WIDTH, WIDTH))]})
        extra.grad = torch.ones_like(extra)
        optimizer.step()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_step_that_fails_leaves_an_optimizer_that_steps() -> None:
    class Once(LateCopies):
        """The second time it is asked for room there is none."""

        failing, asked, begun, ended = True, 0, 0, 0

        def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.asked += 1
            if self.failing and self.asked == 2:
                raise MemoryError
            return super().room_for(elements, dtype, device)

        def back(self, host: Any, offset: int, flat: torch.Tensor) -> Callable[[], None]:
            self.begun += 1
            return super().back(host, offset, flat)

        def abandon(self, copy: Callable[[], None]) -> None:
            self.ended += 1
            super().wait(copy)

    plain, model = made_of(), made_of()
    trained(plain, other := torch.optim.AdamW(plain.parameters()), 3)
    optimizer = torch.optim.AdamW(model.parameters())
    OffloadedState(optimizer, copies := Once(), 1)
    trained(model, optimizer, 1)
    with pytest.raises(MemoryError):
        trained(model, optimizer, 1, begin=1)
    assert copies.begun == copies.ended == 1  # nobody writes to memory that was let go of
    assert len(optimizer.state_dict()["param_groups"]) == 1
    optimizer.param_groups[0]["lr"] = 1e-3
    copies.failing = False
    optimizer.step()
    trained(model, optimizer, 1, begin=2)
    assert same(other.state_dict(), optimizer.state_dict())
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_closure_that_fails_leaves_the_optimizer_as_it_was() -> None:
    def failing() -> float:
        raise ZeroDivisionError

    plain, model = made_of(), made_of()
    for each, offloaded in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(each.parameters())
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        trained(each, optimizer, 2)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(failing)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.add_param_group({"params": [extra := nn.Parameter(torch.ones(WIDTH, WIDTH))]})
        extra.grad = torch.ones_like(extra)
        trained(each, optimizer, 2, begin=2)
        assert len(saved["param_groups"]) == 1 and len(optimizer.param_groups) == 2
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_closure_may_load_a_state() -> None:
    plain, model = made_of(), made_of()
    for each, offloaded in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(each.parameters())
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        trained(each, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        trained(each, optimizer, 2, begin=1)
        saved["param_groups"][0]["lr"] = 0.3

        def closure(optimizer: torch.optim.Optimizer = optimizer, saved: Any = saved) -> float:
            optimizer.load_state_dict(saved)
            return 0.0

        optimizer.step(closure)
        trained(each, optimizer, 1, begin=3)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_state_that_somebody_holds_stays_what_it_was() -> None:
    """Swapped out and in again: what is loaded gets places of its own on the host."""
    model = made_of()
    optimizer = torch.optim.AdamW(model.parameters())
    OffloadedState(optimizer, LateCopies(), 1)
    trained(model, optimizer, 1)
    mine = optimizer.state_dict()
    kept = copy.deepcopy(mine)
    other = copy.deepcopy(mine)
    for state in other["state"].values():
        state["exp_avg"].fill_(7.0)
    optimizer.load_state_dict(other)
    assert same(kept, mine)
    optimizer.load_state_dict(mine)
    assert same(kept, optimizer.state_dict())


def test_state_of_other_strides_is_kept_in_its_own() -> None:
    models = [nn.Conv2d(8, 8, 3) for _ in range(2)]
    for model in models:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models[1].load_state_dict(models[0].state_dict())
    for model, offloaded in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters())
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(2, 8, 6, 6)).square().mean().backward()
            optimizer.step()
            if step == 1:
                state = optimizer.state[model.weight]
                state["exp_avg"] = state["exp_avg"].contiguous() * 2
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_a_parameter_that_is_listed_twice_is_stepped_twice() -> None:
    plain, model = made_of(), made_of()
    for each, offloaded in ((plain, False), (model, True)):
        weight = next(each.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's
            optimizer = torch.optim.AdamW([weight, weight])
        if offloaded:
            OffloadedState(optimizer, LateCopies(), 1)
        trained(each, optimizer)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_what_is_gone_from_the_state_is_gone_from_the_host() -> None:
    model = made_of()
    optimizer = torch.optim.AdamW(model.parameters())
    state = OffloadedState(optimizer, part_bytes=1)
    trained(model, optimizer, 1)
    full = state.host_bytes
    optimizer.state.clear()
    trained(model, optimizer, 1)
    assert state.host_bytes == full
    optimizer.state.clear()
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    assert state.host_bytes == 0


def test_an_optimizer_is_freed_with_its_last_reference() -> None:
    model = made_of()
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters()))
    trained(model, optimizer, 1)
    found = weakref.ref(offloaded_state(optimizer))
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.LBFGS(parameters),
        lambda parameters: torch.optim.SparseAdam(list(parameters)),
        lambda parameters: MasterWeights(parameters, torch.optim.AdamW),
        lambda parameters: type("Mine", (torch.optim.AdamW,), {})(parameters),
    ],
    ids=["LBFGS", "SparseAdam", "MasterWeights", "Mine"],
)
def test_an_optimizer_that_may_need_all_parameters_at_once_is_refused(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    optimizer = make(made_of().parameters())
    assert not can_be_offloaded(optimizer)
    with pytest.raises(UsageError, match=f"{type(optimizer).__name__} cannot have its state on the host"):
        offload_optimizer(optimizer)


# The plan


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedState.__init__, "__defaults__", (None, 1))


def workload() -> Workload:
    return dataclasses.replace(SHORT, optimizer=torch.optim.AdamW)


def recorded(loop: TrainingLoop, target: str = "cpu") -> tuple[Any, Graph]:
    step = fake_step(workload(), find_planning_device(target), loop=loop)
    return step, record(step, alignment_bytes=TARGETS[target].alignment_bytes if target != "cpu" else 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("target", ["cpu", "h100-80gb"])
def test_the_state_is_off_the_device_until_the_optimizer_runs(target: str) -> None:
    _, before = recorded(TrainingLoop(), target)
    step, after = recorded(TrainingLoop(offload_optimizer=True), target)
    moved = before.fixed_bytes[OPTIMIZER_STATE] - after.fixed_bytes.get(OPTIMIZER_STATE, 0)
    lower = (Memory(g).curve(()).alive_bytes[: g.backward_end] for g in (before, after))
    assert moved > 0 and set(np.subtract(*lower).tolist()) == {moved}
    curve = Memory(after).curve(()).alive_bytes
    assert np.array_equal(replay(step, (), alignment_bytes=512 if target != "cpu" else 1) + after.unseen_bytes, curve)
    come = sum(kind.moved_bytes for kind in (after.kinds[k] for k in after.op_kind) if kind.name == FROM_HOST)
    assert come == sum(
        size for p in after.parameters for size in p.state_tensors if size >= optimizer_state.SMALL_BYTES
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_measured_peak_is_the_predicted_one(accumulation: int) -> None:
    loop = TrainingLoop(offload_optimizer=True, accumulation=accumulation)
    profile = profile_step(fake_step(workload(), find_planning_device("cpu"), loop=loop), find_planning_device("cpu"))
    plan = remat.plan(
        workload(), target="cpu", loop=loop, budget=profile.peak_without_checkpointing * 9 // 10, exact=True
    )
    report = remat.validate(workload(), plan, repeats=1)
    assert report.passed, str(report)


@pytest.mark.fast("Adagrad", "NAdam")
@pytest.mark.parametrize("name", [name for name in optimizers() if name not in ("LBFGS", "SparseAdam", "Muon")])
def test_every_optimizer_is_recorded_as_it_runs(name: str) -> None:
    """Also those that make their state before the first step."""
    kind: Any = optimizers()[name]
    make = functools.partial(kind, lr=1e-3)
    step = fake_step(
        dataclasses.replace(SHORT, optimizer=make),
        find_planning_device("cpu"),
        loop=TrainingLoop(offload_optimizer=True),
    )
    graph = record(step)
    left = [p.state_bytes for p in graph.parameters]
    assert graph.fixed_bytes.get(OPTIMIZER_STATE, 0) <= sum(left)
    assert np.array_equal(replay(step, ()) + graph.unseen_bytes, Memory(graph).curve(()).alive_bytes)


def test_a_loop_is_taken_at_its_word_and_so_is_none() -> None:
    loop = TrainingLoop(offload_optimizer=True)
    assert planned(loop=loop, host_budget="1GiB").predicted["state_host_bytes"] > 0
    assert "state_host_bytes" not in planned(loop=loop, offload="none").predicted
    with pytest.raises(UsageError, match="is not positive"):
        planned(loop=loop, host_budget=-1)


def test_the_wait_is_the_state_over_the_link() -> None:
    _, graph = recorded(TrainingLoop(offload_optimizer=True), "h100-80gb")
    target = TARGETS["h100-80gb"]
    from remat.costing.costs import estimated_costs

    moved = sum(kind.moved_bytes for kind in (graph.kinds[k] for k in graph.op_kind) if kind.name == FROM_HOST)
    count = sum(graph.kinds[k].name == FROM_HOST for k in graph.op_kind)
    expected = moved / target.host_bytes_per_us + count * target.launch_us
    assert state_wait_us(graph, estimated_costs(graph, target)) == pytest.approx(expected)


@cached
def planned(**options: Any) -> Plan:
    return remat.plan(workload(), target="h100-80gb", budget="1GiB", exact=True, **options)


def test_a_plan_says_what_lies_on_the_host_and_older_readers_refuse_it() -> None:
    plan = planned(offload="optimizer")
    assert plan.predicted["state_host_bytes"] > 0 and plan.predicted["state_wait_us"] > 0
    assert TrainingLoop.of(plan.about).offload_optimizer
    assert plan.to_json()["version"] == 4 and planned().to_json()["version"] == 3
    assert Plan.from_json(plan.to_json()) == plan


def test_the_host_budget_is_for_the_state_too() -> None:
    with pytest.raises(UsageError, match="host budget is"):
        planned(offload="optimizer", host_budget="4KiB")
    _, graph = recorded(TrainingLoop(offload_optimizer=True), "h100-80gb")
    link = link_of(find_planning_device("h100-80gb"), "activations,optimizer", 1 << 30)
    left = beside_state(link, graph, 1 << 30)
    assert left is not None and left.host_bytes == (1 << 30) - state_on_host(graph)


@pytest.mark.parametrize("offload", ["optimiser", "none,optimizer", "activations;optimizer"])
def test_an_unknown_offload_is_refused(offload: str) -> None:
    with pytest.raises(UsageError, match="offload is activations, optimizer"):
        planned(offload=offload)


def test_shards_and_offload_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="shared by `shard=` already"):
        TrainingLoop(offload_optimizer=True, ranks=2, shard="zero1")
    assert loop_with(None, None) is None


@pytest.mark.exhaustive
def test_training_is_told_where_the_state_is_not_where_the_plan_counts_on_it() -> None:
    torch.manual_seed(0)
    made = workload()
    loop = TrainingLoop(offload_optimizer=True)
    plan = remat.plan(made, target="cpu", loop=loop, budget="1GiB", exact=True)
    model, batch = made.build().train(), made.batch(made.batch_size, made.seq_len)
    apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        made.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.warns(UserWarning, match=r"remat\.offload_optimizer\(optimizer\)"):
        step()
    offload_optimizer(optimizer)
    planned_forward(model).reports.made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_no_ready_made_optimizer_is_forgotten() -> None:
    """The ready-made models are all made with an optimizer whose state can be offloaded."""
    for name, build in TEST_SIZES.items():
        make = build().optimizer
        assert make is not None and can_be_offloaded(make([nn.Parameter(torch.ones(2, 2))])), name
