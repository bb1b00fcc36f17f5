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
from remat.workload.batches import Anew, on_device, tensors_of
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.toys import CPU

ROWS, WIDTH = 16, 64
BATCH = ROWS * WIDTH * 4 + ROWS * 8  # bytes


@dataclasses.dataclass(frozen=True)
class Labelled:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class InSlots:
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
    "slots": InSlots,
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


# Steps that change their batch

Step = Callable[[nn.Module, Any], torch.Tensor]


class Blocks(nn.Module):
    """Four residual blocks, which may write into what they are given."""

    def __init__(self, *, writes: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(4)]
        )
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.add_(1.0) if self.writes else x
        for layer in self.layers:
            x = x + layer(x)
        return x


class OfABatch(Blocks):
    def forward(self, batch: Any) -> torch.Tensor:
        y = batch.pop("y")
        return F.cross_entropy(super().forward(batch["x"]), y)


def _pop(model: nn.Module, batch: Any) -> torch.Tensor:
    y = batch.pop("y")
    return F.cross_entropy(model(batch["x"]), y)


def _pop_of_a_list(model: nn.Module, batch: Any) -> torch.Tensor:
    y = batch.pop()
    return F.cross_entropy(model(*batch), y)


def _delete(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch["x"], batch["y"]
    del batch["x"], batch["y"]
    return F.cross_entropy(model(x), y)


def _take(model: nn.Module, batch: Any) -> torch.Tensor:
    y, batch.inner = batch.y, []
    return F.cross_entropy(model(batch.x), y)


def _replace(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["x"] = batch["x"] * 0.5
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _write(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["x"].mul_(0.5)
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _count(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["n"] = batch.get("n", 0) + 1
    return F.cross_entropy(model(batch["x"] * batch["n"]), batch["y"])


def _differentiate(model: nn.Module, batch: Any) -> torch.Tensor:
    energies = model(batch["x"].requires_grad_())
    (forces,) = torch.autograd.grad(energies.square().sum(), batch["x"], create_graph=True)
    return F.cross_entropy(energies, batch["y"]) + forces.square().mean()


def _plainly(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _all(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(batch)
    return found


def _dict(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"x": x, "y": y}


CHANGING: dict[str, tuple[Callable[[], nn.Module], Make, Step]] = {
    "pop": (Blocks, _dict, _pop),
    "pop of a list": (Blocks, lambda x, y: [x, y], _pop_of_a_list),
    "pop of a UserDict": (Blocks, CONTAINERS["UserDict"], _pop),
    "pop of a BatchEncoding": (Blocks, CONTAINERS["BatchEncoding"], _pop),
    "pop in the forward": (OfABatch, _dict, _all),
    "delete": (Blocks, _dict, _delete),
    "an attribute": (Blocks, Own, _take),
    "replace": (Blocks, _dict, _replace),
    "count": (Blocks, _dict, _count),
    "write": (Blocks, _dict, _write),
    "write in the forward": (lambda: Blocks(writes=True), _dict, _plainly),
    "differentiate": (Blocks, _dict, _differentiate),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("with_step", [False, True])
def test_a_step_that_changes_its_batch_is_planned_and_validated(name: str, with_step: bool) -> None:
    build, make, step = CHANGING[name]
    rows = 256

    def batch(rows: int, length: int | None) -> Any:
        return make(torch.randn(rows, WIDTH), torch.randint(WIDTH, (rows,)))

    changing = Workload("changing", build, batch, step, batch_size=rows)
    changing = changing.with_planned_step() if with_step else changing
    plan = remat.plan(changing, budget="90%step", target="cpu")
    report = remat.validate(changing, plan, repeats=1)
    assert report.passed and report.max_gradient_error == 0.0, report.notes
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-4)
    assert report.measured["peak_bytes"] <= plan.budget_bytes


def test_what_a_step_leaves_in_its_batch_is_held_as_a_loop_holds_it() -> None:
    def keeping(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = _plainly(model, batch)
        batch["more"] = batch["x"].repeat(8, 1)
        return loss

    def dropping(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = _plainly(model, batch)
        batch["x"].repeat(8, 1)
        return loss

    def made(step: Step) -> Workload:
        return Workload("made", Blocks, lambda n, _: _dict(torch.randn(n, WIDTH), torch.zeros(n).long()), step, 64)

    least = {}
    for step in (keeping, dropping):
        plan = remat.plan(made(step), budget="100%step", target="cpu")
        report = remat.validate(made(step), plan, repeats=1)
        assert report.passed, report.notes
        assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-4)
        least[step] = plan.predicted["peak_bytes"]
    assert least[keeping] - least[dropping] == 8 * 64 * WIDTH * 4


def test_known_lengths_that_a_step_writes_into_are_those_of_the_batch_at_each_run() -> None:
    def batch(rows: int, length: int | None) -> Any:
        lengths = torch.full((2,), rows // 2)
        return {"x": torch.randn(rows, WIDTH), "lengths": lengths, "last": lengths[1:]}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        batch["lengths"].sub_(4)
        first, last = batch["x"][: batch["lengths"].sum().item()].split(batch["lengths"].tolist())
        return model(first).square().mean() + last.mean() + batch["last"].item()

    known = Workload("known", Blocks, batch, step, batch_size=256)
    plan = remat.plan(known, budget="90%step", target="cpu")
    report = remat.validate(known, plan, repeats=1)
    assert report.passed and report.max_gradient_error == 0.0, report.notes
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-4)


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_run_gets_containers_of_its_own_and_the_tensors_as_they_were(name: str) -> None:
    x = torch.ones(2, 3)
    anew = Anew(batch := CONTAINERS[name](x, torch.zeros(2)))
    first = anew.for_a_run()
    assert type(first) is type(batch) and first is not batch and read(first)[0] is x
    x.requires_grad_().sum().backward()
    x.detach().mul_(2)
    assert torch.equal(read(anew.for_a_run())[0], torch.ones(2, 3))
    assert x.grad is None and not x.requires_grad and x._version == 0
    x.mul_(torch.ones(3, requires_grad=True))
    anew.put_back()
    assert x.is_leaf and not x.requires_grad
