"""First k: each of the first k layers a region, the others plain (Megatron-LM, `--recompute-method block`).

The first ones, because the last are differentiated while all others still keep what they keep: there a region frees
little that its own recomputation does not take again. k is the least that keeps the budget.
"""

from __future__ import annotations

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers import every_block
from remat.solvers.heuristic import judge


def solve(problem: Problem, limits: Limits) -> Solution:
    regions = every_block.regions(problem)
    return judge(problem, "first-k", [regions[:k] for k in range(len(regions) + 1)])
