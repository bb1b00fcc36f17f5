"""A sweep is the whole trade-off between memory and time, from the least feasible budget to no recomputation.

It never turns back, and its plots are files that open anywhere.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from remat.cli.plots import sweep_plot as plotting
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import RematError, UsageError
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits, Solution
from remat.offloading.link import Link
from remat.planning.planner import plan
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.planning.strategies import LIGER_LIKE, LOSS_WHOLE, NO_OFFLOAD
from remat.planning.sweep import Sweep, sweep
from remat.solvers import HEURISTICS, exact
from remat.solvers.least_peak import least_peak
from tests import toys
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.small_models import TEST_SIZES
from tests.studies import changing, traced
from tests.test_chunking import LANGUAGE

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

LIMITS = Limits(workers=1)
POINTS = 8


@pytest.fixture(scope="module")
def profile() -> Profile:
    place = find_planning_device("h100-80gb")
    return profile_step(fake_step(toys.TRANSFORMER.sized(64), place), place)


@pytest.fixture(scope="module")
def problem(profile: Profile) -> Problem:
    return Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)


@pytest.fixture(scope="module")
def swept(profile: Profile) -> tuple[Sweep, list[tuple[str, int, int]]]:
    """A sweep, and what it said of its progress."""
    seen: list[tuple[str, int, int]] = []
    return traced(profile, points=POINTS, limits=LIMITS, on_point=lambda *about: seen.append(about)), seen


@pytest.fixture(scope="module")
def found(swept: tuple[Sweep, Any]) -> Sweep:
    return swept[0]


# The curve


def test_it_begins_at_the_least_feasible_budget_and_ends_without_recomputation(found: Sweep, problem: Problem) -> None:
    most = problem.memory.peak_without_checkpointing
    least = least_peak(problem, LIMITS).peak_bytes
    first, last = found.points[0], found.points[-1]
    assert first.budget_bytes == first.peak_bytes == least
    assert (last.budget_bytes, last.peak_bytes, last.recompute_time_us, last.regions) == (most, most, 0, 0)
    assert found.without_checkpointing == {"peak_bytes": most, "step_time_us": problem.step_time_us}


def test_more_budget_never_costs_more(found: Sweep) -> None:
    assert len(found.points) == POINTS
    for smaller, larger in itertools.pairwise(found.points):
        assert smaller.budget_bytes < larger.budget_bytes
        assert smaller.recompute_time_us >= larger.recompute_time_us
        assert (smaller.bound_us or 0) >= (larger.bound_us or 0)


def test_every_point_keeps_its_budget_and_is_proved(found: Sweep) -> None:
    for point in found.points:
        assert point.peak_bytes <= point.budget_bytes
        assert point.status == "optimal" and point.gap is not None and point.gap <= LIMITS.gap
        assert point.overhead == pytest.approx(
            point.recompute_time_us / found.without_checkpointing["step_time_us"], abs=1e-12
        )


def test_half_the_points_are_evenly_apart_and_the_others_where_least_is_known(profile: Profile) -> None:
    budgets: list[int] = []

    def watched(problem: Problem, limits: Limits) -> Solution:
        budgets.append(problem.budget_bytes)
        return exact.solve(problem, limits)

    traced(profile, points=POINTS, limits=LIMITS, strategies=[], solver=watched)
    budgets.insert(POINTS // 2 - 1, profile.peak_without_checkpointing)  # which needs no search
    evenly, others = budgets[: POINTS // 2], budgets[POINTS // 2 :]
    steps = [b - a for a, b in itertools.pairwise(evenly)]
    assert max(steps) - min(steps) <= 1
    assert all(evenly[0] < budget < evenly[-1] for budget in others)


# Beside the curve


def test_strategies_show_their_distinct_plans(found: Sweep, problem: Problem) -> None:
    plans = found.by_strategy()
    assert set(plans) <= set(HEURISTICS)
    assert [point.recompute_time_us for point in plans["none"]] == [0]
    for points in plans.values():
        peaks = [point.peak_bytes for point in points]
        assert peaks == sorted(set(peaks))
        assert all(point.peak_bytes <= point.budget_bytes and point.bound_us is None for point in points)
    blocks = problem.memory.curve(toys.every_block(problem.graph)).peak_bytes
    assert [point.peak_bytes for point in plans["every-block"]] == [blocks]


def test_no_strategy_is_better_than_what_the_curve_proves(found: Sweep) -> None:
    budgets = [point.budget_bytes for point in found.points]
    for point in found.others:
        larger = found.points[min(bisect.bisect_left(budgets, point.peak_bytes), len(budgets) - 1)]
        assert larger.bound_us is not None and point.recompute_time_us >= larger.bound_us - 0.01


def test_a_curve_of_modules_lies_above_that_of_nodes(profile: Profile, found: Sweep) -> None:
    """Its plans are among those of nodes."""
    modules = traced(profile, points=4, limits=LIMITS, strategies=["every-block"], execution="modules")
    assert modules.execution == "modules" and found.execution == "eager"
    assert all(point.saved == 0 for point in (*modules.points, *modules.others))
    assert modules.points[0].budget_bytes >= found.points[0].budget_bytes
    assert modules.points[-1].recompute_time_us == 0
    for point in modules.points:
        below = [other for other in found.points if other.budget_bytes >= point.budget_bytes]
        assert all(other.bound_us is not None and other.bound_us <= point.recompute_time_us for other in below)


def test_it_says_how_far_it_is(swept: tuple[Sweep, list[tuple[str, int, int]]]) -> None:
    _, seen = swept
    assert seen[:POINTS] == [("exact", number, POINTS) for number in range(1, POINTS + 1)]
    assert {name for name, _, _ in seen[POINTS:]} == set(HEURISTICS)


def test_it_is_one_document(found: Sweep) -> None:
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (data["model"], data["target"], data["costs"]) == ("toy-transformer", "h100-80gb", "estimated")
    assert len(data["points"]) == POINTS and len(data["others"]) == len(found.others)
    assert {"strategy", "budget_bytes", "peak_bytes", "recompute_time_us", "overhead", "gap", "regions"} <= set(
        data["points"][0]
    )


def test_an_unknown_strategy_is_refused(profile: Profile) -> None:
    with pytest.raises(UsageError, match="there is no strategy 'all-of-it'"):
        traced(profile, strategies=["all-of-it"])


# Searches that end early, or wrong


def test_a_worse_plan_than_that_of_a_smaller_budget_is_not_shown(profile: Profile) -> None:
    solutions: list[Solution] = []

    def first_again(solution: Solution, number: int) -> Solution:
        """The plan of the first of four even budgets, in place of that of the third."""
        solutions.append(solution)
        return dataclasses.replace(solutions[0], status="feasible", bound_us=0.0) if number == 3 else solution

    solver = changing(exact.solve, first_again)
    found = traced(profile, points=POINTS, limits=LIMITS, strategies=[], solver=solver)
    assert solutions[1].objective_us < solutions[0].objective_us
    least, most = found.points[0].budget_bytes, found.points[-1].budget_bytes
    third = next(point for point in found.points if point.budget_bytes >= least + (most - least) * 2 // 3)
    assert third.recompute_time_us <= solutions[1].objective_us + 0.01
    assert third.peak_bytes <= third.budget_bytes
    times = [point.recompute_time_us for point in found.points]
    assert times == sorted(times, reverse=True)


def test_without_a_plan_in_time_the_neighbours_stands_in(profile: Profile) -> None:
    def none_in_time(solution: Solution, number: int) -> Solution:
        return Solution("slow", "unknown", wall_s=1.0) if number in (1, 2) else solution

    found = traced(profile, points=4, limits=LIMITS, strategies=[], solver=changing(exact.solve, none_in_time))
    first = found.points[0]
    assert (first.status, first.peak_bytes) == ("feasible", first.budget_bytes)
    assert first.bound_us == max(point.bound_us or 0 for point in found.points[1:])  # what a larger budget proves
    assert all(
        smaller.recompute_time_us >= larger.recompute_time_us for smaller, larger in itertools.pairwise(found.points)
    )


def test_a_solver_that_denies_what_there_is_is_wrong(profile: Profile) -> None:
    liar = changing(exact.solve, lambda solution, number: Solution("liar", "infeasible"))
    with pytest.raises(RematError, match="solver liar claims that no plan keeps"):
        traced(profile, points=4, limits=LIMITS, solver=liar)


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "in-the-solution"])
def test_an_interrupt_keeps_the_points_so_far(profile: Profile, raised: bool) -> None:
    def interrupted(solution: Solution, number: int) -> Solution:
        if number < 3:
            return solution
        if raised:
            raise KeyboardInterrupt
        return dataclasses.replace(solution, interrupted=True)

    found = traced(profile, points=8, limits=LIMITS, solver=changing(exact.solve, interrupted))
    assert found.interrupted and len(found.points) == (2 if raised else 3) and not found.others


# Plots


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_a_plot_is_a_file_by_its_ending(found: Sweep, tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    plotting.draw(found, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert begins in data[:40] and len(data) > 10_000


def test_what_is_not_proved_is_called_so(found: Sweep, tmp_path: Path) -> None:
    points = tuple(dataclasses.replace(point, status="feasible") for point in found.points)
    plotting.draw(dataclasses.replace(found, points=points), tmp_path / "a.svg")
    assert "not proved optimal" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("name", ["a.pdf", "a", "png", "a.html"])
def test_another_ending_is_refused_with_those_that_can_be_drawn(name: str) -> None:
    with pytest.raises(UsageError, match=r"a file that ends in \.png or \.svg"):
        plotting.require(Path(name))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as missing:
        plotting.require(Path("a.svg"))
    assert missing.value.name == "matplotlib"


@pytest.mark.exhaustive
def test_a_curve_with_offloads_lies_below_the_one_without(profile: Profile) -> None:
    link = Link(0.02 * profile.peak_without_checkpointing / profile.costs.step_time_us(profile.graph), 1 << 40)
    found = traced(profile, points=3, limits=Limits(workers=1, time_s=2), strategies=[], link=link)
    without = found.by_strategy()[NO_OFFLOAD]
    assert all(point.gap is not None for point in without)
    assert any(point.host_bytes for point in found.points) and not any(point.host_bytes for point in without)
    assert found.points[0].budget_bytes <= min(point.peak_bytes for point in without)
    for point in found.points:
        assert point.peak_bytes <= point.budget_bytes
        assert point.bound_us is not None and point.bound_us <= point.recompute_time_us + 1e-6
        below = [other.recompute_time_us for other in without if other.peak_bytes <= point.budget_bytes]
        assert point.recompute_time_us <= min(below, default=float("inf")) + 1e-6


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_curve_with_weights_on_the_host_is_refused_because_their_number_is_one_budgets(budget: str | None) -> None:
    with pytest.raises(UsageError, match="leave weights out of `offload`"):
        sweep(toys.TRANSFORMER, target="h100-80gb", offload="weights", budget=budget)


# Other forms of the step


@pytest.fixture(scope="module")
def in_slices() -> tuple[Sweep, Sweep, Profile]:
    """A language model's sweep, that with its loss whole, and its profile; of a toy, slices pay by memory alone."""
    place = find_planning_device("h100-80gb")
    step = fake_step(LANGUAGE.sized(64), place)
    profile = profile_step(step, place)
    choice = FormChoice(slices=(1, 4), most_row_slices=0)
    found = traced(profile, points=6, limits=LIMITS, strategies=["every-block"], step=step, forms=choice)
    whole = traced(profile, points=6, limits=LIMITS, strategies=["every-block"], step=step, exact=True)
    return found, whole, profile


def test_a_curve_is_the_least_of_all_forms(in_slices: tuple[Sweep, Sweep, Profile]) -> None:
    found, whole, _ = in_slices
    step_us = found.without_checkpointing["step_time_us"]
    assert found.forms[0] == "unchanged" and len(found.forms) == 3
    assert found.points[0].budget_bytes < whole.points[0].budget_bytes
    assert any(point.slices for point in found.points) and not any(point.slices for point in whole.points)
    for point in found.points:
        added_us = point.recompute_time_us + point.form_time_us
        assert point.peak_bytes <= point.budget_bytes
        assert point.step_time_us == pytest.approx(step_us + added_us)
        assert point.overhead == pytest.approx(added_us / step_us)
        assert point.bound_us is not None and point.bound_us <= added_us + 1e-6
        assert bool(point.slices) == bool(point.form_time_us)
        assert all(
            point.overhead <= other.overhead + 1e-9 for other in whole.points if other.peak_bytes <= point.budget_bytes
        )


def test_more_budget_never_costs_more_in_any_form(in_slices: tuple[Sweep, Sweep, Profile]) -> None:
    found, _, _ = in_slices
    for smaller, larger in itertools.pairwise(found.points):
        assert smaller.overhead >= larger.overhead
        assert (smaller.bound_us or 0) >= (larger.bound_us or 0)


def test_beside_a_curve_of_forms_stands_the_step_as_captured(in_slices: tuple[Sweep, Sweep, Profile]) -> None:
    found, whole, _ = in_slices
    captured = found.by_strategy()[LOSS_WHOLE]
    assert not any(point.slices for point in captured)
    assert min(point.peak_bytes for point in captured) == whole.points[0].peak_bytes
    assert all(point.gap is not None and 0 <= (point.bound_us or 0) <= point.recompute_time_us for point in captured)
    (by_hand,) = found.by_strategy()[LIGER_LIKE]
    assert by_hand.slices
    larger = next((point for point in found.points if point.budget_bytes >= by_hand.peak_bytes), found.points[-1])
    assert by_hand.recompute_time_us + by_hand.form_time_us >= (larger.bound_us or 0) - 0.01
    assert set(found.by_strategy()) == {LOSS_WHOLE, LIGER_LIKE, "every-block"}
    assert LOSS_WHOLE not in whole.by_strategy()


def test_a_profile_out_of_a_file_is_swept_as_it_was_captured(in_slices: tuple[Sweep, Sweep, Profile]) -> None:
    _, whole, profile = in_slices
    alone = traced(profile, points=3, limits=LIMITS, strategies=[])
    assert alone.forms == ("unchanged",)
    assert alone.points[0].budget_bytes == whole.points[0].budget_bytes


def test_groups_are_fused_where_asked_and_only_where_they_can_be(profile: Profile) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        traced(profile, fuse=True, exact=True)
    with pytest.raises(UsageError, match="plan from the model"):
        traced(profile, fuse=True)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_beside_a_curve_of_forms_the_step_as_captured_is_fastest_at_its_least_peak_too() -> None:
    """The plan of least peak recomputes 1.4 times as long there."""
    workload = TEST_SIZES["gpt2"]()
    wanted: Any = {"target": "h100-80gb", "limits": LIMITS}
    swept = sweep(workload, points=3, strategies=[], forms=FormChoice(), **wanted)
    found = swept.by_strategy()[LOSS_WHOLE][0]
    made = plan(workload, budget=found.peak_bytes, numerics="bitwise", **wanted)
    assert found.recompute_time_us == pytest.approx(made.predicted["recompute_time_us"], rel=0.01)
