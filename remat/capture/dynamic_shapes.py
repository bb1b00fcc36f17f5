"""Sizes that are left open: one captured graph for batches of every length.

When a second batch has another shape, Dynamo traces again with the sizes that changed as symbols, and does not trace a
third time. Such a graph has more nodes, which compute sizes out of sizes and no tensor. A plan does not know of them:
they are no captured nodes, and are moved in front of all others, where no region begins or ends between them and what
takes them. Everything else is the graph that was planned for, so the kernels are too.
"""

from __future__ import annotations

import torch
from torch import fx

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_size(node: fx.Node) -> bool:
    """Whether the value of `node` is an open size, or some of them."""
    value = node.meta.get("example_value")
    return any(isinstance(each, _SYMBOLS) for each in (value if isinstance(value, (tuple, list)) else (value,)))


def has_sizes(graph_module: fx.GraphModule) -> bool:
    """Whether `graph_module` is for batches of several sizes."""
    return any(is_size(node) for node in graph_module.graph.nodes)


def move_sizes_first(graph_module: fx.GraphModule) -> bool:
    """Let sizes be computed right after the graph's inputs, in place; False where one is read off a later tensor."""
    graph = graph_module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    known = set(graph.find_nodes(op="placeholder"))
    for node in list(graph.nodes):
        if node.op == "placeholder" or not is_size(node):
            continue
        if not known.issuperset(node.all_input_nodes):
            return False
        known.add(node)
        if node is not first:
            first.prepend(node)
        else:
            first = node.next
    graph_module.recompile()
    return True
