"""Gradients that a chunked loss sums slice by slice, held to float64.

They are not bitwise those of the untouched step, whose sums run over all rows at once. The promise is that they are no
further from the truth: for every weight of a head, the distance of its sum from the same sum in float64 is at most
`NEAR` times that of the sum over all rows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from remat.chunking.chunked_loss import ChunkedLoss, Given, Sums, Watch

NEAR = 1.1
EXACT = 1e-12  # of a gradient's norm: sums in float64 are no more exact


@dataclasses.dataclass
class _Distances:
    """Of one gradient, as Euclidean norms: from float64 in slices and at once; and the gradient's own."""

    in_slices: float
    at_once: float
    norm: float
    factor: float = 1.0

    @property
    def ratio(self) -> float:
        floor = EXACT * self.norm
        return max(self.in_slices, floor) / max(self.at_once, floor) if self.norm else 1.0


class SumsSeen:
    """What the heads of one planned step sum; `watch` makes a model's heads tell."""

    def __init__(self, model: nn.Module):
        self._names = {_key(p): name for name, p in model.named_parameters()}
        self._found: dict[str, _Distances] = {}
        self._of_head: dict[int, list[str]] = {}

    def watch(self, watch: Watch) -> None:
        watch.on_sums, watch.on_backward = self._compare, self._note_factor

    def _compare(self, head: ChunkedLoss, given: Given, sums: Sums) -> None:
        """Distances of `sums`, from what the head is given."""
        wanted = False, sums.weight is not None, sums.bias is not None
        with torch.no_grad():
            _, _, at_once = head.whole().run(given, wanted)
            with torch.autocast(given.rows.device.type, enabled=False):
                _, _, exact = head.in_float64().run(_in_float64(head, given), wanted)
        names = []
        for weight, found, whole, truth in (
            (given.weight, sums.weight, at_once.weight, exact.weight),
            (given.bias, sums.bias, at_once.bias, exact.bias),
        ):
            if weight is None or found is None or whole is None or truth is None:
                continue
            names.append(self._names[_key(weight)])
            self._found[names[-1]] = _Distances(_apart(found, truth), _apart(whole, truth), float(truth.norm()))
        self._of_head[id(head)] = names

    def _note_factor(self, head: ChunkedLoss, gradient: Tensor) -> None:
        for name in self._of_head.get(id(head), ()):
            self._found[name].factor = abs(float(gradient))

    @property
    def ratios(self) -> dict[str, float]:
        """For every parameter whose gradient is summed in slices, by how much further it is from float64."""
        return {name: found.ratio for name, found in self._found.items()}

    def too_far(
        self, names: Sequence[str], untouched: Iterable[Tensor | None], planned: Iterable[Tensor | None]
    ) -> list[str]:
        """Parameters whose promise is broken: by their ratio, or because a planned gradient is further from the
        untouched one than both sums are from float64."""
        broken = [name for name, found in self._found.items() if found.ratio > NEAR]
        for name, one, other in zip(names, untouched, planned, strict=True):
            if (found := self._found.get(name)) is None or name in broken:
                continue
            if one is None or other is None or _apart(one, other) > _allowed(found, one):
                broken.append(name)
        return broken


def _in_float64(head: ChunkedLoss, given: Given) -> Given:
    """What a head computes from, in float64: weights after their cast."""
    bias = None if given.bias is None else head.cast(given.bias).double()
    return dataclasses.replace(given, rows=given.rows.double(), weight=head.cast(given.weight).double(), bias=bias)


def _allowed(found: _Distances, gradient: Tensor) -> float:
    """How far the two may be apart by the triangle's inequality, and by two roundings to its dtype."""
    rounding = 2 * torch.finfo(gradient.dtype).eps * float(gradient.double().norm())
    return found.factor * (found.in_slices + found.at_once) + rounding


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


def _key(tensor: Tensor) -> int:
    return tensor.data_ptr()
