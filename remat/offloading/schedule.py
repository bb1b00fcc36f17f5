"""Schedule: which storages go to the host, and at which nodes.

Rule 1  Copies are queues, out and back. Out they go in the order in which storages are made, back in the order in
        which they are asked for. Nothing waits: by the estimated times a copy out has ended at its release, and a copy
        back at the first request. On a slower link they are waited for, and memory stays what it was planned to be.
Rule 2  A release is the first border of forward after the copy's end. A fetch is the last event of backward from which
        the copy, and those queued behind it, end in time.
Rule 3  What is made early goes first: it is asked for late, so it lowers the most of the step for its bytes. No more
        goes than the budget needs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Offload, Region
from remat.offloading.link import Link
from remat.offloading.timeline import Border, Candidate, Timeline

LEAST_SHARE = 1 / 4000  # of all that is kept: a smaller storage is not worth a copy
STASH = 5  # copies under way, by hand
SENT, RELEASED, FETCHED, ASKED = range(4)  # in the order in which they happen at one position


def all_offloads(memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray, link: Link) -> tuple[Offload, ...]:
    """Choose the offloads, worth a copy, that the link carries in time for the step under `regions`.

    op_time_us  of every recorded operator
    """
    timeline = Timeline(memory, regions, op_time_us)
    return schedule(timeline, _worth(timeline), link)


def fewest_offloads(
    memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray, link: Link, budget_bytes: int
) -> tuple[Offload, ...]:
    """Choose the earliest of `all_offloads` that bring the step within the budget; all if they do not."""
    timeline = Timeline(memory, regions, op_time_us)
    worth = _worth(timeline)
    low, high, best = 0, len(worth), schedule(timeline, worth, link)
    while low < high:  # more may do worse, so the best so far is kept
        middle = (low + high) // 2
        found = schedule(timeline, worth[:middle], link)
        if memory.offloading(found).curve(regions).peak_bytes <= budget_bytes:
            high, best = middle, found
        else:
            low = middle + 1
    return best


def _worth(timeline: Timeline) -> list[Candidate]:
    least = max(int(LEAST_SHARE * timeline.kept_bytes), 1)
    return [each for each in timeline.candidates if each.size_bytes >= least]


def schedule(timeline: Timeline, candidates: Sequence[Candidate], link: Link) -> tuple[Offload, ...]:
    """Schedule those of `candidates` (in order of time) that get to the host and back without a wait."""
    return tuple(sorted(_back(timeline, _out(timeline, candidates, link), link)))


def _out(timeline: Timeline, candidates: Sequence[Candidate], link: Link) -> list[tuple[Candidate, Border]]:
    """Return (candidate, border of its release) for those whose copy ends in forward."""
    borders = timeline.borders
    ops = [border.op for border in borders]
    starts = timeline.starts_us[ops]
    found, free_us, on_host = [], 0.0, 0
    for candidate in candidates:
        end_us = max(free_us, candidate.ready_us) + link.copy_us(candidate.size_bytes)
        at = max(int(np.searchsorted(starts, end_us)), bisect.bisect_left(ops, candidate.local_end))
        if at == len(borders) or on_host + candidate.size_bytes > link.host_bytes:
            continue
        found.append((candidate, borders[at]))
        free_us, on_host = end_us, on_host + candidate.size_bytes
    return found


def _back(timeline: Timeline, out: list[tuple[Candidate, Border]], link: Link) -> list[Offload]:
    """Return the offloads that come back in time; the last to be needed first, each as late as possible."""
    events = timeline.events
    starts = timeline.starts_us[[position for position, _ in events]]
    found, free_us = [], float("inf")
    for candidate, border in sorted(out, key=lambda each: -each[0].asked_at):
        begin_us = min(free_us, float(timeline.starts_us[candidate.asked_at])) - link.copy_us(candidate.size_bytes)
        at = int(np.searchsorted(starts, begin_us, side="right")) - 1
        if at < 0:
            continue
        found.append(offload(candidate, border, events[at][1]))
        free_us = begin_us
    return found


def offload(candidate: Candidate, border: Border, fetch: int) -> Offload:
    """Return the offload of `candidate`, released at `border` and fetched for node `fetch`."""
    return Offload(candidate.storage, border.node, fetch, border.after_slices)


# What is done by hand elsewhere, to compare with


def stashed_offloads(timeline: Timeline, link: Link, storages: Collection[int] | None = None) -> tuple[Offload, ...]:
    """Return the offloads of executors without a plan: all candidates that the host holds, or of `storages`.

    A copy is waited for when `STASH` later ones have begun (`max_fwd_stash_size` of TRL's `OffloadActivations`), and
    each storage comes back an event before it is needed.
    """
    wanted = [each for each in timeline.candidates if storages is None or each.storage in storages]
    on_host = itertools.accumulate(each.size_bytes for each in wanted)
    moved = [each for each, size in zip(wanted, on_host, strict=True) if size <= link.host_bytes]
    borders = [border.op for border in timeline.borders]
    events = [position for position, _ in timeline.events]
    found = []
    for number, candidate in enumerate(moved):
        later = moved[min(number + STASH, len(moved) - 1)]
        at = bisect.bisect_left(borders, max(timeline.ready_at(later), candidate.local_end))
        before = bisect.bisect_left(events, candidate.asked_at) - 2
        if at < len(borders) and before >= 0:
            found.append(offload(candidate, timeline.borders[at], timeline.events[before][1]))
    return tuple(sorted(found))


@dataclasses.dataclass(frozen=True)
class CopyTimes:
    """An offloaded storage's way to the host and back: begin and end of both copies, in microseconds of the step."""

    storage: int
    size_bytes: int
    out_us: tuple[float, float]
    back_us: tuple[float, float]


def stall_us(timeline: Timeline, offloads: Sequence[Offload], link: Link) -> float:
    """Return the time that computation waits for copies, by the estimated times."""
    return _carried(timeline, offloads, link)[1]


def copies(timeline: Timeline, offloads: Sequence[Offload], link: Link) -> tuple[CopyTimes, ...]:
    """Return the times at which each storage is copied, by estimated times; in the order in which they leave."""
    return _carried(timeline, offloads, link)[0]


def _carried(timeline: Timeline, offloads: Sequence[Offload], link: Link) -> tuple[tuple[CopyTimes, ...], float]:
    by_storage = {each.storage: each for each in timeline.candidates}
    border_of = {(border.node, border.after_slices): border.op for border in timeline.borders}
    event_of = {node: position for position, node in timeline.events}
    happens: list[tuple[int, int, int, int]] = []  # (position, what, order among those, storage)
    for each in offloads:
        candidate = by_storage[each.storage]
        fetched_at = min(event_of[each.fetch], candidate.asked_at)
        happens.append((timeline.ready_at(candidate), SENT, each.storage, each.storage))
        happens.append((border_of[each.release, each.after_slices], RELEASED, each.storage, each.storage))
        happens.append((fetched_at, FETCHED, candidate.asked_at, each.storage))
        happens.append((candidate.asked_at, ASKED, each.storage, each.storage))
    free_us, waited_us = {SENT: 0.0, FETCHED: 0.0}, 0.0
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for position, what, _, storage in sorted(happens):
        now, took = float(timeline.starts_us[position]) + waited_us, link.copy_us(by_storage[storage].size_bytes)
        if what in free_us:
            begin = max(free_us[what], now)
            spans[storage, what] = begin, begin + took
            free_us[what] = begin + took
        else:
            _, end = spans[storage, SENT if what == RELEASED else FETCHED]
            waited_us += max(end - now, 0.0)
    found = sorted((spans[each.storage, SENT], each.storage) for each in offloads)
    return tuple(CopyTimes(u, by_storage[u].size_bytes, out, spans[u, FETCHED]) for out, u in found), waited_us
