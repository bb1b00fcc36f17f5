"""`remat check` says by its exit code whether a step fits, and names the least change where it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import remat as library
from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.integrations import pytest_plugin
from remat.planning.budget import Budget
from remat.planning.checking import Verdict, setting_that_fits
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from tests.cached import cached
from tests.command_line import Remat
from tests.test_chunking import LANGUAGE

WORKLOAD = LANGUAGE.sized(64)
TARGET, EXPANDABLE, MIB = "h100-80gb", "expandable_segments:True", 1 << 20


def checked(budget: str | int, **options: Any) -> Verdict:
    return library.check(WORKLOAD, budget=budget, target=TARGET, **options)


@cached
def needed() -> int:
    """Of the step as it is."""
    return checked("80GiB").needed_bytes


def less() -> int:
    """A budget that only a plan fits."""
    return int(0.9 * needed())


@cached
def without_plan() -> Verdict:
    return checked(less(), headroom=0)


@cached
def planned() -> Plan:
    return library.plan(WORKLOAD, budget=less(), target=TARGET)


@pytest.mark.exhaustive
def test_it_is_what_the_estimate_says() -> None:
    peaks = library.estimate(WORKLOAD, target=TARGET).peaks
    assert needed() == max(peaks.peak_bytes, peaks.eager_bytes or 0, peaks.first_step_bytes)


def test_the_margin_decides_at_the_byte() -> None:
    found = checked(needed(), headroom=1)
    assert (found.limit_bytes, found.fits) == (needed() - 1, False)
    assert f", limit {gib(needed() - 1)} after a margin of {gib(found.margin_bytes)}" in str(found)
    assert checked(needed(), headroom=0).fits


@pytest.mark.exhaustive
def test_where_it_does_not_fit_a_plan_is_named_that_fits() -> None:
    found, plan = without_plan(), planned()
    assert found.added == plan.predicted["overhead"]
    assert f"adds {100 * plan.predicted['overhead']:.1f} %" in str(found)
    assert checked(less(), headroom=0, plan=plan).fits


@pytest.mark.exhaustive
def test_a_plan_that_does_not_fit_is_answered_by_one_for_the_same_limit() -> None:
    options: dict[str, Any] = {"headroom": "1%", "target": TARGET}
    budget = int(0.88 * needed())
    found = library.check(WORKLOAD, budget=budget, plan=planned(), **options)
    assert not found.fits
    assert found.added == library.plan(WORKLOAD, budget=budget, **options).predicted["overhead"]


@pytest.mark.exhaustive
def test_a_plan_is_judged_with_its_offloads_and_in_its_loop() -> None:
    how: dict[str, Any] = {"loop": TrainingLoop(accumulation=4), "exact": True, "offload": "activations"}
    plan = library.plan(WORKLOAD, budget="95%step", target=TARGET, time_limit=3, **how)
    assert plan.offloads
    found = checked("80GiB", headroom=0, plan=plan)
    assert found.needed_bytes == plan.predicted["peak_bytes"] <= plan.budget_bytes


@pytest.mark.exhaustive
def test_where_no_plan_fits_the_refusal_is_named() -> None:
    found = checked(1 << 20, headroom=0)
    assert not found.fits and found.added is None and "below the least possible peak" in str(found)


@pytest.mark.exhaustive
def test_on_a_card_what_the_allocator_reserves_counts() -> None:
    found = checked("auto")
    assert found.fits and found.is_reserved and found.needed_bytes >= needed() and "simulated" in str(found)


@pytest.mark.parametrize("budget", ["auto", "80GiB"])
def test_what_a_replay_needs_beyond_the_evaluator_is_needed_of_the_card_too(budget: str) -> None:
    plan = library.plan(WORKLOAD, budget="80GiB", target=TARGET, execution="modules")
    predicted, more = plan.predicted, 64 * MIB
    higher = dataclasses.replace(plan, predicted={**predicted, "peak_bytes": predicted["peak_bytes"] + more})
    peaks = library.estimate(WORKLOAD, plan=plan, target=TARGET).peaks
    above = max(peaks.first_step_bytes - predicted["peak_bytes"], 0)
    assert checked(budget, plan=higher).needed_bytes == checked(budget, plan=plan).needed_bytes + more - above


@pytest.mark.exhaustive
def test_a_setting_of_the_allocator_is_a_change_where_it_is_enough() -> None:
    found = library.estimate(WORKLOAD, target=TARGET)
    default, expandable = (
        dataclasses.replace(each, reserved_bytes=size, settings=settings)
        for each, size, settings in zip(found.allocator, (110 * MIB, 100 * MIB), ("", EXPANDABLE), strict=True)
    )
    found = dataclasses.replace(found, allocator=(default, expandable))
    more = max(found.peaks.eager_bytes or 0, found.peaks.first_step_bytes) - found.peaks.peak_bytes
    for limit, setting in ((99, None), (101, EXPANDABLE)):
        room = limit * MIB + more
        assert setting_that_fits(found, Budget(room, room, reserved_bytes=room)) == setting
        assert setting_that_fits(found, Budget(room, room)) is None  # where requested bytes count


def test_a_budget_without_a_unit_is_refused() -> None:
    with pytest.raises(UsageError, match="20GiB"):
        checked(20.0)  # type: ignore[arg-type]


# The command


def test_the_exit_code_is_the_verdict(remat: Remat) -> None:
    model = ("--model", "model.py:short", "--target", TARGET)
    assert remat("check", *model).exit_code == 0
    ran = remat("check", *model, "--budget", "60MiB", "--json")
    assert ran.exit_code == 3
    found = json.loads(ran.stdout)
    assert found["fits"] is False and found["needed_bytes"] > found["limit_bytes"] and found["change"]
    assert remat("check", *model, "--budget", "60").exit_code == 2


# The fixture

fits = pytest_plugin.fits


@pytest.mark.exhaustive
def test_a_test_of_a_user_fails_where_training_does_not_fit(fits: Callable[..., Verdict]) -> None:
    assert fits(WORKLOAD, "80GiB", target=TARGET) == dataclasses.replace(checked("80GiB"))
    with pytest.raises(pytest.fail.Exception, match="does not fit"):
        fits(WORKLOAD, 1 << 20, target=TARGET)
    with pytest.raises(UsageError, match="takes a Trainer"):
        fits("gpt2")
