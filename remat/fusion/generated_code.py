"""Generated code: what Inductor makes of a graph, run on fake tensors without a kernel being compiled.

Inductor turns a graph into a Python module. Its function `call` allocates buffers, calls kernels, calls operators that
have no kernel of their own, and lets go of what is not needed any more. All memory but kernels' own is decided there.
So the module is loaded with three things of it replaced: kernels by ones that do nothing, which are not compiled
either; allocations, and views of buffers, by operators that a dispatch mode sees. Everything else is Inductor's, the
passes on the graph, the order of operators and the reuse of buffers included.

Modules reach their caller through `PyCodeCache.load_by_key_path`. Neither the modules loaded here nor what is compiled
around them may stay in a cache: a real step would run without kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from remat._torch.compiled_draws import ways_of_draws
from remat._torch.inductor import hands_modules_over, kernels_compiled_by, loading_modules, moved_by_loops
from remat._torch.kernel_arguments import kernels_without_bodies
from remat.errors import RematError

_ALLOCATION = "empty_strided_"  # and the device


@dataclasses.dataclass
class Loaded:
    """Modules of generated code that were loaded without kernels.

    modules      how many                  moved_bytes  by their loops
    ways         how each draws random numbers, by seed (`ways_of_draws`)
    """

    modules: int = 0
    moved_bytes: int = 0
    ways: list[dict[str, bool]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def without_kernels(*, keeps: bool = False) -> Iterator[Loaded]:
    """Let Inductor compile for fake tensors while the context is open.

    keeps  whether the code is kept for AOTAutograd; it is whole then, which takes a third longer

    Raises RematError if torch has no hook, or compiled past it: those kernels would read from fake tensors.
    """
    loaded = Loaded()

    def load(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None, **_: Any) -> Any:
        loaded.modules += 1
        loaded.moved_bytes += 0 if keeps else moved_by_loops()
        loaded.ways.append(ways_of_draws(source := Path(path).read_text()))
        return _load(key, path, source, attrs or {})

    if not hands_modules_over():
        raise _unknown("has no PyCodeCache.load_by_key_path")
    with loading_modules(load, keeps=keeps), contextlib.nullcontext() if keeps else kernels_without_bodies():
        yield loaded
    if not loaded.modules:
        raise _unknown("hands no generated module over")


def _load(key: str, path: str, source: str, attributes: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(f"generated_{key}")
    module.__file__ = path
    with kernels_compiled_by(_NoKernels):
        exec(compile(source, path, "exec"), module.__dict__)
    module.__dict__.update(attributes)
    replaced: dict[str, Callable[..., torch.Tensor]] = {
        name: _allocation_on(name.removeprefix(_ALLOCATION))
        for name in vars(module)
        if name in (f"{_ALLOCATION}cpu", f"{_ALLOCATION}cuda")
    }
    if not replaced or not {"call", "reinterpret_tensor"} <= vars(module).keys():
        raise _unknown("generates modules of another form")
    module.__dict__.update(replaced, reinterpret_tensor=_reinterpret, copy_if_misaligned=_unchanged)
    return module


def _unknown(what: str) -> RematError:
    return RematError(f"torch {torch.__version__} {what}: what its Inductor allocates cannot be predicted.")


class _NoKernels:
    """Stands in for the compiler of kernels."""

    def __getattr__(self, name: str) -> Callable[..., _NoKernel]:
        return lambda *args, **kwargs: _NoKernel()

    def wait(self, scope: dict[str, Any]) -> None:
        pass


class _NoKernel:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


def _allocation_on(device: str) -> Callable[..., torch.Tensor]:
    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`: fakes have no address that could be misaligned."""
    return tensor


def _reinterpret(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
