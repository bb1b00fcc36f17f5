"""Estimate: bytes by category and module, time and utilisation of a step, with a plan or without.

Nothing is solved here. The bytes are the evaluator's, at the instant of the peak, by category and by module; the time
is that of the operators one after the other. Utilisation is over the target's peak rate for the dtype that does most of
the arithmetic: MFU counts the model's own operations, HFU also those that are recomputed (Chowdhery et al. 2022,
appendix B).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from remat.capture.generators import generators_kept
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import form_of
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Offload, Plan, Region
from remat.execution.regions_in_graph import placed
from remat.offloading.link import Link
from remat.offloading.schedule import stall_us
from remat.offloading.timeline import Timeline
from remat.planning.layers_on_host import weights_wait_us
from remat.planning.profiling import fake_step, profile_step
from remat.planning.refusals import where
from remat.recording.fake_step import FakeStep
from remat.reservation.fragmentation import Footprint, assumed_settings, footprints
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peak of the step and what it consists of; bytes throughout.

    eager       peak of a forward that is not traced: its local variables keep tensors that a graph has freed. None
                under a plan, which is traced, and if it is not known
    first_step  peak of the very first step, which allocates the optimizer's state  at  place of the peak, in words
    phases      peaks of forward, backward and optimizer                           parts  at the peak, by category
    modules     activations, logits and loss at the peak by their module, all layers together
    """

    peak_bytes: int
    eager_bytes: int | None
    first_step_bytes: int
    at: str
    phases: dict[str, int]
    parts: dict[str, int]
    modules: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Speed:
    """One optimizer step on one rank; None if there are no tokens, or if the target's rate is not known.

    update_time_us  of all its micro-batches and the optimizer: the longer of device_us and host_us
    samples         of all ranks
    device_us       time to run its kernels on the device, with waits for copies from the host
    host_us         time to launch them on the host; 0 if costs were measured, and off CUDA
    mfu, hfu        shares of the target's peak rate, the model's operations alone and with the recomputed ones
    """

    update_time_us: float
    recompute_time_us: float
    samples: int
    samples_per_s: float
    tokens: int | None
    tokens_per_s: float | None
    model_flops: int
    mfu: float | None
    hfu: float | None
    device_us: float = 0.0
    host_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The memory and time of one step in one training loop.

    allocator  footprints in the caching allocator, under the assumed settings and with expandable segments switched;
               empty without such an allocator, and for a step that is not traced
    """

    about: dict[str, Any]
    target: str
    costs: str
    memory_bytes: int
    peaks: Peaks
    speed: Speed
    allocator: tuple[Footprint, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.about["workload"],
            "target": self.target,
            "costs": self.costs,
            "memory_bytes": self.memory_bytes,
            "parameters": self.about["parameter_count"],
            "loop": TrainingLoop.of(self.about).to_json(),
            "peaks": dataclasses.asdict(self.peaks),
            "allocator": [each.to_json() for each in self.allocator],
            "speed": dataclasses.asdict(self.speed),
        }


@generators_kept()
def estimate(
    workload: Workload,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    allocator: str | None = None,
) -> Estimate:
    """Estimate the memory of a step by category, and its time; nothing is solved.

    Args:
        workload: The training step.
        plan: The plan that the step runs under, or the path of its file; by default none.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        allocator: PYTORCH_CUDA_ALLOC_CONF of the training, by default that of the environment.

    Returns:
        Peaks in bytes and times in microseconds; prints as text.

    Raises:
        CaptureError: The model cannot be captured.
        UsageError: An argument is wrong.
        PlanMismatch: The plan is for another step.

    Example:
        >>> print(remat.estimate(workload, target="h100-80gb"))
    """
    place = find_planning_device(target, costs)
    plan = None if plan is None else Plan.of(plan)
    _, profile = recorded_for(plan, workload, place, loop)
    return estimate_under(plan, profile, allocator_of(plan, allocator))


def recorded_for(
    plan: Plan | None, workload: Workload, place: PlanningDevice, loop: TrainingLoop | None
) -> tuple[FakeStep, Profile]:
    """Record the step in the form that `plan` runs, in its loop if none is given."""
    step = fake_step(workload, place, loop=loop or (None if plan is None else TrainingLoop.of(plan.about)))
    if plan is not None:
        step.form = form_of(plan.about)
    return step, profile_step(step, place)


def allocator_of(plan: Plan | None, given: str | None) -> str | None:
    """Return the allocator settings to assume: `given`, else those that the plan assumes."""
    if given is not None or plan is None or not plan.predicted.get("allocator"):
        return given
    return str(plan.predicted["allocator"][0]["settings"])


def estimate_under(plan: Plan | None, profile: Profile, allocator: str | None = None) -> Estimate:
    """Estimate the step of `profile` under `plan`, if there is one. Raises PlanMismatch."""
    if plan is None:
        return estimate_of(profile, None, allocator)
    regions, offloads = placed(plan, profile.graph)
    return estimate_of(profile, regions, allocator, offloads)


def estimate_of(
    profile: Profile,
    planned: Sequence[Region] | None = None,
    allocator: str | None = None,
    offloads: Sequence[Offload] = (),
) -> Estimate:
    """Estimate the step of `profile` under a plan's regions and offloads; without a plan also as Python runs it.

    allocator  settings of PYTORCH_CUDA_ALLOC_CONF; those of the environment by default. Raises UsageError
    """
    settings, regions = assumed_settings(profile.target, allocator), planned or ()
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph)).offloading(offloads)
    return Estimate(
        about=graph.about,
        target=profile.target.name,
        costs=profile.costs.source,
        memory_bytes=profile.target.memory_bytes,
        peaks=_peaks(memory, regions, is_traced=planned is not None),
        speed=_speed(profile, memory, regions, _waited_us(profile, regions, offloads)),
        allocator=footprints(memory, regions, settings) if settings is not None else (),
    )


def _peaks(memory: Memory, regions: Sequence[Region], *, is_traced: bool) -> Peaks:
    curve, graph = memory.curve(regions), memory.graph
    return Peaks(
        peak_bytes=curve.peak_bytes,
        eager_bytes=memory.peak_without_checkpointing if len(graph.untraced_bytes) and not is_traced else None,
        first_step_bytes=memory.first_step_peak(regions),
        at=where(graph, int(curve.op[curve.peak_at])),
        phases={name: int(curve.alive_bytes[own].max(initial=0)) for name, own in curve.phases(graph).items()},
        parts=breakdown.at_peak(memory, regions),
        modules=breakdown.by_module(memory, regions, curve.peak_at),
    )


def _waited_us(profile: Profile, regions: Sequence[Region], offloads: Sequence[Offload]) -> float:
    """Return the time that a micro-batch waits for copies from the host."""
    memory, link = Memory(profile.graph), Link(profile.target.host_bytes_per_us, 0)
    timeline = Timeline(memory, regions, profile.costs.per_op_us(profile.graph)) if offloads else None
    stalled_us = 0.0 if timeline is None else stall_us(timeline, offloads, link)
    return weights_wait_us(profile, memory, regions) + stalled_us


def _speed(profile: Profile, memory: Memory, regions: Sequence[Region], waited_us: float) -> Speed:
    graph, loop = profile.graph, TrainingLoop.of(profile.graph.about)
    again_us = memory.recompute_time_us(regions, profile.costs.per_op_us(graph))
    device_us = profile.device_time_us(memory, regions, loop.accumulation, waited_us)
    host_us = profile.host_time_us(memory, regions, loop.accumulation)
    time_us = max(device_us, host_us)
    samples = graph.about["batch_size"] * loop.accumulation * loop.ranks
    tokens = samples * graph.about["seq_len"] if graph.about["seq_len"] else None
    flops = np.array([kind.flops for kind in graph.kinds], dtype=np.int64)[graph.op_kind]
    curve = memory.curve(regions)
    again = int(flops[curve.op[(curve.region >= 0) & curve.executed]].sum())
    own, peak_rate = int(flops.sum()), profile.target.flops_per_us.get(_dtype(graph, flops))
    most = peak_rate * time_us if peak_rate and time_us else None
    return Speed(
        update_time_us=time_us,
        recompute_time_us=loop.accumulation * again_us,
        samples=samples,
        samples_per_s=samples / time_us * 1e6 if time_us else 0.0,
        tokens=tokens,
        tokens_per_s=tokens / time_us * 1e6 if tokens and time_us else None,
        model_flops=own * loop.accumulation * loop.ranks,
        mfu=loop.accumulation * own / most if most else None,
        hfu=loop.accumulation * (own + again) / most if most else None,
        device_us=device_us,
        host_us=host_us,
    )


def _dtype(graph: Graph, flops: np.ndarray) -> str:
    """Return the dtype that does most of the arithmetic."""
    by_kind = np.bincount(graph.op_kind, flops, minlength=len(graph.kinds))
    total: dict[str, float] = {}
    for kind, count in zip(graph.kinds, by_kind.tolist(), strict=True):
        total[kind.dtype] = total.get(kind.dtype, 0.0) + count
    return max(total, key=lambda dtype: total[dtype], default="float32")
