"""Slices: what it brings to cut the loss, over budgets from much to little, at full size, estimated for one target.

For every budget the plan that leaves the loss whole, the one that may cut it, every block a region, and that with the
loss in as many slices as Liger-Kernel's head takes. Overhead is of the step without checkpointing, what slices cost
included; `least` is what each kind of plan needs at least. Models of 4 and 8 billion parameters are in bf16.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.errors import RematError
from remat.evaluation.form import chunks_of
from remat.execution.executions import load
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.budget import Budget
from remat.planning.comparison import Comparison, compare_study
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import PlanRequest
from remat.planning.strategies import LIGER_LIKE, LOSS_WHOLE
from remat.planning.study import Study
from remat.recording.fake_step import FakeStep
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.workload.training_loop import TrainingLoop

TARGET = "h100-80gb"
BUDGETS_GIB = {
    "gpt2": (21.5, 20, 16, 12, 8, 5),
    "llama-1b": (40, 35, 30, 27, 25, 23),
    "llama-8b": (70, 60, 50, 40, 36, 34),
    "qwen3-4b": (70, 60, 50, 42, 38, 36),
}
IN_BF16 = {"llama-8b": 8192, "qwen3-4b": 8192}  # model -> tokens of its one sample
STATE_ON_HOST = ("llama-8b",)  # whose optimizer's step would take 75 GiB; what it waits is in every column's step
TIME_S = 30.0
COLUMNS = ["model", "budget_gib", "slices", "with_slices", "gap", "whole", "every_block", "liger_like", "wall_s"]


def main(*models: str) -> None:
    rows: list[dict[str, Any]] = []
    path = report.stem("slices", torch.device("cpu"))
    about = {**report.provenance(torch.device("cpu")), "target": TARGET, "costs": "estimated"}
    for model in models or BUDGETS_GIB:
        place, how = find_planning_device(TARGET), load("eager")
        step = _step(model, place)
        profile = profile_step(step, place)
        study = Study(profile, PlanRequest(limits=Limits(time_s=TIME_S)), step)
        assert study.forms is not None
        for budget_gib in BUDGETS_GIB[model]:
            rows.append({"model": model, "budget_gib": budget_gib, **_row(study, budget_gib)})
            print(rows[-1], flush=True)
            report.write(path, {**about, **_least(rows)}, rows, COLUMNS)
        leasts = {"whole": profile, **{str(v.form.chunks[0].slices): v.profile for v in study.forms}}
        for name, found in leasts.items():
            least = least_peak(how.pose(found, how.space(found.graph), 0), Limits(time_s=TIME_S))
            rows[-1][f"least_{name}"] = round(least.peak_bytes / GIB, 2)
        print(rows[-1], flush=True)
        report.write(path, {**about, **_least(rows)}, rows, COLUMNS)


def _step(model: str, place: PlanningDevice) -> FakeStep:
    workload = build(model)
    if model in IN_BF16:
        workload = dataclasses.replace(workload.with_dtype("bf16"), batch_size=1, seq_len=IN_BF16[model])
    return fake_step(workload, place, loop=TrainingLoop(offload_optimizer=model in STATE_ON_HOST))


def _least(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Least budgets in GiB, by model and number of slices."""
    return {
        f"{row['model']} {name.replace('_', ', ')} (GiB)": value
        for row in rows
        for name, value in row.items()
        if name.startswith("least_")
    }


def _row(study: Study, budget_gib: float) -> dict[str, Any]:
    limit, started = int(budget_gib * GIB), time.monotonic()
    try:
        found = compare_study(study.within(Budget(limit, limit)), strategies=("every-block", "exact"))
    except RematError as error:
        return {"slices": type(error).__name__, "wall_s": round(time.monotonic() - started, 1)}
    exact = next(row for row in found.rows if row.strategy == "exact")
    chunks = () if exact.plan is None else chunks_of(exact.plan.about)
    return {
        "slices": chunks[0].slices if chunks else "whole",
        "with_slices": percent(found, "exact"),
        "gap": exact.gap,
        "whole": percent(found, LOSS_WHOLE if chunks else "exact"),
        "every_block": percent(found, "every-block"),
        "liger_like": percent(found, LIGER_LIKE),
        "wall_s": round(time.monotonic() - started, 1),
    }


def percent(found: Comparison, strategy: str) -> str:
    """The overhead of a row, signed."""
    row = next((row for row in found.rows if row.strategy == strategy), None)
    if row is None or not row.fits or row.overhead is None:
        return "does not fit"
    return f"{100 * row.overhead:+.1f} %"


if __name__ == "__main__":
    main()
