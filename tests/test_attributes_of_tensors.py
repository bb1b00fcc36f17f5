"""Attributes of parameters and buffers: a forward reads them on fakes as it does in training."""

from __future__ import annotations

import functools
import types
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat._torch.step_fakes import StepFakes
from remat.capture.fake_model import fake_model
from remat.execution.apply import counts_of
from remat.recording.known_values import KnownValues
from remat.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH, ROWS, LAYERS = 32, 64, 4


class Masked(nn.Module):
    """Its weight has a mask, and a gain that decides a branch; its buffer says what it is for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.weight.mask = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH).remainder(3).float()  # type: ignore[attr-defined]
        self.weight.gain = 2.0  # type: ignore[attr-defined]
        self.shift = nn.Buffer(torch.ones(WIDTH))
        self.shift.used = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight * self.weight.mask)  # type: ignore[attr-defined]
        if getattr(self.weight, "gain", 0.0):
            y = torch.tanh(y)
        return x + y + self.shift if self.shift.used else x + y  # type: ignore[attr-defined]


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Masked() for _ in range(LAYERS)), nn.Linear(WIDTH, 4))


class Changing(Stack):
    """Changes attributes of its weights: a counter, a list, an object, and a mask that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = self[0].weight
        self.first, weight.calls, weight.log = weight, 0, []
        weight.object, weight.itself = types.SimpleNamespace(calls=0), weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.first
        weight.calls += 1
        weight.object.calls += 1
        weight.log.append(weight.calls)
        weight.mask = (weight.mask * 0.9).detach()
        y: Tensor = super().forward(x)
        return y * (weight.calls + weight.object.calls + weight.log[0])


class Assigning(Stack):
    """Assigns a buffer in its forward, as CTRL does: Dynamo breaks its graph there, of an `nn.Buffer` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale.to(x.dtype)  # type: ignore[assignment]
        y: Tensor = super().forward(x * self.scale)
        return y


def workload(model: type[nn.Module]) -> Workload:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Workload(model.__name__, model, lambda rows, _: torch.randn(rows, WIDTH), step, ROWS, optimizer=sgd)


def losses(work: Workload, plan: remat.Plan | None, steps: int = 3) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = work.build().train()
    if plan is not None:
        remat.apply(model, plan)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = work.step(model, work.batch(ROWS, None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model


def test_state_in_attributes_is_as_without_a_plan() -> None:
    plan = remat.plan(work := workload(Changing), budget="100%step", target="cpu", exact=True)
    assert losses(work, plan, 4)[0] == losses(work, None, 4)[0]
    assert remat.validate(work, plan, device="cpu", repeats=1).passed


@pytest.mark.parametrize("model", [Stack, pytest.param(Assigning, marks=pytest.mark.exhaustive)])
def test_training_is_as_without_a_plan_and_bytes_are_counted(model: type[nn.Module]) -> None:
    plan = remat.plan(work := workload(model), budget="90%step", target="cpu", exact=True)
    found, planned = losses(work, plan)
    assert found == losses(work, None)[0]
    assert plan.regions and counts_of(planned).regions == 3 * len(plan.regions)
    report = remat.validate(work, plan, device="cpu", repeats=1)
    assert report.passed and report.measured["peak_bytes"] == plan.predicted["peak_bytes"]
    assert plan.predicted["breakdown"]["parameters"] >= 2 * LAYERS * 4 * WIDTH * WIDTH  # masks among them


def test_a_tensor_with_two_names_is_one_fake() -> None:
    def build() -> nn.Module:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        one, other = cast(Any, first.weight), cast(Any, second.weight)
        one.itself, one.half, other.other, one.circle = one, one.detach()[:1], one, [one]
        one.circle.append(one.circle)
        return nn.Sequential(first, second)

    model, state = fake_model(build, StepFakes(), torch.device("cpu"), note=KnownValues().note_buffer)
    with state.borrowed():
        one, other = cast(Any, [next(layer.parameters()) for layer in model.children()])
        assert one.itself is one and other.other is one
        assert one.half.untyped_storage() is one.untyped_storage()
