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
from collections.abc import Sequence

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Offload, Region
from remat.offloading.link import Link
from remat.offloading.timeline import Candidate, Timeline

SMALL = 4000  # a storage below a 4000th of all that is kept is not worth a copy


def all_offloads(memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray, link: Link) -> tuple[Offload, ...]:
    """Offloads of all that the link carries in time and that is worth a copy, of the step under `regions`.

    op_time_us  of every recorded operator
    """
    timeline = Timeline(memory, regions, op_time_us)
    return schedule(timeline, _worth(timeline), link)


def fewest_offloads(
    memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray, link: Link, budget_bytes: int
) -> tuple[Offload, ...]:
    """Of `all_offloads`, those made first that bring the step within the budget; all, where they do not."""
    timeline = Timeline(memory, regions, op_time_us)
    worth = _worth(timeline)
    low, high, best = 0, len(worth), schedule(timeline, worth, link)
    while low < high:  # more may do worse, so what is found is kept
        middle = (low + high) // 2
        found = schedule(timeline, worth[:middle], link)
        if memory.offloading(found).curve(regions).peak_bytes <= budget_bytes:
            high, best = middle, found
        else:
            low = middle + 1
    return best


def _worth(timeline: Timeline) -> list[Candidate]:
    least = max(int(timeline.kept_bytes) // SMALL, 1)
    return [each for each in timeline.candidates if each.size_bytes >= least]


def schedule(timeline: Timeline, candidates: Sequence[Candidate], link: Link) -> tuple[Offload, ...]:
    """Offloads of those of `candidates` (in order of time) that get to the host and back without a wait."""
    out = list(_out(timeline, candidates, link))
    return tuple(sorted(_back(timeline, out, link)))


def _out(timeline: Timeline, candidates: Sequence[Candidate], link: Link) -> list[tuple[Candidate, int]]:
    """(candidate, node of its release), for those whose copy ends in forward."""
    borders = timeline.borders
    ops = [op for op, _ in borders]
    starts = timeline.starts_us[ops]
    found, free_us, on_host = [], 0.0, 0
    for candidate in candidates:
        end_us = max(free_us, candidate.ready_us) + link.copy_us(candidate.size_bytes)
        at = max(int(np.searchsorted(starts, end_us)), bisect.bisect_left(ops, candidate.local_end))
        if at == len(borders) or on_host + candidate.size_bytes > link.host_bytes:
            continue
        found.append((candidate, borders[at][1]))
        free_us, on_host = end_us, on_host + candidate.size_bytes
    return found


def _back(timeline: Timeline, out: list[tuple[Candidate, int]], link: Link) -> list[Offload]:
    """Offloads of those that come back in time; the last to be asked for first, each as late as it may."""
    events = timeline.events
    starts = timeline.starts_us[[position for position, _ in events]]
    found, free_us = [], float("inf")
    for candidate, release in sorted(out, key=lambda each: -each[0].asked_at):
        begin_us = min(free_us, float(timeline.starts_us[candidate.asked_at])) - link.copy_us(candidate.size_bytes)
        at = int(np.searchsorted(starts, begin_us, side="right")) - 1
        if at < 0:
            continue
        found.append(Offload(candidate.storage, release, events[at][1]))
        free_us = begin_us
    return found
