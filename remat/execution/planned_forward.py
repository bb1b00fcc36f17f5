"""The forward of a model that has a plan, whichever way the plan is run.

The model keeps its class, parameters and `state_dict`. Its `forward` becomes a `PlannedForward`: a training forward
runs as planned, everything else (evaluation, `no_grad`, `generate`) runs the original forward. A plan that does not
belong to the model raises `PlanMismatch`: a plan that silently does nothing would be worse than an error.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat.chunking.chunked_loss import Watch
from remat.evaluation.forwards import EVALUATES
from remat.evaluation.plan import Plan
from remat.execution.eager.offloading import Offloader
from remat.execution.eager.region_tape import Counts, RegionWatch
from remat.execution.first_step import FirstStep
from remat.execution.forwards import ModuleForward, StepForwards
from remat.execution.loop_as_planned import LoopAsPlanned
from remat.execution.model_as_planned import ModelAsPlanned
from remat.execution.reports import OnLarger, Reports
from remat.execution.second_step import SecondStep
from remat.fusion.fused_group import GroupWatch
from remat.units import gib
from remat.workload.replaced_forward import UnderPlan

NOT_COMPILED = (
    "a planned model runs uncompiled, within its budget: torch.compile would drop the plan's regions. For a compiled "
    "step within a budget leave the plan out and use remat.compile(model, budget=...)"
)

# Attributes in copies and pickles of a planned forward.
_COPIED_ATTRIBUTES = ("model", "plan", "_on_larger", "observe", "verify_first_step", "replaced", "_root")


class PlannedForward(UnderPlan, abc.ABC):
    """The forward of `model` under `plan`.

    replaced     the forward that was set on the model itself before; None if there was none
    shorter      forwards of the same model under the plan's plans for shorter batches
    chunk_watch, group_watch, region_watch  let `validate` look at what runs
    """

    def __init__(self, model: nn.Module, plan: Plan, on_larger: OnLarger, observe: bool, verify_first_step: bool):
        self.model, self.plan, self._on_larger = model, plan, on_larger
        self.observe, self.verify_first_step = observe, verify_first_step
        self.replaced = model.__dict__.get("forward")
        self._root = ModuleForward(self, "", model)

    def _prepare(self) -> None:
        """Make everything that copies and pickles leave out."""
        self.chunk_watch, self.region_watch, self.group_watch = Watch(), RegionWatch(), GroupWatch()
        is_on = self.verify_first_step
        self.first_step = FirstStep(self.model, self.plan, self.region_watch, self.chunk_watch, is_on=is_on)
        self.second_step = SecondStep(self.model, self.plan, is_on=is_on)
        self.reports = Reports(self._on_larger)
        self.forwards = StepForwards(self.plan)
        self._as_planned = ModelAsPlanned(self.model, self.plan, self.reports)
        self.loop = LoopAsPlanned(self.model, self.plan, self.forwards, self.second_step, self.reports)
        self.forwards.counted.notify(weakref.WeakMethod(self.loop.backward_ended))

    @property
    def shorter(self) -> Sequence[PlannedForward]:
        return ()

    @abc.abstractmethod
    def install(self) -> None:
        """Install everything but the forward of the model itself."""

    @abc.abstractmethod
    def take_out(self) -> None:
        """Undo `install`."""

    @abc.abstractmethod
    def run(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run the forward `at` of a module: under the plan where it trains."""

    @property
    @abc.abstractmethod
    def counts(self) -> Counts:
        """The counts of regions that ran."""

    @property
    def offloader(self) -> Offloader | None:
        """The copies between device and host of activations; None if there are none."""
        return None

    @abc.abstractmethod
    def watch(
        self,
        *,
        observe: bool,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Counts:
        """Set options of the regions, without tracing again; return their new counts.

        observe  see `apply`        recompute_context  context of recomputations and chunked losses
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self._root, args, kwargs)

    @property
    def original(self) -> Any:
        """The model's forward without the plan."""
        return self._root.original

    # Libraries read a forward's signature, its function without the model, and its code (torch.export).

    @property
    def __signature__(self) -> inspect.Signature:
        return self._root.__signature__

    @property
    def __func__(self) -> Callable[..., Any]:
        return self._root.__func__

    @property
    def __code__(self) -> types.CodeType:
        code: types.CodeType = self._root.original.__code__
        return code

    def _run_alone(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run a forward without the plan."""
        return at.original(*args, **kwargs)

    def _run_unplanned(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run a forward that does not train; report a backward that goes through it all the same."""
        self.second_step.interrupted()
        if not torch.is_grad_enabled():
            self.loop.forward_alone_begins()
        result = self._run_alone(at, args, kwargs)
        known = self.plan.about.get(EVALUATES) or "eval" in self.reports.made
        if torch.is_grad_enabled() and not known and not torch.compiler.is_compiling():
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._backward_through_evaluation)
                    break
        return result

    def _backward_through_evaluation(self, gradient: torch.Tensor) -> None:
        self.reports.warn(
            "eval",
            "a backward goes through a forward that ran without the plan, because the model is in evaluation mode "
            f"(as `from_pretrained` leaves it): call model.train() before training. The budget of "
            f"{gib(self.plan.budget_bytes)} is not kept.",
        )

    # Copies and pickles hold the model and the plan; graphs are traced again.

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COPIED_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()
