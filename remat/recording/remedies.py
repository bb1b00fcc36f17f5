"""Remedies: what to do about a step that torch cannot run on fake tensors, where torch's own words do not say it."""

from __future__ import annotations

import traceback
from pathlib import PurePath

_TRANSFORMS = (
    ". It uses transforms of torch.func (grad, vjp, jvp, vmap, jacrev, hessian), which no checkpoint of torch works "
    "with. Write it with torch.autograd.grad(..., create_graph=True), or keep it out of the planned step"
)
_ATTENTION = (
    ", with or without a plan. Run the model under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), whose attention has second derivatives"
)


def describe(error: BaseException) -> str:
    """Describe an error: its kind, the first line of its message, and a remedy if one is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    remedy = _remedy(error, said)
    return f"{said.rstrip('.')}{remedy}" if remedy else said


def _remedy(error: BaseException, said: str) -> str:
    if "derivative for aten::_scaled_dot_product" in said:
        return _ATTENTION
    frames = traceback.extract_tb(error.__traceback__)
    return _TRANSFORMS if any("_functorch" in PurePath(frame.filename).parts for frame in frames) else ""
