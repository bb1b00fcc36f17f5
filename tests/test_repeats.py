"""Two forwards of one step are one graph, or it is refused: by the line that reads what torch does not draw."""

from __future__ import annotations

import cProfile
import dataclasses
import datetime
import functools
import gc
import itertools
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable
from random import random as draw
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.errors import CaptureError
from remat.recording.fake_step import FakeStep
from remat.recording.sources import Sources
from remat.workload.workload import Workload
from tests.toys import recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

COUNT = [0]


def counted() -> bool:
    COUNT[0] += 1
    return COUNT[0] % 4 == 0


class Skipping(nn.Module):
    """Residual layers, of which `skips` leaves out some."""

    turns = itertools.count()

    def __init__(self, skips: Callable[[Skipping], bool], layers: int = 3):
        super().__init__()
        self.skips = skips
        self.layers, self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)]), nn.Linear(8, 8)
        self.random, self.generator, self.steps = random.Random(0), np.random.default_rng(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            if self.skips(self):
                continue
            x = x + layer(x).relu()
        return self.head(x)


class Shuffling(Skipping):
    """All layers, in an order that differs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [*self.layers]
        random.shuffle(order)
        for layer in order:
            x = x + layer(x).relu()
        return self.head(x)


class Scaling(Skipping):
    """Numbers that are drawn scale what is computed: a graph that takes another number is the same graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        for layer in self.layers:
            x = x + layer(x).relu() * random.uniform(0.9, 1.1)
        self.took = time.perf_counter() - began
        return self.head(x)


def batch(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 8), torch.randn(samples, 8)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def workload(skips: Callable[[Skipping], bool], kind: type[Skipping] = Skipping) -> Workload:
    return Workload("skipping", functools.partial(kind, skips), batch, loss_of, batch_size=4)


READS: dict[str, Callable[[Skipping], bool]] = {
    "random": lambda model: random.random() < 0.3,
    "imported": lambda model: draw() < 0.3,
    "seldom": lambda model: random.random() < 0.001,
    "choice": lambda model: random.choice([True, False, False]),
    "kept": lambda model: model.random.random() < 0.3,
    "numpy": lambda model: bool(np.random.rand() < 0.3),
    "numpy-integers": lambda model: bool(np.random.randint(10) < 3),
    "numpy-generator": lambda model: bool(model.generator.random() < 0.5),
    "clock": lambda model: time.time_ns() // 1000 % 2 == 0,
    "date": lambda model: datetime.datetime.now().microsecond % 2 == 0,
    "system": lambda model: os.urandom(1)[0] < 128,
    "secrets": lambda model: secrets.randbelow(2) == 0,
}
COUNTS: dict[str, tuple[Callable[[Skipping], bool], str]] = {
    "attribute": (lambda model: model.steps % 3 == 0, "steps"),
    "global": (lambda model: counted(), "COUNT"),
    "class": (lambda model: next(model.turns) % 4 == 0, "Skipping.turns"),
}
FEW = ("random", "attribute")


def named(names: Iterable[str]) -> list[Any]:
    """One in every run, all in the exhaustive one: a forward that is watched line by line takes seconds."""
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", named(READS))
def test_a_layer_that_is_left_out_by_chance_is_refused_by_the_line_that_draws(name: str) -> None:
    with pytest.raises(CaptureError, match=r"are two graphs .*A plan is for one.*stochastic depth") as caught:
        recorded(workload(READS[name]))
    line = READS[name].__code__.co_firstlineno
    assert f"`{lines()[line - 1].strip()}` at {__file__}:{line}" in str(caught.value)


class AllSkipping(Skipping):
    """May leave out every layer that trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.skips(self):
                x = layer(x)
        return x


def test_a_forward_that_no_layer_is_left_of_is_no_fault_of_the_loss() -> None:
    random.seed(0)  # of other numbers, the first forwards may have no layer at all
    with pytest.raises(CaptureError, match=r"are two graphs \(one gives no loss that has a gradient\)") as caught:
        recorded(workload(READS["random"], AllSkipping))
    assert "must return the loss" not in str(caught.value)


def test_the_line_is_named_under_a_profiler_too() -> None:
    profile = cProfile.Profile()
    with pytest.raises(CaptureError, match=r"`.*random.random.*` at"), profile:
        recorded(workload(READS["random"]))
    assert any("said_of" in str(entry.code) for entry in profile.getstats())  # it goes on after the lines were found


def lines() -> list[str]:
    with open(__file__) as file:
        return file.read().splitlines()


@pytest.mark.parametrize("name", named(COUNTS))
def test_a_layer_that_is_left_out_now_and_then_is_refused_by_what_counts(name: str) -> None:
    skips, counter = COUNTS[name]
    with pytest.raises(CaptureError, match=f"are two graphs .*each changes .*`{counter}`"):
        recorded(workload(skips))


def test_a_callback_of_the_garbage_collector_is_not_part_of_the_forward() -> None:
    def timed(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    gc.callbacks.append(timed)
    try:
        with pytest.raises(CaptureError, match=r"are two graphs .*each changes .*`steps`"):
            recorded(workload(lambda model: gc.collect(0) >= 0 and model.steps % 3 == 0))
        assert gc.callbacks[-1] is timed
    finally:
        gc.callbacks.remove(timed)


@pytest.mark.exhaustive
def test_another_order_of_layers_alike_is_another_graph() -> None:
    with pytest.raises(CaptureError, match=r"`random.shuffle\(order\)` at"):
        recorded(workload(bool, Shuffling))


def test_numbers_that_steer_no_graph_may_be_drawn_and_clocks_read() -> None:
    recorded(workload(lambda model: False, Scaling))


def test_generators_are_where_the_forwards_left_them() -> None:
    random.seed(3)
    recorded(workload(lambda model: False, Scaling))
    after = random.getstate()
    random.seed(3)
    forwards = 0
    while random.getstate() != after:
        random.uniform(0.9, 1.1)
        forwards += 1
        assert forwards < 60  # three layers each
    assert forwards


def test_a_step_that_reads_nothing_is_run_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(step: FakeStep) -> None:
        raise AssertionError("another forward")

    monkeypatch.setattr(FakeStep, "run_untraced", refused)
    recorded(workload(bool, Still))


class Still(Skipping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def test_plan_and_profile_refuse_it_by_name() -> None:
    with pytest.raises(remat.CaptureError, match="are two graphs"):
        remat.profile(workload(READS["random"]), target="h100-80gb")
    outside = dataclasses.replace(workload(bool, Still), step=drawn_outside)
    with pytest.raises(remat.CaptureError, match=r"`if random\.random"):
        remat.plan(outside, target="h100-80gb", budget="80%step")


def drawn_outside(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The step itself draws, outside of the model."""
    if random.random() < 0.5:
        return loss_of(model, batch) + loss_of(model, batch)
    return loss_of(model, batch)


def test_a_generator_is_driven_to_its_ends() -> None:
    found: Any = Sources.of(Skipping(READS["random"]), loss_of)
    model = next(g for g in found.generators.values() if isinstance(g, random.Random) and g is not random._inst)
    for high in (False, True):
        with found.kept():
            found.drive(high=high, seed=1)
            for number in (random.random(), np.random.rand(), model.random()):
                assert number > 0.999 if high else number < 0.001
            assert random.randrange(3) in range(3)  # drawn until it is in range
