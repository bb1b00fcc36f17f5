"""sqrt(N): L layers in about sqrt(L) regions of equally many layers (Chen et al. 2016, Algorithm 1).

The rule minimises L/k boundaries plus k interiors where both weigh the same. In a transformer an interior weighs many
times a boundary, so it is a baseline here and not a recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat.plans import Region
from remat.problem import Problem
from remat.solution import Limits, Solution
from remat.solvers.heuristic import judge
from remat.space import blocks


def solve(problem: Problem, limits: Limits) -> Solution:
    layers = blocks(problem.graph)
    width = max(round(math.sqrt(len(layers))), 1)
    return judge(problem, "sqrt-n", [tuple(grouped(layers, width))])


def grouped(layers: Sequence[tuple[int, int]], width: int) -> list[Region]:
    """Regions of `width` layers each, where layers follow each other without a gap."""
    regions: list[Region] = []
    members = 0
    for first, end in layers:
        if regions and members < width and regions[-1].end == first:
            regions[-1] = Region(regions[-1].first, end)
            members += 1
        else:
            regions.append(Region(first, end))
            members = 1
    return regions
