"""`remat check`: whether a training step fits, by exit code, for CI and for schedulers."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.options import Allocator, Json, PlanInPlaceOfModel, SourceOptions
from remat.cli.commands.source import opened_step
from remat.errors import DoesNotFit


def check(
    source: SourceOptions,
    plan: PlanInPlaceOfModel = None,
    budget: Annotated[
        str,
        typer.Option(help="Available memory, as for `remat plan`; auto: the target's, less the CUDA context."),
    ] = "auto",
    headroom: Annotated[str, typer.Option(help="Margin to leave free: bytes with a unit, or a percentage.")] = "5%",
    allocator: Allocator = None,
    as_json: Json = False,
) -> Answer:
    """Check whether a training step fits: exit code 0, or 3 with the least change that makes it fit."""
    from remat.cli.screen import live_line

    with live_line() as line:
        found, loaded = opened_step(source, plan, line)
        from remat.costing.planning_device import PlanningDevice
        from remat.planning.checking import verdict_of
        from remat.planning.estimate import allocator_of
        from remat.planning.request import PlanRequest

        place = found.place or PlanningDevice(found.target, None)
        settings = allocator_of(loaded, allocator)
        request = PlanRequest.of(budget=budget, headroom=headroom, allocator=settings)
        request.require(place, found.loop, has_model=found.place is not None)
        profile, step = found.record()
        line.say("comparing with the limit; searching for a change if it does not fit")
        verdict = verdict_of(profile, step, request, place, loaded)
    failure = None if verdict.fits else DoesNotFit("the training step does not fit.")
    return Answer(verdict.to_json(), str(verdict), failure)
