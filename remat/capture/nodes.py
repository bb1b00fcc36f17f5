"""Nodes of a captured fx graph: their callees, their random draws, and a node as a function."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.capture.dynamic_shapes import is_size


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls method `name` of its first argument."""

    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return method


def as_function(node: fx.Node) -> Callable[..., Any]:
    """Return the callee of `node` as a function of all its arguments."""
    return node.target if callable(node.target) else _method(str(node.target))


def replace_target(node: fx.Node, function: Callable[..., Any]) -> None:
    """Let `node` call `function` (arguments unchanged), under a name that includes the old callee."""
    name = f"{function.__name__.strip('_')}_{getattr(node.target, '__name__', node.target)}"
    node.op, node.target = "call_function", with_name(function, name)


def captured_nodes(graph_module: fx.GraphModule) -> list[fx.Node]:
    """List the operators of a captured graph, in order: the nodes that plans count."""
    return [node for node in graph_module.graph.nodes if is_captured(node)]


def is_captured(node: fx.Node) -> bool:
    """Return whether `node` is an operator; nodes that compute open sizes are not."""
    return node.op not in ("placeholder", "get_attr", "output") and not is_size(node)


def called(node: fx.Node) -> str:
    """Return the callee of a captured node as text, equal on every device and torch version.

    Remembered before a target's kernels are put in place of this machine's.
    """
    if "called" not in node.meta:
        method = isinstance(node.target, str)
        node.meta["called"] = (
            f"{node.op}:{node.target}" if method else getattr(node.target, "__name__", str(node.target))
        )
    return str(node.meta["called"])


def asked(node: fx.Node, argument: str) -> Any:
    """Return the value that `node` passes for an argument of its Python function; None if there is no such argument."""
    if argument in node.kwargs:
        return node.kwargs[argument] or None
    place = _place_of(node.target, argument) if inspect.isfunction(node.target) else len(node.args)
    return node.args[place] or None if place < len(node.args) else None


@functools.lru_cache(maxsize=1024)
def _place_of(function: Callable[..., Any], argument: str) -> int:
    """Return the position of an argument of a Python function; a number above all others if it has none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return sys.maxsize
    names = [each.name for each in parameters if each.kind in _BY_POSITION]
    return names.index(argument) if argument in names else sys.maxsize


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_RANDOM_FUNCTIONS = re.compile(
    r".*dropout\d*_?|rand.*|bernoulli_?|normal_?|uniform_|exponential_|.*rrelu_?|gumbel_softmax|multinomial|poisson"
)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # (input, hx, params, has_biases, layers, dropout, train, ...)


def may_draw(node: fx.Node) -> bool:
    """Return whether `node`, by its name and constants, draws random numbers.

    Constants are no part of a graph's fingerprint: a rate may have been 0 when the plan was made.
    """
    arguments: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    if called(node) == "scaled_dot_product_attention":
        return bool(arguments.get(4, arguments.get("dropout_p", 0.0)))
    if called(node) == "multi_head_attention_forward":
        return bool(arguments.get(10, arguments.get("dropout_p", 1.0))) and bool(
            arguments.get(13, arguments.get("training", True))
        )
    if called(node) in _RECURRENT:
        # Packed sequences come with their batch sizes, before all else but the data.
        at = 6 if isinstance(arguments.get(4), bool) else 5
        return bool(arguments.get(at, 1.0)) and bool(arguments.get(at + 1, True))
    if "dropout" in called(node):
        rate, training = arguments.get(1, arguments.get("p", 1.0)), arguments.get(2, arguments.get("training", True))
        return bool(rate) and bool(training)
    return _RANDOM_FUNCTIONS.fullmatch(called(node)) is not None


_BRACKETS = {
    "_enter_autocast": 1,
    "_exit_autocast": -1,
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
}


def bracket_of(node: fx.Node) -> int:
    """Return +1 for a node that opens a context (autocast, no_grad, vmap), -1 for the one that closes it."""
    if called(node) == "_set_grad_enabled":
        return -1 if node.args[0] else 1
    return _BRACKETS.get(called(node), 0)


def around_regions(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that open or close autocast around more than half of `nodes`: regions lie inside, not around.

    Such a context is a forward that enters autocast itself. Without regions inside of it there would be no plan.
    """
    place = {node: i for i, node in enumerate(nodes)}
    closing = [node for node in nodes if called(node) == "_exit_autocast"]
    pairs = [(opening, node) for node in closing for opening in node.all_input_nodes]
    return frozenset(node for pair in pairs if 2 * (place[pair[1]] - place[pair[0]]) > len(nodes) for node in pair)


def with_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give `function` the name that it has in the code of a rewritten graph."""
    function.__name__ = function.__qualname__ = name
    return function


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast `tensor` as autocast does for a product; a captured node may call it."""
    kind = tensor.device.type
    casts = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
