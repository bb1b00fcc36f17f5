"""Plans made beforehand, on a machine with OR-tools and without the GPU, and carried to it as files."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import torch

from remat.costing.planning_device import find_planning_device
from remat.errors import RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan
from remat.formulation.solution import Limits
from remat.models import TEST_SIZES, build
from remat.planning.advice import least_peak_of
from remat.planning.budget import Budget
from remat.planning.planner import plan_profile
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import Solver, load
from remat.units import GIB, gib
from remat.workload.workload import Workload

CARRIED = {"gpt2": (16, 1024, 20 * GIB), "llama-1b": (4, 2048, 30 * GIB)}  # batch, sequence, budget
FUSED = {"gpt2": (16, 1024, 10 * GIB), "llama-1b": (4, 2048, 25 * GIB)}  # likewise, of plans that fuse groups
TARGETS = ("h100-80gb", "h200")
PATIENCE_S = 60.0
SMALL = (2, 64)  # batch and sequence on a CPU
SMALL_SHARE = 0.6  # of the way from the least peak to the peak without checkpointing


def workload_of(model: str, device: torch.device, size: tuple[int, int] | None = None) -> Workload:
    """`model` at `size` (batch, sequence) on a GPU; on a CPU its architecture at a size that takes no time."""
    if device.type != "cpu":
        return build(model).sized(*(size or ()))
    small = TEST_SIZES[model]()
    return small.sized(SMALL[0], SMALL[1] if small.seq_len else None)


def make_plans(folder: Path, device: torch.device, torch_there: str) -> list[Path]:
    """Write the plans of `CARRIED` and `FUSED` for `TARGETS` to `folder`; on a CPU small ones of the first for it.

    torch_there  version of the torch that trains on the GPU: it decides which attention kernel is taken
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    on_cuda = device.type == "cuda"
    wanted = [(model, False, sizes) for model, sizes in CARRIED.items()]
    wanted += [(model, True, sizes) for model, sizes in FUSED.items() if on_cuda]
    for model, fuse, (batch_size, seq_len, budget_bytes) in wanted:
        for target in TARGETS if on_cuda else ("cpu",):
            workload = workload_of(model, device, (batch_size, seq_len))
            path = folder / f"{model}{'-fused' if fuse else ''}.{target}.plan.json"
            try:
                plan = made(workload, model, target, budget_bytes if on_cuda else None, torch_there, fuse=fuse)
            except RematError as error:  # the others are worth carrying
                print(f"{path}: none: {error}", flush=True)
                continue
            plan.save(path)
            print(f"{path}: {plan.solver['status']}, +{100 * plan.predicted['overhead']:.2f} %", flush=True)
            found.append(path)
    return found


def made(
    workload: Workload, model: str, target: str, budget_bytes: int | None, torch_there: str, *, fuse: bool
) -> Plan:
    """A plan that says which model it is for; its budget `SMALL_SHARE` of what is possible where none is given.

    Its target is called as the device itself is, without the torch there: so it is held to its budget there.
    """
    place = find_planning_device(target if target == "cpu" else f"{target},torch={torch_there}")
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    if budget_bytes is None:
        most = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
        least = least_peak_of(profile.graph, profile.costs)
        budget_bytes = round(least + SMALL_SHARE * (most - least))
    budget = Budget(budget_bytes, budget_bytes)
    plan = plan_profile(
        profile, budget, limits=Limits(time_s=PATIENCE_S), solver=solver_at_hand(), step=step, fuse=fuse
    )
    return dataclasses.replace(plan, target=target, about={**plan.about, "model_spec": {"model": model}})


def solver_at_hand() -> Solver:
    """The exact one where OR-tools is installed, else the dynamic program, which needs numpy only."""
    return load("exact" if importlib.util.find_spec("ortools") else "chain-dp")


def describe(plan: Plan) -> str:
    return f"{plan.about['workload']} for {plan.target} within {gib(plan.budget_bytes)}"
