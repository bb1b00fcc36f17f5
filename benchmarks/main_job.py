"""The main job: predicted against measured peak, and equality of loss and gradients, for every workload family.

On the CPU every family at test size, in fp32 and under bf16 autocast, at three budgets: the least feasible one, and one
and two thirds of the way to no checkpointing. On a CUDA device also GPT-2 and Llama-1B at full size. A row that fails
stays in the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, RematError
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.validation.validating import validate
from remat.workload.workload import DTypePolicy, Workload
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

COLUMNS = [
    "workload",
    "dtype",
    "budget_mib",
    "predicted_mib",
    "measured_mib",
    "error_percent",
    "within_budget",
    "loss_equal",
    "gradients_equal",
    "kernels_equal",
    "recomputed",
    "overhead_percent",
    "status",
    "infeasible_1_percent_below",
    "failure",
]


def main(*families: str) -> None:
    cpu = torch.device("cpu")
    rows = []
    for name in families or TEST_SIZES:
        for dtype in ("fp32", "amp"):
            rows += list(_rows(name, TEST_SIZES[name]().with_dtype(dtype), dtype, "cpu"))
    report.write(report.stem("_".join(["main_job", *families]), cpu), report.provenance(cpu), rows, COLUMNS)
    if torch.cuda.is_available():
        rows = []
        for name in ("gpt2", "llama-1b"):
            rows += list(_rows(name, build(name), "amp", "cuda"))
        device = torch.device("cuda")
        report.write(report.stem("main_job", device), report.provenance(device), rows, COLUMNS)


def _rows(name: str, workload: Workload, dtype: DTypePolicy, target: str) -> Iterator[dict[str, Any]]:
    place = find_planning_device(target)
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    space = find_space(profile.graph)
    problem = Problem(profile.graph, profile.costs, space, 1 << 62)
    most = problem.memory.peak_without_checkpointing
    least = least_peak(problem, Limits()).peak_bytes
    for share in (0.0, 1 / 3, 2 / 3):
        budget = int(least + share * (most - least))
        started = time.monotonic()
        row: dict[str, Any] = {"workload": name, "dtype": dtype, "budget_mib": _mib(budget)}
        try:
            plan = plan_profile(profile, Budget(budget, budget), step=step, space=space, limits=Limits(time_s=60))
            row |= measured(workload, plan, target)[0]
            if share == 0.0:
                row["infeasible_1_percent_below"] = _is_infeasible(profile, int(0.99 * least), step, space)
        except RematError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        row["wall_s"] = round(time.monotonic() - started, 1)
        print({key: value for key, value in row.items() if value != ""}, flush=True)
        yield row


def measured(workload: Workload, plan: Any, target: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Validate a plan for a row; returns also the gradients held to float64, see `Report.gradients_near`."""
    found = validate(workload, plan, device=target, repeats=1).to_json()
    peak, predicted = (found[which]["peak_bytes"] for which in ("measured", "predicted"))  # of the batch that ran
    row = {
        "predicted_mib": _mib(predicted),
        "measured_mib": _mib(peak),
        "error_percent": round(100 * (predicted - peak) / peak, 3),
        "within_budget": found["within_budget"],
        "loss_equal": found["loss_equal"],
        "gradients_equal": found["gradients_equal"],
        "kernels_equal": found["kernels_equal"],
        "recomputed": "{planned}/{observed}".format(**found["recomputed_nodes"]),
        "overhead_percent": round(100 * plan.predicted["overhead"], 1),
        "status": plan.solver["status"],
        "gap": plan.solver["gap"],
        "notes": found["notes"],
        "measured_step_us": found["measured"]["step_time_us"],
        "predicted_step_us": plan.predicted["step_time_us"],
        "untouched": found["untouched"],
    }
    return row, found["gradients_near"]


def _is_infeasible(profile: Any, budget: int, step: Any, space: Any) -> bool:
    try:
        plan_profile(profile, Budget(budget, budget), step=step, space=space)
    except Infeasible:
        return True
    return False


def _mib(size: int) -> float:
    return round(size / MIB, 2)
