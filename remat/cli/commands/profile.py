"""`remat profile`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import about_with, require_writable
from remat.cli.commands.options import Json, StepOptions
from remat.cli.commands.source import opened, require_state_alone
from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.costing.profile import Profile


def profile(
    step: StepOptions,
    out: Annotated[Path | None, typer.Option(help="The profile file.", show_default=False)] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE.csv",
            show_default=False,
            help="A table of the step's kernels, with their times where they are measured here, for "
            "`remat plan --costs`.",
        ),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Record a training step with its costs, for `--profile` on any machine, or its kernels, for `--costs`."""
    from remat.cli.screen import live_line

    if out is None and costs is None:
        raise UsageError("say what to write: --out FILE for a profile, --costs TABLE.csv for its kernels.")
    for path in (out, costs):
        if path is not None:
            require_writable(path)
    with live_line() as line:
        require_state_alone(step)
        source = opened(step, line)
        found, _ = source.record()
    notes = []
    if out is not None:
        graph = dataclasses.replace(found.graph, about=about_with(source.spec, found.graph.about, out))
        found = dataclasses.replace(found, graph=graph)
        found.save(out)
        notes += [f"wrote {out}", f"next: remat plan --profile {out} --budget auto"]
    if costs is not None:
        notes += _table_notes(found, costs)
    return _answer(found, out, costs, notes)


def _table_notes(profile: Profile, path: Path) -> list[str]:
    """Write the kernels of a profile as a table; return notes about it and the next step."""
    from remat.costing.kernel_files import save_table

    measured = profile.costs.source == "measured"
    times = [us if measured and us else None for us in profile.costs.time_us]
    about = {"device": profile.costs.device, "torch": profile.costs.about["torch"]} if measured else {}
    count = save_table(path, profile.graph.kinds, times, about)
    if measured:
        return [f"wrote {path}: {count} kernels, measured on {profile.costs.device}"]
    script = "remat/costing/kernel_calls.py"
    return [
        f"wrote {path}: {count} kernels without times",
        f"next, on the card: python kernel_calls.py {path} ({script})",
    ]


def _answer(profile: Profile, path: Path | None, table: Path | None, notes: list[str]) -> Answer:
    from remat.cli.screen import profile_text
    from remat.evaluation.evaluator import Memory

    graph, costs = profile.graph, profile.costs
    without_checkpointing = {
        "peak_bytes": Memory(graph, costs.workspace_per_op(graph)).peak_without_checkpointing,
        "step_time_us": profile.step_time_us,
    }
    data = {
        "model": graph.about["workload"],
        "target": profile.target.name,
        "costs": costs.source,
        "without_checkpointing": without_checkpointing,
        "nodes": len(graph.nodes),
        "operators": graph.op_count,
        "kinds": len(graph.kinds),
        "not_measured": costs.about.get("not_measured", []),
        "profile_path": None if path is None else str(path),
        "costs_path": None if table is None else str(table),
    }
    return Answer(data, profile_text(data, graph.about) + "\n\n" + "\n".join(notes))
