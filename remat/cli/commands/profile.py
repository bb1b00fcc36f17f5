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

if TYPE_CHECKING:
    from remat.costing.profile import Profile


def profile(
    out: Annotated[Path, typer.Option(help="The profile file.", show_default=False)],
    step: StepOptions,
    as_json: Json = False,
) -> Answer:
    """Record and cost a training step, for `--profile` on any machine."""
    from remat.cli.screen import live_line

    require_writable(out)
    with live_line() as line:
        require_state_alone(step)
        source = opened(step, line)
        found, _ = source.record()
    graph = dataclasses.replace(found.graph, about=about_with(source.spec, found.graph.about, out))
    found = dataclasses.replace(found, graph=graph)
    found.save(out)
    return _answer(found, out)


def _answer(profile: Profile, path: Path) -> Answer:
    from remat.cli.screen import profile_text
    from remat.evaluation.evaluator import Memory

    graph, costs = profile.graph, profile.costs
    without_checkpointing = {
        "peak_bytes": Memory(graph, costs.workspace_per_op(graph)).peak_without_checkpointing,
        "step_time_us": costs.step_time_us(graph),
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
        "profile_path": str(path),
    }
    notes = [f"wrote {path}", f"next: remat plan --profile {path} --budget auto"]
    return Answer(data, profile_text(data, graph.about) + "\n\n" + "\n".join(notes))
