"""The peak and the time of a step, predicted for the device at hand. (Rule 3 of `validating.py`)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from remat.costing.costs import with_library_workspaces
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import PlanningDevice
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region
from remat.offloading.refs import to_offload_refs
from remat.planning.untraced import with_untraced
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.fragmentation import footprint
from remat.validation.sizes import RecordedStep

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class PredictedHere:
    """The bytes and times of the planned step and the eager baseline, with kernels' workspaces as measured here.

    unmeasured  kinds of kernel whose workspaces could not be measured
    allocator   bytes that the caching allocator allocates and reserves
    """

    planned: dict[str, int]
    untouched: dict[str, int]
    unmeasured: int
    allocator: dict[str, int]


def predict(recorded: RecordedStep, place: PlanningDevice, on_progress: Progress | None) -> PredictedHere:
    assert place.device is not None
    graph = recorded.graph
    costs = time_operators(graph.kinds, place.device, on_progress=on_progress)
    graph = with_untraced(graph, recorded.step, costs, place.target, place.device)
    graph = with_library_workspaces(graph, place.target, costs)
    memory = Memory(graph, costs.workspace_per_op(graph))
    options: Any = {"alignment_bytes": place.target.alignment_bytes, "workspace_of": costs.workspace_of(graph)}
    offloads = to_offload_refs(memory, recorded.regions, recorded.offloads)
    peak = int(recorded.how.replay(recorded.step, graph, recorded.refs, offloads=offloads, **options).max())
    untouched = memory.peak_without_checkpointing
    step_us = costs.step_time_us(graph)
    again_us = memory.recompute_time_us(recorded.regions, costs.per_op_us(graph))
    return PredictedHere(
        {"peak_bytes": peak, "step_time_us": round(step_us + again_us)},
        {"peak_bytes": untouched, "step_time_us": round(step_us)},
        len(costs.about.get("not_measured", ())),
        simulated(memory.offloading(recorded.offloads), recorded.regions, peak, place),
    )


def simulated(memory: Memory, regions: Sequence[Region], peak_bytes: int, place: PlanningDevice) -> dict[str, int]:
    """Predict the caching allocator's bytes of the step in this process; empty if there is none."""
    if place.target.device != "cuda":
        return {}
    found = footprint(memory, regions, AllocatorSettings.from_environment())
    found = found.with_more(max(peak_bytes - found.requested_bytes, 0))
    return {"allocated_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes}
