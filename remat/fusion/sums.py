"""Sums over many rows, in stages.

The gradient of a weight that a group takes (of a normalisation, say) is a sum over all rows. ATen adds in a cascade;
Inductor's loops on a CPU add row after row, and end several times further from float64. So such sums are cut into
stages of few rows each, in which rounding errors grow with the logarithm of the number of rows (Higham 1993, The
accuracy of floating point summation).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

STAGE = 8  # rows that one stage adds, about
FEW = 12  # rows: no more are added at once

aten = torch.ops.aten


def sum_in_stages(joint: fx.GraphModule) -> None:
    """Cut the sums of a graph of ATen operators over leading dimensions, in place; the graph knows its values."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if (rows := _rows(node)) > FEW:
            _cut(joint.graph, node, rows)
    joint.recompile()


def _rows(node: fx.Node) -> int:
    """How many rows are added, if they are all of the leading dimensions; else 0."""
    arguments: Any = node.args
    value: Tensor = arguments[0].meta["val"]
    if not value.dim():
        return 0
    dims = sorted(dim % value.dim() for dim in arguments[1])
    widths = value.shape[len(dims) :]
    if dims != list(range(len(dims))) or not widths or not value.is_contiguous() or len(node.kwargs):
        return 0
    return math.prod(value.shape[: len(dims)])


def _stages(rows: int) -> list[int]:
    """Factors of `rows`, each about `STAGE` where there are such."""
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
    value: Tensor = node.meta["val"]
    width = math.prod(given.meta["val"].shape) // rows
    with graph.inserting_before(node):
        for factor in _stages(rows):
            rows //= factor
            given = _call(graph, aten.view.default, given, [rows, factor, width])
            given = _call(graph, aten.sum.dim_IntList, given, [1])
        given = _call(graph, aten.view.default, given, [rows, width])
        given = _call(graph, aten.sum.dim_IntList, given, [0])
        given = _call(graph, aten.view.default, given, list(value.shape))
    given.meta = {**node.meta, "val": given.meta["val"]}
    node.replace_all_uses_with(given)
    graph.erase_node(node)


def _call(graph: fx.Graph, operator: Any, given: fx.Node, argument: list[int]) -> fx.Node:
    node = graph.call_function(operator, (given, argument))
    value: Tensor = given.meta["val"]
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta = {**given.meta, "val": operator(value, argument)}
    return node
