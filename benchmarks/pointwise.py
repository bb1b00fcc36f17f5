"""Bytes alive at every operator of a step: the evaluator's curve against CUDA's allocator, not the two peaks alone.

    python -m benchmarks.pointwise PLAN...

on a machine with a GPU, or on PyTorch's CUDA build without one. A plan is made anew from its model and its target's
name, as on a machine without a GPU, and trained: in the third step the allocator is asked after each operator.
Operators are matched by name, shapes and dtypes; what casts is left out, because autocast casts the arguments of a
product in another order than the record does, with the same casts alive when the product runs.

While somebody looks at each operator, autograd adds up gradients out of place. So those additions are left out too, and
the peak is measured once more, in a step that nobody looks at.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks import report
from remat._torch.training import UnseenMode
from remat.cli.commands.files import spec_in
from remat.cli.commands.source import workload_of
from remat.costing.costs import estimated_costs, with_library_workspaces
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import form_of
from remat.evaluation.plan import Plan
from remat.execution.regions_in_graph import placed
from remat.planning.profiling import fake_step
from remat.recording.record import record
from remat.validation.training import Training, collect, release_memory
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

_LEFT_OUT = ("aten._to_copy.default", "aten.add.Tensor")
COLUMNS = ["plan", "operators", "matched", "predicted", "measured", "peak_percent", "worst_percent", "worst_at"]

Key = tuple[Any, ...]  # an operator's name, and the shapes and dtypes that it is given


@dataclasses.dataclass(frozen=True)
class Point:
    """An operator that ran, and the bytes alive while it did."""

    key: Key
    alive_bytes: int


def main(paths: list[str]) -> None:
    """Compare each plan, and write a report."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = [compared(Path(path)) for path in paths]
    about = {**report.provenance(device), "plans": [Path(path).stem for path in paths]}
    report.write(report.stem("pointwise", device), about, rows, COLUMNS)


def compared(path: Path) -> dict[str, Any]:
    """One row of the report."""
    plan = Plan.load(path)
    expected, predicted = evaluated(plan, path)
    seen, measured = trained(plan, path)
    pairs = matched(expected, seen)
    apart = [(abs(there.alive_bytes - here.alive_bytes) / predicted, here.key[0]) for here, there in pairs]
    worst, name = max(apart, default=(0.0, ""))
    return {
        "plan": path.stem,
        "operators": len(expected),
        "matched": len(pairs),
        "predicted": predicted,
        "measured": measured,
        "peak_percent": round(100 * (measured / predicted - 1), 4),
        "worst_percent": round(100 * worst, 4),
        "worst_at": name,
    }


def evaluated(plan: Plan, path: Path) -> tuple[list[Point], int]:
    """The evaluator's curve of a plan, and its peak."""
    place, loop = find_planning_device(plan.target), TrainingLoop.of(plan.about)
    step = fake_step(_workload(plan, path), place, loop=loop)
    step.form = form_of(plan.about)
    graph = record(step, alignment_bytes=place.target.alignment_bytes)
    costs = estimated_costs(graph, place.target)
    graph = with_library_workspaces(graph, place.target, costs)
    memory = Memory(graph, costs.workspace_per_op(graph))
    regions, offloads = placed(plan, graph)
    curve = memory.offloading(offloads).curve(regions)
    kinds = [graph.kinds[graph.op_kind[op]] for op in curve.op]
    keys = [(_name(kind.name), *_described(kind.signature)) for kind in kinds]
    return [Point(key, int(size)) for key, size in zip(keys, curve.alive_bytes, strict=True)], curve.peak_bytes


class _Looking(UnseenMode):
    """Asks the allocator after each operator."""

    def __init__(self, others_bytes: int):
        super().__init__()
        self.found: list[Point] = []
        self._others_bytes = others_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = [(*tensor.shape, str(tensor.dtype).removeprefix("torch.")) for tensor in given]
        self.found.append(Point((_name(str(func)), *shapes), _requested_bytes("peak") - self._others_bytes))
        return out


def trained(plan: Plan, path: Path) -> tuple[list[Point], int]:
    """Return the allocator's counts in a step under a plan, and the peak of a step without observation."""
    device = torch.device("cuda", torch.cuda.current_device())
    release_memory(device)
    others_bytes = _requested_bytes("current")
    training = Training(_workload(plan, path), device, 0, TrainingLoop.of(plan.about))
    training.begin_again()
    training.apply(plan)
    for _ in range(2):
        training.step()
    collect(device)
    with _Looking(others_bytes) as looking:
        training.step()
    collect(device)
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return looking.found, _requested_bytes("peak") - others_bytes


def matched(expected: list[Point], seen: list[Point]) -> list[tuple[Point, Point]]:
    """Points of the same operators, in order."""
    names = {point.key[0] for point in expected}.difference(_LEFT_OUT)  # views are no operators of a record
    expected, seen = ([point for point in points if point.key[0] in names] for points in (expected, seen))
    ours, theirs = ([point.key for point in points] for points in (expected, seen))
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return [(expected[b.a + i], seen[b.b + i]) for b in blocks for i in range(b.size)]


def _workload(plan: Plan, path: Path) -> Workload:
    spec = spec_in(plan.about, path)
    if spec is None:
        raise SystemExit(f"{path} does not say of which model it is a plan.")
    return workload_of(spec)


def _requested_bytes(which: str) -> int:
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def _name(operator: str) -> str:
    return operator.replace("remat.", "aten.")  # stand-ins


def _described(signature: Any) -> list[Key]:
    """Shape and dtype of every tensor in a signature."""
    if isinstance(signature, dict) and "tensor" in signature:
        shape, _, dtype = signature["tensor"]
        return [(*shape, dtype)]
    parts = [*signature.values()] if isinstance(signature, dict) else signature
    return [each for part in parts for each in _described(part)] if isinstance(parts, (list, tuple)) else []


if __name__ == "__main__":
    main(sys.argv[1:])
