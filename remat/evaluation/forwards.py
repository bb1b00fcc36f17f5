"""Forwards: the calls of a model that one step makes before its backward.

Most steps call their model once. A siamese encoder is called for every column of a batch, a critic on real and on fake
samples, a cell at every step of a roll-out; a step may also call modules of its model in place of the model itself
(`model.head(model.body(x))`). All of them are alive together until backward, so a plan is for the whole step: graph
calls are numbered through all forwards, and each forward has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

FORWARDS = "forwards"  # key of `Graph.about` and `Plan.about`; absent where the model is called once, and nothing else
EVALUATES = "evaluates"  # likewise: whether a backward goes through forwards of evaluation mode too
DIFFERENTIATES = "differentiates"  # likewise: whether a step differentiates within its forward
LOOKS = "looks"  # likewise: whether forwards without gradients run between a forward and its backward
PASSES = "passes"  # likewise: how many forwards with their backwards a step has; absent where it is one


@dataclasses.dataclass(frozen=True)
class Forward:
    """One call in a step.

    module    path of the module that is called; "" for the model itself
    first     its first graph call                    calls   number of its graph calls
    like      an earlier forward with the same graphs; its own number if there is none
    elements  of its input tensors, by name
    given     its arguments, as in `Graph.about["batch"]`
    masks     attention masks of its batch, as in `Graph.about["masks"]`
    autocast  the dtype of autocast, None without
    ended     whether a backward goes through it before the next forward (a step against an adversary of its own)
    """

    module: str
    first: int
    calls: int
    like: int
    elements: Mapping[str, int]
    given: Mapping[str, str]
    masks: Mapping[str, bool]
    autocast: str | None
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def forwards_of(about: Mapping[str, Any], graph_calls: int) -> tuple[Forward, ...]:
    """Read the forwards of a recorded step or a plan with `graph_calls` from its `about`."""
    if FORWARDS in about:
        return tuple(Forward(**row) for row in about[FORWARDS])
    masks = about.get("masks", {"padded": True, "packed": True})  # plans from before there was a choice
    given = about.get("batch_inputs", {}), about.get("batch") or {}
    return (Forward("", 0, graph_calls, 0, *given, masks, about["autocast"]),)


def is_plain(forwards: Sequence[Forward]) -> bool:
    """Return whether a step calls its model once, and nothing else."""
    return len(forwards) == 1 and not forwards[0].module


def without_sizes(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `about` without the sizes of the batch, which are not compared then."""
    kept = {name: value for name, value in about.items() if not name.startswith("batch_")}
    if FORWARDS in kept:
        kept[FORWARDS] = [{**row, "elements": {}} for row in kept[FORWARDS]]
    return kept
