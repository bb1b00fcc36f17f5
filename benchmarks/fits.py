"""Fits: the largest micro-batch that `remat fit --max-batch` finds is run, and so is the next larger one.

At test size on the CPU, with the budget that half the model's own batch needs without checkpointing. The plan found
must keep the budget when it is run. One sample more has no plan; the plan with the least peak there is run too, and
must exceed the budget.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.formulation.solution import Limits, Solution
from remat.planning.assemble import assemble
from remat.planning.budget import Budget
from remat.planning.fit import Sizing, largest_batch
from remat.planning.request import PlanRequest
from remat.planning.study import FoundPlan
from remat.units import MIB
from remat.validation.training import Training, undisturbed
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES

MODELS = ("gpt2", "resnet50", "bert-large")
COLUMNS = ["model", "budget_mib", "micro_batch", "predicted_mib", "measured_mib", "kept", "next", "next_least_mib"]
COLUMNS += ["next_measured_mib", "next_exceeds"]


def main(*models: str) -> None:
    cpu = torch.device("cpu")
    path, about = report.stem("fits", cpu), report.provenance(cpu)
    rows: list[dict[str, Any]] = []
    for model in models or MODELS:
        rows.append({"model": model, **row_of(model)})
        print(rows[-1], file=sys.stderr, flush=True)
        report.write(path, about, rows, COLUMNS)
        torch._dynamo.reset()


def row_of(model: str) -> dict[str, Any]:
    workload, place, limits = TEST_SIZES[model](), find_planning_device("cpu"), Limits(time_s=20)
    sizes = Sizing(
        workload, place, Budget(1 << 60, 1 << 60), TrainingLoop(), PlanRequest(limits=limits)
    ).micro_batches()
    half = sizes.profile(max(workload.batch_size // 2, 1), False)
    limit = Memory(half.graph, half.costs.workspace_per_op(half.graph)).peak_without_checkpointing
    plan = largest_batch(workload, target="cpu", budget=limit, limits=limits)
    found = plan.about["batch_size"]
    measured = run(workload.sized(found), plan)
    study = sizes.study(found + 1, False)
    problem, least = study.problem(study.captured, limit), study.least(study.captured, limits)
    solution = Solution("least-peak", "feasible", least.regions, problem.objective_ns(least.regions) / 1000)
    over = assemble(study, FoundPlan(study.captured, solution, limits), least.peak_bytes)
    next_measured = run(workload.sized(found + 1), over)
    return {
        "budget_mib": _mib(limit),
        "micro_batch": found,
        "predicted_mib": _mib(plan.predicted["peak_bytes"]),
        "measured_mib": _mib(measured),
        "kept": measured <= limit,
        "next": found + 1,
        "next_least_mib": _mib(least.peak_bytes),
        "next_measured_mib": _mib(next_measured),
        "next_exceeds": next_measured > limit,
    }


def run(workload: Workload, plan: Plan) -> int:
    """Measured peak of the second optimizer step under `plan`."""
    cpu = torch.device("cpu")
    with undisturbed(cpu):
        training = Training(workload, cpu, 0, TrainingLoop())
        training.begin_again()
        apply(training.model, plan)
        training.update()
        return training.peak_of_update(1)


def _mib(size: int) -> float:
    return round(size / MIB, 3)
