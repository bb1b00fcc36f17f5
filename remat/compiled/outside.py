"""Bytes that a compiled step needs outside its graphs: parameters, their gradients, the optimizer's state and its step.

The optimizer is stepped on fake tensors, so its state and its temporaries are those of its own code.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.capture.kept_tensors import strided_parts
from remat.costing.operator_timing import device_target
from remat.costing.workspaces import cublas_bytes
from remat.errors import RematError, UsageError
from remat.recording.optimizer_forms import forms_of
from remat.recording.remedies import describe
from remat.recording.repeated_step import RepeatedStep
from remat.recording.tracker import FIXED_STORAGE, Tracker
from remat.workload.any_optimizer import AnyOptimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]


@dataclasses.dataclass(frozen=True)
class Outside:
    """Bytes outside the graphs.

    always     parameters, buffers, batches, the optimizer's state, libraries' workspaces, what the caller sets aside
    gradients  of all parameters; they are there as forward begins if `are_kept`
    holds_results  whether the caller holds all results of a forward until the next one returns
    others     those of parameters that the graph is not given: its backward may run last
    stepping   the optimizer's temporaries
    repeating  what an optimizer that runs forward and backward again holds meanwhile
    """

    always: int
    gradients: int
    stepping: int
    others: int = 0
    are_kept: bool = False
    holds_results: bool = True
    repeating: int = 0

    @property
    def during_graphs(self) -> int:
        """There while forward and backward run, beside what these make."""
        return self.always + self.repeating + (self.gradients if self.are_kept else self.others)

    @property
    def while_stepping(self) -> int:
        return self.always + self.gradients + self.stepping


def outside_of(
    tensors: Iterable[Any],
    optimizer: MakeOptimizer | Any,
    *,
    model: Iterable[Tensor] = (),
    more: int = 0,
    kept: bool = False,
    holds_results: bool = True,
) -> Outside:
    """Return the bytes outside the graphs that are given `tensors`, once training is under way.

    tensors    parameters, buffers and the batch   model  all parameters and buffers, where they are known
    more       bytes that the caller sets aside for what else runs
    optimizer  one or several, or what makes one of parameters, None for none
    kept       gradients are there from the step before

    Raises UsageError for an optimizer that cannot be stepped on fake tensors.
    """
    given = {id(each): each for each in tensors if isinstance(each, Tensor)}
    found = given | {id(each): each for each in model}
    parts = (part for each in found.values() for part in strided_parts(each))
    storages = {id(each): each.nbytes() for each in map(Tensor.untyped_storage, parts)}
    parameters = [each for each in found.values() if isinstance(each, nn.Parameter) and each.requires_grad]
    gradients = sum(parameter.nbytes for parameter in parameters)
    others = sum(parameter.nbytes for parameter in parameters if id(parameter) not in given)
    state, stepping, repeating = _stepped(parameters, optimizer)
    always = sum(storages.values()) + state + _library_bytes(found.values()) + more
    return Outside(always, gradients, stepping, others, kept, holds_results, repeating)


def parameters_in(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer, or of several in a list; none of what makes one."""
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        for group in getattr(each, "param_groups", ()):
            yield from group["params"]


def _stepped(parameters: Sequence[nn.Parameter], optimizer: Any) -> tuple[int, int, int]:
    """Return the bytes of an optimizer: its state, its temporaries, and those while it repeats a step."""
    if optimizer is None or not parameters:
        return 0, 0, 0
    try:
        return _stepped_on_fakes(parameters, optimizer)
    except RematError:
        raise
    except Exception as error:
        raise UsageError(
            f"`optimizer=` cannot be stepped on tensors without data: {describe(error).rstrip('.')}. Say "
            "`optimizer=None`, and set the bytes of its state and of its step aside with `outside=`."
        ) from error


def _stepped_on_fakes(parameters: Sequence[nn.Parameter], optimizer: Any) -> tuple[int, int, int]:
    tracker, kind = Tracker(), parameters[0].device.type
    with FakeTensorMode(), tracker, tracker.answering(), forms_of(kind, kind), _not_compiling():
        fakes = [nn.Parameter(_like(parameter)) for parameter in parameters]
        for fake in fakes:
            fake.grad = torch.empty_like(fake)
        made = AnyOptimizer.of(functools.partial(_made, optimizer, parameters), fakes)
        again = RepeatedStep(fakes, fakes[0].device)
        for _ in range(2):
            before, first = tracker.alive_now, tracker.op_count
            again.begin(tracker)
            made.step(again)
        alive = tracker.alive()[first:]
        stepping = int(alive.max(initial=0)) - before
        kept = {tracker.storage_of(tensor) for tensor in made.state} - {FIXED_STORAGE}
        state = sum(tracker.storages[index].size_bytes for index in kept)
        return state, max(stepping, 0), again.beside_bytes(made.state)


def _library_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of cuBLAS's workspaces on a GPU, of the threads of forward and of backward."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return 0 if device is None else 2 * cublas_bytes(device_target(device))


def _not_compiling() -> contextlib.AbstractContextManager[Any]:
    """Let an optimizer step as it does between compiled graphs, though one is being compiled."""
    return mock.patch.object(torch.compiler, "is_compiling", lambda: False)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(map(int, tensor.shape)), dtype=tensor.dtype, device=tensor.device)


def _made(optimizer: Any, parameters: Sequence[nn.Parameter], fakes: Sequence[nn.Parameter]) -> Any:
    """Make the optimizer of fake parameters; copy one that exists, with them in place of its own.

    A copy has all settings, whatever its class is made of. Parameters that are none of these take nothing in it.
    """
    if isinstance(optimizer, type) or (callable(optimizer) and not hasattr(optimizer, "step")):
        return optimizer(fakes)
    with (
        mock.patch.object(Tensor, "__deepcopy__", lambda tensor, memo: _like(tensor)),
        mock.patch.object(nn.Parameter, "__deepcopy__", lambda parameter, memo: nn.Parameter(torch.empty(0))),
        mock.patch.object(torch.optim.Optimizer, "__getstate__", _whole),
    ):
        return copy.deepcopy(optimizer, dict(zip(map(id, parameters), fakes, strict=True)))


def _whole(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all that a step may read: torch's own leaves out what a subclass keeps beside groups and state.

    Hooks stay behind, and the `step` that a scheduler puts in the method's place, which steps the original.
    """
    return {n: value for n, value in vars(optimizer).items() if n != "step" and not n.startswith("_optimizer_")}
