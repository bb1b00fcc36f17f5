"""Which function each part of the half hour is; what it is to show stands in the table of `benchmarks/device.py`.

On a GPU the models have their full size; on a CPU they are small, so that every line but CUDA's own is tried there.
A part is a function of a `Work`; every step of it that may fail alone is a `findings.step`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.half_hour.findings import Findings
from benchmarks.half_hour.gradients import gradients
from benchmarks.half_hour.machine import machine
from benchmarks.half_hour.plans import carried_plan, peers, solved_here
from benchmarks.half_hour.profiles import optimizer_peak, profile_of
from benchmarks.half_hour.untouched import untouched
from benchmarks.half_hour.work import Work

FUNCTIONS: dict[str, Callable[..., None]] = {
    "machine": machine,
    "gradients": gradients,
    "untouched": untouched,
    "untouched-expandable": untouched,
    "carried": carried_plan,
    "profile": profile_of,
    "optimizer": optimizer_peak,
    "solved-here": solved_here,
    "peers": peers,
}


def run(name: str, device: str, plans: Path, path: Path) -> None:
    """The part called `name`, or `KIND:ARGUMENT`, in this process; findings go to `path`."""
    signal.signal(signal.SIGTERM, _leave)
    kind, _, rest = name.partition(":")
    where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    FUNCTIONS[kind](Work(where, plans, Findings(path)), *([rest] if rest else []))


def _leave(*_: object) -> None:
    """Asked to end, a part leaves by way of what it has to save: costs that it measured."""
    sys.exit(f"ended by signal {signal.SIGTERM}")
