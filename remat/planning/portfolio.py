"""Portfolio: the best plan of a step under one budget, among all its forms. One search serves every command.

Rule 1  A plan's price is the time that its step takes beyond the captured one: recomputation, waits for copies, and
        what its form takes longer (smaller kernels, gradients added up) or, where groups are fused, shorter.
Rule 2  A form that alone costs as much as the best plan so far is not searched; its own time bounds its plans. No
        other form is looked at where nothing needs to be recomputed, unless groups may be fused, and none where the
        optimizer step exceeds the budget and is the least peak of the captured step.
Rule 3  Every form is searched for `Clock.first_s`. The best one, a few whose bounds say that they may be better still,
        and the captured step if it may yet be taken, are searched again for longer. A search ends where its bound
        says that the best plan so far stands, or that no other is faster by more than `CLOSE` of the step.
Rule 4  Another form is taken if it saves `FormChoice.worth` of the step, or if nothing else fits. One that saves less
        is reported, and the bound is then that of plans for the captured step.
Rule 5  Plans are compared as the evaluator sees them, and the one to be taken is replayed. Where the replay exceeds the
        budget and the plan found in its place is slower, all are compared again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

from remat.errors import Infeasible, NoPlanInTime
from remat.formulation.solution import Limits, Status, gap_of
from remat.planning.forms import StepForm
from remat.planning.search import solve_within
from remat.planning.study import Begin, FoundPlan, Refusal, Study

CLOSE = 0.0005  # of the step: so little is not worth a longer search


@dataclasses.dataclass(frozen=True)
class BestPlan:
    """The plan to take, with the proof about it.

    peak_bytes  by the replay if the plan was judged, else by the evaluator
    bound_us    the least price of any plan of the forms that the proof is about
    gap         (price - bound) / (price - price of the cheapest form without recomputation)
    floor_us    the least price of any plan of any form
    cheapest_us  price of the cheapest form without recomputation, as far as is known
    captured    the best plan of the captured step, if another form is taken and it has one
    left        the best plan of another form that saves too little to be taken (Rule 4)
    cut_short   whether there was no time to search every form
    """

    found: FoundPlan
    peak_bytes: int
    bound_us: float
    gap: float
    status: Status
    floor_us: float
    cheapest_us: float = 0.0
    captured: FoundPlan | None = None
    left: FoundPlan | None = None
    interrupted: bool = False
    cut_short: bool = False


def fastest(
    study: Study,
    budget_bytes: int,
    limits: Limits | None = None,
    *,
    judged: bool = True,
    worth: float | None = None,
) -> BestPlan:
    """Find the plan of least price within `budget_bytes`.

    limits  `time_s` is for the whole search; by default those of the request
    judged  let the replay judge the plan that is taken
    worth   replaces that of the request's `FormChoice`

    Raises Infeasible if no form keeps the budget, NoPlanInTime if no plan was found.
    """
    limits = (limits or study.request.limits).by_default(study.how.patience_s)
    limits = dataclasses.replace(limits, close_us=CLOSE * study.device_time_us)
    if not study.has_forms:
        return _only_captured(study, budget_bytes, limits, judged=judged)
    worth = study.request.forms.worth if worth is None else worth
    return _FormSearch(study, budget_bytes, limits, judged=judged, worth=worth).run()


def _only_captured(study: Study, budget_bytes: int, limits: Limits, *, judged: bool) -> BestPlan:
    """Plan a step that has no other form."""
    at, judge = study.captured, study.judge(study.captured) if judged else None
    if judge is None:
        solution = study.solve(at, budget_bytes, limits)
    else:
        solution = solve_within(study.problem(at, budget_bytes), study.how, study.request.solve, judge, limits)
    found = FoundPlan(at, solution, limits, is_judged=judge is not None)
    peak_bytes = study.peak_bytes(found)
    bound_us = found.bound_us
    return BestPlan(
        found, peak_bytes, bound_us, solution.gap, solution.status, bound_us, interrupted=solution.interrupted
    )


class _FormSearch:
    """The search among the forms of a step. (Rules 2 to 5)

    bounds_us  of forms of which no plan is known        _extras_us  of all forms that were recorded
    """

    def __init__(self, study: Study, budget_bytes: int, limits: Limits, *, judged: bool, worth: float):
        assert study.forms is not None
        self._study, self._forms, self._budget_bytes, self._limits = study, study.forms, budget_bytes, limits
        self._judges, self._worth, self._started = judged, worth, limits.now()
        self.captured: FoundPlan | None = None
        self._looked_below_us = -math.inf  # for the step as captured, the second time
        self.others: list[FoundPlan] = []
        self.bounds_us: list[float] = []
        self._extras_us: list[float] = []
        self._refused: dict[StepForm, Refusal] = {}  # the last of each
        self.is_cut_short = self.is_interrupted = False
        self.has_dropped = False  # a plan of another form that exceeds the budget as it runs

    def run(self) -> BestPlan:
        self.captured = self._searched(self._study.captured, self._limits.clock.first_s)
        with self._keeping_plans():
            if not self._study.exceeds_after_backward(self._budget_bytes, self._limits):
                self._search_others()
        best = self._settled()
        if best is None:
            raise self._refusal()
        return self._outcome(best)

    @contextlib.contextmanager
    def _keeping_plans(self) -> Iterator[None]:
        """Let Ctrl-C end a search whose plans so far are an answer."""
        try:
            yield
        except KeyboardInterrupt:
            if not self._plans:
                raise
            self.is_interrupted = True

    # Searches

    def _searched(
        self, at: StepForm, time_s: float | None, begin: Begin | None = None, below_us: float = math.inf
    ) -> FoundPlan | None:
        """Find the plan of a form; None if there is none or none was found.

        time_s    None for all the time that is left
        below_us  the plan must recompute for less than this to be useful
        """
        limits = self._limits.left(self._started, 0.5)
        limits = limits if time_s is None else limits.at_most(time_s)
        limits = dataclasses.replace(limits, below_us=below_us)
        try:
            solution = self._study.solve(at, self._budget_bytes, limits, begin)
        except (Infeasible, NoPlanInTime) as error:
            self._refused[at] = error
            return None
        self.is_interrupted = self.is_interrupted or solution.interrupted
        return FoundPlan(at, solution, limits)

    @property
    def _is_over(self) -> bool:
        """Whether the time for all of it is up, or Ctrl-C was pressed."""
        return self.is_interrupted or self._limits.left(self._started).time_s == 0

    def _search_others(self) -> None:
        """Search other forms that may cost less than the captured one, and the best ones again for longer."""
        if self.is_interrupted or (self._price_to_beat_us <= 0 and not self._forms.fuse):
            return
        self._search_each(self._forms)
        least_us = min([0.0, *self._extras_us]) + self._forms.rows_us
        if least_us < self._price_to_beat_us:
            self._search_each(self._forms.with_rows())
        elif self._forms.rows_us:
            self.bounds_us.append(least_us)
        self._search_again()
        self._search_captured_again()

    def _search_each(self, forms: Iterable[StepForm]) -> None:
        clock = self._limits.clock
        for at in forms:
            self._extras_us.append(at.extra_us)
            if self._is_over:
                self.is_cut_short = True
                self.bounds_us.append(min(at.extra_us, 0.0))
                break
            if at.extra_us >= self._price_to_beat_us:
                self.bounds_us.append(at.extra_us)
                continue
            begin = (self.others[-1].at, self.others[-1].solution) if self.others else None
            found = self._searched_below(at, clock.first_s, begin)
            if found is None and isinstance(self._refused[at], NoPlanInTime):
                found = self._searched_below(at, clock.longer_s, begin)
                if found is None and isinstance(self._refused[at], NoPlanInTime):
                    self.bounds_us.append(at.extra_us)
            if found is not None:
                self.others.append(found)

    def _searched_below(self, at: StepForm, time_s: float, begin: Begin | None = None) -> FoundPlan | None:
        return self._searched(at, time_s, begin, self._price_to_beat_us - at.extra_us)

    def _search_again(self) -> None:
        """Search the best of the other forms, and those that may be better still, for longer. (Rule 3)"""
        best, choice = self._best_other(), self._study.request.forms
        if best is None:
            return
        self._again(best)
        price_us = self._price_to_beat_us
        open_us = choice.open * max(price_us - self._cheapest_us, 0.0)
        others = [each for each in self.others if each is not best and each.bound_us < price_us - open_us]
        for each in sorted(others, key=lambda each: each.bound_us)[: choice.most_again]:
            self._again(each)

    def _again(self, known: FoundPlan) -> None:
        if known.is_proved or self._is_over:
            return
        self._study.on_form(known.at.form)
        if (found := self._searched_below(known.at, self._limits.clock.longer_s)) is not None:
            known.solution, known.limits = found.solution, found.limits

    def _search_captured_again(self) -> None:
        """Search the captured step again, unless it is proved not to be the one to take. (Rule 4)"""
        known, best, at, below_us = self.captured, self._best_other(), self._study.captured, math.inf
        if best is not None:
            below_us = best.price_us + self._worth_us
        if known is None and not isinstance(self._refused.get(at), NoPlanInTime):
            return
        if known is not None and (known.is_proved or known.bound_us >= below_us):
            return
        if below_us > self._looked_below_us and not self._is_over:
            self._looked_below_us = below_us
            self._study.on_form(at.form)
            self.captured = self._searched(at, None, below_us=below_us) or known
        if self.captured is None and isinstance(self._refused[at], NoPlanInTime):
            self.bounds_us.append(0.0)

    # The plan to take

    def _settled(self) -> FoundPlan | None:
        """Return the plan to take, as the replay accepts it. (Rule 5)"""
        while (best := self._best()) is not None and self._judges and not best.is_judged:
            try:
                solution = self._study.judged(best.at, self._budget_bytes, best.solution, best.limits)
                bound_us = max(solution.bound_us, best.solution.bound_us)
                best.solution = dataclasses.replace(solution, bound_us=min(bound_us, solution.objective_us))
                best.is_judged = True
                self.is_interrupted = self.is_interrupted or solution.interrupted
            except (Infeasible, NoPlanInTime) as error:
                self._drop(best, error)
            if best is not self.captured:
                with self._keeping_plans():
                    self._search_captured_again()  # its search was too short if the best plan takes longer as it runs
        return best

    def _drop(self, found: FoundPlan, error: Refusal) -> None:
        self._refused[found.at] = error
        self.bounds_us.append(found.bound_us)
        if found is self.captured:
            self.captured = None
        else:
            self.others.remove(found)
            self.has_dropped = True

    @property
    def _worth_us(self) -> float:
        """The time that another form must save to be taken. (Rule 4)"""
        return self._worth * self._study.device_time_us

    @property
    def _plans(self) -> list[FoundPlan]:
        return self.others if self.captured is None else [self.captured, *self.others]

    @property
    def _price_to_beat_us(self) -> float:
        return min((each.price_us for each in self._plans), default=math.inf)

    @property
    def _cheapest_us(self) -> float:
        """Price of the cheapest form without recomputation, as far as is known."""
        return min([0.0, *self.bounds_us, *(each.at.extra_us for each in self.others)])

    def _best_other(self) -> FoundPlan | None:
        return min(self.others, key=lambda each: each.price_us, default=None)

    def _best(self) -> FoundPlan | None:
        """Return the best plan known. (Rule 4)"""
        captured, best = self.captured, self._best_other()
        if best is None or captured is None:
            return best or captured
        return captured if captured.price_us - best.price_us < self._worth_us else best

    # Its proof

    def _outcome(self, best: FoundPlan) -> BestPlan:
        if self.is_interrupted:
            self.bounds_us.append(-self._study.device_time_us)  # a form that was not searched still has a price
        peak_bytes = self._study.peak_bytes(best)
        floor_us = min([best.price_us, *self.bounds_us, *(each.bound_us for each in self._plans)])
        other, captured, left = self._best_other(), self.captured, None
        if best is captured:
            captured, left = None, other if other is not None and other.price_us < best.price_us else None
            if not (self.has_dropped or self.is_cut_short or self.is_interrupted):
                gap, status = best.solution.gap, best.solution.status
                return BestPlan(best, peak_bytes, best.bound_us, gap, status, floor_us, self._cheapest_us, left=left)
        gap = gap_of(best.price_us, floor_us, self._cheapest_us)
        status = "optimal" if gap <= self._limits.gap else "feasible"
        ended = self.is_interrupted, self.is_cut_short
        return BestPlan(best, peak_bytes, floor_us, gap, status, floor_us, self._cheapest_us, captured, left, *ended)

    def _refusal(self) -> Refusal:
        refused = list(self._refused.values())
        if self.is_cut_short:
            return NoPlanInTime(
                f"{min(refused, key=_least_budget)} There was no time for all forms of the step, such as more "
                "chunks of its loss; raise the time limit (`time_limit=`)."
            )
        late = [error for error in refused if isinstance(error, NoPlanInTime)]
        if late or not self._judges:
            return min(late or refused, key=_least_budget)  # final only if every form refuses
        at, _ = min(self._refused.items(), key=lambda item: _least_budget(item[1]))
        return self._study.refused(at, self._budget_bytes, self._limits)


def _least_budget(error: Refusal) -> float:
    return getattr(error, "minimum_budget_bytes", None) or math.inf
