"""The options of compiled training under a budget, read and checked in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import weakref
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn

from remat.errors import UsageError
from remat.execution.reports import OnLarger
from remat.units import parse_bytes
from remat.workload.training_loop import HOLDS, Holds, is_power_of_two


@dataclasses.dataclass(frozen=True)
class CompileArguments:
    """The arguments of `remat.compile`, which explains them. Raises UsageError for one that cannot be meant.

    mode  Inductor's
    """

    budget: str | int
    optimizer: Any = torch.optim.AdamW
    accumulation: int = 1
    batches: int = 1
    outside: str | int = 0
    uses: int = 1
    holds: Holds = "outputs"
    numerics: str = "sums"
    on_larger: OnLarger = "warn"
    model: nn.Module | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if not _bytes("budget", self.budget):
            raise UsageError(f"`budget=` is more than 0 bytes, and this is {self.budget!r}.")
        _bytes("outside", self.outside)
        for name in ("accumulation", "batches", "uses"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"`{name}=` is a number of times, 1 or more, not {count!r}.")
        for name, known in {"holds": HOLDS, "on_larger": get_args(OnLarger), "numerics": ("bitwise", "sums")}.items():
            if (chosen := getattr(self, name)) not in known:
                raise UsageError(f"`{name}=` is {' or '.join(map(repr, known))}, not {chosen!r}.")
        if not isinstance(self.model, nn.Module | None):
            raise UsageError(
                f"`model=` is an nn.Module, not {type(self.model).__name__}. Compile a function by "
                'torch.compile(function, backend="remat", options={"budget": "20GiB", "model": model}), with the model '
                "whose parameters count."
            )

    @property
    def may_chunk_losses(self) -> bool:
        """Whether heads may run in chunks, which changes the rounding of their weights' gradients and of no others."""
        return self.numerics != "bitwise" and is_power_of_two(self.accumulation)

    @property
    def budget_bytes(self) -> int:
        return _bytes("budget", self.budget)

    @property
    def outside_bytes(self) -> int:
        return _bytes("outside", self.outside)


class WeakArgument:
    """A weak reference to a model or an optimizer among compile options, because Dynamo keeps options forever.

    An optimizer that is gone, as one that only says how a loop elsewhere trains, counts as one with its settings.
    """

    def __init__(self, held: Any, again: Callable[..., Any] | None = None):
        self._reference: Callable[[], Any] = _nothing if held is None else weakref.ref(held)
        self._again = _made_again(held) if isinstance(held, torch.optim.Optimizer) else again

    def __call__(self) -> Any:
        found = self._reference()
        return self._again if found is None else found

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakArgument, (self._reference(), self._again)

    @staticmethod
    def of(option: Any) -> Any:
        """Return `option`; a model, or an optimizer, is held weakly."""
        if isinstance(option, list | tuple):
            return [WeakArgument.of(each) for each in option]
        return WeakArgument(option) if isinstance(option, nn.Module | torch.optim.Optimizer) else option

    @staticmethod
    def held(option: Any) -> Any:
        """Return what `of` was given."""
        if isinstance(option, list):
            return [WeakArgument.held(each) for each in option]
        return option() if isinstance(option, WeakArgument) else option


def _nothing() -> None:
    return None


def _made_again(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return what makes an optimizer with the settings of this one."""
    known = inspect.signature(type(optimizer)).parameters
    return functools.partial(type(optimizer), **{k: v for k, v in optimizer.defaults.items() if k in known})


NAMES = tuple(field.name for field in dataclasses.fields(CompileArguments))


def _bytes(name: str, size: str | int) -> int:
    if isinstance(size, str):
        return parse_bytes(size, what=name)
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 0:
        raise UsageError(f"`{name}=` is a size such as '20GiB' or a number of bytes, not {size!r}.")
    return int(size)
