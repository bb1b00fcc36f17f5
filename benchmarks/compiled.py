"""Compiled: planned steps under torch.compile on the CPU, predicted and measured.

For each workload at test size a plan without nesting, a third of the way from the least feasible budget to what no
checkpointing needs, made for eager execution; and one for the same budget that is made for the compiler (`made_for`;
its `replay_s` is that of the whole search). Two predictions stand beside the measured peak: the plan's own, and that of
`replay_compiled` under the compiler of the row, with the seconds that it took; and, for scale, what the untouched step
needs under the same compiler, measured. Gradients of
the first step are compared with those of the untouched model under the same compiler and seed: the largest difference
within a parameter, relative to its largest gradient. Inductor rounds at other places where it fuses otherwise, so how
far the untouched model's gradients are from the uncompiled model's is given for scale.

`python -m benchmarks compiled:gpt2,resnet50`; a third argument `aot_eager` leaves Inductor out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config

from benchmarks import report
from remat.costing.device_allocator import measure_peak
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, from_refs
from remat.execution.apply import apply, counts_of
from remat.execution.compiled.compiling import AOT_EAGER, INDUCTOR
from remat.execution.compiled.replay import replay_compiled
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import TEST_SIZES
from remat.planning.budget import Budget
from remat.planning.planner import plan_profile
from remat.planning.profiling import fake_step, profile_step
from remat.recording.fake_step import autocast_context
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.workload.workload import Workload

CPU = torch.device("cpu")
SHARE = 1 / 3
COLUMNS = [
    "workload",
    "compiler",
    "made_for",
    "regions",
    "recompute_ms",
    "budget_mib",
    "plan_mib",
    "replay_mib",
    "measured_mib",
    "of_plan_percent",
    "of_replay_percent",
    "untouched_mib",
    "gradient_error",
    "compiler_error",
    "ready_s",
    "replay_s",
    "failure",
]


def main(*arguments: str) -> None:
    compilers = (AOT_EAGER,) if AOT_EAGER in arguments else (AOT_EAGER, INDUCTOR)
    rows: list[dict[str, Any]] = []
    for name in [found for found in arguments if found != AOT_EAGER] or ["gpt2", "resnet50"]:
        for row in _rows(TEST_SIZES[name](), compilers):
            rows.append(row)
            print({key: row[key] for key in COLUMNS if key in row}, flush=True)
            report.write(report.stem("compiled", CPU), report.provenance(CPU), rows, COLUMNS)  # so far


def _rows(workload: Workload, compilers: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    place = find_planning_device("cpu")
    fake = fake_step(workload, place)
    profile = profile_step(fake, place)
    space = find_space(profile.graph, depth=1)
    problem = Problem(profile.graph, profile.costs, space, 1 << 62)
    most = problem.memory.peak_without_checkpointing
    least = least_peak(problem, Limits(time_s=20)).peak_bytes
    budget = int(least + SHARE * (most - least))
    limit, limits = Budget(budget, budget), Limits(time_s=20)
    made_for_eager = plan_profile(profile, limit, step=fake, space=space, limits=limits)
    eager = _measured(workload, None, profile.graph.fixed_total - profile.graph.unseen_bytes, lambda model: None)
    for compiler in compilers:
        untouched = _measured(
            workload, compiler, profile.graph.fixed_total - profile.graph.unseen_bytes, lambda model: None
        )
        for made_for in ("eager", compiler):
            row: dict[str, Any] = {
                "workload": f"{workload.name} {workload.batch_size} x {workload.seq_len}",
                "compiler": compiler,
                "made_for": made_for,
                "budget_mib": _mib(budget),
                "untouched_mib": _mib(untouched["peak"]),
                "compiler_error": _error(untouched["gradients"], eager["gradients"]),
            }
            try:
                started = time.monotonic()
                with inductor_config.patch(fallback_random=True):  # as measured
                    plan = made_for_eager
                    if made_for != "eager":
                        plan = plan_profile(profile, limit, step=fake, execution=compiler, limits=limits)
                    workspaces = profile.workspace_of()
                    alive = replay_compiled(fake, plan.regions, compiler=compiler, workspace_of=workspaces, device=CPU)
                    replayed = int(alive.max())
                row |= {"replay_mib": _mib(replayed), "replay_s": round(time.monotonic() - started, 1)}
                row |= _beside(plan, replayed, profile, untouched, compiler, workload)
            except Exception as error:  # a row that fails stays in the table
                row["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            yield row


def _beside(
    plan: Plan, replayed: int, profile: Profile, untouched: dict[str, Any], compiler: str, workload: Workload
) -> dict[str, Any]:
    """Measure `plan`, and put its own figures and those of its replay beside; recomputation by eager costs."""
    planned = _measured(
        workload, compiler, profile.graph.fixed_total - profile.graph.unseen_bytes, lambda model: apply(model, plan)
    )
    assert planned["regions"] == len(plan.regions), "the plan was lost"
    memory, regions = Memory(profile.graph), from_refs(profile.graph, plan.regions)
    return {
        "regions": len(plan.regions),
        "recompute_ms": round(memory.recompute_time_us(regions, profile.costs.per_op_us(profile.graph)) / 1000, 1),
        "plan_mib": _mib(plan.predicted["peak_bytes"]),
        "measured_mib": _mib(planned["peak"]),
        "of_plan_percent": round(100 * planned["peak"] / plan.predicted["peak_bytes"], 2),
        "of_replay_percent": round(100 * planned["peak"] / replayed, 3),
        "gradient_error": _error(planned["gradients"], untouched["gradients"]),
        "ready_s": planned["ready_s"],
    }


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _measured(
    workload: Workload, compiler: str | None, fixed_bytes: int, prepare: Callable[[nn.Module], object]
) -> dict[str, Any]:
    """Peak of a whole step in its steady state, and the gradients of the first one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = workload.build().train()
    prepare(model)
    batch = workload.batch(workload.batch_size, workload.seq_len)
    assert workload.optimizer is not None
    optimizer = workload.optimizer(model.parameters())
    if compiler:
        model.compile(backend=compiler)

    def forward_and_backward() -> None:
        torch.manual_seed(1)
        with autocast_context(CPU, workload.autocast):
            workload.step(model, batch).backward()

    def step() -> None:
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()

    started = time.monotonic()
    with inductor_config.patch(fallback_random=True):  # or else Inductor draws its own numbers
        forward_and_backward()
        ready_s = round(time.monotonic() - started, 1)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        regions = 0 if "forward" not in model.__dict__ else counts_of(model).regions
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        peak = fixed_bytes + measure_peak(step, CPU)
    return {"peak": peak, "gradients": gradients, "ready_s": ready_s, "regions": regions}


def _mib(size: int) -> float:
    return round(size / MIB, 2)
