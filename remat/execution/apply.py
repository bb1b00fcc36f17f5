"""Apply: install a plan in a model, in place, and take it out again."""

from __future__ import annotations

import os
from typing import TypeVar, cast

from torch import nn

from remat.errors import UsageError
from remat.evaluation.graph import WITH_STEP
from remat.evaluation.plan import Plan
from remat.execution.accelerate_autocast import beneath_autocast, is_under_autocast
from remat.execution.eager.region_tape import Counts
from remat.execution.executions import executor
from remat.execution.planned_forward import PlannedForward
from remat.execution.reports import OnLarger
from remat.workload.replaced_forward import forward_under_plan
from remat.workload.workload import StepModule

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Plan | str | os.PathLike[str],
    *,
    on_larger: OnLarger = "warn",
    observe: bool = False,
    verify_first_step: bool = True,
) -> Model:
    """Install `plan` in `model`, in place. Call it before the optimizer is built.

    A second call replaces the first plan; `remove` takes it out.

    Args:
        model: The model that the plan was made for.
        plan: A plan, or the path of its file.
        on_larger: "warn" or "refuse" (raise PlanMismatch) a batch larger than planned, and anything else that may need
            more memory (parameters that were frozen).
        observe: Count recomputed nodes, at the price of a Python call for each.
        verify_first_step: Compare the first training forward, and the values that its backward recomputes, with the
            model without the plan, at the price of one more forward, once.

    Returns:
        The same model.

    Raises:
        UsageError: The plan cannot be read, `model` is no module, or it went through `accelerator.prepare`.
        PlanMismatch: At the first training forward: the plan is for another model, dtype policy or larger batch.
        FirstStepMismatch: There, or in its backward: numbers differ from the model's by more than the plan announces.

    Example:
        >>> model = remat.apply(build_model(), "gpt2.plan.json")
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    _require_module(model)
    plan = Plan.of(plan)
    if plan.about.get(WITH_STEP) and not isinstance(model, StepModule):
        raise UsageError(
            "the plan is for the model and the step that computes its loss: `step = remat.planned_step(step, plan)`, "
            "and then `loss = step(model, batch)`."
        )
    if is_under_autocast(model):
        raise UsageError(
            "accelerate has wrapped the forward of this model (`accelerator.prepare`, for mixed precision): apply the "
            "plan before it is prepared."
        )
    remove(model)
    planned = executor(plan.execution)(model, plan, on_larger, observe, verify_first_step)
    planned.install()
    model.forward = planned
    return model


def remove(model: Model) -> Model:
    """Take the plan out of `model`, in place; do nothing if there is none. The autocast of accelerate stays.

    Args:
        model: A model that went through `apply`.

    Returns:
        The same model.

    Raises:
        UsageError: The forward was wrapped by something else after the plan was applied.

    Example:
        >>> model = remat.remove(model)
    """
    _require_module(model)
    planned = _planned_in(model)
    if planned is None:
        return model
    with beneath_autocast(model):
        if model.__dict__["forward"] is not planned:
            raise UsageError(
                "the forward of this model was wrapped after a plan was applied to it; apply and remove plans before "
                "the model is prepared."
            )
        planned.take_out()
        if planned.replaced is None:
            del model.__dict__["forward"]
        else:
            model.forward = planned.replaced
    return model


def counts_of(model: nn.Module) -> Counts:
    """Return the counts of regions entered and, with `observe`, of nodes recomputed in `model` so far."""
    planned = planned_forward(model)
    if not planned.shorter:
        return planned.counts
    every = [each.counts for each in (planned, *planned.shorter)]
    return Counts(sum(each.regions for each in every), sum(each.recomputed_nodes for each in every))


def planned_forward(model: nn.Module) -> PlannedForward:
    """Return the forward that `apply` gave to `model`. Raises UsageError if no plan is applied."""
    planned = _planned_in(model)
    if planned is None:
        raise UsageError("no plan is applied to this model.")
    return planned


def has_plan(model: nn.Module) -> bool:
    return _planned_in(model) is not None


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"a torch.nn.Module is needed, not {type(model).__name__}.")


def _planned_in(model: nn.Module) -> PlannedForward | None:
    return cast(PlannedForward | None, forward_under_plan(model))
