"""No checkpointing: the step without a plan. Nothing is traced; the peak is that of the untraced step."""

from __future__ import annotations

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution


def solve(problem: Problem, limits: Limits) -> Solution:
    fits = problem.memory.peak_without_checkpointing <= problem.budget_bytes
    return Solution("none", "feasible" if fits else "unknown")
