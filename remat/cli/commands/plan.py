"""`remat plan`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import about_with, file_name, require_writable
from remat.cli.commands.options import (
    Allocator,
    BudgetOptions,
    Exact,
    ExecutionOptions,
    Fuse,
    HostOptions,
    Json,
    SearchOptions,
    SourceOptions,
)
from remat.cli.commands.source import (
    budget_for,
    budget_of_step,
    headroom_on_top,
    levers_where_infeasible,
    opened,
    usable,
)

if TYPE_CHECKING:
    from remat.cli.screen import LiveLine
    from remat.evaluation.form import Form
    from remat.evaluation.plan import Plan


def plan(
    budget: BudgetOptions,
    source: SourceOptions,
    search: SearchOptions,
    how: ExecutionOptions,
    host: HostOptions,
    out: Annotated[
        Path | None, typer.Option(help="The plan file.", show_default="NAME.plan.json in this folder")
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2,
            show_default="as deep as the execution bears",
            help="How deep regions may nest; 1 for an eager plan that torch.compile can keep.",
        ),
    ] = None,
    allocator: Allocator = None,
    exact: Exact = False,
    fuse: Fuse = False,
    advice: Annotated[
        bool, typer.Option(help="Where the budget is too small, look for what would make room (it takes a while).")
    ] = True,
    as_json: Json = False,
) -> Answer:
    """Find the fastest plan within a memory budget, and write it to a file."""
    from remat.cli.screen import live_line

    require_writable(out or Path("new.plan.json"))
    with live_line() as line:
        line.say("loading PyTorch")
        from remat.execution.executions import load
        from remat.planning.planner import plan_profile
        from remat.planning.variants import can_cut

        execution = load(how.name)
        found = opened(source, line, execution, activations=True, weights=True)
        limit = budget_for(budget, found.target, usable(found) if execution.compiler is None else None)
        link = host.link(source.offload, found)
        profile, step = found.record()
        link = host.beside_state(link, profile, found)
        limit = budget_of_step(budget, limit, profile)
        if step is not None and "weights" in (source.offload or ""):
            line.say("solving for layers on the host")
            profile = host.with_layers_on_host(profile, step, execution, limit, found)
        with (
            headroom_on_top(limit),
            levers_where_infeasible(
                found,
                profile,
                limit,
                line,
                wanted=advice,
                losses_are_cut=lambda: (
                    not exact and depth != 1 and step is not None and can_cut(execution, step, profile)
                ),
            ),
        ):
            line.say("solving")
            made = plan_profile(
                profile,
                limit,
                limits=search.limits(line),
                step=step,
                execution=execution,
                depth=depth,
                allocator=allocator,
                exact=exact,
                fuse=fuse,
                link=link,
                on_variant=functools.partial(_forming, line),
                on_replay=None if execution.is_exact else functools.partial(_replaying, line, how.name),
            )
    path = out or Path(f"{file_name(made.about['workload'])}.plan.json")
    about = {**about_with(found.spec, made.about, path), "headroom_bytes": limit.given_bytes - limit.limit_bytes}
    made = dataclasses.replace(made, about=about)
    made.save(path)
    return _answer(made, path, replayed=step is not None)


def _replaying(line: LiveLine, execution: str, number: int, most: int) -> None:
    line.say(f"replaying plans as they run ({execution}), at most", number, most)


def _forming(line: LiveLine, form: Form) -> None:
    line.say(f"{form}: recording and solving")


def _answer(plan: Plan, path: Path, *, replayed: bool) -> Answer:
    from remat.cli.screen import plan_text
    from remat.execution.executions import load

    data = {
        "model": plan.about["workload"],
        "budget_bytes": plan.budget_bytes + plan.about["headroom_bytes"],
        "headroom_bytes": plan.about["headroom_bytes"],
        "target": plan.target,
        "costs": plan.costs,
        "predicted": plan.predicted,
        "without_checkpointing": plan.without_checkpointing,
        "solver": plan.solver,
        "execution": plan.execution,
        "chunks": plan.about.get("chunks", []),
        "fused": plan.about.get("fused", False),
        "offloads": len(plan.offloads),
        "plan_path": str(path),
    }
    notes = []
    if not replayed:
        notes.append(
            "judged by the evaluator alone, and the loss left whole: a profile has no model to replay or to cut"
        )
    notes += [f"wrote {path}", f"next: remat validate {path}"]
    if compiler := load(plan.execution).compiler:
        notes.append(f'in training: torch.compile(remat.apply(model, "{path}"), backend="{compiler}")')
    if plan.solver.get("interrupted"):
        notes.append("interrupted: this is the best plan found so far, and more time may find or prove a better one")
    return Answer(data, plan_text(plan) + "\n\n" + "\n".join(notes))
