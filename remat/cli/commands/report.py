"""`remat report`: a plan, and what commands found about its step, as one page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import require_writable, spec_in
from remat.cli.commands.options import Json
from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.cli.screen import LiveLine
    from remat.costing.profile import Profile
    from remat.evaluation.plan import Offload, Plan, Region
    from remat.planning.advice import Lever
    from remat.report.material import Kind, Material

Documents = dict["Kind", list[tuple[Path, Any]]]


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN|PROFILE...",
            show_default=False,
            help="A plan or a profile. Beside it, in any order: more plans, and output of sweep --out and of --json of "
            "compare, validate, timeline.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    advice: Annotated[
        bool, typer.Option("--advice", help="Also list remedies with the bytes that each frees (about a minute).")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Write a report as one HTML page: curve, bytes over the step, decisions, proof."""
    from remat.cli.screen import live_line

    require_writable(out)
    with live_line() as line:
        line.say("reading files")
        documents = _read(files)
        if not documents.get("plan") and not documents.get("profile"):
            raise UsageError("a report needs a plan or a profile, and none is among these files.")
        material = _with_documents(_step(documents, line), documents)
        if advice:
            material = dataclasses.replace(material, levers=_levers(documents, line))
        line.say(f"writing {out}")
        from remat.files import write_atomically
        from remat.report.page import page_of, rendered

        page = page_of(material)
        text = rendered(page)
        write_atomically(out, text)
    data = {
        "path": str(out),
        "bytes": len(text.encode()),
        "model": material.about["workload"],
        "sentence": page.answer.sentence,
        "sections": list(page.sections),
    }
    size = f"{len(text.encode()) / 1000:,.0f} kB"
    return Answer(data, f"{page.answer.sentence}\n\nwrote {out} ({size}): {', '.join(page.sections)}")


def _read(files: Iterable[Path]) -> Documents:
    """Sort files by kind; plans and profiles are loaded, other documents stay as they are."""
    from remat.costing.profile import Profile
    from remat.evaluation.plan import Plan
    from remat.report.material import kind_of

    found: Documents = {}
    for path in files:
        kind = kind_of(_document(path), str(path))
        value: Any
        if kind == "plan":
            value = Plan.load(path)
        elif kind == "profile":
            value = Profile.load(path)
        else:
            value = _document(path)
        found.setdefault(kind, []).append((path, value))
        if kind != "plan" and len(found[kind]) > 1:
            first, second = (str(path) for path, _ in found[kind])
            raise UsageError(f"{first} and {second} are both of `{kind}`; a report takes one.")
    return found


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file at {path}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is no JSON document: {error}.") from error


def _step(documents: Documents, line: LiveLine) -> Material:
    """Return the plan and its step: from a profile, or recorded again as the plan says."""
    from remat.report.material import Material

    plans: Sequence[tuple[Path, Plan]] = documents.get("plan", [])
    profile: Profile | None = documents["profile"][0][1] if documents.get("profile") else None
    if not plans:
        return Material(profile=profile)
    (path, plan), others = plans[0], tuple((path.name, plan) for path, plan in plans[1:])
    for other, found in plans[1:]:
        _require_same_plan_step(plan, found, other)
    if profile is None and spec_in(plan.about, path) is not None:
        from remat.cli.commands.source import opened_plan

        profile, _ = opened_plan(path, line)[0].record()
    regions: tuple[Region, ...] = ()
    offloads: tuple[Offload, ...] = ()
    if profile is not None:
        from remat.execution.regions_in_graph import placed

        regions, offloads = placed(plan, profile.graph)
    return Material(plan=plan, others=others, profile=profile, regions=regions, offloads=offloads)


def _require_same_plan_step(plan: Plan, other: Plan, where: Path) -> None:
    names = ("workload", "batch_size", "seq_len")
    mine, its = ([each.target, *(each.about.get(name) for name in names)] for each in (plan, other))
    if mine != its:
        raise UsageError(f"{where} is a plan for another step ({its[1]} on {its[0]}); a report is about one step.")


def _with_documents(material: Material, documents: Documents) -> Material:
    from remat.report.material import require_same_step

    fields = {kind: found[0] for kind, found in documents.items() if kind not in ("plan", "profile")}
    for kind, (path, document) in fields.items():
        require_same_step(material, kind, document, str(path))
    return dataclasses.replace(material, **{kind: document for kind, (_, document) in fields.items()})


def _levers(documents: Documents, line: LiveLine) -> list[Lever]:
    """Find the levers that free memory of the step without a plan, by recording with each."""
    from remat.cli.commands.source import levers_of, opened_plan

    path = documents["plan"][0][0] if documents.get("plan") else None
    if path is None:
        raise UsageError("--advice records the step again with each remedy, and needs a plan that names its model.")
    found, _ = opened_plan(path, line, as_captured=True)
    profile, step = found.record()
    assert step is not None
    return levers_of(found, profile, step, line)
