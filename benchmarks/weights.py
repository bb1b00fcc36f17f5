"""Weights on the host: LoRA of models whose weights are more than the budget, at full size, estimated for a target.

For every length the least budget of any plan with all weights on the device, and the best plan with frozen weights of
some layers on the host: how many, what it adds to the step without checkpointing (which could not run), of that what
it waits for the link, and tokens a second.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import remat
from benchmarks import report
from remat.errors import Infeasible, RematError
from remat.models import build
from remat.models.adapters import Lora, with_lora
from remat.units import GIB

HOST_BUDGET = "64GiB"
CASES = (  # model, target, tokens, GiB
    ("phi-4", "rtx4090", 2048, 23),
    ("phi-4", "rtx4090", 8192, 23),
    ("llama-8b", "rtx4090", 2048, 15),
    ("llama-8b", "rtx4090", 2048, 10),
)
COLUMNS = ["model", "target", "tokens", "budget_gib", "least_without_gib", "layers", "host_gib", "peak_gib"]
COLUMNS += ["overhead", "wait_ms", "step_ms", "tokens_per_s", "gap", "wall_s", "failure"]


def main(*models: str) -> None:
    rows: list[dict[str, Any]] = []
    cpu = torch.device("cpu")
    path, about = report.stem("_".join(["weights", *models]), cpu), report.provenance(cpu)
    for model, target, tokens, budget_gib in CASES:
        if not models or model in models:
            rows.append({"model": model, "target": target, "tokens": tokens, "budget_gib": budget_gib})
            rows[-1] |= _row(model, target, tokens, budget_gib)
            print(rows[-1], flush=True)
            report.write(path, {**about, "costs": "estimated", "host_budget": HOST_BUDGET}, rows, COLUMNS)


def _row(model: str, target: str, tokens: int, budget_gib: int) -> dict[str, Any]:
    workload, started = with_lora(build(model), Lora(16)).sized(1, tokens), time.monotonic()
    row: dict[str, Any] = {}
    try:
        remat.plan(workload, budget=1, target=target)
    except Infeasible as error:
        row["least_without_gib"] = round((error.minimum_budget_bytes or 0) / GIB, 2)
    try:
        plan = remat.plan(workload, budget=budget_gib * GIB, target=target, offload="weights", host_budget=HOST_BUDGET)
    except RematError as error:
        return {**row, "failure": f"{type(error).__name__}: {error}"}
    step_us = plan.predicted["step_time_us"]
    return {
        **row,
        "layers": plan.about.get("weights_on_host", 0),
        "host_gib": round(plan.predicted.get("weights_host_bytes", 0) / GIB, 2),
        "peak_gib": round(plan.predicted["peak_bytes"] / GIB, 2),
        "overhead": round(plan.predicted["overhead"], 3),
        "wait_ms": round(plan.predicted.get("weights_wait_us", 0.0) / 1000, 1),
        "step_ms": round(step_us / 1000, 1),
        "tokens_per_s": round(tokens / step_us * 1e6),
        "gap": plan.solver["gap"],
        "wall_s": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    main()
