"""Fused: what it brings to compile groups of pointwise and reducing nodes by themselves.

`python -m benchmarks fused`: at full size, estimated for one target. Of every form of the step (as captured, fused, the
loss in slices, both) the time and the peak, nothing recomputed, as shares of the untouched step's. Then over budgets
from much to little: the plan that fuses, the plan that does not, and every block. Overhead is of the untouched step;
below zero the planned step is faster.

`python -m benchmarks fused:cpu`: models at test size on this machine. Of the untouched and of the fused step, nothing
recomputed: time (interleaved in one run, the median), peak, and seconds of the first step, which compiles; what was
predicted of the peak; and how far all gradients together are from those in float64, of the fused step over the
untouched one. `fused:cpu,gpt2` for one model, `fused:cpu,whole` without dropout, where float64 can be compared with.

`python -m benchmarks fused:budgets`: plans of the fused step at three budgets each, measured and predicted peak.

`python -m benchmarks fused:compiled`: beside `torch.compile` of the whole model, at three values of
`activation_memory_budget`, the fused step within the peak that it took: time of a step, interleaved, and seconds of the
first step, with empty caches.
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
import torch._functorch.config as functorch_config
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_map_only

from benchmarks import report
from benchmarks.peers import trained
from benchmarks.slices import percent
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Form
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits, Solution
from remat.fusion import fused_group, kernels
from remat.models import build
from remat.planning.assemble import assemble
from remat.planning.budget import Budget
from remat.planning.comparison import compare_study
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import PlanRequest
from remat.planning.strategies import UNFUSED
from remat.planning.study import FoundPlan, Study
from remat.recording.record import record
from remat.solvers.least_peak import least_peak
from remat.units import GIB, MIB
from remat.validation.training import Training
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

CPU = torch.device("cpu")
TARGET = "h100-80gb"
BUDGETS_GIB = {"gpt2": (20, 16, 12, 8, 5), "llama-1b": (40, 30, 25, 23)}
MODELS = ("gpt2", "llama-1b", "bert-large", "t5-base", "vit-l16", "swin-base", "convnextv2-base", "qwen3-moe")
TIME_S = 30.0
REPEATS = 15
FORMS = ["model", "form", "time", "peak", "peak_gib"]
PLANS = ["budget_gib", "fused", "slices", "gap", "unfused", "every_block", "wall_s"]
SHARES = (0.1, 0.4, 0.7)  # of the way from the least peak of a fused step to that of no recomputation
RATIOS = (1.0, 0.6, 0.2)
BUDGETED = ["workload", "budget_mib", "regions", "predicted_mib", "measured_mib", "error_percent", "within", "failure"]
COMPILED = [
    *("workload", "activation_memory_budget", "compiled_mib", "compiled_ms", "compiled_first_s"),
    *("fused_mib", "fused_ms", "fused_first_s", "time", "first", "failure"),
]
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
    models = [name for name in arguments if name not in (*MODES, WHOLE)]
    mode = next((name for name in MODES if name in arguments), None)
    if mode is not None:
        MODES[mode](models or list(MODELS), WHOLE in arguments)
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
        place = find_planning_device(TARGET)
        step = fake_step(build(model), place)
        profile = profile_step(step, place)
        step_us, peak = profile.costs.step_time_us(profile.graph), Memory(profile.graph).peak_without_checkpointing
        limits = Limits(time_s=TIME_S)
        study, of_slices = (Study(profile, PlanRequest.of(fuse=fuse, limits=limits), step) for fuse in (True, False))
        assert study.forms is not None and of_slices.forms is not None
        forms = [*[*study.forms][:2], next(iter(of_slices.forms))]
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
            add({"model": model, "budget_gib": budget_gib, **_planned(study, budget_gib)})


def _planned(study: Study, budget_gib: float) -> dict[str, Any]:
    limit, started = int(budget_gib * GIB), time.monotonic()
    try:
        found = compare_study(study.within(Budget(limit, limit)), strategies=("every-block", "exact"))
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


def _each(
    name: str, columns: list[str], models: list[str], whole: bool, rows_of: Callable[[Workload], list[dict[str, Any]]]
) -> None:
    """A report with the rows of every model; `whole`: without dropout."""
    rows: list[dict[str, Any]] = []
    path = report.stem(f"{name}_{WHOLE}" if whole else name, CPU)
    for model in models:
        workload = TEST_SIZES[model]()
        try:
            rows += rows_of(_without_dropout(workload) if whole else workload)
        except Exception as error:  # whatever a model may come with; the row says so
            rows.append({"workload": model, "failure": f"{type(error).__name__}: {str(error)[:200]}"})
        print(rows[-1], flush=True)
        about = {**report.provenance(CPU), "threads": torch.get_num_threads(), **_means(rows)}
        report.write(path, about, rows, columns)
        torch._dynamo.reset()


def _without_dropout(workload: Workload) -> Workload:
    def build() -> nn.Module:
        model = workload.build()
        for module in model.modules():
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return dataclasses.replace(workload, build=build)


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"geometric mean of {name}": round(math.exp(statistics.mean(math.log(row[name]) for row in rows)), 3)
        for name in ("time", "peak", "first")
        if rows and all(name in row for row in rows)
    }


def _measured(models: list[str], whole: bool) -> None:
    _each("fused_here", MEASURED, models, whole, lambda workload: [_here(workload)])


# At budgets, at test size


def _at_budgets(models: list[str], whole: bool) -> None:
    _each("fused_budgets", BUDGETED, models, whole, _budgeted)


def _budgeted(workload: Workload) -> list[dict[str, Any]]:
    profile = _fused_profile(workload)
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 50)
    least, most = least_peak(problem, Limits(time_s=TIME_S)).peak_bytes, problem.memory.peak_without_regions
    rows = []
    for share in SHARES:
        budget = int(least + share * (most - least))
        plan = plan_profile(profile, Budget(budget, budget), limits=Limits(time_s=TIME_S))
        planned = trained(workload, CPU, lambda model, plan=plan: apply(model, plan))  # type: ignore[misc]
        _, peak = planned.measure_steady_step(1, 1)
        predicted = int(plan.predicted["peak_bytes"])
        rows.append(
            {
                "workload": workload.name,
                "budget_mib": round(budget / MIB, 2),
                "regions": len(plan.regions),
                "predicted_mib": round(predicted / MIB, 2),
                "measured_mib": round(peak / MIB, 2),
                "error_percent": round(100 * (peak - predicted) / predicted, 4),
                "within": peak <= budget,
            }
        )
    return rows


# Beside a compiler of whole models, at test size


def _beside_compiler(models: list[str], whole: bool) -> None:
    _each("fused_compiled", COMPILED, models, whole, _compiled)


def _compiled(workload: Workload) -> list[dict[str, Any]]:
    profile, rows = _fused_profile(workload), []
    for ratio in RATIOS:
        with functorch_config.patch(activation_memory_budget=ratio):
            theirs, theirs_s = _first(workload, nn.Module.compile)
            _, peak = theirs.measure_steady_step(1, 1)
        row = {"workload": workload.name, "activation_memory_budget": ratio}
        row |= {"compiled_mib": round(peak / MIB, 2), "compiled_first_s": round(theirs_s, 1)}
        try:
            plan = plan_profile(profile, Budget(peak, peak), limits=Limits(time_s=TIME_S))
        except (Infeasible, NoPlanInTime) as error:
            rows.append({**row, "failure": type(error).__name__})
            continue
        ours, ours_s = _first(workload, lambda model, plan=plan: apply(model, plan))  # type: ignore[misc]
        times, ratio = _interleaved({"compiled": theirs, "fused": ours})
        row |= {"fused_mib": round(ours.measure_steady_step(1, 1)[1] / MIB, 2), "fused_first_s": round(ours_s, 1)}
        row |= {**times, "time": ratio, "first": round(ours_s / theirs_s, 3)}
        rows.append(row)
    return rows


def _first(workload: Workload, prepare: Callable[[nn.Module], object]) -> tuple[Training, float]:
    """A training, and the seconds of its first step with nothing in the caches."""
    torch._dynamo.reset()
    for cache in (kernels._KERNELS, fused_group._LOWERED, fused_group._OPEN):
        cache.clear()
    training = Training(workload, CPU, 0, TrainingLoop())
    training.begin_again()
    prepare(training.model)
    with fresh_cache():
        first_s = _timed_s(training.step)
        training.step()
    return training, first_s


def _interleaved(steps: dict[str, Training]) -> tuple[dict[str, float], float]:
    """Milliseconds of a step, the median of steps that take turns; and how many times the first the last one takes.

    That is the median over turns: what slows a machine down for a while slows both.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, each in steps.items():
            times[name].append(1e3 * _timed_s(each.step))
    first, *_, last = times.values()
    ratio = statistics.median(b / a for a, b in zip(first, last, strict=True))
    return {f"{name}_ms": round(statistics.median(found), 1) for name, found in times.items()}, round(ratio, 3)


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
    times, ratio = _interleaved(steps)
    peaks = {name: each.measure_steady_step(1, 1)[1] for name, each in steps.items()}
    return {
        "workload": workload.name,
        "groups": sum(node.op.startswith("fused(") for call in plan.identities for node in call),
        "time": ratio,
        "peak": round(peaks["fused"] / peaks["untouched"], 3),
        "predicted_error_percent": round(100 * (peaks["fused"] - predicted) / predicted, 4),
        **_distance(workload, steps["untouched"], gradients),
        "first_s": round(first_s["fused"], 1),
        **times,
        **{f"{name}_mib": round(found / MIB, 2) for name, found in peaks.items()},
    }


def _fused_profile(workload: Workload) -> Profile:
    """The fused step, with costs as measured here."""
    step = fake_step(workload, find_planning_device("cpu"))
    captured = record(step)
    with step.in_form(Form(fused=True)):
        graph = record(step, whole=captured)
    return Profile(graph, time_operators(graph.kinds, CPU), find_planning_device("cpu").target)


def _fused_plan(workload: Workload) -> tuple[Plan, int]:
    """The plan of no regions for the fused step, and its peak with workspaces as measured."""
    study = Study(_fused_profile(workload))
    plan = assemble(study, FoundPlan(study.captured, Solution("none", "feasible"), Limits()), 1 << 50)
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


WHOLE = "whole"
MODES = {"cpu": _measured, "budgets": _at_budgets, "compiled": _beside_compiler}


if __name__ == "__main__":
    main()
