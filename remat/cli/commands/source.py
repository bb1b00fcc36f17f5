"""The step that a command is about: of a model, to be recorded, or out of a profile; and the budget that it gets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remat.cli.commands.files import spec_in
from remat.cli.commands.options import BudgetOptions, SourceOptions, StepOptions
from remat.errors import Infeasible, UsageError
from remat.units import gib

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.cli.screen import LiveLine
    from remat.costing.planning_device import PlanningDevice
    from remat.costing.profile import Profile
    from remat.evaluation.form import Form
    from remat.evaluation.plan import Plan
    from remat.execution.base import Execution
    from remat.planning.advice import Lever
    from remat.planning.budget import Budget
    from remat.recording.fake_step import FakeStep
    from remat.workload.target import Target
    from remat.workload.training_loop import TrainingLoop
    from remat.workload.workload import Workload

MOST_LEVERS = 4  # that a refusal names


@dataclasses.dataclass(frozen=True)
class Source:
    """What is known before anything slow begins, and how to go on.

    spec    how to make the workload again; None where a profile does not say
    record  the profile, and the step to replay plans on; a profile out of a file has none
    place, loop  what it is recorded for; None where it was recorded before
    """

    target: Target
    spec: ModelSpec | None
    record: Callable[[], tuple[Profile, FakeStep | None]]
    place: PlanningDevice | None = None
    loop: TrainingLoop | None = None


def opened(
    options: StepOptions,
    line: LiveLine,
    execution: Execution | None = None,
    *,
    activations: bool = False,
    weights: bool = False,
) -> Source:
    """The step that `options` name, to run as `execution` says. Raises UsageError.

    activations, weights  whether they may be offloaded here
    """
    if not activations and "activations" in (options.offload or ""):
        raise UsageError(
            "activations go to the host under `remat plan`, `compare`, `sweep` and `fit`; leave them out here."
        )
    if not weights and "weights" in (options.offload or ""):
        raise UsageError("weights go to the host under `remat plan`; leave them out here.")
    if isinstance(options, SourceOptions) and options.profile is not None:
        _refuse_beside_profile(options)
        found = _from_profile(options.profile, line)
    else:
        found = _from_model(options, line, execution)
    if execution is not None:
        execution.require(found.place, found.loop)
    return found


def opened_plan(path: Path, line: LiveLine, *, as_captured: bool = False) -> tuple[Source, Plan]:
    """The step of a plan file, in the plan's form or `as_captured`, and the plan. Raises UsageError."""
    line.say("loading PyTorch")
    from remat.costing.planning_device import find_planning_device
    from remat.evaluation.form import form_of
    from remat.evaluation.plan import Plan
    from remat.workload.training_loop import TrainingLoop

    plan = Plan.load(path)
    spec = spec_in(plan.about, path)
    if spec is None:
        raise UsageError(f"{path} does not say how to build its model; make the plan with `remat plan --model`.")
    loop, form = TrainingLoop.of(plan.about), None if as_captured else form_of(plan.about)
    return _recorded(spec, find_planning_device(plan.target), loop, line, form=form), plan


def opened_step(options: SourceOptions, plan: Path | None, line: LiveLine) -> tuple[Source, Plan | None]:
    """The step that `options` or a plan file name, and the plan. Raises UsageError."""
    if plan is None:
        return opened(options, line), None
    if options.given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options.given)
        raise UsageError(f"{names} cannot go with --plan: the plan says what it is for.")
    return opened_plan(plan, line)


def allocator_of(plan: Plan | None, given: str | None) -> str | None:
    """The allocator's settings to assume: those given, or else those that the plan assumes."""
    if given is not None or plan is None or not plan.predicted.get("allocator"):
        return given
    return str(plan.predicted["allocator"][0]["settings"])


def _from_profile(path: Path, line: LiveLine) -> Source:
    line.say(f"reading {path}")
    from remat.costing.profile import Profile

    profile = Profile.load(path)
    return Source(profile.target, spec_in(profile.graph.about, path), lambda: (profile, None))


def _from_model(options: StepOptions, line: LiveLine, execution: Execution | None) -> Source:
    line.say("loading PyTorch")
    from remat.costing.planning_device import find_planning_device

    spec = options.spec()
    loop = options.loop(spec.loop())
    compiled = execution is not None and execution.compiler is not None
    return _recorded(spec, find_planning_device(options.target or "auto"), loop, line, compiled=compiled)


def _recorded(
    spec: ModelSpec,
    place: PlanningDevice,
    loop: TrainingLoop,
    line: LiveLine,
    *,
    compiled: bool = False,
    form: Form | None = None,
) -> Source:
    def record() -> tuple[Profile, FakeStep]:
        from remat.planning.profiling import fake_step, profile_step

        line.say(f"recording {spec.model}")
        step = fake_step(workload_of(spec), place, loop=loop, compiled=compiled)
        step.form = form or step.form
        return profile_step(step, place, on_progress=line.measured), step

    return Source(place.target, spec, record, place, loop)


def _refuse_beside_profile(options: SourceOptions) -> None:
    beside = ("profile", "offload") if options.offload == "activations" else ("profile",)
    given = [f"--{name.replace('_', '-')}" for name in options.given if name not in beside]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot go with --profile: the profile holds one step on one target. "
            "Give the option to `remat profile`, or use --model in its place."
        )


def workload_of(spec: ModelSpec) -> Workload:
    from remat.cli.screen import quiet_torch

    quiet_torch()
    return spec.workload()


def levers_of(found: Source, profile: Profile, line: LiveLine) -> list[Lever]:
    """Which lever frees how much of a step as it is, without checkpointing. `profile` is what `found` recorded."""
    from remat.evaluation.evaluator import Memory
    from remat.planning.advice import advise

    assert found.spec is not None and found.place is not None and found.loop is not None
    line.say("trying levers")
    workload, whole = workload_of(found.spec), profile.whole or profile.graph
    return advise(workload, found.place, found.loop, whole, lambda graph, costs: Memory(graph).curve(()).peak_bytes)


# Budgets


def usable(found: Source) -> int | None:
    """What the caching allocator can reserve where the step of `found` runs; None without CUDA."""
    from remat.costing.planning_device import PlanningDevice
    from remat.planning.budget import usable_bytes

    return usable_bytes(found.place or PlanningDevice(found.target, None))


def budget_for(
    options: BudgetOptions, target: Target, usable_bytes: int | None = None, *, shares: bool = True
) -> Budget:
    """The budget that `options` mean on `target`, with a warning where it is more than the target has.

    usable_bytes  as for `parse_budget`
    shares        whether a share of the step will do, to be read again with `budget_of_step` once it is recorded
    """
    from remat.cli.screen import tell
    from remat.planning.budget import parse_budget

    of_step = target.memory_bytes if shares else None
    limit = parse_budget(options.budget, options.headroom, target.memory_bytes, usable_bytes, of_step)
    if limit.given_bytes > target.memory_bytes:
        tell(
            "warning",
            f"the budget of {gib(limit.given_bytes)} is more than the {gib(target.memory_bytes)} of {target.name}; "
            "it is planned for all the same.",
            "bold yellow",
        )
    return limit


def budget_of_step(options: BudgetOptions, limit: Budget, profile: Profile) -> Budget:
    """`limit`, or the share of the recorded step that `options` ask for."""
    from remat.planning.budget import is_share_of_step, parse_budget

    if not is_share_of_step(options.budget):
        return limit
    step_bytes = profile.peak_without_checkpointing
    return parse_budget(options.budget, options.headroom, profile.target.memory_bytes, step_bytes=step_bytes)


@contextlib.contextmanager
def headroom_on_top(limit: Budget) -> Iterator[None]:
    """A refusal names the least peak; what the headroom takes comes on top of that."""
    try:
        yield
    except Infeasible as error:
        if not (headroom := limit.given_bytes - limit.limit_bytes):
            raise
        message = f"{error} The headroom of {gib(headroom)} comes on top."
        raise Infeasible(message, error.minimum_budget_bytes, error.breakdown) from error


@contextlib.contextmanager
def levers_where_infeasible(
    source: Source,
    profile: Profile,
    limit: Budget,
    line: LiveLine,
    *,
    wanted: bool,
    losses_are_cut: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """A refusal also says which lever would make room: what is found by recording the step again with each.

    losses_are_cut  whether plans had losses in slices, as far as there are any

    That takes a while, so a terminal shows the refusal meanwhile; Ctrl-C ends the search, and the refusal stands.
    """
    try:
        yield
    except Infeasible as error:
        if source.spec is None or source.place is None or source.loop is None or error.minimum_budget_bytes is None:
            raise
        if not wanted:
            raise
        least = gib(error.minimum_budget_bytes)
        line.say(f"does not fit, {least} are the least; looking for what would make room (Ctrl-C: do not)")
        from remat.planning.advice import advise, least_peak_of

        whole = profile.whole or profile.graph
        try:
            levers = advise(
                workload_of(source.spec),
                source.place,
                source.loop,
                whole,
                least_peak_of,
                losses_are_cut=losses_are_cut(),
            )
        except KeyboardInterrupt:
            raise error from None
        message = f"{error} {_levers_text(levers, limit.limit_bytes)}"
        raise Infeasible(message, error.minimum_budget_bytes, error.breakdown) from error


def _levers_text(levers: Sequence[Lever], limit_bytes: int) -> str:
    """The levers that make the budget feasible, or else those that help most."""
    enough = [lever for lever in levers if lever.peak_bytes <= limit_bytes]
    shown = (enough or list(levers))[:MOST_LEVERS]
    if not shown:
        return "No lever that was tried makes room."
    listing = "; ".join(f"{lever.what} needs {gib(lever.peak_bytes)}" for lever in shown)
    return f"{'What would fit' if enough else 'None of these alone is enough'}: {listing}."
