"""Shared parts of tests of the command line: a user's model in a file, and a command's results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = """\
import os
import torch
import remat
from torch import nn

print("noise from Python")
os.write(1, b"noise from C\\n")

def build(layers=5):
    made = []
    for _ in range(layers):
        made += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*made, nn.Linear(64, 8))

def batch(batch_size, seq_len):
    return torch.randn(batch_size, 64), torch.randint(0, 8, (batch_size,))

def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def stack():
    return remat.Workload("stack", build, batch, step, batch_size=4096)

def short():
    return remat.Workload("short", lambda: build(2), batch, step, batch_size=4096)

def odd():
    def of_some_sizes(batch_size, seq_len):
        if batch_size % 64:
            raise ValueError("no such size")
        return batch(batch_size, seq_len)
    return remat.Workload("odd", lambda: build(2), of_some_sizes, step, batch_size=512)

def other():
    return remat.Workload("other", lambda: nn.Sequential(nn.Linear(64, 8), nn.Tanh()), batch, step, batch_size=4096)

def raises():
    return {}["nothing"]

def imports_relatively():
    from . import neighbour

made = stack()

def returns_three():
    return 3

def returns_class():
    return remat.Workload

def wants_more(argument):
    return stack()

def builds_nothing():
    def build():
        raise ValueError("no weights here")
    return remat.Workload("w", build, batch, step, batch_size=1)

def reads_nothing():
    return remat.Workload("w", build, lambda batch_size, seq_len: open("missing.bin"), step, batch_size=1)
"""


def line_of(code: str) -> int:
    """The line of model.py that `code` stands in."""
    return MODEL[: MODEL.index(code)].count("\n") + 1


Remat = Callable[..., "Ran"]
_MADE: dict[tuple[str, ...], dict[str, str]] = {}


def once(remat: Remat, *arguments: str) -> None:
    """Have the files that a command writes here; the first test of a process that asks for them runs it."""
    if arguments not in _MADE:
        before = set(Path().iterdir())
        assert remat(*arguments).exit_code == 0
        new = set(Path().iterdir()) - before
        _MADE[arguments] = {path.name: path.read_text() for path in new if path.is_file()}
    for name, text in _MADE[arguments].items():
        Path(name).write_text(text)


@dataclasses.dataclass(frozen=True)
class Ran:
    """The results of a command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> dict[str, Any]:
        """stdout as one JSON document: anything beside it does not parse."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found
