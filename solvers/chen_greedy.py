"""Greedy intervals of about b bytes each (Chen et al. 2016, Algorithm 3: memory planning with budget).

    temp <- 0
    for v in order:  temp <- temp + size(v);  if v is a candidate for a cut and temp > b: cut, temp <- 0

Candidates are the borders of segments, size(v) is what autograd would keep of what v makes, and what lies between two
cuts is a region. Chen searches b on a grid around sqrt(boundaries x largest interval); here b takes every value that
changes the plan, but grows by at least `LEAST_GROWTH`. Implementations differ in whether the last interval, which is
differentiated first, is recomputed as well: both are proposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import Piece, free_segments, joined, judge, plan_of

LEAST_GROWTH = 1.01


def solve(problem: Problem, limits: Limits) -> Solution:
    plans = list(intervals(problem))
    every = (plan_of(problem, regions) for regions in plans)
    all_but_last = (plan_of(problem, regions[:-1]) for regions in plans)
    return judge(problem, "chen-greedy", every, all_but_last)


def intervals(problem: Problem) -> Iterator[list[Region]]:
    """Yield the plans of Algorithm 3 for every b, from a region per segment to a region per chain."""
    found, sizes = free_segments(problem), kept_bytes(problem)
    limit = 0.0
    while limit < math.inf:
        regions, least = _algorithm_3(found, sizes, limit)
        yield regions
        limit = max(least, limit * LEAST_GROWTH)


def _algorithm_3(found: Sequence[Sequence[Piece]], sizes: np.ndarray, limit: float) -> tuple[list[Region], float]:
    """Return the intervals for b = `limit`, and the least b that changes them."""
    regions, least = [], math.inf
    for chain in found:
        begun, temp = 0, 0
        for i, (first, end) in enumerate(chain):
            temp += int(sizes[first:end].sum())
            if temp > limit or i + 1 == len(chain):
                regions.append(joined(chain[begun : i + 1]))
                least = min(least, temp) if i + 1 < len(chain) else least
                begun, temp = i + 1, 0
    return regions, least


def kept_bytes(problem: Problem) -> np.ndarray:
    """Return for every node the bytes that autograd would keep of its results."""
    storages = problem.graph.storages
    kept = problem.liveness.is_packed & (storages.node >= 0)
    sizes = np.zeros(len(problem.graph.nodes), dtype=np.int64)
    np.add.at(sizes, storages.node[kept], storages.size_bytes[kept])
    return sizes
