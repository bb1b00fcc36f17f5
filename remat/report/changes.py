"""Changes: what it would cost to take one decision of a plan otherwise, all others as they are.

Four kinds of decisions are asked of the evaluator, one at a time: whether a node of a region is saved, whether an
offload stays on the device, where a border of a region lies (one segment of the search space earlier or later), and
whether a segment outside regions is recomputed by itself. Where two regions meet, their border moves for both.

Under other regions the copies of what is offloaded are scheduled anew over the target's link; what can no longer go and
come in time stays on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Offload, Region
from remat.formulation.search_space import Segment, find_space, saveable
from remat.offloading.link import Link
from remat.offloading.schedule import schedule, stall_us
from remat.offloading.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Change:
    """Another decision: its name, the peak of the step with it, and the time that it adds."""

    to: str
    peak_bytes: int
    more_us: float


@dataclasses.dataclass(frozen=True)
class Move:
    """A border at node `to` instead; `to` is the first node behind it."""

    to: int
    peak_bytes: int
    more_us: float


@dataclasses.dataclass(frozen=True)
class ChangeBorder:
    """The end of a region, the beginning of one, or both: before node `at`.

    earlier, later  moves of the border by one segment; None if the space does not allow it
    """

    at: int
    ends: bool
    begins: bool
    earlier: Move | None
    later: Move | None


def leaf_regions(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield the regions without inner regions."""
    for region in regions:
        yield from leaf_regions(region.inner) if region.inner else (region,)


class Changes:
    """Evaluates plans that differ from one plan by one decision."""

    def __init__(self, profile: Profile, regions: Sequence[Region], offloads: Sequence[Offload] = ()):
        self.graph, self._regions, self._offloads = profile.graph, tuple(regions), tuple(offloads)
        self._memory = Memory(self.graph, profile.costs.workspace_per_op(self.graph))
        self._op_us = profile.costs.per_op_us(self.graph)
        bandwidth = profile.target.host_bytes_per_us
        self._link = Link(bandwidth, sum(self.graph.storages.size_bytes.tolist())) if bandwidth > 0 else None

    @functools.cached_property
    def saveable(self) -> frozenset[int]:
        """The nodes that a region may save."""
        return frozenset(saveable(self.graph))

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        return find_space(self.graph).segments

    def saved_or_not(self, node: int) -> Change:
        """Save node `node` of a region if it is recomputed, and recompute it if it is saved."""
        is_saved = any(node in region.saved for region in leaf_regions(self._regions))
        others = tuple(_toggled(region, node) for region in self._regions)
        return self._change("recomputed" if is_saved else "saved", others, self._offloads)

    def on_the_device(self, storages: Sequence[int]) -> Change:
        """Keep offloaded `storages` on the device."""
        return self._change("kept", self._regions, [each for each in self._offloads if each.storage not in storages])

    def recomputed(self) -> Iterator[tuple[Segment, Change]]:
        """Yield every segment outside regions that may be a region, as one by itself."""
        for segment in self.segments:
            if segment.plain or any(r.first < segment.end and segment.first < r.end for r in self._regions):
                continue
            own = Region(segment.first, segment.end)
            yield segment, self._change("recomputed", tuple(sorted((*self._regions, own))), self._offloads)

    def borders(self) -> tuple[ChangeBorder, ...]:
        """Return the borders of regions without inner ones; borders of inner regions move inside their outer one."""
        leaves = tuple(leaf_regions(self._regions))
        ends, begins = {region.end for region in leaves}, {region.first for region in leaves}
        found = [
            ChangeBorder(
                at,
                at in ends,
                at in begins,
                earlier=self._moved(at, self._segment(end=at)),
                later=self._moved(at, self._segment(first=at)),
            )
            for at in sorted(ends | begins)
        ]
        return tuple(border for border in found if border.earlier or border.later)

    def _segment(self, *, first: int | None = None, end: int | None = None) -> Segment | None:
        return next((s for s in self.segments if first == s.first or end == s.end), None)

    def _moved(self, at: int, over: Segment | None) -> Move | None:
        """Move the border at `at` over an adjacent segment; None if the space does not allow it."""
        if over is None or over.plain:
            return None
        to = over.first if over.end == at else over.end
        others = _with_border(self._regions, at, to)
        if others is None or any(self.graph.nodes[r.first].call != self.graph.nodes[r.end - 1].call for r in others):
            return None
        change = self._change("", others, self._offloads)
        return Move(to, change.peak_bytes, change.more_us)

    def _change(self, to: str, regions: tuple[Region, ...], offloads: Sequence[Offload]) -> Change:
        peak_bytes, added_us = self._judged(regions, offloads)
        return Change(to, peak_bytes, added_us - self._own_us)

    @functools.cached_property
    def _own_us(self) -> float:
        return self._judged(self._regions, self._offloads)[1]

    def _judged(self, regions: tuple[Region, ...], offloads: Sequence[Offload]) -> tuple[int, float]:
        """Return (peak in bytes, microseconds added to the step)."""
        added_us = self._memory.recompute_time_us(regions, self._op_us)
        if not offloads or self._link is None:
            return self._memory.curve(regions).peak_bytes, added_us
        timeline = Timeline(self._memory, regions, self._op_us)
        if regions != self._regions:
            storages = {each.storage for each in offloads}
            offloads = schedule(
                timeline, [each for each in timeline.candidates if each.storage in storages], self._link
            )
        peak_bytes = self._memory.offloading(offloads).curve(regions).peak_bytes
        return peak_bytes, added_us + stall_us(timeline, offloads, self._link)


def _toggled(region: Region, node: int) -> Region:
    if node not in region:
        return region
    if region.inner:
        return dataclasses.replace(region, inner=tuple(_toggled(inner, node) for inner in region.inner))
    return dataclasses.replace(region, saved=tuple(sorted(set(region.saved) ^ {node})))


def _with_border(regions: Sequence[Region], at: int, to: int) -> tuple[Region, ...] | None:
    """Move a border of `regions` from `at` to `to`; an empty region is dropped.

    Returns None if a region would overlap another, or leave the region that holds it.
    """
    found: list[Region] = []
    for region in regions:
        moved = _resized(region, at, to)
        if moved is None:
            return None
        if moved.first < moved.end:
            found.append(moved)
    if any(before.end > after.first for before, after in itertools.pairwise(found)):
        return None
    return tuple(found)


def _resized(region: Region, at: int, to: int) -> Region | None:
    if not region.inner:
        first, end = (to if edge == at else edge for edge in (region.first, region.end))
        if first > end:
            return None
        return Region(first, end, tuple(node for node in region.saved if first <= node < end))
    if not region.first < at < region.end:  # its own border, which stays
        return region if at not in (region.first, region.end) else None
    inner = _with_border(region.inner, at, to)
    if inner is None or not all(region.first <= part.first and part.end <= region.end for part in inner):
        return None
    return dataclasses.replace(region, inner=inner)
