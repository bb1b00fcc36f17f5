"""Lowering: of a group two kernels, forward and backward, and what is kept between them.

AOTAutograd traces the group's forward and backward into one joint graph, and torch's partitioner cuts that where least
has to be kept (a minimum cut; what is cheap to compute again, backward computes again). So a group keeps what its
inputs and results hold already, wherever it can.

Sizes may be open: then the graphs are traced with symbols. Sizes that backward needs and no tensor shows are numbers
that its kernel is given.

What a kernel gives are new storages. Whatever else is asked for (an input as it is, a view, one result twice) is made
of its inputs and results afterwards, by views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from remat._torch.inductor import joint_of, min_cut
from remat._torch.symbols import holds
from remat._torch.training import without_modes
from remat.capture.schemas import calls_view
from remat.errors import RematError
from remat.fusion.kernels import Kernel, Layout, empty, layout_of
from remat.fusion.open_sizes import OpenInputs, SizeNodes, concrete, is_size, number_of
from remat.fusion.sums import sum_in_stages
from remat.fusion.zeros import without


@dataclasses.dataclass(frozen=True)
class Part:
    """A kernel, and how its caller's values follow from its inputs and results: `views(*numbers, *inputs, *results)`.

    sizes    open sizes passed as numbers, as expressions of symbols        numbers  their present values
    """

    kernel: Kernel
    views: fx.GraphModule
    sizes: tuple[Any, ...] = ()
    numbers: tuple[int, ...] = ()
    is_interpreted: bool = False

    def at(self, values: dict[Any, int]) -> Part:
        """Return the lowering for symbols with these values."""
        if not self.sizes:
            return self
        return dataclasses.replace(self, numbers=tuple(number_of(size, values) for size in self.sizes))

    def __call__(self, *given: Tensor) -> Sequence[Tensor | None]:
        if self.is_interpreted:
            made = list(self.kernel.graph(*self.numbers, *given))
        else:
            numbers = (self.numbers,) if self.numbers else ()  # else the record would differ
            made = torch.ops.remat.fused(self.kernel.name, list(given), *numbers) if self.kernel.made else []
        found: Sequence[Tensor | None] = self.views(*self.numbers, *given, *made)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A group for inputs of certain layouts, some of whose sizes may be open.

    forward         inputs -> results, and kept values
    backward_graph  kept values, and the gradients of the results that have one -> gradients of the inputs, or None
    results         number of results            differentiable  whether each has a gradient
    tangents        layouts of those gradients, in which backward takes them
    mode, symbols   of open sizes                  values  of the symbols
    parts           existing backwards, by the gradients that are missing
    settled         backwards known to hold for these values, or to run operator by operator
    """

    forward: Part
    backward_graph: fx.GraphModule
    results: int
    differentiable: tuple[bool, ...]
    tangents: tuple[Layout, ...]
    mode: FakeTensorMode | None = None
    symbols: tuple[Any, ...] = ()
    values: dict[Any, int] = dataclasses.field(default_factory=dict)
    parts: dict[tuple[int, ...], Part] = dataclasses.field(default_factory=dict)
    settled: dict[tuple[int, ...], Part] = dataclasses.field(default_factory=dict)

    def backward(self, *missing: int) -> Part:
        """Return the backward for all gradients but those numbered `missing`, which do not exist.

        Compiling it may assume more of open sizes. If that does not hold for the present ones, it runs operator by
        operator.
        """
        if missing not in self.parts:
            graph = self.backward_graph
            inputs = graph.graph.find_nodes(op="placeholder")
            tangents = inputs[len(inputs) - len(self.tangents) :]
            self.parts[missing] = _part(without(graph, [tangents[i] for i in missing]) if missing else graph)
        if not self.values:
            return self.parts[missing]
        if missing not in self.settled:
            part = self.parts[missing].at(self.values)
            part.kernel.compile()
            is_for_these = holds(self._mode, self.values)
            self.settled[missing] = part if is_for_these else dataclasses.replace(part, is_interpreted=True)
        return self.settled[missing]

    @property
    def _mode(self) -> FakeTensorMode:
        assert self.mode is not None, "it is for open sizes"
        return self.mode

    def compile(self) -> None:
        """Compile everything that a step needs, which settles the sizes for which it holds."""
        self.begin()
        for part in (self.forward, self.backward()):
            part.kernel.compile()

    def begin(self) -> None:
        """Begin to compile its kernels, beside each other."""
        for part in (self.forward, self.backward()):
            part.kernel.begin()

    def holds(self, values: Sequence[int]) -> bool:
        """Return whether it holds for open sizes of these values."""
        return holds(self._mode, dict(zip(self.symbols, values, strict=True)))

    def at(self, values: Sequence[int]) -> Lowered:
        """Return the lowering for open sizes of these values, with the same kernels."""
        known = dict(zip(self.symbols, values, strict=True))
        tangents = tuple(concrete(layout, known) for layout in self.tangents)
        return dataclasses.replace(self, tangents=tangents, values=known, settled={})


def lower_open(
    bound: Callable[[Sequence[Any]], Callable[..., Sequence[Tensor]]],
    given: OpenInputs,
    may_share: Collection[int] = (),
) -> Lowered:
    """Run `lower` for open sizes. `bound` turns all inputs into a function of the tensors among them."""
    mode, symbols, inputs = given.fakes()
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return dataclasses.replace(lower(bound(inputs), tensors, may_share, mode), mode=mode, symbols=tuple(symbols))


def lower(
    module: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    may_share: Collection[int] = (),
    mode: FakeTensorMode | None = None,
) -> Lowered:
    """Lower `module` for inputs like `given`, under the current autocast. Raises RematError if torch cannot.

    may_share  numbers of results of which equal ones may share a storage
    mode       of `given`, if they are fakes already
    """
    with without_modes(), saved_tensors_hooks(_same, _same), torch.enable_grad(), mode or FakeTensorMode():
        inputs = [_like(tensor) for tensor in given] if mode is None else list(given)
        try:
            results = module(*inputs)
            count, differentiable = len(results), tuple(result.requires_grad for result in results)
            joint = _joint(module, inputs)
            _size_by_inputs(joint, len(inputs))
            sum_in_stages(joint)
            values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
            forward, backward = min_cut(joint, values, num_fwd_outputs=count)
            _drop_sizes(forward)
            tangents = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")][len(inputs) :]
            placeholders = _tensors_taken(backward)
            assert len(placeholders) == len(_outputs(forward)) - count + len(tangents), "backward takes what is kept"
            _keep_bases(forward, backward, count)
            _merge_twins(forward, may_share)
            return Lowered(_part(forward), backward, count, differentiable, tuple(map(layout_of, tangents)))
        except Exception as error:
            raise RematError(f"a group cannot be lowered: {type(error).__name__}: {error}") from error


def _joint(module: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace forward and backward into one graph; results get storages of their own."""

    def apart(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(result.clone() for result in module(*given))

    try:
        return joint_of(lambda *given: tuple(module(*given)), inputs)
    except RuntimeError:  # a result is an input, or a view (a cast to its own dtype, a reshaped copy)
        return joint_of(apart, inputs)


def _size_by_inputs(joint: fx.GraphModule, count: int) -> None:
    """Read open sizes off the inputs of forward alone, since forward cannot depend on gradients."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    inputs, gradients = placeholders[:count], set(placeholders[count:])
    looked_up = list(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int))
    sizes = SizeNodes(joint.graph, inputs)
    first = next(node for node in joint.graph.nodes if node.op != "placeholder")
    for node in looked_up:
        if node.args[0] in gradients:
            with joint.graph.inserting_before(first):
                node.replace_all_uses_with(sizes.of(node.meta["val"]))
            joint.graph.erase_node(node)
    joint.recompile()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _like(tensor: Tensor) -> Tensor:
    return empty(layout_of(tensor)).requires_grad_(tensor.requires_grad)


def _outputs(graph_module: fx.GraphModule) -> list[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return list(output.args[0])


def _tensors_taken(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.find_nodes(op="placeholder") if not is_size(node)]


def _drop_sizes(forward: fx.GraphModule) -> None:
    """Return no sizes from forward: the caller of backward knows them."""
    (output,) = forward.graph.find_nodes(op="output")
    output.args = ([node for node in _outputs(forward) if not is_size(node)],)


def _chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return (base of `node`, the views from it to `node`, in order)."""
    views: list[fx.Node] = []
    while calls_view(node):
        views.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def _keep_bases(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Keep the base in place of a view, which backward makes again."""
    (output,) = forward.graph.find_nodes(op="output")
    outputs, taken = _outputs(forward), _tensors_taken(backward)
    sizes = SizeNodes(backward.graph, backward.graph.find_nodes(op="placeholder"))
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for given, node in zip(taken, outputs[count:], strict=False):
        base, views = _chain(node)
        users, last = list(given.users), given
        given.meta = dict(base.meta)
        for view in views:
            with backward.graph.inserting_before(first):
                args = fx.node.map_arg(view.args[1:], lambda n: sizes.of(n.meta["val"]))
                last = backward.graph.call_function(view.target, (last, *args), view.kwargs)  # type: ignore[arg-type]
            last.meta = dict(view.meta)
        for user in users:
            user.replace_input_with(given, last)
    output.args = ((*outputs[:count], *(_chain(node)[0] for node in outputs[count:])),)


def _merge_twins(forward: fx.GraphModule, may_share: Collection[int]) -> None:
    """Merge nodes of `may_share` that compute the same result."""
    (output,) = forward.graph.find_nodes(op="output")
    outputs = _outputs(forward)
    first: dict[tuple[Any, ...], fx.Node] = {}
    for i in may_share:
        content = outputs[i].target, str(outputs[i].args), str(outputs[i].kwargs)
        outputs[i] = first.setdefault(content, outputs[i])
    output.args = (tuple(outputs),)


def _part(graph_module: fx.GraphModule) -> Part:
    """Split a graph into a kernel and views; sizes come before tensors."""
    outputs = _outputs(graph_module)
    inputs = graph_module.graph.find_nodes(op="placeholder")
    numbers = tuple(node.meta["val"].node.expr for node in inputs if is_size(node))
    assert all(map(is_size, inputs[: len(numbers)])), "sizes come first"
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
    for node, copy in seen.items():
        copy.meta["val"] = node.meta["val"]
    sizes = SizeNodes(views_graph, list(seen.values()))

    def again(node: fx.Node) -> Any:
        return sizes.of(node.meta["val"]) if is_size(node) else seen[node]

    for chain in chains:
        for view in chain[1] if chain is not None else ():
            if view not in seen:
                args = fx.node.map_arg(view.args, again)
                seen[view] = views_graph.call_function(view.target, args, view.kwargs)  # type: ignore[arg-type]
    views_graph.output(tuple(None if node is None else seen[node] for node in outputs))
    kernel = Kernel.of(fx.GraphModule(graph_module, kernel_graph))
    return Part(kernel, fx.GraphModule(torch.nn.Module(), views_graph), numbers)
