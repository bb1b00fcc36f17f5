"""A flag on which only an error hangs is no branch: checks on values pass while planning, and their operators count."""

from __future__ import annotations

import contextlib
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from remat._torch.step_fakes import StepFakes
from remat.capture.composites_on_fakes import composites_on_fakes
from remat.costing.device_allocator import measure_peak
from remat.errors import CaptureError
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
    assert x.shape[0] > 4 or x.isfinite().all()
    if x.shape[0] == 4 and (x.isnan().any() or x.sum() < 3): raise ValueError  # fmt: skip  # noqa: E701
    if x.isnan().any():
        said = "not a number"
        raise ValueError(said)
    if not torch.all(x < 3) or (x.min() < 0).item():
        raise ValueError
    if x.shape[0] > 4:
        raise ValueError
    elif (x > 5).any():  # noqa: RET506
        raise TypeError
    try:
        with torch.no_grad():
            assert x.min() < 3
    finally:
        x = x + 1
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


REFUSED = {  # by name, the body of a function of a tensor `x`
    "skips-after-or": "assert x.isnan().any() or x.isfinite().all()",
    "skips-after-and": "if x.isnan().any() and (x > 3).any(): raise ValueError",
    "skips-within": "assert x.shape and ((x > 3).any() or x.all()) and x.any()",
    "skips-negated": "assert not (x.isnan().any() and x.any())",
    "skips-in-a-chain": "assert 0 < x.min() < 3",
    "handled": "try:\n if (x > 3).any(): raise TypeError\nexcept TypeError: return 1",
    "assertion-handled": "try:\n with torch.no_grad(): assert torch.equal(x, x)\nexcept AssertionError: return 1",
    "suppressed": "with contextlib.suppress(TypeError):\n if (x > 3).any(): raise TypeError",
    "expected": "with pytest.raises(TypeError):\n if (x > 3).any(): raise TypeError",
    "next": "def __next__():\n assert x.all()\n__next__()",
    "item": "def __getitem__():\n assert x.all()\n__getitem__()",
    "attribute": "def __getattr__():\n assert x.all()\n__getattr__()",
    "returns": "if x.any():\n if len(x) == 1: return 1\n raise TypeError",
    "continues": "for i in range(2):\n if x.any():\n  if i < 1: continue\n  raise TypeError",
    "yields": "def each():\n if x.any():\n  yield 1\n  raise TypeError\nlist(each())",
    "raises-last": "if x.any():\n raise TypeError\n return 1",
    "other-statement": "ok = True\nassert ok; y = 1 if x.any() else 2",
    "after-a-check": "if len(x) > 9: raise TypeError\nreturn 1 if x.any() else 2",
    "in": "assert x[0] in [x[0]]",
    "not-in": "assert x[0] not in [x[0]]",
    "unequal": "if x.sum() != x.min(): raise TypeError",
    **({} if sys.version_info >= (3, 13) else {"tuples": "assert (x[0],) == (x[0] + 1,)"}),  # there no jump reads it
    "is": "assert x.any().item() is True",
    "is-not": "assert x.any().item() is not False",
    "operator": "import operator\nassert operator.not_(x.isnan().any())",
    "filter": "assert list(filter(None, [x.any()]))",
    "sorted": "assert sorted([x > 0, x < 0])",
    "item-passed-on": "assert str(x.any().item())",
    "choice-within": "assert bool(x.any() or 1)",
    "not-within": "assert str(not x.any())",
    "conditional": "assert len(x) == 1 and (1 if x.any() else 2)",
    "comprehension": "assert [1 for each in x if each > 0]",
    "generator": "assert all(each > 0 for each in x)",
    "lambda": "assert (lambda: x.any().item())() and x.any()",
    **{f"raises-{name}": f"if x.any(): raise {name}" for name in ("StopIteration", "StopAsyncIteration", "IndexError")},
    **{f"raises-{name}": f"if x.any(): raise {name}('no')" for name in ("KeyError", "AttributeError", "GeneratorExit")},
}
REFUSED_WITHOUT_POSITIONS = {
    "other-statement-after": "assert x.any(); y = 1",
    "other-statement-before": "y = 1; assert x.any()",
    "other-header": "if len(x): assert x.any()",
    "two-answers": "assert x.any() and not x.isnan().any()",
    "skips": "assert len(x) > 9 or x.isfinite().all()",
    "call": "assert x.any().item()",
    "method-line": "assert (x\n .any()\n .item())",
}


def written(body: str, path: Path) -> Callable[[Tensor], Any]:
    """A function with a source."""
    path.write_text("def reads(x):\n" + textwrap.indent(body, " ") + "\n")
    found: dict[str, Any] = {"torch": torch, "contextlib": contextlib, "pytest": pytest}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found["reads"]


def without_columns(reads: Any) -> Callable[[Tensor], Any]:
    """A function of which Python knows lines alone, as of some that Dynamo writes, and by `-X no_debug_ranges`."""
    table, before = b"", reads.__code__.co_firstlineno
    for start, end, line in reads.__code__.co_lines():
        for _ in range(start, end, 2):
            change = 0 if line is None else line - before
            table += b"\xf8" if line is None else bytes((0xE8, 2 * abs(change) + (change < 0)))
            before += change
    reads.__code__ = reads.__code__.replace(co_linetable=table)
    return reads


@contextlib.contextmanager
def on_fakes() -> Iterator[Tensor]:
    with StepFakes(), KnownValues().followed(), composites_on_fakes():
        yield torch.rand(4)


def test_a_check_passes_however_it_is_written() -> None:
    with on_fakes() as x:
        assert passes(x)
        F.gaussian_nll_loss(x, x, x)
        torch.distributions.Normal(x, x.exp()).log_prob(x)
        torch.distributions.Categorical(x.softmax(0)).entropy()


@pytest.mark.parametrize("reads", [branches, handles, reads_a_number, compares_a_flag, loops, bool])
def test_what_decides_anything_else_is_not_known(reads: Callable[[Tensor], Any]) -> None:
    with on_fakes() as x, pytest.raises(DataDependentOutputException):
        reads(x[:1])


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_may_decide_anything_else_is_not_known(body: str, tmp_path: Path) -> None:
    with on_fakes() as x, pytest.raises(DataDependentOutputException):
        written(body, tmp_path / "source.py")(x[:1])


@pytest.mark.parametrize("body", REFUSED_WITHOUT_POSITIONS.values(), ids=REFUSED_WITHOUT_POSITIONS)
def test_where_lines_alone_are_known_more_is_not_known(body: str, tmp_path: Path) -> None:
    reads = written(body, tmp_path / "source.py")
    with on_fakes() as x:
        assert reads(x) is None
        with pytest.raises(DataDependentOutputException):
            without_columns(reads)(x)


@pytest.mark.parametrize(
    "body",
    [
        "assert x.isfinite().all()",
        "assert not (x.isnan().any() or (x > 3).any())",
        "if not (\n x.all() and\n x.isfinite().all()\n): raise ValueError",
        "if x.isnan().any() or x.sum() < 0:\n raise TypeError",
    ],
)
def test_where_lines_alone_are_known_a_check_passes(body: str, tmp_path: Path) -> None:
    reads = written(body, tmp_path / "source.py")
    with on_fakes() as x:
        assert reads(x) is without_columns(reads)(x) is None


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


def skipped(x: Tensor) -> Tensor:
    assert (x > 9).any() or (x @ x.T).isfinite().all()
    return x


def retried(x: Tensor) -> Tensor:
    try:
        if (x > 9).any():
            raise FloatingPointError
    except FloatingPointError:
        return (x @ x.T).exp() @ x
    return x


def heard(x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    spectrum = torch.stft(x.flatten()[None], 16, window=window, return_complex=True)
    return torch.istft(spectrum, 16, window=window).view_as(x)


def weighed(x: Tensor) -> Tensor:
    return x + torch.cov(x, aweights=x[0].sigmoid())[0].mean()


def normal(x: Tensor) -> Tensor:
    return x + F.gaussian_nll_loss(x, torch.zeros_like(x), x.exp())


def checking(check: Callable[[Tensor], Tensor], inside: bool) -> Workload:
    return Workload(
        "checked",
        lambda: Checked(check if inside else torch.sin),
        lambda size, length: torch.randn(size, WIDTH),
        lambda model, x: (model(x) if inside else check(model(x))).square().mean(),
        batch_size=ROWS,
        optimizer=None,
    )


@pytest.mark.parametrize("check", [skipped, retried])
def test_a_step_that_may_be_another_is_not_planned(check: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"reads a number off a tensor.*test_passed_checks"):
        recorded(checking(check, inside=True))


@pytest.mark.parametrize("inside", [True, False], ids=["in-the-model", "in-the-step"])
@pytest.mark.parametrize("check", [asserted, drawn_and_asserted, raised, heard, weighed, normal])
def test_a_step_that_checks_is_planned_with_what_its_checks_make(
    check: Callable[[Tensor], Tensor], inside: bool
) -> None:
    w = checking(check, inside)
    _, graph = recorded(w)
    model, x = w.build(), w.batch(ROWS, None)
    fixed = sum(p.nbytes for p in model.parameters()) + x.nbytes
    w.step(model, x).backward()
    model.zero_grad()
    peak = fixed + measure_peak(lambda: w.step(model, x).backward(), CPU, requested=True)
    assert Memory(graph).peak_without_checkpointing == pytest.approx(peak, rel=0.001)
