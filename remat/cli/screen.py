"""Output for a person: plans as aligned text, errors as one line, and a live line during long work.

Text goes to stdout when the work is done, everything else to stderr as it happens; the live line is drawn only where
stderr is a terminal. Times that come from estimated costs carry that word wherever they appear.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text
from rich.theme import Theme

from remat.evaluation.form import CAPTURED_FORM, LEFT_WHOLE, SLICED_OVERHEAD, WHOLE_LOSS_OVERHEAD, form_of
from remat.evaluation.graph import CHUNKED_ROWS, TRACED_ONLY
from remat.shown import step_text
from remat.units import gib, ms

if TYPE_CHECKING:
    from remat.evaluation.plan import NodeRef, OffloadRef, Plan, RegionRef

DEBUG = "REMAT_DEBUG"  # set in the environment: nothing is kept off the screen
INDENT = "  "
MOST_HANGING = 0.7  # of the width: text is not indented to a column that begins later
LOG_EVERY_S = 30.0
LIBRARIES = ("torch", "transformers", "huggingface_hub")  # whose warnings are about nothing a reader can change

# Readable on dark and light terminals; rich's own yellow and dark grey are not.
PROGRESS_STYLES = {"progress.elapsed": "cyan", "bar.back": "dim", "bar.complete": "green", "bar.finished": "green"}

_ARGUMENT = re.compile(r"`([a-z_]+)=('[^`']*'|\"[^`\"]*\"|[\w.]*)`")  # code of a user in backticks stays as it is
_OPTION_NAMES = {"time_s": "time-limit"}  # arguments whose option has another name


def as_options(message: str) -> str:
    """Turn arguments in `message` into options: `shard="zero3"` in backticks becomes --shard zero3."""
    return _ARGUMENT.sub(lambda found: f"--{_option(found[1])} {_value(found[2])}".rstrip(), message)


def _value(text: str) -> str:
    """Return the option's value; a switch has none."""
    return "" if text == "True" else text.strip("\"'")


def _option(argument: str) -> str:
    return _OPTION_NAMES.get(argument, argument.replace("_", "-"))


def aligned(rows: Iterable[tuple[str, ...]], indent: str = INDENT) -> str:
    """Format rows as text, every column but the last as wide as its widest entry."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in table), strict=True)]
    return "\n".join(
        (indent + "".join(f"{cell:{width}}   " for cell, width in zip(row, widths, strict=False)) + row[-1]).rstrip()
        for row in table
    )


def plan_text(plan: Plan) -> str:
    """Format a plan: its step, its cost, and its gap."""
    return "\n\n".join(
        [
            heading(plan.about, plan.target, plan.costs),
            aligned([*_promise(plan), *_form(plan), *_offloads(plan), *(_decision(plan) if plan.regions else ())]),
            *([] if plan.regions else [_without_regions(plan)]),
            *_caveats(plan),
            *([_by_length(plan)] if plan.shorter else []),
            f"at the peak, {plan.predicted['peak_at']}\n{breakdown_text(plan.predicted['breakdown'])}",
        ]
    )


def _by_length(plan: Plan) -> str:
    """Format the plans for batches of several lengths, shortest first."""
    rows = [
        (
            f"{each.about['seq_len']}",
            gib(each.predicted["peak_bytes"]),
            ms(each.predicted["step_time_us"]),
            f"{100 * each.predicted['overhead']:+.1f} %",
            gib(each.without_checkpointing["peak_bytes"]),
        )
        for each in (*plan.shorter, plan)
    ]
    (header,), lines = columns(("tokens", "peak", "step", "added", "without checkpointing"), rows)
    return "\n  ".join(["each batch uses the first plan with enough tokens", header, *lines])


def _caveats(plan: Plan) -> Iterator[str]:
    """Iterate over caveats: parts that a prediction leaves out, and side effects of the plan."""
    from remat.evaluation.caveats import caveats
    from remat.evaluation.plan import bound_by_host

    if plan.about.get("own_checkpoints"):
        yield (
            f"the model calls torch.utils.checkpoint itself ({_count(plan.about['own_checkpoints'], 'time')}): a plan "
            'ignores these calls, and "without checkpointing" excludes them'
        )
    yield from bound_by_host(plan)
    yield from caveats(plan.about)
    if unmeasured := plan.predicted.get("unmeasured_kernels"):
        yield (
            f"the peak excludes workspaces of {_count(unmeasured, 'kind')} of kernel that this machine could not "
            "measure; `remat validate` measures the peak"
        )


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> tuple[list[str], list[str]]:
    """Format a table: the first `names` columns are aligned left, the numbers after them right.

    Returns (lines of the header, lines of the rows); lines of a header cell are separated by newlines, aligned below.
    """
    titles = [title.split("\n") for title in header]
    height = max(map(len, titles))
    above = list(zip(*([""] * (height - len(title)) + title for title in titles), strict=True))
    table = [*above, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            f"{cell:{'<' if i < names else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return lines[:height], lines[height:]


def execution_notes(execution: str) -> Iterator[str]:
    """Iterate over notes about how the step runs, for readers of a table."""
    if execution == "modules":
        yield "regions are whole modules: they save nothing inside, and keep local variables alive"


def heading(about: dict[str, Any], target: str, costs: str) -> str:
    """Describe the step and the device that an output is about."""
    return f"{about['workload']} on {target}, costs {costs}: {step_text(about)}{_assumed(about)}"


def _assumed(about: dict[str, Any]) -> str:
    """Format a line with the assumptions of a prediction for a target by name."""
    if not about.get("assumes"):
        return ""
    attention = f"; attention: {' and '.join(about['attention'])}" if about["attention"] else ""
    missing = about["workspaces_not_counted"]
    left = f"; workspaces of {' and '.join(missing)} are estimates: the library chooses its kernels" if missing else ""
    return f"\nassumed: {about['assumes']}{attention}{left}{_priced_by(about.get('kernel_times'))}"


def _priced_by(shares: dict[str, Any] | None) -> str:
    """Format a line with the shares of the step's time that a table of kernels knows."""
    if shares is None:
        return ""
    signature, family, rest = (100 * shares[source] for source in ("signature", "family", "roofline"))
    return (
        f"\nkernel times: {signature:.0f} % of the step measured on {shares['measured_on']}, {family:.0f} % from other "
        f"sizes measured there, {rest:.0f} % by the roofline"
    )


_TRACED_NOTE = "for the traced step; the untraced step may need more"


def _promise(plan: Plan) -> list[tuple[str, ...]]:
    plain, predicted, headroom_bytes = plan.without_checkpointing, plan.predicted, plan.about.get("headroom_bytes", 0)
    left = f"less {gib(headroom_bytes)} of headroom: {gib(plan.budget_bytes)}" if headroom_bytes else ""
    return [
        ("without checkpointing", gib(plain["peak_bytes"]), _labelled(f"{ms(plain['step_time_us'])} a step", plan)),
        *([("", "", _TRACED_NOTE)] if TRACED_ONLY in plan.about else []),
        ("budget", gib(plan.budget_bytes + headroom_bytes), left),
        ("predicted peak", gib(predicted["peak_bytes"]), _labelled(f"{ms(predicted['step_time_us'])} a step", plan)),
        *_evaluator_row(plan),
        *reserved_rows(predicted.get("allocator", ())),
    ]


def _form(plan: Plan) -> list[tuple[str, ...]]:
    """Make rows for the changes of form: their cost, and the cost of a plan without them."""
    rows: list[tuple[str, ...]] = []
    form = form_of(plan.about)
    for each in form.chunks:
        what = f"{each.module or 'the head'}: logits are computed chunk by chunk, with their gradients"
        rows.append(("" if rows else "loss", _count(each.slices, "chunk"), what))
    if form.rows:
        runs = sum(node.op.startswith(CHUNKED_ROWS) for call in plan.identities for node in call)
        what = f"in {form.rows} chunks each, recomputed in backward"
        rows.append(("MLPs", f"{runs}", what))
    if form.fused:
        groups = sum(node.op.startswith("fused(") for call in plan.identities for node in call)
        inside = ", beside those inside MLPs" if form.rows else ""
        rows.append(("fused", _count(groups, "group"), f"of pointwise and reducing nodes, compiled as kernels{inside}"))
    if rows:
        extra = plan.predicted["form_time_us"] / (plan.without_checkpointing["step_time_us"] or 1.0)
        whole = plan.predicted.get(WHOLE_LOSS_OVERHEAD)
        parts = "fused kernels" if form.fused else "chunks"
        other = (
            "no plan without them (--exact) fits"
            if whole is None
            else f"without them (--exact) a plan adds {100 * whole:+.1f} %"
        )
        rows.append(("", f"{100 * extra:+.1f} %", f"added by the {parts} alone; {other}"))
    elif (sliced := plan.predicted.get(SLICED_OVERHEAD)) is not None:
        rows.append(("loss", "whole", f"not chunked: the gain is below 1 % (overhead {100 * sliced:.1f} % if chunked)"))
    if not form.chunks and (plan.regions or plan.offloads):
        rows += [("loss", "whole", f"not chunked: {why}") for why in plan.about.get(LEFT_WHOLE, ())]
    return rows


def _offloads(plan: Plan) -> list[tuple[str, ...]]:
    """Make rows for offloads: their bytes and their cost."""
    rows: list[tuple[str, ...]] = []
    if state := plan.predicted.get("state_host_bytes"):
        waits = f"each optimizer step waits {ms(plan.predicted['state_wait_us'])}"
        rows.append(
            ("optimizer", gib(state), _labelled(f"of state on the host between optimizer steps; {waits}", plan))
        )
    if layers := plan.about.get("layers_on_host"):
        wait_us = plan.predicted["weights_wait_us"]
        copied = "their copies hide behind the computation"
        copied = f"the step waits {ms(wait_us)} for their copies" if wait_us else copied
        size = gib(plan.predicted["weights_host_bytes"])
        rows.append(("weights", size, _labelled(f"of {len(layers)} frozen layers on the host; {copied}", plan)))
    if not plan.offloads:
        return rows
    stall = plan.predicted.get("stall_us", 0.0)
    waits = f"the step waits {ms(stall)} for them" if stall else "their copies hide behind the computation"
    what = f"{gib(plan.host_bytes)} on the host between forward and backward; {waits}"
    return [*rows, ("offloaded", _count(len(plan.offloads), "storage"), _labelled(what, plan))]


def _evaluator_row(plan: Plan) -> list[tuple[str, ...]]:
    """Make a row with the evaluator's error, if it differs from the replay on an eager plan."""
    evaluated = plan.predicted.get("evaluator_peak_bytes", plan.predicted["peak_bytes"])
    if (apart := evaluated - plan.predicted["peak_bytes"]) == 0 or plan.execution != "eager":
        return []
    return [("", f"{apart:+,} B", "error of the evaluator; the predicted peak is the replay's")]


def reserved_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Make rows for the caching allocator's bytes; `found` as `Footprint.to_json` gives it."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        settings, allocated = each["settings"] or "PyTorch's default allocator", gib(each["allocated_bytes"])
        what = f"simulated, {settings}; allocated {allocated}"
        rows.append(("" if rows else "reserved", gib(each["reserved_bytes"]), what))
    return rows


def _without_regions(plan: Plan) -> str:
    """Explain whether a plan that recomputes nothing has to be applied."""
    plain_bytes = plan.without_checkpointing["peak_bytes"]
    if plan.offloads:
        return "no recomputation: the step fits with offloading"
    if (form := form_of(plan.about)) != CAPTURED_FORM:
        return f"no recomputation: the step fits with {form}"
    if plain_bytes <= plan.budget_bytes:
        return "no checkpointing needed: the step fits"
    return (
        f"no recomputation, but apply this plan: the step fits because its forward is traced. Without the plan, local "
        f"variables of the model's code keep tensors alive, and it needs {gib(plain_bytes)}"
    )


def _decision(plan: Plan) -> list[tuple[str, ...]]:
    predicted, solver = plan.predicted, plan.solver
    nested = sum(bool(region.inner) for region in plan.regions)
    does = [
        *(["whole modules"] if plan.execution == "modules" else []),
        *([f"{nested} nested"] if nested else []),
        f"{_count(predicted['recomputed_nodes'], 'node')} recomputed",
        f"{_count(sum(map(_saves, plan.regions)), 'output')} saved",
    ]
    proof = f"gap {100 * solver['gap']:.2f} %, {solver['name']}, {solver['wall_s']:.1f} s"
    rows: list[tuple[str, ...]] = [
        (
            "overhead",
            f"{100 * predicted['overhead']:.1f} %",
            _labelled(f"{ms(predicted['recompute_time_us'])} of recomputation", plan),
        ),
        ("regions", f"{len(plan.regions)}", ", ".join(does)),
        ("solver", solver["status"], proof),
    ]
    if solver["status"] != "optimal":
        bound_us, price = solver["bound_us"], "added time" if form_of(plan.about) != CAPTURED_FORM else "recomputation"
        least = f"{ms(bound_us)} of {price}" if bound_us >= 0 else f"saves at most {ms(-bound_us)}"
        rows.append(("", "", _labelled(f"not proved optimal; lower bound: {least}", plan)))
    if solver.get("cut_short"):
        rows.append(("", "", "the search skipped some chunked or fused forms: raise --time-limit"))
    return rows


def _labelled(text: str, plan: Plan) -> str:
    return f"{text} (estimated)" if plan.costs == "estimated" else text


def profile_text(found: dict[str, Any], about: dict[str, Any]) -> str:
    """Format a profile; `found` is the output of `remat profile --json`."""
    plain = found["without_checkpointing"]
    estimated = " (estimated)" if found["costs"] == "estimated" else ""
    rows = [
        ("without checkpointing", f"{gib(plain['peak_bytes'])}   {ms(plain['step_time_us'])} a step{estimated}"),
        ("recorded", f"{found['nodes']} nodes, {found['operators']} operators of {found['kinds']} kinds"),
    ]
    if found["not_measured"]:
        rows.append(("not measured", ", ".join(sorted({row["op"] for row in found["not_measured"]}))))
    return f"{heading(about, found['target'], found['costs'])}\n\n{aligned(rows)}"


def breakdown_text(parts: dict[str, int]) -> str:
    """Format bytes by category, largest first; categories below one percent share one row."""
    total = sum(parts.values())
    large = {name: size for name, size in parts.items() if 100 * size >= total}
    rows = [(name, gib(size)) for name, size in sorted(large.items(), key=lambda item: -item[1])]
    if rest := total - sum(large.values()):
        rows.append(("other", gib(rest)))
    width = max((len(size) for _, size in rows), default=0)
    return aligned((name, f"{size:>{width}}") for name, size in rows)


def regions_text(plan: Plan) -> str:
    """Format every region: its nodes, and the nodes that it saves."""
    lines = []
    for number, region in enumerate(plan.regions, start=1):
        lines += _region_lines(region, f"region {number}", INDENT)
    return "\n".join(lines)


def offloads_text(plan: Plan) -> str:
    """Format every offload, in the order of the fetches: its storage, release and fetch."""
    rows = [
        (
            f"offload {number}",
            gib(each.size_bytes),
            f"{_place_of(each.node)}{'' if each.save is None else ' (saved there)'}",
            f"freed after {_slice_of(each)}{_place_of(each.release)}",
            f"fetched for {_place_of(each.fetch)}",
        )
        for number, each in enumerate(plan.offloads, start=1)
    ]
    return aligned(rows)


def _slice_of(planned: OffloadRef) -> str:
    return f"slice {planned.after_slices} of " if planned.after_slices else ""


def _region_lines(region: RegionRef, title: str, indent: str) -> list[str]:
    saved = f", {len(region.saved)} saved" if region.saved else ""
    random = f", {len(region.random)} random" if region.random else ""
    lines = [f"{indent}{title}   {_span(region)}   {_count(region.count_nodes(), 'node')}{saved}{random}"]
    if region.saved:
        names = [(f"{INDENT}saves {ref.name}", ref.module) for ref in region.saved]
        lines += aligned(names, indent).splitlines()
    for number, inner in enumerate(region.inner, start=1):
        lines += _region_lines(inner, f"inner {number}", indent + INDENT)
    return lines


def _span(region: RegionRef) -> str:
    first, last = _place_of(region.first), _place_of(region.last)
    call = f"call {region.call}: " if region.call else ""
    if region.module:
        return f"{call}{region.module} (module)"
    return call + (first if first == last else f"{first} .. {last}")


def _place_of(ref: NodeRef) -> str:
    return ref.module or f"`{ref.name}`"


def _saves(region: RegionRef) -> int:
    return len(region.saved) + sum(map(_saves, region.inner))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def put(answer: RenderableType, *, whole: bool = False) -> None:
    """Print an answer on stdout: on a terminal in colour and at its width; elsewhere, or if `whole`, unchanged."""
    console = Console(highlight=False)
    if isinstance(answer, str):
        print(fitted(answer, console.width) if console.is_terminal and not whole else answer)
    else:
        console.print(answer, soft_wrap=not console.is_terminal)
    sys.stdout.flush()


def fitted(text: str, width: int) -> str:
    """Break long lines of `text` between words, and indent the rest to their last column."""
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


_COLUMN = re.compile(r" {3,}(?=\S)")  # between the columns of `aligned`


def _broken(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    columns = [found.end() for found in _COLUMN.finditer(line)]
    hang = columns[-1] if columns and columns[-1] <= MOST_HANGING * width else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


# Beside the answer


def tell(label: str, message: str, style: str) -> None:
    """Print a line such as `error: ...` to stderr, on a terminal with its label in colour."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{label}: ", style), message), soft_wrap=not console.is_terminal)


class LiveLine:
    """Show progress on stderr; `say` and the two callbacks change it.

    On a terminal it is one line that is drawn again and again, and gone at the end. Elsewhere (a pipe, a log file) it
    is a line of its own now and then: nothing in the first half minute, and no more than one in each.
    """

    def __init__(self, progress: Progress, *, logs: bool = False, clock: Callable[[], float] = time.monotonic):
        self._progress, self._logs, self._clock = progress, logs, clock
        self._began = self._stage_began = self._logged = clock()
        self._stage = ""
        self._task = progress.add_task("", total=None)

    def say(self, what: str, number: int | None = None, count: int | None = None) -> None:
        """Show a stage; the `number`th of `count` similar ones, if there are several."""
        if number in (None, 1) or count is None:
            self._stage_began = self._clock()
        self._stage = what if count is None else f"{what}, {number} of {count}"
        self._progress.remove_task(self._task)  # a task that had a total keeps it
        done = 0 if number is None else number - 1
        self._task = self._progress.add_task(self._stage, total=count, completed=done)
        self._log(self._stage, done, count)

    def measured(self, done: int, total: int) -> None:
        """Show the progress of measuring."""
        what = "measuring operators"
        if not self._stage.startswith(what):
            self._stage, self._stage_began = what, self._clock()
        self._progress.update(self._task, description=what, completed=done, total=total)
        self._log(f"{what}, {done} of {total}", done, total)

    def solved(self, objective_us: float, bound_us: float) -> None:
        """Show the progress of a solver within a stage."""
        gap = 100 * max(objective_us - bound_us, 0.0) / max(objective_us, 1.0)
        proved = f"gap {gap:.1f} %" if bound_us > 0 else "no lower bound yet"
        found = f"{self._stage}: {ms(objective_us)} of recomputation, {proved}"
        self._progress.update(self._task, description=found)
        self._log(found, 0, None)

    def _log(self, what: str, done: int, total: int | None) -> None:
        now = self._clock()
        if not self._logs or now - self._logged < LOG_EVERY_S:
            return
        self._logged, took = now, now - self._stage_began
        left = f", about {took / done * (total - done):.0f} s left" if total and done else ""
        print(f"{now - self._began:.0f} s: {what}{left}", file=sys.stderr, flush=True)


class _Rest(ProgressColumn):
    """The estimate of the time left, if the total is known."""

    def render(self, task: Task) -> Text:
        rest = task.time_remaining if task.total is not None and task.completed else None
        return Text("" if rest is None else f"about {rest:.0f} s left", style="dim")


class _Share(ProgressColumn):
    """A bar, if the total is known."""

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else ProgressBar(task.total, task.completed, width=12)


quiet = False  # `--quiet`: no progress at all


@contextlib.contextmanager
def live_line() -> Iterator[LiveLine]:
    """Show a `LiveLine` for a while; on a terminal it leaves nothing behind."""
    console = Console(stderr=True, theme=Theme(PROGRESS_STYLES))
    description = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), TimeElapsedColumn(), description, _Share(), _Rest())
    shown = console.is_terminal and sys.stderr.isatty() and not quiet
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not shown, expand=True
    ) as progress:
        yield LiveLine(progress, logs=not shown and not quiet)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop the warnings of the libraries underneath, unless in debugging."""
    with warnings.catch_warnings():
        for library in () if os.environ.get(DEBUG) else LIBRARIES:
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
        yield


def quiet_torch() -> None:
    """Keep torch's log of tracebacks off the screen, unless in debugging; torch must be loaded already."""
    if not os.environ.get(DEBUG):
        logging.getLogger("torch").setLevel(logging.CRITICAL)
