"""The forward of a module, replaced for a while."""

from __future__ import annotations

import contextlib
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
