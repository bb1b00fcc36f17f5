"""Uses: which nodes of a graph call compute with weights that are on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from remat.capture.nodes import called, captured_nodes
from remat.chunking.chunk import ROWS
from remat.errors import UsageError
from remat.host.weights import HostWeights


def uses_in(graph_module: fx.GraphModule, args: Iterable[Any], weights: HostWeights) -> dict[int, int]:
    """By ordinal of each node that takes a weight which is on the host the number of its layer.

    args  what the graph is called with, the weights among them

    Raises UsageError for a node that is no linear product: its value may be a view, which lives longer than the weight.
    """
    inputs = (node for node in graph_module.graph.nodes if node.op == "placeholder")
    ordinals = {node: i for i, node in enumerate(captured_nodes(graph_module))}
    found: dict[int, int] = {}
    for given, value in zip(inputs, args, strict=True):
        if (layer := weights.layer_of(value)) is None:
            continue
        for node in given.users:
            if called(node) != "linear" and ROWS not in node.meta:
                raise UsageError(
                    f"node {node.name!r} ({called(node)}) uses a weight of {weights.layers[layer].path}, and only what "
                    "linear products alone use can be on the host; leave `weights` out of `offload`."
                )
            found[ordinals[node]] = layer
    return found
