"""Sums over many rows, in stages.

The gradient of a weight that a group takes (of a normalisation, say) is a sum over all rows. ATen adds in a cascade;
Inductor's loops on a CPU add row after row, and end several times further from float64. So such sums are cut into
stages of few rows each, in which rounding errors grow with the logarithm of the number of rows (Higham 1993, The
accuracy of floating point summation). Where the number of rows is open, rows of zeros fill them up to whole stages.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from remat.fusion.open_sizes import SizeNodes

STAGE = 8  # rows that one stage adds, about
FEW = 12  # rows: no more are added at once
OPEN = (STAGE, STAGE, STAGE)  # the stages of an open number of rows

aten = torch.ops.aten


def sum_in_stages(joint: fx.GraphModule) -> None:
    """Cut sums over leading dimensions in a graph of ATen operators, in place; its nodes know their values."""
    sizes = SizeNodes(joint.graph, joint.graph.find_nodes(op="placeholder"))
    for node in joint.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        rows = _rows(node)
        if isinstance(rows, torch.SymInt):
            _cut_open(joint.graph, node, rows, sizes)
        elif rows > FEW:
            _cut(joint.graph, node, rows)
    joint.recompile()


def _rows(node: fx.Node) -> int | torch.SymInt:
    """Return the number of rows added if these are all leading dimensions; else 0."""
    arguments: Any = node.args
    value: Tensor = arguments[0].meta["val"]
    if not value.dim():
        return 0
    dims = sorted(dim % value.dim() for dim in arguments[1])
    widths = value.shape[len(dims) :]
    if dims != list(range(len(dims))) or not widths or not value.is_contiguous() or len(node.kwargs):
        return 0
    if any(isinstance(width, torch.SymInt) for width in widths):
        return 0
    return math.prod(value.shape[: len(dims)])


def _stages(rows: int) -> list[int]:
    """Return factors of `rows`, each about `STAGE` if possible."""
    found = []
    while rows > FEW:
        factor = min((f for f in range(2, FEW + 1) if rows % f == 0), key=lambda f: abs(f - STAGE), default=0)
        if not factor:
            break
        found.append(factor)
        rows //= factor
    return found


def _cut(graph: fx.Graph, node: fx.Node, rows: int) -> None:
    given: Any = node.args[0]
    width = math.prod(given.meta["val"].shape) // rows
    with graph.inserting_before(node):
        for factor in _stages(rows):
            rows //= factor
            given = _call(graph, aten.view.default, given, [rows, factor, width])
            given = _call(graph, aten.sum.dim_IntList, given, [1])
        given = _call(graph, aten.view.default, given, [rows, width])
        _end(graph, node, given)


def _cut_open(graph: fx.Graph, node: fx.Node, rows: torch.SymInt, sizes: SizeNodes) -> None:
    given: Any = node.args[0]
    value: Tensor = node.meta["val"]
    width, together = math.prod(value.shape), math.prod(OPEN)
    with graph.inserting_before(node):
        count = sizes.of(rows)
        filled = _size(graph, operator.floordiv, _size(graph, operator.add, count, together - 1), together)
        zeros = _size(graph, operator.sub, _size(graph, operator.mul, filled, together), count)
        given = _call(graph, aten.view.default, given, [count, width])
        given = _filled(graph, given, zeros, width)
        given = _call(graph, aten.view.default, given, [filled, *OPEN, width])
        for stage in range(len(OPEN), 0, -1):
            given = _call(graph, aten.sum.dim_IntList, given, [stage])
        _end(graph, node, given)


def _filled(graph: fx.Graph, given: fx.Node, rows: fx.Node, width: int) -> fx.Node:
    """Append rows of zeros to `given`."""
    value: Tensor = given.meta["val"]
    zeros = graph.call_function(aten.full.default, ([rows, width], 0), {"dtype": value.dtype, "device": value.device})
    node = graph.call_function(aten.cat.default, ([given, zeros],))
    with value.fake_mode:  # type: ignore[attr-defined]
        zeros.meta["val"] = value.new_zeros(rows.meta["val"], width)
        node.meta["val"] = torch.cat([value, zeros.meta["val"]])
    return node


def _end(graph: fx.Graph, node: fx.Node, given: fx.Node) -> None:
    """Add up the rows that are left, in place of `node`."""
    given = _call(graph, aten.sum.dim_IntList, given, [0])
    given = _call(graph, aten.view.default, given, list(node.meta["val"].shape))
    given.meta = {**node.meta, "val": given.meta["val"]}
    node.replace_all_uses_with(given)
    graph.erase_node(node)


def _call(graph: fx.Graph, operator: Any, given: fx.Node, argument: list[Any]) -> fx.Node:
    node = graph.call_function(operator, (given, argument))
    value: Tensor = given.meta["val"]
    numbers = [each.meta["val"] if isinstance(each, fx.Node) else each for each in argument]
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta = {**given.meta, "val": operator(value, numbers)}
    return node


def _size(graph: fx.Graph, compute: Any, one: fx.Node, other: Any) -> fx.Node:
    node = graph.call_function(compute, (one, other))
    node.meta["val"] = compute(*(each.meta["val"] if isinstance(each, fx.Node) else each for each in (one, other)))
    return node
