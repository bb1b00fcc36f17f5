"""Partition: split a joint graph of forward and backward so that a plan's regions are recomputed, and when they are.

torch's own partitioner does the splitting. What it needs is said here, in its language of tags (`compiling.py` has
put them on the captured nodes, and tracing has carried them on to operators).

Rule 1  What leaves a region is saved, if backward needs it: a plain node that keeps it must not drag the region's
        recomputation to an earlier time than the region's own backward.
        A view, or one of several outputs, is then saved with what it is a part of; the partitioner overlooks it
        otherwise.
Rule 2  In a saved node what allocates is saved. Views and casts are recomputed all the same, as in eager execution.
Rule 3  Backward recomputes a region when the backward of the region after it is over. Inductor fuses what reads the
        same small tensor (a mask), at whatever time, and what is recomputed too early is alive for too long: so a
        recomputed product waits for the last product of backward before it.

Two things need no rule. A random operator that is recomputed gives what it gave in forward: the partitioner hands its
generator state, or Inductor its seed, from forward to backward. And module state is written by forward only, since
joint graphs are functional.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils._ordered_set import OrderedSet

from remat.compiling import RECOMPUTED, SAVED

_CASTS = ("_to_copy", "convert_element_type")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


class Partitioner(CustomPartitionerFn):
    """`partition` as Inductor takes it, with Rule 3."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        forward, backward = partition(gm, joint_inputs, **kwargs)
        order(backward)
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """(forward, backward) of a joint graph whose nodes carry tags."""
    complete_tags(joint)
    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def complete_tags(joint: fx.GraphModule) -> None:
    """Apply Rules 1 and 2."""
    inside = [node for node in joint.graph.nodes if "ac_graph_id" in node.meta and not _is_backward(node)]
    for node in inside:  # Rule 2
        if node.meta["recompute"] == SAVED and (_is_view(node) or _operator(node) in _CASTS):
            node.meta["recompute"] = RECOMPUTED
    for node in inside:  # Rule 1
        if any(_leaves(node, user) for user in node.users):
            _save(node)


def _leaves(node: fx.Node, user: fx.Node) -> bool:
    return not _is_backward(user) and user.meta.get("ac_graph_id") != node.meta["ac_graph_id"]


def _save(node: fx.Node) -> None:
    """Save `node`, and what it is a part of. (Rule 1)"""
    while "ac_graph_id" in node.meta:
        node.meta["recompute"] = SAVED
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["recompute"] = SAVED
        if node.target is not operator.getitem and not _is_view(node):
            return
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _operator(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def order(backward: fx.GraphModule) -> None:
    """Apply Rule 3, where this torch can hold an operator back."""
    try:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    except ImportError:
        return
    last, waiting = None, {}
    for node in backward.graph.nodes:
        if _operator(node) not in _PRODUCTS:
            continue
        if node.meta.get("recompute") != RECOMPUTED:
            last = node
        elif last is not None:
            waiting[node] = OrderedSet([last])
    preserve_node_ordering(backward.graph, waiting)
    backward.recompile()
