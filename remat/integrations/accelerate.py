"""A plan in a loop with Hugging Face accelerate.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, plan="gpt2.plan.json")

`accelerator.prepare` replaces the model's forward by one under autocast that hands out fp32, and wraps the model for
distributed training. A plan goes inside both, so it is applied first; applied afterwards, the regions would be traced
around the autocast, and none of the checks on dtypes would see it. With mixed precision the outputs are copied to
fp32: let the `step` of the Workload pass them through `outputs_in_fp32`, and the prediction knows.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.execution.accelerate_autocast import autocast_put_by, name_of
from remat.execution.apply import apply
from remat.execution.reports import OnLarger
from remat.integrations.settings import (
    optimizer_as_planned,
    outputs_in_fp32,
    require_autocast,
    warn_of_accumulation,
)

__all__ = ["outputs_in_fp32", "prepare"]

PRECISIONS = ("no", "bf16", "fp16")


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *others: Any,
    plan: Plan | str | os.PathLike[str],
    on_larger: OnLarger = "warn",
    verify_first_step: bool = True,
) -> Any:
    """Apply the plan to the model, then run `accelerator.prepare(model, *others)`; see `remat.apply`.

    Raises UsageError for a model that is prepared already, and for fp8; PlanMismatch for another mixed precision.
    """
    found = Plan.of(plan)
    if getattr(model, "_is_accelerate_prepared", False):
        raise UsageError("this model went through accelerator.prepare already; give it to remat's prepare instead.")
    precision = str(accelerator.mixed_precision)
    if precision not in PRECISIONS:
        raise UsageError(f"mixed_precision={precision!r} is not supported; choose {', '.join(PRECISIONS)}.")
    setting = f"Accelerator(mixed_precision={precision!r}) on {accelerator.device.type}"
    require_autocast(found, name_of(autocast_put_by(accelerator)), setting)
    warn_of_accumulation(found, accelerator.gradient_accumulation_steps, "the Accelerator")
    apply(model, found, on_larger=on_larger, verify_first_step=verify_first_step)
    for each in others:
        if isinstance(each, torch.optim.Optimizer):
            optimizer_as_planned(found, each)
    return accelerator.prepare(model, *others)
