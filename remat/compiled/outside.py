"""Bytes that a compiled step needs outside its graphs: parameters, their gradients, the optimizer's state and its step.

The optimizer is stepped on fake tensors, so its state and its temporaries are those of its own code.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.recording.optimizer_forms import forms_of
from remat.recording.tracker import Tracker

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]


@dataclasses.dataclass(frozen=True)
class Outside:
    """Bytes outside the graphs.

    always     parameters, buffers, the batch, the optimizer's state, what the caller sets aside
    gradients  of all parameters; they are there as forward begins if `are_kept`
    holds_results  whether the caller holds all results of a forward while backward runs
    others     those of parameters that the graph is not given: its backward may run last
    stepping   the optimizer's temporaries
    """

    always: int
    gradients: int
    stepping: int
    others: int = 0
    are_kept: bool = False
    holds_results: bool = True

    @property
    def during_graphs(self) -> int:
        """There while forward and backward run, beside what these make."""
        return self.always + (self.gradients if self.are_kept else self.others)

    @property
    def while_stepping(self) -> int:
        return self.always + self.gradients + self.stepping


def outside_of(
    tensors: Iterable[Any],
    optimizer: MakeOptimizer | torch.optim.Optimizer | None,
    *,
    model: Iterable[Tensor] = (),
    more: int = 0,
    kept: bool = False,
    holds_results: bool = True,
) -> Outside:
    """Return the bytes outside the graphs that are given `tensors`, once training is under way.

    tensors    parameters, buffers and the batch   model  all parameters and buffers, where they are known
    more       bytes that the caller sets aside for what else runs
    optimizer  one, or what makes one of parameters, None for none     kept  gradients are there from the step before
    """
    given = {id(each): each for each in tensors if isinstance(each, Tensor)}
    found = given | {id(each): each for each in model}
    storages = {id(each.untyped_storage()): each.untyped_storage().nbytes() for each in found.values()}
    parameters = [each for each in found.values() if isinstance(each, nn.Parameter) and each.requires_grad]
    gradients = sum(parameter.nbytes for parameter in parameters)
    others = sum(parameter.nbytes for parameter in parameters if id(parameter) not in given)
    state, stepping = _stepped(parameters, optimizer)
    return Outside(sum(storages.values()) + state + more, gradients, stepping, others, kept, holds_results)


def _stepped(parameters: Sequence[nn.Parameter], optimizer: Any) -> tuple[int, int]:
    """(bytes of state, bytes of temporaries) of an optimizer for `parameters`."""
    if optimizer is None or not parameters:
        return 0, 0
    tracker, kind = Tracker(), parameters[0].device.type
    with FakeTensorMode(), tracker, tracker.answering(), forms_of(kind, kind):
        fakes = [nn.Parameter(_like(parameter)) for parameter in parameters]
        for fake in fakes:
            fake.grad = torch.empty_like(fake)
        made = _made(optimizer, parameters, fakes)
        before = tracker.alive_now
        made.step()
        state, first = tracker.alive_now - before, tracker.op_count
        made.step()
        alive = tracker.alive()[first:]
    return state, max(int(alive.max(initial=0)) - before - state, 0)


def _like(parameter: Tensor) -> Tensor:
    return torch.empty(tuple(map(int, parameter.shape)), dtype=parameter.dtype, device=parameter.device)


def _made(optimizer: Any, parameters: Sequence[nn.Parameter], fakes: Sequence[nn.Parameter]) -> Any:
    """The optimizer for fake parameters; of one that is there, another with its groups and settings."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(fakes)
    fake_of = dict(zip(map(id, parameters), fakes, strict=True))
    known = inspect.signature(type(optimizer).__init__).parameters
    groups = []
    for group in optimizer.param_groups:
        taken = [fake_of[id(parameter)] for parameter in group["params"] if id(parameter) in fake_of]
        if taken:
            groups.append({**{name: value for name, value in group.items() if name in known}, "params": taken})
    make: Any = type(optimizer)
    return make(groups)
