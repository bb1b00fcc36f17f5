"""Greedy: what frees most bytes per microsecond of recomputation, first, until the budget holds.

A piece of the model (a segment, or a layer) can be executed in several ways, in order of time: plain; a region that
saves everything worth saving; the same without the save that keeps most bytes per microsecond, and so on to a region
that saves nothing. Choosing a way for every piece under a limit is a multiple-choice knapsack, and its greedy is
Sinha and Zoltners' (1979): only ways on the upper hull of (time, bytes freed) are of use, and from one to the next
the ratio falls, so that the first so many *steps* of all pieces, sorted by ratio, are a plan.

The bytes of a step are an estimate (what the piece makes and no later node takes); only its order depends on it. How
many steps are needed is asked of the evaluator: prefixes from short to long, then bisection below the first that
fits. Last, steps that turn out not to be needed are taken back, in halves and from the late pieces on: the peak is
often where these no longer matter. In all, that is some fifty judgements for segments and as many for layers, however
large the model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import (
    Piece,
    Proposal,
    excess_bytes,
    free_segments,
    judge,
    layers,
    plan_of,
    recompute_ns,
)

PREFIXES = 16  # that are tried from short to long
MOST_REMOVALS_JUDGED = 24  # judgements, at most


def solve(problem: Problem, limits: Limits) -> Solution:
    """Return the better of two plans: regions of a segment each, or of a layer each."""
    chains = (free_segments(problem), layers(problem))
    pieces = (list(itertools.chain.from_iterable(found)) for found in chains)
    return judge(problem, "greedy", (greedy(problem, found) for found in pieces))


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to execute a piece: its region, None for plain; its time and the bytes that it frees."""

    region: Region | None
    time_ns: int = 0
    freed_bytes: int = 0


def greedy(problem: Problem, pieces: Sequence[Piece]) -> Proposal:
    """Return the greedy plan of regions that are `pieces`; if none fits, the nearest of the prefixes tried."""
    freed = FreedBytes(problem)
    search = _GreedySearch(problem, [hull(list(ways(problem, freed, piece))) for piece in pieces])
    return search.plan(search.fitting_levels())


def ways(problem: Problem, freed: FreedBytes, piece: Piece) -> Iterator[Way]:
    """Yield all ways to execute `piece`, by rising time."""
    yield Way(None)
    nodes = [node for node in problem.liveness.save_time_ns if piece[0] <= node < piece[1]]
    whole = plan_of(problem, [Region(*piece, tuple(nodes))])
    if not whole:
        return
    time_ns, bytes_ = recompute_ns(problem, whole), freed.by(piece) - sum(map(freed.by_dropping, whole[0].saved))
    yield Way(whole[0], time_ns, bytes_)
    saved = list(whole[0].saved)
    for node in sorted(saved, key=lambda v: (-freed.by_dropping(v) / problem.liveness.save_time_ns[v], v)):
        saved.remove(node)
        time_ns += problem.liveness.save_time_ns[node]
        bytes_ += freed.by_dropping(node)
        yield Way(Region(*piece, tuple(saved)), time_ns, bytes_)


def ratio(left: Way, right: Way) -> float:
    """Return the bytes that the step from `left` to `right` frees per nanosecond."""
    return (right.freed_bytes - left.freed_bytes) / max(right.time_ns - left.time_ns, 1)


def hull(found: Sequence[Way]) -> list[Way]:
    """Return the upper hull of (time, bytes freed): from one way to the next, the ratio falls and is positive."""
    kept = [found[0]]
    for way in found[1:]:
        if way.freed_bytes <= kept[-1].freed_bytes:
            continue
        while len(kept) > 1 and ratio(kept[-2], kept[-1]) <= ratio(kept[-1], way):
            kept.pop()
        kept.append(way)
    return kept


class FreedBytes:
    """Estimates of the bytes that a plain piece keeps, and that a save keeps."""

    def __init__(self, problem: Problem):
        self.problem, storages = problem, problem.graph.storages
        self.caller_held = storages.death >= problem.graph.forward_end
        self.node = np.where(problem.liveness.is_packed & ~self.caller_held, storages.node, -1)
        self.last_taken = last_taken(problem.graph)

    def by(self, piece: Piece) -> int:
        """Return the bytes that autograd keeps inside `piece`, less those that only its being a region keeps."""
        first, end = piece
        sizes = self.problem.graph.storages.size_bytes
        own = (self.node >= first) & (self.node < end) & (self.last_taken < end)
        taken = np.array(sorted(self.problem.memory.inputs(first, end)), dtype=np.int64)
        more = taken[~self.problem.liveness.is_packed[taken] & ~self.caller_held[taken]]
        return int(sizes[own].sum() - sizes[more].sum())

    def by_dropping(self, node: int) -> int:
        return self.problem.liveness.saved_bytes(node)


def last_taken(graph: Graph) -> np.ndarray:
    """Return for every storage the last node that takes a value of it, -1 for none."""
    last = np.full(len(graph.storages.birth), -1, dtype=np.int64)
    for i, node in enumerate(graph.nodes):
        for source in node.inputs:
            last[list(graph.nodes[source].values)] = i
    return last


class _GreedySearch:
    """The position on every piece's ways: `levels[i]` is an index into `ways[i]`."""

    def __init__(self, problem: Problem, found: list[list[Way]]):
        self.problem, self.ways = problem, found
        steps = [
            (-ratio(left, right), i, level)
            for i, piece in enumerate(found)
            for level, (left, right) in enumerate(itertools.pairwise(piece))
        ]
        # Of equal steps the first piece's come first: see first_k.py.
        self.steps = [i for _, i, _ in sorted(steps)]

    def levels_after(self, count: int) -> list[int]:
        """Return the levels that the first `count` steps lead to."""
        return np.bincount(self.steps[:count], minlength=len(self.ways)).tolist()

    def plan(self, levels: Iterable[int]) -> Proposal:
        chosen = (piece[level].region for piece, level in zip(self.ways, levels, strict=True))
        return tuple(region for region in chosen if region is not None)

    def excess(self, levels: Iterable[int]) -> int:
        return excess_bytes(self.problem, self.plan(levels))

    def fitting_levels(self) -> list[int]:
        """Select as many of the first steps as needed, without superfluous ones; the nearest if none fit."""
        counts = sorted({len(self.steps) * i // PREFIXES for i in range(PREFIXES + 1)})
        nearest, too_few = (self.excess(self.levels_after(0)), 0), 0
        for count in counts[1:]:
            nearest = min(nearest, (self.excess(self.levels_after(count)), count))
            if nearest[0] == 0:
                break
            too_few = count
        over, enough = nearest
        if over or not enough:
            return self.levels_after(enough)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.excess(self.levels_after(middle)):
                too_few = middle
            else:
                enough = middle
        return self.taken_back(self.levels_after(enough))

    def taken_back(self, levels: list[int]) -> list[int]:
        """Take back steps that are not needed: of all pieces, of the late half, of a quarter, and so on."""
        groups = [[i for i, level in enumerate(levels) if level]]
        for _ in range(MOST_REMOVALS_JUDGED):
            groups = [group for group in ([i for i in group if levels[i]] for group in groups) if group]
            if not groups:
                break
            group = groups.pop()
            fewer = [level - (i in group) for i, level in enumerate(levels)]
            if self.excess(fewer) == 0:
                levels = fewer
                groups.append(group)
            elif len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return levels
