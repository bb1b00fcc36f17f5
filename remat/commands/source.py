"""The step that a command is about: of a model, to be recorded, or out of a profile; and the budget that it gets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remat.commands.files import spec_in
from remat.commands.options import BudgetOptions, SourceOptions, StepOptions
from remat.errors import Infeasible, UsageError
from remat.units import gib

if TYPE_CHECKING:
    from remat.advice import Lever
    from remat.loop import Loop
    from remat.planning import Budget
    from remat.plans import Plan
    from remat.profiling import Place, Profile
    from remat.record import FakeStep
    from remat.screen import LiveLine
    from remat.target import Target
    from remat.workload import Workload
    from remat.workloads import ModelSpec

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
    place: Place | None = None
    loop: Loop | None = None


def opened(options: StepOptions, line: LiveLine) -> Source:
    """The step that `options` name. Raises UsageError."""
    if isinstance(options, SourceOptions) and options.profile is not None:
        _refuse_beside_profile(options)
        return _from_profile(options.profile, line)
    return _from_model(options, line)


def _from_plan(path: Path, line: LiveLine) -> tuple[Source, Plan]:
    line.say("loading PyTorch")
    from remat.loop import Loop
    from remat.plans import Plan
    from remat.profiling import find_place

    plan = Plan.load(path)
    spec = spec_in(plan.about, path)
    if spec is None:
        raise UsageError(f"{path} does not say how to build its model; make the plan with `remat plan --model`.")
    return _recorded(spec, find_place(plan.target), Loop.of(plan.about), line), plan


def opened_step(options: SourceOptions, plan: Path | None, line: LiveLine) -> tuple[Source, Plan | None]:
    """The step that `options` or a plan file name, and the plan. Raises UsageError."""
    if plan is None:
        return opened(options, line), None
    if options.given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options.given)
        raise UsageError(f"{names} cannot go with --plan: the plan says what it is for.")
    return _from_plan(plan, line)


def allocator_of(plan: Plan | None, given: str | None) -> str | None:
    """The allocator's settings to assume: those given, or else those that the plan assumes."""
    if given is not None or plan is None or not plan.predicted.get("allocator"):
        return given
    return str(plan.predicted["allocator"][0]["settings"])


def _from_profile(path: Path, line: LiveLine) -> Source:
    line.say(f"reading {path}")
    from remat.profiling import Profile

    profile = Profile.load(path)
    return Source(profile.target, spec_in(profile.graph.about, path), lambda: (profile, None))


def _from_model(options: StepOptions, line: LiveLine) -> Source:
    line.say("loading PyTorch")
    from remat.profiling import find_place

    spec, loop = options.spec(), options.loop()
    return _recorded(spec, find_place(options.target or "auto"), loop, line)


def _recorded(spec: ModelSpec, place: Place, loop: Loop, line: LiveLine) -> Source:
    def record() -> tuple[Profile, FakeStep]:
        from remat.profiling import fake_step, profile_step

        line.say(f"recording {spec.model}")
        step = fake_step(workload_of(spec), place, loop=loop)
        return profile_step(step, place, on_progress=line.measured), step

    return Source(place.target, spec, record, place, loop)


def _refuse_beside_profile(options: SourceOptions) -> None:
    given = [f"--{name.replace('_', '-')}" for name in options.given if name != "profile"]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot go with --profile: the profile holds one step on one target. "
            "Give the option to `remat profile`, or use --model in its place."
        )


def workload_of(spec: ModelSpec) -> Workload:
    from remat.screen import quiet_torch

    quiet_torch()
    return spec.workload()


# Budgets


def budget_for(options: BudgetOptions, target: Target, usable_bytes: int | None = None) -> Budget:
    """The budget that `options` mean on `target`, with a warning where it is more than the target has.

    usable_bytes  as for `parse_budget`
    """
    from remat.planning import parse_budget
    from remat.screen import tell

    limit = parse_budget(options.budget, options.headroom, target.memory_bytes, usable_bytes)
    if limit.given_bytes > target.memory_bytes:
        tell(
            "warning",
            f"the budget of {gib(limit.given_bytes)} is more than the {gib(target.memory_bytes)} of {target.name}; "
            "it is planned for all the same.",
            "bold yellow",
        )
    return limit


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
def levers_where_infeasible(source: Source, profile: Profile, limit: Budget, line: LiveLine) -> Iterator[None]:
    """A refusal also says which lever would make room: what is found by recording the step again with each."""
    try:
        yield
    except Infeasible as error:
        if source.spec is None or source.place is None or source.loop is None or error.minimum_budget_bytes is None:
            raise
        line.say("looking for what would make room")
        from remat.advice import advise, least_peak_of

        whole = profile.whole or profile.graph
        levers = advise(workload_of(source.spec), source.place, source.loop, whole, least_peak_of)
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
