"""A step on fake tensors under a tracker, in its steady state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from remat.recording.fake_step import FakeStep
from remat.recording.tracker import Tracker


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A step in its steady state: tracked from operator `first` on, with the bytes from before it.

    kept_bytes  of the loss of the step before, until the forward ends behind operator `forward_end`
    """

    tracker: Tracker
    fixed_bytes: int
    first: int
    forward_end: int
    kept_bytes: int

    def alive(self, workspace_of: Mapping[tuple[str, str], int] | None) -> np.ndarray:
        """Return the bytes alive at every operator of the step, fixed bytes included."""
        alive = with_workspaces(self.tracker, workspace_of)
        alive[: self.forward_end] += self.kept_bytes
        return alive[self.first :] + self.fixed_bytes


def track(step: FakeStep, tracker: Tracker, after_forward: Callable[[], None] | None = None) -> Tracked:
    """Run `step` under `tracker`; if the loop holds outputs, after a step whose outputs it holds."""
    fixed = sum(step.fix_state(tracker).values())
    if step.loop.holds_outputs:
        step.execute(tracker, after_forward or _nothing, _nothing)
    first = forward_end = tracker.op_count

    def note_end() -> None:
        nonlocal forward_end
        forward_end = tracker.op_count
        (after_forward or _nothing)()

    kept_bytes = step.execute(tracker, note_end, _nothing)
    return Tracked(tracker, fixed, first, forward_end, kept_bytes)


def with_workspaces(tracker: Tracker, workspace_of: Mapping[tuple[str, str], int] | None) -> np.ndarray:
    """Return the bytes alive at every operator that `tracker` has seen, including workspaces."""
    alive = tracker.alive()
    if workspace_of:
        per_kind = np.array([workspace_of.get(kind.key, 0) for kind in tracker.kinds.values()], dtype=np.int64)
        alive = alive + per_kind[np.array(tracker.op_kinds, dtype=np.int64)]
    return alive


def _nothing() -> None:
    pass
