"""A menu has the plan that was made and the other answers to its budget, each as a run of its own would find it."""

from __future__ import annotations

import dataclasses

import pytest

import remat
from remat.evaluation.alternative import Alternative, in_two_lines
from remat.evaluation.plan import Plan
from remat.formulation.solution import Limits
from remat.planning.request import FormChoice
from remat.report.material import Material
from remat.report.page import page_of, rendered
from tests import toys
from tests.cached import cached
from tests.command_line import Remat
from tests.test_chunking import LANGUAGE

WORKLOAD = LANGUAGE.sized(64)
TARGET = "h100-80gb"
WANTED = {"target": TARGET, "limits": Limits(workers=1), "forms": FormChoice(slices=(2,), most_row_slices=0, worth=0.0)}


@cached
def budget() -> int:
    """Less than the step takes, and enough without slices."""
    with pytest.raises(remat.Infeasible) as refused:
        remat.plan(WORKLOAD, budget=1, numerics="bitwise", **WANTED)  # type: ignore[arg-type]
    assert refused.value.minimum_budget_bytes is not None
    return int(1.1 * refused.value.minimum_budget_bytes)


@cached
def planned() -> Plan:
    return remat.plan(WORKLOAD, budget=budget(), menu=True, **WANTED)  # type: ignore[arg-type]


def row_of(plan: Plan, numerics: str, offload: str | None) -> Alternative:
    return next(row for row in plan.alternatives if (row.numerics, row.offload) == (numerics, offload))


@pytest.mark.exhaustive
def test_it_has_every_answer_once_and_marks_the_one_taken() -> None:
    rows = planned().alternatives
    assert [(row.numerics, row.offload) for row in rows] == [
        (numerics, offload) for numerics in ("bitwise", "sums", "rounding") for offload in (None, "activations")
    ]
    (taken,) = [row for row in rows if row.taken]
    assert (taken.numerics, taken.offload, taken.overhead) == ("sums", None, planned().predicted["overhead"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("numerics", "offload"), [("bitwise", None), ("sums", "activations")])
def test_a_row_is_what_its_options_give_in_a_run_of_its_own(numerics: str, offload: str | None) -> None:
    alone = remat.plan(WORKLOAD, budget=budget(), numerics=numerics, offload=offload, **WANTED)  # type: ignore[arg-type]
    row = row_of(planned(), numerics, offload)
    assert row.overhead == pytest.approx(alone.predicted["overhead"], abs=1e-3)
    assert row.peak_bytes is not None and row.peak_bytes <= budget()


@pytest.mark.exhaustive
def test_rows_with_a_link_and_rows_with_fused_kernels_are_no_slower() -> None:
    plan = planned()
    for numerics in ("bitwise", "sums", "rounding"):
        with_link, without = (row_of(plan, numerics, offload).overhead for offload in ("activations", None))
        assert with_link is not None and without is not None and with_link <= without + 1e-3
    rounding, sums = (row_of(plan, numerics, None).overhead for numerics in ("rounding", "sums"))
    assert rounding is not None and sums is not None and rounding <= sums


@pytest.mark.exhaustive
def test_an_answer_that_cannot_be_had_says_why() -> None:
    plan = remat.plan(toys.TRANSFORMER, budget="1TiB", target=TARGET, execution="modules", menu=True)
    assert "groups are fused in eager execution" in row_of(plan, "rounding", None).why
    assert all(row.offload is None for row in plan.alternatives)


def test_the_command_shows_it_with_the_options_that_take_each_row(remat: Remat) -> None:
    ran = remat("plan", "--model", "model.py:short", "--target", TARGET, "--budget", "76MiB", "--menu")
    assert ran.exit_code == 0
    lines = [line for line in ran.stdout.splitlines() if "--numerics" in line or "+ --offload" in line]
    assert len(lines) == 6 and lines[2].startswith(">  --numerics sums ")
    assert Plan.load("short.plan.json").about["alternatives"] == [
        dataclasses.asdict(row) for row in Plan.load("short.plan.json").alternatives
    ]


@pytest.mark.exhaustive
def test_a_report_has_it() -> None:
    page = rendered(page_of(Material(planned())))
    assert all(f">{row.options}" in page for row in planned().alternatives)
    assert page.count("(this plan)") == 1 and "Other answers to this budget" in page


def test_a_log_has_it_in_two_lines() -> None:
    rows = planned().alternatives
    others = [row for row in rows if not row.taken and row.overhead is not None]
    first, second = in_two_lines(rows)
    assert all(f"{100 * (row.overhead or 0):+.1f} %" in first for row in others)
    assert first.count("%") == len(others) == 5 and "numerics=" in second
    assert in_two_lines([row for row in rows if row.taken]) == []
