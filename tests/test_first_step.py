"""The first step under a plan is held to the model: what spoils a plan is caught, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat.chunking.chunked_loss import ChunkedLoss, Watch
from remat.costing.device_allocator import measure_peak
from remat.costing.planning_device import find_planning_device
from remat.errors import CaptureError, FirstStepMismatch
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import CHUNKS, chunks_of
from remat.evaluation.graph import FORWARD_ALONE
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution import first_step as verification
from remat.execution.apply import apply, counts_of, planned_forward
from remat.execution.digests import LONGEST, digest_of, in_memory_order
from remat.execution.eager.region_tape import RegionWatch
from remat.execution.first_step import FirstStep
from remat.execution.modules.search_space import find_module_space
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.step_contexts import autocast_context
from remat.units import MIB
from remat.workload.workload import Workload
from tests import tricky_layers
from tests.spoiling import SPOILT
from tests.studies import plan_profile
from tests.toys import (
    CHOICES,
    CPU,
    TRANSFORMER,
    WORKLOADS,
    Block,
    Transformer,
    every_block,
    graph_of,
    plan_by_hand,
    plan_for,
    planned_graphs,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

Step = Callable[[nn.Module, Any], Tensor]

LARGER = dataclasses.replace(
    TRANSFORMER, build=functools.partial(Transformer, layers=4, width=64), batch_size=16, seq_len=64
)


# A module that is compiled: the plan runs it uncompiled, says so, and is held to that


def rounding(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Stand for a compiler whose code has other numbers."""
    return lambda *args: [value * 1.001 for value in graph_module(*args)]


def _rows(samples: int, length: int | None) -> Tensor:
    return torch.linspace(0, 1, 8 * samples).view(samples, 8)


def _compiled_within() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].compile(backend=rounding)
    return model


def test_a_compiled_module_runs_uncompiled_and_is_named() -> None:
    workload = Workload("within", _compiled_within, _rows, lambda model, x: model(x).sum(), batch_size=4)
    plan = plan_by_hand(graph_of(workload), ())
    model = apply(workload.build(), plan)
    with pytest.warns(UserWarning, match=r"are compiled \(0\), and under the plan they run uncompiled"):
        found = model(_rows(4, None))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(found, remat.remove(model)(_rows(4, None)))


# Losses in slices: a loss outside of the model, under a planned step

WIDTH, CLASSES, LENGTH, SAMPLES = 16, 640, 48, 24


class Language(nn.Module):
    """Ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList([Block(WIDTH, 0.1) for _ in range(2)])

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(ids))
        return logits


class Warming(Language):
    """Scales by a number that it counts."""

    steps = 0

    def hidden(self, ids: Tensor) -> Tensor:
        self.steps += 1
        return super().hidden(ids) * min(1.0, self.steps / 100)


def ids_and_labels(samples: int, length: int | None) -> dict[str, Tensor]:
    ids = torch.randint(CLASSES, (samples, length or LENGTH))
    return {"ids": ids, "labels": ids.roll(-1, dims=1)}


def loss_outside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).view(-1, CLASSES), batch["labels"].view(-1))


def losses_of_one_head(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Two losses, whose logits are of one head and of other rows."""
    x, labels = model.hidden(batch["ids"]), batch["labels"].view(-1)
    one, other = (model.head(rows).view(-1, CLASSES) for rows in (x, x.roll(1, dims=1)))
    return F.cross_entropy(one, labels) + F.cross_entropy(other, labels)


def loss_after_sampling(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss of ids that the model chose itself, as in scheduled sampling."""
    with torch.no_grad():
        ids = model.head(model.hidden(batch["ids"])).argmax(-1)
    return F.cross_entropy(model.head(model.hidden(ids)).view(-1, CLASSES), batch["labels"].view(-1))


OUTSIDE = Workload("outside", Language, ids_and_labels, loss_outside, batch_size=SAMPLES, seq_len=LENGTH)


@functools.cache
def in_slices(step: Callable[[Any, Any], Tensor] = loss_outside, build: Callable[[], nn.Module] = Language) -> Plan:
    """With twice the budget, so that there is room to verify it."""
    place = find_planning_device("cpu")
    workload = dataclasses.replace(OUTSIDE, step=step, build=build).with_planned_step()
    fake = fake_step(workload, place)
    profile = profile_step(fake, place)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    budget = int(0.93 * memory.curve(tuple(CHOICES["every-block"](profile.graph))).peak_bytes)
    choice = FormChoice(slices=(2,), most_row_slices=0, worth=0.0)
    plan = plan_profile(profile, Budget(budget, budget), step=fake, forms=choice)
    assert chunks_of(plan.about)
    return dataclasses.replace(plan, budget_bytes=2 * budget)


# How a plan of each kind is made, and trained under


@functools.cache
def of_modules(workload: Workload) -> Plan:
    graph = graph_of(workload)
    modules = [m for m in find_module_space(graph).modules or () if m[2].count(".") == 1]
    regions = tuple(Region(first, end) for first, end, _ in modules)
    refs = to_refs(graph, regions, find_module_space(graph).modules)
    return dataclasses.replace(plan_by_hand(graph, regions), regions=refs, execution="modules")


def planned(workload: Workload, choose: str, **options: Any) -> tuple[nn.Module, Step]:
    """A model and its step under a plan."""
    torch.manual_seed(0)
    if choose == "slices":
        return Language().train(), remat.planned_step(loss_outside, in_slices(), **options)
    plan = of_modules(workload) if choose == "modules" else plan_for(workload, CHOICES[choose])
    return apply(workload.build().train(), plan, **options), workload.step


def step(model: nn.Module, run: Step, workload: Workload, seed: int = 1) -> None:
    torch.manual_seed(seed)
    batch = workload.batch(workload.batch_size, workload.seq_len)
    with autocast_context(CPU, workload.autocast):
        loss = run(model, batch)
    loss.backward()


LIKE_OTHERS = {  # caught by the same comparison as one that is left
    *("stale-constant", "queries-for-keys", "labels-of-ids", "other-epsilon", "other-rate"),
    *("saved-of-another-region-amp", "drawn-anew-nested", "drawn-anew-after-a-saved-one", "drifted-input-nested"),
}


def of(name: str) -> Workload:
    return OUTSIDE if SPOILT[name].choose == "slices" else SPOILT[name].workload


@pytest.mark.fast(*(name for name in SPOILT if name not in LIKE_OTHERS))
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_plan_is_caught_in_its_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SPOILT[name].spoil(monkeypatch)
    model, run = planned(SPOILT[name].workload, SPOILT[name].choose)
    with pytest.raises(FirstStepMismatch, match="verify_first_step=False"):
        step(model, run, of(name))


@pytest.mark.fast("swapped-weights", "drawn-anew", "counted-twice", "modules-with-other-inputs", "slices-scaled")
@pytest.mark.parametrize("name", SPOILT)
def test_nothing_else_notices_a_spoilt_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SPOILT[name].spoil(monkeypatch)
    model, run = planned(SPOILT[name].workload, SPOILT[name].choose, verify_first_step=False)
    step(model, run, of(name))
    assert any(p.grad is not None for p in model.parameters())


# No trace, no false alarm


def trained(model: nn.Module, run: Step, workload: Workload) -> list[Tensor]:
    """Losses, gradients, buffers and the stream of random numbers of three steps with an evaluation between."""
    found: list[Tensor] = []
    for number in range(3):
        step(model, run, workload, seed=number)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [*(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
        if number == 0:
            model.eval()
            with torch.no_grad():
                run(model, workload.batch(2, workload.seq_len))
            model.train()
    return found


@pytest.mark.fast("transformer-amp-nested", "convnet-modules", "transformer-half-saved", "outside-slices")
@pytest.mark.parametrize(
    ("workload", "choose"),
    [
        *(
            pytest.param(workload, choose, id=f"{name}-{choose}")
            for name, workload in WORKLOADS.items()
            for choose in (*CHOICES, "modules")
        ),
        pytest.param(OUTSIDE, "slices", id="outside-slices"),
    ],
)
def test_the_check_leaves_no_trace(workload: Workload, choose: str) -> None:
    without = trained(*planned(workload, choose, verify_first_step=False), workload)
    found = trained(*planned(workload, choose), workload)
    assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True))


class Remembering(nn.Module):
    """Keeps state in attributes, a list, a counter, a generator of its own, and a table that a hook writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.generator = torch.Generator().manual_seed(7)
        self.memory, self.seen, self.calls = torch.zeros(8), list[Tensor](), 0
        self.counts: dict[str, int] = {"hooked": 0}
        self.layers[0].register_forward_hook(self._noted)

    def _noted(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.counts["hooked"] += 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def kept(model: Remembering) -> tuple[Any, ...]:
    return model.calls, model.counts["hooked"], len(model.seen), model.memory.clone(), model.generator.get_state()


class Aside(torch.autograd.Function):
    """A function outside of the graph: it runs unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Remembering) -> Tensor:
        model.calls += 1
        model.seen.append(x.detach().mean())
        model.memory = 0.5 * model.memory + x.detach().mean(0)
        return x + torch.rand(8, generator=model.generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_state_that_a_forward_keeps_goes_on_as_if_it_had_run_once() -> None:
    model = Remembering().train()

    def forward(x: Tensor) -> Tensor:
        return model(Aside.apply(x, model))

    def planned_forward() -> Tensor:
        found.append(kept(model))
        return forward(x)

    found: list[tuple[Any, ...]] = []
    x = torch.randn(4, 8)
    before = kept(model)
    first_step_of(model).run(0, planned_forward, forward, ((x,), {}), lambda: False)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found[0], before, strict=True))
    assert (model.calls, len(model.seen), model.counts) == (1, 1, {"hooked": 1})


def test_a_forward_that_takes_values_of_an_iterator_runs_once() -> None:
    model = Remembering().train()
    turns = itertools.cycle([1.0, 2.0])
    model.layers[1].register_forward_hook(lambda module, given, out: out * next(turns))
    x = torch.ones(4, 8)
    with pytest.warns(UserWarning, match="not verified: a forward more would change `.*turns` of the model for good"):
        first_step_of(model).run(0, lambda: model(x), model, ((x,), {}), lambda: False)
    assert next(turns) == 2.0


class Following(nn.Module):
    """A second layer that a forward moves towards the first; it also moves one that learns."""

    def __init__(self, follow: Callable[[Following], None]) -> None:
        super().__init__()
        self.ours, self.theirs, self.mean = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.follow(self)
        return (self.ours(x) * self.theirs(x) * self.mean(x)).mean()


def in_place(model: Following) -> None:
    model.theirs.weight.mul_(0.9).add_(model.ours.weight, alpha=0.1)
    model.mean.weight.view(-1)[3] += 1.0


def by_data(model: Following) -> None:
    model.theirs.weight.data = model.theirs.weight.data * 0.9 + model.ours.weight.data * 0.1


def exchanged(model: Following) -> None:
    model.theirs.weight.data, model.mean.weight.data = model.mean.weight.data, model.theirs.weight.data


def all_at_once(model: Following) -> None:
    torch._foreach_lerp_([p.data for p in model.theirs.parameters()], [p.data for p in model.ours.parameters()], 0.1)


def both(model: Following) -> None:
    in_place(model)
    by_data(model)
    in_place(model)


@pytest.mark.parametrize("follow", [in_place, by_data, exchanged, all_at_once, both])
def test_parameters_that_a_forward_writes_into_are_written_once(follow: Callable[[Following], None]) -> None:
    model = Following(follow).train()
    before, tensors = copy.deepcopy(model), list(model.parameters())
    kept = [p.data_ptr() for p in tensors]

    def planned_forward() -> Tensor:
        for parameter, was in zip(model.parameters(), before.parameters(), strict=True):
            assert torch.equal(parameter, was)
        assert [p.data_ptr() for p in model.parameters()] == kept
        return model(x)

    x = torch.randn(4, 8)
    loss = first_step_of(model).run(0, planned_forward, model, ((x,), {}), lambda: False)
    assert torch.equal(loss, before(x))
    assert all(torch.equal(p, was) for p, was in zip(tensors, before.parameters(), strict=True))


def first_step_of(model: nn.Module, **changes: Any) -> FirstStep:
    plan = dataclasses.replace(plan_for(TRANSFORMER), **changes)
    return FirstStep(model, plan, RegionWatch(), Watch(), is_on=True)


def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Takes the labels out of the batch, and writes into what is left of it, as steps do."""
    labels = batch.pop("labels")
    loss = F.cross_entropy(model(batch["ids"]).view(-1, CLASSES), labels.view(-1))
    batch["ids"].zero_()
    return loss


def test_a_step_may_take_its_batch_apart() -> None:
    given = ids_and_labels(SAMPLES, LENGTH)
    before = {name: tensor.clone() for name, tensor in given.items()}
    model = Language().train()

    def planned_step() -> Tensor:
        assert given.keys() == before.keys()
        assert all(torch.equal(given[name], before[name]) for name in before)
        return popping(model, given)

    first_step_of(model).run(0, planned_step, lambda batch: popping(model, batch), ((given,), {}), lambda: False)
    assert set(given) == {"ids"} and not given["ids"].any()


def test_it_costs_one_forward_and_once() -> None:
    model, run = planned(TRANSFORMER, "every-block")
    forward, untouched = planned_graphs(model), list[int]()
    alone = forward._untouched

    def counted(*args: Any, **kwargs: Any) -> Any:
        untouched.append(1)
        return alone(*args, **kwargs)

    forward._untouched = counted  # type: ignore[method-assign]
    for seed in range(3):
        step(model, run, TRANSFORMER, seed)
    assert len(untouched) == 1 and not forward.first_step._is_due(0)


def test_the_check_leaves_autocasts_copies_of_weights_to_the_next_call() -> None:
    """The calls of a step share them, and their gradients add up in 16 bits."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() + model(2 * batch).square().mean()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))

    twice = Workload("twice", build, lambda n, _: torch.ones(n, 16), step, 32, autocast=torch.bfloat16)
    graph = record(fake_step(twice, find_planning_device("cpu")))
    plan = plan_by_hand(graph, every_block(graph))
    batch, found = torch.randn(32, 16), []
    for planned in (False, True):
        model = apply(build(), plan) if planned else build()
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(model, batch)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


class Noted(torch.autograd.Function):
    """Its input; its backward writes to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        return 1 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.add_(gradient.abs().sum())
        return gradient, None


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(Noted.apply(x, self.seen))
        return x.square().mean()


def test_a_backward_of_the_model_s_own_may_write_to_buffers() -> None:
    noting = Workload("noting", Noting, lambda n, _: torch.ones(n, 16), lambda model, x: model(x), 8)
    graph = record(fake_step(noting, find_planning_device("cpu")))
    model = apply(Noting(), plan_by_hand(graph, every_block(graph)), observe=True)
    model(torch.ones(8, 16)).backward()
    assert counts_of(model).regions == 2
    assert model.get_buffer("seen").any()


@pytest.mark.parametrize("off", [False, True])
def test_it_is_turned_off_by_name(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a planned step too; `test_trainers.py` and `test_frameworks.py` have the callbacks."""
    SPOILT["slice-left-out"].spoil(monkeypatch)
    run = remat.planned_step(loss_outside, in_slices(), verify_first_step=not off)
    model = Language().train()
    if off:
        step(model, run, OUTSIDE)
    else:
        with pytest.raises(FirstStepMismatch):
            step(model, run, OUTSIDE)


# Announced differences


def test_slices_may_round_otherwise_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the loss is what may be; ten times as much is not."""
    run = ChunkedLoss.run

    def off_by(share: float) -> None:
        def spoilt(self: ChunkedLoss, given: Any, wanted: Any) -> Any:
            losses, *rest = run(self, given, wanted)
            return losses * (1 + share), *rest

        monkeypatch.setattr(ChunkedLoss, "run", spoilt)
        model, planned_step = planned(OUTSIDE, "slices")
        step(model, planned_step, OUTSIDE)

    off_by(1e-4)
    with pytest.raises(FirstStepMismatch, match=r"the output is 6\.\d+, and without the plan 6\."):
        off_by(1e-2)


@pytest.mark.parametrize(("noise", "is_caught"), [(1e-6, False), (1e-2, True)])
def test_a_model_that_does_not_repeat_itself_is_held_to_how_well_it_does(noise: float, is_caught: bool) -> None:
    """Kernels of a GPU add in any order; here every forward is off by another millionth."""
    model, calls = nn.Linear(8, 8).train(), itertools.count(1)

    def forward(x: Tensor) -> Tensor:
        return model(x).square().mean() * (1 + 1e-6 * next(calls))

    x = torch.randn(4, 8)
    with pytest.raises(FirstStepMismatch) if is_caught else contextlib.nullcontext():
        first_step_of(model).run(0, lambda: forward(x) * (1 + noise), forward, ((x,), {}), lambda: False)


def test_a_forward_that_fails_by_itself_raises_its_own_error() -> None:
    model, run = planned(TRANSFORMER, "every-block")
    ids, labels = TRANSFORMER.batch(4, 8)
    with pytest.raises(IndexError, match="out of bounds"):
        run(model, (ids, labels + 100))
    step(model, run, TRANSFORMER)


# Memory


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True))
        return x.square().mean()


def test_reentrant_checkpoints_of_a_model_give_no_false_alarm() -> None:
    """Without a plan no graph shows the parameters within; under a plan these checkpoints do nothing."""
    workload = Workload("own", Reentrant, lambda n, _: torch.randn(n, 16).requires_grad_(), lambda m, x: m(x), 64)
    model, x = Reentrant(), torch.randn(64, 16).requires_grad_()
    plan = plan_by_hand(graph_of(workload), every_block(graph_of(workload)))
    model(x).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    apply(model, plan)(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert counts_of(model).regions and len(found) == 8 and all(map(torch.equal, found, expected))


class Excited(nn.Module):
    """A convolution, and squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.excite = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.conv(x))
        return x + y * self.excite(F.adaptive_avg_pool2d(y, 1)).sigmoid()


def test_a_pooled_value_that_is_saved_gives_no_false_alarm() -> None:
    """In `channels_last` pooling to one pixel is a mean, whose strides are set in place."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(Excited() for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(samples: int, _: object) -> Tensor:
        return torch.randn(samples, 16, 32, 32).to(memory_format=torch.channels_last)

    workload = Workload("excited", build, batch, lambda model, x: model(x).square().mean(), batch_size=8)
    plan, x = remat.plan(workload, budget="75%step", target="cpu"), batch(8, None)
    model, planned = build(), apply(build(), plan)
    for each in (model, planned):
        workload.step(each, x).backward()
    assert counts_of(planned).regions
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


class Forces(nn.Module):
    """A potential whose forward calls its backward, between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3 if i == 0 else 32, 32) for i in range(4)])
        self.head = nn.Linear(32, 1)

    def forward(self, positions: Tensor) -> Tensor:
        x = positions
        for layer in self.layers:
            x = torch.tanh(layer(x))
        energy = self.head(x).sum()
        return energy.square() + torch.autograd.grad(energy, positions, create_graph=True)[0].square().mean()


def test_a_forward_that_differentiates_inside_runs_as_planned_in_its_first_step() -> None:
    """The comparison of recomputed tensors runs in that backward, and is no graph of the model."""
    workload = Workload(
        "forces", Forces, lambda n, _: torch.randn(n, 3).requires_grad_(), lambda m, x: m(x), batch_size=64
    )
    plan = plan_by_hand(graph_of(workload), every_block(graph_of(workload)))
    results = []
    for verify in (False, True):
        torch.manual_seed(0)
        model, x = apply(Forces(), plan, verify_first_step=verify), torch.randn(64, 3).requires_grad_()
        with contextlib.nullcontext() if not verify else pytest.warns(UserWarning, match="differentiates inside"):
            model(x).backward()
        assert counts_of(model).regions
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.exhaustive
def test_the_first_step_keeps_the_budget() -> None:
    """Its peak is that of a step without the check: the untouched forward frees as it goes."""
    peaks = []
    for verify in (False, True):
        model, run = planned(LARGER, "every-block", verify_first_step=verify)
        step(model, run, LARGER)  # traces
        model.zero_grad()
        planned_forward(model).first_step._done.clear()
        there = sum(tensor.nbytes for tensor in (*model.parameters(), *LARGER.batch(LARGER.batch_size, LARGER.seq_len)))
        peaks.append(there + measure_peak(lambda: step(model, run, LARGER), CPU))  # noqa: B023
    assert peaks[0] == peaks[1] <= plan_for(LARGER).budget_bytes


class Names(nn.Module):
    """A forward whose names keep values that no backward reads: its trace has let them go."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x).repeat(1, 8)
        x = one.view(-1, 8, 32).sum(1).sigmoid()
        two = self.two(x).repeat(1, 8)
        x = two.view(-1, 8, 32).sum(1).sigmoid()
        three = self.three(x).repeat(1, 8)
        x = three.view(-1, 8, 32).sum(1).sigmoid()
        loss: Tensor = self.four(x).mean()
        return loss


def against_itself(model: nn.Module, x: Tensor) -> Tensor:
    """Look for a harder input with gradients of the step's own (PGD)."""
    with torch.enable_grad():
        near = (x + 0.01).requires_grad_()
        loss = model(near).square().mean()
    (gradient,) = torch.autograd.grad(loss, near)
    harder: Tensor = model((near + gradient.sign()).detach()).square().mean()
    return harder


def _normed() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)])


def _loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def _on_rows(build: Callable[[], nn.Module], step: Step) -> Workload:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Workload("rows", build, lambda n, _: torch.rand(n, 32), step, batch_size=512, optimizer=sgd)


KEEPING = {"names": _on_rows(Names, _loss_of), "gradients-inside": _on_rows(_normed, against_itself)}


@pytest.mark.parametrize("how", ["transformer", *KEEPING])
def test_the_untouched_forward_needs_what_is_predicted(how: str) -> None:
    """Names of Python's functions hold more than the trace does, and gradients inside more still."""
    workload = KEEPING[how].with_planned_step() if how in KEEPING else LARGER
    plan = remat.plan(workload, budget="1GiB", target="cpu")
    model = apply(workload.build().train(), plan)
    first_step, batch, found = planned_forward(model).first_step, workload.batch(workload.batch_size, 64), []
    given: Any = ((batch,), {}) if isinstance(batch, Tensor) else (batch, {})
    for _ in range(2):  # what torch makes once is made
        rise = measure_peak(lambda: found.append(first_step._prepared(0, planned_forward(model).original, given)), CPU)
    assert not isinstance(found[-1], str)
    copied = sum(tensor.nbytes for tensor in given[0])
    assert rise - copied == pytest.approx(plan.about[FORWARD_ALONE], rel=0.01)


@pytest.mark.parametrize("how", KEEPING)
def test_without_room_for_what_the_untouched_forward_keeps_the_budget_holds(how: str) -> None:
    workload = KEEPING[how].with_planned_step()
    with pytest.raises(remat.Infeasible) as refused:
        remat.plan(workload, budget=1, target="cpu")
    plan = remat.plan(workload, budget=refused.value.minimum_budget_bytes or 0, target="cpu")
    model, x = KEEPING[how].build(), workload.batch(512, None)
    run, peaks = remat.planned_step(KEEPING[how].step, plan), []
    there = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    with pytest.warns(UserWarning, match="is not verified: .* no room"):
        peaks.append(there + measure_peak(lambda: run(model, x).backward(), CPU))
    model.zero_grad()
    peaks.append(there + measure_peak(lambda: run(model, x).backward(), CPU))
    assert peaks[0] == peaks[1] <= plan.budget_bytes


class Widened(nn.Module):
    """A head that names what it makes, wider than all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)])
        self.wide, self.out = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        wide = self.wide(x)
        grown = wide.exp()
        small = torch.log1p(grown)
        least = small.tanh()
        found: Tensor = self.out(least * grown + wide)
        return found


def _pulled_together(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    one, other = map(model, pair)
    return (one - other.roll(1, 0)).square().mean()


@pytest.mark.filterwarnings("ignore:the first step under the plan is not verified")
def test_the_first_step_keeps_the_budget_where_an_earlier_forward_of_it_has_saved() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    make = lambda n, _: (torch.rand(n, 64), torch.rand(n, 64))  # noqa: E731
    workload = Workload("pairs", Widened, make, _pulled_together, batch_size=1024, optimizer=sgd)
    with pytest.raises(remat.Infeasible) as refused:
        remat.plan(workload, budget=1, target="cpu", numerics="bitwise")
    plan = remat.plan(
        workload, budget=int(1.15 * (refused.value.minimum_budget_bytes or 0)), target="cpu", numerics="bitwise"
    )
    model, pair = apply(Widened(), plan), workload.batch(1024, None)
    there = sum(tensor.nbytes for tensor in (*model.parameters(), *pair))
    rise = measure_peak(lambda: _pulled_together(model, pair).backward(), CPU)
    assert there + rise <= plan.budget_bytes


class Table(nn.Module):
    """Layers behind a table that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
        self.register_buffer("table", torch.zeros(512, 32))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x) + self.get_buffer("table")).square().mean()
        return loss


@pytest.mark.parametrize("is_planned", [False, True], ids=["apply", "planned-step"])
def test_copies_of_a_state_that_stays_are_gone_as_the_first_step_peaks(is_planned: bool) -> None:
    """Those of generators too."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    workload = Workload("table", Table, lambda n, _: torch.rand(n, 32), _loss_of, batch_size=512, optimizer=sgd)
    to_plan = workload.with_planned_step() if is_planned else workload
    with pytest.raises(remat.Infeasible) as refused:
        remat.plan(to_plan, budget=1, target="cpu")
    plan = remat.plan(to_plan, budget=refused.value.minimum_budget_bytes or 0, target="cpu")
    model, x = Table(), workload.batch(512, None)
    run = remat.planned_step(_loss_of, plan) if is_planned else _loss_of
    if not is_planned:
        apply(model, plan)
    there = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), x))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the first step under the plan is not verified: .* no room")
        assert there + measure_peak(lambda: run(model, x).backward(), CPU) <= plan.budget_bytes


class Queue(nn.Module):
    """A head behind a `body`, whose frozen teacher follows it in the forward; `queued` rows are kept in a buffer."""

    def __init__(self, body: nn.Module, width: int, queued: int, follows: bool):
        super().__init__()
        self.body, self.head, self.follows = body, nn.Linear(width, width), follows
        self.teacher = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(queued, 512))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).flatten(2).mean(2)
        if self.follows:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
        loss: Tensor = (self.head(x) - self.teacher(x)).square().mean() + self.get_buffer("queue")[0, 0]
        return loss


def _convolutions() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *layers)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Queue(_convolutions(), 32, 1, follows=False),
        lambda: Queue(nn.Tanh(), 3, 512, follows=False),
        lambda: Queue(nn.Sequential(nn.Tanh(), nn.AdaptiveAvgPool3d((512, 1, 1))), 512, 1, follows=True),
    ],
    ids=["workspaces", "buffers", "written-parameters"],
)
def test_all_that_verifying_takes_is_counted(build: Callable[[], nn.Module]) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    batch, step = lambda n, _: torch.randn(n, 3, 32, 32), lambda m, x: m(x)
    workload = Workload("all", build, batch, step, batch_size=4, optimizer=sgd)
    plan, x = remat.plan(workload, budget="1GiB", target="cpu"), workload.batch(4, None)

    def prepared(budget_bytes: int, rises: list[int]) -> Any:
        tight = dataclasses.replace(plan, budget_bytes=budget_bytes, predicted={**plan.predicted, "peak_bytes": 0})
        model, found = apply(workload.build(), tight), []
        first_step, run = planned_forward(model).first_step, planned_forward(model).original
        rises.append(measure_peak(lambda: found.append(first_step._prepared(0, run, ((x,), {}))), CPU))
        return found[0]

    model = workload.build()
    there = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), x))
    rises: list[int] = []
    assert not isinstance(prepared(1 << 30, rises), str)
    tight_bytes = there + rises[0] - 1
    assert "no room" in prepared(tight_bytes, rises)
    assert there + rises[1] <= tight_bytes


@pytest.mark.parametrize("spoiler", ["", "rows-of-another"])
def test_without_room_for_logits_the_forward_ends_in_front_of_them(
    spoiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FirstStep, "_room_bytes", lambda self, number: -1)
    if spoiler:
        SPOILT[spoiler].spoil(monkeypatch)
    with pytest.raises(FirstStepMismatch) if spoiler else contextlib.nullcontext():
        step(*planned(OUTSIDE, "slices"), OUTSIDE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [losses_of_one_head, loss_after_sampling])
def test_without_room_a_head_that_runs_twice_is_compared_where_its_losses_are(
    loss: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FirstStep, "_room_bytes", lambda self, number: -1)
    torch.manual_seed(0)
    step(Language().train(), remat.planned_step(loss, in_slices(loss)), OUTSIDE)
    SPOILT["rows-of-another"].spoil(monkeypatch)
    with pytest.raises(FirstStepMismatch, match="head of the loss"):
        step(Language().train(), remat.planned_step(loss, in_slices(loss)), OUTSIDE)


@pytest.fixture
def seen_without_room(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Observations of forwards without the plan, where the budget has no room for them."""
    seen, untouched = list[Any](), verification._untouched

    def noted(*args: Any) -> Any:
        seen.append(untouched(*args))
        return seen[-1]

    monkeypatch.setattr(verification, "_untouched", noted)
    monkeypatch.setattr(FirstStep, "_room_bytes", lambda self, number: -1)
    return seen


@pytest.mark.parametrize("named", [1, 3])
def test_without_room_a_forward_that_counts_ends_in_front_of_the_head_too(
    named: int, seen_without_room: list[Any]
) -> None:
    """Each step of the planning traces it anew; older plans name its head once for each of them."""
    plan = in_slices(build=Warming)
    (chunk,) = plan.about[CHUNKS]
    plan = dataclasses.replace(plan, about={**plan.about, CHUNKS: named * [chunk]})
    step(Warming().train(), remat.planned_step(loss_outside, plan), OUTSIDE)
    assert [(len(each.values), len(each.heads)) for each in seen_without_room] == [(0, 1)]


class Scored(Language):
    """Ids and labels to a loss."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(super().forward(ids).view(-1, CLASSES), labels.reshape(-1))


def losses_of_two_lengths(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    half: Tensor = model(*(tensor[:, : LENGTH // 2].contiguous() for tensor in batch.values()))
    return model(*batch.values()) + half


def test_without_room_each_forward_ends_in_front_of_its_own_head(seen_without_room: list[Any]) -> None:
    workload = dataclasses.replace(OUTSIDE, build=Scored, step=losses_of_two_lengths)
    forms = FormChoice(slices=(2,), most_row_slices=0, worth=0.0)
    plan = remat.plan(workload, target="cpu", budget="70%step", forms=forms)
    assert len(plan.about[CHUNKS]) == 2
    step(apply(Scored().train(), plan), losses_of_two_lengths, workload)
    assert [(len(each.values), len(each.heads)) for each in seen_without_room] == [(0, 1), (0, 1)]


def test_without_any_room_it_says_so_and_compares_what_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstStep, "_room_bytes", lambda self, number: -1)
    model, run = planned(TRANSFORMER, "every-block")
    SPOILT["drawn-anew"].spoil(monkeypatch)
    with pytest.warns(UserWarning, match="is not verified: .* no room"), pytest.raises(FirstStepMismatch):
        step(model, run, TRANSFORMER)


# Digests

TENSORS = {
    "float": torch.randn(3, 5, 7),
    "transposed": torch.randn(5, 3).t(),
    "long": torch.randn(3 * LONGEST + 1),
    "bfloat16": torch.randn(6, 4).bfloat16(),
    "bool": torch.rand(9, 2) < 0.5,
    "int": torch.randint(1 << 40, (4, 4)),
    "complex": torch.randn(4, 3, dtype=torch.complex64),
    "conjugate": torch.randn(4, 3, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(2.5),
    "expanded": torch.randn(1, 6).expand(4, 6),
}


@pytest.mark.parametrize("name", TENSORS)
def test_digests_are_equal_where_all_bits_are(name: str) -> None:
    tensor = TENSORS[name]
    assert digest_of(tensor).is_equal(digest_of(tensor.clone()))
    for i in {0, tensor.numel() // 2, tensor.numel() - 1}:
        other = tensor.clone(memory_format=torch.contiguous_format).resolve_conj()
        flat = other.view(-1)
        flat[i] = ~flat[i] if name == "bool" else flat[i] + 1
        assert not digest_of(tensor).is_equal(digest_of(other))


@pytest.mark.parametrize("sizes", [(8, 16, 1, 1), (1, 5, 1), (4, 1, 6, 1), (1, 1), (0, 3, 1), (2, 3, 5)])
def test_strides_of_dimensions_of_size_1_do_not_change_a_digest(sizes: tuple[int, ...]) -> None:
    tensor = torch.randn(sizes)
    expected = digest_of(in_memory_order(tensor), signed=True)
    for of_one in (1, 7, 1000):
        strides = [of_one if size == 1 else step for size, step in zip(sizes, tensor.stride(), strict=True)]
        found = digest_of(in_memory_order(tensor.as_strided(sizes, strides)), signed=True)
        assert found.is_equal(expected)
        assert found.apart(expected) == 0


def test_digests_are_the_same_whatever_device_is_the_default() -> None:
    tensor = torch.randn(61, 53)  # of sizes that no other test has: their numbers are kept
    with torch.device("meta"):
        found = digest_of(tensor, signed=True)
    assert found.is_equal(digest_of(tensor, signed=True))


@pytest.mark.parametrize("size", [2, 64, LONGEST // 2])
def test_digests_of_permutations_are_others(size: int) -> None:
    """Their plain sums along each dimension are the same."""
    one = torch.eye(size)
    for other in (one.roll(1, 0), one.flip(0)):
        assert not digest_of(one).is_equal(digest_of(other))
        assert not digest_of(one.expand(2, 3, -1, -1)).is_equal(digest_of(other.expand(2, 3, -1, -1)))


def test_digests_tell_how_far_two_tensors_are_apart() -> None:
    tensor = torch.randn(64, 256)
    apart = [
        digest_of(tensor, signed=True).apart(digest_of(other, signed=True))
        for other in (tensor.clone(), tensor * (1 + 1e-3), tensor + 0.1 * torch.randn(64, 256), tensor.roll(1, 0))
    ]
    assert apart[0] == 0
    assert apart[1] == pytest.approx(1e-3, rel=0.01)
    assert 0.05 < apart[2] < 0.2 and apart[3] > 0.5


def test_digests_take_next_to_no_memory() -> None:
    tensor = torch.randn(512, 1024)
    for each in (tensor, tensor.t(), tensor.bfloat16(), tensor > 0):
        assert measure_peak(functools.partial(digest_of, each), CPU) < each.nbytes / 20
    for each in (tensor, tensor.t().contiguous(), tensor.view(4, -1)[:, :1000]):
        assert measure_peak(functools.partial(digest_of, each, signed=True), CPU) < tensor.nbytes / 20


def test_digests_leave_no_tensor_behind() -> None:
    """A step has no room for one of every length."""

    def tensors() -> int:
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    digest_of(torch.ones(3, 5), signed=True)
    gc.collect()
    before = tensors()
    for length in range(3001, 3033):
        digest_of(torch.ones(length, 5), signed=True)
    gc.collect()
    assert tensors() == before


@pytest.mark.cuda
def test_digests_leave_no_workspace_of_cublas() -> None:
    """A step without a product has none, and its budget no room for one."""
    tensor = torch.randn(512, 1024, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    digest_of(tensor, signed=True)
    assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.cuda
def test_digests_of_few_rows_take_next_to_no_memory_of_a_card() -> None:
    """Sums of columns are as large as a row, and twice as large as one of 16 bits."""
    for tensor in (torch.randn(4, 1 << 17, device="cuda"), torch.randn(1 << 20, device="cuda").bfloat16()):
        digest = functools.partial(digest_of, tensor, signed=True)
        assert measure_peak(digest, tensor.device) < tensor.nbytes / 8


def test_columns_that_a_gpu_fills_do_not_count() -> None:
    one, other = torch.randn(4, 64), torch.randn(4, 64)
    other[:, :48] = one[:, :48]
    digests = [digest_of(each, signed=True) for each in (one, other)]
    assert not digests[0].is_near(digests[1], 0.01)
    a, b = (dataclasses.replace(each, on_device=True) for each in digests)
    assert a.is_near(b, 0.01)
    other[:, 0] = 0
    assert not a.is_near(dataclasses.replace(digest_of(other, signed=True), on_device=True), 0.01)


# Many models


def every_architecture() -> list[Any]:
    if importlib.util.find_spec("transformers") is None:
        return []
    found: Any = importlib.import_module("benchmarks.architectures")
    return [pytest.param(each, id=each.model) for each in found.ALL]


OFTEN = (
    *("GptOssForCausalLM", "DebertaV2ForMaskedLM", "BartForConditionalGeneration"),
    "SegformerForSemanticSegmentation",
)


@pytest.mark.exhaustive
@pytest.mark.often("DebertaV2ForMaskedLM", "BartForConditionalGeneration")
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("architecture", every_architecture())
def test_no_architecture_gives_a_false_alarm(architecture: Any) -> None:
    workload = importlib.import_module("benchmarks.architectures").workload_of(architecture)
    try:
        graph = record(FakeStep(workload, device=CPU))
    except CaptureError as error:
        pytest.skip(f"has no plan: {error}")
    for choose in (tricky_layers.largest, tricky_layers.saving):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = apply(workload.build().train(), plan_by_hand(graph, choose(graph)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(model, workload.step, workload)
        assert not [each for each in told if "not verified" in str(each.message)]
        assert not planned_forward(model).first_step._is_due(0)
