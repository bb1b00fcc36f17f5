"""Early forwards: the first ones, which have another graph than those that a plan is made for.

A plan is for the forward that training repeats. Before that a model may keep nothing yet that later forwards read (a
memory of the last batch, a queue that fills), or lack what it makes when it is first needed (a table).

What is only made once is made before the first step: the model's own forward is run without gradients, and what it
made is kept. That is so where a second such forward changes nothing more, and returns what the first one did, bit by
bit. Otherwise everything is put back as if it had not run.

What Dynamo gives up, a loop in which a graph breaks, it gives up after the first trace: the forward is traced once
more than it runs (`rehearse`).

What is carried from forward to forward is right only where it is. Its early graphs, which the plan knows by their
keys, run as they are traced, without regions. Their numbers are those of the eager baseline, and so are their bytes.

Filling the state in advance was rejected: a step would start from what no forward of training has left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from remat.capture.anchors import graph_key
from remat.capture.holders import GROWN
from remat.capture.kept_tensors import are_bitwise_equal
from remat.capture.model_state import ModelState
from remat.capture.settling import EARLY_BY_TRACES, listed
from remat.errors import CaptureError
from remat.evaluation.plan import Plan
from remat.units import gib
from remat.workload.held_outputs import output_tensors


class EarlyForwards:
    """The early forwards that a plan knows; a plan of an older version knows none.

    carries_numbers  whether numbers of the model change with every forward: traces leave them open
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._keys = frozenset(plan.about.get("early_graphs", ()))
        self.carried: dict[str, str] = plan.about.get("carried", {})
        self.carries_numbers = any(kind != GROWN for kind in self.carried.values())  # also in replaced state

    @property
    def is_any(self) -> bool:
        """Whether there are early forwards."""
        return "early_forwards" in self._plan.about

    @property
    def may_complete(self) -> bool:
        """Whether an early forward may only create what is missing, or be an early one for its traces alone."""
        return not self.carried or EARLY_BY_TRACES in self._plan.about

    def has(self, graph_module: fx.GraphModule) -> bool:
        """Return whether `graph_module` is a graph of an early forward."""
        return bool(self._keys) and graph_key(graph_module) in self._keys

    @property
    def warning(self) -> str:
        """The warning about an early forward; empty if the step without a plan keeps the budget."""
        untouched, budget = self._plan.without_checkpointing["peak_bytes"], self._plan.budget_bytes
        if untouched <= budget:
            return ""
        kept = (
            ""
            if self.may_complete
            else f", because of what the model keeps from one to the next ({listed(self.carried)})"
        )
        said = (
            f"this forward has another graph than later ones, which the plan is for{kept}: such forwards run without "
            "the plan, their numbers are those of the eager baseline, and they may take its "
            f"{gib(untouched)}, more than the budget of {gib(budget)}."
        )
        if kept:
            said += (
                " To have all steps alike, give that state its final shape when the model is made (zeros in place of "
                "None)."
            )
        return said

    def warning_apart(self, difference: str) -> str:
        """Return the warning about a later forward whose graph differs, perhaps by a number that the model changes."""
        untouched, budget = self._plan.without_checkpointing["peak_bytes"], self._plan.budget_bytes
        exceeds = f", more than the budget of {gib(budget)}" if untouched > budget else ""
        return (
            f"this forward has another graph than planned, probably by a number that the model changes "
            f"({listed(self.carried)}): {difference}. Such forwards run, and recompute nothing: they may take the "
            f"{gib(untouched)} of a step without a plan, or what their own operators need{exceeds}."
        )

    def why_traced(self, traces: int) -> str:
        """Explain why a forward was traced so often for batches of one size; empty if the reason is unknown."""
        if not self.carried:
            return ""
        return (
            f"this forward was traced {traces} times, because of what it changes in the model every time "
            f"({listed(self.carried)}), which Python code computes with in a way that a trace cannot leave open: each "
            "takes seconds and stays in memory. Keep it in a buffer (register_buffer) and compute with tensors, or "
            "outside of the model."
        )


def complete(before: ModelState, forward: Callable[[], Any]) -> None:
    """Let a model create its one-time state in forwards without gradients; else restore its state `before` them.

    Raises CaptureError if they wrote into parameters, which cannot be undone.
    """
    done = False
    try:
        with torch.no_grad():
            before.put_back()
            first = [tensor for _, tensor in output_tensors(forward())]
            made = ModelState(before.model, named=False)
            before.put_statistics_back()
            second = [tensor for _, tensor in output_tensors(forward())]
        done = not made.changes(statistics=False) and _are_equal(first, second)
    finally:
        if done:
            before.put_statistics_back()
        else:
            before.put_back()
    if not done and (left := before.changes()):
        raise CaptureError(
            f"the forward writes into {listed(left)}, and it has another graph in the first step than in later ones: "
            "run one step before the plan is applied, or let it write into buffers."
        )


def rehearse(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Run a traced forward of `model` that leaves nothing behind but its traces, and keeps nothing for a backward."""
    before = ModelState(model, named=False)
    try:
        with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            forward()
    finally:
        before.put_back()


def _are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether two forwards returned bitwise equal tensors, at least one."""
    pairs = zip(first, second, strict=False)
    return 0 < len(first) == len(second) and all(are_bitwise_equal(one, other) for one, other in pairs)
