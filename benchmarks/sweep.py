"""Sweep: the exact curve of GPT-2 from the least feasible budget to "no checkpointing needed", and the heuristics.

Claims that it checks as it goes: no predicted peak exceeds its budget, recompute time never rises with the budget.
"""

from __future__ import annotations

import time
from typing import Any

import matplotlib
import numpy as np
import torch

from benchmarks import report
from remat.models import build
from remat.planning import Budget, plan_profile
from remat.problem import Problem
from remat.profiling import fake_step, find_place, profile_step
from remat.solution import Limits
from remat.solvers import cp_sat, every_block, none, sqrt_n
from remat.space import find_space
from remat.units import GIB

matplotlib.use("Agg")
COLUMNS = ["budget_gib", "peak_gib", "overhead_percent", "status", "gap", "solver", "regions", "saved", "wall_s"]


def main(points: int = 20, model: str = "gpt2", target: str = "h100-80gb") -> None:
    place = find_place(target)
    step = fake_step(build(model), place)
    profile = profile_step(step, place)
    space = find_space(profile.graph)
    problem = Problem(profile.graph, profile.costs, space, 1 << 62)
    most = problem.memory.peak_without_checkpointing
    least, _, _ = cp_sat.least_peak(problem.with_budget(most), Limits())
    rows: list[dict[str, Any]] = []
    others = heuristics(problem)
    budgets = {*np.linspace(least, most, points).astype(int).tolist(), *(other["peak_bytes"] for other in others)}
    for budget in sorted(budgets):
        started = time.monotonic()
        found = plan_profile(profile, Budget(budget, budget), step=step, space=space)
        rows.append(row(found, budget, time.monotonic() - started))
        print(rows[-1], flush=True)
        assert found.predicted["peak_bytes"] <= budget, "a predicted peak exceeds its budget"
        assert len(rows) < 2 or rows[-1]["recompute_us"] <= rows[-2]["recompute_us"] * 1.001, "more budget cost more"
    about = {**report.provenance(torch.device("cpu")), "model": model, "target": target, "costs": "estimated"}
    path = report.stem(f"sweep_{model}_for_{target}", torch.device("cpu"))
    report.write(path, about, rows + others, COLUMNS)
    draw(path.with_suffix(".png"), rows, others, model, target)


def row(found: Any, budget: int, wall_s: float) -> dict[str, Any]:
    return {
        "budget_gib": round(budget / GIB, 3),
        "peak_gib": round(found.predicted["peak_bytes"] / GIB, 3),
        "overhead_percent": round(100 * found.predicted["overhead"], 2),
        "recompute_us": found.predicted["recompute_time_us"],
        "status": found.solver["status"],
        "gap": round(found.solver["gap"], 5),
        "solver": found.solver["name"],
        "regions": len(found.regions),
        "saved": sum(len(region.saved) for region in found.regions),
        "wall_s": round(wall_s, 2),
    }


def heuristics(problem: Problem) -> list[dict[str, Any]]:
    """What the known strategies need and cost, whatever the budget."""
    unlimited = problem.with_budget(1 << 62)
    found = []
    for solver in (none.solve, every_block.solve, sqrt_n.solve):
        solution = solver(unlimited, Limits())
        peak = problem.memory.curve(solution.regions).peak_bytes
        found.append(
            {
                "budget_gib": "",
                "peak_bytes": peak,
                "peak_gib": round(peak / GIB, 3),
                "overhead_percent": round(100 * solution.objective_us / problem.step_time_us, 2),
                "solver": solution.solver,
                "regions": len(solution.regions),
            }
        )
    return found


def draw(path: Any, rows: list[dict[str, Any]], others: list[dict[str, Any]], model: str, target: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), dpi=160)
    peaks, overheads = [r["peak_gib"] for r in rows], [r["overhead_percent"] for r in rows]
    axes.plot(peaks, overheads, "o-", drawstyle="steps-post", markersize=4, label="remat, proved optimal")
    for other, marker in zip(others, "s^D", strict=True):
        axes.plot(other["peak_gib"], other["overhead_percent"], marker, markersize=9, label=other["solver"])
    axes.set_xlabel("peak of the whole training step, GiB")
    axes.set_ylabel("recompute time, % of the step")
    axes.set_title(f"{model}, predicted for {target} (estimated costs)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"wrote {path}")
