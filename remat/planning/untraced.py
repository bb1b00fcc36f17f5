"""Untraced: what the step takes as people run it who have no plan.

A plan's forward is traced, and a trace lets go of a value after its last use. Python does not: a local variable of the
model's code lives until its function returns or the name is bound again (in a mixture of experts the weights picked for
one product while those for the next are being picked). So the step without checkpointing is not a plan of no regions,
and what it takes is recorded by itself: one more forward and backward on fake tensors, in eager mode.

Neither is the forward that verifies a first step (`first_step.py`) what the trace of it takes, though it saves nothing
for a backward. It is recorded too, in all ways in which it is tried: where one fails on fake tensors, it does
with data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from remat.costing.costs import Costs
from remat.costing.operator_timing import measured_workspaces
from remat.costing.workspaces import workspace_bytes
from remat.errors import CaptureError
from remat.evaluation.graph import TRACED_ONLY, Graph
from remat.execution.first_step import WAYS_ALONE, casts_forgotten
from remat.execution.modules.replay import track_untraced
from remat.recording.fake_step import FakeStep
from remat.recording.tracked_step import with_workspaces
from remat.recording.tracker import Tracker
from remat.workload.target import Target


def with_untraced(
    graph: Graph, step: FakeStep, costs: Costs, target: Target, device: torch.device | None = None
) -> Graph:
    """Add `untraced_bytes` and `alone_bytes` to `graph`, or to `about` the reason why fake tensors cannot give them.

    step    the step that `graph` records, in its steady state
    costs   of the graph, with its kernels' workspaces; others are measured on `device`, or computed for `target`
    """
    try:
        tracked = track_untraced(step, (), alignment_bytes=target.alignment_bytes)
    except CaptureError as error:
        return dataclasses.replace(graph, about={**graph.about, TRACED_ONLY: str(error)})
    known = costs.workspace_of(graph)
    workspace_of = {kind.key: workspace_bytes(kind, target) for kind in tracked.tracker.kinds.values()} | known
    if device is not None:
        workspace_of |= measured_workspaces(tracked.tracker, known, device)
    graph = dataclasses.replace(graph, untraced_bytes=tracked.alive(workspace_of) + graph.unseen_bytes)
    return dataclasses.replace(graph, alone_bytes=_alone_bytes(step, target, workspace_of))


def _alone_bytes(step: FakeStep, target: Target, workspace_of: Mapping[tuple[str, str], int]) -> np.ndarray:
    """Return `Graph.alone_bytes` of a step; empty if it cannot run once more without a trace left."""
    found = []
    for way in WAYS_ALONE:
        tracker = Tracker(target.alignment_bytes)
        with casts_forgotten():
            ended = step.run_alone(tracker, way)
        if ended is None:
            return np.zeros(0, dtype=np.int64)
        others = {kind.key: workspace_bytes(kind, target) for kind in tracker.kinds.values()}
        found.append(with_workspaces(tracker, {**others, **workspace_of}))
        if ended:
            break
    return np.concatenate(found)
