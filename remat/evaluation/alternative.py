"""Alternative: one answer to a budget, beside the plan that was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

ALTERNATIVES = "alternatives"  # key of `Plan.about`


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One answer to a budget.

    numerics, offload  arguments of `remat.plan` that select it; `offload` is None if nothing goes to the host
    form               of the step, for a person
    peak_bytes, step_time_us, overhead, gap  as in a plan; None without a plan
    why                why there is no plan, else ""
    taken              whether it is the plan that was made
    """

    numerics: Literal["bitwise", "sums", "rounding"]
    offload: str | None
    form: str = ""
    peak_bytes: int | None = None
    step_time_us: float | None = None
    overhead: float | None = None
    gap: float | None = None
    why: str = ""
    taken: bool = False

    @property
    def options(self) -> str:
        """Options of the command line that select it."""
        offload = f" --offload {self.offload}" if self.offload else ""
        return f"--numerics {self.numerics}{offload}"


def in_two_lines(rows: Sequence[Alternative]) -> list[str]:
    """Format the menu in two lines for a log: added time of each other answer, and its options."""
    others = [row for row in rows if row.overhead is not None and not row.taken]
    if not others:
        return []
    added = ", ".join(
        f"{row.numerics}{' offloading' if row.offload else ''} {100 * (row.overhead or 0):+.1f} %" for row in others
    )
    return [f"other answers to this budget: {added}", 'taken by numerics="...", offload="activations"']


def alternatives_of(about: Mapping[str, Any]) -> tuple[Alternative, ...]:
    """Read the alternatives in a plan's `about`; none if it was made without a menu."""
    return tuple(Alternative(**row) for row in about.get(ALTERNATIVES, ()))
