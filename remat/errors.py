"""Every error that a person can cause, each with the exit code that scripts rely on.

A message states the fact, the numbers and the remedy, in one sentence each. An argument of the library stands in
backticks with its equals sign: `ranks=`, `shard="zero3"`. The command line prints the message without a traceback, and
arguments as options (`cli.screen.as_options`). Anything that is not one of these errors exits with 1: output that
cannot be written, or a bug in remat.
"""

from __future__ import annotations

import reprlib
from typing import Any


class RematError(Exception):
    """An error that remat raises on purpose; base class of the others.

    Example:
        >>> try:
        ...     plan = remat.plan(workload, budget="20GiB")
        ... except remat.RematError as error:
        ...     print(error)
    """

    exit_code = 1


class UsageError(RematError):
    """An argument or option is wrong, a file cannot be read, or a package is missing.

    Example:
        >>> remat.plan(workload, budget="20")  # no unit
    """

    exit_code = 2


class CaptureError(RematError):
    """The model cannot be captured or planned; the message names the operator and the reason.

    Example:
        >>> try:
        ...     remat.profile(workload)
        ... except remat.CaptureError as error:
        ...     print(error)
    """

    exit_code = 2


class Infeasible(RematError):
    """No plan fits the budget, and this is proved.

    Attributes:
        minimum_budget_bytes: The least budget that a plan is known to keep; None if unknown. The message says if a
            smaller one may do.
        breakdown: Bytes at the peak of that plan, by category.

    Example:
        >>> try:
        ...     plan = remat.plan(workload, budget="1GiB")
        ... except remat.Infeasible as error:
        ...     plan = remat.plan(workload, budget=error.minimum_budget_bytes)
    """

    exit_code = 3

    def __init__(self, message: str, minimum_budget_bytes: int | None = None, breakdown: dict[str, int] | None = None):
        super().__init__(message)
        self.minimum_budget_bytes = minimum_budget_bytes
        self.breakdown = breakdown or {}


class DoesNotFit(RematError):
    """A step that was checked does not fit."""

    exit_code = 3


class ValidationFailed(RematError):
    """The measurement contradicts the plan: the planned step runs out of memory although it should fit.

    Example:
        >>> try:
        ...     report = remat.validate(workload, plan)
        ... except remat.ValidationFailed as error:
        ...     print(error)
    """

    exit_code = 4


class NoPlanInTime(RematError):
    """The search ended before any plan was found, by its time limit, an interrupt or its rounds. Nothing is proved.

    Attributes:
        least_peak_bytes: The least peak that the search saw; None if it saw none. Other plans may need less.

    Example:
        >>> try:
        ...     plan = remat.plan(workload, budget="20GiB", time_limit=5)
        ... except remat.NoPlanInTime:
        ...     plan = remat.plan(workload, budget="20GiB", time_limit=60)
    """

    exit_code = 5

    def __init__(self, message: str, least_peak_bytes: int | None = None):
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes


class PlanMismatch(RematError):
    """The plan does not belong to this model, dtype policy or shape; the message names the first difference.

    Example:
        >>> try:
        ...     loss = model(**batch).loss
        ... except remat.PlanMismatch:
        ...     remat.remove(model)
    """

    exit_code = 6


class FirstStepMismatch(PlanMismatch):
    """The first step under a plan gives other numbers than the model without it.

    Example:
        >>> remat.apply(model, plan, verify_first_step=False)  # trains without the check
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that a device or the host is out of memory."""
    cuda = type(error).__name__ == "OutOfMemoryError"  # torch's, which this module does not import
    return cuda or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def require_argument(name: str, value: Any, kinds: Any, takes: str) -> None:
    """Raise UsageError unless `value`, given as the argument `name`, is of `kinds`, which `takes` describes."""
    if not isinstance(value, kinds):
        raise UsageError(f"`{name}=` takes {takes}, not {reprlib.repr(value)}.")
