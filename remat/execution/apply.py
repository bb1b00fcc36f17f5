"""Apply: install a plan in a model, in place, and take it out again."""

from __future__ import annotations

import os
from typing import TypeVar

from torch import nn

from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.execution.eager.rewrite import Counts
from remat.execution.executions import executor
from remat.execution.planned_forward import OnLarger, PlannedForward
from remat.workload.workload import WITH_STEP, Stepped

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Plan | str | os.PathLike[str],
    *,
    on_larger: OnLarger = "warn",
    observe: bool = False,
    verify_first_step: bool = True,
) -> Model:
    """Install `plan` in `model`, in place, and return the model. Call it before the optimizer is built.

    A second call replaces the first plan; `remove` takes it out again.

    on_larger  what to do at a batch larger than planned, or at anything else that may take more (parameters that were
               frozen, another compiler): warn, or refuse with PlanMismatch
    observe    count recomputed nodes (see `counts_of`), at the price of a Python call per node
    verify_first_step  hold the first training forward, and what its backward recomputes, to the model without the plan,
                       at the price of one more forward, once

    Raises UsageError for an unreadable plan or something that is not a module; PlanMismatch, at the first training
    forward, if the plan was made for another model, dtype policy or larger batch; FirstStepMismatch, there or in its
    backward, if it gives other numbers than the plan announces.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"apply needs a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if plan.about.get(WITH_STEP) and not isinstance(model, Stepped):
        raise UsageError(
            "the plan is for the model and the step that computes its loss: `step = remat.planned_step(step, plan)`, "
            "and then `loss = step(model, batch)`."
        )
    remove(model)
    planned = executor(plan.execution)(model, plan, on_larger, observe, verify_first_step)
    planned.install()
    model.forward = planned
    return model


def remove(model: Model) -> Model:
    """Take the plan out of `model`, in place; does nothing where there is none.

    Raises UsageError where something else, such as `accelerator.prepare`, was put around the plan.
    """
    planned = _planned_in(model)
    if planned is None:
        return model
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
    return planned_forward(model).calls.counts


def planned_forward(model: nn.Module) -> PlannedForward:
    """The forward that `apply` gave to `model`; raises UsageError where there is no plan."""
    planned = _planned_in(model)
    if planned is None:
        raise UsageError("no plan is applied to this model.")
    return planned


def has_plan(model: nn.Module) -> bool:
    return _planned_in(model) is not None


def _planned_in(model: nn.Module) -> PlannedForward | None:
    """The planned forward of `model`, itself or under what libraries wrap a forward in."""
    forward = model.__dict__.get("forward")
    while forward is not None and not isinstance(forward, PlannedForward):
        forward = getattr(forward, "planned", None) or getattr(forward, "__wrapped__", None)
    return forward
