"""Plot a sweep: a picture (PNG, SVG) by matplotlib, which is optional. `remat report` draws the interactive page."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import UsageError
from remat.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remat.planning.sweep import CurvePoint, Sweep

ENDINGS = (".png", ".svg")
X, Y = "peak memory of the training step, GiB", "added time, % of the step"
LABELS = {
    "none": "no checkpointing",
    "every-block": "every block (Hugging Face)",
    "every-n": "every n-th block",
    "first-k": "first k blocks",
    "sqrt-n": "sqrt(N) segments",
    "save-matmuls": "save matrix products",
    "greedy": "greedy",
    "chen-greedy": "Chen's greedy",
    "liger-like": "every block + Liger-like loss",
    "exact-whole-loss": "remat, bitwise gradients",
}
COLOUR = "#0b3d91"
OTHER_COLOURS = (
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c6d31",
    "#777777",
    "#5e3c99",
    "#b2182b",
    "#35978f",
)
MARKERS = ("s", "^", "D", "v", "P", "X", "p", ">", "<", "*")


def require(path: Path) -> None:
    """Raise where `path` cannot be drawn: UsageError for its ending, ModuleNotFoundError for a missing package."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(
            f"{path} cannot be drawn: a plot is a file that ends in .png or .svg. `remat report` draws a page."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def draw(sweep: Sweep, path: Path) -> None:
    """Write the plot that the ending of `path` asks for."""
    from matplotlib.figure import Figure

    require(path)
    figure = Figure(figsize=(8, 5.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    for series in _others(sweep):
        look: dict[str, Any] = {"linestyle": "", "markersize": 6, "markeredgewidth": 0, "alpha": 0.9}
        axes.plot(series.peaks, series.overheads, marker=series.marker, color=series.colour, label=series.label, **look)
    _draw_curve(axes, _curve(sweep))
    axes.set(xlabel=X, ylabel=Y, title=_title(sweep))
    axes.set_ylim(bottom=min(-1.0, -0.03 * axes.get_ylim()[1]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*_curve_first(axes), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


@dataclasses.dataclass(frozen=True)
class _Series:
    """The points of a strategy and how they look; `marker` is matplotlib's name."""

    label: str
    points: Sequence[CurvePoint]
    colour: str
    marker: str

    @property
    def peaks(self) -> list[float]:
        return [point.peak_bytes / GIB for point in self.points]

    @property
    def overheads(self) -> list[float]:
        return [100 * point.overhead for point in self.points]

    @property
    def bounds(self) -> list[float]:
        """The bound proved at the next point, in the same unit: it holds for all budgets in between."""
        proved = [
            100 * (point.bound_us or 0) * (1 + point.overhead) / (point.step_time_us or 1) for point in self.points
        ]
        return [*proved[1:], *proved[-1:]]


def _others(sweep: Sweep) -> Iterator[_Series]:
    for i, (name, points) in enumerate(sweep.by_strategy().items()):
        yield _Series(LABELS.get(name, name), points, OTHER_COLOURS[i % len(OTHER_COLOURS)], MARKERS[i % len(MARKERS)])


def _curve(sweep: Sweep) -> _Series:
    proved = all(point.status == "optimal" for point in sweep.points)
    label = "remat, proved optimal" if proved else "remat (hollow: not proved optimal)"
    return _Series(label, sweep.points, COLOUR, "o")


def _title(sweep: Sweep) -> str:
    about = sweep.about
    size = f"{about['batch_size']}" + (f" x {about['seq_len']}" if about["seq_len"] is not None else "")
    return f"{about['workload']}, batch {size}, on {sweep.target} ({sweep.costs} costs)"


def _draw_curve(axes: Axes, curve: _Series) -> None:
    """Draw a line through the points, and shade where the optimum between two points lies.

    It is no worse than the left point and no better than the bound of the right one.
    """
    look: dict[str, Any] = {"color": curve.colour, "markersize": 5, "zorder": 5}
    axes.plot(curve.peaks, curve.overheads, marker="o", linewidth=1.4, label=curve.label, **look)
    shade: dict[str, Any] = {"step": "post", "color": curve.colour, "alpha": 0.1, "linewidth": 0}
    axes.fill_between(curve.peaks, curve.overheads, curve.bounds, label="optimum between points", **shade)
    for point, peak, overhead in zip(curve.points, curve.peaks, curve.overheads, strict=True):
        if point.status != "optimal":
            axes.plot(peak, overhead, "o", markerfacecolor="white", **look)


def _curve_first(axes: Axes) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    return [*handles[-2:], *handles[:-2]], [*labels[-2:], *labels[:-2]]
