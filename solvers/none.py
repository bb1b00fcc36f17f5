"""No checkpointing: what people run who have no plan. It is not traced, and its peak is that of the untraced step."""

from __future__ import annotations

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution


def solve(problem: Problem, limits: Limits) -> Solution:
    fits = problem.memory.peak_without_checkpointing <= problem.budget_bytes
    return Solution("none", "feasible" if fits else "unknown")
