"""Strategies: every heuristic against the exact solver, all families at test size, ten budgets each, estimated costs.

Claims that it checks as it goes: no heuristic beats a proved bound, and none beats the exact solver's plan. The table
says by how much the best heuristic is slower: the ratio of recompute times, and their geometric mean over the budgets
at which a heuristic fits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import HEURISTICS, load
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from tests.small_models import TEST_SIZES

BUDGETS = 10
COLUMNS = [
    "model",
    "budget_gib",
    "exact_ms",
    "status",
    "gap",
    "solver",
    "wall_s",
    "best_heuristic",
    "heuristic_ms",
    "ratio",
]


def main(*models: str) -> None:
    place = find_planning_device("h100-80gb")
    rows: list[dict[str, Any]] = []
    about = {**report.provenance(torch.device("cpu")), "target": place.target.name, "costs": "estimated"}
    path = report.stem("strategies", torch.device("cpu"))
    for model in models or TEST_SIZES:
        profile = profile_step(fake_step(TEST_SIZES[model](), place), place)
        problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)
        most = problem.memory.peak_without_checkpointing
        least = least_peak(problem, Limits(time_s=30)).peak_bytes
        for budget in np.linspace(least, most, BUDGETS + 2)[:-1].astype(int).tolist()[1:]:
            rows.append({"model": model, **compare(problem.with_budget(budget))})
            print(rows[-1], flush=True)
            report.write(path, {**about, **summary(rows)}, rows, COLUMNS)


def compare(problem: Problem) -> dict[str, Any]:
    """The exact solver and the best heuristic under one budget."""
    exact = load("exact")(problem, Limits(time_s=20))
    fitting = {name: found for name in HEURISTICS if (found := load(name)(problem, Limits())).status == "feasible"}
    for name, found in fitting.items():
        assert found.objective_us >= exact.bound_us - 0.01, f"{name} beats the bound"
        assert found.objective_us >= exact.objective_us - 0.01, f"{name} beats the exact solver"
    best = min(fitting, key=lambda name: fitting[name].objective_us, default=None)
    row: dict[str, Any] = {
        "budget_gib": round(problem.budget_bytes / GIB, 3),
        "exact_ms": round(exact.objective_us / 1000, 3),
        "status": exact.status,
        "gap": round(exact.gap, 5),
        "solver": exact.solver,
        "wall_s": round(exact.wall_s, 2),
        "best_heuristic": best or "none fits",
        "heuristics_ms": {name: round(found.objective_us / 1000, 3) for name, found in fitting.items()},
    }
    if best is not None:
        row["heuristic_ms"] = round(fitting[best].objective_us / 1000, 3)
        row["ratio"] = round(fitting[best].objective_us / max(exact.objective_us, 0.001), 4)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the exact solver is strictly better, and by how much."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return {
        "budgets": len(rows),
        "no heuristic fits": sum("ratio" not in row for row in rows),
        "exact strictly better": sum(ratio > 1 for ratio in ratios),
        "geometric mean of ratios": round(math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1)), 4),
        "proved to 0.1 %": sum(row["status"] == "optimal" for row in rows),
    }
