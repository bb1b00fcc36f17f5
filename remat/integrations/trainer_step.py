"""A Trainer's step on another model: its forward under autocast, a stand-in for the Trainer, answers about data.

Rules 3 and 5 of `trainer_workload.py` say what holds here.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from remat._torch.dynamo import know_functions
from remat._torch.training import UnseenMode
from remat.integrations.one_process import one_process
from remat.integrations.settings import outputs_in_fp32


@contextlib.contextmanager
def as_in_training(model: nn.Module, autocast: torch.dtype | None) -> Iterator[_Answers]:
    """Run the forward of `model`, and nothing else, as accelerate does while the context is open.

    There is one process: the others do not plan.
    """
    device, forward = next(model.parameters()).device.type, model.forward
    own, answers = "forward" in model.__dict__, _Answers()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with answers.silent(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            outputs = forward(*args, **kwargs)
        torch.clear_autocast_cache()
        return outputs if autocast is None else outputs_in_fp32(outputs)

    model.forward = wrapped
    try:
        with one_process(), torch.autocast(device, enabled=False), answers:
            yield answers
    finally:
        if own:
            model.forward = forward
        else:
            del model.__dict__["forward"]


@contextlib.contextmanager
def hooks_too(context: Callable[[], contextlib.AbstractContextManager[Any]], answers: _Answers) -> Iterator[None]:
    """Run hooks that a loss registers meanwhile under `context`: hooks of cached losses call the model in backward."""
    know_functions()  # or they would keep this one, and with it the model
    register = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        def within(gradient: torch.Tensor) -> Any:
            with context():
                return hook(gradient)

        return register(tensor, hook if answers.are_silent else within)

    with mock.patch.object(torch.Tensor, "register_hook", register_hook):
        yield


def stand_in_of(trainer: Any, model: nn.Module) -> Any:
    """Copy `trainer` with another model and with own copies of its running notes."""
    made = copy.copy(trainer)
    made.__dict__.update({name: copy.deepcopy(value) for name, value in vars(trainer).items() if is_notes(value)})
    made.state = dataclasses.replace(trainer.state)  # without notes beside its fields (axolotl's tokens)
    made.model = made.model_wrapped = model
    made.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return made


def is_notes(value: Any) -> bool:
    """Return whether `value` is a container of nothing but containers, numbers and text."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (list, set, collections.deque)) and all(map(_is_plain, value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or is_notes(value)


class _Answers(UnseenMode):
    """Answers questions about data that fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self._silent = 0

    def silent(self) -> _Silent:
        return _Silent(self)

    @property
    def are_silent(self) -> bool:
        return self._silent > 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._silent or not isinstance(args[0] if args else None, FakeTensor):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            with contextlib.suppress(DataDependentOutputException):  # unless its value is known
                return func(*args, **(kwargs or {}))
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [each for index in args[1] for each in _of_all(index)], *args[2:])
        return func(*args, **(kwargs or {}))


def _of_all(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Replace a mask by the indices of everything; other indices stay."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


@dataclasses.dataclass
class _Silent:
    answers: _Answers

    def __enter__(self) -> None:
        self.answers._silent += 1

    def __exit__(self, *error: object) -> None:
        self.answers._silent -= 1
