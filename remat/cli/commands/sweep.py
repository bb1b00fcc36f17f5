"""`remat sweep`, and its screen: a table of the curve, and the curve and the other strategies as characters."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import require_writable
from remat.cli.commands.options import EachRequestOptions, Json, SourceOptions
from remat.cli.commands.source import opened
from remat.units import gib, ms, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from remat.planning.sweep import CurvePoint, Sweep

WIDEST, HEIGHT = 72, 14  # of the chart, in characters
CURVE, MARKS = "●", "□△◇▽✚×○▷◁☆▪▴"
NO_BREAK = "\u00a0"
MLPS = " + MLPs"
PLAIN_CURVE, PLAIN_MARKS = "@", "abcdefghijklmnopqrstuvwxyz"  # where there is only ASCII


def sweep(
    source: SourceOptions,
    wanted: EachRequestOptions,
    points: Annotated[int, typer.Option(min=2, max=1000, help="Budgets to solve for, at most.")] = 20,
    plot: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Draw the curve: .png or .svg."),
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default=False, help="Write the curve to a JSON file.")] = None,
    as_json: Json = False,
) -> Answer:
    """Trace the time of a step over budgets, from the least feasible one to no checkpointing.

    Ctrl-C keeps the points so far.
    """
    from remat.cli.screen import live_line

    for path in filter(None, (plot, out)):
        require_writable(path)
    if plot is not None:
        from remat.cli.plots.sweep_plot import require

        require(plot)
    with live_line() as line:
        line.say("loading PyTorch")
        from remat.planning.sweep import sweep_study

        study = opened(source, line).studied(
            wanted.request(line, source), line, on_form=lambda form: line.say(f"{form}: recording")
        )
        line.say("searching for the least feasible budget")
        swept = sweep_study(
            study,
            points=points,
            strategies=wanted.names,
            on_point=lambda name, number, count: line.say(f"{name}, point", number, count),
        )
    if out is not None:
        from remat.files import write_atomically

        write_atomically(out, json.dumps(swept.to_json(), indent=1) + "\n")
    if plot is not None:
        from remat.cli.plots.sweep_plot import draw

        draw(swept, plot)
    written = {name: str(path) for name, path in (("curve", out), ("plot", plot)) if path is not None}
    return Answer({**swept.to_json(), "paths": written}, SweepScreen(swept, tuple(written.values())))


# The screen


@dataclasses.dataclass(frozen=True)
class SweepScreen:
    """A sweep as lines."""

    sweep: Sweep
    files: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        from remat.cli.screen import aligned, columns, heading

        found, plain = self.sweep, self.sweep.without_checkpointing
        yield Text(heading(found.about, found.target, found.costs) + "\n")
        without = (
            "without checkpointing",
            gib(plain["peak_bytes"]),
            f"{ms(plain['step_time_us'])} a step on the device",
        )
        yield Text(aligned([without]) + "\n")
        unit = gib(plain["peak_bytes"]).split()[1]
        hosted = any(point.host_bytes for point in found.points)
        sliced = any(point.slices or point.rows for point in found.points)
        titles = (
            f"budget\n{unit}",
            f"peak\n{unit}",
            "step\nms",
            "overhead\n%",
            "gap\n%",
            "regions",
            "saved",
            "wall\ns",
            *([f"host\n{unit}"] if hosted else []),
            *(["loss\nchunks"] if sliced else []),
        )
        cells = [_cells(point, unit, hosted, sliced) for point in found.points]
        header, lines = columns(titles, cells, names=0)
        yield Text("\n".join(header), style="bold")
        yield Text("\n".join(lines) + "\n")
        yield from _chart(found, unit, options)
        yield Text("\n" + "\n".join(_notes(found, self.files)))


def _cells(point: CurvePoint, unit: str, hosted: bool, sliced: bool) -> list[str]:
    size = parse_bytes(f"1{unit}")
    return [
        f"{point.budget_bytes / size:.2f}",
        f"{point.peak_bytes / size:.2f}",
        f"{point.step_time_us / 1000:.1f}",
        f"{100 * point.overhead:.1f}",
        "-" if point.gap is None else f"{100 * point.gap:.2f}",
        f"{point.regions}",
        f"{point.saved}",
        f"{point.wall_s:.1f}",
        *([f"{point.host_bytes / size:.2f}"] if hosted else []),
        *([f"{point.slices or 'whole'}{MLPS if point.rows else ''}"] if sliced else []),
    ]


def _chart(found: Sweep, unit: str, options: ConsoleOptions) -> Iterator[Text]:
    """Draw overhead over peak, a character for every plan; the curve is drawn over the others."""
    from rich.text import Text

    curve, marks = (PLAIN_CURVE, PLAIN_MARKS) if options.ascii_only else (CURVE, MARKS)
    others = found.by_strategy()
    series = [(marks[i % len(marks)], points) for i, points in enumerate(others.values())]
    everything: Sequence[CurvePoint] = (*found.points, *found.others)
    least, most = (pick(point.peak_bytes for point in everything) for pick in (min, max))
    lowest = min(0.0, *(point.overhead for point in everything))
    highest = max(max(point.overhead for point in everything), lowest + 0.001)
    width, size = min(options.max_width - 9, WIDEST), parse_bytes(f"1{unit}")
    cells = [[" "] * width for _ in range(HEIGHT)]
    for mark, points in (*series, (curve, found.points)):
        for point in points:
            column = round((width - 1) * (point.peak_bytes - least) / max(most - least, 1))
            cells[round((HEIGHT - 1) * (highest - point.overhead) / (highest - lowest))][column] = mark
    side, corner, below = ("|", "+", "-") if options.ascii_only else ("│", "└", "─")
    for i, row in enumerate(cells):
        label = f"{100 * (lowest if i else highest):5.1f} %" if i in (0, HEIGHT - 1) else ""
        line = Text(f"{label:>7} {side}{''.join(row)}".rstrip())
        line.highlight_words([curve], "bold green")
        yield line
    left, right = f"{least / size:.2f}", f"{most / size:.2f} {unit}"
    yield Text(f"{'':8}{corner}{below * width}\n{'':9}{left}{right:>{width - len(left)}}")
    legend = [f"{curve} exact", *(f"{mark} {name}" for (mark, _), name in zip(series, others, strict=True))]
    glued = "  ".join(entry.replace(" ", NO_BREAK) for entry in legend)
    for text in textwrap.wrap(glued, width, break_on_hyphens=False):
        yield Text(f"{'':9}{text.replace(NO_BREAK, ' ')}", style="dim")


def _notes(found: Sweep, files: tuple[str, ...]) -> Iterator[str]:
    from remat.cli.screen import execution_notes
    from remat.planning.strategies import LIGER_LIKE, LOSS_WHOLE, NO_OFFLOAD, UNFUSED

    if found.costs == "estimated":
        yield "step times are estimated"
    yield from execution_notes(found.execution)
    unproved = sum(point.status != "optimal" for point in found.points)
    if unproved:
        yield f"{unproved} of {len(found.points)} points are not proved optimal; raise --time-limit"
    if found.interrupted:
        yield "interrupted: some points are missing"
    yield from (f"wrote {path}" for path in files)
    how = "" if found.execution == "eager" else f" --execution {found.execution}"
    others = found.by_strategy()
    if any(point.slices for point in found.points):
        yield "loss chunks: number of chunks of the loss; gradients of its weights are summed in another order"
    if rows := max((point.rows for point in found.points), default=0):
        yield f"{MLPS.strip()}: MLPs are chunked too, into {rows}; they are recomputed in backward"
    if LOSS_WHOLE in others:
        yield f"{LOSS_WHOLE}: the best without chunks, as with --exact"
    if LIGER_LIKE in others:
        yield f"{LIGER_LIKE}: every block, and the loss in the chunks of Liger-Kernel's head"
    if UNFUSED in others:
        yield f"{UNFUSED}: the best without fused kernels"
        how += " --fuse"
    if any(point.host_bytes for point in found.points):
        yield f"{NO_OFFLOAD}: the best without offloading"
        how += " --offload activations"
    yield f"next: remat plan{how} with one of these as --budget"
