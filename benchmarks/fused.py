"""Fused: what it brings to compile groups of pointwise and reducing nodes by themselves.

`python -m benchmarks fused`: at full size, estimated for one target. Of every form of the step (as captured, fused, the
loss in slices, both) the time and the peak, nothing recomputed, as shares of the untouched step's. Then over budgets
from much to little: the plan that fuses, the plan that does not, and every block. Overhead is of the untouched step;
below zero the planned step is faster.

`python -m benchmarks fused:cpu`: models at test size on this machine. Of the untouched and of the fused step, nothing
recomputed: time (interleaved in one run, the median), peak, and seconds of the first step, which compiles; what was
predicted of the peak; and how far all gradients together are from those in float64, of the fused step over the
untouched one. (Where dropout draws, float64 draws otherwise: such models are trained without it.) `fused:cpu,gpt2` for
one model.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks import report
from benchmarks.slices import percent
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Form
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.execution.executions import load
from remat.formulation.solution import Limits, Solution
from remat.models import TEST_SIZES, build
from remat.planning.assemble import assemble
from remat.planning.budget import Budget
from remat.planning.comparison import UNFUSED, compare
from remat.planning.profiling import fake_step, profile_step
from remat.planning.variants import Variants
from remat.recording.fake_step import FakeStep
from remat.recording.recorder import record
from remat.units import GIB, MIB
from remat.validation.training import Training
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

CPU = torch.device("cpu")
TARGET = "h100-80gb"
BUDGETS_GIB = {"gpt2": (20, 16, 12, 8, 5), "llama-1b": (40, 30, 25, 23)}
MODELS = ("gpt2", "llama-1b", "bert-large", "t5-base", "vit-l16", "swin-base", "convnextv2-base", "qwen3-moe")
TIME_S = 30.0
REPEATS = 7
FORMS = ["model", "form", "time", "peak", "peak_gib"]
PLANS = ["budget_gib", "fused", "slices", "gap", "unfused", "every_block", "wall_s"]
MEASURED = [
    "workload",
    "groups",
    "time",
    "peak",
    "predicted_error_percent",
    "gradient_distance",
    "first_s",
    "untouched_ms",
    "fused_ms",
    "untouched_mib",
    "fused_mib",
    "failure",
]


def main(*arguments: str) -> None:
    if "cpu" in arguments:
        _measured([name for name in arguments if name != "cpu"] or list(MODELS))
    else:
        _estimated(list(arguments) or list(BUDGETS_GIB))


# Estimated, at full size


def _estimated(models: list[str]) -> None:
    rows: list[dict[str, Any]] = []
    path = report.stem("fused", CPU)
    about = {**report.provenance(CPU), "target": TARGET, "costs": "estimated"}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        report.write(path, about, rows, [*FORMS, *PLANS])

    for model in models:
        place, how = find_planning_device(TARGET), load("eager")
        step = fake_step(build(model), place)
        profile = profile_step(step, place)
        step_us, peak = profile.costs.step_time_us(profile.graph), Memory(profile.graph).peak_without_checkpointing
        variants = Variants(how, step, profile, fuse=True)
        of_slices = Variants(how, step, profile)
        forms = [*[*variants][:2], next(iter(of_slices))]
        for each in forms:
            found = each.profile
            memory = Memory(found.graph, found.costs.workspace_per_op(found.graph))
            add(
                {
                    "model": model,
                    "form": str(each.form),
                    "time": round(found.costs.step_time_us(found.graph) / step_us, 3),
                    "peak": round(memory.peak_without_regions / peak, 3),
                    "peak_gib": round(memory.peak_without_regions / GIB, 2),
                }
            )
        for budget_gib in BUDGETS_GIB[model]:
            add({"model": model, "budget_gib": budget_gib, **_planned(profile, step, variants, budget_gib)})


def _planned(profile: Profile, step: FakeStep, variants: Variants, budget_gib: float) -> dict[str, Any]:
    limit, started = int(budget_gib * GIB), time.monotonic()
    try:
        found = compare(
            profile,
            Budget(limit, limit),
            strategies=("every-block", "exact"),
            limits=Limits(time_s=TIME_S),
            step=step,
            fuse=True,
            variants=variants,
        )
    except (Infeasible, NoPlanInTime) as error:
        return {"fused": type(error).__name__, "wall_s": round(time.monotonic() - started, 1)}
    exact = next(row for row in found.rows if row.strategy == "exact")
    chunks = () if exact.plan is None else exact.plan.about["chunks"]
    return {
        "fused": percent(found, "exact"),
        "slices": chunks[0]["slices"] if chunks else "whole",
        "gap": exact.gap,
        "unfused": percent(found, UNFUSED),
        "every_block": percent(found, "every-block"),
        "wall_s": round(time.monotonic() - started, 1),
    }


# Measured, at test size


def _measured(models: list[str]) -> None:
    rows: list[dict[str, Any]] = []
    path = report.stem("fused_here", CPU)
    for name in models:
        try:
            rows.append(_here(TEST_SIZES[name]()))
        except Exception as error:  # whatever a model may come with; the row says so
            rows.append({"workload": name, "failure": f"{type(error).__name__}: {str(error)[:200]}"})
        print(rows[-1], flush=True)
        about = {**report.provenance(CPU), "threads": torch.get_num_threads(), **_means(rows)}
        report.write(path, about, rows, MEASURED)
        torch._dynamo.reset()


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    done = [row for row in rows if "time" in row]
    return {
        f"geometric mean of {name}": round(math.exp(statistics.mean(math.log(row[name]) for row in done)), 3)
        for name in ("time", "peak")
        if done
    }


def _here(workload: Workload) -> dict[str, Any]:
    plan, predicted = _fused_plan(workload)
    steps = {name: Training(workload, CPU, 0, TrainingLoop()) for name in ("untouched", "fused")}
    for each in steps.values():
        each.begin_again()
    apply(steps["fused"].model, plan)
    gradients, first_s = {}, {}
    for name, each in steps.items():
        first_s[name] = _timed_s(each.forward_and_backward)
        gradients[name] = _gradients(each.model)
        each.finish()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, each in steps.items():
            times[name].append(_timed_s(each.step))
    peaks = {name: each.measure_steady_step(1, 1)[1] for name, each in steps.items()}
    ms = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    return {
        "workload": workload.name,
        "groups": sum(node.op.startswith("fused(") for call in plan.identities for node in call),
        "time": round(ms["fused"] / ms["untouched"], 3),
        "peak": round(peaks["fused"] / peaks["untouched"], 3),
        "predicted_error_percent": round(100 * (peaks["fused"] - predicted) / predicted, 4),
        **_distance(workload, steps["untouched"], gradients),
        "first_s": round(first_s["fused"], 1),
        **{f"{name}_ms": round(found, 1) for name, found in ms.items()},
        **{f"{name}_mib": round(found / MIB, 2) for name, found in peaks.items()},
    }


def _fused_plan(workload: Workload) -> tuple[Plan, int]:
    """The plan of no regions for the fused step, and its peak with workspaces as measured."""
    step, how = fake_step(workload, find_planning_device("cpu")), load("eager")
    captured = record(step)
    with step.in_form(Form(fused=True)):
        graph = record(step, whole=captured)
    target = find_planning_device("cpu").target
    profile = Profile(graph, time_operators(graph.kinds, CPU), target)
    problem = how.pose(profile, how.space(graph), 1 << 50)
    plan = assemble(problem, Solution("none", "feasible"), profile, how, None)
    return plan, int(plan.predicted["peak_bytes"])


def _distance(workload: Workload, untouched: Training, gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the gradients are from those in float64, the fused step's over the untouched one's; without dropout."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in untouched.model.modules()):
        return {}
    untouched.begin_again()
    exact = dataclasses.replace(workload, autocast=None, build=lambda: workload.build().double())
    truth = Training(exact, CPU, 0, TrainingLoop())
    truth.begin_again()
    with torch.no_grad():
        for one, other in zip(truth.model.parameters(), untouched.model.parameters(), strict=True):
            one.copy_(other)
    truth.set_batch(workload.batch_size, 1)
    truth.batch = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, truth.batch)
    truth.forward_and_backward()
    found = _gradients(truth.model)
    fused, plain = (float((gradients[name] - found).norm()) for name in ("fused", "untouched"))
    return {"gradient_distance": round(fused / plain, 3)}


def _gradients(model: nn.Module) -> torch.Tensor:
    """All of them, each divided by its norm, one after the other."""
    found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient / (gradient.norm() + 1e-300) for gradient in found])


def _timed_s(function: Callable[[], Any]) -> float:
    gc.collect()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
