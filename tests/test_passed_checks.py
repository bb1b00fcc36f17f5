"""What only an error hangs on is no branch: checks on values pass while planning, and their operators count."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from remat.capture.composites_on_fakes import composites_on_fakes, of_step
from remat.costing.device_allocator import measure_peak
from remat.evaluation.evaluator import Memory
from remat.recording.known_values import KnownValues
from remat.workload.workload import Workload
from tests.toys import CPU, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH, ROWS = 32, 256


def passes(x: Tensor) -> bool:
    """Every way in which code that checks may be written."""
    assert x.isfinite().all()
    assert not (x > 3).any(), "too large"
    assert x.isfinite().all() and not x.isnan().any() and bool((x < 3).all()); assert (x < 3).all().item()  # fmt: skip  # noqa: E702
    if not (
        x.isfinite()
        .all()
    ):  # fmt: skip
        raise ValueError
    assert torch.equal(x, x)
    assert (x.sum() < 3) or x.isnan().any()
    if x.isnan().any():
        said = "not a number"
        raise ValueError(said)
    if not torch.all(x < 3) or (x.min() < 0).item():
        raise ValueError
    if x.shape[0] > 4:
        raise ValueError
    elif (x > 5).any():  # noqa: RET506
        raise IndexError
    torch._assert(x.isfinite().all(), "infinite")
    return True


def branches(x: Tensor) -> Any:
    if x.isnan().any():
        return x
    return None


def handles(x: Tensor) -> Any:
    if x.isnan().any():
        raise ValueError
    return 1 if (x > 0).all() else 0


def reads_a_number(x: Tensor) -> None:
    assert x.sum().item() > 3


def compares_a_flag(x: Tensor) -> None:
    assert x.isnan().any().item() is False


def loops(x: Tensor) -> None:
    while (x > 0).any():
        raise ValueError


@contextlib.contextmanager
def on_fakes() -> Iterator[Tensor]:
    with of_step(FakeTensorMode()), KnownValues().followed(), composites_on_fakes():
        yield torch.rand(4)


def test_a_check_passes_however_it_is_written() -> None:
    with on_fakes() as x:
        assert passes(x)
        F.gaussian_nll_loss(x, x, x)


@pytest.mark.parametrize("reads", [branches, handles, reads_a_number, compares_a_flag, loops, bool])
def test_what_decides_anything_else_is_not_known(reads: Callable[[Tensor], Any]) -> None:
    with on_fakes() as x, pytest.raises(DataDependentOutputException):
        reads(x[:1])


def test_a_check_of_known_values_says_what_they_say() -> None:
    with on_fakes(), pytest.raises(AssertionError):
        assert torch.equal(torch.arange(3), torch.ones(3, dtype=torch.int64))


def test_code_without_a_source_is_no_check() -> None:
    with on_fakes() as x, pytest.raises(DataDependentOutputException):
        exec(compile("assert x.isnan().any()", "gone.py", "exec"), {"x": x})


# A step


class Checked(nn.Module):
    """Layers, with `check` of each one's output."""

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.check(layer(x).tanh())
        return x


def asserted(x: Tensor) -> Tensor:
    assert (x == x).all()
    return x


def drawn_and_asserted(x: Tensor) -> Tensor:
    return asserted(x + random.randrange(1))


def raised(x: Tensor) -> Tensor:
    if torch.any(x.abs() > 9):
        raise ValueError("too large")
    return x


def heard(x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    spectrum = torch.stft(x.flatten()[None], 16, window=window, return_complex=True)
    return torch.istft(spectrum, 16, window=window).view_as(x)


def weighed(x: Tensor) -> Tensor:
    return x + torch.cov(x, aweights=x[0].sigmoid())[0].mean()


def normal(x: Tensor) -> Tensor:
    return x + F.gaussian_nll_loss(x, torch.zeros_like(x), x.exp())


@pytest.mark.parametrize("inside", [True, False], ids=["in-the-model", "in-the-step"])
@pytest.mark.parametrize("check", [asserted, drawn_and_asserted, raised, heard, weighed, normal])
def test_a_step_that_checks_is_planned_with_what_its_checks_make(
    check: Callable[[Tensor], Tensor], inside: bool
) -> None:
    w = Workload(
        "checked",
        lambda: Checked(check if inside else torch.sin),
        lambda size, length: torch.randn(size, WIDTH),
        lambda model, x: (model(x) if inside else check(model(x))).square().mean(),
        batch_size=ROWS,
        optimizer=None,
    )
    _, graph = recorded(w)
    model, x = w.build(), w.batch(ROWS, None)
    fixed = sum(p.nbytes for p in model.parameters()) + x.nbytes
    w.step(model, x).backward()
    model.zero_grad()
    peak = fixed + measure_peak(lambda: w.step(model, x).backward(), CPU, requested=True)
    assert Memory(graph).peak_without_checkpointing == pytest.approx(peak, rel=0.001)
