"""Whether the graphs that a forward is traced to are those of its plan, and an error that says what differs.

A graph that fits may still make more bytes than the planned one. That is an error where the excess is large, and a
report where it is a few percent.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from remat._torch.training import function_modes
from remat.capture.attention_masks import PADDED_BATCH, takes_mask
from remat.capture.circumstances import differences, hooked, state_of, versions
from remat.capture.settling import listed
from remat.errors import PlanMismatch
from remat.evaluation.identity import Fit, GraphMismatch, NodeId
from remat.evaluation.plan import TOKEN_CAP, Plan
from remat.execution.eager.running_forward import RunningForward
from remat.execution.early_forwards import EarlyForwards
from remat.execution.forwards import holds
from remat.execution.model_as_planned import ModelAsPlanned, checkpoints_itself
from remat.execution.placing import Placer
from remat.execution.surroundings import Surroundings
from remat.units import first_few, gib

OTHER_GRAPH = "whose graph differs from this model's"
USE_AS_PLANNED = (
    "use the model as planned, make a plan for it as it is, or train without one after `remat.remove(model)`"
)
OTHER_MODEL = 0.02  # of the planned peak: a graph that needs more than that above it is refused


@dataclasses.dataclass(frozen=True)
class _Moved:
    """An operator in another module than planned, and the modules around it whose object has a forward of its own."""

    replaced: tuple[str, ...]


class GraphAsPlanned:
    """Compares the graphs of forwards of `model` with those of `plan`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        placer: Placer,
        early: EarlyForwards,
        surroundings: Surroundings,
        as_planned: ModelAsPlanned,
    ):
        self._model, self._plan, self._placer, self._early = model, plan, placer, early
        self._surroundings, self._as_planned = surroundings, as_planned

    def mismatch(self, running: RunningForward, call: int, graph_module: fx.GraphModule) -> PlanMismatch | None:
        """Return the error about graph call number `call` of the plan; None if `graph_module` fits it."""
        same_shapes = running.given == running.now.forward.given
        fit = self._placer.fit(call, graph_module, same_shapes=same_shapes)
        if isinstance(fit, Fit):
            return self._larger(running, fit, graph_module)
        return self._error(running, f"{OTHER_GRAPH} {fit}", graph_module, fit)

    def of_calls(self, running: RunningForward) -> PlanMismatch | None:
        """Return the error about the number of graph calls of a forward that has run; None if it is as planned."""
        if (count := running.graphs.count) == (planned := running.now.forward.calls):
            return None
        modules = dict(self._model.named_modules())
        new = [path for path in self._new_hooks if path in modules]  # FlopCounterMode hooks all modules
        if not count and new:
            return PlanMismatch(
                f"the plan is for a model of {planned} graph calls, this forward made none, and has hooks that it had "
                f"not when planned (on {', '.join(new[:3])}): a backward hook ends a graph. Make a plan for this model "
                "with its hooks, or hook the whole model, or its tensors."
            )
        running.unexplained = "" if self._known_differences(running) else f"it made {count} graph calls, not {planned}"
        return PlanMismatch(
            f"the plan is for a model of {planned} graph calls, this forward made {count}; "
            + (
                "make a plan for this model."
                if count
                else "it ran where nothing is captured: under a torch.func transform or a dispatch mode "
                "(FlopCounterMode is one), or with Dynamo disabled. Run that without the plan, on "
                "`remat.remove(copy.deepcopy(model))` for example."
            )
        )

    def _larger(self, running: RunningForward, fit: Fit, graph_module: fx.GraphModule) -> PlanMismatch | None:
        """Return the refusal of a graph that needs more memory than the budget; only note an excess of a few percent.

        A plan for a GPU says nothing of bytes on a CPU, whose kernels allocate others.
        """
        if not (text := self._excess_of(fit.more_bytes, fit.more_of)):
            return None
        peak_bytes = self._plan.predicted["peak_bytes"]
        if self._early.is_any and not self._early.may_complete:
            running.excess = f"{text}. What the model keeps is not there yet; later forwards are as planned."
            return None
        sees_sizes = holds(running.given, running.given)  # of a batch within an object none are known
        if sees_sizes and fit.more_bytes > OTHER_MODEL * peak_bytes:
            return self._error(running, text, graph_module)
        running.excess = f"{text}; make a plan for this model{'' if sees_sizes else ' and a batch of this size'}."
        return None

    def _excess_of(self, more_bytes: int, more_of: NodeId | None) -> str:
        """Say that `more_bytes` exceed the budget; empty if they do not, or the plan is for another device."""
        device = next((p.device.type for p in self._model.parameters()), None)
        if device is not None and (device == "cpu") != (self._plan.target == "cpu"):
            return ""
        peak_bytes = self._plan.predicted["peak_bytes"]
        if peak_bytes + more_bytes <= max(self._plan.budget_bytes, peak_bytes):
            return ""
        return (
            f"the forward makes up to {gib(more_bytes)} more than when planned ({more_of}), and the plan has "
            f"{gib(max(self._plan.budget_bytes - peak_bytes, 0))} to spare"
        )

    def compare_sizes(
        self, running: RunningForward, call: int, graph_module: fx.GraphModule, sizes: Mapping[Any, int]
    ) -> bool:
        """Report a graph that fits, and needs more memory at the present open `sizes`, by symbol, than planned.

        Return whether it could be compared. A batch with more elements than planned has been reported, and is not.
        """
        forward, given = running.now.forward, running.given
        same_shapes = given == forward.given
        is_planned = TOKEN_CAP in self._plan.about and not same_shapes  # with so many tokens, whatever the lengths
        if is_planned or not holds(given, given):  # or a batch within an object
            return True
        if not same_shapes and self._as_planned.is_larger(forward, running.tensors):
            return False
        growth = self._placer.growth(call, graph_module, sizes, same_shapes=same_shapes)
        if text := self._excess_of(growth.more_bytes, growth.more_of):
            why = "a number that the model or the loop changes" if same_shapes else "the shape of this batch"
            self._as_planned.report_sizes(
                growth.more_bytes,
                f"{text}: sizes follow {why}. Make a plan with the largest sizes.",
            )
        return True

    def _error(
        self, running: RunningForward, difference: str, graph_module: fx.GraphModule, fit: GraphMismatch | None = None
    ) -> PlanMismatch:
        """Make the error from a `difference`, everything else known to differ, and a remedy."""
        known, remedy = self._known_differences(running), self._remedy(running, graph_module)
        moved = None if fit is None else self._moved(fit)
        is_explained = known or remedy or (moved is not None and not moved.replaced)
        running.unexplained = "" if is_explained else difference.removeprefix(OTHER_GRAPH).strip()
        said = [f"the plan was made for {self._plan.about['workload']!r}, {difference}", *known]
        said += differences(self._plan.about, {"versions": versions()})
        if not known and remedy is None:
            said += self._perhaps(moved)
        return PlanMismatch(f"{'; '.join([*said, remedy or USE_AS_PLANNED])}.")

    def _perhaps(self, moved: _Moved | None) -> list[str]:
        """Say in words what may be why a graph differs, where nothing is known to be."""
        if moved is not None:
            return [f"{path} has a forward that its class has not" for path in moved.replaced[:1]]
        carried = listed(self._early.carried) if self._early.carries_numbers else ""
        return [f"a number that the model changes may be why ({carried})"] if carried else []

    def _moved(self, mismatch: GraphMismatch) -> _Moved | None:
        """Describe an operator that is as planned but for its module, which no number brought; else return None.

        Where a number leaves out a layer, the same operator is found in another one that the plan knows.
        """
        difference = mismatch.difference
        planned, found = (None, None) if difference is None else (difference.planned, difference.found)
        if planned is None or found is None or planned.op != found.op or planned.module == found.module:
            return None
        modules, parts = dict(self._model.named_modules()), planned.module.split(".")
        around = [".".join(parts[: i + 1]) for i in range(len(parts))]
        inside = [path for path in around if path and path in modules]  # the model itself has the plan's forward
        replaced = tuple(path for path in inside if "forward" in vars(modules[path]))
        is_known = any(node.module == found.module for node in self._plan.identities[mismatch.call])
        return None if is_known and not replaced else _Moved(replaced)

    def _known_differences(self, running: RunningForward) -> list[str]:
        """List in words what else differs from the plan: arguments, the model, what is around it."""
        found = {"batch": running.given, **state_of(self._model)}
        said = differences({**self._plan.about, "batch": running.now.forward.given}, found)
        said += self._surroundings.changes()
        if modes := function_modes():
            said.append(
                f"a torch function mode is on ({', '.join(modes)}): under some, Dynamo leaves out operators of a model "
                "that is as planned"
            )
        return said

    @property
    def _new_hooks(self) -> list[str]:
        """Paths of the modules that have hooks, and had none when planned."""
        return [path for path in hooked(self._model) if path not in self._plan.about.get("hooked", ())]

    def _remedy(self, running: RunningForward, graph_module: fx.GraphModule) -> str | None:
        """Suggest a remedy for a graph that differs from the planned one, by its probable cause, if one is known."""
        remedy = self._as_planned.grown() or _remedy_for_mask(running, graph_module)
        if remedy is not None:
            return remedy
        given = running.element_counts
        if any(not given.get(name, 1) for name, count in running.now.forward.elements.items() if count):
            return "this batch has no rows, for which Dynamo traces another graph: leave it out"
        if checkpoints_itself(self._model):
            return "turn gradient_checkpointing off in this model, the plan decides what is recomputed, or plan with it"
        if new := self._new_hooks:
            return (
                f"make a plan for this model with its hooks (on {', '.join(new[:3])}). A hook that reads a number off "
                "a tensor (`float()`, `item()`) has no plan: let it keep the tensor, detached, and read it later"
            )
        was = running.now.forward.given
        words = [name for name, now in running.given.items() if re.match("['\"]|True$|False$", now)]
        if words := [name for name in words if was.get(name, running.given[name]) != running.given[name]]:
            return (
                f"where the loop changes {first_few(words)}, make a plan of the whole step for each value "
                "(`workload.with_planned_step()`), and train by one `remat.planned_step(step, plan)` for each"
            )
        return None


def _remedy_for_mask(running: RunningForward, graph_module: fx.GraphModule) -> str | None:
    """Suggest a remedy if the batch needs another attention mask than planned; None if it does not."""
    seen, planned = running.graphs.seen, running.planned_masks
    if seen.packed and not planned.packed:
        return (
            "the position ids of this batch do not count up (several sequences are packed in a row), and so "
            "attention takes an explicit mask, which needs another kernel and other bytes: plan with a workload "
            "whose batch has them"
        )
    if seen.padded and not planned.padded:
        return PADDED_BATCH
    if seen.ones and not (planned.ones or planned.padded) and takes_mask(graph_module):
        return (
            "this batch has an attention mask, and the plan is for batches without; this model uses it, though it "
            "is of ones only. Leave it out, or plan with --padded"
        )
    return None
