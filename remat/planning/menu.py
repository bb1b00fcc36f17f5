"""Menu: answers to one budget that differ in numerics and in offloading.

The plan that a request gets is one row of the menu. The others say what it costs to have every gradient bitwise, and
what fused kernels or activation offloading would gain, with the options that take them. Rows are the evaluator's: only
a plan that is taken is replayed. The study's memory is shared, so rows beside the first cost little where they need no
other form of the step recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from remat.errors import Infeasible, NoPlanInTime, RematError, UsageError
from remat.evaluation.alternative import ALTERNATIVES, Alternative
from remat.evaluation.form import form_of
from remat.evaluation.plan import Plan
from remat.offloading.link import Link
from remat.planning.assemble import predict
from remat.planning.links import ACTIVATIONS
from remat.planning.portfolio import BestPlan, fastest
from remat.planning.request import NUMERICS
from remat.planning.study import Study


def with_alternatives(
    plan: Plan, study: Study, link: Link | None = None, on_row: Callable[[str], None] | None = None
) -> Plan:
    """Add to `plan` the menu of alternatives, in `about["alternatives"]`; Ctrl-C leaves rows out.

    link    to the host, where activations may be offloaded
    on_row  called with the options of each row before it is found
    """
    rows: list[Alternative] = []
    with contextlib.suppress(KeyboardInterrupt):
        rows.extend(_rows(plan, study, link, on_row or (lambda options: None)))
    found = [dataclasses.asdict(row) for row in rows]
    return dataclasses.replace(plan, about={**plan.about, ALTERNATIVES: found})


def _rows(plan: Plan, study: Study, link: Link | None, on_row: Callable[[str], None]) -> Iterator[Alternative]:
    own = study.request.numerics, study.link is not None
    linked = study if study.link is not None else None
    if linked is None and link is not None:
        linked = study.over(link)
    for numerics in NUMERICS:
        for each in (study.without_link, linked):
            if each is None:
                continue
            row = Alternative(numerics, ACTIVATIONS if each.link is not None else None)
            if own == (numerics, each.link is not None):
                yield _of_plan(row, plan)
                continue
            if plan.solver.get("interrupted"):
                continue
            on_row(row.options)
            yield _found(row, each)


def _of_plan(row: Alternative, plan: Plan) -> Alternative:
    predicted = plan.predicted
    return dataclasses.replace(
        row,
        form=str(form_of(plan.about)),
        peak_bytes=predicted["peak_bytes"],
        step_time_us=predicted["step_time_us"],
        overhead=predicted["overhead"],
        gap=plan.solver["gap"],
        taken=True,
    )


def _found(row: Alternative, study: Study) -> Alternative:
    budget = study.budget
    assert budget is not None
    try:
        outcome: BestPlan = fastest(study.allowing(row.numerics), budget.limit_bytes, judged=False)
    except Infeasible:
        return dataclasses.replace(row, why="does not fit")
    except NoPlanInTime:
        return dataclasses.replace(row, why="no plan found in time")
    except UsageError as error:
        return dataclasses.replace(row, why=str(error).partition(";")[0].rstrip("."))
    except RematError as error:  # a form that cannot be recorded
        return dataclasses.replace(row, why=str(error).partition(";")[0])
    if outcome.interrupted:
        raise KeyboardInterrupt
    predicted: Any = predict(study, outcome.found)
    return dataclasses.replace(
        row,
        form=str(outcome.found.at.form),
        peak_bytes=outcome.peak_bytes,
        step_time_us=predicted["step_time_us"],
        overhead=predicted["overhead"],
        gap=outcome.gap,
    )
