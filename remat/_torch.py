"""torch's internals, behind one door: what training relies on that torch keeps private, a function each.

Read in torch 2.11, 2.13 and 2.15; `tests/test_torch_internals.py` holds each to what it is for. A name that is gone
raises RematError where it is first needed, with its purpose, unless the function says what happens then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
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


@contextlib.contextmanager
def left_whole(functions: Iterable[Any]) -> Iterator[None]:
    """While it lasts, Dynamo puts calls of `functions` (classes of autograd's Function too) into graphs as they are."""
    allowed = _internal("_dynamo.trace_rules._allowed_callable_ids", "capture Functions that cannot be traced")
    new = [id(function) for function in functions if id(function) not in allowed]
    for key in new:
        allowed.add(key)
    try:
        yield
    finally:
        for key in new:
            allowed.remove(key)


def own_function(target: Any) -> Any:
    """The class of autograd's Function that `target` of a node, put into a graph as it is, calls; None for others."""
    if getattr(target, "__name__", "") != "trampoline_autograd_apply":
        return None
    return inspect.getclosurevars(target).nonlocals["fn_cls"]


def graph_breaks() -> list[Any]:
    """Where and why Dynamo broke graphs in this process, so far."""
    found: list[Any] = _internal("_dynamo.utils.graph_break_reasons", "find the branch at which a graph broke")
    return found
