"""Bodies: the computation of a run of nodes as graphs whose first of two dimensions is rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from remat._torch.training import without_modes
from remat.capture.nodes import autocast, called
from remat.chunking.chunked_rows import ChunkedRows, unmade_addmm, unmade_linear
from remat.chunking.heads import CASTS, FLATTENINGS, kind_of, linear_arguments
from remat.chunking.rows import SPLITS, RowRun, is_view, product_weights


def chunked(run: RowRun, slices: int) -> ChunkedRows:
    """Build the module that computes `run` in `slices` slices."""
    weights = {each for node in run.products for each in product_weights(node)}
    of_products = frozenset(i for i, node in enumerate(run.beside) if node in weights)
    bodies = _body(run), _body(run, unmade=run.unmade), _body(run, precise=True)
    residual = kind_of(run.result) == "add" and run.given in run.result.args
    return ChunkedRows(*bodies, of_products, residual, slices)


def _body(run: RowRun, unmade: Collection[fx.Node] = (), *, precise: bool = False) -> fx.GraphModule:
    """Build (rows, *beside) -> the result; `unmade` values are not computed, `precise` leaves casts out."""
    graph = fx.Graph()
    copies = {run.given: _like(run.given, graph.placeholder("rows"))}
    for i, node in enumerate(run.beside):
        copies[node] = graph.placeholder(f"beside_{i}")
        copies[node].meta = {"example_value": node.meta["example_value"]}
    for node in run.nodes:
        if is_view(node) or (precise and kind_of(node) in CASTS):
            given = copies[node.args[0]]  # type: ignore[index]
            # Gradients are added up at a view first, and then at its base.
            copies[node] = _like(node, graph.call_method("view_as", (given, given))) if _adds_up(node) else given
        elif node in unmade:
            copies[node] = _unmade(graph, node, copies)
        else:
            args, kwargs = fx.map_arg(_arguments(node), copies.__getitem__)
            copies[node] = _like(node, graph.create_node(node.op, node.target, args, kwargs))
    graph.output(copies[run.result])
    return fx.GraphModule({}, graph)


def _adds_up(node: fx.Node) -> bool:
    """Return whether a view and its base are both read more than once."""
    return kind_of(node) in FLATTENINGS and len(node.users) > 1 and len(node.args[0].users) > 1  # type: ignore[union-attr]


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    """Return the arguments of `node` for rows with all leading dimensions in one."""
    if kind_of(node) not in SPLITS:
        return node.args, node.kwargs
    return node.args[:2], {**{name: value for name, value in node.kwargs.items() if name != "dim"}, "dim": -1}


def _unmade(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    is_linear = kind_of(node) == "linear"
    weight, bias = product_weights(node)
    rows: Any = linear_arguments(node)[0] if is_linear else node.args[1]
    cast = _like(rows, graph.call_function(autocast, (copies[rows],)), dtype=node.meta["example_value"].dtype)
    weights = (copies[weight], None if bias is None else copies[bias])
    if is_linear:
        return _like(node, graph.call_function(unmade_linear, (cast, *weights)))
    return _like(node, graph.call_function(unmade_addmm, (weights[1], cast, weights[0])))


def _like(node: fx.Node, copy: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """Note at `copy` the value that `node` has, with all leading dimensions in one."""

    def flat(value: torch.Tensor) -> torch.Tensor:
        rows = value.flatten(0, -2) if value.dim() > 1 else value  # or what all rows share
        return rows.to(dtype or value.dtype)

    with without_modes():  # the value brings its own
        copy.meta = {"example_value": tree_map_only(torch.Tensor, flat, node.meta["example_value"])}
    if copy.target == node.target:
        copy.meta["called"] = called(node)
    return copy
