"""Which solver the default should ask for what the chain leaves: CP-SAT, HiGHS and SCIP on the same leftovers.

GPT-2 (124M, 24 x 1024) for an H100 at five budgets between the least peak and no checkpointing, other families at test
size at three. First the chain, as in `exact`; where its bound does not meet its plan, each solver in turn goes on from
that plan and that bound, among the runs that the chain could not exclude, in the same time. Claims that it checks:
every plan keeps its budget and costs what the solver says, and no solver's bound exceeds another's plan.

`default_solver:10,resnet50` gives each solver ten seconds, on one model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import report
from remat.formulation.check import require
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits, Solution
from remat.models import build
from remat.planning.profiling import profile
from remat.solvers import chain_dp, cp_sat, milp
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from tests.small_models import TEST_SIZES

COLUMNS = ["model", "budget_gib", "solver", "runs", "status", "objective_us", "bound_us", "gap", "wall_s", "cpu_s"]
TARGET = "h100-80gb"
BUDGETS = {"gpt2": 5, "t5-base": 3, "resnet50": 3, "llama-1b": 3, "bert-large": 3, "qwen3-moe": 3}
SOLVERS: dict[str, Callable[..., Solution]] = {
    "cp-sat": cp_sat.solve,
    "milp/HiGHS": functools.partial(milp.solve, engine="highs"),
    "milp/SCIP": functools.partial(milp.solve, engine="scip"),
}


def main(time_s: float | str = 60, *models: str) -> None:
    cpu = torch.device("cpu")
    limits = Limits(time_s=float(time_s))
    path = report.stem("_".join(["default_solver", *models]), cpu)
    about = {**report.provenance(cpu), "target": TARGET, "costs": "estimated", "time_limit_s": limits.time_s}
    about |= {"workers": limits.workers, "gap_wanted": limits.gap}
    rows: list[dict[str, Any]] = []
    for model in models or BUDGETS:
        for row in _rows(model, limits):
            print(row, flush=True)
            rows.append(row)
            report.write(path, about, rows, COLUMNS)


def _rows(model: str, limits: Limits) -> Iterator[dict[str, Any]]:
    found = profile(build(model) if model == "gpt2" else TEST_SIZES[model](), target=TARGET)
    problem = Problem(found.graph, found.costs, find_space(found.graph), 1 << 62)
    least, most = least_peak(problem, limits).peak_bytes, problem.memory.peak_without_checkpointing
    for budget in np.linspace(least, most, BUDGETS[model] + 1)[:-1].astype(int).tolist():
        posed = problem.with_budget(budget)
        begun = time.process_time()
        explored = chain_dp.explore(posed, Limits())
        start, useful = explored.solution(limits), explored.useful()
        yield _row(model, budget, "chain-dp", start, time.process_time() - begun, useful)
        if start.status == "optimal":
            continue
        solutions = [start]
        for name, solve in SOLVERS.items():
            begun = time.process_time()
            solutions.append(solve(posed, limits, start=start, keep=useful))
            yield _row(model, budget, name, solutions[-1], time.process_time() - begun, useful)
        _require_claims(posed, solutions)


def _require_claims(problem: Problem, solutions: list[Solution]) -> None:
    planned = [solution for solution in solutions if solution.status in ("optimal", "feasible")]
    for solution in planned:
        require(problem, solution)
    least = min((solution.objective_us for solution in planned), default=float("inf"))
    for solution in solutions:
        assert solution.bound_us <= least + 0.01, (
            f"{solution.solver} bounds at {solution.bound_us}; a plan takes {least}"
        )


def _row(
    model: str, budget: int, name: str, solution: Solution, cpu_s: float, useful: set[int] | None
) -> dict[str, Any]:
    return {
        "model": model,
        "budget_gib": round(budget / GIB, 4),
        "solver": name,
        "runs": None if useful is None else len(useful),
        "status": solution.status,
        "objective_us": round(solution.objective_us, 1),
        "bound_us": round(solution.bound_us, 1),
        "gap": round(solution.gap, 5),
        "wall_s": round(solution.wall_s, 2),
        "cpu_s": round(cpu_s, 2),
    }
