"""Every layer of the model a region: what Hugging Face's `gradient_checkpointing_enable` does."""

from __future__ import annotations

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import Proposal, grouped, judge, layers, plan_of


def solve(problem: Problem, limits: Limits) -> Solution:
    return judge(problem, "every-block", [regions(problem)])


def regions(problem: Problem) -> Proposal:
    return plan_of(problem, grouped(layers(problem), 1))
