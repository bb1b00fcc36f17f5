"""The forward of a module, replaced for a while, or for as long as a plan is applied."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


class ReplacedForward:
    """A module, and the forward that it had when this object was made."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._before = module.__dict__.get("forward")

    @property
    def original(self) -> Any:
        """That forward; the class's own is bound here, so that Dynamo follows into it."""
        return self._before or type(self.module).forward.__get__(self.module)

    def put(self, forward: Any) -> None:
        self.module.forward = forward

    def take_out(self) -> None:
        """Give `module` its own forward back."""
        if self._before is not None:
            self.module.forward = self._before
        else:
            self.module.__dict__.pop("forward", None)


class CopiedAsOriginal(functools.partial[Any]):
    """A forward that takes the place of a module's own; a copy of the module has the module's own.

    replaced  the module
    """

    replaced: ReplacedForward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.replaced.original, memo)  # bound to the module's copy


class UnderPlan:
    """Base class of the forwards that run under a plan."""


def forward_under_plan(module: nn.Module) -> UnderPlan | None:
    """Return the forward that a plan gave to `module`, also from under the wrappers of libraries."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, UnderPlan):
        forward = getattr(forward, "planned", None) or getattr(forward, "__wrapped__", None)
    return forward


def modules_under_plans(model: nn.Module) -> dict[str, UnderPlan]:
    """Return the forwards that plans gave to `model` and to modules of it, by path."""
    found = ((path, forward_under_plan(module)) for path, module in model.named_modules())
    return {path: forward for path, forward in found if forward is not None}


@contextlib.contextmanager
def own_forwards(replaced: Iterable[ReplacedForward]) -> Iterator[None]:
    """Give these modules their own forwards while the context is open."""
    now = [(each, each.module.__dict__.get("forward")) for each in replaced]
    try:
        for each, _ in now:
            each.take_out()
        yield
    finally:
        for each, forward in now:
            if forward is not None:
                each.put(forward)
