"""`remat plan`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.commands import Answer
from remat.commands.files import about_with, file_name, require_writable
from remat.commands.options import (
    Allocator,
    BudgetOptions,
    Compiler,
    Json,
    Regions,
    SearchOptions,
    SourceOptions,
    region_kind,
)
from remat.commands.source import budget_for, headroom_on_top, levers_where_infeasible, opened

if TYPE_CHECKING:
    from remat.commands.source import Source
    from remat.plans import Plan
    from remat.screen import LiveLine


def plan(
    budget: BudgetOptions,
    source: SourceOptions,
    search: SearchOptions,
    regions: Regions = "nodes",
    out: Annotated[
        Path | None, typer.Option(help="The plan file.", show_default="NAME.plan.json in this folder")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=2, help="How deep regions may nest; 1 for torch.compile.")] = 2,
    compiler: Compiler = None,
    allocator: Allocator = None,
    as_json: Json = False,
) -> Answer:
    """Find the fastest plan within a memory budget, and write it to a file."""
    from remat.screen import live_line

    kind = region_kind(regions)
    require_writable(out or Path("new.plan.json"))
    with live_line() as line:
        found = opened(source, line)
        limit = budget_for(budget, found.target, _usable(found) if compiler is None else None)
        if compiler is not None:
            from remat.planning_compiled import require_plannable

            require_plannable(compiler, found.place, found.loop, kind)
        profile, step = found.record()
        with headroom_on_top(limit), levers_where_infeasible(found, profile, limit, line):
            line.say("solving")
            if compiler is not None and step is not None:
                from remat.planning_compiled import plan_compiled

                limits, say = search.limits(line), functools.partial(_replaying, line, compiler)
                made = plan_compiled(profile, limit, step, compiler=compiler, limits=limits, on_replay=say)
            else:
                from remat.module_space import space_of
                from remat.planning import plan_profile

                space = space_of(profile.graph, kind, depth)
                made = plan_profile(
                    profile, limit, limits=search.limits(line), step=step, space=space, allocator=allocator
                )
    path = out or Path(f"{file_name(made.about['workload'])}.plan.json")
    about = {**about_with(found.spec, made.about, path), "headroom_bytes": limit.given_bytes - limit.limit_bytes}
    made = dataclasses.replace(made, about=about)
    made.save(path)
    return _answer(made, path, replayed=step is not None)


def _usable(found: Source) -> int | None:
    from remat.planning import usable_bytes
    from remat.profiling import Place

    return usable_bytes(found.place or Place(found.target, None))


def _replaying(line: LiveLine, compiler: str, number: int, most: int) -> None:
    line.say(f"replaying plans under {compiler}, {number} of at most {most}")


def _answer(plan: Plan, path: Path, *, replayed: bool) -> Answer:
    from remat.screen import plan_text

    data = {
        "model": plan.about["workload"],
        "budget_bytes": plan.budget_bytes + plan.about["headroom_bytes"],
        "headroom_bytes": plan.about["headroom_bytes"],
        "target": plan.target,
        "costs": plan.costs,
        "predicted": plan.predicted,
        "without_checkpointing": plan.without_checkpointing,
        "solver": plan.solver,
        "regions_are": plan.regions_are,
        "plan_path": str(path),
    }
    notes = [] if replayed else ["judged by the evaluator alone: a profile has no model to replay the plan on"]
    after = f"remat validate {path}"
    if compiler := plan.about.get("compiler"):
        after = f'torch.compile(remat.apply(model, "{path}"), backend="{compiler}")'
    notes += [f"wrote {path}", f"next: {after}"]
    return Answer(data, plan_text(plan) + "\n\n" + "\n".join(notes))
