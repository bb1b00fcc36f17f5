"""Whether the loop around a planned model is that of the plan.

A plan is for a step in a loop: what is there when a step begins, how its backward runs, how long outputs are held. As
each forward begins, what the last step left behind is compared with that. What may take the peak above the budget is
reported, with the bytes; what does not is no one's concern.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from remat._torch.dynamo import ddp_around
from remat._torch.training import own_saved_tensor_hook
from remat.evaluation.forwards import DIFFERENTIATES, LOOKS, PASSES
from remat.evaluation.graph import FORWARD_ALONE
from remat.evaluation.plan import Plan
from remat.execution.forwards import CurrentForward, StepForwards
from remat.execution.optimizer_as_planned import unlike_planned
from remat.execution.reports import Reports
from remat.execution.second_step import SMALL_CHANGE, SecondStep
from remat.units import gib
from remat.workload.held_outputs import LastOutputs
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import trainable


class LoopAsPlanned:
    """Compares the loop around `model` with that of `plan`.

    outputs  of the last forwards; of all plans that a model runs under
    """

    def __init__(self, model: nn.Module, plan: Plan, forwards: StepForwards, second_step: SecondStep, reports: Reports):
        self._model, self._plan, self._reports = model, plan, reports
        self._forwards, self._second_step = forwards, second_step
        self._loop = TrainingLoop.of(plan.about)
        self._steps = itertools.count()
        self._peak, self._budget = plan.predicted["peak_bytes"], plan.budget_bytes
        self._backward_peak = plan.predicted.get("backward_peak_bytes", self._peak)
        self.outputs = LastOutputs()

    def forward_begins(self, now: CurrentForward) -> None:
        """Report differences that show as a forward begins."""
        if (packs := own_saved_tensor_hook()) is not None:
            self._reports.warn(
                "hooks",
                f"hooks on saved tensors (`{packs}`) are on around this forward. Under the plan they are given other "
                "tensors than without it, so where they change values, gradients differ from those without the plan.",
            )
        if now.repeats:
            self._reports.excess("forwards", self._forwards.too_many(self._plan))
        if now.begins:
            self._step_begins()

    def _step_begins(self) -> None:
        if text := self._second_step.begins(holds_outputs="held" in self._reports.made):
            self._reports.warn("peak", text)
        self._compare_gradients()
        self._compare_backward()
        self._compare_outputs()
        self._compare_buckets()
        if not next(self._steps) or "optimizer" in self._reports.made:
            return
        if unlike := unlike_planned(self._plan, trainable(self._model)):
            self._reports.excess("optimizer", unlike)

    def forward_alone_begins(self) -> None:
        """Report a forward without gradients between a forward and its backward, where the plan knows of none."""
        about = self._plan.about
        if LOOKS in about or PASSES in about or not self._forwards.are_under_way or torch.compiler.is_compiling():
            return
        if (alone := about.get(FORWARD_ALONE, 0)) and self._exceeds(alone):
            self._excess(
                "look",
                "a forward without gradients runs between a forward and its backward, and the plan is for a step "
                "without",
                by=f"up to {gib(alone)}",
                remedy="Evaluate after backward, or make a plan with a workload whose `step` does so.",
            )

    def returned(self, outputs: Any, given: Any) -> None:
        """Note that a forward has returned `outputs` for the arguments `given`."""
        if "held" not in self._reports.made:
            self.outputs.note(outputs, given, self._backward_peak, self._budget)

    def backward_ended(self) -> None:
        """Note the outputs that the loop holds as a backward has ended, and that no plan counts there.

        A step that differentiates inside, or in several passes, may hold the outputs of its own forwards.
        """
        about = self._plan.about
        declared = self._loop.holds_outputs or any(forward.ended for forward in self._forwards.planned)
        if not ("held" in self._reports.made or PASSES in about or DIFFERENTIATES in about or declared):
            self.outputs.backward_ends(self._model, len(self._forwards.planned))

    def _exceeds(self, more_bytes: int) -> bool:
        return self._peak + more_bytes > self._budget

    def _excess(self, key: str, difference: str, *, by: str, remedy: str) -> None:
        """Report a `difference` that may take the peak above the planned one `by` so much."""
        self._reports.excess(
            key,
            f"{difference}: the peak may exceed the planned {gib(self._peak)} by {by}, and with it the budget of "
            f"{gib(self._budget)}. {remedy}",
        )

    def _compare_gradients(self) -> None:
        if PASSES in self._plan.about:  # of which the second and later ones have gradients
            return
        if self._loop.accumulates or self._has_buckets or "gradients" in self._reports.made:
            return
        leaves = (p for p in trainable(self._model) if p.is_leaf)  # others may stand in the place of parameters
        alive = sum(p.grad.nbytes for p in leaves if p.grad is not None)
        if alive and self._exceeds(alive):
            self._excess(
                "gradients",
                f"{gib(alive)} of gradients are there as a forward begins, and the plan is for a loop without",
                by="as much",
                remedy="Set gradients to None after each step (optimizer.zero_grad(set_to_none=True)), or plan for the "
                "loop (`accumulation=`).",
            )

    @property
    def _has_buckets(self) -> bool:
        """Whether the planned loop keeps gradients in buckets, or scattered."""
        return self._loop.ddp or self._loop.shard is not None

    def _compare_buckets(self) -> None:
        if self._has_buckets or "buckets" in self._reports.made or (around := ddp_around()) is None:
            return
        buckets = 0 if around.gradient_as_bucket_view else sum(p.nbytes for p in trainable(self._model))
        if buckets and self._exceeds(buckets):
            self._excess(
                "buckets",
                f"DistributedDataParallel has {gib(buckets)} of gradient buckets, and the plan is for a loop without",
                by="as much",
                remedy="Plan with `--ddp` (`TrainingLoop(ddp=True)`), or wrap with `gradient_as_bucket_view=True`.",
            )

    def _compare_backward(self) -> None:
        forwards, parameters = self._forwards, trainable(self._model)
        if forwards.were_in_autocast and self._plan.regions:
            casts = sum(2 * p.numel() for p in parameters if p.dtype == torch.float32)
            if self._exceeds(casts):
                self._excess(
                    "autocast",
                    "the last backward ran inside of torch.autocast, which keeps its casts of the weights until it "
                    "ends, and the plan is for a backward outside of it",
                    by=f"the casts ({gib(casts)})",
                    remedy="Call backward() after the `with torch.autocast(...)` block.",
                )
        if DIFFERENTIATES in self._plan.about:
            return
        gradients = sum(p.nbytes for p in parameters)
        untouched = self._plan.without_checkpointing.get("peak_bytes", self._peak)
        if forwards.were_differentiated_twice and 2 * untouched > self._budget:
            self._excess(
                "twice",
                "the last step differentiated a gradient (create_graph=True), and the plan is for a step of one "
                "backward",
                by="recomputed activations, which stay for the second one",
                remedy="Make a plan with a workload whose `step` does so.",
            )
        most = gradients + (max(untouched, self._peak) if self._plan.regions else self._peak)
        if forwards.were_kept and most > self._budget:
            self._excess(
                "kept",
                "the last backward kept its graph for another one (retain_graph=True), and the plan is for a step of "
                "one backward",
                by="the gradients that the first one leaves, and by all that it recomputed, which stays for the next, "
                f"up to about {gib(most)}",
                remedy="Run one backward through the sum of the losses.",
            )

    def _compare_outputs(self) -> None:
        reached, through = self.outputs.kept_through_backward()
        declared = self._loop.holds_outputs
        # the old loss is no more than the gradient with which backward, the peak, begins where the new one is made
        losses = len(self._forwards.planned) if self._backward_peak >= self._peak else 0
        sizes = self.outputs.alive(self._model, but_last=declared, but_losses=losses)
        held_bytes, kept_bytes = sum(sizes.values()), sum(through.values())
        remedy = "let go of them before backward (`del` the names that hold them)"
        if not declared:
            remedy = f'make a plan for a loop that holds them (`holds="outputs"`), or {remedy}'
        if held_bytes >= SMALL_CHANGE * self._peak and self._exceeds(held_bytes):
            which = "forwards before the last" if declared else "the last forward"
            self._reports.excess(
                "held",
                f"{gib(held_bytes)} of outputs of {which} are still held as the next begins ({_largest_of(sizes)}): "
                f"the peak may reach {gib(self._peak + held_bytes)}, and exceed the budget of {gib(self._budget)}. To "
                f"keep it, {remedy}.",
            )
            self.outputs.forget()
        elif kept_bytes >= SMALL_CHANGE * self._peak:
            self._reports.warn(
                "held",
                f"{gib(kept_bytes)} of outputs were held until the last backward had ended ({_largest_of(through)}), "
                "longer than the plan counts them: the peak may reach "
                f"{gib(reached)}, and exceed the budget of {gib(self._budget)}. To keep it, {remedy}.",
            )
            self.outputs.forget()


def _largest_of(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(f"`{name}` {gib(sizes[name])}" for name in largest[:3]) + (", ..." if largest[3:] else "")
