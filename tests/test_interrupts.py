"""Ctrl-C ends a command, not only the search that runs: solvers swallow it, and answer with their best plan so far."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

import remat
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.planning.request import FormChoice
from remat.solvers import exact
from tests.test_chunking import LANGUAGE
from tests.test_lengths import EACH, TEXT
from tests.test_weights_on_host import FROZEN
from tests.toys import TRANSFORMER

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

FORMS = FormChoice(slices=(2, 4), most_row_slices=0)
LM: Callable[..., dict[str, Any]] = functools.partial(
    dict, workload=LANGUAGE.sized(64), budget="90%step", target="h100-80gb", limits=Limits(workers=1), forms=FORMS
)
FITTED = functools.partial(LM, workload=TRANSFORMER, budget=400_000, target="cpu", exact=True)


@pytest.mark.fast("planned-plan-menu", "planned-compare-forms", "none-plan", "none-plan-lengths")
@pytest.mark.parametrize(
    ("command", "wanted", "at"),
    [
        pytest.param(remat.plan, LM(), 1, id="plan"),
        pytest.param(remat.plan, LM(execution="modules"), 1, id="plan-modules"),
        pytest.param(remat.plan, LM(menu=True), 2, id="plan-menu"),
        pytest.param(remat.plan, LM(workload=TEXT, budget="50%step", target="cpu", lengths=[8, 16]), 1, id="lengths"),
        pytest.param(
            *(remat.plan, LM(workload=TEXT, budget="50%step", target="cpu", lengths=[8, 16], forms=EACH), 2),
            id="plan-lengths",
        ),
        pytest.param(remat.plan, LM(workload=FROZEN.sized(64), offload="weights"), 1, id="plan-weights"),
        pytest.param(remat.compare, LM(), 1, id="compare"),
        pytest.param(remat.compare, LM(), 2, id="compare-forms"),
        pytest.param(remat.compare, LM(offload="activations"), 2, id="compare-offloads"),
        pytest.param(remat.sweep, LM(points=4), 2, id="sweep"),
        pytest.param(remat.fit, FITTED(global_batch=16), 1, id="fit"),
        pytest.param(remat.largest_batch, FITTED(), 1, id="largest-batch"),
        pytest.param(remat.most_tokens, FITTED(), 1, id="most-tokens"),
    ],
)
@pytest.mark.parametrize("has_plan", [True, False], ids=["planned", "none"])
def test_nothing_is_solved_after_an_interrupted_search(
    command: Callable[..., Any], wanted: dict[str, Any], at: int, has_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search `at` is interrupted. The answer says so; without one there is a KeyboardInterrupt."""
    solve, searches, is_inner = exact.solve, 0, False

    def interrupted(problem: Problem, limits: Limits) -> Solution:
        nonlocal searches, is_inner
        if is_inner:  # with a link, a search also solves without it
            return solve(problem, limits)
        searches, is_inner = searches + 1, True
        found = solve(problem, limits) if has_plan or searches < at else Solution("exact", "unknown")
        is_inner = False
        return dataclasses.replace(found, interrupted=searches >= at)

    monkeypatch.setattr(exact, "solve", interrupted)
    try:
        answer = command(**wanted)
    except KeyboardInterrupt:
        assert command is not remat.plan or at == 1  # else a search before gave a plan
    else:
        is_plan = isinstance(answer, remat.Plan)
        assert at > 1 or answer.solver["interrupted"] if is_plan else answer.interrupted
    assert searches == at
