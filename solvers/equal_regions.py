"""Equal regions in each pass: plans to begin from where a step runs backward inside (adversaries, penalties, MAML).

The program has no rows within such passes (`Problem.forward_rows`), so plans that are read off its chain exceed the
budget there. A pass lets go of its values when its backward has run: what one pass recomputes hardly depends on the
others. So for one pass after another, regions of equal numbers of segments are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from remat.formulation.problem import Problem
from remat.solvers.heuristic import Proposal, excess_bytes, free_segments, grouped, plan_of, recompute_ns

MOST_WIDTHS = 16


def cheapest(problem: Problem) -> Proposal | None:
    """Return a plan that keeps the budget, after dropping regions while it does; None if none is found."""
    passes = _Passes(problem)
    chosen = passes.lowest()
    if excess_bytes(problem, _joined(chosen)):
        return None
    for number, ways in enumerate(passes.ways):
        plans = ([*chosen[:number], way, *chosen[number + 1 :]] for way in ways)
        chosen = min(plans, key=lambda plan: _excess_and_time(problem, _joined(plan)))
    regions = _joined(chosen)
    for region in sorted(regions, key=lambda region: -recompute_ns(problem, (region,))):
        fewer = tuple(each for each in regions if each != region)
        regions = regions if excess_bytes(problem, fewer) else fewer
    return regions


def lowest(problem: Problem) -> Proposal:
    """Return the plan of least peak among those of equal regions in each pass."""
    return _joined(_Passes(problem).lowest())


def _excess_and_time(problem: Problem, regions: Proposal) -> tuple[int, int]:
    return excess_bytes(problem, regions), recompute_ns(problem, regions)


class _Passes:
    """The passes of a step, one for each graph call, and the ways to cut each: into none, one, two segments a region.

    starts  first operator of each pass; the last one goes on to the end of the step
    """

    def __init__(self, problem: Problem):
        self._problem, nodes = problem, problem.graph.nodes
        calls = itertools.groupby(free_segments(problem), key=lambda chain: nodes[chain[0][0]].call)
        found = [list(chains) for _, chains in calls]
        longest = max((len(chain) for chains in found for chain in chains), default=0)
        widths = range(1, min(2 * math.isqrt(longest), MOST_WIDTHS) + 2)
        self.ways = [[(), *(plan_of(problem, grouped(chains, width)) for width in widths)] for chains in found]
        self.starts = [nodes[chains[0][0][0]].first for chains in found]

    def lowest(self) -> list[Proposal]:
        """Return the way of each pass that has the least peak while it runs."""
        peaks = [self._peaks(_joined(plan)) for plan in zip(*self.ways, strict=True)]  # of one width in all passes
        return [ways[way] for ways, way in zip(self.ways, np.argmin(peaks, axis=0), strict=True)] if peaks else []

    def _peaks(self, regions: Proposal) -> list[int]:
        """Return the peak of each pass under a plan."""
        curve = self._problem.curve(regions)
        at = np.maximum(np.searchsorted(self.starts, curve.op, side="right") - 1, 0)
        return [int(curve.alive_bytes[at == number].max(initial=0)) for number in range(len(self.starts))]


def _joined(plan: Sequence[Proposal]) -> Proposal:
    return tuple(itertools.chain.from_iterable(plan))
