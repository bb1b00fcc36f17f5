"""`remat compare`, and its screen: one line a strategy, with a bar for its peak against the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import about_with, file_name, require_folder
from remat.cli.commands.options import Advice, BudgetOptions, EachRequestOptions, Json, SourceOptions
from remat.cli.commands.source import Source, levers_where_infeasible, opened, workload_of
from remat.cli.commands.validate import measuring_first
from remat.errors import UsageError, ValidationFailed
from remat.units import gib, ms, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from remat.cli.screen import LiveLine
    from remat.planning.budget import Budget
    from remat.planning.comparison import Comparison, StrategyRow
    from remat.workload.workload import Workload

NARROWEST, WIDEST = 6, 44  # columns for a bar
MOST_BUDGETS = 1.5  # that a bar shows; a longer bar ends in an arrow


def compare(
    budget: BudgetOptions,
    source: SourceOptions,
    wanted: EachRequestOptions,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also run every plan that fits here, as `remat validate` does; minutes each on a CPU."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", show_default=False, help="Write every plan that fits to NAME.STRATEGY.plan.json there."
        ),
    ] = None,
    advice: Advice = False,
    as_json: Json = False,
) -> Answer:
    """Plan one step by several strategies under one budget, and show them side by side."""
    from remat.cli.screen import live_line

    if save is not None:
        require_folder(save.absolute() if save.exists() else save.absolute().parent, save)
    with live_line() as line:
        line.say("loading PyTorch")
        from remat.planning.comparison import compare_study

        found = opened(source, line)
        workload = _to_measure(found, source) if measure else None
        study = found.studied(wanted.request(line, source, budget), line)
        with levers_where_infeasible(found, study, line, wanted=advice):
            comparison = compare_study(
                study,
                strategies=wanted.names,
                on_strategy=lambda name, number, count: line.say(name, number, count),
            )
        files = _saved(comparison, save, found, study.budget) if save is not None and study.budget else {}
        if workload is not None:
            comparison = _measured(comparison, workload, line)
    return _answer(comparison, files)


def _to_measure(source: Source, options: SourceOptions) -> Workload:
    if source.spec is None:
        raise UsageError(f"{options.profile} does not say how to build its model, so nothing can be measured.")
    return workload_of(source.spec)


def _measured(comparison: Comparison, workload: Workload, line: LiveLine) -> Comparison:
    from remat.validation.measured_comparison import measure_plans

    return measure_plans(
        comparison,
        workload,
        on_strategy=lambda name: line.say(f"running {name}"),
        on_progress=measuring_first(line),
    )


def _saved(comparison: Comparison, folder: Path, source: Source, limit: Budget) -> dict[str, str]:
    """Save the plans, and return their files by strategy."""
    folder.mkdir(exist_ok=True)
    files = {}
    for row in comparison.rows:
        if row.fits and row.plan is not None:
            path = folder / f"{file_name(comparison.about['workload'])}.{row.strategy}.plan.json"
            dataclasses.replace(row.plan, about=about_with(source.spec, row.plan.about, path, limit)).save(path)
            files[row.strategy] = str(path)
    return files


def _answer(comparison: Comparison, files: dict[str, str]) -> Answer:
    failure = ValidationFailed("; ".join(comparison.failures)) if comparison.failures else None
    return Answer(
        {**comparison.to_json(), "plan_paths": files}, CompareScreen(comparison, tuple(files.values())), failure
    )


# The screen


@dataclasses.dataclass(frozen=True)
class CompareScreen:
    """A comparison as lines; bars take the room that is left beside them."""

    comparison: Comparison
    files: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        from remat.cli.screen import aligned, heading

        found = self.comparison
        plain = found.without_checkpointing
        yield Text(heading(found.about, found.target, found.costs) + "\n")
        yield Text(
            aligned(
                [
                    ("without checkpointing", gib(plain["peak_bytes"]), f"{ms(plain['step_time_us'])} a step"),
                    ("budget", gib(found.budget_bytes), ""),
                ]
            )
            + "\n"
        )
        yield from _table(found, options)
        if found.measured_on is not None:
            yield Text(f"\n{_measured_text(found)}")
        yield Text("\n" + "\n".join(_notes(found, self.files)))


def _table(found: Comparison, options: ConsoleOptions) -> Iterator[Text]:
    from rich.text import Text

    from remat.cli.screen import columns

    per_token, unit = found.about["seq_len"] is not None, gib(found.budget_bytes).split()[1]
    rate = "tokens\n/s" if per_token else "samples\n/s"
    titles = ("strategy", "fits", f"peak\n{unit}", "step\nms", "overhead\n%", rate, "gap\n%", "above\nbound %")
    header, lines = columns(titles, [_cells(row, unit, per_token) for row in found.rows])
    width = min(options.max_width - max(map(len, header)) - 2, WIDEST)
    above = ("peak against", "the budget") if width >= len("peak against") else ("", "peak")
    for line, title in zip(header, above, strict=True):
        yield Text(f"{line}  {title if width >= NARROWEST else ''}".rstrip(), style="bold")
    for line, row in zip(lines, found.rows, strict=True):
        yield Text.assemble(line, "  ", _bar(row, found, width, options.ascii_only), style="" if row.fits else "dim")


def _cells(row: StrategyRow, unit: str, per_token: bool) -> list[str]:
    def shown(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else f"{value / unit:{form}}"

    return [
        row.strategy,
        "yes" if row.fits else "no",
        shown(row.peak_bytes, ".2f", parse_bytes(f"1{unit}")),
        shown(row.step_time_us, ".1f", 1000),
        shown(row.overhead, ".1f", 0.01),
        shown(row.tokens_per_s, ",.0f") if per_token else shown(row.samples_per_s, ",.1f"),
        shown(row.gap, ".2f", 0.01),
        shown(row.above_bound, ".1f", 0.01),
    ]


def _bar(row: StrategyRow, found: Comparison, width: int, ascii_only: bool) -> Text:
    """Draw the peak as a bar with a mark at the budget; the part beyond it is red."""
    from rich.text import Text

    if row.peak_bytes is None:
        return Text("infeasible" if row.status == "infeasible" else "no plan in time")
    if width < NARROWEST:
        return Text()
    filled, mark, crossed, further = ("=", "|", "+", ">") if ascii_only else ("━", "│", "┿", "▸")
    most = max(found.budget_bytes, *(other.peak_bytes or 0 for other in found.rows))
    most = min(most, round(MOST_BUDGETS * found.budget_bytes))
    budget = min(round(width * found.budget_bytes / most), width - 1)
    peak = min(round(width * row.peak_bytes / most), width)
    peak = min(peak, budget) if row.fits else max(peak, budget + 1)
    within = Text(filled * min(peak, budget) + " " * (budget - peak), style="green" if row.fits else "")
    if peak <= budget:
        return within.append(mark, style="")
    beyond = crossed + filled * (peak - budget - 1)
    if row.peak_bytes > most:
        beyond = beyond[:-1] + further
    return within.append(beyond, style="red")


def _measured_text(found: Comparison) -> str:
    from remat.cli.screen import columns

    assert found.measured_on is not None
    on, about = found.measured_on, found.about
    header, lines = columns(
        ("strategy", "peak", "step"),
        [
            (row.strategy, gib(row.measured["peak_bytes"]), ms(row.measured["step_time_us"]))
            for row in found.rows
            if row.measured is not None
        ],
    )
    size, planned = _size(on), _size(about)
    instead = "" if size == planned else f", not the planned {planned}: compare them only with each other"
    return "\n".join([f"measured on {on['device']} at batch {size}{instead}", *header, *lines])


def _size(of: dict[str, Any]) -> str:
    return f"{of['batch_size']}" + (f" x {of['seq_len']}" if of["seq_len"] is not None else "")


def _notes(found: Comparison, files: Sequence[str]) -> Iterator[str]:
    from remat.cli.screen import execution_notes
    from remat.evaluation.plan import bound_by_host

    if found.bound_us:
        yield "gap: distance of a plan from its lower bound, as proved by its strategy"
        yield f"above bound: recompute time above {ms(found.bound_us)}, the lower bound of every plan within the budget"
    if found.costs == "estimated":
        yield "step times are estimated"
    if found.best is not None and found.best.plan is not None:
        yield from bound_by_host(found.best.plan)
    yield from execution_notes(found.execution)
    if found.execution == "modules":
        yield "strategies that join layers or save inside them have no plan here"
    best = found.best
    if best is None and (nearest := next((row for row in found.rows if row.peak_bytes is not None), None)):
        no = "no plan so far" if found.interrupted else "no plan"
        yield f"{no} fits; the closest, of strategy {nearest.strategy}, needs {gib(nearest.peak_bytes or 0)}"
        if all(row.bound_us is None for row in found.rows) and not found.interrupted:
            yield "next: add exact to --strategies, to find out whether any plan fits"
    elif best is not None and best.plan is not None and best.plan.predicted["judged_by"] != "replay":
        yield "a profile has no model: the evaluator computed the peaks"
    if found.interrupted:
        yield "interrupted: some strategies or measurements are missing"
    yield from (f"wrote {path}" for path in files)
    if files:
        yield f"next: remat validate {files[0]}"
    elif best is not None:
        yield "next: add --save FOLDER to write these plans, then `remat validate` one"
