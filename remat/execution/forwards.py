"""Forwards: which forward of the planned step a call of the model is.

A plan numbers graph calls through all forwards of its step (`evaluation/forwards.py`). In training a model is called
without being told where a step begins, so the forwards that no backward has followed yet are counted
(`workload/passes.py`). A step that leaves some forwards out, or is left half way, is followed; a forward more than
planned runs as the last of its kind, and is reported.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from remat.errors import PlanMismatch
from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.forwards import Forward, forwards_of
from remat.evaluation.plan import Plan
from remat.units import gib
from remat.workload.passes import Pass
from remat.workload.replaced_forward import ReplacedForward


class StepForward(Protocol):
    """The forward under a plan that the forwards of a step run."""

    plan: Plan

    def run(self, at: ModuleForward, args: Any, kwargs: Any) -> Any: ...


_SHAPE = r" (\d+(?:x\d+)*)"


class ModuleForward:
    """The forward of the module at `path` of a model that has a plan; "" is the model itself.

    settled  whether a training forward ran since the last forward outside training
    fits     whether a graph of it was the planned one
    is_anew  whether it was traced anew since the model changed itself (`PlannedGraphs._trace_anew`)
    """

    def __init__(self, planned: StepForward, path: str, module: nn.Module):
        self.planned, self.path, self.module = planned, path, module
        self.replaced = ReplacedForward(module)
        self.settled = self.fits = self.is_anew = False

    @property
    def original(self) -> Any:
        """The forward without the plan."""
        return self.replaced.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.planned.run(self, args, kwargs)

    # Libraries read a forward's signature, and its function without the model, to wrap and rebind.

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __func__(self) -> Callable[..., Any]:
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = self.__signature__
        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        forward.planned = self.planned  # type: ignore[attr-defined]
        return forward


def modules_of(planned: StepForward, model: nn.Module) -> list[ModuleForward]:
    """List the forwards of modules of `model` that the planned step calls in place of the model itself.

    Raises PlanMismatch if `model` has no such module.
    """
    found = []
    for path in dict.fromkeys(forward.module for forward in StepForwards(planned.plan).planned):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise PlanMismatch(
                f"the plan is for a step that calls the module {path!r}, and this model has none of that name; apply "
                "it to the model that the workload builds, or make a plan for this one."
            ) from None
        if path:
            found.append(ModuleForward(planned, path, module))
    return found


MOST_APART, MOST_IN_A_ROW = 1 / 8, 16  # forwards of another graph, of those as planned beside the first; at a stretch


@dataclasses.dataclass
class Apart:
    """How often a forward of a step was another graph than planned, and `planned`, how often it was as planned."""

    planned: int = 0
    apart: int = 0
    in_a_row: int = 0

    def note_planned(self) -> None:
        self.planned, self.in_a_row = self.planned + 1, 0

    def takes_one_more(self) -> bool:
        """Note a forward of another graph; return whether those are exceptions still."""
        self.apart, self.in_a_row = self.apart + 1, self.in_a_row + 1
        return self.planned > 0 and self.apart - 1 <= MOST_APART * self.planned and self.in_a_row <= MOST_IN_A_ROW


@dataclasses.dataclass(frozen=True)
class CurrentForward:
    """The forward of the plan that a call runs.

    number   its number in the plan      begins  whether a step begins with it
    repeats  whether the plan has no forward left for the call, so that this one runs again
    """

    number: int
    forward: Forward
    begins: bool
    repeats: bool


def holds(planned: Mapping[str, str], given: Mapping[str, str]) -> bool:
    """Return whether the arguments `given` are `planned` ones, no whole number and no size of a tensor larger.

    Both as `given_to` describes the arguments of a forward. False where no size is seen, as within an object.
    """
    pairs = [(_with_sizes(planned.get(name, "")), _with_sizes(text)) for name, text in given.items()]
    return any(sizes for _, (_, sizes) in pairs) and all(
        kinds == planned_kinds and len(sizes) == len(most) and all(map(operator.le, sizes, most))
        for (planned_kinds, most), (kinds, sizes) in pairs
    )


def _with_sizes(text: str) -> tuple[str, list[int]]:
    """Return the description of an argument without the sizes and whole numbers in it, and these."""
    text = f" {text}"
    shapes = re.findall(_SHAPE, text)
    return re.sub(_SHAPE, " ", text), [int(size) for shape in shapes for size in shape.split("x")]


class StepForwards:
    """The forwards of a plan's step, and where training is in them.

    counted           the forwards that no backward has followed yet; of all plans that a model runs under
    were_kept         whether a backward of an earlier step kept its graph for another
    were_differentiated_twice  whether one made a graph of its own
    were_in_autocast  whether one ran inside of `torch.autocast`
    """

    def __init__(self, plan: Plan):
        self.planned = forwards_of(plan.about, len(plan.fingerprints))
        self._traced_with = _traced_with(plan, self.planned)
        self.counted = Pass()
        self.were_kept = self.were_differentiated_twice = self.were_in_autocast = False

    @property
    def are_single_graphs(self) -> bool:
        return all(forward.calls == 1 for forward in self.planned)

    @property
    def are_under_way(self) -> bool:
        """Whether forwards wait for their backward."""
        return self.counted.count > 0 and not self.counted.is_over(len(self.planned))

    def are_at(self, path: str) -> bool:
        """Return whether the step calls the module at `path`."""
        return any(forward.module == path for forward in self.planned)

    def now(self, path: str) -> CurrentForward:
        """Return the planned forward for a call of the module at `path`. Raises PlanMismatch if there is none."""
        if self.counted.is_over(len(self.planned)):
            self._begin()
        here = [number for number, forward in enumerate(self.planned) if forward.module == path]
        if not here:
            called = ", ".join(dict.fromkeys(repr(forward.module) for forward in self.planned))
            raise PlanMismatch(
                f"the plan is for a step that calls {called} of the model, and not the model itself, which is called "
                "here; use the model as planned, or make a plan for this step."
            )
        later = next((number for number in here if number >= self.counted.next), None)
        number = here[-1] if later is None else later
        return CurrentForward(number, self.planned[number], begins=not self.counted.count, repeats=later is None)

    def _begin(self) -> None:
        """Begin a step; or continue it, if the planned step also has a backward or drops forwards here."""
        self.were_kept = self.were_kept or self.counted.is_kept
        self.were_differentiated_twice = self.were_differentiated_twice or self.counted.is_differentiated_twice
        if 0 < self.counted.next < len(self.planned) and self.planned[self.counted.next - 1].ended:
            self.counted.goes_on()
        else:
            self.were_in_autocast = self.were_in_autocast or self.counted.is_in_autocast
            self.counted.begin()

    def returned(self, now: CurrentForward, outputs: Any) -> None:
        """Note that the forward `now` has returned `outputs`."""
        self.counted.next = now.number + 1
        self.counted.add(outputs)

    def too_many(self, plan: Plan) -> str:
        """Describe a forward that the plan does not have."""
        planned, found = len(self.planned), self.counted.count + 1
        return (
            f"this is forward number {found} since the last backward, and the plan is for a step of {planned}: what "
            f"the earlier ones keep is there still, and the peak may exceed the planned "
            f"{gib(plan.predicted['peak_bytes'])}. Run backward after each step's forwards, run forwards that are not "
            "trained on under torch.no_grad(), or make a plan for a step that calls the model as often."
        )

    def traced_with(self, now: CurrentForward) -> int:
        """Return the number of the first forward with the same traces as `now`."""
        return self._traced_with[now.number]

    def call_as_planned(self, now: CurrentForward, call: int) -> int:
        """Return the number under which planning first saw the graph of graph call `call` of `now`."""
        return call - now.forward.first + self.planned[now.forward.like].first


def _traced_with(plan: Plan, forwards: Sequence[Forward]) -> list[int]:
    """Return for each forward the number of the first with the same trace: the same graphs and masks.

    Where parts run in slices or fused, which parts depends on the forward that a graph was first seen in.
    """
    if form_of(plan.about) != CAPTURED_FORM:
        return [forward.like for forward in forwards]
    identities = plan.identities or plan.fingerprints
    keys = [(f.module, identities[f.first : f.first + f.calls], dict(f.masks)) for f in forwards]
    return [keys.index(key) for key in keys]
