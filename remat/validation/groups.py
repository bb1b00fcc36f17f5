"""Fused groups of one planned step, each held to float64.

A fused group keeps its intermediates in registers, where the nodes one by one round each to its dtype. So its results
and gradients are others than the untouched step's. The promise is that they are no further from the truth: for every
result of a group, and every gradient that its backward gives, the distance from the same in float64 is at most `NEAR`
times that of the nodes run one by one on the same inputs. (A distance below a quarter of a unit in the last place, of
the whole tensor's norm, is what storing it costs, and counts as none.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.capture.nodes import called
from remat.evaluation.identity import canonical
from remat.fusion.fused_group import FusedGroup, Ran
from remat.validation.sums import NEAR

_LAST_PLACE = 0.25


class GroupsSeen:
    """`ratios`: by what a group does, the largest ratio of the two distances."""

    def __init__(self, unseen: Callable[[], contextlib.AbstractContextManager[Any]]):
        self.ratios: dict[str, float] = {}
        self._unseen = unseen

    @property
    def too_far(self) -> list[str]:
        return [text for text, ratio in self.ratios.items() if ratio > NEAR]

    def __call__(self, group: FusedGroup, ran: Ran) -> None:
        """Compare what `group` gave with the nodes one by one, and both with float64."""
        kind = ran.results[0].device.type
        with self._unseen():
            with torch.autocast(kind, ran.autocast, enabled=bool(ran.autocast)):
                plainly = _run(group.module, ran.given, ran.gradients)
            with torch.autocast(kind, enabled=False):
                given = [_in_float64(value) for value in ran.given]
                exactly = _run(_without_casts(group.module), given, [_in_float64(g) for g in ran.gradients])
            fused = [*ran.results, *(g for g in ran.made if g is not None)]
            ratio = max(_ratio(*each) for each in zip(fused, plainly, exactly, strict=True))
        self.ratios[group.text] = max(self.ratios.get(group.text, 0.0), ratio)


def _in_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _without_casts(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if canonical(called(node)) in ("to", "autocast") and node.meta["example_value"].is_floating_point():
            copies[node] = copies[node.args[0]]
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _run(module: Callable[..., Any], given: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients of the inputs that have one, one after the other."""
    inputs = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in given
    ]
    with torch.enable_grad():
        results = [*module(*inputs)]
        differentiable = [result for result in results if result.requires_grad]
        wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        found = torch.autograd.grad(differentiable, wanted, gradients, allow_unused=True)
    return [*(result.detach() for result in results), *(gradient for gradient in found if gradient is not None)]


def _ratio(fused: Tensor, plain: Tensor, exact: Tensor) -> float:
    if not fused.is_floating_point():
        return 1.0
    floor = _LAST_PLACE * torch.finfo(fused.dtype).eps * float(exact.norm())
    return max(_apart(fused, exact), floor) / max(_apart(plain, exact), floor, 1e-300)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())
