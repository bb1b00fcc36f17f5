"""The forwards of a step on fake tensors: each call of the model, or of a module, traced in place.

A step that calls its model traces the model's forward. One that calls modules of it in place of the model
(`model.head(model.body(x))`, a generator and a critic in one container) traces theirs: `outermost_calls` finds them, in
a step that runs untraced. What a step computes between two forwards is outside of all, and no region reaches there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from remat.capture.attention_masks import IsOnes, Masks
from remat.capture.circumstances import given_to
from remat.capture.dynamo import ExecuteCall, GraphCalls
from remat.capture.eager_answers import Answers
from remat.capture.elsewhere import CaptureDevice
from remat.evaluation.forwards import Forward
from remat.recording.tracker import Tracker
from remat.workload.held_outputs import output_tensors
from remat.workload.passes import Pass
from remat.workload.replaced_forward import ReplacedForward, own_forwards


class TracedForwards:
    """The forwards at some paths of a model.

    made     forwards of the present step, in order
    running  whether a traced forward runs now
    inside   whether a forward runs now, traced or not
    answers  see `GraphCalls`
    """

    def __init__(
        self,
        replaced: Mapping[str, ReplacedForward],
        execute_call: ExecuteCall,
        *,
        answers: Answers | None,
        elsewhere: CaptureDevice | None,
        is_ones: IsOnes,
        planned: Masks,
        device_type: str,
    ):
        self.answers = answers
        self._device_type = device_type
        self.running = self.inside = False
        self.made: list[Forward] = []
        self._replaced = replaced
        self._calls = {
            path: GraphCalls(
                each.original,
                execute_call,
                under=path,
                answers=answers,
                elsewhere=elsewhere,
                is_ones=is_ones,
                planned=planned,
            )
            for path, each in replaced.items()
        }
        self._pass = Pass()

    def begin(self) -> None:
        """Begin a step."""
        self._pass.begin()
        self.made.clear()

    @property
    def own_checkpoints(self) -> int:
        """Number of the model's own calls of `torch.utils.checkpoint`, see `GraphCalls`."""
        return sum(calls.own_checkpoints for calls in self._calls.values())

    def look(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Masks:
        """Return the masks of a call, see `GraphCalls.look`."""
        return self._calls[path].look(args, kwargs)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Give all modules their own forwards while a forward runs, which may call its own module again."""
        self.inside = True
        try:
            with own_forwards(self._replaced.values()):
                yield
        finally:
            self.inside = False

    def run(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward, traced."""
        if self.made and self._pass.is_over(len(self.made) + 1):
            self.made[-1] = dataclasses.replace(self.made[-1], ended=True)
            self._pass.goes_on()
        calls = self._calls[path]
        calls.first = sum(forward.calls for forward in self.made)
        given = given_to(calls.function, args, kwargs)
        self.running = True
        try:
            with self.alone():
                outputs = calls(*args, **kwargs)
        finally:
            self.running = False
        number, masks = len(self.made), dataclasses.asdict(calls.masks)
        calls_of = calls.first, calls.count, number
        self.made.append(Forward(path, *calls_of, calls.elements, given, masks, self._autocast()))
        self._pass.add(outputs)
        return outputs

    def _autocast(self) -> str | None:
        """Return the dtype of the active autocast; None if there is none."""
        if not torch.is_autocast_enabled(self._device_type):
            return None
        return str(torch.get_autocast_dtype(self._device_type)).removeprefix("torch.")


class ParametersSeen(Tracker):
    """Also notes whether a step computes with parameters outside of the forwards that are traced.

    touched  those of the tensors `named` that an operator takes
    """

    def __init__(
        self, alignment_bytes: int, model: nn.Module, forwards: TracedForwards, named: Iterable[torch.Tensor] = ()
    ):
        super().__init__(alignment_bytes)
        self.outside = False
        self.touched: list[torch.Tensor] = []
        self._named = {id(each.untyped_storage()): each for each in named if each.layout is torch.strided}
        self._forwards = forwards
        self._parameters = {id(p.untyped_storage()) for p in model.parameters()}

    def dispatched(self, op: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._named:
            leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            found = (self._named.pop(id(leaf.untyped_storage()), None) for leaf in leaves)
            self.touched += (tensor for tensor in found if tensor is not None)
        if self.outside or self._forwards.running or not torch.is_grad_enabled():
            return
        flat = tree_leaves((args, kwargs))
        self.outside = any(
            isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in self._parameters for leaf in flat
        )


def outermost_calls(model: nn.Module, step: Callable[[], Any]) -> Sequence[str]:
    """List the paths of the outermost modules of `model` that `step` calls; "" is the model itself.

    Modules without parameters, and those whose outputs have no gradients, are left out.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    around: list[nn.Module] = []
    found: dict[str, None] = {}

    def enter(module: nn.Module, args: Any) -> None:
        around.append(module)

    def leave(module: nn.Module, args: Any, outputs: Any) -> None:
        around.pop()
        path = paths.get(id(module))
        if around or path is None or not any(True for _ in module.parameters()):
            return
        if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in output_tensors(outputs)):
            found[path] = None

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return list(found)
