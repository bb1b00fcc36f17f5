"""A comparison's plans, run on the device at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remat.errors import ValidationFailed
from remat.evaluation.form import form_of
from remat.planning.comparison import Comparison, StrategyRow
from remat.solvers import NO_CHECKPOINTING
from remat.validation.validating import validate

if TYPE_CHECKING:
    from remat.evaluation.plan import Plan
    from remat.validation.report import Report
    from remat.workload.workload import Workload

MEASURED, SIZE = ("peak_bytes", "step_time_us"), ("device", "batch_size", "seq_len")  # of a Report


def measure_plans(
    comparison: Comparison,
    workload: Workload,
    *,
    on_strategy: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Validate every plan that fits, all at one size: the largest at which this device can run each."""
    # The longest step first, which is the likeliest to need a smaller size than the others.
    fitting = [row for row in reversed(comparison.rows) if row.fits]
    reports, failures, interrupted = _validated(fitting, workload, on_strategy or (lambda name: None), on_progress)
    measured = {name: _measured_by(name, report) for name, report in reports.items()}
    where = [{name: getattr(report, name) for name in SIZE} for report in reports.values()]
    return dataclasses.replace(
        comparison,
        rows=tuple(dataclasses.replace(row, measured=measured.get(row.strategy)) for row in comparison.rows),
        measured_on=where[0] if where else None,
        failures=tuple(f"{name}: {what}" for name, what in failures.items()),
        interrupted=comparison.interrupted or interrupted,
    )


def _measured_by(name: str, report: Report) -> dict[str, int]:
    """Return peak and time of the step under the strategy `name`; without a plan, those of the eager baseline."""
    found = report.untouched if name == NO_CHECKPOINTING and report.untouched["fits"] else report.measured
    return {key: found[key] for key in MEASURED}


def _runs_as(plan: Plan) -> tuple[Any, ...]:
    """Return the parts of `plan` that decide how the step runs."""
    return plan.regions, form_of(plan.about)


def _validated(
    rows: Sequence[StrategyRow],
    workload: Workload,
    on_strategy: Callable[[str], None],
    on_progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Report], dict[str, str], bool]:
    """Return (reports by strategy, all at one size; failures by strategy; interrupted). Equal plans run once."""
    reports: dict[str, Report] = {}
    failures: dict[str, str] = {}
    size = workload.batch_size, workload.seq_len
    while row := next((row for row in rows if row.strategy not in reports | failures), None):
        assert row.plan is not None
        on_strategy(row.strategy)
        same = [other.strategy for other in rows if other.plan and _runs_as(other.plan) == _runs_as(row.plan)]
        try:
            report = validate(workload.sized(*size), row.plan, on_progress=on_progress)
        except ValidationFailed as error:
            failures |= dict.fromkeys(same, str(error))
            continue
        except KeyboardInterrupt:
            return reports, failures, True
        if (report.batch_size, report.seq_len) != size:  # too large for this plan: begin again at its size
            size = report.batch_size, report.seq_len
            reports, failures = {}, {}
        reports |= dict.fromkeys(same, report)
        if not report.passed:
            failures |= dict.fromkeys(same, "the measurement contradicts the plan.")
    return reports, failures, False
