"""Products with 4-bit weights: bitsandbytes' `matmul_4bit`, as one node of a graph.

It calls an `autograd.Function` that Dynamo can trace, forward and backward, for every layer anew: of QLoRA's hundreds
of layers that is a third of the time that capturing takes. So the function is called unchanged, as those that
cannot be traced are (`opaque_functions.py`). A node of a graph takes tensors and constants, and it takes a weight's
scales in an object; so what is traced in its place takes that object apart, and the node puts it together again.

A plan names the Function, as it names others that are left whole. One that does not was made for graphs where it is
traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

FUNCTION = "bitsandbytes.autograd._functions:MatMul4Bit"
_LIBRARY = FUNCTION.partition(":")[0]
_FIELDS = ("absmax", "code", "offset", "shape", "dtype", "blocksize", "quant_type")  # of scales; tensors come first


def has_4_bit_layers(model: nn.Module) -> bool:
    """Return whether a layer of `model` has 4-bit weights."""
    layer = getattr(sys.modules.get("bitsandbytes.nn"), "Linear4bit", None)
    return layer is not None and any(isinstance(module, layer) for module in model.modules())


def instead(function: Callable[..., Any], asker: str, opaque: Collection[str]) -> Callable[..., Any] | None:
    """Return the function to trace in place of `function`, called by module `asker`; None to trace it itself."""
    if FUNCTION not in opaque or asker == __name__:
        return None
    return _taken_apart if function is getattr(sys.modules.get(_LIBRARY), "matmul_4bit", None) else None


def _taken_apart(A: Any, B: Any, quant_state: Any, out: Any = None, bias: Any = None) -> Any:
    """Call `matmul_4bit` with the fields of its `quant_state` as arguments, or as it is where that is impossible."""
    library: Any = sys.modules[_LIBRARY]
    if (
        out is not None
        or type(quant_state) is not library.F.QuantState
        or "packing_format_for_cpu" in vars(quant_state)
    ):
        return library.matmul_4bit(A, B, quant_state, out, bias)
    of_scales = quant_state.state2
    nested = None if of_scales is None else [getattr(of_scales, name) for name in _FIELDS]
    return matmul_4bit(A, B, bias, [getattr(quant_state, name) for name in _FIELDS], nested)


def matmul_4bit(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scales: Any, of_scales: Any) -> Any:
    """Run `matmul_4bit` from the fields of a weight's scales, and of their own scales; a node of a graph."""
    library: Any = sys.modules[_LIBRARY]
    state = library.F.QuantState(**dict(zip(_FIELDS, scales, strict=True)))
    if of_scales is not None:
        state.state2 = library.F.QuantState(**dict(zip(_FIELDS, of_scales, strict=True)))
        state.nested = True
    return library.matmul_4bit(A, B, state, bias=bias)
