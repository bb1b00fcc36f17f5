"""Report: what a validation found, for people and as a document."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from remat import shown
from remat.units import gib, ms

MOST_NEAR = 6  # parameters shown


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a validation, in bytes and microseconds; `None` for values that were not measured.

    Attributes:
        workload: Name of the workload.
        device: Device of the measurement.
        batch_size: Samples of the measured step.
        seq_len: Tokens of a sample, if there are any.
        measured: peak_bytes (requested), step_time_us, and on CUDA allocated_bytes and reserved_bytes.
        predicted: The same; allocated and reserved bytes are simulated.
        untouched: peak_bytes and step_time_us without a plan: measured if the step `fits`, else predicted.
        limit: Name and bytes of the limit of the measured peak (Rule 3).
        loss_equal: Whether the loss is as promised.
        gradients_equal: Whether every gradient is bitwise equal, or near float64 if listed in `gradients_near`.
        max_gradient_error: Largest absolute difference of a gradient.
        recomputed_nodes: Planned and observed.
        kernel_differences: The first few.
        notes: Sentences about reductions, new predictions, other comparisons and tolerances.
        gradients_near: Parameters with gradients summed in chunks: distance from float64 over the eager baseline's.
        groups_near: Fused groups: distance of their results from float64 over that of their nodes run one by one. Loss
            and gradients are then compared with the fused step without recomputation.
        offloads: Numbers of storages planned, sent to the host and brought back; empty without offloads.

    Example:
        >>> report = remat.validate(workload, plan)
        >>> report.passed, report.measured["peak_bytes"]
    """

    workload: str
    device: str
    batch_size: int
    seq_len: int | None
    measured: dict[str, int]
    predicted: dict[str, int]
    untouched: dict[str, Any]
    limit: tuple[str, int]
    loss_equal: bool
    gradients_equal: bool
    max_gradient_error: float
    recomputed_nodes: dict[str, int | None]
    kernel_differences: tuple[str, ...]
    notes: tuple[str, ...]
    gradients_near: dict[str, float] = dataclasses.field(default_factory=dict)
    groups_near: dict[str, float] = dataclasses.field(default_factory=dict)
    offloads: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def gradients_bitwise(self) -> bool:
        """Whether every gradient is bitwise that of the eager baseline, not merely as close to float64."""
        return self.gradients_equal and not self.gradients_near and not self.groups_near

    @property
    def within_budget(self) -> bool:
        return self.measured["peak_bytes"] <= self.limit[1]

    @property
    def kernels_equal(self) -> bool:
        return not self.kernel_differences

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        nodes = self.recomputed_nodes
        equal = self.loss_equal and self.gradients_equal and self.kernels_equal
        moved = len(set(self.offloads.values())) <= 1
        return equal and nodes["observed"] in (nodes["planned"], None) and moved and self.within_budget

    def to_json(self) -> dict[str, Any]:
        """Return every field but the workload and the limit, and the verdicts."""
        fields = {name: value for name, value in vars(self).items() if name not in ("workload", "limit")}
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        if not math.isfinite(self.max_gradient_error):
            found["max_gradient_error"] = None
        verdicts = ("gradients_bitwise", "within_budget", "kernels_equal", "passed")
        return {**found, **{name: getattr(self, name) for name in verdicts}}

    def _repr_html_(self) -> str:
        name, limit_bytes = self.limit
        nodes = self.recomputed_nodes
        rows = [
            *((row, gib(of["peak_bytes"]), ms(of["step_time_us"])) for row, of in self._measurements),
            (name, gib(limit_bytes), "kept" if self.within_budget else "EXCEEDED"),
            ("loss", _verdict(self.loss_equal), ""),
            ("gradients", _verdict(self.gradients_equal), f"largest error {self.max_gradient_error:.3g}"),
            ("nodes recomputed", str(nodes["observed"]), f"{nodes['planned']} planned"),
        ]
        verdict = "passed" if self.passed else "FAILED"
        title = f"{self.workload} on {self.device}, batch size {self.batch_size}: {verdict}"
        return shown.as_html(title, rows, ("", "peak", "step"), (*self.kernel_differences, *self.notes))

    @property
    def _measurements(self) -> list[tuple[str, dict[str, Any]]]:
        return [("measured", self.measured), ("predicted", self.predicted), ("baseline", self.untouched)]

    def __str__(self) -> str:
        length = f", sequence length {self.seq_len}" if self.seq_len else ""
        fits = "" if self.untouched["fits"] else "  (does not fit: predicted)"
        name, limit_bytes = self.limit
        nodes = self.recomputed_nodes
        lines = [
            f"{self.workload} on {self.device}, batch size {self.batch_size}{length}",
            f"  {'':<10}{'peak':>12}{'step':>12}",
            f"  measured  {_row(self.measured)}",
            f"  predicted {_row(self.predicted)}",
            f"  baseline  {_row(self.untouched)}{fits}",
            *_allocator_rows(self.measured, self.predicted),
            f"  {name:<10}{gib(limit_bytes):>12}{'kept' if self.within_budget else 'EXCEEDED':>12}",
            f"  loss       {_verdict(self.loss_equal)}",
            f"  gradients  {_verdict(self.gradients_equal)}, largest error {self.max_gradient_error:.3g}",
            *_near_rows({**self.gradients_near, **self.groups_near}),
            f"  nodes      {nodes['observed']} recomputed, {nodes['planned']} planned",
            *_offload_rows(self.offloads),
            f"  kernels    {_verdict(self.kernels_equal)}",
            *(f"    {difference}" for difference in self.kernel_differences),
            *(f"  note: {note}" for note in self.notes),
            "passed" if self.passed else "FAILED",
        ]
        return "\n".join(lines)


def _row(values: dict[str, Any]) -> str:
    return f"{gib(values['peak_bytes']):>12}{ms(values['step_time_us']):>12}"


def _allocator_rows(measured: dict[str, int], predicted: dict[str, int]) -> list[str]:
    """Format the caching allocator's bytes, measured and simulated."""
    return [
        f"  {name:<10}{gib(measured[key]):>12} measured, {gib(predicted[key])} simulated"
        for name in ("allocated", "reserved")
        if (key := f"{name}_bytes") in measured and key in predicted
    ]


def _near_rows(ratios: dict[str, float]) -> list[str]:
    """Format the few ratios that are largest."""
    furthest = sorted(ratios.items(), key=lambda pair: -pair[1])
    rows = [f"  near       {name}: float64 error ratio {ratio:.3f}" for name, ratio in furthest[:MOST_NEAR]]
    if len(furthest) > MOST_NEAR:
        rows.append(f"  near       {len(furthest) - MOST_NEAR} more, none larger")
    return rows


def _offload_rows(counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    return [f"  offloads   {counts['out']} to the host, {counts['back']} back, {counts['planned']} planned"]


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"
