"""Steps that change their model between forwards: evaluation mode for one of them, parameters frozen for another.

One runs the layers of its model once the model's forward has returned, another calls the model from its own forward, a
third has a teacher and a loss module beside its model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.errors import CaptureError
from remat.evaluation.forwards import FORWARDS
from remat.execution.apply import counts_of
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.toys import CPU, pairs_of_segments, plan_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH = 16


def mlp(out: int = WIDTH) -> nn.Sequential:
    layers = [nn.Linear(WIDTH, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, out)]
    return nn.Sequential(*layers)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(), mlp(1)


def freeze(parameters: Iterable[nn.Parameter], frozen: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not frozen)


def critic_frozen_step(model: Any, batch: Any) -> torch.Tensor:
    """The critic learns from what it judges, and not from the generator's loss."""
    real, noise = batch
    made = model.generator(noise)
    judged = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(made.detach())).mean()
    freeze(model.critic.parameters(), True)
    fooled = F.softplus(-model.critic(made)).mean()
    freeze(model.critic.parameters(), False)
    return judged + fooled


def evaluated_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A backward goes through a forward of evaluation mode, and through one of training mode."""
    model.eval()
    target = model(batch[0])
    model.train()
    return F.mse_loss(model(batch[1]), target)


def never_trained_step(model: nn.Module, batch: Any) -> torch.Tensor:
    model.eval()
    return model(batch[0]).square().mean()


class Yielding(nn.Module):
    """Its forward returns at once; its layers run as the step asks for their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x


def yielded_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.stack([x.square().mean() for x in model(batch[0])]).sum()


class CallsItself(nn.Module):
    """Its forward of a batch is the loss, and calls the forward of inputs; as in Ultralytics' models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Any) -> torch.Tensor:
        return self(x[0]).square().mean() if isinstance(x, tuple) else self.layers(x)


def called_by_itself_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch)


TEACHER = mlp().requires_grad_(False)
LOSS = nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.5, 2, WIDTH))


def taught_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Another model, and a loss with a weight, are no part of the model that `build` makes."""
    loss: torch.Tensor = LOSS(model(batch[0]), TEACHER(batch[0]).sigmoid())
    return loss


def batch(samples: int, _: int | None) -> Any:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


STEPS = {
    step.__name__.removesuffix("_step"): Workload(step.__name__, build, batch, step, batch_size=64)
    for step, build in (
        (critic_frozen_step, Adversaries),
        (evaluated_step, mlp),
        (yielded_step, Yielding),
        (called_by_itself_step, CallsItself),
        (taught_step, mlp),
    )
}


def trained(workload: Workload, planned: bool) -> list[torch.Tensor]:
    """Losses and parameters of three steps."""
    torch.manual_seed(0)
    model = workload.build()
    if planned:
        remat.apply(model, plan_for(workload, pairs_of_segments))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = workload.step(model, workload.batch(64, None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if planned:
        assert counts_of(model).regions
    return losses + list(model.parameters())


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_changes_no_number_and_warns_of_nothing(name: str) -> None:
    plain = trained(STEPS[name], planned=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = trained(STEPS[name], planned=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


@pytest.mark.fast("critic_frozen", "yielded", "evaluated")
@pytest.mark.parametrize("name", STEPS)
def test_its_peak_is_the_predicted_one(name: str) -> None:
    report = validate(STEPS[name], plan_for(STEPS[name], pairs_of_segments), device=CPU, repeats=1)
    assert report.passed, str(report)
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-3)


def test_a_forward_of_evaluation_mode_is_none_of_the_plans() -> None:
    assert FORWARDS not in plan_for(STEPS["evaluated"]).about, "one forward is planned"


def test_a_step_that_leaves_its_model_in_evaluation_mode_is_refused_by_name() -> None:
    workload = Workload("never trained", mlp, batch, never_trained_step, batch_size=8)
    with pytest.raises(CaptureError, match=r"'never trained' runs its model in evaluation mode.*model\.train\(\)"):
        record(FakeStep(workload, device=CPU))
