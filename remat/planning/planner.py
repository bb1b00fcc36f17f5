"""Plan: from a workload and a budget to a Plan that the replay has accepted.

This is the sentence of the package in code: capture and profile (`profiling.py`), pose (`Execution.pose`), solve (a
function passed in, `solvers/exact.py` by default), check and replay (`search.py`), assemble (`assemble.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.evaluation.form import Form
from remat.evaluation.plan import Plan
from remat.execution import executions
from remat.execution.base import Execution
from remat.execution.executions import EAGER
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space
from remat.formulation.solution import Limits, Solution
from remat.offloading.link import Link
from remat.planning.assemble import assemble
from remat.planning.budget import Budget, is_share_of_step, parse_budget, usable_bytes
from remat.planning.card import reserving_at_most, with_footprints
from remat.planning.layers_on_host import movable_layers, require_layers, with_layers_on_host
from remat.planning.links import (
    WEIGHTS,
    beside_state,
    host_bytes_of,
    link_of,
    loop_with,
    offloads_named,
    require_offloads,
)
from remat.planning.profiling import fake_step, profile_step
from remat.planning.search import Draft, Judge, OnReplay, draft, solve_within
from remat.planning.variants import Effort, Variant, Variants, fastest, require_fusible
from remat.recording.fake_step import FakeStep
from remat.reservation.fragmentation import assumed_settings
from remat.solvers import Solver, load
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload


def plan(
    workload: Workload,
    *,
    budget: str | int,
    target: str = "auto",
    headroom: str | int | None = None,
    loop: TrainingLoop | None = None,
    limits: Limits | None = None,
    time_limit: float | None = None,
    batch_size: int | None = None,
    solver: Solver | None = None,
    execution: str = EAGER,
    depth: int | None = None,
    allocator: str | None = None,
    exact: bool = False,
    fuse: bool = False,
    offload: str | None = None,
    host_budget: str | int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """The plan with the least recomputation whose peak over the whole step stays within `budget`.

    budget, headroom  see `parse_budget`         target  see `find_planning_device`
    loop              what training does around forward and backward: accumulation, clipping, shards, ...
    time_limit        seconds for the search: that of `limits`, which has more to set
    batch_size        samples in place of the workload's own number
    solver            any function of `remat.solvers`; the exact one by default
    execution         how the step will run: "eager"; "modules" for regions that are whole modules, as sharding with
                      FSDP2 needs them; "inductor" or "aot_eager" for a step compiled so, on this machine
    depth             how deep regions may nest, by default as deep as they may: 1 for an eager plan that
                      `torch.compile` can keep, which then leaves losses whole
    allocator         settings of PYTORCH_CUDA_ALLOC_CONF to predict for; those of the environment by default
    exact             every gradient bitwise that of the untouched step: no loss runs in slices (`variants.py`)
    fuse              compile groups of pointwise and reducing nodes by themselves, and plan on what results: less
                      memory and less time, numbers that round elsewhere (`fusion/`)
    offload           "activations": what is kept from forward to backward may lie on the host meanwhile, as far as its
                      copies hide behind the computation (`offloading/`). "optimizer": the optimizer's state lies there
                      between its steps, which wait for it, as with `TrainingLoop(offload_optimizer=True)`; the
                      training script says `remat.offload_optimizer(optimizer)`. "weights": frozen weights of as many
                      layers as is best lie there, but for two layers at a time, as with
                      `TrainingLoop(weights_on_host=...)`; the script says `remat.offload_weights(model, layers)`. The
                      first and the second, or the second and the third, with a comma. Numbers stay
    host_budget       what may lie there, in bytes or as "64GiB"; by default half of what this host has free, or, for a
                      target elsewhere, as much as the device has
    on_progress       called with (done, total) while costs are measured

    Raises Infeasible with the least budget that would do, NoPlanInTime, CaptureError, UsageError.
    """
    how = executions.load(execution)
    found = find_planning_device(target)
    simulated = usable_bytes(found) if budget == "auto" and how.compiler is None else None
    if time_limit is not None:
        limits = dataclasses.replace(limits or Limits(), time_s=time_limit)
    if batch_size is not None:
        workload = workload.sized(batch_size)
    # A share of the step is read before the step is recorded too, so that what is refused is refused at once.
    limit = parse_budget(budget, headroom, found.target.memory_bytes, simulated, step_bytes=found.target.memory_bytes)
    loop = loop_with(loop, offload)
    link = link_of(found, offload, host_budget, has_state=loop is not None and loop.offload_optimizer)
    how.require(found, loop)
    wants_layers = WEIGHTS in offloads_named(offload)
    if wants_layers:
        require_layers(how, loop)
    step = fake_step(workload, found, loop=loop, compiled=how.compiler is not None)
    if wants_layers:
        movable_layers(step)  # so that what has none is refused before it is recorded
    profile = profile_step(step, found, on_progress=on_progress)
    if is_share_of_step(budget):
        limit = parse_budget(budget, headroom, found.target.memory_bytes, step_bytes=profile.peak_without_checkpointing)
    if wants_layers:
        room_bytes = host_bytes_of(found, host_budget)
        profile = with_layers_on_host(profile, step, how, solver or load("exact"), limit.limit_bytes, room_bytes)
    return plan_profile(
        profile,
        limit,
        limits=limits,
        solver=solver,
        step=step,
        execution=how,
        depth=depth,
        allocator=allocator,
        exact=exact,
        fuse=fuse,
        link=beside_state(link, profile.graph, host_bytes_of(found, host_budget)),
    )


def plan_profile(
    profile: Profile,
    budget: Budget,
    *,
    limits: Limits | None = None,
    solver: Solver | None = None,
    step: FakeStep | None = None,
    execution: str | Execution = EAGER,
    depth: int | None = None,
    space: Space | None = None,
    allocator: str | None = None,
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    on_replay: OnReplay | None = None,
    on_variant: Callable[[Form], None] | None = None,
) -> Plan:
    """`plan` from a profile. With `step`, the plan is also replayed, and losses may run in slices; without, the
    evaluator alone judges it.

    space      what is searched, by default the execution's space with regions `depth` deep
    allocator  settings of PYTORCH_CUDA_ALLOC_CONF to predict for; those of the environment by default
    limits     of all of it, from posing on
    link       to the host's memory, for offloads; see `links.link_of`
    on_replay  see `search.Judge`          on_variant  see `variants.Variants`
    """
    started = time.monotonic()
    how = executions.load(execution) if isinstance(execution, str) else execution
    profile = how.price(profile)
    judge = None if step is None else Judge(how, step, profile, on_replay)
    settings = assumed_settings(profile.target, allocator) if how.compiler is None else None
    limits, solver = limits or Limits(), solver or load("exact")
    if limits.time_s is None:
        limits = dataclasses.replace(limits, time_s=how.patience_s)
    if link is not None:
        require_offloads(how, None if step is None else step.loop)
    if fuse:
        require_fusible(how, None if step is None else step.loop, exact=exact)
    slices = not exact and depth != 1  # which is for `torch.compile`, and that runs no slices
    variants = None
    if step is not None and (slices or fuse):
        variants = Variants(how, step, profile, on_replay, on_variant, slices=slices, fuse=fuse)
    interrupted = False

    def solved(problem: Problem, judge: Judge | None, limits: Limits) -> Solution:
        nonlocal interrupted
        solution = solve_within(problem, how, solver, judge, limits)
        interrupted = interrupted or solution.interrupted
        return solution

    def made(problem: Problem, solution: Solution, profile: Profile, judge: Judge | None) -> Plan:
        plan = assemble(problem, solution, profile, how, judge)
        is_draft = judge is None and step is not None
        return plan if settings is None or is_draft else with_footprints(plan, profile, settings)

    whole_space = space or how.space(profile.graph, depth)
    captured: Problem | None = None

    def posed(profile: Profile, space: Space, limit_bytes: int) -> Problem:
        nonlocal captured
        problem = how.pose(profile, space, limit_bytes, link, like=captured)
        captured = captured or problem
        return problem

    def within(limit_bytes: int) -> Plan:
        if variants is None or not variants.are_any:
            problem = posed(profile, whole_space, limit_bytes)
            return made(problem, solved(problem, judge, limits.left(started)), profile, judge)

        def drafted(profile: Profile, judge: Judge, space: Space, effort: Effort) -> Draft:
            problem = posed(profile, space, limit_bytes)
            within = effort.within(limits.left(started, 0.5), problem)
            return draft(
                problem,
                solved(problem, None, within),
                judge,
                lambda solution, by: made(problem, solution, profile, by),
                lambda: solved(problem, judge, within),
            )

        def whole(effort: Effort) -> Draft:
            assert judge is not None
            return drafted(profile, judge, whole_space, effort)

        def attempt(variant: Variant, effort: Effort) -> Draft:
            return drafted(variant.profile, variant.judge, how.space(variant.profile.graph, depth), effort)

        return fastest(whole, variants, attempt, lambda: interrupted or limits.left(started).time_s == 0)

    found = within(budget.limit_bytes)
    if settings is not None and budget.reserved_bytes is not None:
        found = reserving_at_most(budget.reserved_bytes, found, within)
    return dataclasses.replace(found, solver={**found.solver, "interrupted": True}) if interrupted else found
