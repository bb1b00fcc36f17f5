"""Which solver the default should ask: CP-SAT, HiGHS and SCIP on the same programs, one after the other.

GPT-2 (124M, 24 x 1024) for an H100 at five budgets between the least peak and no checkpointing, three smaller models at
three. Each solver starts from nothing, has the same time, and says what it found and proved in it. Claims that it
checks: every plan keeps its budget and costs what the solver says, and no solver's bound exceeds another's plan.

`default_solver:10,resnet50` gives each solver ten seconds, on one model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import report
from remat.check import require
from remat.models import TEST_SIZES, build
from remat.problem import Problem
from remat.profiling import profile
from remat.solution import Limits, Solution
from remat.solvers import cp_sat, milp
from remat.solvers.least_peak import least_peak
from remat.solvers.program import Program
from remat.space import find_space
from remat.units import GIB

COLUMNS = ["model", "budget_gib", "solver", "status", "objective_us", "bound_us", "gap", "wall_s"]
TARGET = "h100-80gb"
BUDGETS = {"gpt2": 5, "t5-base": 3, "resnet50": 3, "bert-large": 3}
SOLVERS = {
    "cp-sat": cp_sat.solve,
    "milp/HiGHS": functools.partial(milp.solve, engine="highs"),
    "milp/SCIP": functools.partial(milp.solve, engine="scip"),
}


def main(time_s: float | str = 60, *models: str) -> None:
    cpu = torch.device("cpu")
    limits = Limits(time_s=float(time_s))
    rows = [row for model in models or BUDGETS for row in _rows(model, limits)]
    about = {**report.provenance(cpu), "target": TARGET, "costs": "estimated", "time_limit_s": limits.time_s}
    about |= {"workers": limits.workers, "gap_wanted": limits.gap}
    report.write(report.stem("_".join(["default_solver", *models]), cpu), about, rows, COLUMNS)


def _rows(model: str, limits: Limits) -> Iterator[dict[str, Any]]:
    found = profile(build(model) if model == "gpt2" else TEST_SIZES[model](), target=TARGET)
    problem = Problem(found.graph, found.costs, find_space(found.graph), 1 << 62)
    Program(problem)  # what the problem computes but once, so that no solver pays for the others
    most = problem.memory.peak_without_checkpointing
    least = least_peak(problem, limits).peak_bytes
    for budget in np.linspace(least, most, BUDGETS[model] + 2)[1:-1].astype(int).tolist():
        posed = problem.with_budget(budget)
        solutions = {name: solve(posed, limits) for name, solve in SOLVERS.items()}
        _require_claims(posed, list(solutions.values()))
        for name, solution in solutions.items():
            row = _row(model, budget, name, solution)
            print(row, flush=True)
            yield row


def _require_claims(problem: Problem, solutions: list[Solution]) -> None:
    planned = [solution for solution in solutions if solution.status in ("optimal", "feasible")]
    for solution in planned:
        require(problem, solution)
    least = min((solution.objective_us for solution in planned), default=float("inf"))
    for solution in solutions:
        assert solution.bound_us <= least + 0.01, (
            f"{solution.solver} bounds at {solution.bound_us}; a plan takes {least}"
        )


def _row(model: str, budget: int, name: str, solution: Solution) -> dict[str, Any]:
    return {
        "model": model,
        "budget_gib": round(budget / GIB, 4),
        "solver": name,
        "status": solution.status,
        "objective_us": round(solution.objective_us, 1),
        "bound_us": round(solution.bound_us, 1),
        "gap": round(solution.gap, 5),
        "wall_s": round(solution.wall_s, 2),
    }
