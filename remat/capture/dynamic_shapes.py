"""Sizes that are left open: one captured graph for batches of every length.

When a second batch has another shape, Dynamo traces again with the sizes that changed as symbols, and does not trace a
third time. Such a graph has more nodes, which compute sizes out of sizes and no tensor. A plan does not know of them:
they are no captured nodes, and are moved in front of all others, where no region begins or ends between them and what
takes them. One that is read off a tensor which the graph makes is computed out of the sizes that the graph is given.
Everything else is the graph that was planned for, so the kernels are too.

A graph of nothing but sizes, between two breaks, is none with closed sizes: a plan does not count it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_size(node: fx.Node) -> bool:
    """Return whether the value of `node` is an open size, or several."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, _SYMBOLS) for each in values) or _hands_on_float(node)


def _hands_on_float(node: fx.Node) -> bool:
    """Return whether `node` makes the tensor as which Dynamo lets an open float out of a graph."""
    is_made = node.target is torch.scalar_tensor and node.kwargs == {"dtype": torch.float64}
    return is_made and any(map(is_size, node.all_input_nodes)) and all(user.op == "output" for user in node.users)


def has_sizes(graph_module: fx.GraphModule) -> bool:
    """Return whether `graph_module` is for batches of several sizes."""
    return any(is_size(node) for node in graph_module.graph.nodes)


def has_sizes_alone(graph_module: fx.GraphModule) -> bool:
    """Return whether `graph_module` computes and returns sizes, and nothing else: with closed ones there is no graph.

    Dynamo erases contexts without gradients that hold nothing, and asks for no graph without a call or a result. What
    is left of a comparison, which it erases later, is a graph of nothing at all.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op != "placeholder" and not is_size(node)]
    switches = [node.args[0] for node in nodes if _switches_gradients(node)]
    others = [node for node in nodes if node.op != "output" and not _switches_gradients(node)]
    results = [node for output in nodes if output.op == "output" for node in output.all_input_nodes]
    before = torch.is_grad_enabled()
    are_contexts = switches == [not before, before] * (len(switches) // 2)
    is_open = has_sizes(graph_module) or len(graph_module.graph.nodes) == 1
    return is_open and are_contexts and not others and all(map(is_size, results))


def _switches_gradients(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "_set_grad_enabled"


def move_sizes_first(graph_module: fx.GraphModule) -> bool:
    """Move the computation of sizes right behind the graph's inputs, in place; False if that is impossible."""
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = inputs[-1].next  # a loss in chunks has put the logits that it withholds before the inputs
    known = set(inputs)
    given = {node.meta["example_value"].node.expr: node for node in known if isinstance(_value(node), torch.SymInt)}
    for node in list(graph.nodes):
        if node.op == "placeholder" or not is_size(node):
            continue
        if known.issuperset(node.all_input_nodes):
            known.add(node)
            if node is not first:
                first.prepend(node)
            else:
                first = node.next
            continue
        with graph.inserting_before(first):
            made = _computed(graph, _value(node), given)
        if made is None:
            return False
        made.meta["example_value"] = _value(node)
        known.add(made)
        node.replace_all_uses_with(made)
        first = node.next if node is first else first
        graph.erase_node(node)
    _erase_empty_contexts(graph)
    graph_module.recompile()
    return True


def _erase_empty_contexts(graph: fx.Graph) -> None:
    """Erase contexts without gradients that hold nothing now: their sizes were moved, and a plan knows of neither.

    Dynamo erases those that held nothing from the start.
    """
    opening, before = None, torch.is_grad_enabled()  # the last switch if nothing follows it yet, and the state before
    for node in list(graph.nodes):
        switches = _switches_gradients(node)
        if switches and opening is not None and node.args[0] == before:
            graph.erase_node(opening)
            graph.erase_node(node)
            opening = None
            continue
        if opening is not None:
            before = opening.args[0]
        opening = node if switches else None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _computed(graph: fx.Graph, value: Any, given: dict[Any, fx.Node]) -> fx.Node | None:
    """Add a node that computes the size or sizes `value` from the `given` symbols; None if others are needed."""
    if isinstance(value, torch.Size):
        found = [size if isinstance(size, int) else of_expression(graph, size.node.expr, given) for size in value]
        return None if any(size is None for size in found) else graph.call_function(_sizes, tuple(found))
    if not isinstance(value, torch.SymInt):
        return None
    made = of_expression(graph, value.node.expr, given)
    return made if made is None or isinstance(made, fx.Node) else graph.call_function(int, (made,))


def of_expression(
    graph: fx.Graph, expression: Any, given: Mapping[Any, fx.Node], value: str = "example_value"
) -> fx.Node | int | None:
    """Return a node or a number that equals a sum or product of `given` symbols; None for other expressions.

    value  the key of nodes' values in their meta
    """
    if expression in given:
        return given[expression]
    if expression.is_Integer:
        return int(expression)
    if not (expression.is_Add or expression.is_Mul):
        return None
    parts = [of_expression(graph, part, given, value) for part in expression.args]
    if any(part is None for part in parts):
        return None
    total: Any = parts[0]
    combine = operator.add if expression.is_Add else operator.mul
    for part in parts[1:]:
        made = combine(*(each.meta[value] if isinstance(each, fx.Node) else each for each in (total, part)))
        total = graph.call_function(combine, (total, part))
        total.meta[value] = made
    return total


def _sizes(*sizes: int) -> torch.Size:
    return torch.Size(sizes)
