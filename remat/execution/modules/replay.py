"""Replay of plans whose regions are modules: the untraced step on fake tensors, as training will run it.

Stricter than a replay of the traced graph: Python's local variables hold on to what the graph has let go. A target's
kernels are put in by a function mode (`StepContexts.kernels`), since there are no nodes to substitute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from remat.evaluation.plan import RegionRef
from remat.execution.modules.regions import Context, ModuleRegions
from remat.recording.fake_step import FakeStep
from remat.recording.tracked_step import Tracked, track
from remat.recording.tracker import Tracker


def replay_modules(
    step: FakeStep,
    regions: Sequence[RegionRef],
    *,
    alignment_bytes: int = 1,
    workspace_of: Mapping[tuple[str, str], int] | None = None,
) -> np.ndarray:
    """Replay as `replay.replay` does, for regions that are modules."""
    return track_untraced(step, regions, alignment_bytes=alignment_bytes).alive(workspace_of)


def track_untraced(step: FakeStep, regions: Sequence[RegionRef], *, alignment_bytes: int = 1) -> Tracked:
    """Track an untraced step under `regions`."""
    with step.untraced():
        installed = ModuleRegions(step.model, regions)
        installed.recompute_context = lambda: _both(step.contexts.recomputation, step.contexts.kernels)

        def after_forward() -> None:
            installed.require_all_entered()
            installed.entered.clear()

        try:
            return track(step, Tracker(alignment_bytes), after_forward)
        finally:
            installed.remove()


@contextlib.contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer(), inner():
        yield
