"""The optimizer's step inside backward: full training in bf16 of a model whose gradients do not fit, and peaks here.

    python -m benchmarks step_in_backward             plans by name, then nine families at test size on this CPU
    python -m benchmarks step_in_backward:plans       estimated for a card, with and without
    python -m benchmarks step_in_backward:here        predicted and measured peaks, gradients, weights after 10 steps

`without` is the plan of the ordinary step within the same budget, or the least that it needs. `here` holds weights
after 10 steps to those of the ordinary step, and the validated plan to its prediction.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch

import remat
from benchmarks import report
from remat.errors import Infeasible, RematError
from remat.formulation.solution import Limits
from remat.models import build
from remat.units import GIB, MIB
from remat.validation.training import Training
from remat.workload.optimizers import optimizer_named
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES

TARGET, HOST_BUDGET, TOKENS, STEPS = "rtx4090", "64GiB", 4096, 10
CASES = (("llama-8b", "adamw", True), ("llama-8b", "adafactor", False))  # model, optimizer, state on the host
BUDGETS = ((24, True), (22, True), (24, False))  # GiB, stepping in backward
PLANS = ["model", "optimizer", "state", "budget_gib", "loop", "peak_gib", "least_gib", "step_ms", "overhead", "wait_ms"]
PLANS += ["tokens_per_s", "gap", "wall_s", "failure"]
HERE = ["workload", "state", "budget_mib", "predicted_mib", "measured_mib", "off_percent", "passed", "bitwise"]
HERE += ["weights_equal", "failure"]


def main(*parts: str) -> None:
    cpu = torch.device("cpu")
    for part in parts or ("plans", "here"):
        path, about = report.stem(f"step_in_backward_{part}", cpu), report.provenance(cpu)
        rows: list[dict[str, Any]] = []
        for row in _plans() if part == "plans" else _here():
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            report.write(path, about, rows, PLANS if part == "plans" else HERE)


def _plans() -> Any:
    for model, optimizer, on_host in CASES:
        workload = build(model).sized(1, TOKENS)
        workload = _with(workload, optimizer).with_dtype("bf16")
        for budget_gib, stepping in BUDGETS:
            loop = TrainingLoop(step_in_backward=stepping, offload_optimizer=on_host)
            started = time.monotonic()
            yield {
                "model": model,
                "optimizer": optimizer,
                "state": "host" if on_host else "device",
                "budget_gib": budget_gib,
                "loop": "step-in-backward" if stepping else "whole",
                **_plan(workload, budget_gib, loop),
                "wall_s": round(time.monotonic() - started, 1),
            }


def _with(workload: Workload, optimizer: str) -> Workload:
    return dataclasses.replace(workload, optimizer=optimizer_named(optimizer))


def _plan(workload: Workload, budget_gib: int, loop: TrainingLoop) -> dict[str, Any]:
    host_budget = HOST_BUDGET if loop.offload_optimizer else None
    limits = Limits(time_s=60)
    try:
        plan = remat.plan(
            workload, budget=budget_gib * GIB, target=TARGET, loop=loop, limits=limits, host_budget=host_budget
        )
    except Infeasible as error:
        return {"least_gib": round((error.minimum_budget_bytes or 0) / GIB, 2)}
    except RematError as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    step_us = plan.predicted["step_time_us"]
    return {
        "peak_gib": round(plan.predicted["peak_bytes"] / GIB, 2),
        "step_ms": round(step_us / 1000, 1),
        "overhead": round(plan.predicted["overhead"], 3),
        "wait_ms": round(plan.predicted.get("state_wait_us", 0) / 1000, 1),
        "tokens_per_s": round(1e6 * TOKENS / step_us),
        "gap": plan.solver["gap"],
    }


def _here() -> Any:
    for name, make in TEST_SIZES.items():
        for on_host in (False, True):
            workload = make()
            loop = TrainingLoop(step_in_backward=True, offload_optimizer=on_host)
            row: dict[str, Any] = {"workload": name, "state": "host" if on_host else "device"}
            try:
                yield {**row, **_validated(workload, loop), "weights_equal": _weights_equal(workload, loop)}
            except RematError as error:
                yield {**row, "failure": f"{type(error).__name__}: {error}"}


def _validated(workload: Workload, loop: TrainingLoop) -> dict[str, Any]:
    limits = Limits(time_s=10)
    plan = remat.plan(workload, budget="80%step", target="cpu", loop=loop, numerics="bitwise", limits=limits)
    found = remat.validate(workload, plan, repeats=1)
    predicted, measured = found.predicted["peak_bytes"], found.measured["peak_bytes"]
    return {
        "budget_mib": round(plan.budget_bytes / MIB, 2),
        "predicted_mib": round(predicted / MIB, 2),
        "measured_mib": round(measured / MIB, 2),
        "off_percent": round(100 * (measured / predicted - 1), 4),
        "passed": found.passed,
        "bitwise": found.loss_equal and found.gradients_bitwise,
    }


def _weights_equal(workload: Workload, loop: TrainingLoop) -> bool:
    weights = []
    for each in (TrainingLoop(), loop):
        training = Training(workload, torch.device("cpu"), 0, each)
        training.begin_again()
        for _ in range(STEPS):
            training.update()
        weights.append([parameter.detach().clone() for parameter in training.model.parameters()])
        training.finish.let_go()
    return all(map(torch.equal, *weights))
