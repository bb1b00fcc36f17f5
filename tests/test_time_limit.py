"""A time limit is that of the whole search: of every plan that is tried, and with the best plan by then."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest

from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region
from remat.execution.modules.search_space import find_module_space
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits, Solution
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import PlanRequest
from remat.recording.fake_step import FakeStep
from remat.solvers import load
from remat.work import worked_s
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


def test_what_is_left_is_never_less_than_nothing_and_no_limit_stays_none() -> None:
    now = time.monotonic()
    left = Limits(time_s=10.0).left(now - 4.0, share=0.5).time_s
    assert left == pytest.approx(3.0, abs=0.1)
    assert Limits(time_s=10.0).left(now - 60.0).time_s == 0.0
    assert Limits().left(now - 60.0).time_s is None


@pytest.fixture(scope="module")
def recorded() -> tuple[FakeStep, Profile]:
    place = find_planning_device("h100-80gb")
    step = fake_step(TEST_SIZES["gpt2"](), place)
    return step, profile_step(step, place)


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize(("execution", "share"), [("eager", 1.0), ("modules", 0.5)])
def test_where_several_plans_may_be_tried_each_gets_half_of_what_is_left(
    recorded: tuple[FakeStep, Profile], execution: str, share: float
) -> None:
    step, profile = recorded
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    modules = tuple(Region(first, end) for first, end, path in find_module_space(graph).modules or () if is_block(path))
    budget = (memory.curve(()).peak_bytes + memory.curve(modules).peak_bytes) // 2
    given: list[float] = []
    left = [100.0]

    def spy(problem: Problem, limits: Limits) -> Solution:
        assert limits.time_s is not None and limits.time_s <= share * left[0]
        given.append(limits.time_s)
        left[0] -= limits.time_s if share < 1 else 0.0
        return load("exact")(problem, Limits())

    limits = Limits(time_s=100)
    plan_profile(profile, Budget(budget, budget), step=step, execution=execution, solver=spy, limits=limits, exact=True)
    assert given and given[0] > 0.9 * share * 100


def is_block(path: str) -> bool:
    return path.split(".")[-1].isdigit()


@pytest.mark.exhaustive
def test_the_first_plan_is_told_before_anything_is_proved(recorded: tuple[FakeStep, Profile]) -> None:
    _, profile = recorded
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 60)
    tight = problem.with_budget(int(0.8 * problem.memory.peak_without_checkpointing))
    told: list[tuple[float, float]] = []
    found = load("exact")(tight, Limits(on_progress=lambda objective, bound: told.append((objective, bound))))
    assert found.fits
    assert told[0][1] == 0.0 and told[0][0] >= found.objective_us
    objectives, bounds = zip(*told, strict=True)
    assert list(objectives) == sorted(objectives, reverse=True) and list(bounds) == sorted(bounds)


def test_without_a_time_limit_a_plan_is_the_same_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time passes a minute between two looks at it; this search has several tables."""
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(TEST_SIZES["resnet50"](), place), place)
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 60)
    tight = problem.with_budget(int(0.75 * problem.memory.peak_without_checkpointing))

    def solved() -> Solution:
        return dataclasses.replace(load("exact")(tight, Limits()), wall_s=0.0)

    here, minutes = solved(), itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * next(minutes))
    assert solved() == here


def test_a_time_limit_that_is_asked_for_is_wall_time() -> None:
    assert PlanRequest.of(time_limit=3.0).limits.now is Limits(time_s=3.0).now is time.monotonic
    assert PlanRequest.of().limits.now is Limits().at_most(3.0).now is worked_s
