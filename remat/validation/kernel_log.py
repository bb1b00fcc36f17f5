"""The log of kernels: what a step computes with, to hold a planned step against the untouched one."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from remat._torch.training import UnseenMode
from remat.capture.schemas import is_view

SELECTING = tuple(f"aten.{name}" for name in ("_to_copy", "slice_backward", "clone", "zeros", "new_zeros"))
MOST_DIFFERENCES = 5
_CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype}

_COMMUTATIVE = ("add", "add_", "mul", "mul_")
_READING = torch.ops.aten._local_scalar_dense.default
_ALLOCATING = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
}


class KernelLog(UnseenMode):
    """Writes down every operator that computes with floating-point numbers, except while paused.

    Views compute nothing, nor do allocations: in torch 2.11 a checkpoint makes two tensors without elements.

    Integers and booleans are bookkeeping: in eager mode a library may read its data (is anything padded?), while under
    capture it gets the answer.

    Dynamo hands a graph numbers that Python draws (`random.uniform`) as tensors on the host. They are written as
    numbers, and their operators as those of numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._paused = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the log during a recomputation."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused or is_view(func) or func._schema.name in _ALLOCATING or _keeps_books(func, args, kwargs, out):
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if any(t.is_floating_point() or t.is_complex() for t in tensors) and not any(
            isinstance(t, FakeTensor)  # Dynamo at work
            for t in tensors
        ):
            self.found.append(_described(func, args, kwargs))
        return out


def _keeps_books(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return whether an operator only makes constants, or casts to a type without fractions.

    Or hands a graph a number of the model that is left open: Dynamo passes a float in as a tensor on the host.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func is _READING and (given[0].dtype, given[0].device.type) == (torch.float64, "cpu"):
        return True
    if not given:
        return torch.Tag.nondeterministic_seeded not in func.tags
    return func in _CASTS and not (out.is_floating_point() or out.is_complex())


def _described(func: Any, args: Any, kwargs: Any) -> str:
    name = str(func)
    if any(_is_number(arg) for arg in args):
        name = func._overloadpacket.__name__
        if name == "rsub" and len(args) == 2:
            name, args = "sub", args[::-1]
        if name in _COMMUTATIVE and len(args) == 2 and _is_number(args[0]):
            args = args[::-1]
        name = f"aten.{name}"
    given = [_value(arg) for arg in args] + [f"{name}={_value(arg)}" for name, arg in kwargs.items()]
    return f"{name}({', '.join(given)})"


def _is_number(value: Any) -> bool:
    """Return whether `value` is a number, or a number on the host as Dynamo hands it to a graph."""
    return type(value) in (int, float) or _is_handed(value)


def _is_handed(value: Any) -> bool:
    is_host = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0
    return is_host and value.dtype in (torch.float64, torch.int64)


def _value(value: Any) -> str:
    if isinstance(value, float) or _is_handed(value):
        return f"{value if isinstance(value, float) else value.item():.9g}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (bool, int, float, str, torch.dtype)) or value is None:
        return str(value)
    return type(value).__name__


@contextlib.contextmanager
def scripted_functions() -> Iterator[set[str]]:
    """Note the names of the TorchScript functions that are called within."""
    found, call = set[str](), torch.jit.ScriptFunction.__call__

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        found.add(function.name)
        return call(function, *args, **kwargs)

    with mock.patch.object(torch.jit.ScriptFunction, "__call__", noted):
        yield found


def without_heads(untouched: Sequence[str], planned: Sequence[str]) -> tuple[list[str], list[str]]:
    """Drop the kernels of loss heads from both steps; the planned one runs them in slices, unseen.

    They are stretches that only the eager baseline has: from the product that makes the logits to the backward of the
    loss, and, apart from it, casts of the weight and of its gradient. In place of the former the planned step may
    select rows before there are logits.
    """
    kept: list[str] = []
    others: list[str] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, untouched, planned, autojunk=False).get_opcodes():
        stretch, other = untouched[a:b], planned[c:d]
        has_loss = any("nll_loss" in kernel for kernel in stretch)
        is_head = tag == "delete" and (has_loss or all("_to_copy" in kernel for kernel in stretch))
        if not is_head and not (tag == "replace" and has_loss and all(map(_selects, other))):
            kept += stretch
            others += other
    return kept, others


def _selects(kernel: str) -> bool:
    return kernel.partition("(")[0].removesuffix(".default") in SELECTING


def kernel_differences(untouched: Sequence[str], planned: Sequence[str]) -> tuple[str, ...]:
    """List the first few differences, one sentence each; empty if there are none."""
    begin = next((i for i, (a, b) in enumerate(zip(untouched, planned, strict=False)) if a != b), None)
    if begin is None:
        if len(untouched) == len(planned):
            return ()
        begin = min(len(untouched), len(planned))
    left, right = untouched[begin : begin + 500], planned[begin : begin + 500]  # the rest is a consequence
    found = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            found.append(f"kernel {begin + a}: baseline {_listed(left[a:b])}; planned {_listed(right[c:d])}")
    return tuple(found[:MOST_DIFFERENCES])


def _listed(kernels: Sequence[str]) -> str:
    if not kernels:
        return "none"
    return ", ".join(kernels[:2]) + (f" and {len(kernels) - 2} more" if len(kernels) > 2 else "")
