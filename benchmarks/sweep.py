"""Sweep: the exact curve of GPT-2 from the least feasible budget to "no checkpointing needed".

The loss is chunked or not. Beside the curve: plans without chunks, heuristics, every block with a Liger-like head.

Claims that it checks: no predicted peak exceeds its budget, added time never rises with the budget, and no strategy is
better than the curve allows.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch

from benchmarks import report
from remat.cli.plots import sweep_plot as plotting
from remat.costing.planning_device import find_planning_device
from remat.models import build
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import Study
from remat.planning.sweep import CurvePoint, Sweep, sweep_study
from remat.units import GIB

COLUMNS = ["strategy", "budget_gib", "peak_gib", "overhead_percent", "slices", "status", "gap", "regions", "saved"]
COLUMNS += ["wall_s"]


def main(points: int | str = 20, model: str = "gpt2", target: str = "h100-80gb") -> None:
    cpu = torch.device("cpu")
    place = find_planning_device(target)
    step = fake_step(build(model), place)
    found = sweep_study(Study(profile_step(step, place), step=step), points=int(points), on_point=_say)
    require_claims(found)
    path = report.stem(f"sweep_{model}_for_{target}", cpu)
    about = {**report.provenance(cpu), "model": model, "target": target, "costs": found.costs}
    report.write(path, about, [_row(point) for point in (*found.points, *found.others)], COLUMNS)
    plotting.draw(found, path.with_suffix(".png"))


def require_claims(found: Sweep) -> None:
    budgets = [point.budget_bytes for point in found.points]
    for point in (*found.points, *found.others):
        assert point.peak_bytes <= point.budget_bytes, f"the peak of {point} exceeds its budget"
    for smaller, larger in zip(found.points, found.points[1:], strict=False):
        assert larger.overhead <= smaller.overhead, f"more budget cost more: {larger}"
    for point in found.others:
        # Whatever keeps the peak of this plan also keeps the next larger budget of the curve, whose bound holds.
        next_larger = found.points[min(bisect.bisect_left(budgets, point.peak_bytes), len(budgets) - 1)]
        added_us = point.recompute_time_us + point.form_time_us
        assert added_us >= (next_larger.bound_us or 0) - 0.01, f"{point} is better than proved possible"


def _row(point: CurvePoint) -> dict[str, Any]:
    return {
        "strategy": point.strategy,
        "budget_gib": round(point.budget_bytes / GIB, 3),
        "peak_gib": round(point.peak_bytes / GIB, 3),
        "overhead_percent": round(100 * point.overhead, 2),
        "slices": point.slices or "whole",
        "recompute_us": point.recompute_time_us,
        "status": point.status,
        "gap": "" if point.gap is None else round(point.gap, 5),
        "regions": point.regions,
        "saved": point.saved,
        "wall_s": round(point.wall_s, 2),
    }


def _say(strategy: str, number: int, count: int) -> None:
    print(f"{strategy}, point {number} of {count}", flush=True)
