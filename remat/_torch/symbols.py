"""Symbols for sizes: fake tensors of sizes that are left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from remat._torch.door import internal
from remat.errors import UsageError

DEPENDS_ON_DATA = (
    "this compiled graph reads a number off a tensor (`torch.cond`, `while_loop`, or `.item()` under "
    "`capture_scalar_outputs`), and what it needs then depends on data. Keep that out of what is compiled with a "
    "budget (`torch.compiler.disable`), or compile without one."
)


def symbols_for(values: Sequence[int]) -> tuple[FakeTensorMode, list[Any]]:
    """Return (a mode for fake tensors, its symbols for sizes with these `values`); every value is above 1."""
    source = internal("_dynamo.source.ConstantSource", "fuse groups for open sizes")
    env = ShapeEnv()
    found = [env.create_symbol(n, source(f"z{i}"), DimDynamic.DYNAMIC, None) for i, n in enumerate(values)]
    return FakeTensorMode(shape_env=env), found


def size_of(mode: FakeTensorMode, expression: Any, value: int) -> Any:
    """Return a size that is an expression of symbols of `mode` with the present value `value`."""
    assert mode.shape_env is not None
    return int(expression) if expression.is_Integer else mode.shape_env.create_symintnode(expression, hint=value)


def holds(mode: FakeTensorMode, values: Mapping[Any, int]) -> bool:
    """Return whether the assumptions about the symbols of `mode` hold for these values."""
    assert mode.shape_env is not None
    return all(bool(guard.expr.xreplace(values)) for guard in mode.shape_env.guards)


def expression_of(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size as an expression of symbols."""
    return sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


def close(value: Any) -> None:
    """Close the open sizes of a value that is traced: the graph is for these alone then."""
    for size in value.shape if isinstance(value, torch.Tensor) else (value,):
        if isinstance(size, torch.SymInt):
            int(size)  # which guards it


def hinted(size: Any) -> Any:
    """Return an open size as its number in the trace; anything else unchanged.

    Raises UsageError for a size that depends on data, and has none.
    """
    if not isinstance(size, torch.SymInt):
        return size
    if (number := size.node.hint) is None:
        raise UsageError(DEPENDS_ON_DATA)
    return int(number)
