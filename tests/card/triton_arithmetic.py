"""Arithmetic of Triton's kernels: Triton's own interpreter runs them, on the card's memory, where all is computed.

Four things are changed. The interpreter copies tensors to the host and back; here it reads and writes the same memory.
It knows no functions of CUDA's mathematical library; here they are torch's. A kernel is work of a stream, which the
interpreter runs at once; so the stream is brought to an end first. And Inductor's blocks are made as large as they may
be: an interpreted program takes milliseconds, whatever its size.

With CARD_ARITHMETIC=small kernels are compiled for the card's compute capability instead, and do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def interpret() -> None:
    """Complete Triton's interpreter, in a process whose environment has TRITON_INTERPRET=1."""
    from torch._inductor.runtime import triton_heuristics
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda
    from triton.runtime import interpreter

    autotuner: Any = triton_heuristics.CachingAutotuner
    autotuner._interpret_args_grid = _in_large_blocks(autotuner._interpret_args_grid)
    interpreter.InterpreterBuilder.create_extern_elementwise = _create_extern_elementwise
    interpreter.GridExecutor._init_args_hst = _init_args
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    for name, function in vars(of_cuda).items():
        if callable(function) and hasattr(libdevice, name):
            setattr(libdevice, name, _with_semantic(function, interpreter.interpreter_semantic))


def _in_large_blocks(arguments_and_grid: Callable[..., Any]) -> Callable[..., Any]:
    """Of Inductor's kernels: what its configuration says of the grid, once its blocks are large."""

    def call(tuner: Any, arguments: Any, configuration: Any) -> Any:
        blocks, hints = configuration.kwargs, tuner.size_hints or {}
        elements = math.prod(size for axis, size in hints.items() if axis.startswith("r"))
        for name, axis in (("XBLOCK", "x"), ("YBLOCK", "y")):
            if name in blocks and axis in hints:
                room = max(1, MOST_ELEMENTS // elements)
                blocks[name] = max(blocks[name], min(hints[axis], LARGEST[name], 1 << (room.bit_length() - 1)))
                elements *= blocks[name]
        return arguments_and_grid(tuner, arguments, configuration)

    return call


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
