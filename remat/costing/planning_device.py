"""The device that a plan is for: a target, and whether it is at hand."""

from __future__ import annotations

import dataclasses
import os

import torch

from remat.costing.kernel_files import load_table
from remat.costing.kernel_table import KernelTable
from remat.errors import UsageError, require_argument
from remat.workload.target import TARGETS, Target, named

DEFAULT_TARGET = "h100-80gb"


@dataclasses.dataclass(frozen=True)
class PlanningDevice:
    """The device that a plan is for: a target, and the device at hand if it is this machine's.

    table  kernels that were measured on the target
    """

    target: Target
    device: torch.device | None
    table: KernelTable | None = None

    @property
    def substituted(self) -> bool:
        """Whether the target's kernels have to be put in place of this machine's."""
        return self.device is None and self.target.device == "cuda"


def find_planning_device(name: str | torch.device, costs: str | os.PathLike[str] | None = None) -> PlanningDevice:
    """Return the planning device of `--target name`, priced by the table `costs` if given.

    auto  this machine's GPU, or else `DEFAULT_TARGET`      cuda  this machine's GPU, or a UsageError
    cpu   this machine's CPU                                any other: a target by name

    A torch.device is the target of its type.

    Raises UsageError for an unknown name, for an unreadable table, and for a table beside this machine's device.
    """
    require_argument("target", name, str | torch.device, "auto, cuda, cpu, or a card by name")
    require_argument("costs", costs, str | os.PathLike | None, "the path of a table of kernel times")
    place = _device_named(name if isinstance(name, str) else _name_of(name))
    if costs is None:
        return place
    if place.device is not None:
        raise UsageError(f"costs={os.fspath(costs)} is for a target by name; kernels of this machine are measured.")
    return dataclasses.replace(place, table=load_table(costs))


def _name_of(device: torch.device) -> str:
    """Return the name of the target that `device` is, if it is this process's device of its type."""
    of_process = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
    return device.type if device.index in (None, of_process) else str(device)


def _device_named(name: str) -> PlanningDevice:
    from remat.costing.operator_timing import device_target

    if name == "cpu":
        return PlanningDevice(device_target(torch.device("cpu")), torch.device("cpu"))
    if name in ("auto", "cuda") and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return PlanningDevice(device_target(device), device)
    if name == "cuda":
        raise UsageError(
            '`target="cuda"` needs a CUDA device, and PyTorch sees none on this machine; '
            f"name a target instead, for example {DEFAULT_TARGET}."
        )
    if name == "auto":
        name = DEFAULT_TARGET
    target = named(name, TARGETS, torch.__version__.partition("+")[0], installed_cudnn())
    if target is None:
        raise UsageError(f"target {name!r} is not known; choose auto, cuda, cpu, {', '.join(TARGETS)}.")
    return PlanningDevice(target, None)


def installed_cudnn() -> tuple[int, ...] | None:
    """Return the version of cuDNN in this torch, None if it is built without."""
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return (found // 10000, found // 100 % 100, found % 100) if found else None  # 92000 is 9.20.0
