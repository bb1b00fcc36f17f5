"""Arithmetic of Triton's kernels: once one was launched, Triton's own interpreter runs it, on the card's memory.

Kernels are compiled for the device's compute capability, and launched on a driver that does nothing, as they are; this
comes after. Five things of the interpreter are changed. It copies tensors to the host and back; here it reads and
writes the same memory. It knows no functions of CUDA's mathematical library; here they are torch's. A kernel is work of
a stream, which the interpreter runs at once; so the stream is brought to an end first. It reduces element by element
where a kernel brings its own function; here by halves. And Inductor's blocks are made as large as they may be: an
interpreted program takes milliseconds, whatever its size.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

MOST_ELEMENTS = 1 << 16  # of a block
LARGEST = {"XBLOCK": 4096, "YBLOCK": 1024}  # Inductor leaves masks out where sizes are multiples of these
TORCH_NAMES = {
    "rint": "round",
    "nearbyint": "round",
    "fabs": "abs",
    "fast_tanh": "tanh",
    "copysign": "copysign",
    "fmod": "fmod",
}
_INTERPRETED: dict[Any, Any] = {}


def compute_kernels() -> None:
    """After every launch of a kernel, of Triton's own and of Inductor's, let the interpreter compute it."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    executor: Any = interpreter.GridExecutor
    builder: Any = interpreter.InterpreterBuilder
    tuner: Any = CachingAutotuner
    kernel: Any = JITFunction
    executor._init_args_hst = _init_args
    executor._restore_args_dev = lambda *_: None
    reductions: Any = interpreter.ReduceOps
    reductions.generic_reduce = _reduce_by_halves
    builder.create_extern_elementwise = _create_extern_elementwise
    kernel.run = _computed(kernel.run)
    tuner.run = _computed_in_large_blocks(tuner.run)


def _computed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run`, and the arithmetic of what was launched."""

    @functools.wraps(run)
    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        launched = run(kernel, *arguments, grid=grid, warmup=warmup, **named)
        if not warmup:
            _interpret(kernel, grid, arguments, named)
        return launched

    return launch


def _computed_in_large_blocks(run: Callable[..., Any]) -> Callable[..., Any]:
    """`CachingAutotuner.run`, and the arithmetic of what was launched: in other blocks, so with another grid."""

    @functools.wraps(run)
    def launch(tuner: Any, *arguments: Any, stream: Any, **named: Any) -> Any:
        launched = run(tuner, *arguments, stream=stream, **named)
        configuration = copy.deepcopy(tuner.launchers[0].config)
        _enlarge(configuration.kwargs, tuner.size_hints or {})
        arguments, grid = tuner._interpret_args_grid(arguments, configuration)
        if tuner.fn.fn is None:  # it comes from Inductor's cache, compiled
            tuner.fn = tuner._reload_kernel().fn
        _interpret(tuner.fn, grid, arguments, configuration.kwargs)
        return launched

    return launch


def _enlarge(blocks: dict[str, int], hints: dict[str, int]) -> None:
    elements = math.prod(size for axis, size in hints.items() if axis.startswith("r"))
    for name, axis in (("XBLOCK", "x"), ("YBLOCK", "y")):
        if name in blocks and axis in hints:
            room = max(1, MOST_ELEMENTS // elements)
            blocks[name] = max(blocks[name], min(hints[axis], LARGEST[name], 1 << (room.bit_length() - 1)))
            elements *= blocks[name]


def _interpret(kernel: Any, grid: Any, arguments: Any, named: dict[str, Any]) -> None:
    """Run a kernel by Triton's interpreter; functions that it calls are interpreted too."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # what a mask leaves out is computed all the same
        # Once for a kernel and all that it calls: that looks at every member of Triton's language, for milliseconds.
        # The interpreter's own way leaves the language patched after a call, for the compiler too.
        language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(language).restore)
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope()))
        stack.enter_context(mock.patch.object(JITFunction, "__call__", _call))
        for name, function in vars(of_cuda).items():
            if callable(function) and hasattr(libdevice, name):
                computed = _with_semantic(function, interpreter.interpreter_semantic)
                stack.enter_context(mock.patch.object(libdevice, name, computed))
        _interpreted(kernel).run(*arguments, grid=grid, warmup=False, **named)


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    """A function that a kernel calls."""
    return _interpreted(function).rewrite()(*arguments, **named)


def _interpreted(kernel: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    if kernel.fn not in _INTERPRETED:  # a kernel's own hash looks at all that it calls
        _INTERPRETED[kernel.fn] = InterpretedFunction(kernel.fn)
    return _INTERPRETED[kernel.fn]


def _reduce_by_halves(reduction: Any, given: Any) -> list[Any]:
    """A reduction by a kernel's own function: of halves, until one row is left. The interpreter's goes by elements."""
    blocks, axis = reduction.unravel(given, reduction.axis)
    dtypes = [block.dtype for block in blocks]
    parts = [block.handle.data for block in blocks]
    while parts[0].shape[axis] > 1:
        halves = [np.split(part, 2, axis) for part in parts]
        rows = [
            reduction.to_tensor(pair[row], dtype) for row in (0, 1) for pair, dtype in zip(halves, dtypes, strict=True)
        ]
        combined = reduction.combine_fn.fn(*rows)
        parts = [each.handle.data for each in (combined if isinstance(combined, tuple) else (combined,))]
    if not reduction.keep_dims:
        parts = [part.squeeze(axis) for part in parts]
    elif reduction.axis is None:
        parts = [part.reshape((1,) * given[0].handle.data.ndim) for part in parts]
    return [reduction.to_tensor(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]


def _with_semantic(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    return lambda *arguments, _semantic=None: function(*arguments, _semantic=semantic)


def _create_extern_elementwise(
    builder: Any, library: str, path: str, symbol: str, arguments: list[Any], kind: Any, is_pure: bool
) -> Any:
    """A function of CUDA's library by its symbol (`__nv_tanhf`), element by element."""
    from triton.runtime.interpreter import TensorHandle

    found = _function(symbol.removeprefix("__nv_"))
    result = found(*(torch.from_numpy(np.ascontiguousarray(argument.data)) for argument in arguments)).numpy()
    dtype = arguments[0].dtype.scalar
    if result.dtype == np.bool_:
        import triton.language as tl

        return TensorHandle(result.astype(np.int32), tl.int32)
    return TensorHandle(result.reshape(np.shape(arguments[0].data)), dtype)


def _function(symbol: str) -> Callable[..., torch.Tensor]:
    """By its name, or by that without the `f` of fp32."""
    for name in (symbol, symbol.removesuffix("f"), symbol.removesuffix("d")):
        for module in (torch, torch.special):
            if (found := getattr(module, TORCH_NAMES.get(name, name), None)) is not None:
                return found
    raise NotImplementedError(f"card: no arithmetic for CUDA's function {symbol}")


def _init_args(executor: Any, arguments: Any, named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as tensors of the CPU over the same memory."""
    torch.cuda.current_stream().synchronize()
    return [_on_host(each) for each in arguments], {name: _on_host(each) for name, each in named.items()}


def _on_host(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.ops.card.alias(argument)
    if isinstance(argument, tuple):
        return type(argument)(map(_on_host, argument))
    if hasattr(argument, "base") and hasattr(argument.base, "data_ptr"):  # a pointer of another type, or a descriptor
        argument.base = _on_host(argument.base)
    return argument
