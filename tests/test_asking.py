"""Arguments of `remat.plan`, and refusals of impossible ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remat
from remat.errors import UsageError
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.planning.budget import parse_budget
from remat.solvers import load
from remat.units import GIB
from tests.toys import TRANSFORMER

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(**asked: Any) -> tuple[remat.Plan, list[Limits]]:
    """A plan of a toy, and the limits that its solver was given."""
    seen: list[Limits] = []

    def solver(problem: Problem, limits: Limits) -> Solution:
        seen.append(limits)
        return load("exact")(problem, limits)

    return remat.plan(TRANSFORMER, **{"budget": "1GiB", "target": "h100-80gb", "solver": solver, **asked}), seen


def test_a_time_limit_is_that_of_the_search() -> None:
    _, seen = plan(time_limit=7.0, limits=Limits(seed=3))
    assert all(limits.time_s is not None and limits.time_s <= 7.0 and limits.seed == 3 for limits in seen)


def test_a_batch_size_stands_in_for_the_workloads() -> None:
    made, _ = plan(batch_size=5)
    assert made.about["batch_size"] == 5


def test_a_budget_is_a_share_of_the_step() -> None:
    made, _ = plan(budget="100%step")
    assert made.budget_bytes == made.without_checkpointing["peak_bytes"]


@pytest.mark.parametrize("function", [remat.plan, remat.compare])
@pytest.mark.parametrize("budget", [0.03, 20.0, True, None, [1]])
def test_a_budget_without_a_unit_is_refused_with_what_it_may_mean(function: Callable[..., Any], budget: Any) -> None:
    with pytest.raises(UsageError, match=r"neither a whole number of bytes nor text with a unit; write budget="):
        function(TRANSFORMER, budget=budget)


def test_a_budget_is_any_whole_number() -> None:
    assert parse_budget(np.int64(20 * GIB), np.int32(GIB), 80 * GIB).limit_bytes == 19 * GIB  # type: ignore[arg-type]


def test_a_headroom_is_held_to_the_same() -> None:
    with pytest.raises(UsageError, match=r"headroom=0\.5 is neither"):
        parse_budget("20GiB", 0.5, 80 * GIB)  # type: ignore[arg-type]
