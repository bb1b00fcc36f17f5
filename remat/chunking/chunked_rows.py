"""A run of nodes that act by row, run slice by slice.

Forward makes the result slice by slice and keeps what the run is given, nothing of what is inside. Backward makes one
slice again at a time, and its gradients. So of what is wide only a slice is ever there; the price is the run's own
forward once more, without its last products, whose values no derivative asks for.

Rule 1  Every row's result, and the gradient of every row, are what the untouched nodes compute: bitwise, where what a
        kernel makes of a row does not depend on how many there are, and where nothing inside is fused.
Rule 2  Gradients of weights inside are sums over all rows, and are added up slice by slice in float32: they differ from
        the eager baseline's by the order of a sum.
Rule 3  Under autocast the weights of products are cast once for all slices; their gradients are as wide as they are.
Rule 4  What backward needs is packed before anything runs. So where a region ends in such a run, its recomputation
        stops in front of it (early stop), and the run is not made twice more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from remat.capture.nodes import autocast
from remat.chunking.chunked_loss import MakeContext, Watch, anew, as_given
from remat.errors import CaptureError

ALIGNED_ROWS, FEWEST_ROWS = 64, 128  # of a slice: where it begins, and how many there are at least


@dataclasses.dataclass(eq=False)
class ChunkedRows:
    """The module that a chunked run of nodes runs.

    body     (rows (N, width), *beside) -> the result (N, other width), every row by itself
    again    the same for backward: products whose values no derivative needs are not computed
    precise  the same as `body`, without casts
    weights  indices of `beside` that products take
    residual whether the input is added to the result, last
    slices   maximum number of slices
    is_fused whether `body` and `again` hold fused groups, which run where something has a gradient
    cast     of a product's inputs; a target's kernels replace it
    alike    equal for runs that compute the same with tensors of the same shapes; None: like no other
    """

    body: fx.GraphModule
    again: fx.GraphModule
    precise: fx.GraphModule
    weights: frozenset[int]
    residual: bool
    slices: int
    cast: Callable[[Tensor], Tensor] = autocast
    watch: Watch = dataclasses.field(default_factory=Watch)
    is_fused: bool = False
    alike: Hashable = None

    def __call__(self, rows: Tensor, *beside: Any) -> Tensor:
        """Return the result (..., other width) of `rows` (..., width)."""
        held = _HoldInputs.apply(rows, *beside)  # Rule 4
        result: Tensor = _Sliced.apply(self, held, rows, *beside)
        return result

    def untouched(
        self,
        rows: Tensor,
        beside: Sequence[Any],
        gradient: Tensor,
        wanted: Sequence[bool],
        *,
        under: MakeContext = contextlib.nullcontext,
        precise: bool = False,
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return (result, gradient of the rows, those of `beside`) as autograd computes them for all rows at once.

        under    context of forward: autocast
        precise  in float64, for float64 arguments, without casts
        """
        with under(), torch.enable_grad(), saved_tensors_hooks(as_given, as_given):
            prepared = list(beside) if precise else self._prepared(beside)
            here = _leaf(rows, wanted[0])
            leaves = [_leaf(each, asks) for each, asks in zip(prepared, wanted[1:], strict=True)]
            made = (self.precise if precise else self.body)(here.flatten(0, -2), *leaves)
        asked = [each for each, asks in zip((here, *leaves), wanted, strict=True) if asks]
        parts = iter(torch.autograd.grad(made, asked, gradient.flatten(0, -2), allow_unused=True))
        found = [next(parts) if asks else None for asks in wanted]
        return made.detach(), found[0], found[1:]

    def forward(self, rows: Tensor, beside: Sequence[Any], wanted: Sequence[bool]) -> Tensor:
        """Return the result, without gradients of its own: call it with autograd off.

        wanted  whether each of the rows and of `beside` has a gradient
        """
        flat, prepared = rows.flatten(0, -2), self._prepared(beside)
        if self.is_fused:
            flat, *prepared = (_leaf(each, asks) for each, asks in zip((flat, *prepared), wanted, strict=True))
        result: Tensor | None = None
        known_work = self._known_work("forward", (flat, *prepared), wanted)
        for cut in row_slices(flat.shape[0], self.slices):
            with known_work(cut) as is_known:
                if is_known:
                    continue
                made = self._made(flat, cut, prepared)
                if result is None:
                    result = made.new_empty(*rows.shape[:-1], made.shape[-1])  # no view: the caller may write to it
                result.view(-1, made.shape[-1])[cut] = made
                del made
        assert result is not None
        return result

    def _made(self, rows: Tensor, cut: slice, prepared: Sequence[Any]) -> Tensor:
        """Return the result of a slice. Groups run where there is a gradient, of which nothing is kept."""
        if not self.is_fused:
            return self.body(rows[cut], *prepared)
        with torch.enable_grad(), saved_tensors_hooks(_nothing, as_given):
            return self.body(rows[cut], *prepared).detach()  # a slice of a leaf: autocast keeps casts of leaves

    def gradients(
        self,
        rows: Tensor,
        beside: Sequence[Any],
        gradient: Tensor,
        wanted: Sequence[bool],
        *,
        under: MakeContext = contextlib.nullcontext,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return (gradient of the rows, sums for `beside`) if `wanted`: for the rows, and for each of `beside`.

        under  context in which forward ran: autocast. Derivatives are computed in the context of backward
        """
        flat, given = rows.detach().flatten(0, -2), gradient.flatten(0, -2)
        with under():
            leaves = [_leaf(each, asks) for each, asks in zip(self._prepared(beside), wanted[1:], strict=True)]
            known_work = self._known_work("backward", (flat, given, *leaves), wanted)
        of_rows = torch.empty_like(flat) if wanted[0] else None
        sums: list[Tensor | None] = [None] * len(leaves)
        for cut in row_slices(flat.shape[0], self.slices):
            with known_work(cut) as is_known:
                if is_known:
                    continue
                here = _leaf(flat[cut], wanted[0])
                with under(), torch.enable_grad(), saved_tensors_hooks(as_given, as_given):
                    made = self.again(here, *leaves)
                asked = [each for each, asks in zip((here, *leaves), wanted, strict=True) if asks]
                found = iter(torch.autograd.grad(made, asked, given[cut], allow_unused=True))
                del made, asked
                if of_rows is not None:
                    of_rows[cut] = _or_zeros(next(found), here)
                known: set[int] = set()
                for i, asks in enumerate(wanted[1:]):
                    if asks and (part := next(found)) is not None:
                        sums[i] = _added(sums[i], part, known)
                        del part
                del found, here
        if of_rows is None:
            return None, sums
        of_rows = of_rows.view(rows.shape)
        return _laid_out_like(gradient, of_rows) if self.residual else of_rows, sums

    def _known_work(
        self, phase: str, given: Sequence[Any], wanted: Sequence[bool]
    ) -> Callable[[slice], contextlib.AbstractContextManager[bool]]:
        """Return the context of a slice; the first one, which allocates what all write to, equals no other.

        Call this under the autocast in which slices run.
        """
        if self.watch.known is anew:  # in training
            return lambda cut: anew(phase)
        run = self if self.alike is None else self.alike
        kind = given[0].device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        work = (run, phase, autocast, *map(_layout, given), *wanted)
        return lambda cut: self.watch.known((*work, cut.stop - cut.start)) if cut.start else anew(work)

    def _prepared(self, beside: Sequence[Any]) -> list[Any]:
        """Prepare the inputs beside the rows for the body. (Rule 3)"""
        detached = (each.detach() if isinstance(each, Tensor) else each for each in beside)
        return [self.cast(each) if i in self.weights else each for i, each in enumerate(detached)]


class _HoldInputs(Function):
    """Keeps its inputs for backward, and returns an empty result."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *beside: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *beside)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


class _Sliced(Function):
    @staticmethod
    def forward(ctx: Any, run: ChunkedRows, held: Tensor, rows: Tensor, *beside: Any) -> Tensor:
        kind = rows.device.type
        ctx.run, ctx.held = run, held.grad_fn
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return run.forward(rows.detach(), beside, ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise CaptureError(
                "a chunked run of nodes has first derivatives only, and backward was called with create_graph=True; "
                "make a plan without (exact=True, --exact)."
            )
        run: ChunkedRows = ctx.run
        rows, *beside = ctx.held.saved_tensors
        kind, dtype, enabled = ctx.autocast

        def under() -> torch.autocast:
            return torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)

        of_rows, sums = run.gradients(rows, beside, gradient, ctx.needs_input_grad[2:], under=under)
        if run.watch.on_rows is not None:
            run.watch.on_rows(run, rows, beside, gradient, sums, under)
        found = [None if each is None else each.to(beside[i].dtype) for i, each in enumerate(sums)]
        del sums
        return None, None, of_rows, *found


class UnmadeProduct(Function):
    """A product of rows and a weight (out, in), of which only the derivative is needed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(rows.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        return (
            torch.mm(gradient, weight) if for_rows else None,
            torch.mm(gradient.t(), rows) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def unmade_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` without its value."""
    made: Tensor = UnmadeProduct.apply(rows, weight, bias)
    return made


def unmade_addmm(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return `torch.addmm` of a bias, without its value."""
    made: Tensor = UnmadeProduct.apply(rows, weight.t(), bias)
    return made


def _nothing(tensor: Tensor) -> None:
    """Keep nothing of a value that no backward will ask for."""


def _layout(value: Any) -> Hashable:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def _leaf(value: Any, asks: bool) -> Any:
    return value.detach().requires_grad_(asks) if isinstance(value, Tensor) else value


def _laid_out_like(gradient: Tensor, found: Tensor) -> Tensor:
    """Lay out `found` as autograd lays out a sum of two gradients: like the first, if that has no gaps."""
    if gradient.is_contiguous():
        return found
    made = torch.empty_like(gradient, dtype=found.dtype)
    return found if made.is_contiguous() or made.stride() != gradient.stride() else made.copy_(found)


def _or_zeros(found: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if found is None else found


def _added(total: Tensor | None, part: Tensor, known: set[int]) -> Tensor:
    """Add in float32 or better, in a storage that is not `known` yet and is from now on. (Rule 2)

    Autograd gives one tensor as the gradient of two values that are added to each other.
    """
    if total is not None:
        return total.add_(part)
    total = part.to(torch.promote_types(part.dtype, torch.float32))
    if (key := int(total.untyped_storage()._cdata)) in known:
        total = total.clone()
    known.add(key)
    return total


def row_slices(rows: int, slices: int) -> Iterator[slice]:
    """Cut `rows` rows into at most `slices` slices that begin at multiples of `ALIGNED_ROWS`.

    If a slice ended in between, its last numbers would go to another kernel than in the eager baseline, on a CPU.
    """
    most = max(-(-rows // slices), FEWEST_ROWS)
    step = -(-most // ALIGNED_ROWS) * ALIGNED_ROWS
    begins = [*range(0, max(rows, 1), step)]
    if len(begins) > 1 and rows - begins[-1] < FEWEST_ROWS:  # a product of a few rows takes another kernel
        begins.pop()
    yield from map(slice, begins, [*begins[1:], rows])
