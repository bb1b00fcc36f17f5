"""Refused sizes in a plan: those that its search left out, since the model's own code fails at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from remat.units import first_few

REFUSED_SIZES = "refused_sizes"  # key of `Plan.about`
MOST_SIZES = 8  # that a sentence lists
MOST_NAMED, MOST_OF_ERROR = 10, 200  # sizes that a plan names, and characters of their errors


@dataclasses.dataclass(frozen=True)
class RefusedSize:
    """A batch size that the model refuses, at a sequence length if there is one, and its error in a line.

    more  other sizes that were refused, if a plan does not name them: of the last that it names
    """

    batch_size: int
    seq_len: int | None
    error: str
    more: int = 0

    def __str__(self) -> str:
        return str(self.batch_size) if self.seq_len is None else f"{self.batch_size} x {self.seq_len}"


def say_refused(refused: Sequence[RefusedSize]) -> str:
    """Say which sizes a model refuses, and why it refuses the last of them."""
    more = sum(each.more for each in refused) + len(refused[MOST_SIZES:])
    sizes = first_few(map(str, refused[:MOST_SIZES]), MOST_SIZES) + (f" and {more} more" if more else "")
    at = f", at {refused[-1]}" if refused[1:] else ""
    return f"the model refuses batches of {sizes} ({refused[-1].error}{at})"


def to_json(refused: Sequence[RefusedSize]) -> list[dict[str, Any]]:
    """Return the first sizes for a plan, with errors that are not long, and how many more there are."""
    named = [dataclasses.replace(each, error=each.error[:MOST_OF_ERROR]) for each in refused[:MOST_NAMED]]
    if left := len(refused) - len(named):
        named[-1] = dataclasses.replace(named[-1], more=left)
    return [dataclasses.asdict(each) for each in named]


def refused_sizes(about: Mapping[str, Any]) -> list[str]:
    """List a sentence if the search for a size left some out."""
    refused = [RefusedSize(**each) for each in about.get(REFUSED_SIZES, ())]
    return [f"{say_refused(refused)}: the search left them out"] if refused else []
