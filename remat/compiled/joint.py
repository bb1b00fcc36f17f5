"""A joint graph as a table: the values that a forward makes, which of them backward reads, and when.

AOTAutograd traces forward and backward into one graph; a partitioner cuts it in two. All it decides is which values of
the forward are saved: the others that backward needs are made again, each once, right before their first use. The table
holds what that choice depends on, and nothing of torch.

Rule 1  A value is a storage. Views of one, and the outputs of an operator that makes several, follow what they are
        parts of.
Rule 2  Backward is cut into stages at the operators that call kernels of libraries (products, convolutions,
        attention). What fuses runs in the stage of the kernel before it.
Rule 3  A value is materialized where such a kernel makes or reads it, or where it is read in several stages; random
        numbers always are, by Inductor. Others stay in registers of a fused kernel: they take no memory and no traffic,
        unless a choice makes them again before the stage that reads them last, for what is made of them. One that is
        made of few storages is *inlined*: each of its readers makes it anew, and what it is made of stays until then.
Rule 4  Saving a value costs its read in backward, and its write where forward would not have written it. Making it
        again costs a kernel's time by the roofline, or its traffic where it fuses.
Rule 5  Random operators, effects, collectives and operators that are not torch's own run once. So does what reads an
        input that the forward writes. Numbers that follow from a seed may be drawn again: on CUDA uniform ones and
        integers only, since kernels there draw in two ways (`remat/_torch/compiled_draws.py`).
Rule 6  Backward decides as forward did. Where kernels fuse, a 16-bit value is rounded only as it is written. So random
        numbers are not saved in 16 bits: forward would compare them unrounded, and backward rounded. Integers made of
        floats, such as the experts of a token, run once.

Rule 7  Inductor may order kernels for the least peak. Then a call of backward that no other waits for, the gradient
        of a weight, runs as soon as it can where it makes no more than it reads of the forward: that is let go of then.
        Else calls run as they were traced: the gradient of an input, then that of the weight. The code shows which.

Rule 8  A sum of a library's result has a kernel of its own: `late_sums` lists those that Inductor would make in the
        kernel that reads them, so that the result would stay until then (gradients of a bias that all layers share, one
        a layer). Scattered values have a storage of their own. A value that a library reads through a view that repeats
        it is saved: made again, it would be stored as often.

Sizes that are open have the values that the first batch gave them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from remat._torch.compiled_draws import LOOKUP, calls, draws_alike, seed_of
from remat._torch.inductor import calls_library, policy_of
from remat._torch.symbols import hinted
from remat.capture.schemas import calls_view, written
from remat.costing.roofline import kernel_us
from remat.errors import UsageError
from remat.recording.tracker import Tracker
from remat.workload.target import Target

_UNSAFE_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
_OWN = ("aten", "prims")  # namespaces of operators that may run again
_DRAWS = ("inductor_seed", "inductor_seeds")  # the others of Inductor's random operators follow from a seed
_RANDOM = ("inductor_random", "inductor_randint")  # make numbers of it
_MOST_STAGES = 160
_READS, _READS_SHARED = 8, 4  # the most storages that an inlined value is made of; the latter with several readers


@dataclasses.dataclass(frozen=True)
class Value:
    """A result of one node of the forward that backward may need.

    name         of the node                         size_bytes  of its storage; 0 if the caller holds it
    save_us      traffic if it is saved              remake_us   time if backward makes it again
    fuses        whether it takes bytes, made again, only where it is made before the last stage that needs it
    held_us      its write in that case, beside `remake_us`
    inlines      whether it takes none, made again, and keeps what it is made of until it is read last instead
    inputs       values that it is made of, by position
    first, last  stages of backward that read it, None where only other values do
    can_save, can_remake   whether it may be
    """

    name: str
    size_bytes: int
    save_us: float
    remake_us: float
    fuses: bool
    held_us: float
    inputs: tuple[int, ...]
    first: int | None
    last: int | None
    can_save: bool
    can_remake: bool
    inlines: bool = False


@dataclasses.dataclass(frozen=True)
class Joint:
    """A joint graph as a table.

    values     in the order of the forward; each has inputs before it
    own_bytes  what backward itself has, gradients among it, in each stage
    uses       how often a step runs the graph: the first backward runs while all others' values are saved
    parts      of views: the value that they are views of
    calls      of backward's calls of libraries: their stages
    """

    values: tuple[Value, ...]
    own_bytes: tuple[int, ...]
    uses: int = 1
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def values_of(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return the values that nodes of these names are, or are views of; inputs are no values."""
        known = {value.name for value in self.values}
        return frozenset(self.parts.get(name, name) for name in nodes) & known


def joint_of(
    graph: fx.Graph,
    is_backward: Callable[[fx.Node], bool],
    target: Target,
    *,
    reorders: bool = True,
    held: Iterable[fx.Node] = (),
) -> Joint:
    """Make the table of a joint graph.

    is_backward  whether a node needs a gradient, so that it can run in backward only
    target       whose roofline prices what is made again
    reorders     whether gradients of weights run early (Rule 7)
    held         results of forward that the caller holds: to save them takes no bytes

    Raises UsageError for sparse tensors.
    """
    return _Builder(graph, is_backward, target, reorders, held).joint()


def late_sums(graph: fx.Graph) -> list[fx.Node]:
    """List the sums of a library's result that Inductor makes as late as what they are combined with. (Rule 8)"""
    results = set(graph.find_nodes(op="output")[0].all_input_nodes)

    def is_late(node: fx.Node) -> bool:
        size = _elements(node)
        is_within = results.isdisjoint(_views(node)) and all(
            _elements(reader) == size and not calls_library(reader) for reader in _readers(node)
        )
        is_of_library = all(_is_of_library(_base(given)) for given in node.all_input_nodes)
        return is_within and is_combined(node) and _reduces(node) and is_of_library

    def is_combined(node: fx.Node) -> bool:
        """Return whether something else is needed for what is made of a value, beside casts of it."""
        return any(len(set(map(_base, reader.all_input_nodes))) > 1 or is_combined(reader) for reader in _readers(node))

    return [node for node in graph.nodes if node.op == "call_function" and is_late(node)]


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device of a graph's inputs."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


class _Builder:
    """Nodes by what they are, while a table is made of them."""

    def __init__(
        self,
        graph: fx.Graph,
        is_backward: Callable[[fx.Node], bool],
        target: Target,
        reorders: bool,
        held: Iterable[fx.Node],
    ):
        self.target, self.draws_alike = target, draws_alike(device_of(graph))
        self.nodes = nodes = [node for node in graph.nodes if node.op != "output"]
        self.results = set(graph.find_nodes(op="output")[0].all_input_nodes)
        self.held = set(map(_base, held))
        backward = [node for node in nodes if is_backward(node)]
        self.backward = _weights_first(backward) if reorders else backward
        self.in_backward = set(self.backward)
        self.made = [
            node for node in nodes if node.op == "call_function" and node not in self.in_backward and _is_made(node)
        ]
        self.position = {node: i for i, node in enumerate(self.made)}
        self.written = {written for node in nodes for written in _written(node)}
        self.random = _random(nodes)
        self.stage = self._stages()
        self.inlined = self._inlined()
        self.read_by = self._read_by()

    def joint(self) -> Joint:
        parts = {node.name: _base(node).name for node in self.nodes if _is_view(node)}
        calls = {node.name: stage for node, stage in self.stage.items() if calls_library(node)}
        return Joint(tuple(map(self._value, self.made)), tuple(self._own_bytes()), 1, parts, calls)

    def _stages(self) -> dict[fx.Node, int]:
        """Return the stage of every node of backward. (Rule 2)"""
        calls = sum(map(calls_library, self.backward))
        step, seen = max(-(-calls // _MOST_STAGES), 1), 0
        found = {}
        for node in self.backward:
            seen += calls_library(node)
            found[node] = seen // step
        return found

    def _inlined(self) -> set[fx.Node]:
        """Return the nodes that each of their readers makes again, as Inductor has it. (Rule 3)"""
        sources: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            if node.op == "call_function" and not _is_view(node) and not self._is_stored(node):
                read = _made_of(node, sources)
                if len(read) <= (_READS_SHARED if len(_readers(node)) > 1 else _READS):
                    sources[node] = read
        return set(sources)

    def _is_stored(self, node: fx.Node) -> bool:
        """Return whether a node's value has a storage, whatever reads it."""
        is_result = not self.results.isdisjoint(_views(node))
        is_library = _is_of_library(node) or any(map(calls_library, _readers(node)))
        return is_result or is_library or _is_drawn(node) or _reduces(node) or _scatters(node)

    def _read_by(self) -> dict[fx.Node, set[fx.Node]]:
        """Return the nodes of backward that read what a node makes.

        A result of backward that is inlined is not there: its readers read what it is made of.
        """
        sources: dict[fx.Node, set[fx.Node]] = {}
        found = defaultdict[fx.Node, set[fx.Node]](set)
        for node in self.backward:
            if node.op != "call_function" or _is_view(node):
                continue
            read = _made_of(node, sources)
            if node in self.inlined:
                sources[node] = read
                continue
            for base in read:
                found[base].add(node)
        return found

    def _value(self, node: fx.Node) -> Value:
        readers = _readers(node)
        stages = [self.stage[reader] for reader in self.read_by.get(node, ())]
        is_result = not self.results.isdisjoint(_views(node))
        if is_result and stages:
            stages.append(max(self.stage.values()))
        # The members of several outputs are saved, and the seeds that one seed is of.
        size, is_of_saved = _bytes(node), calls(node, LOOKUP) or not isinstance(node.meta["val"], Tensor)
        in_forward = [reader for reader in readers if reader not in self.in_backward]
        is_written = _is_of_library(node) or is_result or any(map(calls_library, in_forward))
        is_read_by_library = any(map(calls_library, readers))
        is_inlined = node in self.inlined
        is_materialized = _is_of_library(node) or is_read_by_library or _is_drawn(node) or len(set(stages)) > 1
        is_materialized = (is_materialized or _scatters(node)) and not is_inlined
        inputs = {self.position[base] for base in map(_base, node.all_input_nodes) if base in self.position}
        policy = policy_of(node)
        can_remake = policy == "recompute" or (
            policy != "save" and self._may_run_again(node) and not self._is_widened(node)
        )
        return Value(
            name=node.name,
            size_bytes=0 if node in self.held else size,
            save_us=self._traffic_us(size * (1 if is_written else 2)),
            remake_us=self._remake_us(node, is_materialized) if can_remake else 0.0,
            fuses=not is_materialized and not is_inlined,
            held_us=0.0 if is_materialized else self._traffic_us(size),
            inputs=tuple(sorted(inputs)),
            first=min(stages, default=None),
            last=max(stages, default=None),
            can_save=not is_of_saved and policy != "recompute" and (policy == "save" or not self._is_rounded(node)),
            can_remake=can_remake,
            inlines=is_inlined,
        )

    def _traffic_us(self, size_bytes: int) -> float:
        return size_bytes / (self.target.bytes_per_us * self.target.efficiency)

    def _remake_us(self, node: fx.Node, is_materialized: bool) -> float:
        """Return the time to make a value again. (Rule 4)"""
        if node.target is operator.getitem:
            return 0.0
        if calls_library(node):
            return _kernel_us(node, self.target)
        read = sum(map(_bytes, set(map(_base, node.all_input_nodes))))
        return self._traffic_us(read + _bytes(node)) if is_materialized else self._traffic_us(read) / 16

    def _is_rounded(self, node: fx.Node) -> bool:
        """Return whether a value is random numbers in 16 bits. (Rule 6)"""
        value = node.meta["val"]
        return node in self.random and value.is_floating_point() and value.itemsize < 4

    def _is_widened(self, node: fx.Node) -> bool:
        """Return whether a library reads a view that repeats a value that may be saved. (Rules 6 and 8)"""
        size = _elements(node)
        widened = any(_elements(view) > size and any(map(calls_library, view.users)) for view in _views(node))
        return widened and not self._is_rounded(node)

    def _may_run_again(self, node: fx.Node) -> bool:
        """Return whether backward may make a value again. (Rules 5 and 6)"""
        result = node
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]
        target = node.target
        return (
            isinstance(target, torch._ops.OpOverload)
            and target.namespace in _OWN
            and torch.Tag.nondeterministic_seeded not in target.tags
            and _named(target) not in _DRAWS
            and (self.draws_alike or _named(target) != _RANDOM[0] or seed_of(node) is not None)
            and not target._schema.is_mutable
            and not self.written & set(map(_base, node.all_input_nodes))
            and not _decides(result, node)
        )

    def _own_bytes(self) -> list[int]:
        """Return the most bytes that backward makes and has in each stage. (Rules 2 and 3)"""
        at = {node: i for i, node in enumerate(self.backward)}
        change = [0] * (len(at) + 1)
        for node in self.backward:
            is_result = not self.results.isdisjoint(_views(node))
            if node.op == "placeholder" or not _is_made(node) or not (is_result or node in self.read_by):
                continue
            readers = self.read_by[node]
            is_library = _is_of_library(node) or any(map(calls_library, readers))
            if is_result or is_library or any(self.stage[reader] > self.stage[node] for reader in readers):
                change[at[node]] += _bytes(node)
                change[len(at) if is_result else max(at[reader] for reader in readers) + 1] -= _bytes(node)
        most = [0] * (max(self.stage.values(), default=0) + 1)
        for node, total in zip(self.backward, itertools.accumulate(change), strict=False):
            most[self.stage[node]] = max(most[self.stage[node]], total)
        return most


def _weights_first(backward: Sequence[fx.Node]) -> list[fx.Node]:
    """Run gradients of weights early. (Rule 7)"""
    waited, calls, at, after = set[fx.Node](), 0, dict[fx.Node, int](), dict[fx.Node, int]()
    for node in reversed(backward):
        if any(user in waited or calls_library(user) for user in node.users):
            waited.add(node)
    for node in backward:
        calls += calls_library(node) and node in waited
        at[node] = calls
        ahead = [at[i] if calls_library(i) else after[i] for i in node.all_input_nodes if i in after]
        after[node] = max(ahead, default=0)
    for node in reversed(backward):
        read = {base for base in map(_base, node.all_input_nodes) if base not in at}
        if calls_library(node) and node not in waited and _bytes(node) <= sum(map(_bytes, read)):
            at[node] = after[node]
        for i in node.all_input_nodes:
            if i in at:
                at[i] = min(at[i], at[node])
    return sorted(backward, key=at.__getitem__)


def _base(node: fx.Node) -> fx.Node:
    """Return the node that a node is a view of, itself if of none. (Rule 1)"""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _made_of(node: fx.Node, sources: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return the nodes that a node reads, and in place of those in `sources` what these are made of."""
    return {source for base in map(_base, node.all_input_nodes) for source in sources.get(base, {base})}


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return calls_view(node) or node.target in _UNSAFE_VIEWS


def _is_of_library(node: fx.Node) -> bool:
    """Return whether a library's kernel makes a node's value."""
    return calls_library(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _reduces(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def _scatters(node: fx.Node) -> bool:
    """Return whether a kernel writes a node's value where an index says. (Rule 8)"""
    name = _named(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.startswith("scatter") or "index_put" in name


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hinted(value.numel()) if isinstance(value, Tensor) else -1


def _is_made(node: fx.Node) -> bool:
    """Return whether a node makes storages."""
    return not _is_view(node) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node that makes a value, and the nodes that are views of it."""
    yield node
    for user in node.users:
        if _is_view(user):
            yield from _views(user)


def _readers(node: fx.Node) -> list[fx.Node]:
    """List the nodes that read a value, through views too."""
    return [user for view in _views(node) for user in view.users if not _is_view(user)]


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that an operator writes to."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        of = {id(given.meta["val"]): given for given in node.all_input_nodes}
        args = tree_map(lambda given: given.meta["val"] if isinstance(given, fx.Node) else given, node.args)
        yield from (_base(of[id(tensor)]) for tensor in written(node.target, args, node.kwargs))


def _random(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are made of random numbers alone."""
    found = set[fx.Node]()
    for node in nodes:
        if _is_drawn(node) or (node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is_drawn(node: fx.Node) -> bool:
    """Return whether a node makes random numbers of a seed."""
    return isinstance(node.target, torch._ops.OpOverload) and _named(node.target) in _RANDOM


def _named(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def _decides(result: fx.Node, node: fx.Node) -> bool:
    """Return whether a result of an operator is integers made of floats. (Rule 6)"""
    value, given = result.meta.get("val"), [each.meta.get("val") for each in node.all_input_nodes]
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return is_integer and any(isinstance(each, Tensor) and each.is_floating_point() for each in given)


def _bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value; 0 for several outputs, which have nodes of their own."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    if value.layout != torch.strided:
        raise UsageError(
            f"a compiled budget is for dense tensors, and {node.name} of the graph is {value.layout}. Gradients of "
            "nn.Embedding are dense with sparse=False."
        )
    return hinted(value.untyped_storage().nbytes())


def _kernel_us(node: fx.Node, target: Target) -> float:
    """Estimate the time of a library's kernel."""
    value = next(leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor))
    given = tree_map(lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (node.args, dict(node.kwargs)))
    mode = value.fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad(), Tracker() as tracker:
        args, kwargs = tree_map(_closed, given)
        node.target(*args, **kwargs)  # type: ignore[operator]
    return sum(kernel_us(kind, target) for kind in tracker.kinds.values() if not kind.name.startswith("aten.empty"))


@functools.singledispatch
def _closed(value: Any) -> Any:
    """Close the open sizes of an argument."""
    return hinted(value)


@_closed.register
def _(value: Tensor) -> Tensor:
    shape, stride = [hinted(n) for n in value.shape], [hinted(n) for n in value.stride()]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
