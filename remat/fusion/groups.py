"""Groups: nodes of a captured graph whose time is traffic, and which one compiler can run together.

Rule 1  A member acts on numbers by themselves, reduces them, or changes their dtype or their layout: what Inductor has
        code of its own for (`POINTWISE`, `REDUCING`). Products, attention, convolutions, look-ups and random nodes stay
        outside, and so does what has no rule.
Rule 2  A view is a member if what it looks at is made by one. If a node outside reads it, it is looked at again
        there: what a group gives out are storages of its own. A view of what a group is given is a member where only
        members read it: then one gradient comes back, and no slices of it to be padded and added up.
Rule 3  A group is connected, and no node outside reads it before its last member has run. So it can run where its last
        member stands, and the order of all other nodes is what it was.
Rule 4  No context (autocast, no_grad) opens or closes between its members, and no node may write to their inputs or
        make (`writing.py`).
Rule 5  Members have gradients. What is made without, masks and tables, is small or shared: it stays outside.
Rule 6  A group has at least two members that make something, or one that is several kernels by itself (`COMPOSITE`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from remat.capture.nodes import bracket_of, called, captured_nodes
from remat.capture.writing import storages, written_storages
from remat.evaluation.identity import canonical


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names("""
    add sub rsub mul div neg abs pow square exp exp2 expm1 log log1p sqrt rsqrt reciprocal tanh sigmoid erf sin cos
    relu relu6 gelu silu mish softplus elu selu leaky_relu hardtanh hardswish hardsigmoid logsigmoid softsign tanhshrink
    clamp minimum maximum where masked_fill lerp addcmul addcdiv to double autocast cat stack clone contiguous
""")
REDUCING = _names("""
    sum mean var amax amin softmax log_softmax logsumexp layer_norm rms_norm group_norm normalize cross_entropy nll_loss
    mse_loss l1_loss smooth_l1_loss binary_cross_entropy_with_logits
""")
VIEWS = _names("""
    view reshape flatten unflatten transpose permute unsqueeze squeeze expand getitem chunk split t view_as reshape_as
    expand_as movedim swapaxes narrow select
""")
GROUPABLE = POINTWISE | REDUCING | VIEWS
MAY_VIEW = VIEWS | {"to", "double", "autocast", "contiguous"}  # their result may be their input
COMPOSITE = frozenset({"cross_entropy", "normalize", "rms_norm"})
MOST_MEMBERS = 100


@dataclasses.dataclass(eq=False)
class Group:
    """Nodes that run together, in the graph's order; `makers` are those that are no views."""

    members: list[fx.Node]
    makers: list[fx.Node]

    @property
    def text(self) -> str:
        """A text of the group's operators. Groups with another text keep other bytes."""
        return f"fused({','.join(canonical(called(node)) for node in self.makers)})"

    @property
    def inputs(self) -> list[fx.Node]:
        inside = set(self.members)
        return list(dict.fromkeys(n for member in self.members for n in member.all_input_nodes if n not in inside))

    def is_read(self, node: fx.Node) -> bool:
        """Return whether a node outside reads a member."""
        return not set(node.users).issubset(self.members)

    def is_worth(self) -> bool:
        """Return whether the group is worth a kernel, by Rule 6."""
        return len(self.makers) > 1 or any(canonical(called(node)) in COMPOSITE for node in self.makers)


def find_groups(graph_module: fx.GraphModule) -> list[Group]:
    """Find the groups of a captured graph, by the position of their last members."""
    return _Finder(captured_nodes(graph_module)).groups()


class _Finder:
    """Finds groups; `_open` are those that may still grow."""

    def __init__(self, nodes: list[fx.Node]):
        self._nodes = nodes
        self._order = {node: i for i, node in enumerate(nodes)}
        self._written = written_storages(nodes, GROUPABLE)
        self._group_of: dict[fx.Node, Group] = {}
        self._open: set[Group] = set()

    def groups(self) -> list[Group]:
        for node in self._nodes:
            read = {self._group_of[n] for n in node.all_input_nodes if n in self._group_of}
            if bracket_of(node):  # Rule 4
                self._open.clear()
            elif self._is_view(node, read):
                self._add(node, *read)
            elif self._is_maker(node):
                self._add(node, self._joined(read & self._open)).makers.append(node)
                self._open -= read - {self._group_of[node]}
            else:  # Rule 3
                self._open -= read
        found = list(filter(Group.is_worth, dict.fromkeys(self._group_of.values())))
        for group in found:
            self._take_views_of_inputs(group)
        return sorted(found, key=lambda group: self._order[group.members[-1]])

    def _take_views_of_inputs(self, group: Group) -> None:
        """Add views of inputs by Rule 2. A part of several tensors joins only with all of its parts."""
        waiting, made = group.inputs, len(group.members)
        while waiting:
            node = waiting.pop()
            if node not in group.members and self._only_looks(node) and not group.is_read(node):
                group.members.append(node)
                waiting += node.all_input_nodes
        taken = set(group.members)
        parts = {n for n in group.members[made:] if any(_is_several(g) and g not in taken for g in n.all_input_nodes)}
        group.members = sorted(taken - parts, key=self._order.__getitem__)

    def _add(self, node: fx.Node, group: Group) -> Group:
        group.members.append(node)
        self._group_of[node] = group
        return group

    def _joined(self, groups: set[Group]) -> Group:
        """Join several groups, or begin a new one if they have too many nodes already; those are closed."""
        members = [member for group in groups for member in group.members]
        makers = [maker for group in groups for maker in group.makers]
        if len(members) >= MOST_MEMBERS:
            members, makers = [], []
        joined = Group(sorted(members, key=self._order.__getitem__), sorted(makers, key=self._order.__getitem__))
        self._group_of.update(dict.fromkeys(members, joined))
        self._open = self._open - groups | {joined}
        return joined

    def _is_view(self, node: fx.Node, read: set[Group]) -> bool:
        """Return whether a node is a view that its group takes, by Rule 2."""
        if canonical(called(node)) not in MAY_VIEW or len(read) != 1 or not read <= self._open or not _is_sound(node):
            return False
        (group,) = read
        return storages(node) <= storages(group.makers)

    def _only_looks(self, node: fx.Node) -> bool:
        """Return whether a node, of no group yet, is a view with a gradient of a value without writes."""
        leaves = tree_leaves(_value(node))
        if canonical(called(node)) not in VIEWS or node in self._group_of or not _is_sound(node):
            return False
        if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            return False
        made = storages(node)
        return made <= storages(node.all_input_nodes) and made.isdisjoint(self._written)

    def _is_maker(self, node: fx.Node) -> bool:
        """Return whether a node makes a value in a group, by Rules 1 and 5."""
        name, value = canonical(called(node)), _value(node)
        if name not in GROUPABLE or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return False
        given, made = storages(node.all_input_nodes), storages(node)
        if not made.isdisjoint(given) or not (made | given).isdisjoint(self._written):
            return False
        return value.is_floating_point() and _is_sound(node)


def _is_sound(node: fx.Node) -> bool:
    """Return whether all inputs and outputs of a node are plain tensors and constants."""
    values = [leaf for n in (node, *node.all_input_nodes) for leaf in tree_leaves(_value(n))]
    tensors = [leaf for leaf in values if isinstance(leaf, torch.Tensor)]
    plain = all(t.layout is torch.strided and not t.is_complex() for t in tensors)
    sizes = all(isinstance(leaf, (torch.Tensor, int, torch.SymInt, torch.Size)) for leaf in values)
    constants = tree_leaves((node.args, node.kwargs))
    if canonical(called(node)) == "getitem":  # a look-up has no rule
        sizes = sizes and not any(isinstance(i, (fx.Node, list)) for i in _indices(node))
    return plain and sizes and not any(callable(leaf) for leaf in constants)


def _is_several(node: fx.Node) -> bool:
    """Return whether the value of a node is several tensors."""
    value = _value(node)
    return not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def _indices(node: fx.Node) -> tuple[Any, ...]:
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")
