"""`remat timeline`: the bytes alive over a step, by category, on the screen and for PyTorch's memory viewer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import require_writable
from remat.cli.commands.options import Allocator, Json, PlanInPlaceOfModel, SourceOptions
from remat.cli.commands.source import opened_step, workload_of
from remat.errors import UsageError
from remat.units import gib, ms, parse_bytes

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.cli.screen import LiveLine
    from remat.planning.timeline import StepTimeline

BAR, STEPS = 24, 16  # of the chart on the screen: columns, so that no line is wider than 80, and rows of time


def timeline(
    source: SourceOptions,
    plan: PlanInPlaceOfModel = None,
    budget: Annotated[
        str | None, typer.Option(help="Show this beside the peak: bytes with a unit. A plan has its own.")
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write a pickle for PyTorch's memory viewer (pytorch.org/memory_viz).", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the step on the CPU, and measure its bytes.")
    ] = False,
    allocator: Allocator = None,
    as_json: Json = False,
) -> Answer:
    """Show the bytes alive over the time of a step, by category.

    `remat report` draws them.
    """
    from remat.cli.screen import live_line

    if snapshot is not None:
        require_writable(snapshot)
    with live_line() as line:
        found, loaded = opened_step(source, plan, line)
        profile, _ = found.record()
        from remat.execution.regions_in_graph import placed
        from remat.planning.estimate import allocator_of
        from remat.planning.timeline import save_snapshot, timeline

        regions, offloads = placed(loaded, profile.graph) if loaded is not None else ((), ())
        limit = loaded.budget_bytes if loaded is not None else None
        if budget is not None:
            limit = parse_bytes(budget, what="budget", whole_bytes=profile.target.memory_bytes)
        made = timeline(profile, regions, limit, allocator_of(loaded, allocator), offloads)
        if measure:
            made = _measured(made, found.spec, loaded, line)
        if snapshot is not None:
            save_snapshot(profile, regions, snapshot, offloads)
    written = None if snapshot is None else str(snapshot)
    return Answer({**made.to_json(), "snapshot_path": written}, _text(made, written))


def _measured(made: StepTimeline, spec: ModelSpec | None, plan: Any, line: LiveLine) -> StepTimeline:
    if spec is None:
        raise UsageError("--measure runs the step, and the profile does not say how to build it; use --model.")
    if made.target != "cpu":
        raise UsageError(
            f"--measure runs the step on this machine's CPU, and the timeline is of {made.target}; add --target cpu. "
            "On a GPU, torch.cuda.memory._record_memory_history writes what the viewer shows beside --snapshot."
        )
    from remat.validation.training import alive_over_step

    line.say("running the step")
    return dataclasses.replace(made, measured=alive_over_step(workload_of(spec), plan, made.about))


# The screen


def _text(made: StepTimeline, written: str | None) -> str:
    from remat.cli.screen import aligned, heading

    total = made.alive_bytes
    most = max(made.peak_bytes, made.budget_bytes or 0)
    rows = [("time", "alive", "", "largest of it")]
    for at in made.highest(STEPS):
        largest = max(made.parts, key=lambda name: made.parts[name][at])
        bar = "#" * round(BAR * int(total[at]) / most)
        rows.append((f"{ms(float(made.time_us[at]))}", f"{gib(int(total[at]))}", f"{bar:<{BAR}}", largest))
    lines = [heading(made.about, made.target, made.costs), aligned(rows)]
    peak = f"peak {gib(made.peak_bytes)} after {ms(made.peak_us)}"
    if made.budget_bytes is not None:
        peak += f", budget {gib(made.budget_bytes)}"
    if made.measured is not None and len(made.measured[1]):
        peak += f", measured {gib(int(made.measured[1].max()))}"
    for each in made.allocator:
        peak += f"; reserved {gib(each.reserved_bytes)} ({each.settings or 'default allocator'}, simulated)"
    notes = [peak] if written is None else [peak, f"wrote {written}"]
    return "\n\n".join([*lines, "\n".join(notes)])
