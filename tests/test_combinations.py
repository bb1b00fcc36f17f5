"""Means that combine by the table of combinations are planned together; the others are refused as it says."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

_PAGE = importlib.util.spec_from_file_location(
    "combinations", Path(__file__).parent.parent / "docs" / "combinations.py"
)
assert _PAGE is not None and _PAGE.loader is not None
combinations: Any = importlib.util.module_from_spec(_PAGE)
_PAGE.loader.exec_module(combinations)

WIDTH, WIDE, LAYERS, CLASSES = 32, 128, 6, 512


class Layer(nn.Module):
    """A frozen MLP with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        for frozen in (self.up, self.down):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).cumsum(1).tanh()
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed) + self.high(self.low(normed))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def workload() -> Workload:
    return Workload(
        "adapted",
        Model,
        lambda samples, _: torch.randint(CLASSES, (samples, 64)),
        lambda m, ids: m(ids),
        batch_size=512,
    )


PAIRS = list(itertools.combinations(combinations.MEANS, 2))
FAST = ("chunked losses and MLPs-sharded states",)
OFTEN = (
    "fused kernels-frozen weights on the host",
    "optimizer state on the host-step in backward",
    "EMA-DDP",
)


def test_the_page_shows_the_table() -> None:
    assert combinations.PAGE.read_text(encoding="utf-8") == combinations.page(), "run python docs/combinations.py"


@pytest.mark.fast(*FAST)
@pytest.mark.often(*FAST, *OFTEN)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_what_the_table_allows_is_planned_and_what_it_refuses_is_refused(one: str, other: str) -> None:
    asked, loop = combinations.wanted(one, other)
    refusal = combinations.why_not(one, other)

    def planned() -> remat.Plan:
        own = {"loop": loop(), "host_budget": "1GiB" if "offload" in asked else None}
        return remat.plan(workload(), budget="75%step", target="h100-80gb", **own, **asked)

    if refusal is None or refusal.startswith(combinations.LEFT_WHOLE):
        made = planned()
        assert made.predicted["peak_bytes"] <= made.budget_bytes
        assert TrainingLoop.of(made.about).accumulation == loop().accumulation
    else:
        with pytest.raises(remat.UsageError) as refused:
            planned()
        assert str(refused.value) == refusal
