"""`remat validate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    device: Annotated[
        str, typer.Option("--device", "--target", help="cuda or cpu of this machine; auto is cuda if there is one.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, data and dropout.")] = 0,
    as_json: Json = False,
) -> Answer:
    """Run the step with and without the plan on this machine, and compare peak, time, loss and gradients."""
    from remat.cli.screen import live_line
    from remat.evaluation.plan import Plan
    from remat.validation.validating import validate

    found, place = Plan.load(plan), _device(device)
    spec = _spec_of(found, plan, model)
    with live_line() as line:
        line.say(f"validating {plan}")
        report = validate(workload_of(spec), found, device=place, seed=seed, on_progress=measuring_first(line))
    failure = None if report.passed else ValidationFailed(f"the measurement contradicts the plan {plan}.")
    return Answer(report.to_json(), str(report), failure)


def _device(name: str) -> str | None:
    if name == "auto":
        return None
    if name not in ("cuda", "cpu"):
        raise UsageError(f"a plan is validated on this machine: --device is auto, cuda or cpu, not {name!r}.")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a CUDA device, and PyTorch sees none on this machine; use --device cpu.")
    return name


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
            line.say("running the untouched and the planned step")

    return on_progress
