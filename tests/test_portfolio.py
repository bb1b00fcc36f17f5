"""The portfolio searches the forms of a step in turn, some again, and says what is proved of all of them."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.form import CAPTURED_FORM, Chunk, Form
from remat.formulation.solution import Limits, Solution
from remat.planning.forms import StepForm
from remat.planning.portfolio import BestPlan, fastest
from remat.planning.request import FormChoice, PlanRequest

CHOICE = FormChoice(worth=0.0)
STEP_US = 1000.0
CLOCK = Limits().clock
Answer = Callable[[Limits], Solution]


def found(objective_us: float, bound_us: float) -> Solution:
    status: Any = "optimal" if objective_us == bound_us else "feasible"
    return Solution("by hand", status, objective_us=objective_us, bound_us=bound_us)


def form(slices: int) -> StepForm:
    profile: Any = None
    return StepForm(Form((Chunk(0, 0, slices),)), profile, 0.0)


class Forms:
    """Forms with a loss in slices, which cost nothing by themselves."""

    fuse, rows_us = False, math.inf

    def __init__(self, slices: tuple[int, ...]):
        self._forms = [form(each) for each in slices]

    def __iter__(self) -> Iterator[StepForm]:
        return iter(self._forms)


class ByHand:
    """A study whose solutions are given: `captured` and `others` answer a search, `late` is raised by a replay."""

    has_forms, device_time_us = True, STEP_US

    def __init__(
        self,
        captured: Answer,
        others: Callable[[int, Limits], Solution],
        *,
        slices: tuple[int, ...] = (2,),
        worth: float = 0.0,
        late: Exception | None = None,
        exceeds: bool = False,
    ):
        profile: Any = None
        self.captured, self.forms = StepForm(CAPTURED_FORM, profile, 0.0), Forms(slices)
        self.request = PlanRequest(forms=dataclasses.replace(CHOICE, worth=worth))
        self.how: Any = types.SimpleNamespace(patience_s=None)
        self._captured, self._others, self._late, self._exceeds = captured, others, late, exceeds
        self.asked: list[tuple[int, float | None, float]] = []  # slices, seconds, of use below

    def on_form(self, form: Form) -> None:
        pass

    def solve(self, at: StepForm, budget_bytes: int, limits: Limits, begin: Any = None) -> Solution:
        slices = max((chunk.slices for chunk in at.form.chunks), default=0)
        self.asked.append((slices, limits.time_s, limits.below_us))
        return self._others(slices, limits) if slices else self._captured(limits)

    def judged(self, at: StepForm, budget_bytes: int, solution: Solution, limits: Limits) -> Solution:
        if self._late is not None and at is not self.captured:
            raise self._late
        return solution

    def refused(self, at: StepForm, budget_bytes: int, limits: Limits) -> Infeasible:
        return Infeasible("as it runs", minimum_budget_bytes=17 if at is self.captured else 18)

    def exceeds_after_backward(self, budget_bytes: int, limits: Limits) -> bool:
        return self._exceeds

    def peak_bytes(self, found: Any) -> int:
        return 1

    def best(self) -> BestPlan:
        study: Any = self
        return fastest(study, 1)


def too_much(limits: Limits) -> Solution:
    raise Infeasible("too much", minimum_budget_bytes=1)


def test_a_form_that_may_be_better_still_is_searched_again_and_the_bound_is_that_of_all() -> None:
    quick = {1: (110.0, 20.0), 2: (100.0, 90.0)}  # objective and bound, by slices
    patient = {1: (110.0, 105.0), 2: (99.0, 97.0)}
    study = ByHand(
        too_much, lambda n, limits: found(*(quick if limits.time_s == CLOCK.first_s else patient)[n]), slices=(1, 2)
    )
    outcome = study.best()
    first, longer = CLOCK.first_s, CLOCK.longer_s
    assert study.asked[1:] == [(1, first, math.inf), (2, first, 110.0), (2, longer, 100.0), (1, longer, 99.0)]
    assert (outcome.found.price_us, outcome.bound_us) == (99.0, 97.0)


def test_no_other_form_is_searched_where_the_optimizer_step_exceeds_the_budget() -> None:
    study = ByHand(too_much, lambda n, limits: found(100.0, 97.0), exceeds=True)
    with pytest.raises(Infeasible):
        study.best()
    assert [slices for slices, _, _ in study.asked] == [0]


@pytest.mark.parametrize(("price_us", "bound_us", "searches"), [(200.0, 199.6, 1), (200.0, 199.4, 2), (40.0, 39.6, 2)])
def test_a_plan_within_a_two_thousandth_of_the_step_of_its_bound_is_not_searched_again(
    price_us: float, bound_us: float, searches: int
) -> None:
    study = ByHand(too_much, lambda n, limits: found(price_us, bound_us))
    assert study.best().bound_us == bound_us
    assert len([slices for slices, _, _ in study.asked if slices]) == searches


def test_a_search_without_a_plan_does_not_suffice() -> None:
    assert not Limits(close_us=1.0).suffices(math.inf, 0.0)
    assert Limits(close_us=1.0).suffices(1000.0, 999.5)


CAPTURED_AGAIN = [
    # price and bound of the step as captured within seconds; and later; price and bound of the outcome
    pytest.param((110.0, 20.0), (98.0, 98.0), (98.0, 98.0), id="may-yet-be-the-one-to-take"),
    pytest.param((115.0, 109.0), (112.0, 109.5), (100.0, 97.0), id="is-not-worth-another-form"),
    pytest.param((98.0, 20.0), (98.0, 98.0), (98.0, 98.0), id="was-the-best-plan-all-along"),
    pytest.param((130.0, 110.0), None, (100.0, 97.0), id="is-proved-to-be-slower"),
    pytest.param((99.0, 99.0), None, (99.0, 99.0), id="is-proved"),
    pytest.param("late", (98.0, 98.0), (98.0, 98.0), id="has-a-plan-after-all"),
    pytest.param("late", "none", (100.0, 97.0), id="has-none"),
    pytest.param("late", "late", (100.0, 0.0), id="may-have-one-that-was-not-found"),
]


@pytest.mark.parametrize(("quick", "patient", "expected"), CAPTURED_AGAIN)
def test_the_step_as_captured_is_searched_again_only_where_it_may_be_the_one_to_take(
    quick: Any, patient: Any, expected: tuple[float, float]
) -> None:
    def captured(limits: Limits) -> Solution:
        price = quick if limits.time_s == CLOCK.first_s else patient
        if price == "late":
            raise NoPlanInTime("none yet")
        return too_much(limits) if price == "none" else found(*price)

    study = ByHand(captured, lambda n, limits: found(100.0, 97.0), worth=0.01)
    outcome = study.best()
    assert (outcome.found.price_us, outcome.bound_us) == expected
    asked = [(time_s, below_us) for slices, time_s, below_us in study.asked if not slices]
    assert asked == [(CLOCK.first_s, math.inf), (None, 110.0)][: 1 if patient is None else 2]


def test_the_step_as_captured_is_searched_in_full_where_no_other_form_keeps_the_budget_as_it_runs() -> None:
    def captured(limits: Limits) -> Solution:
        return found(150.0, 120.0) if limits.time_s == CLOCK.first_s else found(121.0, 120.5)

    study = ByHand(captured, lambda n, limits: found(100.0, 97.0), late=NoPlanInTime("none as it runs"))
    outcome = study.best()
    assert outcome.found.price_us == 121.0 and outcome.bound_us <= 97.0
    assert [below_us for slices, _, below_us in study.asked if not slices] == [math.inf, math.inf]


def test_after_an_interrupt_nothing_is_searched_any_more() -> None:
    def others(slices: int, limits: Limits) -> Solution:
        if slices == 2:
            raise KeyboardInterrupt
        return found(100.0, 97.0)

    study = ByHand(lambda limits: found(150.0, 20.0), others, slices=(1, 2))
    outcome = study.best()
    assert [slices for slices, _, _ in study.asked] == [0, 1, 2]
    assert outcome.found.price_us == 100.0 and outcome.interrupted and outcome.bound_us <= 20.0


def test_an_interrupted_solver_ends_the_search_and_leaves_other_forms_open() -> None:
    study = ByHand(
        lambda limits: dataclasses.replace(found(150.0, 20.0), interrupted=True), lambda n, limits: found(100.0, 97.0)
    )
    outcome = study.best()
    assert [slices for slices, _, _ in study.asked] == [0]
    assert outcome.interrupted and outcome.status == "feasible" and outcome.bound_us == -STEP_US


def test_where_time_is_up_before_every_form_was_searched_the_outcome_says_so() -> None:
    study = ByHand(lambda limits: found(150.0, 20.0), lambda n, limits: found(100.0, 97.0))
    study.request = dataclasses.replace(study.request, limits=Limits(time_s=0.0))
    outcome = study.best()
    assert outcome.found.at.form == CAPTURED_FORM and outcome.cut_short and outcome.status == "feasible"
    assert not ByHand(lambda limits: found(150.0, 20.0), lambda n, limits: found(100.0, 97.0)).best().cut_short


@pytest.mark.parametrize("late", ["captured", "other"])
def test_a_budget_that_no_form_can_keep_is_refused_for_good_though_it_was_not_seen_at_once(late: str) -> None:
    def answer(slices: int, limits: Limits) -> Solution:
        if limits.time_s == CLOCK.first_s and late == ("other" if slices else "captured"):
            raise NoPlanInTime("none yet")
        raise Infeasible("too much", minimum_budget_bytes=8 if slices else 7)

    with pytest.raises(Infeasible) as refused:
        ByHand(lambda limits: answer(0, limits), answer).best()
    assert refused.value.minimum_budget_bytes == 17


def test_a_form_is_taken_only_if_it_saves_enough_and_the_better_one_is_reported() -> None:
    study = ByHand(lambda limits: found(105.0, 105.0), lambda n, limits: found(100.0, 100.0), worth=0.01)
    outcome = study.best()
    assert outcome.found.at is study.captured and outcome.left is not None and outcome.left.price_us == 100.0
    assert (outcome.bound_us, outcome.floor_us) == (105.0, 100.0)
