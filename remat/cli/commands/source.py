"""The step that a command is about: of a model, to be recorded, or out of a profile."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.cli.commands.files import spec_in
from remat.cli.commands.options import PricedOptions, SourceOptions, StepOptions
from remat.errors import Infeasible, RematError, UsageError
from remat.units import gib

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.cli.screen import LiveLine
    from remat.costing.planning_device import PlanningDevice
    from remat.costing.profile import Profile
    from remat.evaluation.form import Form
    from remat.evaluation.plan import Plan
    from remat.planning.advice import Lever
    from remat.planning.budget import Budget
    from remat.planning.request import PlanRequest
    from remat.planning.study import Study
    from remat.recording.fake_step import FakeStep
    from remat.workload.target import Target
    from remat.workload.training_loop import TrainingLoop
    from remat.workload.workload import Workload

MOST_LEVERS = 4  # that a refusal names


@dataclasses.dataclass(frozen=True)
class Source:
    """The inputs that are known before slow work begins, and a function to record the step.

    spec    makes the workload again; None if a profile does not contain it
    record  the profile, and the step to replay plans on; a profile out of a file has none
    place   the device that it is recorded for; None if it was recorded before
    """

    target: Target
    spec: ModelSpec | None
    record: Callable[[], tuple[Profile, FakeStep | None]]
    loop: TrainingLoop
    place: PlanningDevice | None = None

    def studied(self, request: PlanRequest, line: LiveLine, **callbacks: Any) -> Study:
        """Return the study of the step as `request` will run it, recorded if necessary.

        callbacks  `on_form` and `on_replay` of the Study

        Raises UsageError before anything is recorded.
        """
        from remat.costing.planning_device import PlanningDevice
        from remat.planning.planner import studied, study_of

        if self.place is None:
            place = PlanningDevice(self.target, None)
            request.require(place, self.loop, has_model=False)
            warn_of_budget(request, place)
            return self._warned(study_of(self.record()[0], request, place, **callbacks))
        assert self.spec is not None
        request.require(self.place, self.loop)
        warn_of_budget(request, self.place)
        line.say(f"recording {self.spec.model}")
        workload = workload_of(self.spec)
        return self._warned(studied(workload, request, self.place, self.loop, on_progress=line.measured, **callbacks))

    def _warned(self, study: Study) -> Study:
        """Warn of a budget that is a share of the step, now that the step is known."""
        from remat.planning.budget import is_share_of_step

        if is_share_of_step(study.request.budget):
            _warn_of(study.budget, self.target)
        return study


def opened(options: StepOptions, line: LiveLine) -> Source:
    """Return the step that `options` name. Raises UsageError."""
    if isinstance(options, SourceOptions) and options.profile is not None:
        _refuse_beside_profile(options)
        return _from_profile(options.profile, line)
    return _from_model(options, line)


def require_state_alone(options: StepOptions) -> None:
    """Raise UsageError if a command without a plan is asked to offload activations or weights."""
    from remat.planning.links import ACTIVATIONS, WEIGHTS, offloads_named

    names = offloads_named(options.offload)
    if ACTIVATIONS in names:
        raise UsageError(
            "activations go to the host under `remat plan`, `compare`, `sweep` and `fit`; leave them out here."
        )
    if WEIGHTS in names:
        raise UsageError("weights go to the host under `remat plan`; leave them out here.")


def opened_plan(path: Path, line: LiveLine, *, as_captured: bool = False) -> tuple[Source, Plan]:
    """Return the step of a plan file, in the plan's form or `as_captured`, and the plan. Raises UsageError."""
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
    """Return the step that `options` or a plan file name, and the plan. Raises UsageError."""
    if plan is None:
        require_state_alone(options)
        return opened(options, line), None
    if options.given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options.given)
        raise UsageError(f"{names} cannot go with --plan: the plan says what it is for.")
    return opened_plan(plan, line)


def _from_profile(path: Path, line: LiveLine) -> Source:
    line.say(f"reading {path}")
    from remat.costing.profile import Profile
    from remat.workload.training_loop import TrainingLoop

    profile = Profile.load(path)
    about = profile.graph.about
    return Source(profile.target, spec_in(about, path), lambda: (profile, None), TrainingLoop.of(about))


def _from_model(options: StepOptions, line: LiveLine) -> Source:
    line.say("loading PyTorch")
    from remat.costing.planning_device import find_planning_device

    spec = options.spec()
    return _recorded(
        spec,
        find_planning_device(options.target or "auto", options.costs if isinstance(options, PricedOptions) else None),
        options.loop(spec.loop()),
        line,
    )


def _recorded(
    spec: ModelSpec, place: PlanningDevice, loop: TrainingLoop, line: LiveLine, *, form: Form | None = None
) -> Source:
    def record() -> tuple[Profile, FakeStep]:
        from remat.planning.profiling import fake_step, profile_step

        line.say(f"recording {spec.model}")
        step = fake_step(workload_of(spec), place, loop=loop)
        step.form = form or step.form
        return profile_step(step, place, on_progress=line.measured), step

    return Source(place.target, spec, record, loop, place)


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


def levers_of(found: Source, profile: Profile, step: FakeStep, line: LiveLine) -> list[Lever]:
    """Find the levers that free memory of a step without checkpointing. `found` recorded `profile`, of `step`."""
    from remat.evaluation.evaluator import Memory
    from remat.planning.advice import advise

    assert found.place is not None
    line.say("trying levers")
    whole = profile.whole or profile.graph
    return advise(
        *(step.workload, found.place, found.loop, whole, lambda graph, costs: Memory(graph).curve(()).peak_bytes),
        step=step,
    )


def warn_of_budget(request: PlanRequest, place: PlanningDevice) -> None:
    """Warn if the budget is more than the target has, unless only a record of the step will tell."""
    from remat.planning.budget import is_share_of_step

    limit = request.limit(place)  # it checks shares too
    if not is_share_of_step(request.budget):
        _warn_of(limit, place.target)


def _warn_of(limit: Budget | None, target: Target) -> None:
    from remat.cli.screen import tell

    if limit is not None and limit.given_bytes > target.memory_bytes:
        tell(
            "warning",
            f"the budget of {gib(limit.given_bytes)} is more than the {gib(target.memory_bytes)} of {target.name}; "
            "lower --budget to fit the card.",
            "bold magenta",
        )


@contextlib.contextmanager
def levers_where_infeasible(source: Source, study: Study, line: LiveLine, *, wanted: bool) -> Iterator[None]:
    """Let a refusal also say which change would make room, found by recording the step again with each.

    That takes a while, so a terminal shows the refusal meanwhile; Ctrl-C ends the search, and the refusal stands.
    """
    try:
        yield
    except Infeasible as error:
        budget = study.budget
        if source.spec is None or source.place is None or error.minimum_budget_bytes is None or budget is None:
            raise
        if not wanted:
            raise
        least = gib(error.minimum_budget_bytes)
        line.say(f"does not fit, {least} are the least; looking for what would make room (Ctrl-C: do not)")
        from remat.planning.advice import advise, least_peak_of

        whole = study.profile.whole or study.profile.graph
        workload = workload_of(source.spec) if study.step is None else study.step.workload
        is_cut = study.forms is not None and study.forms.are_losses
        try:
            levers = advise(
                *(workload, source.place, source.loop, whole, least_peak_of), step=study.step, losses_are_cut=is_cut
            )
        except (KeyboardInterrupt, RematError):
            raise error from None
        helping = [lever for lever in levers if lever.peak_bytes < error.minimum_budget_bytes]
        message = f"{error} {_levers_text(helping, budget.limit_bytes)}"
        raise Infeasible(message, error.minimum_budget_bytes, error.breakdown) from error


def _levers_text(levers: Sequence[Lever], limit_bytes: int) -> str:
    """List the levers that make the budget feasible, or else those that help most."""
    enough = [lever for lever in levers if lever.peak_bytes <= limit_bytes]
    shown = (enough or list(levers))[:MOST_LEVERS]
    if not shown:
        return "No lever that was tried makes room."
    listing = "; ".join(f"{lever.what} needs {gib(lever.peak_bytes)}" for lever in shown)
    return f"{'What would fit' if enough else 'None of these alone is enough'}: {listing}."
