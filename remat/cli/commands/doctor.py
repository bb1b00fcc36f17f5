"""`remat doctor`, and its screen: why a run needed more memory than its plan promised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import spec_in
from remat.cli.commands.options import Json
from remat.units import gib, parse_bytes

if TYPE_CHECKING:
    from remat.cli.screen import LiveLine
    from remat.costing.profile import Profile
    from remat.diagnosis.findings import Diagnosis
    from remat.evaluation.plan import Plan


def doctor(
    snapshot: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT",
            show_default=False,
            help="File of torch.cuda.memory._dump_snapshot(path), with "
            "torch.cuda.memory._record_memory_history() called before training.",
        ),
    ],
    plan: Annotated[Path, typer.Option("--plan", help="The plan that the run trained with.", show_default=False)],
    profile: Annotated[
        Path | None,
        typer.Option(help="The profile of the planned step, if it cannot be recorded here.", show_default=False),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(help="Memory of the card that ran, with a unit.", show_default="that of the plan's target"),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Explain from a memory snapshot why a run needed more memory than its plan predicted."""
    from remat.cli.screen import live_line

    card_bytes = parse_bytes(card, what="--card") if card is not None else None
    with live_line() as line:
        line.say(f"reading {snapshot}")
        from remat.diagnosis.findings import diagnose
        from remat.diagnosis.snapshot import read
        from remat.evaluation.plan import Plan
        from remat.execution.regions_in_graph import require_regions_in

        found, loaded = read(snapshot), Plan.load(plan)
        step = _step(loaded, plan, profile, line)
        regions = require_regions_in(loaded, step.graph) if step is not None else ()
        diagnosis = diagnose(found, loaded, step, regions, card_bytes)
    return _answer(diagnosis, compared=step is not None)


def _step(plan: Plan, path: Path, profile: Path | None, line: LiveLine) -> Profile | None:
    """Return the step of the plan; None if nothing says how to build it."""
    from remat.cli.commands.source import opened_plan
    from remat.costing.profile import Profile

    if profile is not None:
        return Profile.load(profile)
    return opened_plan(path, line)[0].record()[0] if spec_in(plan.about, path) is not None else None


# The screen


def _answer(found: Diagnosis, *, compared: bool) -> Answer:
    data = {"verdict": found.verdict, **dataclasses.asdict(found)}
    return Answer(data, _text(found, compared=compared))


def _text(found: Diagnosis, *, compared: bool) -> str:
    from remat.cli.screen import aligned

    rows: list[tuple[str, ...]] = [
        ("predicted", gib(found.predicted_bytes), "at the peak, by the plan"),
        ("requested", gib(found.requested_bytes), "at the peak, by the snapshot"),
        ("reserved", gib(found.reserved_bytes), "by the caching allocator at most"),
    ]
    if (failed := found.out_of_memory) is not None:
        rows.append(("refused", gib(failed.size_bytes), f"{gib(found.wanted_bytes)} with it"))
    paragraphs = [aligned(rows)]
    for finding in found.findings:
        explains = f" (explains up to {gib(finding.explains_bytes)})" if finding.explains_bytes else ""
        remedy = f"\n  {finding.remedy}" if finding.remedy else ""
        paragraphs.append(f"{finding.kind}{explains}\n  {finding.sentence}{remedy}")
    if not compared:
        paragraphs.append("no comparison of sizes: the plan does not say how to build its model; add --profile")
    return "\n\n".join(paragraphs)
