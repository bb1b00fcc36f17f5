"""A fused group: the callee of its node, compiled for each layout of inputs, or once for open sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from remat._torch.training import fakes_are_on
from remat.errors import CaptureError, RematError
from remat.fusion.kernels import empty, layout_of
from remat.fusion.lowering import Lowered, lower, lower_open
from remat.fusion.open_sizes import InputSizes, are_open, opened, with_open_rows
from remat.warn import warn

MANY_SHAPES = 16

MOST_OPEN = 2  # times a group is lowered for open sizes: more, where each holds for few values

_LOWERED: dict[tuple[Any, ...], Lowered | None] = {}
_OPEN: dict[tuple[Any, ...], list[Lowered | None]] = {}  # None: torch cannot


@dataclasses.dataclass(frozen=True)
class GroupRun:
    """One run of a group, forward and backward.

    autocast   its dtype in forward
    given      inputs                        results  outputs
    gradients  of the results that have one  made     gradients of the inputs, or None
    """

    autocast: torch.dtype | None
    given: Sequence[Any]
    results: Sequence[Tensor]
    gradients: Sequence[Tensor]
    made: Sequence[Tensor | None]


@dataclasses.dataclass
class GroupWatch:
    """The hook of a validation.

    on_run  called in backward with a group and its run, if it is set when forward runs
    """

    on_run: Callable[[FusedGroup, GroupRun], None] | None = None


class FusedGroup:
    """A group of nodes that runs as a kernel forward and a kernel backward.

    module  inputs -> results in a tuple, as the nodes compute them       text  its operators
    may_share  numbers of results that cannot be written to: equal ones share a storage
    inputs  sizes of the inputs in the captured graph
    by_row  in place of these, whether each input has rows: their number is open, once it varies
    watch   hook of a validation
    """

    def __init__(
        self,
        module: fx.GraphModule,
        text: str,
        may_share: Sequence[int] = (),
        inputs: Sequence[InputSizes] = (),
        by_row: Sequence[bool] = (),
    ):
        self.module, self.text, self.may_share = module, text, tuple(may_share)
        self._inputs, self._by_row = inputs, by_row
        self.watch = GroupWatch()
        self._shapes = 0

    def __call__(self, *given: Any) -> Any:
        """Return the result, or a tuple of results."""
        lowered = self.lowered(*given)
        if lowered is None:
            results = self.module(*given)
        else:
            on_run = self.watch.on_run
            told = None if on_run is None else functools.partial(self._tell, on_run, _autocast(given), given)
            results = _Fused.apply(lowered, told, *(value for value in given if isinstance(value, Tensor)))
        return results[0] if len(results) == 1 else results

    def _tell(
        self, on_run: Callable[[FusedGroup, GroupRun], None], autocast: Any, given: Sequence[Any], *rest: Any
    ) -> None:
        on_run(self, GroupRun(autocast, given, *rest))

    def lowered(self, *given: Any) -> Lowered | None:
        """Lower the group for inputs like `given`, under the current autocast.

        Returns None if no input has a gradient, or if torch cannot: then nodes run one by one.
        """
        if not any(isinstance(value, Tensor) and value.requires_grad for value in given):
            return None
        key = (self._content, _autocast(given), *map(_described, given))
        if key not in _LOWERED:
            lowered = _LOWERED[key] = self._lowered_open(given) or self._lowered_closed(given)
            if lowered is not None and not fakes_are_on():
                lowered.begin()
        return _LOWERED[key]

    def _lowered_closed(self, given: tuple[Any, ...]) -> Lowered | None:
        self._count_shape()
        try:
            return lower(self._bound(given), [value for value in given if isinstance(value, Tensor)], self.may_share)
        except RematError as error:
            warn(f"{self.text} stays as it is: {error}")
            return None

    def _lowered_open(self, given: tuple[Any, ...]) -> Lowered | None:
        """Lower for all sizes, if some are open and the inputs match them."""
        if fakes_are_on():
            return None
        inputs = with_open_rows(given, self._by_row) if self._by_row and self._shapes else self._inputs
        found = opened(inputs, given) if are_open(inputs) else None
        if found is None:
            return None
        known = _OPEN.setdefault((self._content, _autocast(given), found.kinds), [])
        for lowered in known:
            if lowered is not None and lowered.holds(found.values):
                return lowered.at(found.values)
        if len(known) == MOST_OPEN or None in known:
            return None
        self._count_shape()
        try:
            lowered = lower_open(self._bound, found, self.may_share)
        except RematError:  # as it is, it may be lowered
            known.append(None)
            return None
        lowered.compile()
        known.append(lowered)
        return lowered.at(found.values)

    def _count_shape(self) -> None:
        """Warn if a group is compiled again and again."""
        self._shapes += 1
        if self._shapes == MANY_SHAPES:
            warn(
                f"a fused group has met {MANY_SHAPES} shapes, and is compiled for each, seconds at a time: pad batches "
                "to a few lengths, or plan without fuse=True (--fuse).",
            )

    @functools.cached_property
    def _content(self) -> str:
        targets = [str(node.target) for node in self.module.graph.nodes if node.op == "call_function"]
        return f"{self.module.code} {targets} {self.may_share}"

    def _bound(self, given: Sequence[Any]) -> Any:
        """Return `module` as a function of its tensors, with numbers fixed."""
        if all(isinstance(value, Tensor) for value in given):
            return self.module

        def run(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            return self.module(*(next(rest) if isinstance(value, Tensor) else value for value in given))

        return run


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*layout_of(value), value.requires_grad)
    return tuple(map(int, value)) if isinstance(value, (tuple, list)) else int(value)  # open sizes


def _autocast(given: tuple[Any, ...]) -> Any:
    kind = next(value.device.type for value in given if isinstance(value, Tensor))
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Fused(Function):
    @staticmethod
    def forward(ctx: Any, lowered: Lowered, told: Callable[..., None] | None, *given: Tensor) -> Any:
        found = lowered.forward(*given)
        results, kept = found[: lowered.results], found[lowered.results :]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.lowered, ctx.told = lowered, None
        if told is not None:  # the results themselves would lead back here
            ctx.told = functools.partial(told, [result.detach() for result in results if result is not None])
        ctx.mark_non_differentiable(
            *(result for result, has in zip(results, lowered.differentiable, strict=True) if not has)
        )
        return tuple(_apart(results))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise CaptureError(
                "a fused group has first derivatives only, and backward was called with create_graph=True; make a plan "
                "without fusion."
            )
        lowered: Lowered = ctx.lowered
        wanted = [g for g, has in zip(gradients, lowered.differentiable, strict=True) if has]
        missing = tuple(i for i, gradient in enumerate(wanted) if gradient is None)
        tangents = [_laid_out(g, at) for g, at in zip(wanted, lowered.tangents, strict=True) if g is not None]
        made = lowered.backward(*missing)(*ctx.saved_tensors, *tangents)
        if ctx.told is not None and not missing:
            ctx.told(tangents, made)
        return None, None, *made


def _apart(results: Sequence[Any]) -> Iterator[Tensor]:
    """Yield `results`, with a detached copy for each repeated tensor."""
    seen: set[int] = set()
    for result in results:
        yield result.detach() if id(result) in seen else result
        seen.add(id(result))


def _laid_out(gradient: Tensor, layout: Any) -> Tensor:
    """Return `gradient` in the layout that the kernel was made for."""
    if layout_of(gradient) == layout:
        return gradient
    return empty(layout).copy_(gradient)
