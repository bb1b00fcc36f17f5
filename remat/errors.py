"""Every error that a person can cause, each with the exit code that scripts rely on.

A message states the fact, the numbers and the remedy, in one sentence each. An argument of the library stands in
backticks with its equals sign: `ranks=`, `shard="zero3"`. The command line prints the message without a traceback, and
arguments as options (`cli.screen.as_options`). Anything that is not one of these errors is a bug in remat and exits
with 1.
"""

from __future__ import annotations


class RematError(Exception):
    """Base of all errors that remat raises on purpose."""

    exit_code = 1


class UsageError(RematError):
    """A bad option, an unreadable file or a missing package."""

    exit_code = 2


class CaptureError(RematError):
    """The model cannot be captured or planned; names the operator and the reason."""

    exit_code = 2


class Infeasible(RematError):
    """No plan fits the budget."""

    exit_code = 3

    def __init__(self, message: str, minimum_budget_bytes: int | None = None, breakdown: dict[str, int] | None = None):
        super().__init__(message)
        self.minimum_budget_bytes = minimum_budget_bytes
        self.breakdown = breakdown or {}


class DoesNotFit(RematError):
    """A step that was checked does not fit."""

    exit_code = 3


class ValidationFailed(RematError):
    """The measurement contradicts the plan."""

    exit_code = 4


class NoPlanInTime(RematError):
    """The time limit or an interrupt came before any plan was found."""

    exit_code = 5


class PlanMismatch(RematError):
    """The plan does not belong to this model, dtype policy or shape."""

    exit_code = 6


class FirstStepMismatch(PlanMismatch):
    """The first step under a plan gives other numbers than the model without it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or the host has no more memory, in one of the ways to say it."""
    cuda = type(error).__name__ == "OutOfMemoryError"  # torch's, which this module does not import
    return cuda or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
