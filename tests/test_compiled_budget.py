"""Compiled training under a budget: what is promised is measured, what is computed is what torch computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.compiled.joint import Joint, Value
from remat.compiled.outside import outside_of
from remat.compiled.partitioner import BudgetPartitioner
from remat.compiled.program import judged, solve
from remat.costing.device_allocator import measure_peak
from remat.errors import Infeasible, UsageError

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")
CPU = torch.device("cpu")


class MLP(nn.Module):
    """Layers whose activations are large beside their parameters; the loss is in the graph."""

    def __init__(self, layers: int = 3, width: int = 16, dropout: float = 0.1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(nn.functional.gelu(layer(x)))
        return x.square().mean()


def built(make: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def batch(rows: int = 256, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[BudgetPartitioner]:
    """The partitioners that were made."""
    made: list[BudgetPartitioner] = []
    init = BudgetPartitioner.__init__

    def noting(self: BudgetPartitioner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(BudgetPartitioner, "__init__", noting)
    return made


def trained(
    model: nn.Module, run: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """The first step's gradients; the peak of a later whole step, with all that is there before it."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        torch.manual_seed(1)
        run(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    run(*inputs).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    fixed = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers(), inputs, state))
    return gradients, fixed + measure_peak(step, CPU)


# The whole way


@pytest.mark.parametrize("share", [pytest.param(2.0, id="roomy"), pytest.param(0.85, id="tight")])
def test_a_planned_step_keeps_its_budget_and_computes_what_an_unplanned_one_does(
    share: float, cuts: list[BudgetPartitioner]
) -> None:
    x, model = batch(), built()
    expected, untouched = trained(model, torch.compile(model), x)
    torch._dynamo.reset()
    model, budget = built(), int(share * untouched)
    got, measured = trained(model, remat.compile(model, budget), x)
    (cut,) = cuts[0].cuts.values()
    assert measured <= cut.peak_bytes <= budget
    assert cut.peak_bytes <= 1.001 * measured
    assert all(map(torch.equal, got, expected))  # dropout among it
    assert (cut.choice == cut.default) == (share > 1)


def test_what_cannot_fit_is_refused_with_the_least_peak_found() -> None:
    model = built()
    with pytest.raises(Infeasible, match=r"does not fit 8\.00 KiB: the least peak found is") as caught:
        remat.compile(model, "8KiB")(batch())
    least = caught.value.minimum_budget_bytes
    assert least is not None
    torch._dynamo.reset()
    remat.compile(model, least)(batch())  # that one fits


def test_a_budget_that_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="20GiB"):
        remat.compile(built(), "20")
    with pytest.raises(UsageError, match="number of bytes"):
        remat.compile(built(), -1)


# The program


def value(name: str, size: int, inputs: tuple[int, ...], stage: int | None, **changed: Any) -> Value:
    made = Value(name, size, 0.0, 1.0, size, inputs, stage, stage, can_save=True, can_remake=True)
    return dataclasses.replace(made, **changed)


# Three layers a -> b -> c; backward reads c, then b, then a; each is 4 bytes, and backward has 1 of its own.
CHAIN = Joint((value("a", 4, (), 2), value("b", 4, (0,), 1), value("c", 4, (1,), 0)), (1, 1, 1))


@pytest.mark.parametrize(
    ("saved", "remade_us", "kept", "alive"),
    [
        ("abc", 0, 12, (13, 9, 5)),
        ("ab", 1, 8, (13, 9, 5)),  # c is made again in stage 0, beside a and b
        ("a", 2, 4, (13, 9, 5)),  # b is made again in stage 0, for c, and stays until stage 1
        ("bc", 1, 8, (9, 5, 5)),  # a is made again in stage 2, when b and c are gone
    ],
)
def test_a_choice_is_judged_by_when_it_makes_values_again(
    saved: str, remade_us: float, kept: int, alive: tuple[int, ...]
) -> None:
    choice = judged(CHAIN, saved)
    assert (choice.remade_us, choice.kept_bytes, choice.alive_bytes) == (remade_us, kept, alive)


def subsets(joint: Joint) -> Iterator[frozenset[str]]:
    names = [value.name for value in joint.values]
    for count in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, count))


@pytest.mark.parametrize("budget", [4, 5, 8, 9, 12, 13])
def test_the_program_finds_what_trying_every_choice_finds(budget: int) -> None:
    wide = (
        value("a", 3, (), 3),
        value("b", 5, (0,), 2, save_us=0.5),
        value("c", 2, (1,), None),
        value("d", 4, (0, 2), 1),
    )
    for joint in (CHAIN, Joint(wide, (1, 0, 2, 1))):
        choices = [judged(joint, saved) for saved in subsets(joint)]
        fitting = [c.price_us for c in choices if max(c.kept_bytes, *c.alive_bytes) <= budget]
        answer = solve(joint, budget, gap=0.0)
        assert (answer.saved is None) == (not fitting)
        if answer.saved is not None:
            found = judged(joint, answer.saved)
            assert max(found.kept_bytes, *found.alive_bytes) <= budget
            assert found.price_us == pytest.approx(min(fitting))
            assert answer.bound_us <= found.price_us + 1e-6


# Outside the graphs


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (None, 0),
        (torch.optim.SGD, 0),
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1),
    ],
    ids=["none", "sgd", "adamw", "momentum"],
)
def test_the_optimizers_state_is_counted_by_stepping_it(optimizer: Any, states: int) -> None:
    model, x = MLP(), batch()
    size = sum(p.nbytes for p in model.parameters())
    outside = outside_of([*model.parameters(), x], optimizer)
    counters = outside.always - size * (1 + states) - x.nbytes
    assert 0 <= counters <= 8 * 6 and outside.gradients == size


def test_an_optimizer_that_is_there_counts_like_its_class() -> None:
    model = MLP()
    there = torch.optim.AdamW(model.parameters(), lr=1.0, amsgrad=True)
    size = sum(p.nbytes for p in model.parameters())
    assert outside_of(model.parameters(), there).always >= 4 * size
