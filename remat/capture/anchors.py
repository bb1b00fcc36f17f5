"""Anchors: identities of the nodes of a captured fx graph, and the positions where regions may begin and end.

The same reading is done of the graph on fake tensors when a step is recorded, and of the graph at hand when a plan is
applied; Dynamo's `example_value` says of every node what it gives: a tensor of its own, a view, a size. It is read
before a target's kernels are put in place, and without asking an open size for its number, which would close it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from remat._torch.recording import unwrapped
from remat.capture.nodes import around_regions, asked, bracket_of, called, captured_nodes, may_draw
from remat.evaluation.identity import Identity, NodeId, canonical, key_of
from remat.evaluation.writes import written_for_long

# Whether these copy depends on the strides, the dtype or the size of their input.
_MAY_VIEW = frozenset({"contiguous", "flatten", "reshape", "reshape_as", "to", "unflatten", "view_as"})

_OWNER = re.compile(r"^L\['\w+'\](?:.*__self__)?\.?")  # Dynamo's name of the model, or of its forward's wrapper
_CACHED = re.compile(  # ... a module with a cached parametrization, after a first read: what its class's property holds
    r"dict\(type\((.+?)\)\.__dict__\)\['\w+'\]\.fget(?:\.__closure__\[\d+\]\.cell_contents){2}"
)
_CHILD = re.compile(r"\.__dict__\['_modules'\]\['([^']+)'\]")  # ... a child of a class with a __getattr__ of its own


def identity_of(graph_module: fx.GraphModule) -> Identity:
    """Return the identity of each captured node of `graph_module`; stored with the nodes."""
    nodes = captured_nodes(graph_module)
    if nodes and "identity" not in nodes[-1].meta:
        _identify(graph_module, nodes)
    return tuple(node.meta["identity"] for node in nodes)


def identity_at(graph_module: fx.GraphModule, sizes: Mapping[Any, int]) -> Identity:
    """Return the identity of `graph_module` with the bytes that its nodes make at open `sizes`, by symbol."""
    identity = identity_of(graph_module)
    if not sizes:
        return identity
    state, known = _Storages(graph_module), dict[Any, int]()
    at = functools.partial(_size_at, sizes=sizes, known=known)
    nodes = captured_nodes(graph_module)
    return tuple(
        dataclasses.replace(one, made_bytes=state.made_bytes(node, at)) if one.made_bytes else one
        for one, node in zip(identity, nodes, strict=True)
    )


def _size_at(size: Any, sizes: Mapping[Any, int], known: dict[Any, int]) -> int:
    """Return an open `size` for given values of its symbols; `known` keeps results."""
    expression = size.node.expr
    if expression not in known:
        value = expression.subs(sizes)
        known[expression] = int(value) if value.is_number else _hint(size)
    return known[expression]


def _hint(size: Any) -> int:
    return size.node.hint or 1


@dataclasses.dataclass(frozen=True)
class Signature:
    """Identifies a graph call at one batch size.

    key  see `identity.key_of`        shapes  of its inputs and of its nodes' values
    """

    key: str
    shapes: tuple[Any, ...]


def signature_of(graph_module: fx.GraphModule) -> Signature:
    values = (_tensors(node) for node in graph_module.graph.nodes)
    shapes = tuple(tuple(tensor.shape) for tensors in values for tensor in tensors)
    return Signature(graph_key(graph_module), shapes)


def graph_key(graph_module: fx.GraphModule) -> str:
    """Return a name for a graph, without storing its identity: the graph may still change its form.

    It is `identity.key_of`, and tells graphs apart that write other numbers into the state of the model.
    """
    nodes = captured_nodes(graph_module)
    identity = tuple(_identities(graph_module, nodes))
    written = writes_into_state(graph_module, [i for i, node in enumerate(identity) if not node.anchor])
    return key_of(identity, written)


def _identify(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    for node, identity in zip(nodes, _identities(graph_module, nodes), strict=True):
        node.meta["identity"] = identity


def _identities(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> Iterator[NodeId]:
    ordinal = {node: i for i, node in enumerate(nodes)}
    owned = {node for node in graph_module.graph.find_nodes(op="placeholder") if _learns(_value(node))}
    for node in nodes:
        if not owned.isdisjoint(node.all_input_nodes):
            owned.add(node)  # computed out of parameters
    state = _Storages(graph_module)
    for node in nodes:
        takes = tuple(sorted(ordinal[i] for i in node.all_input_nodes if i in ordinal))
        tensors = sum(_dimensions(_value(i)) > 0 for i in node.all_input_nodes)
        op, draws, made_bytes = canonical(called(node)), may_draw(node), state.made_bytes(node)
        if op == "rsub" and len(node.all_input_nodes) == 1:
            op = "sub"  # `1 - x`, as Dynamo spells it under a torch function mode
        anchor = draws or _counts(node, op, node in owned, made_bytes, state)
        yield NodeId(op, module_path(node), takes, anchor, tensors, draws, made_bytes)


def _counts(node: fx.Node, op: str, owned: bool, made_bytes: int, state: _Storages) -> bool:
    """Return whether `node` costs or keeps something, whatever the batch."""
    if _says_it_writes(node):
        return (owned or state.is_older(node)) and _dimensions(_value(_written(node))) > 0
    if not owned or op in _MAY_VIEW:
        return False
    if "dropout" in op:  # off, it is a view
        return True
    values = [_value(i) for i in node.all_input_nodes]
    if all(_dimensions(value) <= 0 for value in (*values, *tree_leaves(_value(node)))):
        return False
    return made_bytes > 0


# Properties of nodes


def module_path(node: fx.Node) -> str:
    """Return the path of the module that `node` runs in, as in `named_modules`; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((_module_path(str(path)) for path, *_ in reversed(stack.values())), "")


def module_paths(node: fx.Node) -> list[str]:
    """List the paths of the modules whose calls `node` runs in, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [_module_path(str(path)) for path, *_ in stack.values()]


def put_under(path: str, graph_module: fx.GraphModule) -> None:
    """Prefix the modules of a graph with `path`, the place of the traced module in the model."""
    for node in graph_module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        named = {
            key: (f"{path}.{_module_path(str(inner))}".rstrip("."), *rest) for key, (inner, *rest) in stack.items()
        }
        node.meta["nn_module_stack"] = {path: (path, nn.Module), **named}


@functools.lru_cache(maxsize=1 << 16)  # every node asks for those of all modules around it
def _module_path(path: str) -> str:
    """Return a path as `named_modules` gives it, from Dynamo's name of the module."""
    return _OWNER.sub("", _CHILD.sub(r".\1", _CACHED.sub(r"\1", path)))


def is_operator_of_statistics(node: fx.Node) -> bool:
    """Return whether `node` calls `torch.batch_norm` itself, whose schema does not say that it writes statistics.

    It takes nine arguments, all of them required, and the function of the same name at most eight.
    """
    return called(node) == "batch_norm" and len(node.args) + len(node.kwargs) == 9


def updates_statistics(node: fx.Node) -> bool:
    """Return whether `node` is a batch normalisation of `torch.nn.functional` that updates running statistics."""
    if called(node) != "batch_norm" or is_operator_of_statistics(node):
        return False
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("running_mean") is not None and bool(given.get("training"))


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(_value(node)) if isinstance(leaf, torch.Tensor)]


def _dimensions(value: Any) -> int:
    """Return the number of dimensions of a tensor, the maximum of several tensors, -1 for none."""
    return max((leaf.dim() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)), default=-1)


def _learns(value: Any) -> bool:
    """Return whether `value` is a parameter, frozen or not, or replaces one in a functional call."""
    return isinstance(value, nn.Parameter) or getattr(value, "requires_grad", False)


def _bytes(tensor: torch.Tensor, at: Callable[[Any], int] = _hint) -> int:
    """Return the bytes of a tensor whose open sizes are as `at` says; by default as they were traced."""
    count = 1
    for size in tensor.shape:
        count *= size if isinstance(size, int) else at(size)
    return count * tensor.element_size()


def writes(node: fx.Node) -> bool:
    """Return whether `node` changes one of its inputs, by its name or its `inplace`."""
    return _says_it_writes(node) or bool(asked(node, "inplace"))


def _says_it_writes(node: fx.Node) -> bool:
    """Return whether `node` says so by its name or a keyword, as identities in plan files have it."""
    op = canonical(called(node))
    return op == "setitem" or (op.endswith("_") and not op.startswith("_")) or node.kwargs.get("inplace") is True


def _written(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.all_input_nodes), None)


class _Storages:
    """The first node that has each storage of a graph."""

    def __init__(self, graph_module: fx.GraphModule):
        self._maker: dict[int, fx.Node] = {}
        for node in graph_module.graph.nodes:
            for tensor in _tensors(node):
                self._maker.setdefault(storage_key(tensor), node)

    def made_bytes(self, node: fx.Node, at: Callable[[Any], int] = _hint) -> int:
        """Return the bytes of the storages that `node` makes, as far as its values reach into them."""
        own = {storage_key(t): _bytes(t, at) for t in _tensors(node) if self._maker[storage_key(t)] is node}
        return sum(own.values())

    def makers_of_written(self, node: fx.Node) -> list[fx.Node]:
        target = _written(node)
        return [self._maker[storage_key(t)] for t in _tensors(target)] if isinstance(target, fx.Node) else []

    def is_older(self, node: fx.Node) -> bool:
        """Return whether `node` writes to an input of the graph: state of a module, or a caller's tensor."""
        return any(maker.op in ("placeholder", "get_attr") for maker in self.makers_of_written(node))


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that two values of a captured graph share if they share a storage."""
    return int(unwrapped(tensor).untyped_storage()._cdata)


# Where regions may begin and end, and properties of their nodes


@dataclasses.dataclass(frozen=True)
class Reading:
    """The properties of a graph that regions depend on, in ordinals of its captured nodes.

    cuts    positions where a region may begin or end; None: any, it is the graph that the plan was made for
    random  nodes that may draw random numbers
    once    nodes that update the state of a module
    apart   nodes that touch a storage that is written for long: a region holds all of them, or none
    """

    cuts: frozenset[int] | None
    random: frozenset[int]
    once: frozenset[int]
    apart: Sequence[frozenset[int]] = ()


def read(graph_module: fx.GraphModule) -> Reading:
    nodes = captured_nodes(graph_module)
    identity = identity_of(graph_module)
    apart = _written_for_long(graph_module, nodes)
    illegal = set(_illegal(graph_module, nodes, frozenset[int]().union(*apart)))
    return Reading(
        frozenset(p for p in range(len(nodes) + 1) if p not in illegal),
        frozenset(i for i, node in enumerate(identity) if node.draws),
        frozenset(_once(graph_module, nodes)),
        apart,
    )


def changed(graph_module: fx.GraphModule) -> frozenset[int]:
    """Return the ordinals of captured nodes whose values a later node writes to."""
    nodes, state = captured_nodes(graph_module), _Storages(graph_module)
    ordinal = {node: i for i, node in enumerate(nodes)}
    makers = (maker for node in nodes if writes(node) for maker in state.makers_of_written(node) if maker is not node)
    return frozenset(ordinal[maker] for maker in makers if maker in ordinal)


def writes_into_state(graph_module: fx.GraphModule, among: Collection[int]) -> dict[int, frozenset[int]]:
    """Return, of each node of `among` that writes into state, the nodes that touch what it writes, by ordinal.

    State is what is older than the graph. Counters that nothing else touches are left out: they may be in regions.
    """
    nodes = captured_nodes(graph_module)
    if not any(writes(nodes[i]) for i in among):
        return {}
    state, found = _Storages(graph_module), dict[int, frozenset[int]]()
    for i in among:
        if not (writes(nodes[i]) and state.is_older(nodes[i])):
            continue
        keys = {storage_key(tensor) for tensor in _tensors(_written(nodes[i]))}
        touching = [j for j, node in enumerate(nodes) if not keys.isdisjoint(_touched(node))]
        if _floats(_written(nodes[i])) or not all(writes(nodes[j]) for j in touching):
            found[i] = frozenset(touching)
    return found


def _touched(node: fx.Node) -> set[int]:
    """Return the keys of the storages that `node` is given or gives."""
    return {storage_key(tensor) for each in (node, *node.all_input_nodes) for tensor in _tensors(each)}


def _once(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> Iterator[int]:
    state = _Storages(graph_module)
    for i, node in enumerate(nodes):
        counter = writes(node) and state.is_older(node) and not _floats(_written(node))
        if counter or updates_statistics(node):
            yield i


def _floats(node: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in _tensors(node))


def _written_for_long(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> list[frozenset[int]]:
    """List the nodes that touch each storage that is written through much of the graph."""
    own, state = frozenset(nodes), _Storages(graph_module)
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for maker in state.makers_of_written(node) if writes(node) else ():
            last |= {storage_key(tensor): i for tensor in _tensors(maker) if maker in own}
    return written_for_long([_touched(node) for node in nodes], last)


def _illegal(graph_module: fx.GraphModule, nodes: list[fx.Node], apart: Collection[int]) -> Iterator[int]:
    """Yield positions inside an open context, crossed by other values than tensors, or by tensors changed later.

    But for those of nodes that are `apart`.
    """
    ordinal = {node: i for i, node in enumerate(nodes)}
    state, depth, around = _Storages(graph_module), 0, around_regions(nodes)
    for i, node in enumerate(nodes):
        if node in around:
            continue
        depth += bracket_of(node)
        if depth > 0:
            yield i + 1
        last = max((ordinal[user] for user in node.users if user in ordinal), default=i)
        if not isinstance(_value(node), torch.Tensor):
            yield from range(i + 1, last + 1)
        if writes(node):
            for maker in state.makers_of_written(node):
                if maker in ordinal and ordinal[maker] not in apart:
                    yield from range(ordinal[maker] + 1, i + 1)
