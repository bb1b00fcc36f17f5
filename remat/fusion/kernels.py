"""Kernels: what a group runs, forward or backward, as one operator `remat::fused`.

A kernel is a graph of ATen operators that a compiler turns into few loops. It is named by its content, so isomorphic
groups share one. On fake tensors the operator gives its results and nothing else; what Inductor's code allocates
meanwhile is its workspace, like that of any kernel. A kernel may be for open sizes (`open_sizes.py`); no step is
recorded with those, so they tell nothing of workspaces and traffic.

Kernels for a CPU are begun together, a group's forward and its backward, and waited for when they first run: compilers
of several work beside each other.

Where Inductor cannot compile (no C++ compiler, no Triton), the graph runs operator by operator, with one warning: it
saves the same for backward, takes longer, and needs more while it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat._torch.inductor import PendingKernels, compiled
from remat._torch.training import without_modes
from remat.errors import RematError
from remat.fusion.generated_code import without_kernels
from remat.warn import warn

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]  # shape, stride, dtype, device

_KERNELS: dict[str, Kernel] = {}


def layout_of(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)


def empty(layout: Layout) -> Tensor:
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


@dataclasses.dataclass(eq=False)
class Kernel:
    """A graph of ATen operators, from tensors of `given` layouts to new ones of `made` layouts.

    open  inputs of a graph with open sizes: the sizes that its tensors do not show, then its tensors
    """

    graph: fx.GraphModule
    given: tuple[Layout, ...]
    made: tuple[Layout, ...]
    open: tuple[Any, ...] = ()
    _begun: tuple[Callable[[list[Any]], Any], PendingKernels] | Exception | None = dataclasses.field(
        default=None, init=False
    )

    @staticmethod
    def of(graph: fx.GraphModule) -> Kernel:
        """Return the kernel of a graph whose nodes know their values; the existing one if there is one."""
        values = tuple(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
        given = tuple(layout_of(value) for value in values if isinstance(value, Tensor))
        made = tuple(layout_of(node.meta["val"]) for node in _results(graph))
        is_open = any(isinstance(size, torch.SymInt) for size in tree_leaves((values, given, made)))
        kernel = Kernel(graph, given, made, values if is_open else ())
        return _KERNELS.setdefault(kernel.name, kernel)

    @functools.cached_property
    def name(self) -> str:
        symbols = next((id(value.fake_mode) for value in self.open if isinstance(value, Tensor)), "")  # type: ignore[attr-defined]
        content = f"{self.graph.code} {self.given} {self.made} {symbols}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self, given: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
        return list(self._compiled([*sizes, *given]))

    def begin(self) -> None:
        """Begin to compile it, beside others."""
        is_new = self._begun is None and "_compiled" not in vars(self)
        if is_new and self.given and self.given[0][-1] == "cpu":
            waiting = PendingKernels()
            try:
                with waiting.instead():
                    self._begun = self._by_inductor(), waiting
            except Exception as error:
                self._begun = error

    @functools.cached_property
    def _compiled(self) -> Callable[[list[Any]], Any]:
        try:
            return self._ended()
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return lambda given: self.graph(*given)

    def compile(self) -> None:
        """Compile it now, unless that is done."""
        _ = self._compiled

    def _ended(self) -> Callable[[list[Any]], Any]:
        begun, self._begun = self._begun, None
        if begun is None:
            return self._by_inductor()
        if isinstance(begun, Exception):
            raise begun
        run, waiting = begun
        waiting.end()
        return run

    def _by_inductor(self) -> Callable[[list[Any]], Any]:
        if self.open:
            mode = next(value.fake_mode for value in self.open if isinstance(value, Tensor))  # type: ignore[attr-defined]
            with without_modes(), mode, torch.no_grad():
                return compiled(self.graph, self.open)
        with without_modes(), FakeTensorMode():
            given = [empty(layout) for layout in self.given]
        with without_modes(), torch.no_grad():
            return compiled(self.graph, given)

    @functools.cached_property
    def _seen(self) -> tuple[int, int]:
        """(bytes moved, workspace) of Inductor's code; if unknown, the least bytes to move."""
        assert not self.open, "a step is recorded with sizes as they are"
        once = sum(map(_bytes, (*self.given, *self.made)))
        try:
            with without_kernels() as loaded:
                run = self._by_inductor()
            with without_modes(), FakeTensorMode(), torch.no_grad():
                given = [empty(layout) for layout in self.given]
                with _Allocations() as seen:
                    kept = run(given)
            made = {id(leaf.untyped_storage()): leaf.untyped_storage().nbytes() for leaf in tree_leaves(kept)}
            return max(loaded.moved_bytes, once), max(seen.most - sum(made.values()), 0)
        except RematError:
            return once, 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that its loops read and write."""
        return self._seen[0]

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that it allocates beyond its results while it runs."""
        return self._seen[1]


def kernel(name: str) -> Kernel:
    return _KERNELS[name]


def _results(graph: fx.GraphModule) -> Sequence[fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    found: Any = output.args[0]
    return tuple(found)


def _bytes(layout: Layout) -> int:
    shape, stride, dtype, _ = layout
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize if all(shape) else 0


@functools.cache
def _warn_once(why: str) -> None:
    warn(
        f"a fused group cannot be compiled here and runs operator by operator, slower than planned ({why}).",
    )


class _Allocations(TorchDispatchMode):
    """Tracks new storages; `most` is the peak of their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := id(storage := leaf.untyped_storage())) not in old | {*self._alive}:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key).atexit = False
        self.most = max(self.most, sum(self._alive.values()))
        return out


# The operator

_LIBRARY = torch.library.Library("remat", "DEF")
_LIBRARY.define("fused(str kernel, Tensor[] given, SymInt[] sizes=[]) -> Tensor[]")


def _run(name: str, given: list[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
    return kernel(name).run(given, sizes)


_LIBRARY.impl("fused", _run, "CompositeExplicitAutograd")


@torch.library.register_fake("remat::fused", lib=_LIBRARY)
def _fake(name: str, given: list[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
    found = kernel(name)
    return list(found.graph(*sizes, *given)) if found.open else [empty(layout) for layout in found.made]


FUSED_KERNEL = torch.ops.remat.fused.default
