"""Lowering: of a group two kernels, forward and backward, and what is kept between them.

AOTAutograd traces the group's forward and backward into one joint graph, and torch's partitioner cuts that where least
has to be kept (a minimum cut; what is cheap to compute again, backward computes again). So a group keeps what its
inputs and results hold already, wherever it can.

What a kernel gives are new storages. Whatever else is asked for (an input as it is, a view, one result twice) is made
of its inputs and results afterwards, by views.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from remat._torch.inductor import joint_of, min_cut
from remat._torch.training import without_modes
from remat.capture.schemas import calls_view
from remat.errors import RematError
from remat.fusion.kernels import Kernel, Layout, empty
from remat.fusion.sums import sum_in_stages
from remat.fusion.zeros import without


@dataclasses.dataclass(frozen=True)
class Part:
    """A kernel, and how what is asked for is made of its inputs and results: `views(*inputs, *results)`."""

    kernel: Kernel
    views: fx.GraphModule

    def __call__(self, *given: Tensor) -> Sequence[Tensor | None]:
        made = torch.ops.remat.fused(self.kernel.name, list(given)) if self.kernel.made else []
        found: Sequence[Tensor | None] = self.views(*given, *made)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A group for inputs of certain layouts.

    forward         inputs -> results, and what is kept
    backward_graph  what is kept, and the gradients of the results that have one -> gradients of the inputs, or None
    results         how many there are           differentiable  which of them have a gradient
    tangents        layouts of those gradients, in which backward takes them
    """

    forward: Part
    backward_graph: fx.GraphModule
    results: int
    differentiable: tuple[bool, ...]
    tangents: tuple[Layout, ...]

    def backward(self, *missing: int) -> Part:
        """Of all gradients but those numbered `missing`, which nobody has."""
        if missing not in self._parts:
            graph = self.backward_graph
            inputs = graph.graph.find_nodes(op="placeholder")
            tangents = inputs[len(inputs) - len(self.tangents) :]
            self._parts[missing] = _part(without(graph, [tangents[i] for i in missing]) if missing else graph)
        return self._parts[missing]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], Part]:
        return {}


def lower(module: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], may_share: Collection[int] = ()) -> Lowered:
    """`module` for inputs like `given`, under the autocast that is on. Raises RematError where torch cannot.

    may_share  numbers of results of which equal ones may be one storage
    """
    with without_modes(), saved_tensors_hooks(_same, _same), torch.enable_grad(), FakeTensorMode():
        inputs = [_like(tensor) for tensor in given]
        try:
            results = module(*inputs)
            count, differentiable = len(results), tuple(result.requires_grad for result in results)
            joint = _joint(module, inputs)
            sum_in_stages(joint)
            values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
            forward, backward = min_cut(joint, values, num_fwd_outputs=count)
        except Exception as error:
            raise RematError(f"a group cannot be lowered: {type(error).__name__}: {error}") from error
    tangents = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")][len(inputs) :]
    kept = _outputs(forward)[count:]
    placeholders = backward.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(kept) + len(tangents), "what is kept is what backward takes"
    _keep_bases(forward, backward, count)
    layouts = tuple((tuple(t.shape), tuple(t.stride()), t.dtype, t.device.type) for t in tangents)
    _merge_twins(forward, may_share)
    return Lowered(_part(forward), backward, count, differentiable, layouts)


def _joint(module: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Forward and backward in one graph; results are storages of their own."""

    def apart(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(result.clone() for result in module(*given))

    try:
        return joint_of(lambda *given: tuple(module(*given)), inputs)
    except RuntimeError:  # a result is an input, or a view (a cast to what it is already, a reshaped copy)
        return joint_of(apart, inputs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _like(tensor: Tensor) -> Tensor:
    shape, stride, dtype, device = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type
    return empty((shape, stride, dtype, device)).requires_grad_(tensor.requires_grad)


def _outputs(graph_module: fx.GraphModule) -> list[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return list(output.args[0])


def _chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """(what `node` looks at in the end, the views in between and `node`, in order)."""
    views: list[fx.Node] = []
    while calls_view(node):
        views.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def _keep_bases(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Keep, in the place of a view, what it looks at; backward looks again."""
    (output,) = forward.graph.find_nodes(op="output")
    outputs, placeholders = _outputs(forward), backward.graph.find_nodes(op="placeholder")
    for given, node in zip(placeholders, outputs[count:], strict=False):
        base, views = _chain(node)
        users, last = list(given.users), given
        given.meta = dict(base.meta)
        for view in views:
            with backward.graph.inserting_after(last if last is not given else placeholders[-1]):
                last = backward.graph.call_function(view.target, (last, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
            last.meta = dict(view.meta)
        for user in users:
            user.replace_input_with(given, last)
    output.args = ((*outputs[:count], *(_chain(node)[0] for node in outputs[count:])),)


def _merge_twins(forward: fx.GraphModule, may_share: Collection[int]) -> None:
    """Of the results `may_share` of a graph, give one node out in the place of several that compute the same."""
    (output,) = forward.graph.find_nodes(op="output")
    outputs = _outputs(forward)
    first: dict[tuple[Any, ...], fx.Node] = {}
    for i in may_share:
        content = outputs[i].target, str(outputs[i].args), str(outputs[i].kwargs)
        outputs[i] = first.setdefault(content, outputs[i])
    output.args = (tuple(outputs),)


def _part(graph_module: fx.GraphModule) -> Part:
    """A graph as a kernel and views."""
    outputs = _outputs(graph_module)
    inputs = graph_module.graph.find_nodes(op="placeholder")
    chains = [None if node is None else _chain(node) for node in outputs]
    made = list(dict.fromkeys(chain[0] for chain in chains if chain is not None and chain[0] not in inputs))
    kernel_graph: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.op != "output" and node.target is not torch.ops.aten._assert_tensor_metadata.default:
            copies[node] = kernel_graph.node_copy(node, copies.__getitem__)
    kernel_graph.output(tuple(copies[node] for node in made))
    kernel_graph.eliminate_dead_code()
    views_graph = fx.Graph()
    seen = {node: views_graph.placeholder(f"given_{i}") for i, node in enumerate(inputs)}
    seen |= {node: views_graph.placeholder(f"made_{i}") for i, node in enumerate(made)}
    for chain in chains:
        for view in chain[1] if chain is not None else ():
            if view not in seen:
                seen[view] = views_graph.node_copy(view, seen.__getitem__)
    views_graph.output(tuple(None if node is None else seen[node] for node in outputs))
    kernel = Kernel.of(fx.GraphModule(graph_module, kernel_graph))
    return Part(kernel, fx.GraphModule(torch.nn.Module(), views_graph))
