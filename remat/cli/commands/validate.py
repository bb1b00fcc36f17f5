"""`remat validate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import spec_in
from remat.cli.commands.options import Json, ModelOptions, PlanFile
from remat.cli.commands.source import workload_of
from remat.errors import UsageError, ValidationFailed

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.cli.screen import LiveLine
    from remat.evaluation.plan import Plan


def validate(
    plan: PlanFile,
    model: ModelOptions,
    device: Annotated[str, typer.Option("--device", "--target", help="cuda or cpu of this machine, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, data and dropout.")] = 0,
    as_json: Json = False,
) -> Answer:
    """Run the step with and without the plan on this machine, and compare peak, time, loss and gradients.

    Plans for shorter batches are validated after it, at their lengths.
    """
    from remat.cli.screen import live_line
    from remat.evaluation.plan import Plan
    from remat.validation.validating import validate

    found, place = Plan.load(plan), None if device == "auto" else device
    spec = _spec_of(found, plan, model)
    specs = [spec]
    if model.seq_len is None:
        specs += [spec.changed(seq_len=each.about["seq_len"]) for each in reversed(found.shorter)]
    reports = []
    with live_line() as line:
        for sized in specs:
            line.say(f"validating {plan}" + (f" at {sized.seq_len} tokens" if sized is not spec else ""))
            options: dict[str, Any] = {"device": place, "seed": seed, "on_progress": measuring_first(line)}
            reports.append(validate(workload_of(sized), found, **options))
    failed = not all(report.passed for report in reports)
    failure = ValidationFailed(f"the measurement contradicts the plan {plan}.") if failed else None
    data, *shorter = (report.to_json() for report in reports)
    return Answer({**data, **({"shorter": shorter} if shorter else {})}, "\n\n".join(map(str, reports)), failure)


def _spec_of(plan: Plan, path: Path, options: ModelOptions) -> ModelSpec:
    """Return the spec of a plan's workload, with the options that are given now."""
    from remat.cli.model_spec import ModelSpec

    spec = spec_in(plan.about, path)
    if spec is None and options.model is None:
        raise UsageError(
            f"{path} does not say how to build its model; name it with --model, for example file.py:function."
        )
    if spec is None:
        spec = ModelSpec("", batch_size=plan.about.get("batch_size"), seq_len=plan.about.get("seq_len"))
    return spec.changed(**options.given)


def measuring_first(line: LiveLine) -> Callable[[int, int], None]:
    """Return a progress callback that shows the measuring, then that the steps run."""

    def on_progress(done: int, total: int) -> None:
        line.measured(done, total)
        if done == total:
            line.say("running the step without and with the plan")

    return on_progress
