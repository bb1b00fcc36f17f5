"""Repeats: two forwards of one step run the same operators, or the step is refused.

A plan is for one graph. Where a forward skips layers by a number that torch does not draw, each forward is another
graph, and a plan of any of them is wrong for the others. So the forwards of one step are compared: those that are
captured anyway, and a few more, untraced, where its code reads such numbers or counts (`sources.py`). A trace may hide
it: Dynamo takes some of these numbers for constants. Generators are not put back in between, that would hide it too;
they are driven to their ends, so that what happens seldom happens.

A model that completes itself in its first forwards (`settling.py`) is no such step: it does not return.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat._torch.training import UnseenMode
from remat.capture.schemas import makes_nothing
from remat.errors import CaptureError, RematError
from remat.evaluation.forwards import Forward
from remat.recording.fake_step import FakeStep
from remat.recording.sources import Sources, numbers_of, same
from remat.recording.step_refusals import NoLoss
from remat.recording.trails import MOST_SAID, reads_of, said_of

FORWARDS = 6


class _TrailSeen(UnseenMode):
    """Notes the trail of a forward, and the parameters that its operators take."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.operators: list[Any] = []
        self._storages = [p.untyped_storage() for p in model.parameters()]  # `p.data = ...` frees one, and its id
        self._names = {id(s): name for s, (name, _) in zip(self._storages, model.named_parameters(), strict=True)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not makes_nothing(func):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            named = (self._names.get(id(tensor.untyped_storage()), tuple(tensor.shape)) for tensor in given)
            self.operators.append((func, *named))
        return out


class Repeats:
    """Compares the forwards of `step` from here on; the last of `step.trails` is the one that is recorded."""

    def __init__(self, step: FakeStep):
        self._step = step
        self._sources = Sources.of(step.model, step.workload.step)
        self._states, self._before = self._sources.states(), self._numbers()

    def _numbers(self) -> dict[str, Any]:
        with self._step.shared.borrowed():
            return {**self._sources.numbers(), **numbers_of(self._step.model), **self._step.flags}

    def require(self) -> None:
        """Raise CaptureError if two forwards differ, naming the lines that read values from outside torch."""
        recorded, earlier = self._step.trails[-1], self._step.trails[:-1]
        other = next((trail for trail in reversed(earlier) if trail != recorded), None)
        if other is not None and recorded in earlier[: earlier.index(other)]:
            raise self._refusal(_of(recorded, other))
        is_sure = bool(earlier) and earlier[-1] == recorded
        if not is_sure or self._may_change:
            with self._sources.kept():
                self._compare_untraced()

    @property
    def _drawn(self) -> bool:
        return not same(self._states, self._sources.states())

    @property
    def _may_change(self) -> bool:
        return self._drawn or self._sources.has_clock or self._before != self._numbers()

    def drawn_outside(self, forwards: Iterable[Forward]) -> list[str]:
        """List the lines of `forwards` that draw random numbers outside torch, if a forward is not one graph."""
        if not self._drawn or all(forward.calls == 1 for forward in forwards):
            return []
        reads = reads_of(self._step.run_untraced, self._sources, lambda: self._step.calls.inside)
        return list(map(str, reads[:MOST_SAID]))

    def _compare_untraced(self) -> None:
        first: list[Any] | None = None
        for number in range(FORWARDS):
            self._sources.drive(high=number % 2 == 1, seed=number)
            try:
                with _TrailSeen(self._step.model) as seen:
                    self._step.run_untraced()
            except NoLoss as error:  # as where no layer is left: the recorded forward had one
                raise self._refusal("one gives no loss that has a gradient") from error
            except RematError as error:
                raise self._refusal(f"one fails: {str(error).rstrip('.')}") from error
            first = first or seen.operators
            if seen.operators != first:
                raise self._refusal(_of(first, seen.operators))

    def _refusal(self, found: str) -> CaptureError:
        return CaptureError(
            f"two forwards of the step of {self._step.workload.name!r} are two graphs ({found}): {self._reason()}. A "
            "plan is for one. Draw a mask with torch and multiply by it (`x + keep * layer(x)`, as stochastic depth "
            "does), so that every forward is the same graph, or train and plan with this turned off. Of a step that "
            "adds a penalty every few times, plan one whose `step` always adds it: that plan fits the others too."
        )

    def _reason(self) -> str:
        """Explain why forwards differ, as far as can be seen."""
        if reads := said_of(reads_of(self._step.run_untraced, self._sources)):
            return f"the number read by {reads} changes each time"
        counted = [f"`{name}`" for name, value in self._numbers().items() if self._before.get(name) != value]
        if counted:
            return f"each changes {', '.join(counted[:MOST_SAID])}, and follows it"
        return "something outside of torch controls the forward"


def _of(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Describe the difference of two forwards."""
    same_count = len(one) == len(other)
    return f"{len(one)} operators, not the same" if same_count else f"{len(one)} and {len(other)} operators"
