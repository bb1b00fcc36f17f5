"""Partition: split a joint graph of forward and backward so that a plan's regions are recomputed, and when they are.

torch's own partitioner does the splitting. What it needs is said here, in its language of tags (`compiling.py` has
put them on the captured nodes, and tracing has carried them on to operators).

Rule 1  What leaves a region is saved, if backward needs it: a plain node that keeps it must not drag the region's
        recomputation to an earlier time than the region's own backward. What is only returned or written to module
        state (a batch normalisation's statistics) is not needed, and would be saved together with what is large.
        A view, or one of several outputs, is then saved with what it is a part of; the partitioner overlooks it
        otherwise.
Rule 2  In a saved node what allocates is saved. Views and casts are recomputed all the same, as in eager execution.
Rule 3  Backward recomputes a region when the backward of the region after it is over. Inductor fuses what reads the
        same small tensor (a mask), at whatever time, and what is recomputed too early is alive for too long: so a
        recomputed product waits for the last product of backward before it.
Rule 4  A graph input that backward needs is saved as it is. Where a graph has convolutions, Inductor wants whatever
        leads to one in channels-last layout, and would save a copy of the batch, and of kernels, in that layout beside
        the inputs themselves; it leaves alone what is looked at with given strides.

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

from remat._torch.inductor import hash_of, hold_back, min_cut, partitioner_class
from remat.capture.schemas import calls_view
from remat.errors import RematError
from remat.execution.compiled.tags import RECOMPUTED, SAVED

_CASTS = ("_to_copy", "convert_element_type")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_GRADIENTS = (
    "convolution_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


class Partitioner(partitioner_class()):  # type: ignore[misc]
    """`partition` as Inductor takes it, with Rules 3 and 4."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        forward, backward = partition(gm, joint_inputs, **kwargs)
        order(backward)
        keep_input_layouts(forward)
        return forward, backward

    def uuid(self) -> Any:
        return hash_of(__file__)


def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Split a joint graph with tagged nodes into (forward, backward)."""
    complete_tags(joint)
    return min_cut(joint, joint_inputs, **kwargs)


def complete_tags(joint: fx.GraphModule) -> None:
    """Apply Rules 1 and 2."""
    backward = _backward_nodes(joint)
    inside = [node for node in joint.graph.nodes if "ac_graph_id" in node.meta and node not in backward]
    for node in inside:  # Rule 2
        if node.meta["recompute"] == SAVED and (_is_view(node) or _operator(node) in _CASTS):
            node.meta["recompute"] = RECOMPUTED
    for node in inside:  # Rule 1
        region = node.meta["ac_graph_id"]
        outside = (n for n in node.users if n not in backward and n.meta.get("ac_graph_id") != region)
        if any(user.op != "output" and _operator(user) != "copy_" for user in outside):
            _save(node)


def _backward_nodes(joint: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes of backward: those that tracing has marked, and all that depend on them or on a tangent.

    Passes replace nodes and lose marks.
    """
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        marked = node.meta.get("partitioner_tag") == "is_backward"
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if node.op != "output" and (marked or tangent or any(n in found for n in node.all_input_nodes)):
            found.add(node)
    if not found:
        raise RematError(f"torch {torch.__version__} does not say what in a joint graph is backward; regions are lost.")
    return found


def _save(node: fx.Node) -> None:
    """Save `node`, and the node that it is a part of. (Rule 1)"""
    while "ac_graph_id" in node.meta:
        node.meta["recompute"] = SAVED
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["recompute"] = SAVED
        if node.target is not operator.getitem and not _is_view(node):
            return
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]


def _operator(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    """Return whether a node is a view, or one of several views that its argument makes."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    return calls_view(node)


def order(backward: fx.GraphModule) -> None:
    """Apply Rule 3, if this version of torch can delay an operator."""
    last: fx.Node | None = None
    waiting: dict[fx.Node, fx.Node] = {}
    for node in backward.graph.nodes:
        maker = node.args[0] if node.target is operator.getitem else node
        if node.meta.get("recompute") == RECOMPUTED:
            if _operator(node) in _PRODUCTS and last is not None:
                waiting[node] = last
        elif _operator(node) in _PRODUCTS or (maker is not node and _operator(maker) in _GRADIENTS):
            last = node
    hold_back(backward.graph, waiting)
    backward.recompile()


def keep_input_layouts(forward: fx.GraphModule) -> None:
    """Apply Rule 4."""
    for node in forward.graph.find_nodes(op="placeholder"):
        value, readers = node.meta.get("val"), [user for user in node.users if user.op != "output"]
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or len(readers) == len(node.users):
            continue
        layout = (tuple(value.shape), value.stride())
        if not all(isinstance(number, int) for numbers in layout for number in numbers):
            continue
        with forward.graph.inserting_after(node):
            view = forward.graph.call_function(torch.ops.aten.as_strided.default, (node, *layout))
        view.meta["val"] = value
        for reader in readers:
            reader.replace_input_with(node, view)
    forward.recompile()
