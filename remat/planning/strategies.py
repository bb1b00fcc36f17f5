"""Strategies: what each one plans for a step in a form, and the names of rows that stand beside theirs in tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from remat.errors import RematError
from remat.evaluation.plan import Region
from remat.formulation import check
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.offloading.link import Link
from remat.offloading.schedule import stall_us, stashed_offloads
from remat.offloading.timeline import Timeline
from remat.planning.forms import StepForm
from remat.planning.search import search
from remat.planning.study import Study
from remat.solvers import EXACT, HEURISTICS, NO_CHECKPOINTING, every_block, load

NO_LIMIT = 1 << 62
LOSS_WHOLE = "exact-whole-loss"  # the plan of "exact" with whole losses, if "exact" chunks them
UNFUSED = "exact-unfused"  # the plan of "exact" for the captured step, if groups are fused
FUSE_ONLY = "fuse-only"  # groups fused, and nothing recomputed
NO_OFFLOAD = "exact-no-offload"  # the plan of "exact" without offloads, if these are allowed
OFFLOAD_ALL = "offload-all"  # nothing recomputed, all saved tensors on the host, as TRL's activation_offloading
OFFLOAD_INPUTS = "offload-inputs"  # every block, its input on the host, as Unsloth's gradient checkpointing
LIGER_LIKE = "liger-like"  # every block, and losses in as many slices as Liger-Kernel's fused head takes


def forms_by_hand(study: Study) -> Iterator[tuple[str, StepForm, str]]:
    """Yield (name of the row, form, strategy) of what people run in another form without a planner."""
    forms = study.forms
    assert forms is not None
    others = [(LIGER_LIKE, forms.like_liger, "every-block")] if forms.are_losses else []
    others += [(FUSE_ONLY, forms.fused, FUSE_ONLY)] if forms.fuse else []
    for name, form_of, strategy in others:
        try:
            at = form_of()
        except RematError:  # the step, or a later graph, reads the logits
            continue
        yield name, at, strategy


def offloaded_by_hand(problem: Problem, link: Link, name: str) -> Solution:
    """Offload as people do without a plan (`OFFLOAD_ALL` or `OFFLOAD_INPUTS`), and compute the stalls."""
    regions = every_block.regions(problem) if name == OFFLOAD_INPUTS else ()
    timeline = Timeline(problem.memory, regions, problem.liveness.op_time_us)
    inputs = {u for region in regions for u in problem.memory.inputs(region.first, region.end)}
    offloads = stashed_offloads(timeline, link, inputs if regions else None)
    fits = problem.memory.offloading(offloads).curve(regions).peak_bytes <= problem.budget_bytes
    stalled = stall_us(timeline, offloads, link)
    objective_us = problem.objective_us(regions) + stalled
    status: Status = "feasible" if fits else "unknown"
    return Solution(name, status, regions, objective_us, offloads=offloads, stall_us=stalled)


def solve(problem: Problem, name: str, limits: Limits) -> Solution:
    """Solve with the strategy `name`; raise if the plan fails the check."""
    if name == FUSE_ONLY:
        fits = problem.memory.peak_without_regions <= problem.budget_bytes
        return Solution(FUSE_ONLY, "feasible" if fits else "unknown")
    solution = load(name)(problem, limits)
    if solution.fits:
        solution = dataclasses.replace(solution, offloads=problem.offloads_of(solution.regions))
    if has_plan(name, solution):
        check.require(problem if solution.fits else problem.with_budget(NO_LIMIT), solution)
    return solution


def strategy_solution(study: Study, at: StepForm, name: str, budget_bytes: int, limits: Limits) -> Solution:
    """Solve the step in a form with the strategy `name`, as it runs."""
    problem, how, judge = study.problem(at, budget_bytes), study.how, study.judge(at)
    if name == NO_CHECKPOINTING:  # not replayed: it runs untraced
        peak = problem.memory.peak_without_checkpointing
        return Solution(NO_CHECKPOINTING, "feasible" if peak <= budget_bytes else "unknown", replayed_bytes=peak)
    proves = name in EXACT
    found = search(problem, how, lambda each, limits: solve(each, name, limits), judge, limits, may_need_none=proves)
    if proves and how.runs_as_evaluated and found.fits:
        study.remember(at, budget_bytes, found)
    return found


def peak_of(problem: Problem, name: str, regions: tuple[Region, ...]) -> int:
    """Return the evaluator's peak of the plan that the strategy `name` proposes."""
    memory = problem.memory
    return memory.peak_without_checkpointing if name == NO_CHECKPOINTING else memory.curve(regions).peak_bytes


def has_plan(name: str, solution: Solution) -> bool:
    """Return whether the regions are a plan: a heuristic that fits nothing still returns its nearest plan."""
    return solution.fits or name in (*HEURISTICS, OFFLOAD_ALL, OFFLOAD_INPUTS)


def proves(name: str) -> bool:
    """Return whether the row `name` proves a bound on the plans that it chooses from."""
    return name in (*EXACT, LOSS_WHOLE, UNFUSED, NO_OFFLOAD)


def best_bound(solutions: dict[str, Solution]) -> float:
    """Return the least recompute time of any plan within the budget, as proved."""
    return max((solution.bound_us for name, solution in solutions.items() if name in EXACT), default=0.0)
