"""Answers: what library code is told, while a plan's graph is captured, when it asks whether it is being traced.

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
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._utils
from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable

from remat.errors import CaptureError

_PREDICATES: tuple[Callable[[], bool], ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)
_BOOKS = (  # Rule 4
    "transformers.cache_utils",
    "transformers.integrations.flex_attention",  # compiles the kernel where nobody else does
    "transformers.integrations.hub_kernels",
    "transformers.pytorch_utils",
    "transformers.utils.deprecation",
    "transformers.utils.generic",
    "transformers.utils.import_utils",
    "transformers.utils.output_capturing",
)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

Frame = tuple[str, str]  # file, name of the function


@dataclasses.dataclass(frozen=True)
class Question:
    """Who asked, what, and the frames that the answer may steer: the one that asked, and its caller."""

    asker: str
    predicate: str
    frames: tuple[Frame, ...]

    def __str__(self) -> str:
        return f"{self.asker} asks {self.predicate}"


class Answers:
    """Eager mode's answers for one capture, but for the askers in `traced`, who hear Dynamo's.

    opaque     names of the Functions that are not traced (`opaque_functions.py`)

    questions  those that eager mode and Dynamo answer differently, by asker, as the capture met them
    """

    def __init__(self, traced: Iterable[str] = (), opaque: Iterable[str] = ()):
        self.traced = frozenset(traced)
        self.opaque = frozenset(opaque)
        self.questions: dict[str, Question] = {}

    def eager(self, tx: Any, predicate: Callable[[], bool]) -> bool:
        """Whether the question that `tx` has come to is to be answered as eager mode does; notes it."""
        name, tx = predicate.__name__, tx
        while tx is not None and _is_predicate(tx):
            if any(isinstance(value, TensorVariable) for value in _values(tx)):  # Rule 2
                return False
            name, tx = tx.f_code.co_name, tx.parent
        home = tx.f_globals.get("__name__", "") if tx is not None else ""
        if tx is None or _is_torchs(home) or home in _BOOKS or _makes_mask(tx):
            return False
        asker = f"{home}.{_unresumed(tx.f_code.co_qualname)}"
        self.questions.setdefault(asker, Question(asker, name, tuple(map(_frame_of, (tx, tx.parent or tx)))))
        return asker not in self.traced

    def suspects(self, stacks: Sequence[Sequence[traceback.FrameSummary]]) -> list[Question]:
        """Questions answered as in eager mode whose branch one of `stacks`, where tracing broke, lies in."""
        broken = {(frame.filename, _unresumed(frame.name)) for stack in stacks for frame in stack}
        return [q for q in self.questions.values() if q.asker not in self.traced and broken.intersection(q.frames)]

    @property
    def given_up(self) -> dict[str, str]:
        """Who asked and heard Dynamo's answer, and what they asked."""
        return {q.asker: q.predicate for q in self.questions.values() if q.asker in self.traced}


def _unresumed(name: str) -> str:
    """The name of a function, which Dynamo resumes under another after a break."""
    return _RESUMED.sub(r"\1", name)


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


def innermost(callback: Any) -> Callable[..., Any] | None:
    """The compiler behind a callback of Dynamo, as its frames run under; None where there is none."""
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # of torch 2.13, and of older ones
    while inside := next((getattr(callback, name) for name in names if hasattr(callback, name)), None):
        callback = inside
    return callback if callable(callback) else None


_lock = threading.Lock()
_captures = 0
_originals: dict[Any, Any] = {}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Let Dynamo put the questions of our captures to their `Answers`."""
    global _captures
    with _lock:
        handlers = _handlers()
        if _captures == 0:
            _originals.update({predicate: handlers[predicate] for predicate in _PREDICATES if predicate in handlers})
            handlers.update({predicate: _answered(predicate, _originals[predicate]) for predicate in _originals})
            handlers.setdefault(torch.cuda.is_current_stream_capturing, _not_recording)
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0:
                handlers.update(_originals)
                _originals.clear()
                if handlers.get(torch.cuda.is_current_stream_capturing) is _not_recording:
                    del handlers[torch.cuda.is_current_stream_capturing]


def _handlers() -> dict[Any, Any]:
    """Dynamo's handlers of functions of torch that it knows; raises CaptureError where this torch keeps none."""
    found = getattr(TorchInGraphFunctionVariable, "_get_handlers", None)
    handlers = found() if found is not None else None
    if not isinstance(handlers, dict) or torch.compiler.is_compiling not in handlers:
        raise CaptureError(
            f"torch {torch.__version__} keeps its answer to `torch.compiler.is_compiling()` elsewhere than torch 2.11 "
            "to 2.15 do: the eager branches of a model cannot be captured with it."
        )
    return handlers


def _answered(predicate: Callable[[], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        said, answers = original(variable, tx, *args, **kwargs), _answers_of(tx)
        if answers is None or not said.as_python_constant() or not answers.eager(tx, predicate):
            return said
        return type(said)(False)

    return handler


def _not_recording(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:  # Rule 5
    return ConstantVariable(False) if _answers_of(tx) is not None else None


def _answers_of(tx: Any) -> Answers | None:
    """The answers of the capture that `tx` traces for; None where somebody else compiles."""
    compiler = innermost(tx.output.compiler_fn)
    compiler = getattr(compiler, "compiler_fn", compiler)  # what `torch.compile` wraps a function in
    answers = getattr(getattr(compiler, "__self__", None), "answers", None)
    return answers if isinstance(answers, Answers) else None
