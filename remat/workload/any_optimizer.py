"""Any optimizer: one of torch, several in a list or an object, one around another, or none.

Scripts hold Muon for matrices beside AdamW for the rest, sharpness-aware minimisation (SAM) around SGD, pairs of
optimizers and schedulers. A step asks two things of whatever `optimizer` gave: to step, and which tensors it keeps.
Those are found by looking through what it refers to, parameters aside; no class is known by name but L-BFGS.

An optimizer whose `step` wants a closure runs forward and backward again within its step, with more alive than before
it. It is handed a closure; see `recording/fake_step.py` for the one on fakes. Many that want one say so neither in
their signature (`step(closure=None)`) nor in words (`assert closure is not None`): a step that fails is tried with one.
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from remat.errors import RematError, UsageError, is_out_of_memory
from remat.units import gib

Closure = Callable[[], torch.Tensor]
_LEAF_TYPES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_REMEDY = "Return a torch.optim.Optimizer, an object with a `step()` that steps some, or a list of optimizers."

# What `torch/optim/lbfgs.py` holds at once by its line search, in copies of the parameters, beside two for each step of
# its history: the direction of the step before, the present one, the vector that it is made from, a difference of
# gradients and a step that the history did not take, the last gradient and the present one. On top come two temporaries
# of the test for progress; or the parameters at the start of a line search, and six gradients in it: the first, the one
# before, two at the ends of the bracket, the last, and the next.
LBFGS_COPIES = {None: 7 + 2, "strong_wolfe": 7 + 1 + 6}


class AnyOptimizer:
    """Steps the result of a workload's `optimizer` function as one object.

    made     the result         steppers  the objects whose `step` is called, in order; none for None

    Raises UsageError for an object that cannot be stepped, and for L-BFGS.
    """

    def __init__(self, made: Any, parameters: Iterable[nn.Parameter]):
        self.made = made
        self.steppers = tuple(_steppers(made))
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._known: set[int] = set()  # steppers that have stepped, and of those the ones that did with a closure alone
        self._repeating: set[int] = set()
        if made is not None:
            _require_optimizer(made)
        for each in _reached(self.steppers):
            if isinstance(each, torch.optim.LBFGS):
                self._refuse_lbfgs(each)

    @classmethod
    def of(cls, make: Callable[[Any], Any] | None, parameters: Sequence[nn.Parameter]) -> AnyOptimizer:
        """Make the optimizer by `make`, if it is not None. Raises UsageError if that gives none."""
        if make is None:
            return cls(None, parameters)
        if (made := make(parameters)) is None:
            _require_optimizer(made)
        return cls(made, parameters)

    def _refuse_lbfgs(self, optimizer: torch.optim.LBFGS) -> None:
        group = optimizer.param_groups[0]
        copies = 2 * group["history_size"] + LBFGS_COPIES.get(group["line_search_fn"], 0)
        size = sum(parameter.nbytes for parameter in self._parameters.values())
        raise UsageError(
            f"`optimizer` gave LBFGS, which decides by its numbers how often it repeats the step, and no tensor has "
            f"data while planning. Plan with `optimizer=None`, within a budget smaller by the memory of LBFGS: up to "
            f"{copies} copies of the parameters, {gib(copies * size)}."
        )

    @property
    def name(self) -> str | None:
        """The names of the classes that step; None if there are none."""
        return " and ".join(type(each).__name__ for each in self.steppers) or None

    @property
    def alone(self) -> torch.optim.Optimizer | None:
        """The optimizer itself, if it is a plain one of torch's kind."""
        return self.made if isinstance(self.made, torch.optim.Optimizer) else None

    def step(self, closure: Closure) -> None:
        """Step everything once; `closure` runs forward and backward again, for steppers that ask for that."""
        for each in self.steppers:
            self._step(each, closure)

    def _step(self, stepper: Any, closure: Closure) -> None:
        """Step, with the closure if the step requires it: by its signature, or because the first step fails.

        A first step that fails may have begun, and freed gradients: they are computed again.
        """
        may, must = _arguments_of(stepper.step)
        if must or id(stepper) in self._repeating:
            stepper.step(closure)
            return
        try:
            stepper.step()
        except Exception as error:
            if not may or id(stepper) in self._known or is_out_of_memory(error) or isinstance(error, RematError):
                raise
            traceback.clear_frames(error.__traceback__)
            try:
                closure()
                stepper.step(closure)
            except Exception:
                raise error from None
            self._repeating.add(id(stepper))
        self._known.add(id(stepper))

    @property
    def state(self) -> list[torch.Tensor]:
        """Tensors that are kept from one step to the next, without parameters."""
        return list(_tensors(self.steppers, skipped=self._parameters.keys()))

    def states_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
        """Yield, for each of `parameters`, the tensors of `state` that belong to it."""
        optimizers = [each for each in _reached(self.steppers) if isinstance(each, torch.optim.Optimizer)]
        for parameter in parameters:
            states = [each.state[parameter] for each in optimizers if parameter in each.state]
            yield list(_tensors(states, skipped=self._parameters.keys()))


def _arguments_of(function: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether a `step` can take a closure, and whether it must."""
    try:
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    except (TypeError, ValueError):
        return False, False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in parameters if each.kind in (*named, inspect.Parameter.VAR_POSITIONAL)]
    return bool(taken), any(each.kind in named and each.default is inspect.Parameter.empty for each in taken)


def _require_optimizer(made: Any) -> None:
    if not any(True for _ in _steppers(made)):
        given = "None" if made is None else f"a {type(made).__name__}"
        raise UsageError(f"`optimizer` gave {given}, and no optimizer. {_REMEDY}")


def _steppers(made: Any) -> Iterator[Any]:
    """Iterate over the objects to step, in lists and dictionaries too; schedulers and scalers are left out."""
    if isinstance(made, (list, tuple)):
        for each in made:
            yield from _steppers(each)
    elif isinstance(made, Mapping):
        yield from _steppers(list(made.values()))
    elif not isinstance(made, (LRScheduler, torch.amp.GradScaler, type)) and callable(getattr(made, "step", None)):
        yield made


def _reached(value: Any) -> Iterator[Any]:
    """Yield all objects that `value` refers to, itself first, each once; parameters and code are skipped."""
    seen: dict[int, Any] = {}  # a kept object keeps its id
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if each is None or isinstance(each, _LEAF_TYPES) or id(each) in seen:
            continue
        seen[id(each)] = each
        yield each
        waiting += _referred(each)


def _referred(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        return [getattr(value, name) for name in names]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if type(value).__module__.startswith("torch.optim.") and isinstance(value, torch.optim.Optimizer):
        return [value.state]
    return list(getattr(value, "__dict__", {}).values())


def _tensors(value: Any, skipped: Container[int]) -> Iterator[torch.Tensor]:
    for each in _reached(value):
        if isinstance(each, torch.Tensor) and id(each) not in skipped and not hasattr(each, "__tensor_flatten__"):
            yield each
