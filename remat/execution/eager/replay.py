"""Replay: run the rewritten step on fake tensors and see what is alive.

The executor itself is the judge here: the same rewrite that training uses, the same autograd, no model of memory.
`Memory.curve` should equal it byte for byte; no plan is handed out that the replay has not accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from remat.evaluation.plan import OffloadRef, RegionRef
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.recording.fake_step import FakeStep
from remat.recording.tracked_copies import TrackedCopies
from remat.recording.tracked_step import track
from remat.recording.tracker import Tracker


def replay(
    step: FakeStep,
    regions: Sequence[RegionRef],
    *,
    alignment_bytes: int = 1,
    workspace_of: Mapping[tuple[str, str], int] | None = None,
    offloads: Sequence[OffloadRef] = (),
) -> np.ndarray:
    """Return the bytes alive at every operator of the step under `regions` and `offloads`, fixed bytes included.

    workspace_of  workspaces by operator and signature, see `Profile.workspace_of`
    """
    tracker = Tracker(alignment_bytes)
    calls = RewrittenCalls(
        regions, recompute_context=step.contexts.recomputation, offloads=offloads, copies=TrackedCopies(tracker)
    )
    with step.executing(calls):
        return track(step, tracker).alive(workspace_of)
