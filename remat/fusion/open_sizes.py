"""Open sizes: a group that is lowered once, for batches of every length.

The first shape of a batch is captured by itself, the second with the sizes that changed as symbols
(`capture/dynamic_shapes.py`). Such a graph says of each size of a group's inputs which expression of symbols it is. Its
groups are lowered with sizes that are symbols too: what comes later runs the same kernels, as long as what was assumed
of the symbols is true (`Lowered.holds`).

Rule 1  A size that is one symbol, or an expression of symbols of which one is no size by itself, is a symbol here. What
        else there is is an expression of those.
Rule 2  Strides are as the graph says, or else dense in the order of the strides at hand.
Rule 3  A size of 0 or 1 is not open: such a shape is lowered by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from remat._torch.symbols import expression_of, size_of, symbols_for
from remat.capture.dynamic_shapes import of_expression
from remat.errors import RematError
from remat.fusion.kernels import Layout


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shape and stride of a tensor, each an expression of symbols."""

    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]


InputSizes: TypeAlias = Sizes | sympy.Expr | tuple[sympy.Expr, ...] | None  # a tensor, a number, some, anything else


def described(value: Any) -> InputSizes:
    """Describe an input of a captured graph."""
    if isinstance(value, Tensor):
        return Sizes(tuple(map(expression_of, value.shape)), tuple(map(expression_of, value.stride())))
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, torch.SymInt)) for each in value):
        return tuple(map(expression_of, value))
    return expression_of(value) if isinstance(value, (int, torch.SymInt)) else None


def with_open_rows(given: Sequence[Any], by_row: Sequence[bool]) -> list[InputSizes]:
    """Open the number of rows of the inputs that have rows, `by_row`."""
    rows = sympy.Symbol("rows")
    found = []
    for value, has_rows in zip(given, by_row, strict=True):
        sizes = described(value)
        if has_rows and isinstance(sizes, Sizes):
            sizes = dataclasses.replace(sizes, shape=(rows, *sizes.shape[1:]))
        found.append(sizes)
    return found


def are_open(inputs: Sequence[InputSizes]) -> bool:
    """Return whether a size of a tensor among `inputs` is open."""
    return any(isinstance(each, Sizes) and any(size.free_symbols for size in each.shape) for each in inputs)


class TensorKind(NamedTuple):
    """The properties of a tensor that a kernel depends on."""

    sizes: Sizes
    dtype: torch.dtype
    device: str
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class OpenInputs:
    """The inputs of a group, some of their sizes open.

    kinds   of each tensor its sizes, dtype, device, and whether it has a gradient; of other inputs their numbers
    values  of the symbols, in order
    """

    kinds: tuple[Any, ...]
    values: tuple[int, ...]

    def fakes(self) -> tuple[FakeTensorMode, list[Any], list[Any]]:
        """Return (mode, its symbols, inputs), with tensors as fakes of the mode."""
        mode, symbols = symbols_for(self.values)
        renamed = dict(zip(_symbols(len(self.values)), symbols, strict=True))
        numbers = dict(zip(_symbols(len(self.values)), self.values, strict=True))

        def size(expression: sympy.Expr) -> Any:
            return size_of(mode, expression.xreplace(renamed), int(expression.xreplace(numbers)))

        found: list[Any] = []
        with mode:
            for kind in self.kinds:
                if not isinstance(kind, TensorKind):
                    found.append(tuple(map(size, kind)) if isinstance(kind, tuple) else size(kind))
                    continue
                sizes, dtype, device, has_gradient = kind
                shape, stride = list(map(size, sizes.shape)), list(map(size, sizes.stride))
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                found.append(tensor.requires_grad_(has_gradient))
        return mode, symbols, found


def opened(inputs: Sequence[InputSizes], given: Sequence[Any]) -> OpenInputs | None:
    """Return a group's inputs with the sizes open that `inputs` mark; None if their layout differs."""
    sizes: dict[sympy.Expr, int] = {}
    for each, value in zip(inputs, given, strict=True):
        if isinstance(each, Sizes) != isinstance(value, Tensor) or (
            isinstance(each, Sizes) and len(each.shape) != value.dim()
        ):
            return None
        for expression, size in zip(each.shape, value.shape, strict=True) if isinstance(each, Sizes) else ():
            if sizes.setdefault(expression, int(size)) != size:
                return None
    known = {expression for expression in sizes if expression.is_Symbol}
    free = [e for e in sizes if e.is_Symbol or not e.free_symbols <= known]  # Rule 1
    values = tuple(sizes[expression] for expression in free)
    if not free or min(values) < 2:
        return None
    renamed = dict(zip(free, _symbols(len(free)), strict=True))
    valued = dict(zip(renamed.values(), values, strict=True))

    def rewritten(expressions: Sequence[sympy.Expr], found: Sequence[int]) -> tuple[sympy.Expr, ...] | None:
        """Rewrite `expressions` in our symbols; None if their values differ from `found`."""
        again = tuple(expression.xreplace(renamed) for expression in expressions)
        now = [expression.xreplace(valued) for expression in again]
        return again if all(e == n for e, n in zip(now, found, strict=True)) else None

    kinds: list[Any] = []
    for each, value in zip(inputs, given, strict=True):
        if not isinstance(each, Sizes):
            is_one = not isinstance(value, (tuple, list))
            numbers = [int(value)] if is_one else list(map(int, value))
            said = () if each is None else (each,) if is_one else each
            known_as = rewritten(said, numbers) if len(said) == len(numbers) else None
            found = tuple(map(sympy.Integer, numbers)) if known_as is None else known_as
            kinds.append(found[0] if is_one else found)
            continue
        shape = rewritten(each.shape, value.shape)
        if shape is None:
            return None
        stride = rewritten(each.stride, value.stride()) or rewritten(_dense(shape, value), value.stride())  # Rule 2
        if stride is None:
            return None
        kinds.append(TensorKind(Sizes(shape, stride), value.dtype, str(value.device), value.requires_grad))
    return OpenInputs(tuple(kinds), values)


def _symbols(count: int) -> list[sympy.Symbol]:
    return [sympy.Symbol(f"z{i}", integer=True, positive=True) for i in range(count)]


def _dense(shape: Sequence[sympy.Expr], value: Tensor) -> list[sympy.Expr]:
    """Return strides without gaps, in the order of those of `value`."""
    found, step = [sympy.Integer(0)] * value.dim(), sympy.Integer(1)
    for dim in sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim])):
        found[dim], step = step, step * shape[dim]
    return found


# Sizes in graphs of ATen operators


def is_size(node: Any) -> bool:
    """Return whether a node of a lowered graph is an open size."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymInt)


def concrete(layout: Layout, values: dict[Any, int]) -> Layout:
    """Substitute values for the symbols of a layout."""
    shape, stride, dtype, device = layout
    return _numbers(shape, values), _numbers(stride, values), dtype, device


def _numbers(sizes: Sequence[Any], values: dict[Any, int]) -> tuple[int, ...]:
    return tuple(number_of(expression_of(size), values) for size in sizes)


def number_of(expression: sympy.Expr, values: dict[Any, int]) -> int:
    return int(expression.xreplace(values))


class SizeNodes:
    """Nodes for sizes in a graph under construction, computed from its inputs."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node]):
        self._graph, self._inputs = graph, inputs
        self._given = {node.meta["val"].node.expr: node for node in inputs if is_size(node)}

    def of(self, size: Any) -> Any:
        """Return a number unchanged, an open size as a node. Raises RematError if the inputs do not determine it."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        for symbol in expression.free_symbols - self._given.keys():
            self._look_up(symbol)
        found = of_expression(self._graph, expression, self._given, "val")
        if found is None:
            raise RematError(f"{expression} is no sum or product of what it is given")
        return found

    def _look_up(self, symbol: sympy.Symbol) -> None:
        for node in self._inputs:
            value = node.meta["val"]
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    made = self._graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    made.meta["val"] = size
                    self._given[symbol] = made
                    return
