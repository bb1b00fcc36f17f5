"""Kernel times out of a table: measured on one card, for plans for that card made anywhere.

A roofline knows a card by its data sheet. A table knows it by a stopwatch: `remat profile --costs h100.csv` writes a
model's kernels, `kernel_calls.py` measures them on the card, and `remat plan --costs h100.csv` prices this model or
any other by them. Memory stays as it is predicted: a table holds times alone.

Rule 1  A kernel of the table has its time. Numbers among its arguments (an epsilon, a scale) do not matter, and a
        stand-in is the kernel that it stands for.
Rule 2  A kernel of the same operator and dtype has the roofline's time, by the factor that the table gives: between two
        kernels of the table in proportion to their logarithms, beyond the last one as at the last one.
Rule 3  Any other kernel has the roofline's time.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat.costing.roofline import kernel_us, operator_name
from remat.evaluation.graph import OpKind
from remat.workload.target import Target

BY_SIGNATURE, BY_FAMILY, BY_ROOFLINE = SOURCES = "signature", "family", "roofline"

_Factors = Sequence[tuple[float, float]]  # logarithms of the roofline's time and of the factor, in order


@dataclasses.dataclass(frozen=True, eq=False)
class KernelTable:
    """Times of kernels, in microseconds, measured on `device`.

    rows  by operator and signature (Rule 1)
    """

    device: str
    rows: Mapping[tuple[str, str], tuple[OpKind, float]]

    @staticmethod
    def of(device: str, measured: Iterable[tuple[OpKind, float]]) -> KernelTable:
        """Make the table of kernels with their times."""
        return KernelTable(device, {key_of(kind): (kind, time_us) for kind, time_us in measured})

    def price(self, kinds: Sequence[OpKind], target: Target) -> list[tuple[float, str]]:
        """Return the time of each of `kinds` on `target` in microseconds, and its source, one of `SOURCES`."""
        factors = self._factors(target)
        return [self._priced(kind, kernel_us(kind, target), factors) for kind in kinds]

    def _priced(
        self, kind: OpKind, estimated_us: float, factors: Mapping[tuple[str, str], _Factors]
    ) -> tuple[float, str]:
        """Return the time of a kernel, and its source, one of `SOURCES`."""
        if not estimated_us:
            return 0.0, BY_ROOFLINE
        row = self.rows.get(key_of(as_aten(kind)))
        if row is not None:
            return row[1], BY_SIGNATURE
        known = factors.get((operator_name(kind), kind.dtype))
        if not known:
            return estimated_us, BY_ROOFLINE
        return estimated_us * math.exp(_between(known, math.log(estimated_us))), BY_FAMILY

    def _factors(self, target: Target) -> dict[tuple[str, str], _Factors]:
        """Return (log of estimated us, log of measured over estimated) of each row, by operator and dtype. (Rule 2)"""
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for kind, time_us in self.rows.values():
            if us := kernel_us(kind, target):
                found.setdefault((operator_name(kind), kind.dtype), []).append((math.log(us), math.log(time_us / us)))
        return {family: sorted(factors) for family, factors in found.items()}


def _between(known: _Factors, at: float) -> float:
    """Interpolate the factors of `known` linearly in logarithms, constant beyond the ends."""
    place = bisect.bisect_left(known, (at, -math.inf))
    if place in (0, len(known)):
        return known[min(place, len(known) - 1)][1]
    (low, one), (high, other) = known[place - 1 : place + 1]
    share = (at - low) / (high - low) if high > low else 0.5
    return one + share * (other - one)


def key_of(kind: OpKind) -> tuple[str, str]:
    """Return operator and signature without floating-point numbers and devices. (Rule 1)"""
    return kind.name, json.dumps(_without_numbers(kind.signature))


def _without_numbers(described: Any) -> Any:
    if isinstance(described, float):
        return 0.0
    if isinstance(described, dict):
        return {name: name == "device" or _without_numbers(value) for name, value in described.items()}
    return [_without_numbers(value) for value in described] if isinstance(described, (list, tuple)) else described


def as_aten(kind: OpKind) -> OpKind:
    """Return `kind`, or the kernel of ATen that it stands for (`cuda_kernels/stand_ins.py`).

    ATen's takes the normalised shape instead of its number of dimensions, an epsilon, and which gradients are needed.
    """
    if not kind.name.startswith("remat."):
        return kind
    args, name = kind.signature[0], kind.name.replace("remat.", "aten.")
    match operator_name(kind), args:
        case "native_layer_norm", [x, dims, weight, bias]:
            made = [x, x["tensor"][0][-dims:], weight, bias, 0.0]
        case "_fused_rms_norm", [x, dims, weight]:
            made = [x, x["tensor"][0][-dims:], weight, 0.0]
        case "native_layer_norm_backward", [g, x, mean, rstd, weight, bias]:
            wanted = [True, weight is not None, bias is not None]
            made = [g, x, _normalised(x, rstd), mean, rstd, weight, bias, wanted]
        case "_fused_rms_norm_backward", [g, x, rstd, weight]:
            made = [g, x, _normalised(x, rstd), rstd, weight, [True, weight is not None]]
        case "_thnn_fused_gru_cell" | "_thnn_fused_gru_cell_backward", made:
            pass
        case _:
            return kind
    return dataclasses.replace(kind, name=name, signature=[made, {}])


def _normalised(x: Any, statistic: Any) -> list[int]:
    """Return the dimensions of `x` over which a statistic has one number."""
    shape, reduced = x["tensor"][0], statistic["tensor"][0]
    return [size for size, rest in zip(shape, reduced, strict=True) if rest != size]
