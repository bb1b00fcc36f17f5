"""Budgets: what a person asks for, in bytes that a plan may request and the allocator may reserve."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat.costing.device_allocator import context_bytes
from remat.costing.planning_device import PlanningDevice
from remat.errors import UsageError
from remat.reservation.fragmentation import CONTEXT_BYTES
from remat.units import gib, parse_bytes, require_unit

AUTO_HEADROOM = "10%"
OF_STEP = "%step"  # the suffix of a share of the step's own peak


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget in bytes; `limit_bytes`, the given budget less the headroom, limits the peak of plans.

    reserved_bytes  limit on the bytes that the caching allocator reserves, simulated; None: no limit
    """

    given_bytes: int
    limit_bytes: int
    reserved_bytes: int | None = None


def is_share_of_step(budget: object) -> bool:
    """Return whether `budget` is a share of the step's peak without checkpointing, such as `60%step`."""
    return isinstance(budget, str) and budget.strip().lower().endswith(OF_STEP)


def require_budget(budget: Any) -> None:
    """Raise UsageError for a budget that cannot be read, whatever the device."""
    require_unit("budget", budget)
    if isinstance(budget, str) and budget != "auto":
        whole = budget.strip()[: -len("step")] if is_share_of_step(budget) else budget
        parse_bytes(whole, what="budget", whole_bytes=1)
    elif budget != "auto" and budget <= 0:
        raise UsageError(f"a budget is more than 0 bytes, and this is {budget!r}.")


def parse_budget(
    budget: str | int,
    headroom: str | int | None,
    memory_bytes: int,
    usable_bytes: int | None = None,
    step_bytes: int | None = None,
) -> Budget:
    """Parse `budget`: bytes, text with a unit, `90%` or `auto` of the target's memory, or `60%step`.

    headroom      subtracted first: bytes, text with a unit or a percentage of the budget; None is 0, and 10 % for an
                  `auto` without `usable_bytes`
    usable_bytes  bytes that an allocator can reserve, where it can be simulated; `auto` then limits reserved bytes
    step_bytes    peak of the step without checkpointing, for `60%step`

    Raises UsageError for text without a unit, an invalid number of bytes, or a headroom that leaves nothing.
    """
    require_unit("budget", budget)
    require_unit("headroom", 0 if headroom is None else headroom)
    if budget == "auto":
        given = memory_bytes if usable_bytes is None else usable_bytes
        headroom = AUTO_HEADROOM if headroom is None and usable_bytes is None else headroom
    elif not isinstance(budget, str):
        given = int(budget)
    elif is_share_of_step(budget):
        if step_bytes is None:
            raise UsageError(
                f"budget {budget!r} is a share of one step, and no step is recorded here; give it in GiB, or as 90%."
            )
        given = parse_bytes(budget.strip()[: -len("step")], what="budget", whole_bytes=step_bytes)
    else:
        given = parse_bytes(budget, what="budget", whole_bytes=memory_bytes)
        if "%" in budget and given > memory_bytes:
            raise UsageError(f"budget {budget!r} is more than the memory of the target, {gib(memory_bytes)}.")
    if given <= 0:
        raise UsageError(f"a budget is more than 0 bytes, and this is {budget!r}.")
    spare = headroom or 0
    spare = parse_bytes(spare, what="headroom", whole_bytes=given) if isinstance(spare, str) else int(spare)
    if given - spare <= 0:
        raise UsageError(f"a budget of {gib(given)} with a headroom of {gib(spare)} leaves nothing; raise the budget.")
    return Budget(given, given - spare, given - spare if budget == "auto" and usable_bytes is not None else None)


def usable_bytes(place: PlanningDevice) -> int | None:
    """Return the bytes that a CUDA card's caching allocator can reserve: memory less context; None without CUDA."""
    if place.target.device != "cuda":
        return None
    return place.target.memory_bytes - (CONTEXT_BYTES if place.device is None else context_bytes(place.device))
