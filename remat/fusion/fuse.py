"""Fuse: a captured graph in which every group is one node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from remat.capture.nodes import with_name
from remat.capture.writing import storages
from remat.fusion.fused_group import FusedGroup
from remat.fusion.groups import Group, find_groups
from remat.fusion.open_sizes import described

FUSED = "fused_group"  # the callee of a group's node, and the key of its meta for the `FusedGroup`


def fuse(graph_module: fx.GraphModule, *, are_rows: bool = False) -> fx.GraphModule:
    """Copy `graph_module` with each group as one node; other nodes are unchanged, in their order.

    are_rows  its first input is given slice by slice, so the sizes of what is made of it are no batch's
    """
    return _Fuser(graph_module, are_rows).module()


def fused_groups(graph_module: fx.GraphModule) -> list[FusedGroup]:
    """List the groups of a fused graph call."""
    return [node.meta[FUSED] for node in graph_module.graph.nodes if FUSED in node.meta]


def as_group(graph_module: fx.GraphModule, text: str, by_row: Sequence[bool]) -> fx.GraphModule:
    """Make one group of a whole graph that has one result for each row, in a graph of its own.

    by_row  whether each of its inputs has rows
    """
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ((output.args[0],),)
    graph_module.recompile()
    graph, group = fx.Graph(), FusedGroup(graph_module, text, by_row=by_row)
    given = [graph.placeholder(str(node.target)) for node in graph_module.graph.find_nodes(op="placeholder")]
    call = graph.call_function(_calling(group), tuple(given))
    call.meta = {"called": text, FUSED: group}
    graph.output(call)
    return fx.GraphModule(torch.nn.Module(), graph)


class _Fuser:
    def __init__(self, source: fx.GraphModule, are_rows: bool):
        self._source, self._by_row = source, _with_rows(source) if are_rows else None
        self._groups = {group.members[-1]: group for group in find_groups(source)}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        inside = {node for group in self._groups.values() for node in group.members}
        for node in self._source.graph.nodes:
            if node in self._groups:
                self._call(self._groups[node])
            elif node not in inside:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        found = fx.GraphModule(self._source, self._graph)
        found.graph.lint()
        return found

    def _call(self, group: Group) -> None:
        given, views = group.inputs, [node for node in group.members if node not in group.makers]
        again = _read_outside(group, views)
        wanted = {source for node in again for source in node.all_input_nodes}
        results = [node for node in group.makers if group.is_read(node) or node in wanted]
        inside = [i for i, node in enumerate(results) if not _leaves(node)]
        module = _module_of(group, given, results)
        if self._by_row is not None:
            function = FusedGroup(module, group.text, inside, by_row=[node in self._by_row for node in given])
        else:
            sizes = [described(node.meta.get("example_value")) for node in given]
            function = FusedGroup(module, group.text, inside, sizes)
        call = self._graph.call_function(_calling(function), tuple(self._copies[node] for node in given))
        values = tuple(node.meta["example_value"] for node in results)
        last = group.makers[-1]
        call.meta = {**last.meta, "called": group.text, FUSED: function, "example_value": values}
        call.meta.pop("identity", None)
        if len(results) == 1:
            call.meta["example_value"] = values[0]
            self._copies[results[0]] = call
        else:
            for i, node in enumerate(results):
                self._copies[node] = self._graph.call_function(operator.getitem, (call, i))
                self._copies[node].meta = {**call.meta, "called": "getitem", "example_value": values[i]}
                del self._copies[node].meta[FUSED]
        for node in again:
            self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)


def _with_rows(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Return the first input and all that is made of it."""
    found: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if not found or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _leaves(node: fx.Node) -> bool:
    """Return whether the graph returns the storage of `node`, so that the caller may write to it."""
    own = storages(node)
    return any(user.op == "output" or (not own.isdisjoint(storages(user)) and _leaves(user)) for user in node.users)


def _read_outside(group: Group, views: list[fx.Node]) -> list[fx.Node]:
    """Return the views that are viewed again outside, in order."""
    found: set[fx.Node] = set()
    for node in reversed(views):
        if group.is_read(node) or not found.isdisjoint(node.users):
            found.add(node)
    return [node for node in views if node in found]


def _module_of(group: Group, given: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    """Build the module of a group from its inputs to its results."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(given)}
    for node in group.members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _calling(function: FusedGroup) -> Any:
    def call(*args: Any) -> Any:
        return function(*args)

    return with_name(call, FUSED)
