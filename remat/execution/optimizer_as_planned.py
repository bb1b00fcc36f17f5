"""Whether the optimizer of a training script is what a plan counts on, for its memory."""

from __future__ import annotations

from torch import nn

from remat._torch.training import has_gradient_hooks
from remat.evaluation.plan import Plan
from remat.host.optimizer_state import is_offloaded
from remat.host.step_in_backward import is_stepped_in_backward
from remat.units import gib
from remat.workload.training_loop import TrainingLoop


def _may_be_stepped(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` is stepped in backward, or may be: by a hook of the script's own."""
    return is_stepped_in_backward(parameter) or has_gradient_hooks(parameter)


def unlike_planned(plan: Plan, parameters: list[nn.Parameter]) -> str | None:
    """Describe a setting that `plan` expects of the optimizer of `parameters` and that is missing; None if none is."""
    loop, peak = TrainingLoop.of(plan.about), gib(plan.predicted["peak_bytes"])
    if loop.offload_optimizer and parameters and not is_offloaded(parameters[0]):
        return (
            "the plan counts on the optimizer's state being on the host between steps, and it is on the device: the "
            f"peak may exceed the planned {peak} by all of it. Say `remat.offload_optimizer(optimizer)` once, when the "
            "optimizer is made."
        )
    if loop.step_in_backward and (whole := [p for p in parameters if not _may_be_stepped(p)]):
        return (
            "the plan counts on parameters that are stepped in backward, whose gradients are let go of at once, and "
            f"{len(whole)} of {len(parameters)} are not: the peak may exceed the planned {peak} by their gradients, "
            f"{gib(sum(p.nbytes for p in whole))}. Say `remat.step_in_backward(optimizer)` once, when the optimizer is "
            "made."
        )
    return None
