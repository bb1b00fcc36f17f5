"""The step to validate, at the largest batch size that the device at hand can run. (Rule 4 of `validating.py`)"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from remat.costing.costs import estimated_costs
from remat.costing.host_memory import free_host_bytes
from remat.costing.planning_device import PlanningDevice
from remat.errors import CaptureError, PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import form_of
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Offload, Plan, Region, RegionRef, to_refs
from remat.execution.base import Execution
from remat.execution.regions_in_graph import placed
from remat.offloading.refs import require_kept
from remat.planning.profiling import fake_step
from remat.planning.refused_sizes import error_at
from remat.planning.untraced import with_untraced
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

BEARABLE_S = 10.0  # estimated time of one step on a CPU
SHORTEST = 128  # sequence length
CPU_SHARE = 0.6  # of the memory that is free
CUDA_SHARE = 0.95


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedStep:
    """The step at one batch size, recorded on fakes of the device at hand; the plan's regions in its graph."""

    workload: Workload
    step: FakeStep
    graph: Graph
    refs: tuple[RegionRef, ...]
    regions: tuple[Region, ...]
    offloads: tuple[Offload, ...]
    how: Execution


class Load(NamedTuple):
    """How many times too large a step is, and why; one that is only slow is possible."""

    factor: float
    why: str
    is_slow: bool = False


class TriedSizes:
    """The workload at each batch size that was tried."""

    def __init__(self, workload: Workload, plan: Plan, place: PlanningDevice, how: Execution):
        self.notes: list[str] = []
        self._workload, self._plan, self._place, self._how = workload, plan, place, how
        self._free_bytes = _free_bytes(place)
        self._known: dict[int, RecordedStep] = {}

    def at(self, batch_size: int) -> RecordedStep:
        if batch_size not in self._known:
            workload = self._workload.sized(batch_size)
            step = fake_step(workload, self._place, loop=TrainingLoop.of(self._plan.about))
            step.form = form_of(self._plan.about)
            graph = record(step, alignment_bytes=self._place.target.alignment_bytes)
            regions, offloads = _found(self._plan, graph)
            refs = to_refs(graph, regions, _modules(self._plan, regions))
            if offloads:
                require_kept(Memory(graph), regions, offloads)
            self._known[batch_size] = RecordedStep(workload, step, graph, refs, regions, offloads, self._how)
        return self._known[batch_size]

    def planned_load(self, recorded: RecordedStep) -> Load:
        """Return the load of the planned step, in memory or in time."""
        graph, regions = recorded.graph, recorded.regions
        peak_bytes = Memory(graph).offloading(recorded.offloads).curve(regions).peak_bytes
        load = self._memory_load(graph, peak_bytes, "the planned step")
        costs = estimated_costs(graph, self._place.target)
        seconds = costs.step_time_us(graph) + Memory(graph).recompute_time_us(regions, costs.per_op_us(graph))
        seconds /= 1e6
        if self._place.target.device == "cpu" and seconds / BEARABLE_S > load.factor:
            why = f"a step is estimated to take {seconds:.0f} s, more than {BEARABLE_S:.0f} s"
            return Load(seconds / BEARABLE_S, why, is_slow=True)
        return load

    def untouched_load(self, recorded: RecordedStep) -> Load:
        graph, target = recorded.graph, self._place.target
        graph = with_untraced(graph, recorded.step, estimated_costs(graph, target), target)
        return self._memory_load(graph, Memory(graph).peak_without_checkpointing, "the step without the plan")

    def _memory_load(self, graph: Graph, peak_bytes: int, what: str) -> Load:
        fixed = min(graph.fixed_total, peak_bytes)
        state = sum(graph.fixed_bytes.get(name, 0) for name in ("parameters", "buffers"))
        copies = 2 * state if self._place.target.device == "cpu" else 0  # from which steps begin again
        free = self._free_bytes - copies
        text = f"{what} needs {gib(peak_bytes)}, and {gib(max(free, 0))} may be used"
        if peak_bytes <= free:
            return Load(peak_bytes / free, text)
        return Load(max((peak_bytes - fixed) / (free - fixed) if free > fixed else math.inf, 1.01), text)

    def _shorten(self, why: str) -> bool:
        """Halve the sequence, if there is one."""
        length = self._workload.seq_len
        if length is None or length < 2 * SHORTEST:
            return False
        self.notes.append(f"Sequence length {length} is too much for this device: {why}.")
        self._workload = self._workload.sized(seq_len=length // 2)
        self._known.clear()
        return True

    def largest(self, load_of: Callable[[RecordedStep], Load], at_most: int | None = None) -> RecordedStep:
        """Return the step at the largest batch size, halved from `at_most`, whose load is at most 1."""
        size = wanted = at_most or self._workload.batch_size
        while True:
            recorded = self.at(size)
            load, why, is_slow = load_of(recorded)
            if load <= 1:
                return recorded
            smaller = self._smaller(size, load)
            if smaller is None and is_slow:
                if self._shorten(why):
                    continue
                return recorded
            if smaller is None:
                less = "" if size == 1 else ", and the model refuses smaller ones"
                raise UsageError(f"{why} at batch size {size}{less}: validate on a device with more memory.")
            if size == wanted:
                self.notes.append(f"Batch size {size} is too much for this device: {why}.")
            size = smaller

    def _smaller(self, size: int, load: float) -> int | None:
        """Return `size` halved as its load asks for, or less often where the model refuses that; None for no less."""
        halvings = max(1, math.floor(math.log2(load)) if math.isfinite(load) else size.bit_length() - 1)
        smaller = max(size >> halvings, 1)
        while smaller < size:
            if self._takes(smaller):
                return smaller
            smaller *= 2
        return None

    def _takes(self, batch_size: int) -> bool:
        try:
            self.at(batch_size)
        except CaptureError:
            if error_at(self._workload.sized(batch_size), self._place) is None:
                raise
            return False
        return True


def _modules(plan: Plan, regions: tuple[Region, ...]) -> list[tuple[int, int, str]]:
    """Return the module of each region, as `to_refs` takes them."""
    return [(here.first, here.end, there.module) for here, there in zip(regions, plan.regions, strict=True)]


def _found(plan: Plan, graph: Graph) -> tuple[tuple[Region, ...], tuple[Offload, ...]]:
    """Return the plan's regions and offloads in `graph`. Raises PlanMismatch for another dtype policy or model."""
    for field, name in (("parameter_dtypes", "parameters of"), ("autocast", "autocast to")):
        planned, found = plan.about.get(field), graph.about[field]
        if planned != found:
            raise PlanMismatch(
                f"the plan is for {name} {planned}, this workload has {name} {found}; "
                "choose the dtype policy of the plan."
            )
    return placed(plan, graph)


def _free_bytes(place: PlanningDevice) -> int:
    """Return the bytes that the steps may take."""
    if place.target.device == "cuda":
        free = torch.cuda.mem_get_info(place.device)[0]
        cached = torch.cuda.memory_reserved(place.device) - torch.cuda.memory_allocated(place.device)
        return int(CUDA_SHARE * (free + cached))
    return int(CPU_SHARE * free_host_bytes())
