"""Reports of a planned model to the person who trains it, each of them once."""

from __future__ import annotations

from typing import Literal, get_args

from remat.errors import PlanMismatch, UsageError
from remat.warn import warn

OnLarger = Literal["warn", "refuse"]


class Reports:
    """The reports of one model so far, by key.

    on_larger  whether a report that a step may need more memory than planned is a warning or an error

    Raises UsageError for another `on_larger`.
    """

    def __init__(self, on_larger: OnLarger):
        if on_larger not in get_args(OnLarger):
            raise UsageError(f"`on_larger=` is 'warn' or 'refuse', not {on_larger!r}.")
        self.on_larger = on_larger
        self.made: set[str] = set()

    def warn(self, key: str, text: str) -> None:
        """Warn once."""
        if key not in self.made:
            self.made.add(key)
            warn(text)

    def excess(self, key: str, text: str) -> None:
        """Warn once that a step may need more memory than planned. Raises PlanMismatch where it is to be refused."""
        if self.on_larger == "refuse":
            raise PlanMismatch(text)
        self.warn(key, text)
