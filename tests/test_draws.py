"""Numbers that a forward draws outside of torch: what Python draws is an input of the graph, the rest is named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import remat
from remat.cli.screen import plan_text
from remat.errors import Infeasible
from remat.evaluation.graph import DRAWN_OUTSIDE
from tests.carrying import Stack, workload
from tests.test_carried_state import is_bitwise, tight
from tests.toys import recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


class Drawing(Stack):
    """Scales what goes into every layer, within the loop over them."""

    draw: ClassVar[Callable[[Drawing], Any]]

    def __init__(self) -> None:
        super().__init__()
        self.random, self.numpy = random.Random(0), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.draw())
        y: torch.Tensor = self.head(x)
        return y


def drawing(draw: Callable[[Drawing], Any]) -> type[Drawing]:
    return type("Drawing", (Drawing,), {"draw": draw})


PYTHON: dict[str, Callable[[Drawing], Any]] = {
    "random": lambda model: 1 + 0.1 * random.random(),
    "kept": lambda model: model.random.uniform(0.9, 1.1),
    "gauss": lambda model: random.gauss(1, 0.1),
    "uniform": lambda model: random.uniform(0.9, 1.1) ** 2,
    "integer": lambda model: 1 / (1 + random.randint(0, 3)),
    "kept-gauss": lambda model: 1 + 0.1 * model.random.gauss(0, 1),
    "kept-integer": lambda model: 1 + 0.1 * model.random.randrange(10),
    "list": lambda model: torch.tensor([random.random() for _ in range(32)]),
}


def named(names: Iterable[str]) -> list[Any]:
    """The first two in every run."""
    return [pytest.param(name, marks=() if i < 2 else pytest.mark.exhaustive) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", named(PYTHON))
def test_what_python_draws_is_an_input_of_one_graph_and_trains_bitwise(name: str) -> None:
    """Dynamo broke the graph at most of them, and drew the same number in every step from a kept generator."""
    work = workload(drawing(PYTHON[name]))
    assert {node.call for node in recorded(work)[1].nodes[1:-1]} == {0}  # but for the numbers themselves, and the loss
    plan = tight(work)
    assert plan.regions
    is_bitwise(work, plan, 5)


NUMPY: dict[str, Callable[[Drawing], Any]] = {
    "number": lambda model: 1 + 0.1 * model.numpy.random(),
    "mask": lambda model: torch.from_numpy((np.random.rand(32) > 0.1).astype(np.float32)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NUMPY)
def test_what_numpy_draws_is_named_by_its_line_with_the_remedy(name: str) -> None:
    work = workload(drawing(NUMPY[name]))
    line = NUMPY[name].__code__.co_firstlineno
    said = (
        rf"he graph ends where .* outside of torch \(`.*rand.*` at .*test_draws.py:{line}\).* draw them with torch, or"
    )
    plan = remat.plan(work, target="cpu", budget="1GiB")
    assert re.search(said, str(plan)) and re.search(said, plan_text(plan))
    with pytest.raises(Infeasible, match=said):
        remat.plan(work, target="cpu", budget="1KiB")


def test_what_the_step_draws_before_its_forward_is_not_named() -> None:
    def step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scale = float(np.random.rand())
        return F.cross_entropy(model(batch[0] * scale) + model(batch[0]), batch[1])

    assert DRAWN_OUTSIDE not in recorded(workload(Stack, step=step))[1].about
