"""Opaque nodes: one node of Dynamo with its own graph, rewritten for eager autograd.

Such nodes are meant for a compiler behind Dynamo. Called as they stand they compute the right numbers, but

* a `torch.utils.checkpoint` call of the model's own checkpoints nothing, can neither be cut nor saved from, and hides
  its random operators and batch normalisations. Its body is put in its place: what is recomputed is the plan's to say.
* a `torch.autograd.Function` keeps what it saves in a closure, out of reach of a region around it, in a class of its
  own for every call, which lives until the garbage collector finds it. It becomes a Function that saves for backward.
* one that is not traced (`opaque_functions.py`) has a node that is called as all of its kind; it gets its own name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from remat._torch.dynamo import own_function

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_FUNCTION = torch.ops.higher_order.autograd_function_apply

_TENSOR = object()  # stands for one that autograd keeps


def open_nodes(graph_module: fx.GraphModule) -> int:
    """Open every known opaque node of `graph_module` in place; return the number of checkpoint calls."""
    checkpoints = 0
    for node in list(graph_module.graph.nodes):
        if node.target is _CHECKPOINT:
            checkpoints += 1 + _inline(graph_module, node)
        elif node.target is _FUNCTION and "saved_for_backward_idx" in node.kwargs:
            node.target = autograd_function_apply
            for body in node.args[:2]:
                _close(graph_module, str(body.target))
        elif (function := own_function(node.target)) is not None:
            _name_function(graph_module, node, function)
    graph_module.recompile()
    return checkpoints


class _SharedBody(nn.Module):
    """A graph that is called and never changed.

    A GraphModule compiles its own graphs whenever it is copied: QLoRA has hundreds.
    """

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(*args)


def _close(graph_module: fx.GraphModule, name: str) -> None:
    if not isinstance(body := getattr(graph_module, name), _SharedBody):  # equal ones may share a name
        setattr(graph_module, name, _SharedBody(body))


def _name_function(graph_module: fx.GraphModule, node: fx.Node, function: Any) -> None:
    """Name the Function of a model that `node` calls."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = function.__name__
    with graph_module.graph.inserting_before(node):
        named = graph_module.graph.call_function(apply, node.args, node.kwargs)
    named.meta = node.meta
    node.replace_all_uses_with(named)
    graph_module.graph.erase_node(node)


def _inline(graph_module: fx.GraphModule, node: fx.Node) -> int:
    """Replace checkpoint call `node` by its body; return the number of further calls in it.

    Dynamo made all of its arguments.
    """
    graph, body = graph_module.graph, getattr(graph_module, str(node.args[0].target))  # type: ignore[union-attr]
    inside = open_nodes(body)
    placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    environment: dict[fx.Node, Any] = dict(zip(placeholders, node.args[1:], strict=True))
    for inner in body.graph.nodes:
        if inner.op == "get_attr":
            name = f"{node.name}_{inner.target}"
            setattr(graph_module, name, getattr(body, str(inner.target)))
            inner.target = name
    with graph.inserting_before(node):
        values: Any = graph.graph_copy(body.graph, environment)
    for user in list(node.users):
        user.replace_all_uses_with(values[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return inside


def autograd_function_apply(forward: Any, backward: Any, *args: Any, **options: Any) -> Any:
    """Run Dynamo's operator of this name under eager autograd."""
    return _Function.apply(forward, backward, options, *args)


class _Function(torch.autograd.Function):
    """A model's own Function by the graphs of its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, options: dict[str, Any], *args: Any) -> Any:
        outputs, saved = forward(*args)
        ctx.run_backward = backward
        ctx.others = [_TENSOR if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        tuples = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_dirty(*(tuples[i] for i in options.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(tuples[i] for i in options["non_differentiable_idx"]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if value is _TENSOR else value for value in ctx.others]
        return (None, None, None, *ctx.run_backward(*gradients, *saved))
