"""Shared parts of heuristics: they propose plans without a proof, and the evaluator picks the best that fits.

Every proposal is a plan of the problem's own space: its regions begin and end at borders of segments, hold no plain
one, and save only what is worth saving. That is why no heuristic can beat an exact solver; where one does, one of
the two is wrong.

Strategies that have a number to choose (how many layers, how large an interval) propose a *family*: one plan for each
value. The peak need not be monotone along a family, because a longer region keeps less and has more alive while it
is recomputed, so nothing here bisects.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.search_space import blocks
from remat.formulation.solution import Solution, Status

Proposal = tuple[Region, ...]
Piece = tuple[int, int]  # nodes [first, end) that may be a region, or part of one

MOST_JUDGED = (
    100  # of a family are judged at first: a judgement takes milliseconds, ten where there are a hundred layers
)


def judge(problem: Problem, name: str, *families: Iterable[Proposal]) -> Solution:
    """Return the proposal with least recompute time that fits; if none does, the nearest as "unknown".

    Neighbours in a family differ little: a long one is sampled, then searched around the best of the sample.
    """
    started = time.monotonic()
    best = (math.inf, 0, Proposal())
    for family in map(list, families):
        stride = max(math.ceil(len(family) / MOST_JUDGED), 1)
        best = _best(problem, family[::stride], best)
        if stride > 1 and best[2] in family:
            at = family.index(best[2])
            best = _best(problem, family[max(at - stride + 1, 0) : at + stride], best)
    over, _, regions = best
    status: Status = "unknown" if over else "feasible"
    time_us = problem.memory.recompute_time_us(regions, problem.liveness.op_time_us)
    return Solution(name, status, regions, time_us, 0.0, time.monotonic() - started)


_Judgement = tuple[float, int, Proposal]  # bytes over the budget, recompute time in ns; less is better


def _best(problem: Problem, proposals: Iterable[Proposal], best: _Judgement) -> _Judgement:
    """Return the better of `best` and the best proposal.

    Proposals are tried by rising time, until one fits.
    """
    for time_ns, regions in sorted((recompute_ns(problem, regions), regions) for regions in set(proposals)):
        if best[0] == 0 and best[1] <= time_ns:
            break
        best = min(best, (excess_bytes(problem, regions), time_ns, regions))
    return best


def fewest_that_fit(problem: Problem, regions: Proposal) -> Proposal | None:
    """Select the fewest first `regions` that keep the budget, by bisection; a quick guess."""
    if excess_bytes(problem, regions):
        return None
    too_few, enough = -1, len(regions)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if excess_bytes(problem, regions[:middle]):
            too_few = middle
        else:
            enough = middle
    return regions[:enough]


def excess_bytes(problem: Problem, regions: Proposal) -> int:
    """Return the bytes by which a plan's peak exceeds the budget."""
    return max(problem.curve(regions).peak_bytes - problem.budget_bytes, 0)


def recompute_ns(problem: Problem, regions: Proposal) -> int:
    """Return the time of everything that `plan_of` plans recompute, without evaluating their memory."""
    total = 0
    for region in regions:
        again = problem.memory.recomputation(region)
        assert again is not None
        total += problem.memory.time_of(again, problem.time_until)
        total -= sum(problem.liveness.save_time_ns[node] for node in region.saved)
    return total


def plan_of(problem: Problem, regions: Iterable[Region]) -> Proposal:
    """Turn `regions` into a plan of the problem's space.

    Dropped are regions without recomputation, too long ones, those that are no modules if they must be, and saves of
    nodes that take no time or are not recomputed anyway (early stop).
    """
    found = []
    for region in regions:
        again = problem.memory.recomputation(region)
        a, b = problem.liveness.segment_of_node[region.first], problem.liveness.segment_of_node[region.end - 1] + 1
        allowed = b - a <= problem.space.longest and problem.space.allows(region.first, region.end)
        if again is not None and allowed:
            ends = problem.memory.node_end
            saved = (v for v in region.saved if v in problem.liveness.save_time_ns and ends[v] <= again.stop)
            found.append(Region(region.first, region.end, tuple(saved)))
    return tuple(found)


def layers(problem: Problem) -> list[list[Piece]]:
    """Return the model's layers that the space can make regions, in chains (see `chains`)."""
    segments = problem.space.segments
    starts = {segment.first: i for i, segment in enumerate(segments)}
    ends = {segment.end: i + 1 for i, segment in enumerate(segments)}
    found = [
        (first, end)
        for first, end in blocks(problem.graph)
        if first in starts and end in ends and not any(s.plain for s in segments[starts[first] : ends[end]])
    ]
    return chains(problem, found)


def free_segments(problem: Problem) -> list[list[Piece]]:
    """Return the segments that may be regions, in chains."""
    return chains(problem, [(s.first, s.end) for s in problem.space.segments if not s.plain])


def chains(problem: Problem, pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Group pieces that follow each other without a gap in one graph call: they can be one region."""
    nodes = problem.graph.nodes
    found: list[list[Piece]] = []
    for first, end in pieces:
        if found and found[-1][-1][1] == first and nodes[found[-1][-1][0]].call == nodes[first].call:
            found[-1].append((first, end))
        else:
            found.append([(first, end)])
    return found


def joined(pieces: Sequence[Piece]) -> Region:
    return Region(pieces[0][0], pieces[-1][1])


def grouped(found: Iterable[Sequence[Piece]], width: int) -> list[Region]:
    """Make regions of `width` pieces each; the last of a chain has the rest."""
    return [joined(chain[i : i + width]) for chain in found for i in range(0, len(chain), width)]
