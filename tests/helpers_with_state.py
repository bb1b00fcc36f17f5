"""Helper functions that keep something from call to call, each in another place; each result depends on it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

COUNTS = {"n": 0}
CALLS = 0
TOTAL = torch.zeros(1)
PAST: list[torch.Tensor] = []
TORCHS, PYTHONS, NUMPYS = torch.Generator(), random.Random(0), np.random.default_rng(0)


@dataclasses.dataclass
class Meter:
    mean: float = 0.0
    calls: int = 0

    def update(self, by: float) -> float:
        self.mean, self.calls = 0.9 * self.mean + by, self.calls + 1
        return self.mean

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


METER, CALLED, BOUND = Meter(), Meter(), Meter().update


class Base:
    calls = 0

    @staticmethod
    def counted() -> int:
        Base.calls += 1
        return Base.calls

    @functools.cached_property
    def lazy(self) -> int:
        return dictionary()


class Kind(Base):
    class Inner:
        calls = 0


def dictionary() -> int:
    COUNTS["n"] += 1
    return COUNTS["n"]


def number() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def closure() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


CLOSED = closure()
PARTIAL = functools.partial(dictionary)
BY_NAME: dict[str, Any] = {"kind": Kind}


def attribute() -> int:
    vars(attribute)["calls"] = vars(attribute).get("calls", 0) + 1
    return int(vars(attribute)["calls"])


def tensor() -> torch.Tensor:
    return TOTAL.add_(1).clone()


def listed() -> int:
    PAST.append(torch.ones(1))
    return len(PAST)


def inner() -> int:
    Kind.Inner.calls += 1
    return Kind.Inner.calls


def imported() -> int:
    from tests.helpers_with_state import dictionary as counted

    return counted()


@functools.wraps(dictionary)
def decorated() -> int:
    return dictionary() + 1


def drawn() -> torch.Tensor:
    return torch.rand(1, generator=TORCHS)


HELPERS: dict[str, Callable[[], Any]] = {
    "dictionary": lambda: dictionary(),
    "number": lambda: number(),
    "closure": lambda: CLOSED(),
    "attribute of a function": lambda: attribute(),
    "tensor": lambda: tensor(),
    "object": lambda: METER.update(1.0),
    "object that is called": lambda: CALLED(),
    "bound method": lambda: BOUND(1.0),
    "list": lambda: listed(),
    "static method": lambda: Kind.counted(),
    "cached property": lambda: Kind().lazy,
    "class in a class": lambda: inner(),
    "class in a table": lambda: BY_NAME["kind"].counted(),
    "partial": lambda: PARTIAL(),
    "import in a function": lambda: imported(),
    "decorated": lambda: decorated(),
    "torch's generator": lambda: drawn(),
    "Python's generator": lambda: PYTHONS.random(),
    "numpy's generator": lambda: NUMPYS.random(),
}
