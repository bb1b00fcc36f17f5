"""Open sizes of a graph: those of its inputs that sizes of its tensors are computed out of.

A graph is compared with the plan by its bytes when it is first run. One with open sizes runs at others afterwards, and
is compared again where they are larger than any at which it was: a number in a buffer may decide a size, and so may the
length of rows in a batch of as many elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


class OpenSizes:
    """The open sizes of one graph, and those at which it was compared with its plan."""

    def __init__(self, graph_module: fx.GraphModule):
        symbols = set[Any]()
        for node in graph_module.graph.nodes:
            for leaf in tree_leaves(node.meta.get("example_value")):
                if isinstance(leaf, torch.Tensor):
                    shape: tuple[Any, ...] = tuple(leaf.shape)
                    symbols.update(*(size.node.expr.free_symbols for size in shape if isinstance(size, torch.SymInt)))
        inputs = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
        self._inputs = [
            (i, value.node.expr)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.SymInt) and value.node.expr in symbols
        ]
        self._compared: list[tuple[int, ...]] = []  # of which none is larger than another in all sizes

    def __bool__(self) -> bool:
        return bool(self._inputs)

    def are_larger(self, args: tuple[Any, ...]) -> bool:
        """Return whether one of the sizes among `args` is larger than at each comparison."""
        sizes = self._of(args)
        return not any(all(map(int.__le__, sizes, most)) for most in self._compared)

    def note_compared(self, args: tuple[Any, ...]) -> None:
        sizes = self._of(args)
        smaller = (most for most in self._compared if not all(map(int.__le__, most, sizes)))
        self._compared = [*smaller, sizes]

    def values(self, args: tuple[Any, ...]) -> Mapping[Any, int]:
        """Return the sizes among `args`, by symbol."""
        return {symbol: int(args[i]) for i, symbol in self._inputs}

    def _of(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple([int(args[i]) for i, _ in self._inputs])
