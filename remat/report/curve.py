"""Curve: added time against peak, for this plan and for all that it can be compared with.

The curve itself is a sweep's. Without one there are this plan, its bound, the step as it is and whatever other plans
are known. Between two points of the curve the optimum lies in a rectangle: no worse than the plan of the smaller
budget, no better than what is proved of the larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.plan import Plan, device_overhead
from remat.report.material import Material
from remat.report.scale import SIDE, Scale, Tick, unit_of
from remat.units import gib, ms

Kind = Literal["plan", "curve", "open", "without", "other"]

GLYPHS = ("square", "triangle", "diamond", "down", "cross", "x", "pentagon", "right", "left", "star")
CURVE_GLYPH, PLAN_GLYPH, WITHOUT_GLYPH = "circle", "target", "ring"


@dataclasses.dataclass(frozen=True)
class Mark:
    """A plan in the figure. `x` and `y` in percent; `added` is its time over that without checkpointing, less 1."""

    label: str
    kind: Kind
    glyph: str
    series: int
    peak_bytes: int
    added: float
    facts: tuple[str, ...]
    budget_bytes: int | None = None
    x: float = 0.0
    y: float = 0.0


@dataclasses.dataclass(frozen=True)
class Series:
    name: str
    glyph: str
    number: int


@dataclasses.dataclass(frozen=True)
class ReportCurve:
    """The figure. `path` joins the points of a sweep, `band` is the range of the optimum between them."""

    marks: tuple[Mark, ...]
    series: tuple[Series, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    path: str
    band: str
    bound: tuple[float, float] | None
    budget_x: float | None
    notes: tuple[str, ...]
    summary: str


def curve_of(material: Material) -> ReportCurve:
    marks = [*_swept(material.sweep), *_others(material), *_own(material)]
    scale_x, scale_y = _scales(marks, material.plan)
    unit, name = unit_of(scale_x.most)
    placed = tuple(
        dataclasses.replace(mark, x=scale_x.percent(mark.peak_bytes), y=scale_y.percent(mark.added)) for mark in marks
    )
    points = [mark for mark in placed if mark.kind in ("curve", "open")]
    budget = material.plan.budget_bytes if material.plan is not None else None
    return ReportCurve(
        marks=placed,
        series=tuple(_series(placed)),
        x_ticks=scale_x.ticks(unit, ""),
        y_ticks=tuple(dataclasses.replace(tick, label=f"{tick.label} %") for tick in scale_y.ticks(0.01, "")),
        unit=name,
        path=_polyline(points),
        band=_band(points, material.sweep, scale_y),
        bound=_bound(material.plan, scale_x, scale_y),
        budget_x=scale_x.percent(budget) if budget is not None else None,
        notes=tuple(_notes(material)),
        summary=_summary(placed),
    )


# What there is


def _swept(sweep: Mapping[str, Any] | None) -> Iterator[Mark]:
    if sweep is None:
        return
    for point in sweep["points"]:
        proved = point["status"] == "optimal"
        yield _mark("best plan", "curve" if proved else "open", CURVE_GLYPH, 0, point)
    names = list(dict.fromkeys(point["strategy"] for point in sweep["others"]))
    for point in sweep["others"]:
        number = names.index(point["strategy"])
        yield _mark(point["strategy"], "other", GLYPHS[number % len(GLYPHS)], number + 1, point)


def _mark(label: str, kind: Kind, glyph: str, number: int, point: Mapping[str, Any]) -> Mark:
    facts = [
        f"peak {gib(point['peak_bytes'])}",
        f"{ms(point['recompute_time_us'])} recomputed, {100 * point['overhead']:+.1f} % of the step",
    ]
    if point.get("form_time_us"):
        facts.append(point["form"])
    if kind in ("curve", "open"):
        gap = f"within {100 * point['gap']:.2f} % of the best" if point.get("gap") is not None else "nothing proved"
        facts.append("proved optimal" if kind == "curve" else gap)
    if "regions" in point:
        facts.append(f"{point['regions']} regions, {point['saved']} outputs saved")
    budget = point.get("budget_bytes")
    return Mark(label, kind, glyph, number, point["peak_bytes"], point["overhead"], tuple(facts), budget)


def _others(material: Material) -> Iterator[Mark]:
    """Iterate over marks of a comparison's strategies, and of further plans."""
    known = {point["strategy"] for point in (material.sweep or {}).get("others", ())}
    count = len(known)
    own = material.plan.predicted["peak_bytes"] if material.plan is not None else None
    for row in (material.comparison or {}).get("rows", ()):
        if row["overhead"] is None or row["peak_bytes"] in (None, own) or row["strategy"] in known:
            continue
        count += 1
        facts = (f"peak {gib(row['peak_bytes'])}", f"{100 * row['overhead']:+.1f} % of the step")
        glyph = GLYPHS[(count - 1) % len(GLYPHS)]
        yield Mark(row["strategy"], "other", glyph, count, row["peak_bytes"], row["overhead"], facts)
    for name, plan in material.others:
        count += 1
        facts = (f"peak {gib(plan.predicted['peak_bytes'])}", f"{100 * plan.predicted['overhead']:+.1f} % of the step")
        at = (plan.predicted["peak_bytes"], plan.predicted["overhead"])
        yield Mark(name, "other", GLYPHS[(count - 1) % len(GLYPHS)], count, *at, facts, plan.budget_bytes)


def _own(material: Material) -> Iterator[Mark]:
    plan = material.plan
    if plan is not None:
        plain = plan.without_checkpointing
        facts = (f"peak {gib(plain['peak_bytes'])}", f"{ms(plain['step_time_us'])} a step")
        yield Mark("without a plan", "without", WITHOUT_GLYPH, -1, plain["peak_bytes"], 0.0, facts)
        predicted = plan.predicted
        facts = (
            f"peak {gib(predicted['peak_bytes'])} within {gib(plan.budget_bytes)}",
            f"{ms(predicted['step_time_us'])} a step, {100 * predicted['overhead']:+.1f} %",
        )
        at = (predicted["peak_bytes"], device_overhead(plan))
        yield Mark("this plan", "plan", PLAN_GLYPH, -2, *at, facts, plan.budget_bytes)


# How it looks


def _scales(marks: Sequence[Mark], plan: Plan | None) -> tuple[Scale, Scale]:
    peaks = [mark.peak_bytes for mark in marks] + ([plan.budget_bytes] if plan is not None else [])
    peaks = [peak for peak in peaks if peak <= 1.25 * max(mark.peak_bytes for mark in marks)]
    added = [0.0, *(mark.added for mark in marks)]
    room = 0.05 * (max(peaks) - min(peaks)) or 0.05 * max(peaks)
    height = max(max(added) - min(added), 0.01)
    return (
        Scale(max(0.0, min(peaks) - room), max(peaks) + room),
        Scale(min(added) - 0.06 * height, max(added) + 0.08 * height),
    )


def _series(marks: Sequence[Mark]) -> Iterator[Series]:
    """Iterate over the legend's entries, each once."""
    names = {"curve": "proved optimal", "open": "best found, not proved", "plan": "this plan", "without": "no plan"}
    seen = set()
    for mark in sorted(marks, key=lambda mark: (mark.kind == "other", mark.series)):
        key = (mark.kind, mark.series)
        if key not in seen:
            seen.add(key)
            glyph = f"{mark.glyph}-open" if mark.kind == "open" else mark.glyph
            yield Series(names.get(mark.kind, mark.label), glyph, mark.series)


def _polyline(points: Sequence[Mark]) -> str:
    return "M" + "L".join(f"{10 * p.x:.0f} {SIDE - 10 * p.y:.0f}" for p in points) if len(points) > 1 else ""


def _band(points: Sequence[Mark], sweep: Mapping[str, Any] | None, scale: Scale) -> str:
    """Draw the band between neighbours: the left one's time above, the right one's bound below."""
    if sweep is None or len(points) < 2:
        return ""
    step_us = sweep["without_checkpointing"]["step_time_us"] or 1.0
    bounds = [scale.part((row.get("bound_us") or 0.0) / step_us) for row in sweep["points"]]
    path = []
    for left, right, bound in zip(points, points[1:], bounds[1:], strict=False):
        x0, x1, top = f"{10 * left.x:.0f}", f"{10 * right.x:.0f}", f"{SIDE - 10 * left.y:.0f}"
        path.append(f"M{x0} {top}H{x1}V{SIDE - bound}H{x0}Z")
    return "".join(path)


def _bound(plan: Plan | None, scale_x: Scale, scale_y: Scale) -> tuple[float, float] | None:
    """Return (budget, proved least added time) in percent, if a plan proves one."""
    if plan is None or (least := least_added(plan)) is None:
        return None
    return scale_x.percent(plan.budget_bytes), scale_y.percent(least)


def least_added(plan: Plan) -> float | None:
    """Return the proved lower bound on the share of the step that a plan adds; None if there is none."""
    step_us = plan.predicted.get("device_us", plan.without_checkpointing["step_time_us"])
    bound_us = plan.solver.get("bound_us")
    if not step_us or not bound_us:
        return None
    return float(bound_us) / float(step_us)


def _notes(material: Material) -> Iterator[str]:
    if material.sweep is None:
        yield "No sweep was given: `remat sweep --out curve.json` writes the curve for this page."
    elif (
        material.plan is not None
        and (form := form_of(material.plan.about)) != CAPTURED_FORM
        and str(form) not in material.sweep.get("forms", ())
    ):
        yield (
            f"The sweep did not look at the form of the step that this plan runs ({form}), so it may be below the "
            "curve."
        )
    if material.sweep is not None and material.sweep.get("interrupted"):
        yield "The sweep was interrupted: points are missing."


def _summary(marks: Sequence[Mark]) -> str:
    """Describe the figure in words."""
    points = [mark for mark in marks if mark.kind in ("curve", "open")]
    said = []
    if points:
        first, last = points[0], points[-1]
        said.append(
            f"From {gib(first.peak_bytes)} at {100 * first.added:+.1f} % of the step to {gib(last.peak_bytes)} at "
            f"{100 * last.added:+.1f} %, {len(points)} plans, {sum(p.kind == 'curve' for p in points)} proved optimal."
        )
    said += [
        f"{mark.label[0].upper()}{mark.label[1:]}: {gib(mark.peak_bytes)}, {100 * mark.added:+.1f} %."
        for mark in marks
        if mark.kind in ("plan", "without")
    ]
    return " ".join(said)
