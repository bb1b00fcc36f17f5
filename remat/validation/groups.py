"""Fused groups of one planned step, each held to float64.

A fused group keeps its intermediates in registers, where the nodes one by one round each to its dtype. So its results
and gradients differ from the eager baseline's. The promise is that they are no further from the truth: for every
result of a group, and every gradient that its backward gives, the distance from the same in float64 is at most `NEAR`
times that of the nodes run one by one on the same inputs. Groups that do the same are taken together, and of them
what has the same shape.

Two things count as nothing: a distance below a quarter of a unit in the last place, of the whole tensor's norm, which
is what storing it costs; and chance. `most_ratio` in `sums.py` has both, `NEAR` and chance.

The fused step as a whole is compared with the untouched one too, roughly: gradients that are apart by more than
rounding explains (`far_from`) mean a fault, not a rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.capture.nodes import called
from remat.evaluation.identity import canonical
from remat.fusion.fused_group import FusedGroup, GroupRun
from remat.validation.sums import apart, most_ratio

_LAST_PLACE = 0.25
_FAR = {False: 1e-2, True: 0.5}  # of a gradient's norm: rounding stays well below, a wrong gradient seldom does
_SMALL = 0.01  # of the largest gradient: smaller ones may be noise


@dataclasses.dataclass
class _GroupDistances:
    """Squared norms of distances over all equally shaped tensors in runs of a group, and their number of values."""

    fused: float = 0.0
    one_by_one: float = 0.0
    stored: float = 0.0
    numbers: int = 0

    def add(self, fused: Tensor, plain: Tensor, exact: Tensor) -> None:
        self.fused += apart(fused, exact) ** 2
        self.one_by_one += apart(plain, exact) ** 2
        self.stored += (_LAST_PLACE * torch.finfo(fused.dtype).eps * float(exact.norm())) ** 2
        self.numbers += fused.numel()

    @property
    def ratio(self) -> float:
        return math.sqrt(max(self.fused, self.stored) / max(self.one_by_one, self.stored, 1e-300))

    @property
    def is_too_far(self) -> bool:
        return not self.ratio <= most_ratio(self.numbers)  # NaN is too far


class GroupsSeen:
    """Collect the results of the fused groups of one planned step; called with each run of one."""

    def __init__(self, unseen: Callable[[], contextlib.AbstractContextManager[Any]]):
        self._found: dict[str, dict[torch.Size, _GroupDistances]] = {}
        self._unseen = unseen

    @property
    def ratios(self) -> dict[str, float]:
        """The largest ratio of both distances among a group's results and gradients, by the group's text."""
        return {text: max(each.ratio for each in found.values()) for text, found in self._found.items() if found}

    @property
    def not_finite(self) -> list[str]:
        """The groups without any comparable number: in float64 none is finite."""
        return [text for text, found in self._found.items() if not found]

    @property
    def too_far(self) -> list[str]:
        return [text for text, found in self._found.items() if any(each.is_too_far for each in found.values())]

    def __call__(self, group: FusedGroup, ran: GroupRun) -> None:
        """Compare the results of `group` with the nodes run one by one, and both with float64."""
        kind = ran.results[0].device.type
        with self._unseen():
            with torch.autocast(kind, ran.autocast, enabled=bool(ran.autocast)):
                plainly = _run(group.module, ran.given, ran.gradients)
            with torch.autocast(kind, enabled=False):
                given = [_in_float64(value) for value in ran.given]
                exactly = _run(_without_casts(group.module), given, [_in_float64(g) for g in ran.gradients])
            fused = [*ran.results, *(g for g in ran.made if g is not None)]
            found = self._found.setdefault(group.text, {})
            for each in zip(fused, plainly, exactly, strict=True):
                if each[0].is_floating_point() and each[2].isfinite().all():
                    found.setdefault(each[0].shape, _GroupDistances()).add(*each)


def far_from(
    untouched: Sequence[Tensor | None], fused: Sequence[Tensor | None], names: Sequence[str], narrow: bool
) -> list[str]:
    """List parameters whose gradients are too far from the eager baseline's to be explained by rounding.

    narrow  whether the step rounds to 16 bits
    """
    norms = [0.0 if gradient is None else float(gradient.double().norm()) for gradient in untouched]
    floor, found = _SMALL * max(norms, default=0.0), []
    for name, one, other, norm in zip(names, untouched, fused, norms, strict=True):
        if one is None or other is None:
            found += [name] * (one is not other)
        elif not apart(one, other) <= _FAR[narrow] * max(norm, floor):
            found.append(name)
    return found


def _in_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _is_float(value: Tensor | None) -> bool:
    """Return whether the value of a cast is floats. Nodes of chunked losses know no values; they cast to floats."""
    return value is None or value.is_floating_point()


def _without_casts(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if canonical(called(node)) in ("to", "double", "autocast") and _is_float(node.meta.get("example_value")):
            copies[node] = copies[node.args[0]]
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _run(module: Callable[..., Any], given: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, followed by the gradients of the inputs that have one."""
    inputs = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in given
    ]
    with torch.enable_grad():
        results = [*module(*inputs)]
        differentiable = [result for result in results if result.requires_grad]
        wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        found = torch.autograd.grad(differentiable, wanted, gradients, allow_unused=True)
    return [*(result.detach() for result in results), *(gradient for gradient in found if gradient is not None)]
