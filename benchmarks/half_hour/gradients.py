"""Gradients of a plan that saves attention, dropout included, against the untouched step. (Part 2)"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.half_hour.work import Work
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Region
from remat.execution.apply import apply
from remat.formulation.search_space import blocks, find_space
from remat.formulation.solution import Limits, Solution
from remat.planning.assemble import as_found
from remat.planning.profiling import fake_step
from remat.planning.study import FoundPlan, Study
from remat.recording.recorder import record
from remat.validation.kernel_log import KernelLog
from remat.validation.training import Training
from remat.workload.workload import Workload, trainable


def gradients(work: Work) -> None:
    workload = work.workload("gpt2", (4, 1024))
    plan = _plan_that_saves_attention(workload, work.place)
    found = work.findings.step("comparison", lambda: _compare(work, workload, plan))
    if found:
        work.findings.say(
            f"gradients bitwise equal: {found['equal']} of {found['parameters']} "
            f"({found['untouched twice, equal']} of the untouched step repeated), loss equal: {found['loss equal']}, "
            f"next random number equal: {found['next random number equal']}; "
            f"attention run {found['attention']['planned']} times, {found['attention']['untouched']} untouched"
        )


def _plan_that_saves_attention(workload: Workload, place: PlanningDevice) -> Plan:
    """Every block a region that saves its attention."""
    graph = record(fake_step(workload, place), alignment_bytes=place.target.alignment_bytes)
    space = find_space(graph)
    saved = {v for v in space.saveable if "attention" in graph.nodes[v].op}
    regions = tuple(
        Region(first, end, tuple(v for v in range(first, end) if v in saved)) for first, end in blocks(graph)
    )
    costs = estimated_costs(graph, place.target)
    study = Study(Profile(graph, costs, place.target), space=space)
    budget_bytes = Memory(graph).curve(regions).peak_bytes
    objective_us = study.problem(study.captured, budget_bytes).objective_ns(regions) / 1e3
    solution = Solution("by hand", "feasible", regions, objective_us)
    return as_found(study, FoundPlan(study.captured, solution, Limits()), budget_bytes)


def _compare(work: Work, workload: Workload, plan: Plan) -> dict[str, Any]:
    with work.training(workload) as training:
        loss, expected, random, kernels = _first_step(training)
        training.begin_again()
        itself = sum(torch.equal(a, b) for a, b in zip(expected, _first_step(training)[1], strict=True))
        training.begin_again()
        apply(training.model, plan)
        planned_loss, found, planned_random, planned_kernels = _first_step(training)
    pairs = list(zip(expected, found, strict=True))
    apart = max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=0.0)
    return {
        "regions": len(plan.regions),
        "saved": sum(len(region.saved) for region in plan.regions),
        "parameters": len(pairs),
        "untouched twice, equal": itself,  # fewer than all: a kernel that adds in any order
        "equal": sum(torch.equal(a, b) for a, b in pairs),
        "largest difference": apart if math.isfinite(apart) else str(apart),
        "loss equal": torch.equal(loss, planned_loss),
        "next random number equal": random == planned_random,
        "attention": {"untouched": kernels, "planned": planned_kernels},
    }


def _first_step(training: Training) -> tuple[torch.Tensor, list[torch.Tensor], float, int]:
    """Loss, gradients, the random number that comes next, and how often attention ran forward."""
    log = KernelLog()
    with log:
        loss = training.forward_and_backward()
    found = [p.grad.detach().cpu().clone() for p in trainable(training.model) if p.grad is not None]
    attention = [name for name in log.found if "attention" in name and "backward" not in name]
    return loss.cpu(), found, float(torch.rand((), device=training.device)), len(attention)
