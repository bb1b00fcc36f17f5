"""Settling: bring a model to its steady state before its forward is captured.

The captured graph is then the one that training runs.

The first forward of a model is not its steady state: transformers installs the hooks that record outputs in the first
forward that asks for one, a table is made when it is first needed, a memory of the last batch is not there yet. A graph
captured meanwhile is another than every later one. So planning runs forwards until two in a row have the same graphs,
and captures those. The plan says which graphs there were before (`EarlyObservations`), and what every forward changes
in the model; `execution/early_forwards.py` runs them. It also says which models have hooks by then, and applying it
lets transformers install them before the first capture: the same graph then comes wherever in a run a plan is applied.

Settling also finds the branches of eager mode that cannot be traced (see `eager_answers.py`). A branch is suspected
where tracing broke in it. It is given up where tracing gets further with the traced one. A Function that was not
traced is left whole (`opaque_functions.py`).
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from remat._torch.dynamo import frames_traced, graph_breaks
from remat.capture.anchors import Signature
from remat.capture.eager_answers import Answers
from remat.capture.holders import GROWN, NUMBER
from remat.capture.model_state import ModelState
from remat.capture.opaque_functions import changing_functions, functions_behind
from remat.errors import CaptureError, RematError
from remat.units import first_few


class UnsettledForward(RematError):
    """The first forward has another graph than planned, perhaps because the model is not complete yet."""


EARLY_BY_TRACES = "early_by_traces"  # in `Plan.about`
MOST_FORWARDS = 4  # until a model is steady
MOST_WITH_STATE = 64  # ... where something that it keeps from forward to forward changes: a queue that fills
_CAPTURING_MODULE = "transformers.utils.output_capturing"
_CAPTURING_FLAG = "_output_capturing_hooks_installed"
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_parameters", "_buffers")


@dataclasses.dataclass(frozen=True)
class EarlyObservations:
    """Observations of a model's forwards, step by step, until they repeated.

    history  the graph calls of each step
    carried  state of the model that every step changes, including periodic changes: kinds by name
    shared   names of carried state that the model shares with the rest of the program
    grown_and_read  names of carried lists that grow and that a forward reads, so that every forward is traced anew
    by_traces  whether the first graphs are others because they are traced then, and not because of what is carried
    """

    history: tuple[tuple[Signature, ...], ...] = ()
    carried: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = ()
    grown_and_read: tuple[str, ...] = ()
    by_traces: bool = False

    @property
    def is_any(self) -> bool:
        """Whether the first forwards had other graphs than the last."""
        return any(graphs != self.history[-1] for graphs in self.history)

    def to_json(self, recorded: tuple[Signature, ...]) -> dict[str, Any]:
        """Return the entry of `Plan.about` if the graph calls `recorded` are planned; empty if there is none."""
        planned = {graph.key for graph in recorded}
        keys = dict.fromkeys(graph.key for graphs in self.history for graph in graphs if graph.key not in planned)
        found: dict[str, Any] = {"early_graphs": list(keys)}
        found["early_forwards"] = self.history.index(recorded) if recorded in self.history else 0
        found |= {"carried": dict(self.carried), "carried_shared": list(self.shared)}
        found |= {EARLY_BY_TRACES: self.by_traces}
        return {name: value for name, value in found.items() if value}


class SteadyStep(Protocol):
    """A step whose model is to be settled.

    calls   its captured forwards, under `calls.answers`      signatures  of the graphs that ran last
    known_functions  names of those that are left whole from the first capture on
    """

    calls: Any
    known_functions: frozenset[str]
    early: EarlyObservations

    @property
    def model(self) -> nn.Module: ...
    @property
    def signatures(self) -> tuple[Signature, ...]: ...
    def capture_anew(self, answers: Answers | None) -> None: ...
    def forward(self) -> Any: ...
    def run_untraced(self) -> None: ...
    def state(self) -> ModelState: ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Capture:
    """One attempt: its answers, where tracing broke, the untraced Functions, and why it failed, if it did."""

    answers: Answers
    breaks: tuple[Sequence[traceback.FrameSummary], ...]
    failure: CaptureError | None
    functions: frozenset[str] = frozenset()
    early: EarlyObservations = dataclasses.field(default_factory=lambda: EarlyObservations())

    def gets_further_than(self, other: _Capture) -> bool:
        if self.failure is None and other.failure is None:
            return len(self.breaks) < len(other.breaks)
        return other.failure is not None and (self.failure is None or str(self.failure) != str(other.failure))


def settle(step: SteadyStep, run_again: Callable[[], None]) -> None:
    """Bring the model of `step` to its steady state, with answers by which eager branches can be captured.

    run_again  runs one more forward of the captured graphs

    Raises CaptureError if the forward cannot be captured at all, or never stays the same.
    """
    found = _steady(step, run_again, None) if step.calls.answers is None else _answered(step, run_again)
    if found.failure is not None:
        raise found.failure
    step.early = found.early


def _answered(step: SteadyStep, run_again: Callable[[], None]) -> _Capture:
    """Return the capture under the answers that keep the most eager branches."""
    untouched = step.state()
    whole, changing = changing_functions()
    first = found = _steady(step, run_again, Answers(opaque=step.known_functions | whole))
    found.answers.opaque &= step.known_functions | found.functions  # those that the step calls
    if changes := changing & found.functions:
        return dataclasses.replace(found, failure=_changing(changes))
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
    if first.early.is_any and found is not first:  # the first forwards, under these answers
        untouched.put_back()
        return _steady(step, run_again, found.answers)
    if step.calls.answers is not found.answers:
        found = dataclasses.replace(_captured(step, found.answers), early=found.early)
        run_again()
    return found


def _steady(step: SteadyStep, run_again: Callable[[], None], answers: Answers | None) -> _Capture:
    """Capture the model in its steady state, when two successive forwards have the same graphs.

    Where Dynamo gives something up behind its first trace, a capture never has the graphs of the forwards that follow.
    It then is steady where a capture came out as the last one did, and forwards without another stay as they are.
    """
    history: list[tuple[Signature, ...]] = []
    forwards, settled = 0, False
    last: list[tuple[Signature, ...]] = []
    by_traces = reads_grown = False
    least: int | None = None  # forwards, until a list that they read has stopped growing
    while not settled:
        tables, begins = _state_of(step.model), len(history)
        found = _captured(step, answers)
        if found.failure is not None:
            return found
        history.append(step.signatures)
        settled, stays = _state_of(step.model) == tables, False
        while not stays:
            tables, before, traced = _state_of(step.model), step.state(), frames_traced()
            run_again()
            forwards += 1
            history.append(step.signatures)
            carried = before.changes(statistics=False)
            reads_grown = frames_traced() > traced and step.state().lengths != before.lengths
            stays = history[-1] == history[-2] and _state_of(step.model) == tables
            if stays and reads_grown:
                least = forwards + _growing_forwards(step) if least is None else least
                stays = forwards >= least
            settled = settled and stays
            fills = any(kind != NUMBER for kind in carried.values())
            if not settled and forwards >= (MOST_WITH_STATE if fills else MOST_FORWARDS):
                found = dataclasses.replace(found, failure=_unsteady(carried) if fills else None)
                settled = stays = True
        if not settled and (captured := history[begins:]) == last:
            for _ in captured:
                run_again()
                history.append(step.signatures)
            forwards += len(captured)
            settled = _state_of(step.model) == tables and set(history[-len(captured) :]) == {captured[-1]}
            by_traces = settled
        last = history[begins:]
    shared = tuple(name for name in carried if name in before.shared_names)
    grown = tuple(name for name, kind in carried.items() if kind == GROWN and reads_grown)
    early = EarlyObservations(tuple(history), carried, shared, grown, by_traces)
    return dataclasses.replace(found, early=early)


def _growing_forwards(step: SteadyStep) -> int:
    """Return after how many forwards more no container grows any more, as in a warm-up; 0 if one grows for ever."""
    begun = step.state()
    if begun.only_once:
        return 0
    before, found = begun, 0
    try:
        for forward in range(1, MOST_WITH_STATE):
            step.run_untraced()
            now = step.state()
            if now.lengths == before.lengths:
                found = forward
                break
            before = now
    except CaptureError:  # it cannot run untraced on fakes
        found = 0
    begun.put_back()
    return found


def _unsteady(carried: Mapping[str, str]) -> CaptureError:
    return CaptureError(
        f"the forward has another graph in every step, also after {MOST_WITH_STATE} of them, because of what it keeps "
        f"from one to the next ({listed(carried)}), and a plan is for a graph that stays: keep it in a tensor of a "
        "fixed size, which is there when the model is made."
    )


def _changing(names: Iterable[str]) -> CaptureError:
    return CaptureError(
        f"the forward of {listed(name.partition(':')[2] for name in sorted(names))} changes something beside its `ctx` "
        "(a global, a number of a class), and a recomputation would change it again: change that where the Function is "
        "called, and give it to the Function as an argument."
    )


def listed(names: Iterable[str]) -> str:
    """List the first few names, as code."""
    return first_few(f"`{name}`" for name in names)


def _captured(step: SteadyStep, answers: Answers | None) -> _Capture:
    step.capture_anew(answers := answers and Answers(answers.traced, answers.opaque))
    reasons = graph_breaks()
    known, failure, functions = len(reasons), None, frozenset[str]()
    try:
        functions = functions_behind(step.forward())
    except CaptureError as error:
        failure = error
    breaks: list[Sequence[traceback.FrameSummary]] = [reason.user_stack for reason in reasons[known:]]
    if failure is not None and (stack := getattr(failure.__cause__, "real_stack", None)) is not None:
        breaks.append(stack)
    return _Capture(answers or Answers(), tuple(breaks), failure, functions)


def _state_of(model: nn.Module) -> list[Any]:
    """Return the parts of a model that a forward may change and that its graph depends on."""
    return [(path, type(m), [list(getattr(m, name)) for name in _TABLES]) for path, m in model.named_modules()]


def recording_models(model: nn.Module) -> list[str]:
    """List the paths of the models in `model` that have transformers' hooks that record outputs."""
    return [path for path, module in model.named_modules() if getattr(module, _CAPTURING_FLAG, False)]


def install_recording_hooks(model: nn.Module, paths: Iterable[str]) -> None:
    """Let transformers install, in the models at `paths`, the hooks that their first forward would install.

    Raises CaptureError where this version of transformers has no such function.
    """
    modules = dict(model.named_modules())
    missing = [
        modules[path] for path in paths if path in modules and not getattr(modules[path], _CAPTURING_FLAG, False)
    ]
    if not missing:
        return
    install = getattr(sys.modules.get(_CAPTURING_MODULE), "maybe_install_capturing_hooks", None)
    if install is None:
        raise CaptureError(
            f"the plan is for a model that records outputs through hooks, and {_CAPTURING_MODULE} of this version of "
            "transformers cannot be asked to install them; apply the plan after a first forward, or plan again."
        )
    for module in missing:
        install(module)
