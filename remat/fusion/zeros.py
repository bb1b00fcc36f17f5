"""Zeros: the backward of a group if some of its results were not differentiated.

Autograd hands None for such a result. Zeros in its place would be wrong: where the group's derivatives are infinite
they make NaN, and a parameter behind that result alone would get a gradient of zeros where it has none. So the missing
gradients are followed through the graph of the backward, which is linear in them: what is made of missing ones alone,
or is a product with one, is missing too. Only where an operator has no rule here are zeros put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from remat.fusion.open_sizes import SizeNodes

aten = torch.ops.aten


def without(backward: fx.GraphModule, missing: Sequence[fx.Node]) -> fx.GraphModule:
    """Copy `backward` without its inputs `missing`; gradients that come from them alone are None."""
    return _Follower(backward, missing).module()


class _Follower:
    def __init__(self, backward: fx.GraphModule, missing: Sequence[fx.Node]):
        self._source, self._zeros = backward, set(missing)
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        for node in self._source.graph.nodes:
            if node.op == "output":
                self._graph.output(tuple(map(self._given_out, node.args[0])))
            elif node not in self._zeros:
                self._follow(node)
        return fx.GraphModule(self._source, self._graph)

    def _given_out(self, node: fx.Node | None) -> fx.Node | None:
        return None if node is None or node in self._zeros else self._copies[node]

    def _follow(self, node: fx.Node) -> None:
        zero = [n in self._zeros for n in node.all_input_nodes]
        divided = node.target is aten.div.Tensor and node.args[0] in self._zeros
        multiplied = node.target is aten.mul.Tensor and any(zero)
        if divided or multiplied or (zero and all(zero) and not _looks_at_shapes_only(node)):
            self._zeros.add(node)
        elif node.target is aten.add.Tensor and any(zero) and (other := self._other(node)) is not None:
            self._copies[node] = other
        else:
            self._copies[node] = self._graph.node_copy(node, self._copy_of)

    def _other(self, node: fx.Node) -> fx.Node | None:
        """Return the term of a sum that is not missing, if it equals the sum."""
        (other,) = (n for n in node.all_input_nodes if n not in self._zeros)
        value, made = other.meta["val"], node.meta["val"]
        alike = (
            str(value.shape) == str(made.shape)
            and value.dtype == made.dtype
            and len(node.args) == 2
            and not node.kwargs
        )
        return self._copies[other] if alike else None

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self._zeros:
            return self._copies[node]
        value: torch.Tensor = node.meta["val"]
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        inputs = [self._copies[n] for n in self._source.graph.find_nodes(op="placeholder") if n in self._copies]
        sizes = SizeNodes(self._graph, inputs)
        zeros = self._graph.call_function(aten.full.default, (list(map(sizes.of, value.shape)), 0), options)
        zeros.meta = dict(node.meta)
        return zeros


def _looks_at_shapes_only(node: fx.Node) -> bool:
    """Return whether a node is `full_like`, `new_ones` or the like, which ignore their input's values."""
    name = getattr(node.target, "__name__", "")
    return name.partition(".")[0].endswith("_like") or name.startswith("new_")
