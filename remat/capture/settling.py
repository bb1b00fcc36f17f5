"""Settling: what has to be known, or done, before a model's forward is captured, so that the graph is the one that
training runs.

The first forward of a model is not its steady state: transformers installs the hooks that record outputs in the first
forward that asks for one. A graph captured meanwhile is another than every later one. So planning runs the forward
until the model stays as it is, and captures it then. The plan says which models have hooks by then, and applying it
lets transformers install them before the first capture: the same graph then comes wherever in a run a plan is applied.

Other models complete themselves in their first forward in ways that nobody can do for them (a table made when it is
first needed). Where the first forward after applying has another graph than planned, it is left before that graph runs,
the model's own forward is run once without gradients, random states and buffers are put back, and the forward is
captured again before the plan is judged. Python's own state is not put back: a counter in a module counts one more.
Doing so always, instead of letting transformers install its hooks, was rejected for that.

Settling also finds the branches of eager mode that cannot be traced (see `eager_answers.py`). A branch is suspected
where tracing broke in it. It is given up where tracing gets further with the traced one. A Function that was not
traced is left whole (`opaque_functions.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from remat._torch.dynamo import frames_traced, graph_breaks
from remat._torch.training import without_modes
from remat.capture import four_bit
from remat.capture.eager_answers import Answers
from remat.capture.opaque_functions import functions_behind
from remat.errors import CaptureError, RematError

if TYPE_CHECKING:
    from remat.recording.fake_step import FakeStep


class Unsettled(RematError):
    """The first forward has another graph than planned: it may be because the model is not complete yet."""


MOST_FORWARDS = 4  # until a model stays as it is
_RECORDING = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_parameters", "_buffers")


@dataclasses.dataclass(frozen=True, eq=False)
class _Capture:
    """One attempt: its answers, where tracing broke, Functions that ran as they stand, and why it failed, if it did."""

    answers: Answers
    breaks: tuple[Sequence[traceback.FrameSummary], ...]
    failure: CaptureError | None
    functions: frozenset[str] = frozenset()

    def gets_further_than(self, other: _Capture) -> bool:
        if self.failure is None and other.failure is None:
            return len(self.breaks) < len(other.breaks)
        return other.failure is not None and (self.failure is None or str(self.failure) != str(other.failure))


def settle(step: FakeStep, run_again: Callable[[], None]) -> None:
    """Bring the model of `step` to its steady state, and let its answers be such that eager branches are captured
    where they can be. Raises CaptureError where the forward cannot be captured at all.

    run_again  one more forward of what is captured
    """
    whole = [four_bit.FUNCTION] if four_bit.has_4_bit_layers(step.model) else []
    found = _steady(step, run_again, Answers(opaque=whole))
    while untraced := found.functions - found.answers.opaque:
        other = _steady(step, run_again, Answers(opaque=found.answers.opaque | untraced))
        if other.failure is not None:
            break
        found = other
    tried: set[str] = set()
    while suspects := [q for q in found.answers.suspects(found.breaks) if q.asker not in tried]:
        tried.add(suspects[-1].asker)
        other = _steady(step, run_again, Answers(found.answers.traced | {suspects[-1].asker}, found.answers.opaque))
        if other.gets_further_than(found):
            found = other
    if step.calls.answers is not found.answers:
        found = _captured(step, found.answers)
    if found.failure is not None:
        raise found.failure


def _steady(step: FakeStep, run_again: Callable[[], None], answers: Answers) -> _Capture:
    """A capture of the model as it is when it stays as it is."""
    anew_before = -1
    for _ in range(MOST_FORWARDS):
        before = _state_of(step.model)
        found = _captured(step, answers)
        if found.failure is not None:
            break
        frames = frames_traced()
        run_again()
        anew = frames_traced() - frames
        if _state_of(step.model) == before and anew in (0, anew_before):  # some frames every forward traces anew
            break
        anew_before = anew
    return found


def _captured(step: FakeStep, answers: Answers) -> _Capture:
    step.capture_anew(answers := Answers(answers.traced, answers.opaque))
    reasons = graph_breaks()
    known, failure, functions = len(reasons), None, frozenset[str]()
    try:
        functions = functions_behind(step.forward())
    except CaptureError as error:
        failure = error
    breaks: list[Sequence[traceback.FrameSummary]] = [reason.user_stack for reason in reasons[known:]]
    if failure is not None and (stack := getattr(failure.__cause__, "real_stack", None)) is not None:
        breaks.append(stack)
    return _Capture(answers, tuple(breaks), failure, functions)


def _state_of(model: nn.Module) -> list[Any]:
    """What a forward may change in a model that its graph depends on."""
    return [(path, type(m), [list(getattr(m, name)) for name in _TABLES]) for path, m in model.named_modules()]


def recording_models(model: nn.Module) -> list[str]:
    """Paths of the models in `model` that have transformers' hooks that record outputs."""
    return [path for path, module in model.named_modules() if getattr(module, _INSTALLED, False)]


def install_recording_hooks(model: nn.Module, paths: Iterable[str]) -> None:
    """Let transformers install, in the models at `paths`, the hooks that their first forward would install.

    Raises CaptureError where this version of transformers has no such function.
    """
    modules = dict(model.named_modules())
    missing = [modules[path] for path in paths if path in modules and not getattr(modules[path], _INSTALLED, False)]
    if not missing:
        return
    install = getattr(sys.modules.get(_RECORDING), "maybe_install_capturing_hooks", None)
    if install is None:
        raise CaptureError(
            f"the plan is for a model that records outputs through hooks, and {_RECORDING} of this version of "
            "transformers cannot be asked to install them; apply the plan after a first forward, or plan again."
        )
    for module in missing:
        install(module)


class Before:
    """What a forward changes beside Python's own state, as it was: random states, and buffers, on the host.

    Nobody who watches operators sees the copies.
    """

    def __init__(self, model: nn.Module):
        with without_modes():
            self._buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in model.buffers()]
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        self._random = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        self._on_cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def put_back(self) -> None:
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
        for device, state in self._on_cuda:
            torch.cuda.set_rng_state(state, device)
        with torch.no_grad(), without_modes():
            for buffer, was in self._buffers:
                buffer.copy_(was)


def complete(before: Before, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a model complete itself in a forward without gradients, from and back to how things were `before`."""
    with _put_back(before), torch.no_grad():
        forward(*args, **kwargs)


@contextlib.contextmanager
def _put_back(before: Before) -> Iterator[None]:
    before.put_back()
    try:
        yield
    finally:
        before.put_back()
