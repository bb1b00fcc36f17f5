"""Plans: those carried along and those made here, validated; and what others offer at equal peaks. (Parts 4, 7, 10)"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from benchmarks.half_hour import carried
from benchmarks.half_hour.work import GPT2, Work
from benchmarks.peers import FALLBACK, Peers, require_counted
from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan
from remat.formulation.solution import Limits
from remat.planning.advice import least_peak_of
from remat.planning.budget import Budget
from remat.planning.planner import plan_profile
from remat.planning.profiling import fake_step, profile_step
from remat.recording.fake_step import FakeStep
from remat.solvers import load
from remat.validation.validating import validate
from remat.workload.workload import Workload

SHARES = (0.5, 0.25)  # of the way from the least peak to the peak without checkpointing
PATIENCE_S = 30.0
REPEATS = 5


def carried_plan(work: Work, name: str) -> None:
    plan = Plan.load(work.plans / f"{name}.plan.json")
    about = plan.about
    workload = work.workload(about["model_spec"]["model"], (about["batch_size"], about["seq_len"]))
    work.findings.note("plan", {"budget_bytes": plan.budget_bytes, "predicted": plan.predicted, "solver": plan.solver})
    work.findings.say(carried.describe(plan))
    _validated(work, workload, plan, "validation")


def _validated(work: Work, workload: Workload, plan: Plan, name: str) -> None:
    def run() -> dict[str, Any]:
        found = validate(workload, plan, device=work.device, repeats=REPEATS)
        for line in str(found).splitlines():
            work.findings.say(line)
        return found.to_json()

    work.findings.step(name, run)


def solved_here(work: Work) -> None:
    """By the dynamic program, which needs numpy only, from measured costs."""
    workload = work.workload("gpt2", GPT2)
    step = fake_step(workload, work.place)
    profile = profile_step(step, work.place)
    graph, memory = profile.graph, Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    most, least = memory.peak_without_checkpointing, least_peak_of(graph, profile.costs)
    work.findings.note("peaks", {"without checkpointing": most, "least": least})
    for share in SHARES:
        limit = round(least + share * (most - least))

        path = work.findings.folder / f"gpt2.{share:.2f}.plan.json"
        name = f"{share:.0%}"
        if work.findings.step(f"plan at {name}", functools.partial(_solve, profile, step, limit, path)):
            _validated(work, workload, Plan.load(path), f"validation at {name}")


def _solve(profile: Profile, step: FakeStep, limit: int, path: Path) -> dict[str, Any]:
    budget, limits = Budget(limit, limit), Limits(time_s=PATIENCE_S)
    plan = plan_profile(profile, budget, limits=limits, solver=load("chain-dp"), step=step)
    plan.save(path)
    return {"predicted": plan.predicted, "solver": plan.solver}


def peers(work: Work) -> None:
    """Every block, torch's knob, and plans with their peaks as budgets; rows are noted as they come."""
    backend = "inductor" if work.on_cuda else FALLBACK
    require_counted(backend, work.device)
    workload = work.workload("gpt2", GPT2)
    found = Peers(workload, work.device, 5 if work.on_cuda else 1, carried.solver_at_hand())
    found.on_row = lambda: work.findings.note("rows", found.rows)
    found.run_at_equal_peaks(backend, (0.5, 0.3, 0.7) if work.on_cuda else (0.5,))
    work.findings.note("about", found.about)
    for row in found.rows:
        shown = ", ".join(f"{row[key]}" for key in ("peak_mib", "time_ratio", "failure") if key in row)
        work.findings.say(f"{row['peer']} {row['setting']}: {shown}")
