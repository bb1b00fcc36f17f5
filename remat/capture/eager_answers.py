"""Answers to library code that asks, while a plan's graph is captured, whether it is being traced.

Libraries ask (`torch.compiler.is_compiling()`, `transformers.utils.is_torchdynamo_compiling()`, ...) and take another
branch where the answer is yes: other kernels, other roundings, other bytes. A captured graph runs in eager mode, in
place of the eager forward, so the answer is that of eager mode: no. The question is folded to a constant inside
Dynamo, by the handler of torch's own predicates, to which every library's predicate comes down. There the answer is
given, for our captures only: what else is compiled in the same process, meanwhile or inside, hears Dynamo's answer.
Replacing the predicates in the libraries' modules was rejected: there are dozens of copies, guards would hold on to
them, and every thread would see them.

Some questions are not about what is computed, and Dynamo's own answer stands:

Rule 1  torch's own code asks in order to be traceable.
Rule 2  A predicate that is handed a tensor asks whether its data can be read. While traced, it cannot.
Rule 3  A forward without an attention mask asks whether to make one of ones, in order to look at it and drop it.
Rule 4  Some modules of transformers only keep books: context variables, caches, checks of arguments, warnings.

Rule 5  Whether a CUDA graph is being recorded: no. Dynamo would ask CUDA, and give up where a torch built for CUDA
        finds no driver; eager code catches that error.

And some branches of eager mode cannot be traced. Recording finds them (`Answers.suspects`), takes the traced branch,
and the plan names them: `Answers.traced` holds who hears Dynamo's answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from remat._torch.dynamo import FirstNode, backend_of_output, constant, following, handlers, is_of_tensor, predicates
from remat._torch.elsewhere import traced_elsewhere
from remat.capture.composites_on_fakes import CHECKED, composites_on_fakes
from remat.capture.elsewhere import CaptureDevice
from remat.shared import Shared

_BOOKS = (  # Rule 4
    "transformers.cache_utils",
    "transformers.integrations.flex_attention",  # compiles its kernel if nothing else does
    "transformers.integrations.hub_kernels",
    "transformers.pytorch_utils",
    "transformers.utils.deprecation",
    "transformers.utils.generic",
    "transformers.utils.import_utils",
    "transformers.utils.output_capturing",
)
_RESUME_FUNCTION = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

Frame = tuple[str, str]  # file, name of the function


@dataclasses.dataclass(frozen=True)
class Question:
    """The code that asked, its question, and the frames that the answer may steer: the asker's and its caller's."""

    asker: str
    predicate: str
    frames: tuple[Frame, ...]

    def __str__(self) -> str:
        return f"{self.asker} asks {self.predicate}"


class Answers:
    """Eager mode's answers for one capture; the askers in `traced` get Dynamo's.

    opaque     names of the Functions that are not traced (`opaque_functions.py`)

    questions  that eager mode and Dynamo answer differently, by asker, as the capture met them
    """

    def __init__(self, traced: Iterable[str] = (), opaque: Iterable[str] = ()):
        self.traced = frozenset(traced)
        self.opaque = frozenset(opaque)
        self.questions: dict[str, Question] = {}

    def eager(self, tx: Any, predicate: Callable[[], bool]) -> bool:
        """Return whether the question at `tx` gets eager mode's answer, and note the question."""
        name, tx = predicate.__name__, tx
        while tx is not None and _is_predicate(tx):
            if any(is_of_tensor(value) for value in _values(tx)):  # Rule 2
                return False
            name, tx = tx.f_code.co_name, tx.parent
        home = tx.f_globals.get("__name__", "") if tx is not None else ""
        if tx is None or _is_torchs(home) or home in _BOOKS or _makes_mask(tx):
            return False
        asker = f"{home}.{_unresumed(tx.f_code.co_qualname)}"
        self.questions.setdefault(asker, Question(asker, name, tuple(map(_frame_of, (tx, tx.parent or tx)))))
        return asker not in self.traced

    def suspects(self, stacks: Sequence[Sequence[traceback.FrameSummary]]) -> list[Question]:
        """List the questions with eager mode's answer whose branch contains one of `stacks`, where tracing broke."""
        broken = {(frame.filename, _unresumed(frame.name)) for stack in stacks for frame in stack}
        return [q for q in self.questions.values() if q.asker not in self.traced and broken.intersection(q.frames)]

    def are_those_of(self, other: Answers | None) -> bool:
        """Return whether the same code gets the same answers."""
        return other is not None and (self.traced, self.opaque) == (other.traced, other.opaque)

    @property
    def given_up(self) -> dict[str, str]:
        """Askers that got Dynamo's answer, with their questions."""
        return {q.asker: q.predicate for q in self.questions.values() if q.asker in self.traced}


def _unresumed(name: str) -> str:
    """Return the name of a function without Dynamo's suffix for resuming it after a break."""
    return _RESUME_FUNCTION.sub(r"\1", name)


def _is_predicate(tx: Any) -> bool:
    return str(tx.f_code.co_name).startswith("is_")


def _is_torchs(home: str) -> bool:  # Rule 1
    return home.partition(".")[0] == "torch"


def _makes_mask(tx: Any) -> bool:  # Rule 3
    if _unresumed(tx.f_code.co_name) != "forward" or "attention_mask" not in tx.symbolic_locals:
        return False
    mask = tx.symbolic_locals["attention_mask"].realize()
    return bool(mask.is_python_constant() and mask.as_python_constant() is None)


def _values(tx: Any) -> list[Any]:
    return [value.realize() for value in tx.symbolic_locals.values() if hasattr(value, "realize")]


def _frame_of(tx: Any) -> Frame:
    return str(tx.f_code.co_filename), _unresumed(tx.f_code.co_name)


class Capture:
    """A capture in progress; it is found through Dynamo's backend, which is one of its methods.

    elsewhere  the device that it is for, if its tensors are on another (`elsewhere.py`)
    opens_sizes, opens_numbers  whether it leaves changing sizes of tensors and Python numbers open
    opens_draws  whether numbers that Python draws are inputs of its graphs; `has_drawn` once one is
    """

    answers: Answers | None
    elsewhere: CaptureDevice | None = None
    opens_sizes = opens_numbers = opens_draws = has_drawn = False

    def instead(self, asker: str, function: Callable[..., Any], first: FirstNode) -> Callable[..., Any] | None:
        """Return the function to trace in place of `function`, called by module `asker`; None to trace it itself.

        `first` returns the node of its first argument, see `following`.
        """
        return None


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    known, recording = handlers(), torch.cuda.is_current_stream_capturing
    originals = {predicate: known[predicate] for predicate in predicates() if predicate in known}
    known.update({predicate: _answered(predicate, original) for predicate, original in originals.items()})
    known.setdefault(recording, _not_recording)
    try:
        with following(_instead):
            yield
    finally:
        known.update(originals)
        if known.get(recording) is _not_recording:
            del known[recording]


answering = Shared(_answering)  # lets Dynamo ask our captures, and follow the functions that they follow


def _elsewhere_of(output: Any) -> CaptureDevice | None:
    capture = capture_of_output(output)
    return None if capture is None else capture.elsewhere


def _values_within(output: Any, node: fx.Node) -> contextlib.AbstractContextManager[None]:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_checked = name in CHECKED and capture_of_output(output) is not None
    return composites_on_fakes() if is_checked else contextlib.nullcontext()


# Our captures are traced for the device that each is for, and torch's own checks pass in them.
captured_elsewhere = Shared(lambda: traced_elsewhere(_elsewhere_of, _values_within))


def traced_as(other: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator for a replacement of `other`; our captures trace it where they meet the original."""

    def plainly(*args: Any, **kwargs: Any) -> Any:
        return other(*args, **kwargs)

    def mark(function: Any) -> Callable[..., Any]:
        function._traced_as = plainly
        return cast(Callable[..., Any], function)

    return mark


def _instead(tx: Any, function: Callable[..., Any], first: FirstNode) -> Callable[..., Any] | None:
    capture = capture_of(tx)
    if capture is not None and (plain := getattr(function, "_traced_as", None)) is not None:
        return cast(Callable[..., Any], plain)
    return None if capture is None else capture.instead(tx.f_globals.get("__name__", ""), function, first)


def _answered(predicate: Callable[[], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        said, answers = original(variable, tx, *args, **kwargs), answers_of(tx)
        if answers is None or not said.as_python_constant() or not answers.eager(tx, predicate):
            return said
        return type(said)(False)

    return handler


def _not_recording(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:  # Rule 5
    return constant(False) if answers_of(tx) is not None else None


def answers_of(tx: Any) -> Answers | None:
    """Return the answers of the capture that `tx` traces for; None if there are none."""
    capture = capture_of(tx)
    return None if capture is None else capture.answers


def capture_of(tx: Any) -> Capture | None:
    """Return the capture that `tx` traces for; None if another compiler traces."""
    return capture_of_output(tx.output)


def capture_of_output(output: Any) -> Capture | None:
    """Run `capture_of` on the output that all translators of one trace share."""
    capture = getattr(backend_of_output(output), "__self__", None)
    return capture if isinstance(capture, Capture) else None
