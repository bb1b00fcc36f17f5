"""What a person sees: plans as aligned text, errors as one line, and a live line while something takes long.

Text goes to stdout when the work is done, everything else to stderr as it happens; the live line is drawn only where
stderr is a terminal. Times that come from estimated costs carry that word wherever they appear.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from remat.plan import NodeRef, PlacedRegion, Plan
from remat.units import gib, ms

INDENT = "  "


def aligned(rows: Iterable[tuple[str, ...]], indent: str = INDENT) -> str:
    """Rows as text, every column but the last as wide as its widest entry."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in table), strict=True)]
    return "\n".join(
        indent + "".join(f"{cell:{width}}   " for cell, width in zip(row, widths, strict=False)) + row[-1]
        for row in table
    )


def plan_text(plan: Plan, *, headroom_bytes: int = 0) -> str:
    """A plan's promise: what it is for, what it costs, and how good it is."""
    plain, predicted = plan.without_checkpointing, plan.predicted
    parts = [
        f"{plan.about['workload']} on {plan.target}, costs {plan.costs}: {_step_of(plan.about)}",
        aligned(
            [
                ("without checkpointing", gib(plain["peak_bytes"]), _a_step(plain["step_time_us"], plan)),
                ("budget", gib(plan.budget_bytes + headroom_bytes), _headroom(plan, headroom_bytes)),
                ("predicted peak", gib(predicted["peak_bytes"]), _a_step(predicted["step_time_us"], plan)),
            ]
        ),
        f"{_decision(plan)}\n{aligned(_proof(plan), indent='')}",
        f"at the peak, {predicted['peak_at']}\n{breakdown_text(predicted['breakdown'])}",
    ]
    return "\n\n".join(parts)


def _step_of(about: dict[str, Any]) -> str:
    sizes = f"batch {about['batch_size']}"
    if about["seq_len"] is not None:
        sizes += f" x {about['seq_len']}"
    weights = " and ".join(about["parameter_dtypes"]) + " weights"
    autocast = f", {about['autocast']} autocast" if about["autocast"] else ""
    accumulated = f", accumulated over {about['accumulation']}" if about["accumulation"] > 1 else ""
    return f"{sizes}{accumulated}, {weights}{autocast}, {about['optimizer'] or 'no optimizer'}"


def _a_step(time_us: float, plan: Plan) -> str:
    estimated = " (estimated)" if plan.costs == "estimated" else ""
    return f"{ms(time_us)} a step{estimated}"


def _headroom(plan: Plan, headroom_bytes: int) -> str:
    if not headroom_bytes:
        return ""
    return f"less {gib(headroom_bytes)} of headroom: {gib(plan.budget_bytes)}"


def _decision(plan: Plan) -> str:
    if not plan.regions:
        return "no checkpointing needed: the whole step fits as it is"
    nested = sum(bool(region.inner) for region in plan.regions)
    regions = f"{_count(len(plan.regions), 'region')}" + (f", {nested} of them nested," if nested else "")
    return (
        f"{regions} recomputing {_count(plan.predicted['recomputed_nodes'], 'node')} and saving "
        f"{_count(sum(map(_saves, plan.regions)), 'output')}"
    )


def _proof(plan: Plan) -> list[tuple[str, ...]]:
    if not plan.regions:
        return [("overhead", "none")]
    predicted, solver = plan.predicted, plan.solver
    estimated = ", estimated" if plan.costs == "estimated" else ""
    rows = [
        (
            "overhead",
            f"{100 * predicted['overhead']:.1f} %  ({ms(predicted['recompute_time_us'])} of recomputation{estimated})",
        ),
        (
            "solver",
            f"{solver['name']}: {solver['status']}, gap {100 * solver['gap']:.2f} %, {solver['wall_s']:.1f} s",
        ),
    ]
    if solver["status"] != "optimal":
        rows.append(("", f"the best plan found; no plan recomputes for less than {ms(solver['bound_us'])}{estimated}"))
    return rows


def breakdown_text(parts: dict[str, int]) -> str:
    """Bytes by category, largest first; the small change below one percent of the whole in one row."""
    total = sum(parts.values())
    large = {name: size for name, size in parts.items() if 100 * size >= total}
    rows = [(name, gib(size)) for name, size in sorted(large.items(), key=lambda item: -item[1])]
    if rest := total - sum(large.values()):
        rows.append(("all else", gib(rest)))
    width = max((len(size) for _, size in rows), default=0)
    return aligned((name, f"{size:>{width}}") for name, size in rows)


def regions_text(plan: Plan) -> str:
    """Every region: its nodes, and what it saves."""
    lines = []
    for number, region in enumerate(plan.regions, start=1):
        lines += _region_lines(region, f"region {number}", INDENT)
    return "\n".join(lines)


def _region_lines(region: PlacedRegion, title: str, indent: str) -> list[str]:
    saved = f", {len(region.saved)} saved" if region.saved else ""
    random = f", {len(region.random)} random" if region.random else ""
    lines = [f"{indent}{title}   {_span(region)}   {_count(region.count_nodes(), 'node')}{saved}{random}"]
    if region.saved:
        names = [(f"{INDENT}saves {ref.name}", ref.module) for ref in region.saved]
        lines += [line.rstrip() for line in aligned(names, indent).splitlines()]
    for number, inner in enumerate(region.inner, start=1):
        lines += _region_lines(inner, f"inner {number}", indent + INDENT)
    return lines


def _span(region: PlacedRegion) -> str:
    first, last = _place_of(region.first), _place_of(region.last)
    call = f"call {region.call}: " if region.call else ""
    return call + (first if first == last else f"{first} .. {last}")


def _place_of(ref: NodeRef) -> str:
    return ref.module or f"`{ref.name}`"


def _saves(region: PlacedRegion) -> int:
    return len(region.saved) + sum(map(_saves, region.inner))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Beside the answer


def tell(label: str, message: str, style: str) -> None:
    """One line on stderr, such as `error: ...`, its label in colour on a terminal."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble((f"{label}: ", style), message))


class LiveLine:
    """The line on stderr that says what is going on; `say` and the two callbacks change it."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def say(self, what: str) -> None:
        """A stage of unknown length."""
        self._progress.reset(self._task, description=what, total=None, completed=0)

    def measured(self, done: int, total: int) -> None:
        """Progress of measuring."""
        self._progress.update(self._task, description="measuring operators", completed=done, total=total)

    def solved(self, objective_us: float, bound_us: float) -> None:
        """Progress of a solver."""
        gap = 100 * max(objective_us - bound_us, 0.0) / max(objective_us, 1.0)
        self._progress.update(
            self._task, description=f"solving: {ms(objective_us)} of recomputation, within {gap:.1f} % of the best"
        )


@contextlib.contextmanager
def live_line() -> Iterator[LiveLine]:
    """A `LiveLine` for a while; it leaves nothing behind, and draws nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    shown = console.is_terminal and sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        yield LiveLine(progress)
