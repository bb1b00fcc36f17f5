"""A measured time, and the kernels that it is of: what every source gives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.cuda_kernels.substitute import UntracedForward
from remat.evaluation.graph import OpKind
from remat.recording.tracker import Tracker
from remat.workload.target import TARGETS, Target

Split = Literal["fit", "check"]
Kernels = tuple[tuple[OpKind, int], ...]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of a source.

    set      the source and the card, "liger h100-80gb"
    family   what a table puts in one row
    split    "fit" where a parameter of `remat/costing/roofline.py` was chosen by it, "check" for the others
    kernels  each kind, and how many times it runs
    eager    timed as Python runs it, one call at a time, so that a short one waits for the host
    """

    set: str
    family: str
    name: str
    split: Split
    target: Target
    measured_us: float
    kernels: Kernels
    eager: bool = False

    @property
    def launches(self) -> int:
        return sum(count for kind, count in self.kernels if kind.moved_bytes)


@contextlib.contextmanager
def on_fakes(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Make and run tensors as a CUDA card would, without one."""
    with mode or FakeTensorMode(), UntracedForward():
        yield


class _Tracker(Tracker):
    """Takes what an operator is given for older than the operator, so that a view of it is no kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fix(args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def kernels_of(function: Callable[[], Any]) -> Kernels:
    """The kernels that `function` dispatches, within `on_fakes`."""
    tracker = _Tracker(512)
    with tracker:
        function()
    kinds, counts = list(tracker.kinds.values()), Counter(tracker.op_kinds)
    return tuple((kinds[index], count) for index, count in sorted(counts.items()))


def flushed(target: Target) -> Target:
    """`target` whose L2 is emptied before every sample, as Triton's `do_bench` does."""
    return dataclasses.replace(target, l2_bytes=0)


def card(driver_name: str) -> Target:
    """The target that a source calls by its driver's name."""
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA H100 80GB HBM3": "h100-80gb",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "a100": "a100-80gb",
        "h100": "h100-80gb",
    }
    return TARGETS[names[driver_name]].with_versions(torch.__version__, (8, 9))
