"""Refused sizes: a search leaves out the sizes that the model's own code refuses, says so, and finds the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.errors import CaptureError, Infeasible
from remat.evaluation.plan import TOKEN_CAP
from remat.evaluation.refused import REFUSED_SIZES, RefusedSize, to_json
from remat.evaluation.refused import refused_sizes as refused_sizes_of
from remat.planning import micro_batches, refused_sizes
from remat.planning.advice import advise
from remat.planning.budget import Budget
from remat.planning.profiling import profile
from remat.planning.refused_sizes import error_at
from remat.planning.windows import Window, between, largest, neighbours
from remat.units import MIB
from remat.validation import sizes as validated_sizes
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests import studies

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TARGET = "h100-80gb"
WIDTH = 32
ROOM = 1 << 40


class Picky(nn.Module):
    """A residual MLP that takes some batch sizes only, and some lengths."""

    def __init__(self, takes: Callable[[int], bool], takes_length: Callable[[int], bool]):
        super().__init__()
        self.takes, self.takes_length = takes, takes_length
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.takes(x.shape[0]) or (x.dim() == 3 and not self.takes_length(x.shape[1])):
            raise ValueError(f"no batch of {tuple(x.shape)}")
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def all_of(size: int) -> bool:
    return True


def picky(
    takes: Callable[[int], bool],
    batch_size: int,
    seq_len: int | None = None,
    takes_length: Callable[[int], bool] = all_of,
) -> Workload:
    def batch(rows: int, length: int | None) -> Any:
        shape = (rows,) if length is None else (rows, length)
        return {"x": torch.randn(*shape, WIDTH), "y": torch.randint(0, 10, shape)}

    build = functools.partial(Picky, takes, takes_length)
    return Workload("picky", build, batch, loss_of, batch_size=batch_size, seq_len=seq_len)


class Normed(nn.Module):
    """An MLP with batch normalization, which refuses one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def normed(batch_size: int) -> Workload:
    return Workload("normed", Normed, picky(all_of, 1).batch, loss_of, batch_size=batch_size)


def refused(plan: Any) -> set[int]:
    return {each["batch_size"] for each in plan.about.get(REFUSED_SIZES, ())}


def divides_256(size: int) -> bool:
    return 256 % size == 0


# The search over sizes


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 400))
def test_the_largest_multiple_that_fits_is_found_from_any_guess(edge: int, unit: int, guess: int) -> None:
    def near(size: int, low: int, high: int) -> int | None:
        return next((each for each in neighbours(size, low, high, [unit]) if each % unit == 0), None)

    wanted = edge // unit * unit
    assert largest(lambda size: size <= edge, 400, guess, near) == wanted
    assert between(0, 401, lambda size: size <= edge, near) == wanted


@given(st.integers(1, 300), st.integers(0, 8), st.integers(1, 400))
def test_the_largest_divisor_of_a_queue_that_fits_is_found_from_any_guess(edge: int, power: int, guess: int) -> None:
    queue = 1 << power

    def near(size: int, low: int, high: int) -> int | None:
        return next((each for each in neighbours(size, low, high) if queue % each == 0), None)

    wanted = max(size for size in (1 << bit for bit in range(power + 1)) if size <= edge)
    assert largest(lambda size: size <= edge, 400, guess, near) == wanted


@given(st.integers(1, 300), st.integers(0, 100), st.integers(101, 400))
def test_a_size_that_is_taken_is_its_own_first_neighbour(size: int, low: int, high: int) -> None:
    found = list(neighbours(size, low, high, [24]))
    assert all(low < each < high for each in found)
    assert not low < size < high or found[0] == size


# A global batch


@pytest.mark.parametrize("target", [TARGET, "cpu"])
def test_a_batch_of_one_that_batch_normalization_refuses_ends_no_search(target: str) -> None:
    best = remat.fit(normed(8), global_batch=12, budget=ROOM, target=target)
    assert (best.best.micro_batch, refused(best.plan)) == (12, {1})
    (said,) = (line for line in str(best.plan).splitlines() if "search left" in line)
    assert "the model refuses batches of 1 (ValueError: Expected more than 1 value per channel" in said


def test_an_image_pool_with_batch_normalization_is_fitted() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
            self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.stem(x))
            return F.cross_entropy(self.head(x + self.pool(x)).flatten(2).mean(2), torch.zeros(len(x)).long())

    batch = lambda rows, _: torch.randn(rows, 3, 8, 8)  # noqa: E731
    workload = Workload("pooled", Pooled, batch, lambda model, x: model(x), batch_size=4)
    assert refused(remat.fit(workload, global_batch=4, budget=ROOM, target=TARGET).plan) == {1}


def of_device(bytes_above: float) -> int:
    """A budget: so many bytes above the states of `Picky` and the library workspaces of an H100."""
    return int(64.5 * MIB + bytes_above)


@pytest.mark.parametrize(
    ("takes", "own", "samples", "window"),
    [
        pytest.param(divides_256, 128, 192, (128, 64), id="queue"),  # 192 does not divide 256; 128 and 64 do
        pytest.param(lambda size: size % 8 == 0, 16, 192, (192, 192), id="multiples"),  # also of neither 2 nor 4
        pytest.param(lambda size: size == 48, 48, 192, (48, 48), id="one-size"),  # no two sizes to scale from
        pytest.param(lambda size: size > 1, 1, 192, (192, 192), id="its-own-is-refused"),
    ],
)
def test_the_search_goes_on_with_the_sizes_that_the_model_takes(
    takes: Callable[[int], bool], own: int, samples: int, window: tuple[int, int]
) -> None:
    best = remat.fit(picky(takes, own), global_batch=samples, budget=ROOM, target=TARGET)
    assert (best.best.micro_batch, best.best.last) == window
    assert all(map(takes, (each for found in best.candidates for each in (found.micro_batch, found.last))))
    assert refused(best.plan) and not any(map(takes, refused(best.plan)))
    assert (best.rungs[micro_batches.RUNGS[0]] is None) == (not takes(samples))


def test_divisors_that_the_search_does_not_meet_are_candidates_too() -> None:
    """Below 100, halving comes to 64; 75 and 100 divide the batch."""
    found = remat.fit(picky(lambda size: size <= 100, 8), global_batch=300, budget=ROOM, target=TARGET)
    assert {(each.micro_batch, each.last) for each in found.candidates} >= {(100, 100)}
    assert (found.best.micro_batch, found.best.accumulation) == (100, 3)


def test_a_last_micro_batch_that_the_model_refuses_is_left_out() -> None:
    """Of 101 samples, none of the divisors but 1 and 101 is a micro-batch; 100 leaves one over."""
    place, limit = find_planning_device(TARGET), Budget(ROOM, ROOM)
    look = studies.micro_batches(picky(lambda size: size > 1, 8), place, limit)
    look.taken.require(2)
    with pytest.raises(CaptureError, match="refuses batches of 1 "):
        look.taken.require(1)
    assert not look.takes(Window(101, 100))
    (cut,) = look._cuts(Window(101, 100))
    assert look.takes(Window(101, cut)) and cut == 96  # a multiple of 32, and 5 are left over


def test_a_chosen_window_is_looked_at_before_it_is_planned() -> None:
    look = studies.micro_batches(picky(divides_256, 64), find_planning_device(TARGET), Budget(ROOM, ROOM))
    with pytest.raises(CaptureError, match=r"does not take every batch size: the model refuses batches of 36 \(Value"):
        look.plan(Window(100, 64))


def test_with_too_small_a_budget_the_least_size_that_the_model_takes_is_refused_for_it() -> None:
    with pytest.raises(Infeasible, match=r"budget 1\.00 KiB is below the least possible peak"):
        remat.fit(picky(lambda size: size % 8 == 0, 16), global_batch=64, budget=1024, target=TARGET)


def test_a_model_that_refuses_every_size_is_refused_with_the_sizes() -> None:
    with pytest.raises(
        CaptureError,
        match=r"takes no batch .* refuses batches of 1, 2, 3, 4, 6 \(ValueError: no batch of \(6.* multiple",
    ):
        remat.fit(picky(lambda size: size == 8, 8), global_batch=6, budget=ROOM, target=TARGET)


def test_a_step_that_fails_at_its_own_size_is_refused_with_its_error() -> None:
    nothing, said = (
        picky(lambda size: False, 8),
        r"fails on a batch of its own size, 8: ValueError: no batch of \(8, 32\)",
    )
    for refused_by in (
        lambda: remat.fit(nothing, global_batch=6, budget=ROOM, target=TARGET),
        lambda: remat.largest_batch(nothing, budget=ROOM, target=TARGET),
    ):
        with pytest.raises(CaptureError, match=said) as refusal:
            refused_by()
        assert "multiple" not in str(refusal.value)


def test_multiples_of_the_own_size_are_tried_before_other_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look(workload: Workload, place: PlanningDevice) -> str | None:
        looked.append(workload.batch_size)
        return error_at(workload, place)

    monkeypatch.setattr(refused_sizes, "error_at", look)
    workload, budget = picky(lambda size: size % 24 == 0, 24), of_device(8 * MIB)
    assert remat.largest_batch(workload, budget=budget, target=TARGET).about["batch_size"] % 24 == 0
    print(len(looked), looked)
    assert len(looked) < 40


def test_what_no_size_helps_with_ends_the_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look(workload: Workload, place: PlanningDevice) -> str | None:
        looked.append(workload.batch_size)
        return error_at(workload, place)

    def reads(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        return loss if loss.item() > 0 else 2 * loss

    monkeypatch.setattr(refused_sizes, "error_at", look)
    workload = Workload("reads", functools.partial(Picky, all_of, all_of), picky(all_of, 8).batch, reads, batch_size=8)
    with pytest.raises(CaptureError, match="reads a number off a tensor"):
        remat.fit(workload, global_batch=24, budget=ROOM, target=TARGET)
    assert looked == [2]


def test_a_plan_names_few_sizes_with_short_errors() -> None:
    every = [RefusedSize(size, None, "ValueError: " + "long " * 100) for size in range(1, 31)]
    named = to_json(every)
    assert [each["batch_size"] for each in named] == [*range(1, 11)]
    assert [each["more"] for each in named] == [0] * 9 + [20] and max(len(each["error"]) for each in named) == 200
    (said,) = refused_sizes_of({REFUSED_SIZES: named})
    assert "batches of 1, 2, 3, 4, 5, 6, 7, 8 and 22 more (ValueError" in said
    assert to_json(every[:3])[-1]["more"] == 0


# The largest batch, the longest sequence, the most tokens


@pytest.mark.parametrize(
    ("takes", "own"),
    [
        pytest.param(divides_256, 128, id="queue"),
        pytest.param(lambda size: size % 24 == 0, 24, id="multiples"),
        pytest.param(lambda size: size > 1, 1, id="its-own-is-refused"),
    ],
)
def test_the_largest_batch_is_one_that_the_model_takes(takes: Callable[[int], bool], own: int) -> None:
    """No size that the model takes is between it and the largest batch of a model that takes all."""
    budget = of_device(0.1 * MIB)
    found = remat.largest_batch(picky(takes, own), budget=budget, target=TARGET)
    size, most = found.about["batch_size"], remat.largest_batch(picky(all_of, own), budget=budget, target=TARGET)
    assert takes(size) and not any(map(takes, range(size + 1, most.about["batch_size"] + 1)))
    assert found.predicted["peak_bytes"] <= budget
    assert not any(map(takes, refused(found)))


def test_a_longer_sequence_that_the_model_refuses_ends_no_search() -> None:
    workload = picky(all_of, 4, seq_len=64, takes_length=lambda length: length <= 72 and length % 8 == 0)
    found = remat.longest_sequence(workload, budget=ROOM, target=TARGET)  # steps of 4
    assert found.about["seq_len"] == 72
    assert {each["seq_len"] for each in found.about[REFUSED_SIZES]} >= {68, 80}


def test_the_most_tokens_are_of_rows_that_the_model_takes() -> None:
    workload = picky(lambda size: size % 2 == 0, 2, seq_len=16)
    budget = of_device(0.1 * MIB)
    cap = remat.most_tokens(workload, budget=budget, target=TARGET).about
    most = remat.most_tokens(picky(all_of, 2, seq_len=16), budget=budget, target=TARGET).about[TOKEN_CAP]["tokens"]
    assert cap["batch_size"] % 2 == 0
    assert 0 <= most - cap[TOKEN_CAP]["tokens"] < 2 * 16


# Sizes beside a search


def test_advice_names_no_batch_that_the_model_refuses() -> None:
    place, workload = find_planning_device(TARGET), normed(2)
    found = profile(workload, target=TARGET).graph
    levers = advise(workload, place, TrainingLoop(), found, lambda graph, costs: int(graph.storages.size_bytes.sum()))
    assert levers and not any("micro-batch" in lever.what for lever in levers)


def test_validation_halves_a_batch_no_further_than_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validated_sizes, "BEARABLE_S", 1e-9)
    workload = normed(8)
    report = remat.validate(workload, remat.plan(workload, budget=ROOM, target="cpu"), repeats=1)
    assert report.batch_size == 2
