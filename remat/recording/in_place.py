"""In place: PyTorch writes to a tensor without other holders in training, and makes a new one on fakes.

Under a dispatch mode, and for tensors that dispatch to Python, composite kernels and the autograd engine take a branch
without writes in place (`isTensorSubclassLike`, ATen/TensorSubclassLikeUtils.h). A training step takes the other one,
and needs one tensor less while such an operator runs. As of torch 2.13 these places weigh something:

Rule 1  The engine adds a second gradient of a value to the first, in place if nothing else holds the first and it is
        dense (`accumulate`, torch/csrc/autograd/input_buffer.cpp). A view is never written to: its history holds the
        tensor that it is of (`as_view`, torch/csrc/autograd/VariableTypeUtils.h). So the gradient of a transposed
        weight, or of what was reshaped, is added to out of place.
Rule 2  The backward of `gather`, `index`, `max`, `sort` and the like writes into zeros that it has just made
        (`gather_backward`, ATen/native/TensorAdvancedIndexing.cpp; `index_backward` and
        `value_selecting_reduction_backward`, torch/csrc/autograd/FunctionsManual.cpp).
Rule 3  Unfused attention adds its mask to the scores (`_scaled_dot_product_attention_math`,
        ATen/native/transformers/attention.cpp).
Rule 4  A linear layer adds its bias to a product by itself where its input is not contiguous: transposed tokens, or a
        context in attention whose batch comes first (`linear`, ATen/native/Linear.cpp). torch's multi-head attention
        calls it; all that this adds in one dimension is its bias.
Rule 5  The backward of `binary_cross_entropy_with_logits` writes all that it computes over its first result
        (`binary_cross_entropy_with_logits_backward`, torch/csrc/autograd/FunctionsManual.cpp). On fakes C++ holds the
        results of an expression until the last is there; all but that count as taken over nevertheless.
Rule 6  On a CPU the gradient of the largest element of all is written into zeros that are made before equal elements
        are counted (`evenly_distribute_backward`, torch/csrc/autograd/FunctionsManual.cpp). Fakes do as CUDA does, and
        make the result last; the first mask of theirs is taken to be the zeros, less a mask.
Rule 7  The backward of `householder_product`, and of `ormqr`, writes columns into zeros that it makes before the first
        one (`householder_product_backward`, torch/csrc/autograd/FunctionsManual.cpp). Fakes join the columns at the
        end; the first of theirs is taken to have the zeros beside it.

Operators are not replaced. One that would be in place is taken to have its first argument's storage over: that ends
when the operator begins, provided that it is let go before the next operator, which is so if nothing else holds it. A
table of counts of references was rejected: what Python adds to them differs from version to version.

Left out: gradients that arrive from Python's own `autograd.Function`s, within which an operator of theirs looks like
one of the engine's; there, one gradient too many is predicted, as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from remat._torch.recording import autograd_node

aten = torch.ops.aten

_WRITES_INTO_ZEROS = {
    aten.scatter_add.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.index_add.default,
    aten.index_put.default,
    aten.masked_scatter.default,
    aten.put.default,
}
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_OF_ALL = {f"{name}Backward{number}" for name in ("Max", "Min", "Median", "Nanmedian") for number in (0, 1)}
_OF_COLUMNS = {"LinalgHouseholderProductBackward0", "OrmqrBackward0"}
_COMPUTES = {aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}

_depth = {"model": 0, "attention": 0, "linear": 0}  # backward may run in another thread than forward: not thread-local


def count(what: str, change: int) -> None:
    """Note that code of `what` ("model"; "attention", "linear" in it) begins (1) or ends (-1)."""
    _depth[what] += change


@contextlib.contextmanager
def within(what: str) -> Iterator[None]:
    """Count operators as those of `what` while the context is open."""
    count(what, 1)
    try:
        yield
    finally:
        count(what, -1)


def with_zeros(func: Any, args: Any, out: Any) -> Any:
    """Let the first mask of a gradient by Rule 6 take the zeros' memory."""
    node = autograd_node() if func is aten.isnan.default and out.dim() and out.device.type == "cpu" else None
    if node is None or node.name() not in _OF_ALL:
        return out
    return out.new_empty(args[0].nbytes - out.nbytes).as_strided(out.shape, out.stride())


def written_columns(func: Any, args: Any) -> Sequence[torch.Tensor]:
    """Return the columns that an operator joins, and that training writes into zeros. (Rule 7)"""
    node = autograd_node() if func is aten.cat.default else None
    return args[0] if node is not None and node.name() in _OF_COLUMNS else ()


def is_held_meanwhile(func: Any) -> bool:
    """Return whether what `func` takes over may be held for some operators more. (Rule 5)"""
    return func in _COMPUTES


class InPlace:
    """Tells which operators a training step would run in place; asked for every one, in order."""

    def __init__(self) -> None:
        self._sequence = -1  # of the autograd node at work
        self._first = 0  # its first operator

    def taken_over(self, op: int, func: Any, args: Any, birth: int, out: Any) -> bool:
        """Return whether operator `op` would write its result over its first argument, as far as is visible.

        birth  the operator that made the first argument's storage, negative if it existed before
        """
        node = autograd_node()
        sequence = -1 if node is None else node._sequence_nr()
        if sequence != self._sequence:
            self._sequence, self._first = sequence, op
        if birth < 0 or not _could_be_in_place(func, args, out):
            return False
        if func in _COMPUTES and (node is None or node.name() != _LOGITS):
            return False
        if _depth["model"]:
            adds = func is aten.add.Tensor
            return adds and (_depth["attention"] > 0 or (_depth["linear"] > 0 and args[1].dim() == 1))  # Rules 3, 4
        if node is None or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
            return False
        if func is aten.add.Tensor:  # Rule 1
            if args[0]._is_view():
                return False
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            return birth < self._first or len({*edges}) < len(edges)
        return birth >= self._first  # Rules 2, 5


def _could_be_in_place(func: Any, args: Any, out: Any) -> bool:
    if func is not aten.add.Tensor and func not in _WRITES_INTO_ZEROS and func not in _COMPUTES:
        return False
    first = args[0]
    storage = first.untyped_storage()
    if func is aten.add.Tensor:
        if not isinstance(args[1], torch.Tensor) or args[1].layout is not torch.strided:
            return False
        if args[1].untyped_storage()._cdata == storage._cdata:  # x + x: the other one holds it
            return False
    return storage.nbytes() == out.untyped_storage().nbytes() and _is_dense(first)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` neither overlap nor leave gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
