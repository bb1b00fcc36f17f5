"""The fakes of a recorded step are torch's: the quicker key tells apart what torch's key tells apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from remat._torch.step_fakes import StepFakes

aten = torch.ops.aten

MADE: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.empty(4, 6),
    "the same": lambda: torch.empty(4, 6),
    "parameter": lambda: nn.Parameter(torch.empty(4, 6)),
    "other shape": lambda: torch.empty(6, 4),
    "other strides": lambda: torch.empty(6, 4).t(),
    "other dtype": lambda: torch.empty(4, 6, dtype=torch.bfloat16),
    "other device": lambda: torch.empty(4, 6, device="meta"),
    "with an offset": lambda: torch.empty(30)[6:].view(4, 6),
    "of a larger storage": lambda: torch.empty(30)[:24].view(4, 6),
    "with a gradient": lambda: torch.empty(4, 6, requires_grad=True),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "conjugate": lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.empty(4, 6, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.empty(4, 6).to_sparse(),
    "1": lambda: 1,
    "1.0": lambda: 1.0,
    "True": lambda: True,
    "2": lambda: 2,
    "None": lambda: None,
    "dtype": lambda: torch.float32,
    "list": lambda: [1, 2],
    "tuple": lambda: (1, 2),
    "nested": lambda: [1, [2]],
    "list of tensors": lambda: [torch.empty(4, 6), torch.empty(4, 6)],
}


class State:
    """torch's note of symbols in a key: there are none."""

    known_symbols = ()


def key_of(mode: FakeTensorMode, kind: type[FakeTensorMode], args: Any, kwargs: Any) -> Any:
    """The key, or why there is none."""
    try:
        return kind._cache_key(mode, State(), aten.add.Tensor, args, kwargs)  # type: ignore[arg-type]
    except fake_tensor._BypassDispatchCache as error:
        return error.reason


def test_two_calls_have_one_key_where_torchs_are_one() -> None:
    with StepFakes() as mode:
        calls: dict[str, tuple[Any, Any]] = {name: ((make(),), {}) for name, make in MADE.items()}
    calls |= {
        "none": ((), {}),
        "by name": ((1,), {"alpha": 2}),
        "by another name": ((1,), {"beta": 2}),
        "by no name": ((1, 2), {}),
    }
    ours, torchs = (
        {name: key_of(mode, kind, *call) for name, call in calls.items()} for kind in (StepFakes, FakeTensorMode)
    )
    for one, other in itertools.combinations(calls, 2):
        assert (ours[one] == ours[other]) == (torchs[one] == torchs[other]), (one, other)
    assert ours["tensor"] == ours["the same"] != torchs["tensor"]


def test_a_tensor_that_is_changed_is_described_anew() -> None:
    with StepFakes() as mode:
        tensor = torch.empty(4, 6)
        before = key_of(mode, StepFakes, (tensor,), {})
        tensor.t_()
        assert key_of(mode, StepFakes, (tensor,), {}) != before
        tensor.t_()
        assert key_of(mode, StepFakes, (tensor,), {}) == before
        tensor.data = torch.empty(4, 7)
        assert key_of(mode, StepFakes, (tensor,), {}) != before


@pytest.mark.parametrize("around", ["as it is", "float64 by default", "inference"])
def test_results_are_those_that_operators_make(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compares every result that it remembers with one made anew."""
    mode = StepFakes()
    monkeypatch.setattr(mode, "cache_crosscheck_enabled", True)
    hits = FakeTensorMode.cache_hits
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if "64" in around else before)
    try:
        with mode, torch.inference_mode(around == "inference"):
            for _ in range(2):
                step(learns=around != "inference")
    finally:
        torch.set_default_dtype(before)
    assert FakeTensorMode.cache_hits > hits + 20


def step(*, learns: bool) -> None:
    layer, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    x = torch.randn(4, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            x = norm(x + F.dropout(F.gelu(layer(x)), 0.1))
    loss = F.cross_entropy(torch.cat([x, x[:2]]), torch.zeros(6, dtype=torch.long)) + torch.ones(3).mul_(2).sum()
    if learns:
        loss.backward()
        torch.optim.AdamW([*layer.parameters(), *norm.parameters()]).step()
