"""Check: whether a training step fits a card with a margin, and the least change that makes it fit.

A check is for CI and for schedulers: it records the step once, and solves nothing where it fits.

Rule 1  A step as people run it has no plan: where the forward is not traced, its local variables count too. The first
        step counts, and every later one.
Rule 2  Against a budget in bytes, requested bytes count. Against a card (`auto`), reserved ones, simulated.
Rule 3  The least change is the first of these that does: a setting of the allocator; a plan, with the time that it
        adds; whatever the refusal of a plan names (a smaller batch, states shared over ranks, ...).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from remat.capture.generators import generators_kept
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.form import CAPTURED_FORM
from remat.evaluation.plan import Plan
from remat.execution.executions import load
from remat.planning.budget import Budget
from remat.planning.estimate import Estimate, allocator_of, estimate_under, recorded_for
from remat.planning.planner import plan_study, study_of
from remat.planning.profiling import profile_step
from remat.planning.request import PlanRequest
from remat.recording.fake_step import FakeStep
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

MARGIN = "5%"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer to whether a step fits.

    Attributes:
        needed_bytes: The peak of the step.
        limit_bytes: The available bytes, less the margin.
        margin_bytes: The bytes of the budget that stay free.
        is_reserved: Whether both are reserved bytes, simulated; else requested bytes.
        change: The least change that fits, in words; None if the step fits, or if no change that was tried does.
        added: The share of the step's time that the change adds, if it is a plan.

    Example:
        >>> verdict = remat.check(workload, budget="24GiB", target="rtx4090")
        >>> verdict.needed_bytes <= verdict.limit_bytes
    """

    workload: str
    target: str
    needed_bytes: int
    limit_bytes: int
    is_reserved: bool
    change: str | None = None
    added: float | None = None
    margin_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the step fits with the margin."""
        return self.needed_bytes <= self.limit_bytes

    def __str__(self) -> str:
        what = "reserved by the allocator, simulated" if self.is_reserved else "requested"
        step = f"{self.workload} on {self.target} {'fits' if self.fits else 'does not fit'}"
        margin = f" after a margin of {gib(self.margin_bytes)}" if self.margin_bytes else ""
        line = f"{step}: {gib(self.needed_bytes)} {what}, limit {gib(self.limit_bytes)}{margin}"
        return line if self.fits else f"{line}. {self.change or 'No change that was tried fits.'}"

    def to_json(self) -> dict[str, Any]:
        return {"fits": self.fits, **dataclasses.asdict(self)}


@generators_kept()
def check(
    workload: Workload,
    *,
    budget: str | int = "auto",
    headroom: str | int = MARGIN,
    plan: Plan | str | os.PathLike[str] | None = None,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    allocator: str | None = None,
) -> Verdict:
    """Check whether the step of `workload` fits, and find the least change that makes it fit.

    Args:
        workload: The training step.
        budget: Available memory, as in `remat.plan`; "auto" is the target's memory.
        headroom: Margin that stays free: bytes, text with a unit, or a percentage of the budget.
        plan: The plan that the step runs under, or the path of its file; by default none.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        allocator: PYTORCH_CUDA_ALLOC_CONF of the training, by default that of the environment.

    Returns:
        The verdict, with needed and available bytes.

    Raises:
        CaptureError: The model cannot be captured.
        UsageError: An argument is wrong.
        PlanMismatch: The plan is for another step.

    Example:
        >>> verdict = remat.check(workload, budget="24GiB", target="rtx4090")
        >>> verdict.needed_bytes, verdict.change
    """
    plan = None if plan is None else Plan.of(plan)
    request = PlanRequest.of(budget=budget, headroom=headroom, allocator=allocator_of(plan, allocator))
    place = find_planning_device(target, costs)
    request.require(place, loop)
    step, profile = recorded_for(plan, workload, place, loop)
    return verdict_of(profile, step, request, place, plan)


def verdict_of(
    profile: Profile, step: FakeStep | None, request: PlanRequest, place: PlanningDevice, plan: Plan | None = None
) -> Verdict:
    """Return whether the step of `profile` fits, under `plan` if given, else the least change that fits."""
    limit = request.limit(place, profile.peak_without_checkpointing)
    assert limit is not None
    found = estimate_under(plan, profile, request.allocator)
    is_replayed = plan is not None and not load(plan.execution).runs_as_evaluated
    replayed_bytes = plan.predicted["peak_bytes"] if plan is not None and is_replayed else 0
    needed, is_reserved = needed_bytes(found, limit, replayed_bytes)
    about = (found.about["workload"], found.target, needed, limit_bytes(limit), is_reserved)
    verdict = Verdict(*about, margin_bytes=limit.given_bytes - limit.limit_bytes)
    if verdict.fits:
        return verdict
    if plan is None and (setting := setting_that_fits(found, limit)):
        return dataclasses.replace(verdict, change=f"It fits with PYTORCH_CUDA_ALLOC_CONF={setting}.", added=0.0)
    if plan is not None and step is not None and step.form != CAPTURED_FORM:
        step.form = CAPTURED_FORM
        profile = profile_step(step, place)
    return _with_plan(verdict, profile, step, request, place)


def _with_plan(
    verdict: Verdict, profile: Profile, step: FakeStep | None, request: PlanRequest, place: PlanningDevice
) -> Verdict:
    """Add to `verdict` a plan as its change, or the reason why no plan fits."""
    try:
        made = plan_study(study_of(profile, request, place, step))
    except (Infeasible, NoPlanInTime) as refusal:
        return dataclasses.replace(verdict, change=f"No plan fits: {refusal}")
    added, peak = made.predicted["overhead"], made.predicted["peak_bytes"]
    change = (
        f"Activation checkpointing fits it: a plan takes {gib(peak)} and adds {100 * added:.1f} % of the step's time."
    )
    return dataclasses.replace(verdict, change=change, added=added)


def needed_bytes(found: Estimate, limit: Budget, replayed_bytes: int = 0) -> tuple[int, bool]:
    """Return the peak bytes of the step, and whether they are reserved bytes.

    replayed_bytes  peak of its plan by the replay, if that may exceed the estimate
    """
    peaks = found.peaks
    requested = max(peaks.peak_bytes, peaks.eager_bytes or 0, peaks.first_step_bytes, replayed_bytes)
    if limit.reserved_bytes is None or not found.allocator:
        return requested, False
    return found.allocator[0].reserved_bytes + requested - peaks.peak_bytes, True


def limit_bytes(limit: Budget) -> int:
    return limit.limit_bytes if limit.reserved_bytes is None else limit.reserved_bytes


def setting_that_fits(found: Estimate, limit: Budget) -> str | None:
    """Return the allocator's other setting if the step fits with it."""
    for footprint in found.allocator[1:] if limit.reserved_bytes is not None else ():
        other = dataclasses.replace(found, allocator=(footprint,))
        if footprint.settings and needed_bytes(other, limit)[0] <= limit_bytes(limit):
            return footprint.settings
    return None
