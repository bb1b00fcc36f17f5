"""Replay: run the rewritten step on fake tensors and see what is alive.

The executor itself is the judge here: the same rewrite that training uses, the same autograd, no model of memory.
`Memory.curve` should equal it byte for byte; no plan is handed out that the replay has not accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from remat.measure import measure
from remat.plans import PlacedRegion
from remat.record import FakeStep
from remat.rewrite import CallRegion, Counts, RewriteOptions, rewrite
from remat.tracker import Tracker


def regions_by_call(regions: Sequence[PlacedRegion]) -> dict[int, tuple[CallRegion, ...]]:
    """The regions of each graph call, in ordinals of that call."""
    calls: dict[int, list[CallRegion]] = {}
    for region in regions:
        calls.setdefault(region.call, []).append(_call_region(region))
    return {call: tuple(found) for call, found in calls.items()}


def _call_region(region: PlacedRegion) -> CallRegion:
    return CallRegion(
        region.first.ordinal,
        region.last.ordinal,
        saved=frozenset(ref.ordinal for ref in region.saved),
        random=frozenset(ref.ordinal for ref in region.random),
        once=frozenset(ref.ordinal for ref in region.once),
        inner=tuple(map(_call_region, region.inner)),
    )


class RewrittenCalls:
    """Runs each graph call of a forward with its regions; rewritten graphs are made once.

    find  where the regions of a call are in its graph; by default where `regions` say
    """

    def __init__(
        self,
        regions: Sequence[PlacedRegion],
        *,
        observe: bool = False,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        find: Callable[[int, fx.GraphModule], tuple[CallRegion, ...]] | None = None,
    ):
        by_call = regions_by_call(regions)
        self.counts = Counts()
        self._options = RewriteOptions(self.counts, observe, recompute_context or contextlib.nullcontext)
        self._calls = frozenset(by_call)
        self._find = find or (lambda call, graph_module: by_call[call])
        self._rewritten: dict[tuple[int, int], fx.GraphModule] = {}

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        if call not in self._calls:
            return graph_module(*args)
        key = (call, id(graph_module))
        if key not in self._rewritten:
            self._rewritten[key] = rewrite(graph_module, self._find(call, graph_module), self._options)
        return self._rewritten[key](*args)


def replay(
    step: FakeStep,
    regions: Sequence[PlacedRegion],
    *,
    alignment_bytes: int = 1,
    workspace_of: Mapping[tuple[str, str], int] | None = None,
) -> np.ndarray:
    """Bytes alive at every operator of the step under `regions`, fixed bytes included.

    workspace_of  kernel's own bytes by operator and signature, see `Profile.workspace_of`
    """
    run_call, step.run_call = step.run_call, RewrittenCalls(regions, recompute_context=step.recompute_context)
    try:
        return track(step, Tracker(alignment_bytes)).alive(workspace_of)
    finally:
        step.run_call = run_call


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A step in its steady state: what ran and was allocated from operator `first` on, and what was there before."""

    tracker: Tracker
    fixed_bytes: int
    first: int

    def alive(self, workspace_of: Mapping[tuple[str, str], int] | None) -> np.ndarray:
        """Bytes alive at every operator of the step, fixed bytes included."""
        return with_workspaces(self.tracker, workspace_of)[self.first :] + self.fixed_bytes


def track(step: FakeStep, tracker: Tracker, after_forward: Callable[[], None] | None = None) -> Tracked:
    """Run `step` under `tracker`; where the loop holds outputs, after a step whose outputs it holds."""
    fixed = sum(step.fix_state(tracker).values())
    if step.loop.holds_outputs:
        step.run(tracker, after_forward or _nothing, _nothing)
    first = tracker.op_count
    step.run(tracker, after_forward or _nothing, _nothing)
    return Tracked(tracker, fixed, first)


def with_workspaces(tracker: Tracker, workspace_of: Mapping[tuple[str, str], int] | None) -> np.ndarray:
    """Bytes alive at every operator that `tracker` has seen, kernels' own included."""
    alive = tracker.alive()
    if workspace_of:
        per_kind = np.array([workspace_of.get(kind.key, 0) for kind in tracker.kinds.values()], dtype=np.int64)
        alive = alive + per_kind[np.array(tracker.op_kinds, dtype=np.int64)]
    return alive


def measured_workspaces(
    tracker: Tracker, known: Mapping[tuple[str, str], int], device: torch.device
) -> dict[tuple[str, str], int]:
    """The kernels' own bytes of what `tracker` has seen and `known` has not, measured."""
    found = {kind.key: kind for kind in tracker.kinds.values()}
    missing = {key: kind for key, kind in found.items() if key not in known and "empty" not in kind.name}
    costs = measure(tuple(missing.values()), device)
    return dict(zip(missing, costs.workspace_bytes, strict=True))


def _nothing() -> None:
    pass
