"""A loss head that runs slice by slice, and makes its gradients while it does.

Forward takes the rows in slices. Each makes its logits; then, piece by piece, the loss of its rows and at once the
gradient of the logits, which takes their place. So of the logits only one slice is ever there, and of what is computed
from them only one piece. Kept for backward are the gradients of what the head takes, which backward multiplies by the
gradient of the loss: nothing is recomputed.

Rule 1  The loss of every row is what the untouched head computes; one `nll_loss` over all of them reduces them, in the
        order in which the untouched one adds. So the loss is bitwise that of the eager baseline.
Rule 2  A row's gradient begins from the derivative of that reduction, which labels alone decide. So the gradient of
        every row is bitwise that of the eager baseline, where the gradient of the loss is a power of two, and where a
        product's rows do not depend on how many there are; in one slice there are as many.
Rule 3  Gradients of the weight and the bias are sums over all rows, and are added up slice by slice in float32: they
        differ from the eager baseline's by the order of a sum.
Rule 4  Under autocast the weight is cast once, for all slices, and its gradient is float32 as the weight is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from remat._torch.training import fakes_are_on, keeps_graph
from remat.capture.nodes import autocast
from remat.errors import CaptureError, RematError
from remat.warn import warn

ALIGNED_ROWS = 64  # of a tile of a product
ALIGNED_PIECE = 8  # a multiple of 16 bytes, whatever the number of classes: compiled code copies what begins elsewhere
FEWEST_ROWS = 128  # of a slice: a product of a few takes another kernel, which rounds otherwise
PIECE = 1 << 25  # maximum logits of a piece: products want many rows, the nodes between take 16 bytes for each
PIECES = 8  # of a slice at least
_IGNORE_INDEX = -100

MakeContext = Callable[[], contextlib.AbstractContextManager[Any]]
OnRows = Callable[[Any, Tensor, Sequence[Any], Tensor, Sequence[Tensor | None], MakeContext], None]


def as_given(tensor: Tensor) -> Tensor:
    return tensor


def anew(what: Hashable) -> contextlib.AbstractContextManager[bool]:
    """Run a part, whatever ran before: `Watch.known` in training."""
    return contextlib.nullcontext(False)


@dataclasses.dataclass
class Watch:
    """Hooks that a validation or a recording puts around the heads and the chunked rows of a model.

    unseen   context of forward and backward: their kernels differ from the eager baseline's
    known    context of a part of a forward or a backward; equal arguments mean the same work on tensors of the same
             shapes; yields whether it need not run for that reason
    behind_slice  called in forward behind every slice but the last, with the number of slices so far
    on_sums  called in forward with a head, its inputs and its sums; what it returns is called in backward, with the
             gradient of that loss
    on_rows  called in backward with chunked rows, their inputs (rows, and those beside them), the gradient of the
             result, the sums (gradients of the inputs beside, or None), and the modes of the forward
    """

    unseen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    known: Callable[[Hashable], contextlib.AbstractContextManager[bool]] = anew
    behind_slice: Callable[[int], None] | None = None
    on_sums: Callable[[ChunkedLoss, HeadInputs, Sums], Callable[[Tensor], None] | None] | None = None
    on_rows: OnRows | None = None


@dataclasses.dataclass(frozen=True)
class HeadInputs:
    """The inputs of a head: rows (N, width), weight (classes, width), bias (classes,), labels (N,).

    constants  of the logits, each one number or (classes,)
    numbers    factors of the losses of rows
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    constants: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


@dataclasses.dataclass
class Sums:
    """Gradients of the weight and the bias, summed over slices; None if not needed."""

    weight: Tensor | None
    bias: Tensor | None


@dataclasses.dataclass(eq=False)
class ChunkedLoss:
    """The module that a chunked head runs.

    opened       logits -> the input of `row_losses`: another dtype, or unchanged
    row_losses   (opened logits, labels, *constants) of some rows -> the loss of each
    precise      the same of logits that are not opened, and without casts
    scaled       (loss, *numbers) -> the graph's own function of the loss
    slices       maximum number of slices                     ignored    the label that is left out
    reduction    of the rows' losses: "mean", "sum", or "none" if `scaled` reduces them
    constants    number of constants
    cast         of a product's inputs; a target's kernels replace it
    """

    opened: fx.GraphModule
    row_losses: fx.GraphModule
    precise: fx.GraphModule
    scaled: fx.GraphModule
    slices: int
    ignored: int
    reduction: str
    constants: int = 0
    cast: Callable[[Tensor], Tensor] = autocast
    watch: Watch = dataclasses.field(default_factory=Watch)
    has_told: bool = False

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any) -> Tensor:
        """Return the loss of `rows` (..., width); weight (classes, width) and bias (classes,) make the logits.

        others  the constants, then the numbers
        """
        flat = self.cast(rows).flatten(0, -2)
        constants = tuple(each.flatten() if each.dim() > 1 else each for each in others[: self.constants])
        numbers = others[self.constants :]
        loss: Tensor = _GradientsInForward.apply(self, flat, weight, bias, labels, constants, numbers)
        return loss

    def tell_of_rounding(self, gradient: Tensor) -> None:
        """Warn, at the first backward, if gradients are multiplied by a factor that changes their rounding. (Rule 2)"""
        if self.has_told or fakes_are_on():
            return
        self.has_told = True
        factor = float(gradient)
        if math.isfinite(factor) and factor and math.frexp(abs(factor))[0] != 0.5:
            warn(
                f"the loss that the plan computes in slices is multiplied by {factor:.6g} before its backward, which "
                "is not a power of two: all gradients may round differently. That is harmless; for bitwise gradients "
                "make a plan that does not chunk the loss (exact=True, --exact).",
            )

    def whole(self) -> ChunkedLoss:
        """Return the same head in one slice, whose sums are those of the eager baseline."""
        return dataclasses.replace(self, slices=1, watch=Watch())

    def in_float64(self) -> ChunkedLoss:
        """Return the same head in float64 and in other slices, for float64 rows, weights and biases."""
        return dataclasses.replace(
            self,
            opened=fx.symbolic_trace(as_given),
            row_losses=self.precise,
            slices=2 * self.slices + 1,
            cast=as_given,
            watch=Watch(),
        )

    def run(self, given: HeadInputs, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor | None, Sums]:
        """Return (loss of every row; gradient of the rows; sums), gradients if `wanted`: rows, weight, bias.

        It has no gradients of its own: call it with autograd off.
        """
        for_rows, for_weight, for_bias = wanted
        rows, labels = given.rows, given.labels
        weight, bias = self.cast(given.weight), None if given.bias is None else self.cast(given.bias)
        of_rows = torch.empty_like(rows) if for_rows else None
        of_weight, of_bias = RunningSum(given.weight.dtype), RunningSum(given.weight.dtype)
        losses = by_row = None
        for number, cut in enumerate(slices_of(rows.shape[0], self.slices)):
            if number and self.watch.behind_slice is not None:
                self.watch.behind_slice(number)
            with self._part("slice", cut, wanted) as is_known:
                if is_known:
                    continue
                logits = F.linear(rows[cut], weight, bias)
                most = min(PIECE // weight.shape[0], -(-(cut.stop - cut.start) // PIECES))
                for piece in cuts(cut.start, cut.stop, most):
                    with self._part("piece", piece, wanted) as is_known:
                        if is_known:
                            continue
                        here = logits[piece.start - cut.start : piece.stop - cut.start]
                        opened = self.opened(here.detach()).requires_grad_()
                        with torch.enable_grad(), saved_tensors_hooks(as_given, as_given):
                            found = self.row_losses(opened, labels[piece], *given.constants)
                        if losses is None or by_row is None:
                            losses = found.new_empty(rows.shape[0])
                            by_row = self.derivatives(losses, labels, given.numbers)
                        losses[piece] = found.detach()
                        with torch.autograd.set_multithreading_enabled(False):  # a device's thread lets go late
                            here.copy_(*torch.autograd.grad(found, opened, by_row[piece]))
                        del opened, found, here
                if of_rows is not None:
                    torch.mm(logits, weight, out=of_rows[cut])
                if for_weight:
                    of_weight.add_product(logits.t(), rows[cut])
                if for_bias:
                    of_bias.add(logits.sum(0))
                del logits
        assert losses is not None
        return losses, of_rows, Sums(of_weight.total, of_bias.total)

    def _part(self, what: str, rows: slice, wanted: tuple[bool, bool, bool]) -> contextlib.AbstractContextManager[bool]:
        """Return the context of a slice or a piece; the first one, which allocates the sums, equals no other."""
        return self.watch.known((self, what, rows.stop - rows.start, *wanted)) if rows.start else anew(what)

    def reduced(self, row_losses: Tensor, labels: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        """Reduce the losses of all rows to one loss. (Rule 1)"""
        loss = row_losses
        if self.reduction != "none":
            kept = torch.where(labels == self.ignored, _IGNORE_INDEX, 0)
            loss = F.nll_loss(-row_losses[:, None], kept, ignore_index=_IGNORE_INDEX, reduction=self.reduction)
        result: Tensor = self.scaled(loss, *numbers)
        return result

    def derivatives(self, row_losses: Tensor, labels: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        """Return the derivatives of the loss by each row's loss. (Rule 2)"""
        with torch.enable_grad(), saved_tensors_hooks(as_given, as_given):
            at = torch.zeros_like(row_losses, requires_grad=True)
            (found,) = torch.autograd.grad(self.reduced(at, labels, numbers), at)
        return found


def slices_of(rows: int, slices: int) -> Iterator[slice]:
    """Cut `rows` rows into at most `slices` slices of about `FEWEST_ROWS` or more, but for the rounding of `cuts`."""
    return cuts(0, rows, max(-(-rows // slices), FEWEST_ROWS))


def cuts(first: int, end: int, most: int) -> Iterator[slice]:
    """Cut rows [first, end) into nearly equal slices of about `most`: products of few rows take another kernel.

    Long slices begin at multiples of `ALIGNED_ROWS`, shorter ones at multiples of `ALIGNED_PIECE`.
    """
    parts = max(-(-(end - first) // max(most, 1)), 1)
    unit = next((unit for unit in (ALIGNED_ROWS, ALIGNED_PIECE) if end - first >= 8 * unit * parts), 1)
    borders = [first + round(i * (end - first) / parts / unit) * unit for i in range(parts)]
    yield from map(slice, borders, [*borders[1:], end])


class _GradientsInForward(Function):
    """Keeps for backward the gradients of the rows, the weight and the bias; None for those not needed."""

    @staticmethod
    def forward(
        ctx: Any,
        head: ChunkedLoss,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        constants: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
    ) -> Tensor:
        given = HeadInputs(rows, weight.detach(), None if bias is None else bias.detach(), labels, constants, numbers)
        with head.watch.unseen():
            losses, of_rows, sums = head.run(given, ctx.needs_input_grad[1:4])
            on_sums = head.watch.on_sums
            ctx.on_backward = None if on_sums is None else on_sums(head, given, sums)
            ctx.gradients = [of_rows, sums.weight, sums.bias]
            ctx.dtypes, ctx.head = (weight.dtype, None if bias is None else bias.dtype), head
            return head.reduced(losses, labels, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise CaptureError(
                "a chunked loss has first derivatives only, and backward was called with create_graph=True; make a "
                "plan that leaves the loss whole (exact=True, --exact)."
            )
        if ctx.gradients is None:
            raise RematError("backward went through a chunked loss twice; give retain_graph=True to the first.")
        kept = keeps_graph()
        with ctx.head.watch.unseen():
            ctx.head.tell_of_rounding(gradient)
            if ctx.on_backward is not None:
                ctx.on_backward(gradient)
            of_rows, of_weight, of_bias = (_times(found, gradient, in_place=not kept) for found in ctx.gradients)
            if not kept:
                ctx.gradients = None
            weight_dtype, bias_dtype = ctx.dtypes
            return None, of_rows, _as(of_weight, weight_dtype), _as(of_bias, bias_dtype), None, None, None


class RunningSum:
    """A gradient that slices add to, in float32 or better. (Rule 3)"""

    def __init__(self, dtype: torch.dtype):
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.total: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add the matrix product of two."""
        if self.total is not None and self.total.dtype == left.dtype:
            self.total.addmm_(left, right)
        else:
            self.add(torch.mm(left, right))

    def add(self, part: Tensor) -> None:
        self.total = part.to(self.dtype) if self.total is None else self.total.add_(part)


def _times(found: Tensor | None, factor: Tensor, *, in_place: bool) -> Tensor | None:
    if found is None:
        return None
    return found.mul_(factor) if in_place else found * factor


def _as(found: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return found if found is None or dtype is None else found.to(dtype)
