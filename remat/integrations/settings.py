"""Compare a framework's settings of a step with those that a plan was made for.

`apply` notices most of it at the first forward. A framework says it earlier and in its own words, and knows one thing
that a forward cannot: over how many micro-batches gradients are accumulated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from remat.errors import PlanMismatch
from remat.evaluation.plan import Plan
from remat.host.optimizer_state import can_be_offloaded, offload_optimizer
from remat.host.step_in_backward import step_in_backward
from remat.host.weights import offload_weights
from remat.units import gib
from remat.warn import warn
from remat.workload.training_loop import TrainingLoop

LOW_PRECISION = (torch.float16, torch.bfloat16)


def require_autocast(plan: Plan, autocast: str | None, setting: str) -> None:
    """Raise PlanMismatch unless the plan is for `autocast`, a dtype or None, as `setting` requires."""
    planned = plan.about["autocast"]
    if planned != autocast:
        raise PlanMismatch(
            f"the plan is for {f'autocast to {planned}' if planned else 'no autocast'}, and {setting} means "
            f"{f'autocast to {autocast}' if autocast else 'none'}; change the setting or plan for the other dtype."
        )


def warn_of_accumulation(plan: Plan, micro_batches: int, setting: str) -> None:
    """Warn if gradients live through forward and the plan does not know."""
    if micro_batches > 1 and plan.about.get("accumulation", 1) == 1:
        count = plan.about.get("parameter_count")
        size = f" ({gib(4 * count)} in fp32)" if count else ""
        warn(
            f"{setting} accumulates gradients over {micro_batches} micro-batches, and the plan was made for one: the "
            f"peak may exceed the planned one by the gradients{size}. Plan with `accumulation={micro_batches}`.",
        )


def weights_as_planned(plan: Plan, model: nn.Module) -> None:
    """Bring the frozen weights of `model` to the host if the plan expects it and the script did not."""
    if layers := TrainingLoop.of(plan.about).weights_on_host:
        offload_weights(model, layers)


def require_no_clipping(plan: Plan, setting: str) -> None:
    """Raise PlanMismatch if the plan steps in backward, and `setting` clips gradients by the norm of all of them."""
    if TrainingLoop.of(plan.about).step_in_backward:
        raise PlanMismatch(
            f"the plan counts on an optimizer that steps in backward, and {setting} clips gradients by their norm, "
            "which is known when backward has ended; turn it off, or plan for a loop that steps as a whole."
        )


def optimizer_as_planned(plan: Plan, optimizer: Any) -> None:
    """Let `optimizer`, or the one that it wraps, step and store its state as the plan expects."""
    loop = TrainingLoop.of(plan.about)
    if not loop.offload_optimizer and not loop.step_in_backward:
        return
    while not can_be_offloaded(optimizer) and (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if loop.offload_optimizer:
        offload_optimizer(optimizer)
    if loop.step_in_backward:
        step_in_backward(optimizer)


def outputs_in_fp32(outputs: Any) -> Any:
    """Cast 16-bit tensors of a model's outputs to fp32, as accelerate does under mixed precision.

    For the `step` of a Workload that accelerate or the Trainer of transformers will run: the copies take memory.
    """
    return tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in LOW_PRECISION else leaf, outputs
    )
