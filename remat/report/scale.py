"""Scales: where a value stands in a figure, and which round values are named at its edge.

Geometry is in parts of a thousand of a figure's sides (`SIDE`), so one SVG is stretched to any width, while labels are
text beside it that keeps its size. What is placed by style (labels, markers) is in percent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from remat.units import GIB, KIB, MIB

SIDE = 1000
_STEPS = (1, 2, 2.5, 5, 10)


@dataclasses.dataclass(frozen=True)
class Tick:
    """A named value: `at` in percent of the side."""

    at: float
    label: str


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values from `least` to `most` on one side of a figure."""

    least: float
    most: float

    def percent(self, value: float) -> float:
        """Return the place of `value` in percent; values outside are at the edge."""
        share = (value - self.least) / ((self.most - self.least) or 1.0)
        return round(100 * min(max(share, 0.0), 1.0), 3)

    def part(self, value: float) -> int:
        """Return the place of `value` in parts of `SIDE`."""
        return round(self.percent(value) * SIDE / 100)

    def ticks(self, unit: float, suffix: str) -> tuple[Tick, ...]:
        """Return round multiples of `unit`, about five of them."""
        step = nice_step((self.most - self.least) / unit, 5)
        first = math.ceil(self.least / unit / step - 1e-9)
        last = math.floor(self.most / unit / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (step * 10 % 1 > 1e-9 and step >= 0.1)
        return tuple(
            Tick(self.percent(i * step * unit), f"{i * step:.{digits}f}{suffix}") for i in range(first, last + 1)
        )


def nice_step(span: float, about: int) -> float:
    """Return the smallest round step that divides `span` into at most about `about` parts."""
    raw = max(span, 1e-9) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * step for step in _STEPS if power * step >= raw * (1 - 1e-9))


def unit_of(most_bytes: float) -> tuple[int, str]:
    """Return the unit in which `most_bytes` is shown."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if most_bytes >= unit // 2:
            return unit, name
    return 1, "B"


def area(begins: Sequence[int], tops: Sequence[int]) -> str:
    """Return the SVG path of a stepped area: `tops[i]` holds from `begins[i]` to the next one, in parts of `SIDE`."""
    return f"M{begins[0] if begins else 0} {SIDE}{_steps(begins, tops)}H{SIDE}V{SIDE}Z"


def line(begins: Sequence[int], tops: Sequence[int]) -> str:
    """Return the SVG path of such an area's upper edge."""
    return f"M{begins[0]} {SIDE - tops[0]}{_steps(begins, tops)}H{SIDE}" if begins else ""


def _steps(begins: Sequence[int], tops: Sequence[int]) -> str:
    return "".join(f"H{x}V{SIDE - y}" for x, y in _changes(zip(begins, tops, strict=True)))


def _changes(points: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Keep only the first of points with equal height."""
    before = None
    for x, y in points:
        if y != before:
            yield x, y
        before = y
