"""Casts: what autocast does to the arguments of products, as nodes of the graph.

Autocast casts inside a product, once for every product that reads a value, and each keeps its copy. As a node of its
own, the cast can be a member of the group that makes the value: what the group gives out is 16 bits wide already, one
storage for all products that read it. Each argument of a product has a cast of its own all the same, so that their
gradients are added as autocast adds them, in the wider dtype.

A cast stands where the value is made. So a value that may be written to has none, nor has one that is made under
another autocast than its product runs under.

Whether there is anything to cast shows where the graph runs. (A CUDA device casts elsewhere than this machine may.)
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, fx

from remat._torch.training import without_modes
from remat.capture.nodes import autocast, bracket_of, called, captured_nodes
from remat.capture.writing import storages, written_storages
from remat.fusion.groups import GROUPABLE

OF_WEIGHTS = {"linear": 0, "addmm": 1}  # products with a weight, and which argument is the activation
OF_ACTIVATIONS = {"matmul": 2, "bmm": 2, "scaled_dot_product_attention": 3}  # ... with none, and of how many


def with_casts(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copy `graph_module` with autocast's casts of products' arguments as nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    cast_for: dict[tuple[fx.Node, int], fx.Node] = {}  # (product, position of an argument) -> the cast
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    nodes = captured_nodes(graph_module)
    written = written_storages(nodes, GROUPABLE)
    context = dict(zip(nodes, itertools.accumulate(abs(bracket_of(node)) for node in nodes), strict=True))
    for node in nodes:
        for position, given in _activations(node):
            if context[given] == context[node] and storages(given).isdisjoint(written):
                readers.setdefault(given, []).append((node, position))
    for node in graph_module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.args = tuple(cast_for.get((node, position), argument) for position, argument in enumerate(copy.args))
        for product, position in readers.get(node, ()):
            cast_for[product, position] = _cast(graph, node, copy, product.meta["example_value"].dtype)
    found = fx.GraphModule(graph_module, graph)
    found.graph.lint()
    return found


def _activations(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return (position, value) of arguments that a product under autocast casts, if nodes make them."""
    name, made = called(node), node.meta.get("example_value")
    if not isinstance(made, Tensor) or made.dtype not in (torch.bfloat16, torch.float16):
        return []
    if name in OF_WEIGHTS and not node.kwargs and len(node.args) > OF_WEIGHTS[name]:
        first = OF_WEIGHTS[name]
        if not all(map(_is_wide, (n for n in node.all_input_nodes if n is not node.args[first]))):
            return []
        positions = range(first, first + 1)
    else:
        wide = [isinstance(value, fx.Node) and _is_wide(value) for value in node.args[: OF_ACTIVATIONS.get(name, 0)]]
        positions = [i for i, is_wide in enumerate(wide) if is_wide]  # type: ignore[assignment]
    given = ((position, node.args[position]) for position in positions)
    return [(i, n) for i, n in given if isinstance(n, fx.Node) and n.op not in ("placeholder", "get_attr")]


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _cast(graph: fx.Graph, node: fx.Node, copy: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = graph.call_function(autocast, (copy,))
    with without_modes():  # the value brings its own
        value = node.meta["example_value"].to(dtype)
    cast.meta = {**node.meta, "called": "autocast", "example_value": value}
    cast.meta.pop("identity", None)
    return cast
