"""A planned step: a plan for the whole computation of the loss, beyond the model's forward."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from remat.errors import UsageError, require_argument
from remat.evaluation.graph import WITH_STEP
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.execution.reports import OnLarger
from remat.workload.workload import Step, StepModule


def planned_step(
    step: Step,
    plan: Plan | str | os.PathLike[str],
    *,
    on_larger: OnLarger = "warn",
    verify_first_step: bool = True,
) -> PlannedStep:
    """Put `step` under a plan for `workload.with_planned_step()`.

    The model and its forward stay unchanged: only calls of the result run under the plan, in training mode with
    gradients on.

    Args:
        step: (model, batch) -> loss, as in the Workload.
        plan: A plan, or the path of its file.
        on_larger: As in `remat.apply`.
        verify_first_step: As in `remat.apply`.

    Returns:
        A function (model, batch) -> loss.

    Raises:
        UsageError: The plan cannot be read or is for a forward alone, or DistributedDataParallel has wrapped the model.
        PlanMismatch: As in `remat.apply`.

    Example:
        >>> step = remat.planned_step(step, "step.plan.json")
        >>> step(model, batch).backward()
    """
    if not callable(step):
        raise UsageError(f"planned_step needs a function (model, batch) -> loss, not {type(step).__name__}.")
    plan = Plan.of(plan)
    if not plan.about.get(WITH_STEP):
        raise UsageError(
            "the plan is for a model's forward: give it to remat.apply, or make one for "
            "`workload.with_planned_step()`, whose regions and slices reach as far as the loss."
        )
    return PlannedStep(step, plan, on_larger, verify_first_step)


class PlannedStep:
    """A step function that runs its models under a plan; keeps the models and their traces."""

    def __init__(self, step: Step, plan: Plan, on_larger: OnLarger, verify_first_step: bool):
        self.step, self.plan = step, plan
        self._options: dict[str, Any] = {"on_larger": on_larger, "verify_first_step": verify_first_step}
        self._known: dict[int, StepModule] = {}  # by the id of a model, which is kept

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss."""
        require_argument("model", model, nn.Module, "a module: call `planned(model, batch)`")
        stepped = self.of(model)
        stepped.training = model.training
        loss: torch.Tensor = stepped(batch)
        return loss

    def of(self, model: nn.Module) -> StepModule:
        """Return `model` and the step as one module with the plan in it."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise UsageError(
                "planned_step takes the model itself: what DistributedDataParallel does around its forward would be "
                "traced with it. Plan the model's forward, and apply that plan before the model is wrapped."
            )
        if id(model) not in self._known:
            self._known[id(model)] = apply(StepModule(model, self.step), self.plan, **self._options)
        return self._known[id(model)]

    def __getstate__(self) -> dict[str, Any]:
        """Give copies no models: a copy would know copies of them, by ids of these."""
        return {**self.__dict__, "_known": {}}
