"""The second step: its peak, held against the prediction where the device counts.

The first step of training is no measure: it traces, is verified, and makes the optimizer's state. The second is like
those that follow. As the third begins, the peak since the second began is compared with the plan's.

CUDA's allocator keeps one peak, since it was last reset. It is reset as the second step begins if it is above the
prediction by then, and left alone otherwise: a later reader finds the peak of a run without a plan.

Not counted: a step that forwards without the plan interrupt (an evaluation). The next one is taken instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from remat.capture.circumstances import differences, state_of, versions
from remat.evaluation.breakdown import MADE_IN_STEP
from remat.evaluation.plan import Plan
from remat.units import gib
from remat.workload.training_loop import TrainingLoop

SMALL_CHANGE = 0.001  # of the planned peak: a smaller excess is not reported


class Counter(Protocol):
    """Counters of a device's allocator, in requested bytes."""

    def current_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def reset(self) -> None: ...


class CudaCounter:
    """The counters of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device

    def current_bytes(self) -> int:
        return self._read("current")

    def peak_bytes(self) -> int:
        return self._read("peak")

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self, what: str) -> int:
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get(f"requested_bytes.all.{what}", 0) or stats.get(f"allocated_bytes.all.{what}", 0))


def counter_for(model: nn.Module, plan: Plan) -> Counter | None:
    """Return the counter for `model`; None if there is none, or the plan is for another kind of device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return CudaCounter(device) if device.type == "cuda" and plan.target != "cpu" else None


class SecondStep:
    """Compares the second step of `model` with `plan`, if it `is_on`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        is_on: bool,
        counter_for: Callable[[nn.Module, Plan], Counter | None] = counter_for,
    ):
        self._model, self._plan, self._counter_for = model, plan, counter_for
        self._is_on = is_on
        self._forwards = itertools.count()  # that begin a step of the plan, which may be one of several to accumulate
        self._accumulation = TrainingLoop.of(plan.about).accumulation
        self._there: int | None = None  # as the step began that is measured

    def interrupted(self) -> None:
        """Note that a forward runs without the plan."""
        self._there = None

    def begins(self, *, holds_outputs: bool = False) -> str:
        """Note that another step begins; return a warning about the one before, usually empty.

        holds_outputs  whether the loop is known to hold outputs that the plan does not count
        """
        step, micro_batch = divmod(next(self._forwards), self._accumulation)
        if not self._is_on or micro_batch or not step:
            return ""
        counter, predicted = self._counter_for(self._model, self._plan), self._plan.predicted["peak_bytes"]
        most = int((1 + SMALL_CHANGE) * predicted)
        if counter is None:
            self._is_on = False
        elif self._there is None:
            self._there = counter.current_bytes()
            if counter.peak_bytes() > most:
                counter.reset()
        else:
            self._is_on = False
            if (peak := counter.peak_bytes()) > most:
                return self._said_of(step, peak, self._there, holds_outputs)
        return ""

    def _said_of(self, step: int, peak_bytes: int, there_bytes: int, holds_outputs: bool) -> str:
        predicted, parts = self._plan.predicted["peak_bytes"], self._plan.predicted.get("breakdown", {})
        planned_bytes = sum(size for name, size in parts.items() if name not in MADE_IN_STEP)
        said = differences(self._plan.about, {"versions": versions(), **state_of(self._model)})
        if planned_bytes and there_bytes > planned_bytes + SMALL_CHANGE * predicted:
            said.insert(
                0,
                f"{gib(there_bytes)} were there as it began, planned {gib(planned_bytes)} (another model, an optimizer "
                "with more state, what the loop holds)",
            )
        if holds_outputs:
            said.insert(0, "the loop holds outputs that the plan does not count")
        why = "; ".join(said) or "nothing is known to differ: `remat.validate` measures the step by itself"
        return (
            f"step {step} took {gib(peak_bytes)}, and the plan predicted {gib(predicted)}, "
            f"{gib(peak_bytes - predicted)} less; the budget is {gib(self._plan.budget_bytes)}. What differs: {why}."
        )
