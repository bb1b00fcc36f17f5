"""Heads: where a captured graph makes logits, and of them a loss, each row by itself.

A row is one token, or one sample: the logits of one position. Rules for what a head is, by analysis of the graph:

Rule 1  Its loss is a `cross_entropy`, or an `nll_loss` of a `log_softmax`, of labels that are class indices, without
        weights of classes and without label smoothing. It is reduced to a mean or a sum, by the loss itself or by
        linear operators behind it (`LINEAR`), such as a mask of rows.
Rule 2  Its logits are made by one product with a weight that the graph is given: a `linear`, or a `matmul` with its
        transpose. What lies between acts on every row by itself (`BY_ROW`), changes the dtype, flattens all dimensions
        but the last, or selects rows. Its other arguments are numbers, or constants: tensors that need no gradient and
        are the same for every row, such as a scale or a mask of the vocabulary.
Rule 3  Nothing else in the graph reads what lies between. The graph may give it out: in slices it never exists at once,
        so a caller gets a `WithheldLogits` in its place.
Rule 4  Multiplications and divisions of the loss by numbers that need no gradient belong to the head, so that each
        slice's gradients begin as those of the eager baseline do. What comes after may add to the loss, and
        nothing else.
Rule 5  All of it runs in one context: no autocast or no_grad opens or closes between the linear and the loss. Nothing
        is written in place meanwhile, and rows are selected before they are flattened: the chunked node stands where
        the loss stood, and takes what the linear took.

What has no rule is not chunked, and `whole_losses` says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from remat.capture.anchors import writes
from remat.capture.nodes import bracket_of, called, captured_nodes

BY_ROW = frozenset(
    ("mul", "truediv", "div", "add", "sub", "tanh", "clamp", "clip", "neg", "masked_fill", "where", "log_softmax")
)
LINEAR = frozenset({"sum", "mean", "view", "reshape", "flatten", "unflatten", "squeeze", "float", "to"})
TRANSPOSES = frozenset({"t", "transpose", "permute", "getattr", "T", "mT"})
CASTS = frozenset({"float", "to", "bfloat16", "double"})
FLATTENINGS = frozenset({"view", "reshape", "flatten"})
COPIES = frozenset({"contiguous", "clone"})
SCALINGS = frozenset({"mul", "truediv", "div"})
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
LOSSES = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}
_IGNORE_INDEX = -100  # by default


@dataclasses.dataclass(frozen=True)
class Head:
    """The nodes of one head, in the graph's order.

    linear     makes the logits                       between   nodes between the logits and the loss
    loss       of the rows                            scalings  nodes that reduce it, and multiply it by numbers
    constants  the tensors that `between` takes beside the logits
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node
    scalings: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...] = ()

    @property
    def result(self) -> fx.Node:
        return self.scalings[-1] if self.scalings else self.loss

    @property
    def takes_contiguous_rows(self) -> bool:
        """Whether the linear's input is contiguous, without which it takes another kernel; not for open sizes."""
        given, *_ = linear_arguments(self.linear)
        return bool(given.meta["example_value"].is_contiguous())

    @property
    def text(self) -> str:
        """A text of the operations on a logit. Chunked losses with another text take other bytes."""
        steps = [node for node in self.steps if kind_of(node) not in COPIES]
        return ",".join(["chunked_loss", *(f"{kind_of(node)}{_arguments_of(node) or ''}" for node in steps)])

    @property
    def steps(self) -> list[fx.Node]:
        """The operations on every logit before the loss."""
        return [node for node in self.between if kind_of(node) not in (*FLATTENINGS, "getitem")]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, classes, width); for open sizes, those of the trace."""
        *rows, classes = map(size_hint, self.linear.meta["example_value"].shape)
        given, *_ = linear_arguments(self.linear)
        return math.prod(rows), classes, size_hint(given.meta["example_value"].shape[-1])

    @property
    def logits_bytes(self) -> int:
        """The bytes of the logits as the linear layer makes them."""
        rows, classes, _ = self.shape
        return rows * classes * int(self.linear.meta["example_value"].element_size())


def size_hint(size: Any) -> int:
    """Return a size as a number; for an open size, that of the trace."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


@dataclasses.dataclass(frozen=True)
class WholeLoss:
    """A loss that is left whole: its node, the reason, and the bytes of its logits as it reads them."""

    loss: fx.Node
    why: str
    logits_bytes: int


class _NoRule(Exception):
    """The reason why a loss belongs to no head."""


def find_heads(graph_module: fx.GraphModule) -> list[Head]:
    """Find the heads of a captured graph, in order."""
    return [found for found in _heads_and_whole_losses(graph_module) if isinstance(found, Head)]


def whole_losses(graph_module: fx.GraphModule) -> list[WholeLoss]:
    """Find the losses of a captured graph that are left whole, in order."""
    return [found for found in _heads_and_whole_losses(graph_module) if isinstance(found, WholeLoss)]


def _heads_and_whole_losses(graph_module: fx.GraphModule) -> Iterator[Head | WholeLoss]:
    for node in captured_nodes(graph_module):
        if called(node) not in LOSSES:
            continue
        try:
            yield _head_of(node)
        except _NoRule as reason:
            logits = tensor_of(loss_arguments(node).get("input"))
            size = 0 if logits is None else math.prod(map(size_hint, logits.shape)) * logits.element_size()
            yield WholeLoss(node, str(reason), size)


def loss_arguments(loss: fx.Node) -> dict[str, Any]:
    """Return the arguments of a loss, by name, with their defaults."""
    given = {**dict(zip(_LOSS, loss.args, strict=False)), **loss.kwargs}
    return {"weight": None, "ignore_index": _IGNORE_INDEX, "reduction": "mean", "label_smoothing": 0.0, **given}


def linear_arguments(linear: fx.Node) -> tuple[Any, Any, Any]:
    """Return (input, weight, bias) of a `linear`, or of a `matmul` with a transposed weight."""
    if called(linear) == "matmul":
        given, transposed = linear.args
        return given, transposed.args[0] if isinstance(transposed, fx.Node) else None, None
    given = {**dict(zip(("input", "weight", "bias"), linear.args, strict=False)), **linear.kwargs}
    return given["input"], given["weight"], given.get("bias")


def chain_of(node: fx.Node) -> fx.Node:
    """Return the logits that a node between linear and loss takes: its only argument with a gradient."""
    found = [each for each in node.all_input_nodes if _needs_gradient(each)]
    if not found:
        raise _NoRule("a linear layer with a gradient does not make its logits")
    if len(found) > 1:
        raise _NoRule(f"`{node}` takes `{found[0]}` and `{found[1]}`, and both need a gradient")
    return found[0]


def _needs_gradient(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.requires_grad


def _arguments_of(node: fx.Node) -> list[str]:
    """Describe the arguments of a node beside the logits, for its text."""
    chain, found = chain_of(node), []
    for each in node.args if node.args[0] is not chain else node.args[1:]:
        value = tensor_of(each)
        found.append("_" if each is chain else str(each) if value is None else f"{value.dtype}{list(value.shape)}")
    return found


def _head_of(loss: fx.Node) -> Head:
    """Return the head that ends in `loss`. Raises _NoRule."""
    _require_rule(loss)
    between: list[fx.Node] = []
    constants: dict[fx.Node, None] = {}
    node: Any = loss_arguments(loss)["input"]
    user = loss
    while not _makes_logits(node):
        chain = chain_of(node)
        _require_by_row(node, chain)
        _require_reader(node, user)
        constants |= dict.fromkeys(each for each in node.all_input_nodes if each is not chain)
        between.insert(0, node)
        node, user = chain, node
    _require_reader(node, user)
    if called(loss) == "nll_loss" and "log_softmax" not in map(kind_of, between):
        raise _NoRule("an `nll_loss` without a `log_softmax` has no rule")
    head = Head(node, tuple(between), loss, tuple(_scalings_after(loss)), tuple(constants))
    reduced = tensor_of(head.result)
    if reduced is None or reduced.dim():
        raise _NoRule("the losses of its rows are not reduced by a sum or a mean")
    if not _is_only_added_to(head.result):
        raise _NoRule("something other than a sum reads the loss")
    _require_undisturbed(head)
    return head


def _is_only_added_to(result: fx.Node) -> bool:
    """Return whether a loss has the same gradient as the graph's output. (Rule 4)"""
    sums = (user for user in result.users if user.op != "output")
    return all(called(node) in ("add", "iadd") and not node.kwargs and _is_only_added_to(node) for node in sums)


def _require_undisturbed(head: Head) -> None:
    """Raise _NoRule if Rule 5 does not hold."""
    kinds = [kind_of(node) for node in head.between]
    flat = next((i for i, kind in enumerate(kinds) if kind in FLATTENINGS), len(kinds))
    if "getitem" in kinds[flat:]:
        raise _NoRule("rows are selected after the logits were flattened")
    node = head.linear
    while node is not head.result:
        node = node.next
        if bracket_of(node):
            raise _NoRule("autocast or no_grad begins or ends between the logits and the loss")
        if node.op not in ("placeholder", "get_attr", "output") and writes(node):
            raise _NoRule(f"`{node}` writes in place between the logits and the loss")
    if not _needs_gradient(head.loss):
        raise _NoRule("it needs no gradient")


def kind_of(node: fx.Node) -> str:
    """Return the name of a node's callee, function or method."""
    return called(node).removeprefix("call_method:")


def _require_rule(loss: fx.Node) -> None:
    """Raise _NoRule if Rule 1 does not hold."""
    given = loss_arguments(loss)
    logits, labels = tensor_of(given.get("input")), tensor_of(given.get("target"))
    if logits is None or labels is None or labels.dtype != torch.int64 or labels.dim() == logits.dim():
        raise _NoRule("its labels are not class indices")
    if logits.dim() != 2:
        raise _NoRule("classes are not the last of two dimensions of its logits")
    if given["weight"] is not None:
        raise _NoRule("its classes have weights")
    if given["label_smoothing"] != 0:
        raise _NoRule("its labels are smoothed")
    averaged = given.get("size_average") is None and given.get("reduce") is None
    if not averaged or not isinstance(given["ignore_index"], int):
        raise _NoRule("it is called in a form that torch has deprecated")


def _makes_logits(node: Any) -> bool:
    """Return whether `node` multiplies an activation by an input weight of the graph. Raises _NoRule."""
    if called(node) not in ("linear", "matmul"):
        return False
    rows, *weights = linear_arguments(node)
    if called(node) == "matmul" and not _is_transpose(node.args[1]):
        raise _NoRule(f"the weight of the product `{node}` is not a transposed parameter")
    value = tensor_of(rows)
    if value is None or value.dim() < 2 or not value.is_floating_point() or not _needs_gradient(node):
        raise _NoRule(f"`{node}` makes logits of something other than activations with a gradient")
    for weight in weights:
        if weight is not None and not (isinstance(weight, fx.Node) and weight.op in ("placeholder", "get_attr")):
            raise _NoRule(f"the weight of `{node}` is computed in the forward")
    return True


def _is_transpose(node: Any) -> bool:
    """Return whether a node is a matrix with its two dimensions exchanged."""
    if not isinstance(node, fx.Node) or kind_of(node) not in TRANSPOSES:
        return False
    made, given = tensor_of(node), tensor_of(node.args[:1])
    if made is None or given is None or given.dim() != 2:
        return False
    return made.shape == given.shape[::-1] and made.stride() == given.stride()[::-1]


def _require_by_row(node: fx.Node, chain: fx.Node) -> None:
    """Raise _NoRule if Rule 2 does not hold."""
    name, made, given = kind_of(node), tensor_of(node), tensor_of(chain)
    unknown = _NoRule(f"`{node}` ({name}) between the logits and the loss has no rule")
    if made is None or given is None or made.shape[-1] != given.shape[-1]:
        raise unknown
    others = [each for each in node.all_input_nodes if each is not chain]
    if others and name not in BY_ROW:
        raise unknown
    for each in others:
        _require_constant(node, each, made.shape[-1])
    if name in FLATTENINGS:
        fits = made.dim() == 2
    elif name == "getitem":
        fits = selects_rows(node)
    elif name in CASTS:
        fits = made.dim() == given.dim() and made.is_floating_point()
    else:
        fits = name in BY_ROW | COPIES and made.shape == given.shape
    if name == "log_softmax":
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        fits = fits and dim in (-1, 1 if made.dim() == 2 else -1)
    if not fits:
        raise unknown


def _require_constant(node: fx.Node, constant: fx.Node, classes: Any) -> None:
    value = tensor_of(constant)
    if value is None or math.prod(value.shape[:-1]) != 1 or (value.dim() and value.shape[-1] not in (1, classes)):
        raise _NoRule(f"`{constant}`, which `{node}` takes, differs from row to row")


def selects_rows(node: fx.Node) -> bool:
    """Return whether an indexing takes slices of all dimensions but the last, and the last one whole."""
    index: Any = node.args[1]
    given = tensor_of(node.args[:1])
    index = index if isinstance(index, tuple) else (index,)
    if given is None or given.dim() < 2 or not all(isinstance(i, slice) or i is Ellipsis for i in index):
        return False
    if any(isinstance(end, fx.Node) for i in index if i is not Ellipsis for end in (i.start, i.stop, i.step)):
        return False
    reaches_last = len(index) == given.dim() or Ellipsis in index[:-1]
    return not reaches_last or index[-1] in (slice(None), Ellipsis)


def _require_reader(node: fx.Node, user: fx.Node) -> None:
    """Raise _NoRule if Rule 3 does not hold."""
    if other := next((other for other in node.users if other is not user and other.op != "output"), None):
        raise _NoRule(f"`{other}` reads the logits too (`{node}`)")


def _scalings_after(loss: fx.Node) -> Iterator[fx.Node]:
    """Yield the scalings that follow a loss, by Rule 4."""
    node = loss
    while len(node.users) == 1:
        (user,) = node.users
        if not (_is_scaling_of(user, node) or _is_linear_of(user, node)):
            return
        yield user
        node = user


def _is_scaling_of(node: fx.Node, loss: fx.Node) -> bool:
    if kind_of(node) not in SCALINGS or node.kwargs or len(node.args) != 2 or tensor_of(node) is None:
        return False
    others = [argument for argument in node.args if argument is not loss]
    if len(others) != 1 or (node.args[0] is not loss and called(node) != "mul"):
        return False
    value = tensor_of(loss)
    return value is not None and all(_is_number(argument, value.dim()) for argument in others)


def _is_number(argument: Any, dims: int) -> bool:
    """Return whether `argument` needs no gradient, and has at most `dims` dimensions."""
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return True
    found = tensor_of(argument)
    return found is not None and found.dim() <= dims and not found.requires_grad


def _is_linear_of(node: fx.Node, losses: fx.Node) -> bool:
    """Return whether `node` reduces or reshapes the losses of rows. (Rule 1)"""
    value = tensor_of(losses)
    return (
        value is not None
        and value.dim() > 0
        and kind_of(node) in LINEAR
        and node.all_input_nodes == [losses]
        and tensor_of(node) is not None
    )


def tensor_of(node: Any, *, first: bool = False) -> torch.Tensor | None:
    """Return the example value of a node, or of the only one in a tuple, if that is a tensor.

    first  also if it is the first of several values
    """
    if isinstance(node, tuple):
        node = node[0] if node else None
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if first and isinstance(found, (tuple, list)) and found:
        found = found[0]
    return found if isinstance(found, torch.Tensor) else None
