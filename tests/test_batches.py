"""Batches in containers that torch's trees do not know: their tensors are counted, measured and moved as in a tuple."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding

import remat
from remat.validation.training import Training
from remat.workload.batches import on_device, tensors_of
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.toys import CPU

ROWS, WIDTH = 16, 64
BATCH = ROWS * WIDTH * 4 + ROWS * 8  # bytes


@dataclasses.dataclass(frozen=True)
class Labelled:
    x: torch.Tensor
    y: torch.Tensor


class Own:
    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.inner = x, [{"y": y}]

    y = property(lambda self: self.inner[0]["y"])


class Mapped(dict[str, torch.Tensor]):
    pass


Make = Callable[[torch.Tensor, torch.Tensor], Any]
CONTAINERS: dict[str, Make] = {
    "dataclass": Labelled,
    "object": Own,
    "subclass-of-dict": lambda x, y: Mapped(x=x, y=y),
    "UserDict": lambda x, y: collections.UserDict(x=x, y=y),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "in-a-list": lambda x, y: [Labelled(x, y)],
}


def read(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, tuple):
        return batch
    found = batch[0] if isinstance(batch, list) else batch
    of = operator.itemgetter if isinstance(found, collections.abc.Mapping) else operator.attrgetter
    x, y = of("x", "y")(found)
    return x, y


def workload(make: Make) -> Workload:
    def batch(rows: int, length: int | None) -> Any:
        return make(torch.randn(rows, WIDTH), torch.zeros(rows, dtype=torch.long))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = read(batch)
        return F.cross_entropy(model(x), y)

    return Workload("contained", lambda: nn.Linear(WIDTH, 8), batch, step, batch_size=ROWS)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_batch_is_counted_and_measured_in_any_container(name: str) -> None:
    contained, plain = workload(CONTAINERS[name]), workload(lambda x, y: (x, y))
    counted = remat.profile(contained, target="cpu").graph.fixed_bytes
    assert counted == remat.profile(plain, target="cpu").graph.fixed_bytes
    assert counted["batch"] == BATCH
    one, other = (Training(each, CPU, 0, TrainingLoop()).bytes_before(1) for each in (contained, plain))
    assert one == other > BATCH


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_batch_moves_to_a_device_in_its_own_container(name: str) -> None:
    batch = CONTAINERS[name](torch.randn(2, 3), torch.zeros(2))
    moved = on_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert [t.device.type for t in (*read(moved), *read(batch))] == ["meta", "meta", "cpu", "cpu"]
    assert len(tensors_of(moved)) == 2 and on_device(batch, CPU) is batch


def test_a_batch_that_refers_to_itself_and_names_a_tensor_twice_moves_as_it_is() -> None:
    batch = Labelled(x := torch.ones(2), x)
    vars(batch)["own"] = batch
    moved = on_device(batch, torch.device("meta"))
    assert moved.x is moved.y and moved.x.is_meta and not batch.x.is_meta
