"""Proofs: the default solver on every ready-made model at full size, five budgets each, estimated for two targets.

A budget of 30 % lies so far of the way from the least peak to the step without checkpointing. Nobody waits for longer
than a minute; the table says when a plan was within 1 % and within 0.1 % of the bound, how soon there was a plan, and
how much slower that first one was than the last. Seconds are of the solver alone, by the clock, with processor seconds
beside them: the machine may have other work. `proofs:modules,gpt2` asks for plans of modules, of GPT-2 alone.

A claim that it checks as it goes: no bound is above a plan that any budget as large found.
"""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import numpy as np
import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.execution import executions
from remat.execution.base import Execution
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits
from remat.models import REGISTRY, build
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import load
from remat.solvers.least_peak import least_peak
from remat.units import GIB

TARGETS = ("h100-80gb", "rtx4090")
PERCENTS = (10, 30, 50, 70, 90)
TIME_S = 60.0
PROVED, NEAR = 0.001, 0.01
COLUMNS = ["model", "target", "percent", "budget_gib", "exact_ms", "gap", "gap_30s", "solver", "wall_s", "cpu_s"]
COLUMNS += ["near_s", "proved_s", "first_s", "first_worse", "pose_s", "least_s"]


def main(*names: str) -> None:
    rows: list[dict[str, Any]] = []
    chosen = [name for name in names if name in executions.NAMES]
    execution = executions.load(chosen[0] if chosen else executions.EAGER)
    about = {**report.provenance(torch.device("cpu")), "targets": " ".join(TARGETS), "costs": "estimated"}
    path = report.stem("_".join(["proofs", *chosen]), torch.device("cpu"))
    for model in [name for name in names if name not in chosen] or REGISTRY:
        for target in TARGETS:
            place = find_planning_device(target)
            profile = profile_step(fake_step(build(model), place), place)
            for row in cells(profile, execution):
                rows.append({"model": model, "target": target, **row})
                print({name: rows[-1][name] for name in COLUMNS}, flush=True)
                report.write(path, {**about, **summary(rows)}, rows, COLUMNS)


def cells(profile: Profile, execution: Execution) -> list[dict[str, Any]]:
    """Solve one step, by budget."""
    started = time.monotonic()
    problem = execution.pose(profile, execution.space(profile.graph), 1 << 62)
    runs = len(problem.runs)
    posed_s = time.monotonic() - started
    least = least_peak(problem, Limits(time_s=30))
    least_s = time.monotonic() - started - posed_s
    most = problem.memory.peak_without_checkpointing
    found = [_cell(problem.with_budget(least.peak_bytes + (most - least.peak_bytes) * p // 100), p) for p in PERCENTS]
    for at, row in enumerate(found):
        plans = [other["exact_ms"] for other in found[: at + 1] if other["exact_ms"] is not None]
        assert all(row["bound_ms"] <= plan + 0.001 for plan in plans), f"a bound above a plan at {row['percent']} %"
    about = {"segments": len(problem.space.segments), "runs": runs, "pose_s": posed_s, "least_s": least_s}
    about |= {"least_gib": least.peak_bytes / GIB, "least_proved": least.proved, "most_gib": most / GIB}
    return [{**_rounded(about), **row} for row in found]


def _cell(problem: Problem, percent: int) -> dict[str, Any]:
    started, cpu = time.monotonic(), _cpu_s()
    seen: list[tuple[float, float, float]] = []  # seconds, objective, bound

    def on_progress(objective_us: float, bound_us: float) -> None:
        seen.append((time.monotonic() - started, objective_us, bound_us))

    found = load("exact")(problem, Limits(time_s=TIME_S, on_progress=on_progress))
    seen.append((time.monotonic() - started, found.objective_us, found.bound_us))
    if not found.fits:
        seen.clear()
    row: dict[str, Any] = {
        "percent": percent,
        "budget_gib": problem.budget_bytes / GIB,
        "exact_ms": found.objective_us / 1000 if found.fits else None,
        "bound_ms": found.bound_us / 1000,
        "status": found.status,
        "gap": found.gap if found.fits else None,
        "gap_30s": _gap_after(seen, 30.0),
        "solver": found.solver,
        "wall_s": time.monotonic() - started,
        "cpu_s": _cpu_s() - cpu,
        "near_s": _reached_s(seen, NEAR),
        "proved_s": _reached_s(seen, PROVED),
        "first_s": seen[0][0] if seen else None,
        "first_worse": seen[0][1] / max(found.objective_us, 0.001) - 1 if seen else None,
    }
    return _rounded(row)


def _gap(objective_us: float, bound_us: float) -> float:
    return max(objective_us - bound_us, 0.0) / max(objective_us, 1.0)


def _gap_after(seen: list[tuple[float, float, float]], seconds: float) -> float | None:
    gaps = [_gap(objective, bound) for at, objective, bound in seen if at <= seconds]
    return min(gaps, default=None)


def _reached_s(seen: list[tuple[float, float, float]], gap: float) -> float | None:
    return next((at for at, objective, bound in seen if _gap(objective, bound) <= gap), None)


def _cpu_s() -> float:
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The claims, over all cells so far."""
    gaps = np.array([math.inf if row["gap"] is None else row["gap"] for row in rows])
    after_30 = np.array([math.inf if row["gap_30s"] is None else row["gap_30s"] for row in rows])
    return {
        "cells": len(rows),
        "within 0.1 % in 30 s": f"{(after_30 <= PROVED).mean():.1%}",
        "within 1 % in 30 s": f"{(after_30 <= NEAR).mean():.1%}",
        "within 1 % in 60 s": f"{(gaps <= NEAR).mean():.1%}",
        "largest gap": f"{gaps.max():.2%}",
        "no plan": int(np.isinf(gaps).sum()),
    }
