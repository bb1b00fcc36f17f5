"""`remat plan`."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import about_with, file_name, require_writable
from remat.cli.commands.options import Advice, BudgetOptions, Json, RequestOptions, SourceOptions
from remat.cli.commands.source import Source, levers_where_infeasible, opened, workload_of
from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.cli.screen import LiveLine
    from remat.evaluation.form import Form
    from remat.evaluation.plan import Plan
    from remat.planning.request import PlanRequest


def plan(
    budget: BudgetOptions,
    source: SourceOptions,
    wanted: RequestOptions,
    out: Annotated[
        Path | None, typer.Option(help="The plan file.", show_default="NAME.plan.json in this folder")
    ] = None,
    menu: Annotated[
        bool | None,
        typer.Option(
            help="Compare plans of other numerics, with and without activation offloading.",
            show_default="on a terminal, without offloading",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Shorter batches that get plans of their own, in tokens, such as 512,1024. The longest is --seq-len.",
            show_default=False,
        ),
    ] = None,
    advice: Advice = True,
    as_json: Json = False,
) -> Answer:
    """Find the fastest plan within a memory budget, and write it to a file."""
    from remat.cli.screen import live_line

    require_writable(out or Path("new.plan.json"))
    with live_line() as line:
        line.say("loading PyTorch")
        from remat.costing.planning_device import PlanningDevice
        from remat.planning.menu import with_alternatives
        from remat.planning.planner import link_beside, plan_study
        from remat.planning.shorter import with_shorter

        found, request = opened(source, line), wanted.request(line, source, budget)
        shorter = _lengths(lengths, found, request)
        saying = functools.partial(_replaying, line, request.execution)
        study = found.studied(
            request,
            line,
            on_form=functools.partial(_forming, line),
            on_replay=None if request.how.runs_as_evaluated else saying,
        )
        line.say("solving")
        with levers_where_infeasible(found, study, line, wanted=advice):
            made = plan_study(study)
        if shorter:
            made = with_shorter(made, study, shorter, functools.partial(_planned_at, found, line))
        looks = sys.stdout.isatty() and not as_json and request.how.runs_forms and study.step is not None
        if looks if menu is None else menu:
            link = link_beside(study, found.place or PlanningDevice(found.target, None)) if menu else None
            made = with_alternatives(made, study, link, functools.partial(_comparing, line))
    limit = study.budget
    assert limit is not None
    path = out or Path(f"{file_name(made.about['workload'])}.plan.json")
    made = dataclasses.replace(made, about=about_with(found.spec, made.about, path, limit))
    made.save(path)
    return _answer(made, path, replayed=study.step is not None, lengths=shorter)


def _lengths(text: str | None, found: Source, request: PlanRequest) -> list[int]:
    """Read `--lengths`. Raises UsageError."""
    from remat.planning.shorter import require_lengths

    if text is None:
        return []
    if found.spec is None:
        raise UsageError("--lengths needs a model, and a profile has none: give --model in place of --profile.")
    try:
        lengths = [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"--lengths takes whole numbers of tokens, such as 512,1024, not {text!r}.") from None
    require_lengths(lengths, workload_of(found.spec).seq_len, request)
    return lengths


def _planned_at(found: Source, line: LiveLine, length: int, request: PlanRequest) -> Plan:
    from remat.planning.planner import plan_study

    assert found.spec is not None
    of_length = dataclasses.replace(found, spec=found.spec.changed(seq_len=length))
    study = of_length.studied(request, line)
    line.say(f"solving for {length} tokens")
    return plan_study(study)


def _replaying(line: LiveLine, execution: str, number: int) -> None:
    line.say(f"replaying plan {number} ({execution})")


def _forming(line: LiveLine, form: Form) -> None:
    line.say(f"{form}: recording and solving")


def _comparing(line: LiveLine, options: str) -> None:
    line.say(f"comparing with {options} (Ctrl-C: leave these rows out)")


def menu_text(plan: Plan) -> str:
    """Format the menu as a table, with the option that selects each row."""
    from remat.cli.screen import columns
    from remat.units import gib, ms

    rows, forms, above = [], [], ""
    for each in plan.alternatives:
        options = (
            each.options.replace(above, "  +", 1) if above and each.options.startswith(f"{above} ") else each.options
        )
        above = above if options != each.options else each.options
        known = ("", "", "")
        if each.overhead is not None and each.peak_bytes is not None and each.step_time_us is not None:
            known = (gib(each.peak_bytes), ms(each.step_time_us), f"{100 * each.overhead:+.1f} %")
        rows.append((">" if each.taken else "", options, *known))
        forms.append(each.form or each.why)
    (header,), lines = columns(("", "options", "peak", "step", "added"), rows, names=2)
    table = [f"{line}   {form}" for line, form in zip((header, *lines), ("form of the step", *forms), strict=True)]
    estimated = " (estimated)" if plan.costs == "estimated" else ""
    return "\n".join([f"other plans within this budget{estimated}; > marks the plan above", *table])


def _answer(plan: Plan, path: Path, *, replayed: bool, lengths: Sequence[int]) -> Answer:
    from remat.cli.screen import plan_text

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
        "alternatives": plan.about.get("alternatives", []),
        "shorter": [
            {"seq_len": each.about["seq_len"], "predicted": each.predicted, "solver": each.solver}
            for each in plan.shorter
        ],
        "plan_path": str(path),
    }
    menu = [menu_text(plan)] if plan.about.get("alternatives") else []
    notes = []
    if not replayed:
        notes.append("a profile has no model: the evaluator computed the peak, and the loss stays whole")
    if alike := sorted({*lengths} - {each.about["seq_len"] for each in plan.shorter}):
        tokens = ", ".join(map(str, alike))
        notes.append(
            f"no plan of its own for {tokens} tokens: none was found, or the next one adds less than 1 % of the step"
        )
    if not any(each.offload for each in plan.alternatives):
        others = "bitwise gradients, fused kernels and " if replayed else ""  # they are recorded anew
        notes.append(f"--menu compares this plan with {others}activation offloading")
    notes += [f"wrote {path}", f"next: remat validate {path}"]
    if plan.solver.get("interrupted"):
        notes.append("interrupted: this is the best plan so far; more time may find or prove a better one")
    return Answer(data, "\n\n".join([plan_text(plan), *menu, "\n".join(notes)]))
