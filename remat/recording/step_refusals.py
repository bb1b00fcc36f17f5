"""Refusals of a step that fails on fake tensors: where it fails, why, and what to write in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from remat.errors import CaptureError, UsageError
from remat.recording.remedies import OWN_BATCH, describe, line_of, uses_foreign
from remat.workload.batches import tensors_of
from remat.workload.workload import Workload

_FAKES_CANNOT = (DynamicOutputShapeException, UnsupportedFakeTensorException, UnsupportedOperatorException)


class StepFails(CaptureError):
    """The code of a step or of its batch fails by itself; `said` is its error, in a line."""

    def __init__(self, message: str, said: str):
        super().__init__(message)
        self.said = said


class CodeRaises(UsageError):
    """A function of the user's file, called by the command line, has raised an error; `said` is that error."""

    def __init__(self, message: str, said: str):
        super().__init__(message)
        self.said = said


def batch_raises(error: CodeRaises) -> Exception:
    """Return the refusal of a batch that was made for the command line, which knows the line: other sizes may do."""
    return error if error.__cause__ is None else _failing(str(error), error.said, error.__cause__)


def batch_fails(workload: Workload, error: Exception) -> CaptureError:
    if uses_foreign(error):
        return CaptureError(f"`batch` of {workload.name!r} uses a tensor{line_of(error)} {OWN_BATCH}")
    said = describe(error, line_of(error))
    message = f"`batch` of {workload.name!r} fails on fake tensors: {said}."
    if isinstance(error, DataDependentOutputException):  # as a DataLoader does
        return CaptureError(
            f"{message} Its shapes and dtypes are all that counts: make it with torch.zeros or torch.randint."
        )
    return _failing(message, said, error)


def batch_is_empty(workload: Workload) -> CaptureError:
    return StepFails(
        f"`batch` of {workload.name!r} gives tensors without elements for a batch size of {workload.batch_size}: make "
        "as many rows as it is asked for.",
        "`batch` gives tensors without elements",
    )


def _failing(message: str, said: str, error: BaseException) -> CaptureError:
    return CaptureError(message) if isinstance(error, _FAKES_CANNOT) else StepFails(message, said)


def forward_fails(workload: Workload, batch: Any, error: Exception) -> CaptureError:
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"the step of {workload.name!r} reads a number off a tensor (`item()`, `float()`, `if tensor`)"
            f"{line_of(error)}, and no tensor has data while planning. Compute without that number: choose by a "
            "mask (`torch.where`) in place of a count, read what is logged after the step (a hook: keep it, "
            "detached), or set a layer drop to 0. Flags and counters in a buffer of one number, or of few integers, "
            "are known unless a forward sets them by a batch or by weights: keep such a number in Python."
        )
    if uses_foreign(error) and not all(isinstance(each, FakeTensor) for each in tensors_of(batch)):
        return CaptureError(f"`batch` of {workload.name!r} returns a tensor {OWN_BATCH}")
    said = describe(error, line_of(error))
    return _failing(f"the step of {workload.name!r} fails on fake tensors: {said}.", said, error)


class NoLoss(CaptureError):
    """A step returns no loss with a gradient."""


def is_no_loss(workload: Workload, said: str) -> NoLoss:
    return NoLoss(
        f"`step` of {workload.name!r} must return the loss, a tensor of one number that requires grad, and returns "
        f"{said}."
    )


def backward_fails(workload: Workload, model: nn.Module, error: Exception) -> CaptureError:
    sparse = [path for path, module in model.named_modules() if getattr(module, "sparse", False) is True]
    reason = (
        f"the gradients of {', '.join(sparse)} are sparse, and their size depends on data. "
        "Plan with layers whose gradients are dense (sparse=False)"
        if sparse
        else describe(error).rstrip(".")
    )
    return CaptureError(f"the backward of {workload.name!r} fails on fake tensors: {reason}.")


def optimizer_fails(workload: Workload, trained: Collection[nn.Parameter], error: Exception) -> CaptureError:
    if not trained:
        return CaptureError(
            f"no parameter of {workload.name!r} requires a gradient, so its optimizer has nothing to step. Train some "
            "parameters, or plan with `optimizer=None`."
        )
    return CaptureError(
        f"the optimizer of {workload.name!r} fails on fake tensors: {describe(error)}. Plan with `optimizer=None`, "
        "and subtract its memory from the budget."
    )


def calls_differ(workload: Workload, counts: str, reads: str) -> CaptureError:
    """Refuse a step that calls its model now so, now otherwise; `reads` names lines that read random numbers."""
    return CaptureError(
        f"the step of {workload.name!r} does not call its model alike each time ({counts} calls in two "
        f"recordings{f'; a number that torch does not draw is read by {reads}' if reads else ''}): plan with a "
        "step that makes as many calls as a step ever does, always the same."
    )
