"""Timeline: the bytes alive over the time of a step, by category, predicted and measured.

The prediction also becomes a file that PyTorch's own memory viewer reads (the `_snapshot` pickle of
`torch.cuda.memory`): every storage of the planned step as an allocation, with the node that makes it as its stack. So
the viewer shows a step that has not run yet, on a device that is not there.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remat.costing.profile import Profile
from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Offload, Region
from remat.reservation.fragmentation import Footprint, assumed_settings, footprints

POINTS = 4000  # in a picture; with more operators, the highest of neighbours are shown


@dataclasses.dataclass(frozen=True, eq=False)
class StepTimeline:
    """Bytes alive at moments of a step, by category.

    time_us      when each operator begins                       parts  category -> bytes at each moment
    op           the recorded operator at each moment
    phases       name -> (begin, end) in microseconds            peak_bytes, peak_us  the highest moment
    allocator    footprints in the caching allocator, as in `Estimate`
    recomputing  whether each moment is part of a recomputation  measured  (time_us, bytes) on the device at hand
    """

    about: dict[str, Any]
    target: str
    costs: str
    time_us: np.ndarray
    op: np.ndarray
    parts: dict[str, np.ndarray]
    recomputing: np.ndarray
    phases: dict[str, tuple[float, float]]
    peak_bytes: int
    peak_us: float
    budget_bytes: int | None = None
    measured: tuple[np.ndarray, np.ndarray] | None = None
    allocator: tuple[Footprint, ...] = ()

    @property
    def alive_bytes(self) -> np.ndarray:
        """Bytes alive at each moment."""
        return np.sum(list(self.parts.values()), axis=0)

    def highest(self, stretches: int) -> Iterator[int]:
        """Yield the index of the highest moment in each of equal stretches of the step."""
        end = float(self.time_us[-1]) or 1.0
        for number in range(stretches):
            inside = (self.time_us >= end * number / stretches) & (self.time_us <= end * (number + 1) / stretches)
            if inside.any():
                yield int(np.where(inside, self.alive_bytes, -1).argmax())

    def to_json(self) -> dict[str, Any]:
        measured = None
        if self.measured is not None:
            measured = {"time_us": self.measured[0].tolist(), "bytes": self.measured[1].tolist()}
        return {
            "model": self.about["workload"],
            "target": self.target,
            "costs": self.costs,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_us": self.peak_us,
            "allocator": [each.to_json() for each in self.allocator],
            "phases": {name: list(span) for name, span in self.phases.items()},
            "time_us": self.time_us.round(3).tolist(),
            "parts": {name: sizes.tolist() for name, sizes in self.parts.items()},
            "measured": measured,
        }


def timeline(
    profile: Profile,
    regions: Sequence[Region] = (),
    budget_bytes: int | None = None,
    allocator: str | None = None,
    offloads: Sequence[Offload] = (),
    points: int | None = None,
) -> StepTimeline:
    """Compute the bytes alive over the time of the operators under a plan; `allocator` as for `estimate`.

    points  maximum number of moments, `POINTS` by default
    """
    graph, costs = profile.graph, profile.costs
    settings = assumed_settings(profile.target, allocator)
    memory = Memory(graph, costs.workspace_per_op(graph)).offloading(offloads)
    stack = breakdown.over_time(memory, regions)
    curve = stack.curve
    took_us = np.where(curve.executed, costs.per_op_us(graph)[curve.op], 0.0)
    ends = np.cumsum(took_us)
    begins = ends - took_us
    kinds = curve.phases(graph).items()
    phases = {name: (float(begins[own].min()), float(ends[own].max())) for name, own in kinds if own.any()}
    shown = _highest(curve.alive_bytes, points or POINTS)
    return StepTimeline(
        about=graph.about,
        target=profile.target.name,
        costs=costs.source,
        time_us=begins[shown],
        op=curve.op[shown],
        parts={name: sizes[shown] for name, sizes in stack.parts.items()},
        recomputing=(curve.region >= 0)[shown],
        phases=phases,
        peak_bytes=curve.peak_bytes,
        peak_us=float(begins[curve.peak_at]),
        budget_bytes=budget_bytes,
        allocator=footprints(memory, regions, settings) if settings is not None else (),
    )


def _highest(sizes: np.ndarray, points: int) -> np.ndarray:
    """List the positions to show: all, or the highest of each group of neighbours."""
    if len(sizes) <= points:
        return np.arange(len(sizes))
    borders = np.linspace(0, len(sizes), points + 1).astype(np.int64)[:-1]
    ends = np.append(borders[1:], len(sizes))
    return np.array([a + int(sizes[a:b].argmax()) for a, b in zip(borders, ends, strict=True)])


def save_snapshot(profile: Profile, regions: Sequence[Region], path: Path, offloads: Sequence[Offload] = ()) -> None:
    """Write the predicted step as a snapshot for PyTorch's memory viewer."""
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph)).offloading(offloads)
    with path.open("wb") as file:
        pickle.dump({"segments": [], "device_traces": [_trace(graph, memory, regions)]}, file)


def _trace(graph: Graph, memory: Memory, regions: Sequence[Region]) -> list[dict[str, Any]]:
    """List allocations and releases by time; tensors from before the step come first and stay."""
    lives = memory.lives(regions)
    address, trace = 1 << 20, []
    for name, size in graph.fixed_bytes.items():
        trace.append(_event("alloc", address, size, _frames(name, "before the step")))
        address += size
    held = []  # of the step before, released in forward
    for size, _ in graph.held_outputs:
        held.append((address, size, _frames(breakdown.HELD_OUTPUTS, "before the step")))
        trace.append(_event("alloc", *held[-1]))
        address += size
    events = [(int(birth), 1, life) for life, birth in enumerate(lives.birth)]
    events += [(int(death) + 1, 0, life) for life, death in enumerate(lives.death) if death < len(lives.op) - 1]
    events += [(until, 0, ~i) for i, (_, until) in enumerate(graph.held_outputs)]
    addresses = address + np.cumsum(lives.size_bytes) - lives.size_bytes
    for _, born, life in sorted(events):
        if life < 0:
            trace.append(_event("free_completed", *held[~life]))
            continue
        size = int(lives.size_bytes[life])
        if size:
            action = "alloc" if born else "free_completed"
            trace.append(_event(action, int(addresses[life]), size, _frames(*_names(graph, lives.storage[life]))))
    return trace


def _names(graph: Graph, storage: int) -> tuple[str, str]:
    made_by, birth = int(graph.storages.node[storage]), int(graph.storages.birth[storage])
    kind = graph.kinds[graph.op_kind[birth]].name if birth < graph.op_count else ""
    if made_by < 0:
        return kind, "the optimizer" if birth >= graph.backward_end else "backward"
    node = graph.nodes[made_by]
    return f"{node.name} ({kind})", node.module or "outside modules"


def _frames(name: str, place: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": place, "line": 0}]


def _event(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
