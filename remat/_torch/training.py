"""Private parts of torch for planned steps: dispatch modes, fake tensors, autograd's graph, libraries' workspaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat._torch.door import internal
from remat._torch.recording import untraced


class UnseenMode(TorchDispatchMode):
    """A dispatch mode that Dynamo ignores: it neither traces the mode nor falls back to eager code.

    torch sees to the latter, for every mode whose `_should_skip_dynamo` says so; where it does not, this class does.
    Twice would cost as much again, at every operator of every step on fakes.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if own is not None and cls.__dict__["__torch_dispatch__"] is own and cls._should_skip_dynamo():
            cls.__torch_dispatch__ = untraced(own)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def function_modes() -> list[str]:
    """List the torch function modes that are on, as by `torch.set_default_device`; none while Dynamo traces."""
    stack = internal("overrides._get_current_function_mode_stack", "name the modes that are on around a model")
    return [type(mode).__name__ for mode in stack()]


def hooks_on_all_modules() -> tuple[int, ...]:
    """Return the numbers of the hooks that run around the forward or the backward of every module."""
    tables = internal("nn.modules.module", "see hooks on all modules")
    names = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"
    return tuple(number for name in names for number in getattr(tables, name, ()))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks run as soon as the gradient of `parameter` is whole."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def saved_tensors_are_hooked() -> bool:
    """Return whether autograd passes saved tensors to hooks, as within `torch.utils.checkpoint`."""
    return _saved_tensor_hooks() is not None


def own_saved_tensor_hook() -> str | None:
    """Name the function of a user that packs saved tensors; None without one. Those of torch keep all values."""
    packs = (_saved_tensor_hooks() or (None,))[0]
    packs = getattr(packs, "func", packs)  # of functools.partial
    home = getattr(packs, "__module__", None) or ""
    is_known = packs is None or home.partition(".")[0] in ("torch", "remat")
    return None if is_known else getattr(packs, "__qualname__", type(packs).__name__)


def _saved_tensor_hooks() -> tuple[Any, Any] | None:
    top = internal("_C._autograd._top_saved_tensors_default_hooks", "see which hooks take saved tensors")
    found: tuple[Any, Any] | None = top(False)
    return found


class LeanMode(UnseenMode):
    """A dispatch mode that is entered for a few operators, thousands of times a step, within a checkpoint.

    `TorchDispatchMode` notes for Dynamo, at its borders, that it is there, and has Dynamo leave every call of
    `__torch_dispatch__` alone. Dynamo does not look into checkpoints anyway, so both are left out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Self:
        internal("_C._push_on_torch_dispatch_stack", "see what a saved node returns")(self)
        return self

    def __exit__(self, *error: Any) -> None:
        internal("_C._pop_torch_dispatch_stack", "see what a saved node returns")(None)


def in_lean_mode() -> bool:
    """Return whether a `LeanMode` sees the operators that are called here."""
    why = "see what a saved node returns"
    at, count = internal("_C._get_dispatch_stack_at", why), internal("_C._len_torch_dispatch_stack", why)()
    return any(isinstance(at(i), LeanMode) for i in range(count))


def fakes_are_on() -> bool:
    """Return whether tensors are fake here, so that nothing draws random numbers."""
    mode_of = internal("_C._get_dispatch_mode", "see whether tensors are fake")
    return mode_of(internal("_C._TorchDispatchModeKey.FAKE", "see whether tensors are fake")) is not None


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide what happens within from all dispatch and function modes."""
    found: contextlib.AbstractContextManager[Any] = internal(
        "utils._python_dispatch._disable_current_modes", "copy buffers unseen"
    )()
    return found


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call `function` when the present backward in this thread, in which this is called, has ended."""
    internal("autograd.Variable._execution_engine", "see the end of a backward").queue_callback(function)


def keeps_graph() -> bool:
    """Return whether the present backward was called with `retain_graph`; True if torch does not tell.

    True only frees later than possible what is kept for another backward.
    """
    found = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if found is None else bool(found())


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether `scaler` has scaled a loss; True if torch does not tell."""
    return getattr(scaler, "_scale", True) is not None


@contextlib.contextmanager
def compared_when_recomputed(describe: Callable[[torch.Tensor], Any]) -> Iterator[str]:
    """Yield the name under which a `torch.utils.checkpoint` made meanwhile compares its saved tensors.

    It calls `describe` on each saved tensor in forward, and again when all of the region are recomputed; then it
    compares the two by `!=`.
    """
    known = internal("utils.checkpoint._allowed_determinism_checks_to_fns", "compare what is recomputed")
    name = f"remat {id(describe)}"
    known[name] = describe
    try:
        yield name
    finally:
        del known[name]


def sharing_versions() -> contextlib.AbstractContextManager[Any]:
    """Share the version counter of a tensor with its detached copies within, below autograd too."""
    guard = internal("_C._SetExcludeDispatchKeyGuard", "see writes to what is kept")
    found: contextlib.AbstractContextManager[Any] = guard(torch._C.DispatchKey.ADInplaceOrView, False)
    return found


def give_version(tensor: torch.Tensor, version: int) -> None:
    """Give a tensor the version that it had, when its data is what it was: autograd may have saved it then."""
    if tensor._version != version:
        internal("_C._autograd._unsafe_set_version_counter", "undo writes")((tensor,), (version,))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` wraps others and has no storage of its own (DTensor, quantized ones)."""
    return bool(internal("utils._python_dispatch.is_traceable_wrapper_subclass", "find storages")(tensor))


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces; if torch cannot, they stay, and are measured as existing before."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
