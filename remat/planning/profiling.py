"""Profile: record a workload's step, and cost its operators, on a device or for a target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from remat.costing.costs import assumptions, roofline_costs, with_library_workspaces
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.evaluation.sharding import shard
from remat.planning.untraced import with_untraced
from remat.recording.fake_step import FakeStep
from remat.recording.recorder import record
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload


def fake_step(
    workload: Workload, place: PlanningDevice, *, loop: TrainingLoop | None = None, compiled: bool = False
) -> FakeStep:
    """The workload's step on fake tensors that pretend to be on `place`; `compiled` where training will compile it."""
    device = place.device or torch.device("cpu")
    if not place.substituted:
        return FakeStep(workload, device=device, loop=loop, compiled=compiled)
    from remat.cuda_kernels.attention import cudnn_attention_of
    from remat.cuda_kernels.autocast import weight_cast_cache
    from remat.cuda_kernels.substitute import Untraced, substitute

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
    loop: TrainingLoop | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Record and cost the workload's step.

    On this machine's device the costs are measured, kind by kind (`on_progress` gets done and total); for a target
    by name they are estimated. Raises CaptureError where the model cannot be captured, UsageError for the target.
    """
    place = find_planning_device(target)
    step = fake_step(workload, place, loop=loop)
    return profile_step(step, place, on_progress=on_progress)


def profile_step(
    step: FakeStep, place: PlanningDevice, *, on_progress: Callable[[int, int], None] | None = None
) -> Profile:
    """`profile` of a step that is there already, under the loop that it has now."""
    from remat.costing.operator_timing import time_operators

    whole = record(step, alignment_bytes=place.target.alignment_bytes)
    if place.device is None:
        whole = dataclasses.replace(whole, about={**whole.about, **assumptions(whole, place.target)})
        costs = roofline_costs(whole, place.target)
    else:
        costs = time_operators(whole.kinds, place.device, on_progress=on_progress)
    whole = with_untraced(whole, step, costs, place.target, place.device)
    whole = with_library_workspaces(whole, place.target, costs)
    graph = shard(whole, step.loop)
    return Profile(graph, costs, place.target, whole if graph is not whole else None)
