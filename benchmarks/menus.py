"""Menus: what a budget costs under each answer to "what may change in the numbers", in the ready-made models.

For each model and each budget (a share of its peak) one plan is made as `remat plan` makes it by default, and the menu
beside it: every gradient bitwise, losses and MLPs in chunks, fused kernels. All on an H100 by name: times are
estimated. How long groups compile in the first step is not measured. `menus:gpt2,20GiB` takes that budget instead.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.errors import RematError
from remat.models import build
from remat.planning.menu import with_alternatives
from remat.planning.planner import plan_study, studied
from remat.planning.request import NUMERICS, PlanRequest
from remat.units import GIB

MODELS = (
    *("gpt2", "gpt2-medium", "bert-large", "t5-base", "llama-1b", "qwen3-4b", "gemma-3-1b", "qwen3-moe"),
    *("vit-l16", "swin-base", "resnet50", "convnextv2-base"),
)
SHARES = (70, 50, 30)
TARGET = "h100-80gb"
COLUMNS = [
    "model",
    "budget",
    "budget_gib",
    *(f"{numerics}_percent" for numerics in NUMERICS),
    "form",
    "cpu_s",
    "failure",
]


def main(*names: str) -> None:
    cpu = torch.device("cpu")
    path, about = report.stem("_".join(["menus", *names]), cpu), report.provenance(cpu)
    budgets = [name for name in names if name.endswith("iB")] or [f"{share}%step" for share in SHARES]
    rows: list[dict[str, Any]] = []
    for model in [name for name in names if not name.endswith("iB")] or MODELS:
        for budget in budgets:
            rows.append({"model": model, "budget": budget, **row_of(model, budget)})
            print(rows[-1], file=sys.stderr, flush=True)
            report.write(path, {**about, **summary(rows)}, rows, COLUMNS)
        torch._dynamo.reset()


def row_of(model: str, budget: str) -> dict[str, Any]:
    started = time.process_time()
    row: dict[str, Any] = {}
    try:
        study = studied(build(model), PlanRequest(budget=budget), find_planning_device(TARGET))
        assert study.budget is not None
        row["budget_gib"] = round(study.budget.limit_bytes / GIB, 2)
        for each in with_alternatives(plan_study(study), study).alternatives:
            if each.overhead is not None:
                row[f"{each.numerics}_percent"] = round(100 * each.overhead, 1)
            else:
                row["failure"] = f"{each.numerics}: {each.why}"
            if each.numerics == NUMERICS[-1]:
                row["form"] = each.form
    except RematError as error:
        row["failure"] = f"{type(error).__name__}: {str(error)[:200]}"
    return {**row, "cpu_s": round(time.process_time() - started, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often, and by how much, fused kernels are the faster answer."""
    both = [row for row in rows if "sums_percent" in row and "rounding_percent" in row]
    gains = sorted(_gain(row) for row in both)
    return {
        "budgets": len(rows),
        "with a default and a fused plan": len(both),
        "fused faster": sum(gain > 0 for gain in gains),
        "median share of the step that it saves, percent": gains[len(gains) // 2] if gains else None,
    }


def _gain(row: dict[str, Any]) -> float:
    return round(100 * (1 - (100 + row["rounding_percent"]) / (100 + row["sums_percent"])), 1)
