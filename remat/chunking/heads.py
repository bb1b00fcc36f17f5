"""Heads: where a captured graph makes logits, and of them a loss, each row by itself.

A row is one token, or one sample: the logits of one position. Rules for what a head is, by analysis of the graph:

Rule 1  Its loss is a `cross_entropy` of labels that are class indices, reduced to a mean or a sum, without weights of
        classes and without label smoothing.
Rule 2  Its logits are made by one `linear`. What lies between acts on every number by itself (`POINTWISE`, its other
        arguments Python numbers), changes the dtype, flattens all dimensions but the last, or selects rows.
Rule 3  Nothing else in the graph reads what lies between. The graph may give it out: in slices it never exists at once,
        so a caller gets a `Withheld` in its place.
Rule 4  Multiplications and divisions of the loss by numbers that need no gradient belong to the head, so that each
        slice's gradients begin from what the untouched step's begin from. What comes after may add to the loss, and
        nothing else.
Rule 5  All of it runs in one context: no autocast or no_grad opens or closes between the linear and the loss. Nothing
        is written in place meanwhile, and rows are selected before they are flattened: the chunked node stands where
        the loss stood, and takes what the linear took.

What has no rule is not chunked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from remat.capture.anchors import writes
from remat.capture.nodes import bracket_of, called, captured_nodes

POINTWISE = frozenset({"mul", "truediv", "div", "tanh", "clamp", "neg"})
CASTS = frozenset({"float", "to", "bfloat16", "double"})
FLATTENINGS = frozenset({"view", "reshape", "flatten"})
COPIES = frozenset({"contiguous", "clone"})
SCALINGS = frozenset({"mul", "truediv", "div"})
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_IGNORED = -100  # by default


@dataclasses.dataclass(frozen=True)
class Head:
    """The nodes of one head, in the graph's order.

    linear    makes the logits                        between   what lies between them and the loss
    loss      the cross-entropy                       scalings  of the loss, by numbers
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node
    scalings: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.scalings[-1] if self.scalings else self.loss

    @property
    def takes_contiguous_rows(self) -> bool:
        """Otherwise the untouched linear takes another kernel than its rows do. Of open sizes it must not be asked."""
        given, *_ = linear_arguments(self.linear)
        return bool(given.meta["example_value"].is_contiguous())

    @property
    def text(self) -> str:
        """What happens to a logit, by which chunked losses are told apart: others take other bytes."""
        steps = [node for node in self.steps if kind_of(node) not in COPIES]
        return ",".join(["chunked_loss", *(f"{kind_of(node)}{list(map(str, node.args[1:])) or ''}" for node in steps)])

    @property
    def steps(self) -> list[fx.Node]:
        """What happens to every logit before the loss."""
        return [node for node in self.between if kind_of(node) not in (*FLATTENINGS, "getitem")]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, classes, width); of open sizes what they were traced with."""
        *rows, classes = map(size_hint, self.linear.meta["example_value"].shape)
        given, *_ = linear_arguments(self.linear)
        return math.prod(rows), classes, size_hint(given.meta["example_value"].shape[-1])

    @property
    def logits_bytes(self) -> int:
        """What the logits take as the linear makes them."""
        rows, classes, _ = self.shape
        return rows * classes * int(self.linear.meta["example_value"].element_size())


def size_hint(size: Any) -> int:
    """A size as a number; of an open one what it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def find_heads(graph_module: fx.GraphModule) -> list[Head]:
    """The heads of a captured graph, in order."""
    return [head for node in captured_nodes(graph_module) if (head := _head_of(node)) is not None]


def loss_arguments(loss: fx.Node) -> dict[str, Any]:
    """The arguments of a `cross_entropy`, by name, with their defaults."""
    given = {**dict(zip(_CROSS_ENTROPY, loss.args, strict=False)), **loss.kwargs}
    return {"weight": None, "ignore_index": _IGNORED, "reduction": "mean", "label_smoothing": 0.0, **given}


def linear_arguments(linear: fx.Node) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a `linear`."""
    given = {**dict(zip(("input", "weight", "bias"), linear.args, strict=False)), **linear.kwargs}
    return given["input"], given["weight"], given.get("bias")


def _head_of(loss: fx.Node) -> Head | None:
    if called(loss) != "cross_entropy" or not _has_rule(loss):
        return None
    between: list[fx.Node] = []
    node: Any = loss_arguments(loss)["input"]
    user = loss
    while isinstance(node, fx.Node) and called(node) != "linear":
        if not _acts_by_row(node) or not _is_read_by(node, user):
            return None
        between.insert(0, node)
        node, user = node.args[0] if node.args else None, node
    if not isinstance(node, fx.Node) or not _is_read_by(node, user) or not _makes_logits(node):
        return None
    head = Head(node, tuple(between), loss, tuple(_scalings_after(loss)))
    return head if _is_only_added_to(head.result) and _is_undisturbed(head) else None


def _is_only_added_to(result: fx.Node) -> bool:
    """Rule 4: whether the gradient of a loss is that of what the graph gives out."""
    sums = (user for user in result.users if user.op != "output")
    return all(called(node) in ("add", "iadd") and not node.kwargs and _is_only_added_to(node) for node in sums)


def _is_undisturbed(head: Head) -> bool:
    """Rule 5."""
    kinds = [kind_of(node) for node in head.between]
    flat = next((i for i, kind in enumerate(kinds) if kind in FLATTENINGS), len(kinds))
    if "getitem" in kinds[flat:]:
        return False
    node = head.linear
    while node is not head.result:
        node = node.next
        if bracket_of(node) or (node.op not in ("placeholder", "get_attr", "output") and writes(node)):
            return False
    return all(value is not None and value.requires_grad for value in map(_tensor, (head.linear, head.loss)))


def kind_of(node: fx.Node) -> str:
    """What a node calls, function or method."""
    return called(node).removeprefix("call_method:")


def _has_rule(loss: fx.Node) -> bool:
    """Rule 1."""
    given = loss_arguments(loss)
    logits, labels = _tensor(given["input"]), _tensor(given.get("target"))
    plain = given["weight"] is None and given["label_smoothing"] == 0 and isinstance(given["ignore_index"], int)
    averaged = given.get("size_average") is None and given.get("reduce") is None
    if logits is None or labels is None or not plain or not averaged or given["reduction"] not in ("mean", "sum"):
        return False
    return logits.dim() == 2 and labels.dim() == 1 and labels.dtype == torch.int64


def _makes_logits(linear: fx.Node) -> bool:
    """Whether the arguments of `linear` are an activation, and weights as the graph is given them."""
    given, *weights = linear_arguments(linear)
    rows = _tensor(given)
    if rows is None or rows.dim() < 2 or not rows.is_floating_point():
        return False
    return all(
        node is None or (isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")) for node in weights
    )


def _acts_by_row(node: fx.Node) -> bool:
    """Rule 2."""
    name, made, given = kind_of(node), _tensor(node), _tensor(node.args[:1])
    if made is None or given is None or made.shape[-1] != given.shape[-1]:
        return False
    if node.all_input_nodes != [node.args[0]]:
        return False
    if name in FLATTENINGS:
        return made.dim() == 2
    if name == "getitem":
        return selects_rows(node)
    if name in CASTS:
        return made.dim() == given.dim() and made.is_floating_point()
    return name in POINTWISE | COPIES and made.dim() == given.dim()


def selects_rows(node: fx.Node) -> bool:
    """Whether an indexing takes slices of all dimensions but the last, and of that everything."""
    index: Any = node.args[1]
    given = _tensor(node.args[:1])
    index = index if isinstance(index, tuple) else (index,)
    if given is None or given.dim() < 2 or not all(isinstance(i, slice) or i is Ellipsis for i in index):
        return False
    if any(isinstance(end, fx.Node) for i in index if i is not Ellipsis for end in (i.start, i.stop, i.step)):
        return False
    reaches_last = len(index) == given.dim() or Ellipsis in index[:-1]
    return not reaches_last or index[-1] in (slice(None), Ellipsis)


def _is_read_by(node: fx.Node, user: fx.Node) -> bool:
    """Rule 3."""
    return all(other is user or other.op == "output" for other in node.users)


def _scalings_after(loss: fx.Node) -> Iterator[fx.Node]:
    """Rule 4."""
    node = loss
    while len(node.users) == 1:
        (user,) = node.users
        if kind_of(user) not in SCALINGS or not _is_scaling_of(user, node):
            return
        yield user
        node = user


def _is_scaling_of(node: fx.Node, loss: fx.Node) -> bool:
    if node.kwargs or len(node.args) != 2 or _tensor(node) is None:
        return False
    others = [argument for argument in node.args if argument is not loss]
    if len(others) != 1 or (node.args[0] is not loss and called(node) != "mul"):
        return False
    return all(_is_number(argument) for argument in others)


def _is_number(argument: Any) -> bool:
    if isinstance(argument, (int, float)):
        return True
    found = _tensor(argument)
    return found is not None and found.dim() == 0 and not found.requires_grad


def _tensor(node: Any) -> torch.Tensor | None:
    """The example value of a node, or of the only one in a tuple, if that is a tensor."""
    if isinstance(node, tuple):
        node = node[0] if node else None
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None
