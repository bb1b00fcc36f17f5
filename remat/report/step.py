"""Step: the bytes alive over the time of a step, by category, with what runs at each moment.

A figure has fewer columns than a step has operators: each column shows the highest moment that begins in it, so no
peak is lost. Every moment knows its node, and every node the spans of time in which it runs forward, is recomputed and
runs backward. That is what links the figure with the tree of decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region
from remat.offloading.link import Link
from remat.offloading.schedule import CopyTimes, copies
from remat.offloading.timeline import Timeline as CopyTimeline
from remat.planning.timeline import StepTimeline, timeline
from remat.report.material import Material
from remat.report.scale import SIDE, Scale, Tick, area, line, unit_of
from remat.units import gib, ms

COLUMNS = 900
ROWS = 16  # of the table
FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OUT, BACK = range(6)
STACK_ORDER = (  # categories in the order of the stack: lasting ones at the bottom
    *("parameters", "buffers", "optimizer state", "running average", "gradient buckets", "batch", "numbers"),
    *("library workspaces", "gathered shards", "gradients", "activations", "recomputed activations"),
    *("logits and loss", "temporaries of backward", "temporaries of the optimizer", "workspaces"),
)


@dataclasses.dataclass(frozen=True)
class Category:
    """One category in the figure: the edge of the stack up to it, and its bytes at the peak."""

    name: str
    slug: str
    path: str
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Level:
    """A horizontal line: the budget, the peak, a measured peak. `y` in percent."""

    name: str
    slug: str
    bytes: int
    y: float


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time in percent: its begin and its length."""

    begin: float
    length: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class ReportStep:
    """The figure, its table, and the data that links it with the rest of the page.

    columns  per column: time in parts of 10,000, phase, node (-1: none), and KiB by category
    spans    per node: (begin, end, phase), times in parts of 10,000; copies of its results are phases too
    lanes    copies to the host and back: name of the lane, and its spans
    copied   a row for each storage that is copied
    """

    categories: tuple[Category, ...]
    levels: tuple[Level, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    total_us: float
    peak_x: float
    peak_y: float
    peak_bytes: int
    phases: tuple[Span, ...]
    recomputed: tuple[Span, ...]
    lanes: tuple[tuple[str, tuple[Span, ...]], ...]
    copied: tuple[tuple[str, ...], ...]
    measured: str
    table: tuple[tuple[str, ...], ...]
    header: tuple[str, ...]
    columns: dict[str, Any]
    spans: list[list[tuple[int, int, int]]]
    notes: tuple[str, ...]
    summary: str


def step_of(material: Material) -> ReportStep | None:
    """Make the figure; None if the step is not at hand."""
    profile = material.profile
    if profile is None:
        return None
    budget = material.plan.budget_bytes if material.plan is not None else None
    made = timeline(profile, material.regions, budget, offloads=material.offloads, points=COLUMNS)
    graph, memory = profile.graph, material.memory
    ends, node_at, phase_at = _moments(profile, memory, material.regions)
    total_us = max(float(ends[-1]), 1e-9)
    x = Scale(0.0, total_us)
    levels = _levels(material, made)
    most = 1.06 * max(made.peak_bytes, *(size for _, _, size in levels))
    y = Scale(0.0, most)
    begins = [x.part(time) for time in made.time_us.tolist()]
    names = [name for name in (*STACK_ORDER, *made.parts) if name in made.parts and made.parts[name].any()]
    names = list(dict.fromkeys(names))
    unit, unit_name = unit_of(made.peak_bytes)
    at = int(made.alive_bytes.argmax())
    moved = _copies(material, profile, memory)
    spans = _spans(node_at, phase_at, ends, len(graph.nodes), total_us)
    _add_copies(spans, moved, graph.storages.node, total_us)
    return ReportStep(
        categories=tuple(_categories(made, names, begins, y, at))[::-1],
        levels=tuple(Level(name, slug, size, y.percent(size)) for name, slug, size in levels),
        x_ticks=x.ticks(1000.0, ""),
        y_ticks=y.ticks(unit, ""),
        unit=unit_name,
        total_us=total_us,
        peak_x=x.percent(made.peak_us),
        peak_y=y.percent(made.peak_bytes),
        peak_bytes=made.peak_bytes,
        phases=tuple(
            Span(x.percent(begin), round(x.percent(end) - x.percent(begin), 3), name)
            for name, (begin, end) in made.phases.items()
        ),
        recomputed=tuple(_stretches(phase_at == RECOMPUTE, ends, x)),
        lanes=tuple(_lanes(moved, x)),
        copied=tuple(_copied(moved, profile)),
        measured=_measured(material, y),
        table=tuple(_table(made, names)),
        header=("begins", *names, "in all"),
        columns=_columns(made, names, graph.op_node, graph.backward_end, graph.forward_end, total_us),
        spans=spans,
        notes=tuple(_notes(material)),
        summary=" ".join([_summary(made, total_us), *_copies_summary(moved)]),
    )


def slug_of(name: str) -> str:
    """Turn a category into the name of a style."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _moments(profile: Profile, memory: Memory, regions: Sequence[Region]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every operator that runs its end, its node (-1 in the optimizer) and its phase."""
    graph, curve = profile.graph, memory.curve(regions)
    took_us = np.where(curve.executed, profile.costs.per_op_us(graph)[curve.op], 0.0)
    phase = np.where(curve.op < graph.forward_end, FORWARD, BACKWARD)
    phase[curve.region >= 0] = RECOMPUTE
    phase[curve.op >= graph.backward_end] = OPTIMIZER
    node = np.where(phase == OPTIMIZER, -1, graph.op_node[curve.op])
    return np.cumsum(took_us), node, phase


def _levels(material: Material, made: StepTimeline) -> list[tuple[str, str, int]]:
    found = [("peak", "peak", made.peak_bytes)]
    if made.budget_bytes is not None:
        found.append(("budget", "budget", made.budget_bytes))
    if (validation := material.validation) is not None and _is_full_size(material):
        found.append(("measured peak", "measured", int(validation["measured"]["peak_bytes"])))
    return found


def _is_full_size(material: Material) -> bool:
    """Return whether the measured step is the planned one, not a smaller one."""
    validation = material.validation or {}
    return all(validation.get(name) == material.about.get(name) for name in ("batch_size", "seq_len"))


def _categories(made: StepTimeline, names: Sequence[str], begins: list[int], y: Scale, at: int) -> Iterator[Category]:
    """Yield every category with its edge, bottom first; drawn in reverse, each area covers a part of the last."""
    edge = np.zeros(len(begins))
    for name in names:
        edge = edge + made.parts[name]
        tops = [y.part(top) for top in edge.tolist()]
        yield Category(name, slug_of(name), area(begins, tops), int(made.parts[name][at]))


def _stretches(flags: np.ndarray, ends: np.ndarray, x: Scale) -> Iterator[Span]:
    """Yield runs of moments that `flags` marks, as spans."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    for first, end in edges.reshape(-1, 2).tolist():
        begin = x.percent(float(ends[first - 1])) if first else 0.0
        yield Span(begin, round(x.percent(float(ends[end - 1])) - begin, 3))


def _measured(material: Material, y: Scale) -> str:
    """Draw the measured moments on the predicted time, to compare shapes where the clocks differ."""
    measured = (material.timeline or {}).get("measured")
    if not measured or not measured["time_us"]:
        return ""
    time_us = np.array(measured["time_us"], dtype=np.float64)
    parts = np.round(SIDE * time_us / max(float(time_us[-1]), 1e-9)).astype(int)
    sizes = np.array(measured["bytes"], dtype=np.int64)
    columns = sorted(set(parts.tolist()))
    tops = [y.part(float(sizes[parts == column].max())) for column in columns]
    return line(columns, tops)


# Copies to the host and back


def _copies(material: Material, profile: Profile, memory: Memory) -> tuple[CopyTimes, ...]:
    """Return the copies of the plan's offloads over the target's link, by this step's times; empty without a link."""
    bandwidth = profile.target.host_bytes_per_us
    if not material.offloads or bandwidth <= 0:
        return ()
    when = CopyTimeline(memory, material.regions, profile.costs.per_op_us(profile.graph))
    return copies(when, material.offloads, Link(bandwidth, material.host_bytes))


def _lanes(moved: Sequence[CopyTimes], x: Scale) -> Iterator[tuple[str, tuple[Span, ...]]]:
    for name, way in (("copies to the host", "out_us"), ("copies back", "back_us")):
        ends = [getattr(each, way) for each in moved]
        if ends:
            yield name, tuple(Span(x.percent(a), round(x.percent(b) - x.percent(a), 3)) for a, b in ends)


def _copied(moved: Sequence[CopyTimes], profile: Profile) -> Iterator[tuple[str, ...]]:
    for each in moved:
        node = profile.graph.nodes[int(profile.graph.storages.node[each.storage])]
        name = f"{node.name} in {node.module}" if node.module else node.name
        yield (name, gib(each.size_bytes), *(f"{ms(a)} to {ms(b)}" for a, b in (each.out_us, each.back_us)))


def _add_copies(
    spans: list[list[tuple[int, int, int]]], moved: Sequence[CopyTimes], made_by: np.ndarray, total_us: float
) -> None:
    for each in moved:
        for phase, (begin, end) in ((OUT, each.out_us), (BACK, each.back_us)):
            places = (min(round(10_000 * time / total_us), 10_000) for time in (begin, end))
            spans[int(made_by[each.storage])].append((*places, phase))  # type: ignore[arg-type]


def _copies_summary(moved: Sequence[CopyTimes]) -> list[str]:
    if not moved:
        return []
    size = gib(sum(each.size_bytes for each in moved))
    last_out, first_back = max(each.out_us[1] for each in moved), min(each.back_us[0] for each in moved)
    return [
        f"{len(moved)} storages, {size}, are on the host by {ms(last_out)} and begin to come back at {ms(first_back)}."
    ]


def _table(made: StepTimeline, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the highest moment in each of `ROWS` equal stretches of the step."""
    for at in made.highest(ROWS):
        sizes = [gib(int(made.parts[name][at])) for name in names]
        yield (ms(float(made.time_us[at])), *sizes, gib(int(made.alive_bytes[at])))


def _columns(
    made: StepTimeline, names: Sequence[str], op_node: np.ndarray, backward_end: int, forward_end: int, total_us: float
) -> dict[str, Any]:
    phase = np.where(made.op < forward_end, FORWARD, BACKWARD)
    phase[made.recomputing] = RECOMPUTE
    phase[made.op >= backward_end] = OPTIMIZER
    node = np.where(phase == OPTIMIZER, -1, op_node[made.op])
    return {
        "time": np.round(10_000 * made.time_us / total_us).astype(int).tolist(),
        "phase": phase.tolist(),
        "node": node.tolist(),
        "kib": {name: (made.parts[name] >> 10).tolist() for name in names[::-1]},
    }


def _spans(
    node: np.ndarray, phase: np.ndarray, ends: np.ndarray, count: int, total_us: float
) -> list[list[tuple[int, int, int]]]:
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    borders = np.flatnonzero(np.diff(node) | np.diff(phase)) + 1
    for first, end in zip([0, *borders.tolist()], [*borders.tolist(), len(node)], strict=True):
        if node[first] >= 0:
            begin = float(ends[first - 1]) if first else 0.0
            places = (round(10_000 * time / total_us) for time in (begin, float(ends[end - 1])))
            found[int(node[first])].append((*places, int(phase[first])))  # type: ignore[arg-type]
    return found


def _notes(material: Material) -> Iterator[str]:
    if material.costs == "estimated":
        yield "Times are estimated from the target's data sheet: widths are estimates, heights are counted bytes."
    if material.offloads and material.profile is not None and material.profile.target.host_bytes_per_us > 0:
        rate = material.profile.target.host_bytes_per_us / 1000
        yield (
            f"Copies are drawn as a link of {rate:.0f} GB/s each way would carry them: an estimate, on which no byte "
            "depends."
        )
    if material.validation is not None and not _is_full_size(material):
        yield "The validation ran a smaller step than was planned, so its peak is not drawn here."
    if material.timeline is not None and material.timeline.get("measured"):
        yield "The measured curve is stretched to the predicted time."


def _summary(made: StepTimeline, total_us: float) -> str:
    at = int(made.alive_bytes.argmax())
    largest = sorted(made.parts, key=lambda name: -int(made.parts[name][at]))[:3]
    what = ", ".join(f"{name} {gib(int(made.parts[name][at]))}" for name in largest)
    budget = f", budget {gib(made.budget_bytes)}" if made.budget_bytes is not None else ""
    return f"Peak {gib(made.peak_bytes)} after {ms(made.peak_us)} of {ms(total_us)}{budget}. At the peak: {what}."
