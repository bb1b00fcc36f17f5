"""Apply: install a plan in a model, in place.

The model keeps its class, parameters and `state_dict`. Its `forward` becomes a `PlannedForward`: a training forward is
traced by Dynamo and run with the plan's regions, everything else (evaluation, `no_grad`, `generate`) runs the
original forward. A plan that does not belong to the model raises `PlanMismatch` at the first training forward: a plan
that silently does nothing would be worse than an error.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import fx, nn

from remat.capture import GraphCalls, element_count, forget_traces, frames_traced
from remat.errors import PlanMismatch, UsageError
from remat.graph import fingerprint
from remat.plans import Plan
from remat.record import module_path
from remat.replay import RewrittenCalls
from remat.rewrite import Counts, called, captured_nodes
from remat.units import gib

Model = TypeVar("Model", bound=nn.Module)
OnLarger = Literal["warn", "refuse"]


def apply(
    model: Model, plan: Plan | str | os.PathLike[str], *, on_larger: OnLarger = "warn", observe: bool = False
) -> Model:
    """Install `plan` in `model`, in place, and return the model. Call it before the optimizer is built.

    A second call replaces the first plan; `remove` takes it out again.

    on_larger  what to do at a batch larger than planned: warn, or refuse with PlanMismatch
    observe    count recomputed nodes (see `counts_of`), at the price of a Python call per node

    Raises UsageError for an unreadable plan or something that is not a module; PlanMismatch, at the first training
    forward, if the plan was made for another model, dtype policy or larger batch.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"apply needs a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    remove(model)
    model.forward = PlannedForward(model, plan, on_larger, observe)
    return model


def remove(model: Model) -> Model:
    """Take the plan out of `model`, in place; does nothing where there is none."""
    planned = model.__dict__.get("forward")
    if isinstance(planned, PlannedForward):
        if planned.replaced is None:
            del model.__dict__["forward"]
        else:
            model.forward = planned.replaced
    return model


def counts_of(model: nn.Module) -> Counts:
    """What the regions of `model` did so far: regions entered, and, with `observe`, nodes recomputed."""
    return planned_forward(model).calls.counts


def planned_forward(model: nn.Module) -> PlannedForward:
    """The forward that `apply` gave to `model`; raises UsageError where there is no plan."""
    planned = model.__dict__.get("forward")
    if not isinstance(planned, PlannedForward):
        raise UsageError("no plan is applied to this model.")
    return planned


class PlannedForward:
    """The forward of a model that has a plan."""

    def __init__(self, model: nn.Module, plan: Plan, on_larger: OnLarger, observe: bool):
        self.model = model
        self.plan = plan
        self.on_larger = on_larger
        self.observe = observe
        self.replaced = model.__dict__.get("forward")
        self._prepare()

    def _prepare(self) -> None:
        self.calls = RewrittenCalls(self.plan.regions, observe=self.observe)
        self._fitting: dict[int, fx.GraphModule] = {}  # kept, so that an id stays its own
        self._warned: set[str] = set()
        self._mismatch: PlanMismatch | None = None
        self._device = "cpu"
        self._graphs: GraphCalls | None = None

    @property
    def original(self) -> Any:
        """The forward without the plan."""
        return self.replaced or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.model.training):
            return self.original(*args, **kwargs)
        if self._graphs is None:
            self._compare_parameters()
            self._graphs = GraphCalls(self.original, self._run_call)
        self._compare_autocast()
        self._compare_batch(args, kwargs)
        known, traced, self._mismatch = len(self._fitting), frames_traced(), None
        try:
            result = self._graphs(*args, **kwargs)
        except Exception as error:
            if frames_traced() > traced:
                forget_traces()
            if self._mismatch is None or not _out_of_memory(error):
                raise
            raise self._mismatch from error
        if self._mismatch is not None:
            raise self._mismatch
        self._compare_calls(self._graphs.count)
        if len(self._fitting) > known:
            self._compare_trainable()
        return result

    def watch(
        self,
        *,
        observe: bool,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Counts:
        """From now on run the regions with these options, without tracing again; returns their new counts.

        observe  see `apply`        recompute_context  what recomputations run under
        """
        self.calls = RewrittenCalls(self.plan.regions, observe=observe, recompute_context=recompute_context)
        return self.calls.counts

    def _run_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        if id(graph_module) not in self._fitting:
            # A forward that is about to raise has another graph: its own error counts, so this one waits for the end.
            self._mismatch = self._mismatch or self._graph_mismatch(call, graph_module)
            if self._mismatch is not None:
                return graph_module(*args)
            self._fitting[id(graph_module)] = graph_module
        return self.calls(call, graph_module, args)

    # What the plan is compared with

    def _graph_mismatch(self, call: int, graph_module: fx.GraphModule) -> PlanMismatch | None:
        planned = self.plan.fingerprints
        if call < len(planned) and fingerprint_of(graph_module) == planned[call]:
            return None
        hooked = [name for name, module in self.model.named_modules() if name and _has_hooks(module)]
        remedy = f" with its hooks (on {', '.join(hooked[:3])})" if hooked else ""
        return PlanMismatch(
            f"the plan was made for {self.plan.about['workload']!r}, whose graph differs from this model's "
            f"(graph call {call}, {len(captured_nodes(graph_module))} nodes); make a plan for this model{remedy}."
        )

    def _compare_calls(self, count: int) -> None:
        if count != len(self.plan.fingerprints):
            raise PlanMismatch(
                f"the plan is for a model of {len(self.plan.fingerprints)} graph calls, this forward made {count}; "
                + (
                    "make a plan for this model."
                    if count
                    else "it ran where nothing is captured: under a torch.func transform or a dispatch mode, "
                    "or with Dynamo disabled."
                )
            )

    def _compare_parameters(self) -> None:
        found = sorted({_name(p.dtype) for p in self.model.parameters()})
        planned = self.plan.about["parameter_dtypes"]
        if found != planned:
            raise PlanMismatch(f"the plan is for parameters of {planned}, this model has {found}.")
        self._device = next((p.device.type for p in self.model.parameters()), "cpu")

    def _compare_autocast(self) -> None:
        enabled, planned = torch.is_autocast_enabled(self._device), self.plan.about["autocast"]
        autocast = _name(torch.get_autocast_dtype(self._device)) if enabled else None
        if autocast != planned:
            raise PlanMismatch(
                f"the plan is for {_policy(planned)}, this forward runs {_policy(autocast)}; "
                "use the same torch.autocast context or plan with the other --dtype."
            )

    def _compare_batch(self, args: Any, kwargs: Any) -> None:
        planned = self.plan.about.get("batch_elements")
        found = element_count(args, kwargs)
        if not planned or found <= planned:
            return
        self._larger(
            f"this batch has {found} elements, the plan was made for {planned} "
            f"(batch size {self.plan.about['batch_size']}): its peak will exceed the planned "
            f"{gib(self.plan.predicted['peak_bytes'])} and be about {gib(self._peak_of(found / planned))}; "
            "reduce the batch or make a plan for this one."
        )

    def _compare_trainable(self) -> None:
        planned = self.plan.about.get("trainable_count")
        found = trainable_count(self.model)
        if planned is not None and found > planned:
            self._larger(
                f"{found} parameters require gradients, {planned} did when the plan was made: the peak will exceed "
                f"the planned {gib(self.plan.predicted['peak_bytes'])}; make a plan for the model as it is now."
            )

    def _larger(self, text: str) -> None:
        """Warn of a step larger than planned, once for every reason, or refuse it."""
        if self.on_larger == "refuse":
            raise PlanMismatch(text)
        reason = text.partition(" ")[0]
        if reason not in self._warned:
            warnings.warn(text, stacklevel=6)
            self._warned.add(reason)

    def _peak_of(self, times: float) -> int:
        """Predicted peak of a batch so many times as large as planned, if all but the model's state grows with it."""
        peak, parts = self.plan.predicted["peak_bytes"], self.plan.predicted.get("breakdown", {})
        state = sum(parts.get(name, 0) for name in ("parameters", "buffers", "optimizer state", "gradients"))
        return int(state + (peak - state) * times)

    # Copies and pickles hold the model and the plan; what was traced is traced again.

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "plan", "on_larger", "observe", "replaced")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def fingerprint_of(graph_module: fx.GraphModule) -> str:
    """Fingerprint of a captured graph, as `Graph.fingerprints` has it."""
    nodes = captured_nodes(graph_module)
    ordinal = {node: i for i, node in enumerate(nodes)}
    return fingerprint(
        (called(n), module_path(n), sorted({ordinal[i] for i in n.all_input_nodes if i in ordinal})) for n in nodes
    )


def trainable_count(model: nn.Module) -> int:
    """How many numbers of `model` get a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _policy(autocast: str | None) -> str:
    return f"autocast to {autocast}" if autocast else "no autocast"
