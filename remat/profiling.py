"""Profile: record a workload's step, and cost its operators, on a device or for a target.

A profile is a Graph with its Costs. It is a file: taken on the machine that has the GPU, solved on any other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from remat.costs import Costs, assumptions, estimate, with_library_workspaces
from remat.errors import UsageError
from remat.graph import Graph
from remat.loop import Loop
from remat.plans import read_json, write_atomically
from remat.record import FakeStep, record
from remat.sharding import shard
from remat.target import TARGETS, Target, named
from remat.untraced import with_untraced
from remat.workload import Workload

FORMAT = "remat-profile"
VERSION = 2  # 2: what the loop holds, which an older remat would not count
DEFAULT_TARGET = "h100-80gb"


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one step runs, allocates and keeps, and what it costs on `target`.

    whole  the graph as recorded, where `graph` is one rank's share of it; not part of the file
    """

    graph: Graph
    costs: Costs
    target: Target
    whole: Graph | None = None

    def workspace_of(self) -> dict[tuple[str, str], int]:
        """Kernels' own bytes by operator and signature, for a replay."""
        return self.costs.workspace_of(self.graph)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile file atomically."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "target": dataclasses.asdict(self.target),
            "costs": self.costs.to_json(),
            "graph": self.graph.to_json(),
        }
        write_atomically(Path(path), json.dumps(data) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile file. Raises `UsageError` where it is missing, corrupt or of a newer version."""
        data = read_json(Path(path), FORMAT, VERSION, "profile")
        try:
            return Profile(Graph.from_json(data["graph"]), Costs.from_json(data["costs"]), Target(**data["target"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a complete profile ({type(error).__name__}: {error}).") from error


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a plan is for: a target, and the device at hand whose kernels it runs, if it is this machine's."""

    target: Target
    device: torch.device | None

    @property
    def substituted(self) -> bool:
        """Whether the target's kernels have to be put in place of this machine's."""
        return self.device is None and self.target.device == "cuda"


def find_place(name: str) -> Place:
    """The place that `--target name` means.

    auto  this machine's GPU, or else `DEFAULT_TARGET`      cuda  this machine's GPU, or a UsageError
    cpu   this machine's CPU                                any other: a target by name
    """
    from remat.measure import device_target

    if name == "cpu":
        return Place(device_target(torch.device("cpu")), torch.device("cpu"))
    if name in ("auto", "cuda") and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return Place(device_target(device), device)
    if name == "cuda":
        raise UsageError(
            "--target cuda needs a CUDA device, and PyTorch sees none on this machine; "
            f"name a target instead, for example {DEFAULT_TARGET}."
        )
    if name == "auto":
        name = DEFAULT_TARGET
    target = named(name, TARGETS, torch.__version__.partition("+")[0], installed_cudnn())
    if target is None:
        raise UsageError(f"target {name!r} is not known; choose auto, cuda, cpu, {', '.join(TARGETS)}.")
    return Place(target, None)


def installed_cudnn() -> tuple[int, ...] | None:
    """Version of the cuDNN that this torch has, None where it is built without."""
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return (found // 10000, found // 100 % 100, found % 100) if found else None  # 92000 is 9.20.0


def fake_step(workload: Workload, place: Place, *, loop: Loop | None = None, compiled: bool = False) -> FakeStep:
    """The workload's step on fake tensors that pretend to be on `place`; `compiled` where training will compile it."""
    device = place.device or torch.device("cpu")
    if not place.substituted:
        return FakeStep(workload, device=device, loop=loop, compiled=compiled)
    from remat.kernel_attention import cudnn_attention_of
    from remat.kernel_casts import weight_cast_cache
    from remat.kernels import Untraced, substitute

    cudnn = cudnn_attention_of(place.target)
    return FakeStep(
        workload,
        device=device,
        loop=loop,
        prepare=functools.partial(substitute, autocast=workload.autocast, cudnn_attention=cudnn),
        recompute_context=weight_cast_cache,
        kernels_of=place.target.device,
        eager_context=functools.partial(Untraced, cudnn_attention=cudnn),
        compiled=compiled,
    )


def profile(
    workload: Workload,
    *,
    target: str = "auto",
    loop: Loop | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Record and cost the workload's step.

    On this machine's device the costs are measured, kind by kind (`on_progress` gets done and total); for a target
    by name they are estimated. Raises CaptureError where the model cannot be captured, UsageError for the target.
    """
    place = find_place(target)
    step = fake_step(workload, place, loop=loop)
    return profile_step(step, place, on_progress=on_progress)


def profile_step(step: FakeStep, place: Place, *, on_progress: Callable[[int, int], None] | None = None) -> Profile:
    """`profile` of a step that is there already, under the loop that it has now."""
    from remat.measure import measure

    whole = record(step, alignment_bytes=place.target.alignment_bytes)
    if place.device is None:
        whole = dataclasses.replace(whole, about={**whole.about, **assumptions(whole, place.target)})
        costs = estimate(whole, place.target)
    else:
        costs = measure(whole.kinds, place.device, on_progress=on_progress)
    whole = with_untraced(whole, step, costs, place.target, place.device)
    whole = with_library_workspaces(whole, place.target, costs)
    graph = shard(whole, step.loop)
    return Profile(graph, costs, place.target, whole if graph is not whole else None)
