"""Products: the nodes that may take weights which are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from remat.capture.nodes import called
from remat.chunking.chunk import ROWS
from remat.errors import UsageError
from remat.host.weights import HostWeights

_OTHERS = "inputs_of_others"  # key of a graph module's meta


def is_product(node: fx.Node) -> bool:
    """Return whether `node` is a linear product, chunked or not; its value is never a view of its weight."""
    return node.op == "call_function" and (called(node) == "linear" or ROWS in node.meta)


def require_products(graph_module: fx.GraphModule, args: Sequence[Any], weights: HostWeights) -> None:
    """Raise UsageError if a weight on the host among `args` goes to a node that is not a product.

    That node's value might be a view, which lives longer than the weight.
    """
    if _OTHERS not in graph_module.meta:
        inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        users = ((i, user) for i, node in enumerate(inputs) for user in node.users if not is_product(user))
        graph_module.meta[_OTHERS] = dict(users)
    for i, user in graph_module.meta[_OTHERS].items():
        if (layer := weights.layer_of(args[i])) is not None:
            raise UsageError(
                f"node {user.name!r} ({called(user)}) uses a weight of {weights.layers[layer].path}, and only what "
                "linear products alone use can be on the host; leave `weights` out of `offload`."
            )
