"""sqrt(N): L layers in about sqrt(L) regions of equally many layers (Chen et al. 2016, section 4.3).

The rule minimises L/k boundaries plus k interiors where both weigh the same. In a transformer an interior weighs many
times a boundary, so it is a baseline here and not a recommendation.
"""

from __future__ import annotations

import math

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import grouped, judge, layers, plan_of


def solve(problem: Problem, limits: Limits) -> Solution:
    found = layers(problem)
    width = max(round(math.sqrt(sum(map(len, found)))), 1)
    return judge(problem, "sqrt-n", [plan_of(problem, grouped(found, width))])
