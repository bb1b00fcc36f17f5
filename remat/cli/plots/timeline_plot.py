"""Plot a timeline: a picture (PNG, SVG by matplotlib) or an interactive page (HTML by plotly, works offline).

Categories are stacked from what lasts (parameters at the bottom) to what comes and goes, so that the flat part of the
picture is what no checkpointing can change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from remat.cli.plots.sweep_plot import require
from remat.planning.timeline import StepTimeline
from remat.units import GIB, MIB, gib

COLOURS = {
    "parameters": "#4d4d4d",
    "buffers": "#6b6b6b",
    "optimizer state": "#878787",
    "running average": "#a0a0a0",
    "gradient buckets": "#b8a9c9",
    "batch": "#cfcfcf",
    "numbers": "#cfcfcf",
    "gathered shards": "#d9c27a",
    "gradients": "#8c6d31",
    "activations": "#0b3d91",
    "recomputed activations": "#56b4e9",
    "logits and loss": "#e69f00",
    "temporaries of backward": "#d55e00",
    "temporaries of the optimizer": "#cc79a7",
    "workspaces": "#009e73",
}
OTHER_COLOUR = "#bbbbbb"
MEASURED, BUDGET = "#111111", "#b2182b"


def draw(timeline: StepTimeline, path: Path) -> None:
    """Write the plot that the ending of `path` asks for."""
    require(path)
    if path.suffix.lower() == ".html":
        _draw_page(timeline, path)
    else:
        _draw_picture(timeline, path)


def _ordered(timeline: StepTimeline) -> list[str]:
    known = [name for name in COLOURS if name in timeline.parts]
    return known + [name for name in timeline.parts if name not in COLOURS]


def _unit(timeline: StepTimeline) -> tuple[int, str]:
    return (GIB, "GiB") if timeline.peak_bytes >= GIB else (MIB, "MiB")


def _title(timeline: StepTimeline) -> str:
    about = timeline.about
    size = f"{about['batch_size']}" + (f" x {about['seq_len']}" if about["seq_len"] is not None else "")
    return f"{about['workload']}, batch {size}, on {timeline.target} ({timeline.costs} costs)"


def _stretched(timeline: StepTimeline) -> np.ndarray | None:
    """Stretch the measured moments to the predicted time, to compare shapes where the clocks differ."""
    if timeline.measured is None or not len(timeline.measured[0]):
        return None
    own = timeline.measured[0]
    return own * (float(timeline.time_us[-1]) / max(float(own[-1]), 1e-9))


def _draw_picture(timeline: StepTimeline, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=160, layout="constrained")
    axes = figure.subplots()
    (unit, name_of_unit), names = _unit(timeline), _ordered(timeline)
    time_ms = timeline.time_us / 1000
    stacked = [timeline.parts[name] / unit for name in names]
    colours = [COLOURS.get(name, OTHER_COLOUR) for name in names]
    axes.stackplot(time_ms, stacked, labels=names, colors=colours, linewidth=0, step="post")
    if (moments := _stretched(timeline)) is not None and timeline.measured is not None:
        axes.step(
            moments / 1000, timeline.measured[1] / unit, where="post", color=MEASURED, linewidth=0.9, label="measured"
        )
    if timeline.budget_bytes is not None:
        axes.axhline(timeline.budget_bytes / unit, color=BUDGET, linewidth=1.2, label="budget")
    axes.plot(timeline.peak_us / 1000, timeline.peak_bytes / unit, "v", color=MEASURED, markersize=5)
    axes.annotate(
        f"peak {gib(timeline.peak_bytes)}",
        (timeline.peak_us / 1000, timeline.peak_bytes / unit),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    for begin, _ in timeline.phases.values():
        axes.axvline(begin / 1000, color="#777777", linewidth=0.7, linestyle=":")
    for name, (begin, end) in timeline.phases.items():
        if end - begin > 0.04 * float(timeline.time_us[-1]):
            axes.text((begin + end) / 2000, -0.09, name, ha="center", fontsize=8, transform=axes.get_xaxis_transform())
    top = max(timeline.peak_bytes, timeline.budget_bytes or 0, *_measured_most(timeline)) / unit
    axes.set(ylim=(0, 1.1 * top), xlim=(0, float(time_ms[-1])), title=_title(timeline))
    axes.set_ylabel(f"bytes alive, {name_of_unit}")
    axes.set_xlabel("time of the step, ms", labelpad=12)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _measured_most(timeline: StepTimeline) -> list[int]:
    return [int(timeline.measured[1].max())] if timeline.measured is not None and len(timeline.measured[1]) else []


def _draw_page(timeline: StepTimeline, path: Path) -> None:
    from plotly import graph_objects

    (unit, name_of_unit), figure = _unit(timeline), graph_objects.Figure()
    time_ms = timeline.time_us / 1000
    for name in _ordered(timeline):
        figure.add_scatter(
            x=time_ms,
            y=timeline.parts[name] / unit,
            name=name,
            stackgroup="alive",
            line={"width": 0, "shape": "hv", "color": COLOURS.get(name, OTHER_COLOUR)},
            hovertemplate=f"{name} %{{y:.3f}} {name_of_unit}<extra></extra>",
        )
    if (moments := _stretched(timeline)) is not None and timeline.measured is not None:
        line = {"color": MEASURED, "width": 1, "shape": "hv"}
        figure.add_scatter(x=moments / 1000, y=timeline.measured[1] / unit, name="measured", mode="lines", line=line)
    if timeline.budget_bytes is not None:
        figure.add_hline(timeline.budget_bytes / unit, line_color=BUDGET, annotation_text="budget")
    figure.update_layout(
        title=_title(timeline),
        xaxis_title="time of the step, ms",
        yaxis_title=f"bytes alive, {name_of_unit}",
        template="plotly_white",
        hovermode="x unified",
    )
    figure.write_html(path, include_plotlyjs=True)
