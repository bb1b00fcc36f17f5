"""torch's internals, behind one door: what training relies on that torch keeps private, a function each.

Read in torch 2.11, 2.13 and 2.15; `tests/test_torch_internals.py` holds each to what it is for. A name that is gone
raises RematError where it is first needed, with its purpose, unless the function says what happens then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat.errors import RematError


class UnseenMode(TorchDispatchMode):
    """A dispatch mode that Dynamo must not take for a reason to fall back to eager code."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@functools.cache
def _internal(path: str, purpose: str) -> Any:
    """The object at a dotted `path` below torch; raises RematError where there is none."""
    found: Any = torch
    done = "torch"
    for name in path.split("."):
        done = f"{done}.{name}"
        if not hasattr(found, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(done)
        if not hasattr(found, name):
            raise RematError(
                f"torch {torch.__version__} has no {done}, which remat needs to {purpose}; use torch 2.11 to 2.15."
            )
        found = getattr(found, name)
    return found


# Modes


def fakes_are_on() -> bool:
    """Whether tensors are fake here, so that nothing draws random numbers."""
    mode_of = _internal("_C._get_dispatch_mode", "see whether tensors are fake")
    return mode_of(_internal("_C._TorchDispatchModeKey.FAKE", "see whether tensors are fake")) is not None


def push_mode(mode: TorchDispatchMode) -> None:
    """Enter a dispatch mode without what `TorchDispatchMode.__enter__` notes for Dynamo, which costs microseconds."""
    _internal("_C._push_on_torch_dispatch_stack", "see what a saved node returns")(mode)


def pop_mode() -> None:
    """Leave the dispatch mode entered last."""
    _internal("_C._pop_torch_dispatch_stack", "see what a saved node returns")(None)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch or function mode sees what happens within."""
    found: contextlib.AbstractContextManager[Any] = _internal(
        "utils._python_dispatch._disable_current_modes", "copy buffers unseen"
    )()
    return found


# Tensors and autograd


def keeps_graph() -> bool:
    """Whether the backward that is running was called with `retain_graph`. Where torch does not say: yes.

    What is kept for another backward is then let go of later than it could be.
    """
    found = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if found is None else bool(found())


def sharing_versions() -> contextlib.AbstractContextManager[Any]:
    """Within, a tensor that is detached shares its version counter with the detached one, below autograd too."""
    guard = _internal("_C._SetExcludeDispatchKeyGuard", "see writes to what is kept")
    found: contextlib.AbstractContextManager[Any] = guard(torch._C.DispatchKey.ADInplaceOrView, False)
    return found


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a subclass that wraps others and has no storage of its own (DTensor, quantized ones)."""
    return bool(_internal("utils._python_dispatch.is_traceable_wrapper_subclass", "find storages")(tensor))


# Dynamo


def frame_callback() -> Callable[..., Any] | None:
    """What traces frames right now: a callback of the compiler that was asked for."""
    found: Callable[..., Any] | None = _internal(
        "_C._dynamo.eval_frame.get_eval_frame_callback", "find the compiler that torch.compile was given"
    )()
    return found


def frames_traced() -> int:
    """How many functions Dynamo has traced, or tried to, in this process."""
    return int(_internal("_dynamo.utils.counters", "see whether a forward was traced")["frames"]["total"])


def graph_breaks() -> list[Any]:
    """Where and why Dynamo broke graphs in this process, so far."""
    found: list[Any] = _internal("_dynamo.utils.graph_break_reasons", "find the branch at which a graph broke")
    return found


def try_again(error: BaseException | None) -> None:
    """Let Dynamo trace what it gave up because `error` came out of it; other traces, whoever made them, stay.

    A function that raises while it is traced is run untraced from then on, and every later graph would break at it.
    Those are the functions in the error's traceback, and in those of the errors that it came of.
    """
    purpose = "capture a forward again after one that raised"
    tried = _internal("_dynamo.convert_frame.input_codes", purpose)
    treat = _internal("_C._dynamo.eval_frame.set_code_exec_strategy", purpose)
    trace = _internal("_C._dynamo.eval_frame._FrameAction.DEFAULT", purpose)
    treatment = _internal("_C._dynamo.eval_frame._FrameExecStrategy", purpose)(trace, trace)
    for each in _errors_behind(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code in tried:
                treat(frame.f_code, treatment)


def _errors_behind(error: BaseException | None) -> list[BaseException]:
    """An error, and all that it came of."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found
