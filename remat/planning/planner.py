"""Plan: from a workload and a request to a Plan that the replay has accepted.

This is the sentence of the package in code: capture and profile (`profiling.py`), pose and solve each form of the step
(`study.py`), choose among them (`portfolio.py`), check and replay (`search.py`), assemble (`assemble.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat.capture.generators import generators_kept
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, UsageError
from remat.evaluation.plan import Plan
from remat.execution.executions import EAGER
from remat.formulation.solution import Limits
from remat.garbage import searched_rarely
from remat.offloading.link import Link
from remat.planning.assemble import plan_of
from remat.planning.budget import Budget, require_budget
from remat.planning.card import footprints_of, reserving_at_most
from remat.planning.layers_on_host import movable_layers, with_layers_on_host
from remat.planning.links import ACTIVATIONS, beside_state, require_offloads
from remat.planning.menu import with_alternatives
from remat.planning.portfolio import BestPlan, fastest
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice, Numerics, PlanRequest
from remat.planning.shorter import require_lengths, whole_lengths, with_shorter
from remat.planning.study import Study
from remat.recording.fake_step import FakeStep
from remat.reservation.fragmentation import assumed_settings
from remat.solvers import Solver
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload, require_workload


@generators_kept()
def plan(
    workload: Workload,
    *,
    budget: str | int,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    batch_size: int | None = None,
    headroom: str | int | None = None,
    execution: str = EAGER,
    depth: int | None = None,
    numerics: Numerics | None = None,
    exact: bool = False,
    fuse: bool = False,
    offload: str | None = None,
    host_budget: str | int | None = None,
    allocator: str | None = None,
    limits: Limits | None = None,
    time_limit: float | None = None,
    solver: Solver | None = None,
    forms: FormChoice | None = None,
    menu: bool = False,
    lengths: Sequence[int] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find the plan with the least added time whose peak over the whole step stays within `budget`.

    Args:
        workload: The training step. `remat.workload_of(trainer)` makes one from a Trainer.
        budget: Limit on the peak: bytes, text with a unit ("20GiB"), "90%" of the target's memory, "60%step" of the
            step's own peak, or "auto" for the largest budget that fits the card.
        target: The device to plan for: "auto", "cuda", "cpu", or a card by name ("h100-80gb").
        costs: A table of kernel times measured on the target, as `remat profile --costs` writes it.
        loop: Everything around forward and backward: accumulation, clipping, shards.
        batch_size: Samples in place of the workload's own number.
        headroom: Bytes, or a percentage, subtracted from the budget.
        execution: How training runs the plan: "eager" or "modules" (FSDP2).
        depth: Nesting depth of regions, by default the most that the execution allows.
        numerics: "bitwise", "sums" (default: also chunked losses and MLPs) or "rounding" (also fused kernels).
        exact: The same as `numerics="bitwise"`.
        fuse: The same as `numerics="rounding"`.
        offload: "activations", "optimizer", "weights", or "optimizer" and another with a comma.
        host_budget: Host memory for offloading, in bytes or as text; by default half of the free memory.
        allocator: PYTORCH_CUDA_ALLOC_CONF of the training, by default that of the environment.
        limits: Limits of the search.
        time_limit: Seconds for the search, in place of `limits.time_s`.
        solver: A function of `remat.solvers`, by default the exact one.
        forms: Forms of the step that are tried.
        menu: Also find plans with other numerics or with offloading, for `plan.alternatives`.
        lengths: Lengths of shorter batches that get plans of their own, in `plan.shorter`, where these save time:
            tokens, or another size that `workload.batch` takes as `seq_len`. The longest batch is the workload's.
        on_progress: Called with (done, total) while costs are measured.

    Returns:
        The plan. `plan.predicted["peak_bytes"]` is its peak in bytes, `plan.predicted["overhead"]` its added time as a
        share of the step's.

    Raises:
        Infeasible: No plan fits; `minimum_budget_bytes` is the least budget for which a plan is known.
        NoPlanInTime: The time limit came first.
        CaptureError: The model cannot be captured.
        UsageError: An argument is wrong, or two contradict each other.

    Example:
        >>> plan = remat.plan(workload, budget="20GiB", target="h100-80gb")
        >>> plan.save("mine.plan.json")
    """
    require_workload(workload)
    require_budget(budget)
    request = PlanRequest.of(
        budget=budget,
        headroom=headroom,
        execution=execution,
        depth=depth,
        numerics=numerics,
        exact=exact,
        fuse=fuse,
        offload=offload,
        host_budget=host_budget,
        allocator=allocator,
        limits=limits,
        time_limit=time_limit,
        solver=solver,
        forms=forms,
    )
    place = find_planning_device(target, costs)
    if batch_size is not None:
        workload = workload.sized(batch_size)
    lengths = whole_lengths(lengths)
    require_lengths(lengths, workload.seq_len, request)
    study = studied(workload, request, place, loop, on_progress=on_progress)
    made = plan_study(study)

    def planned_at(length: int, request: PlanRequest) -> Plan:
        return plan_study(studied(workload.sized(seq_len=length), request, place, loop))

    made = with_shorter(made, study, lengths, planned_at)
    return with_alternatives(made, study, link_beside(study, place)) if menu else made


@searched_rarely()
def studied(
    workload: Workload,
    request: PlanRequest,
    place: PlanningDevice,
    loop: TrainingLoop | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    **callbacks: Any,
) -> Study:
    """Record the step of `workload` as `request` will run it, and return its study.

    callbacks  `on_form` and `on_replay` of the Study

    Raises CaptureError, and UsageError before anything is recorded.
    """
    loop = request.loop(loop)
    request.require(place, loop)
    step = fake_step(workload, place, loop=loop)
    if request.wants_layers:
        movable_layers(step)  # so that a model without layers is refused before it is recorded
    return study_of(profile_step(step, place, on_progress=on_progress), request, place, step, **callbacks)


def study_of(
    profile: Profile, request: PlanRequest, place: PlanningDevice, step: FakeStep | None = None, **callbacks: Any
) -> Study:
    """Return the study of a recorded step. Without a step to replay, losses are left whole."""
    loop = TrainingLoop.of(profile.graph.about) if step is None else step.loop
    link = beside_state(request.link(place, loop), profile.graph, request.host_bytes(place))
    budget = request.limit(place, profile.peak_without_checkpointing)
    if request.wants_layers and step is not None and budget is not None:
        profile = with_layers_on_host(profile, step, request, budget.limit_bytes, request.host_bytes(place))
    return Study(profile, request, step, budget=budget, link=link, **callbacks)


def link_beside(study: Study, place: PlanningDevice) -> Link | None:
    """Return the link that activations of a study could use; None if there is none."""
    request = dataclasses.replace(study.request, offload=ACTIVATIONS)
    loop = TrainingLoop.of(study.profile.graph.about)
    try:
        require_offloads(study.how, loop)
        return beside_state(request.link(place, loop), study.profile.graph, request.host_bytes(place))
    except UsageError:
        return None


@searched_rarely()
def plan_study(study: Study) -> Plan:
    """Plan a study within its budget. Raises Infeasible, or NoPlanInTime."""
    budget = study.budget
    assert budget is not None
    with refused_in_full(study, budget):
        return _planned(study, budget)


def _planned(study: Study, budget: Budget) -> Plan:
    limits = study.request.limits.by_default(study.how.patience_s)
    started = limits.now()
    settings = assumed_settings(study.profile.target, study.request.allocator)

    def within(limit_bytes: int) -> BestPlan:
        return fastest(study, limit_bytes, limits.left(started))

    found = within(budget.limit_bytes)
    if settings is None:
        return plan_of(study, found, budget.limit_bytes)
    if budget.reserved_bytes is not None:
        found = reserving_at_most(
            budget.reserved_bytes, found, within, lambda outcome: footprints_of(study, outcome, settings)
        )
    made = plan_of(study, found, budget.limit_bytes)
    footprints = [each.to_json() for each in footprints_of(study, found, settings)]
    return dataclasses.replace(made, predicted={**made.predicted, "allocator": footprints})


@contextlib.contextmanager
def refused_in_full(study: Study, limit: Budget) -> Iterator[None]:
    """Let a refusal also say why large losses are not chunked, and which headroom comes on top of the least peak."""
    try:
        yield
    except Infeasible as error:
        reasons = study.forms.left_whole if study.forms is not None else []
        more = [f"The loss is not chunked: {'; '.join(reasons)}."] if reasons else []
        if headroom := limit.given_bytes - limit.limit_bytes:
            more.append(f"The headroom of {gib(headroom)} comes on top.")
        if not more:
            raise
        raise Infeasible(" ".join([str(error), *more]), error.minimum_budget_bytes, error.breakdown) from error
