"""Study: one step under one request, its forms, and all that was found of them.

A study owns a recorded step. It poses the problem of each form once, solves it under any budget, and remembers each
solution: under another budget a search begins from the best plan known, and is not begun where bounds already meet. So
plans for one budget, a curve over many, and a plan that must also fit what the allocator reserves share one memory.

Solutions here are the evaluator's. `judged` gives the one that the replay accepts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime, RematError
from remat.evaluation.form import CAPTURED_FORM, Form
from remat.evaluation.plan import Region, from_refs, to_refs
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space
from remat.formulation.solution import NONE_NEEDED, TRACING_ALONE, Limits, Solution
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.forms import StepForm, StepForms
from remat.planning.links import require_offloads
from remat.planning.refusals import infeasible, not_found
from remat.planning.request import Numerics, PlanRequest
from remat.planning.search import Judge, OnReplay, as_it_runs, least_as_it_runs, refused, search, solve_within
from remat.recording.fake_step import FakeStep
from remat.solvers import Solver
from remat.solvers.least_peak import LeastPeak, least_peak

Refusal = Infeasible | NoPlanInTime
Begin = tuple[StepForm, Solution]  # a plan of another form to begin a search from


@dataclasses.dataclass(eq=False)
class FoundPlan:
    """The best plan known of one form, and the limits of the search that found it.

    is_judged  the replay has accepted it
    """

    at: StepForm
    solution: Solution
    limits: Limits
    is_judged: bool = False

    @property
    def price_us(self) -> float:
        """Time of the step beyond the captured one without a plan."""
        return self.solution.objective_us + self.at.extra_us

    @property
    def bound_us(self) -> float:
        """The least price of any plan of this form."""
        return self.solution.bound_us + self.at.extra_us

    @property
    def is_proved(self) -> bool:
        """Whether no further search is worth its time."""
        return self.solution.status == "optimal" or self.limits.suffices(
            self.solution.objective_us, self.solution.bound_us
        )


@dataclasses.dataclass(frozen=True)
class _KnownSolution:
    """A solution of one form that was found under a budget, and the peak of its plan."""

    budget_bytes: int
    solution: Solution
    peak_bytes: int


class Study:
    """A step, its forms, and the solutions found so far.

    profile     of the captured step                  step   records other forms, and replays plans
    budget      of the request, in bytes; None if the caller tries budgets itself
    link        to the host's memory, where activations may be offloaded
    space       of plans for the captured step, by default the execution's
    replays     whether plans are replayed if there is a step
    profile_in  returns the profile of the step in a form; by default `step` is recorded
    on_form     called with a form before it is recorded or searched again
    on_replay   see `search.Judge`
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest | None = None,
        step: FakeStep | None = None,
        *,
        budget: Budget | None = None,
        link: Link | None = None,
        space: Space | None = None,
        replays: bool = True,
        profile_in: Callable[[Form], Profile] | None = None,
        on_form: Callable[[Form], None] | None = None,
        on_replay: OnReplay | None = None,
    ):
        self.request = request or PlanRequest()
        self.how, self.step, self.link, self.budget = self.request.how, step, link, budget
        loop = None if step is None else step.loop
        self.request.require_of(loop, has_model=step is not None)
        if link is not None:
            require_offloads(self.how, loop)
        self.how.require_step(profile.graph)
        self.profile = profile
        self.captured = StepForm(CAPTURED_FORM, self.profile, 0.0)
        self.on_form = on_form or (lambda form: None)
        self._space, self._replays, self._on_replay = space, replays, on_replay
        self._profile_in = profile_in
        self.forms = self._forms()
        self._linked: Study | None = None  # the same study with its link
        self._posed: dict[StepForm, Problem] = {}
        self._known: dict[StepForm, list[_KnownSolution]] = {}
        self._judges: dict[StepForm, Judge] = {}
        self._least: dict[StepForm, LeastPeak] = {}

    def _forms(self) -> StepForms | None:
        """Return the forms that the request allows beside the captured one."""
        cuts, fuse = self.request.cuts, self.request.fuses
        if self.step is None or not (cuts or fuse):
            return None
        return StepForms(
            self.how,
            self.step,
            self.profile,
            self.request.forms,
            slices=cuts,
            fuse=fuse,
            profile_in=self._profile_in,
            on_form=self.on_form,
        )

    @property
    def has_forms(self) -> bool:
        """Whether the step may run in another form than captured."""
        return self.forms is not None and self.forms.are_any

    @property
    def device_time_us(self) -> float:
        """Time that the device needs for the captured step, without checkpointing."""
        return self.profile.costs.step_time_us(self.profile.graph)

    @property
    def step_time_us(self) -> float:
        """Time of the captured step without checkpointing: the device's or the host's, whichever is longer."""
        return max(self.device_time_us, self.host_time_us(self.captured))

    def host_time_us(self, at: StepForm, regions: Sequence[Region] = (), micro_batches: int = 1) -> float:
        """Return the time to launch a form's kernels from Python; 0 if unknown."""
        return at.profile.host_time_us(self.problem(at, 0).memory, regions, micro_batches)

    def _variant(self, **changes: Any) -> Study:
        """Return a copy with other attributes, of which no variant is known yet."""
        other = copy.copy(self)
        vars(other).update(changes)
        for name in ("with_losses_whole", "without_link"):
            vars(other).pop(name, None)
        return other

    def within(self, budget: Budget) -> Study:
        """Return the study under another budget; both share the plans they know."""
        return self._variant(budget=budget)

    def allowing(self, numerics: Numerics) -> Study:
        """Return the study with other `numerics`; both share the plans they know.

        Raises UsageError if the step does not support them.
        """
        if numerics == self.request.numerics:
            return self
        other = self._variant(request=dataclasses.replace(self.request, numerics=numerics))
        other.request.require_of(None if self.step is None else self.step.loop, has_model=self.step is not None)
        other.forms = other._forms()
        return other

    def over(self, link: Link | None) -> Study:
        """Return the study with another link, and without known plans, since other plans are allowed."""
        if link is None:
            return self.without_link
        return self._variant(link=link, _linked=None, _posed={}, _known={}, _judges={}, _least={})

    @functools.cached_property
    def with_losses_whole(self) -> Study:
        """The same study, and the same memory, for plans that leave losses and MLPs whole."""
        forms = self.forms
        return self._variant(forms=forms.with_losses_whole if forms is not None and forms.fuse else None)

    @functools.cached_property
    def without_link(self) -> Study:
        """The same study for plans that leave all activations on the device."""
        if self.link is None:
            return self
        return self._variant(link=None, _linked=self, _known={}, _judges={}, _least={})

    def problem(self, at: StepForm, budget_bytes: int) -> Problem:
        """Return the problem of the step in a form, posed once."""
        if self._linked is not None:
            return self._linked.problem(at, budget_bytes).without_link()
        if at not in self._posed:
            space = self._space if at is self.captured and self._space else None
            space = space or self.how.space(at.profile.graph, self.request.depth)
            self._posed[at] = self.how.pose(at.profile, space, budget_bytes, self.link, like=self._like(at))
        return self._posed[at].with_budget(budget_bytes)

    def _like(self, at: StepForm) -> Problem | None:
        """Return the problem of a form that differs in the number of slices only, or else of the captured step."""
        alike = (each for known, each in self._posed.items() if known.form.in_one_slice == at.form.in_one_slice)
        return next(alike, self._posed.get(self.captured))

    def exceeds_after_backward(self, budget_bytes: int, limits: Limits) -> bool:
        """Return whether the optimizer step exceeds a budget and is the least peak: every form needs as much."""
        peak_bytes = self.problem(self.captured, 0).optimizer_peak_bytes
        return peak_bytes > budget_bytes and self.least(self.captured, limits).peak_bytes == peak_bytes

    def without_checkpointing(self) -> dict[str, Any]:
        """Return peak and time of the step without a plan."""
        peak_bytes = self.problem(self.captured, 0).memory.peak_without_checkpointing
        return {"peak_bytes": peak_bytes, "step_time_us": self.step_time_us}

    def peak_bytes(self, found: FoundPlan) -> int:
        """Return the peak of a plan: the replay's if it was replayed, else the evaluator's."""
        solution = found.solution
        if solution.replayed_bytes is not None:
            return solution.replayed_bytes
        memory = self.problem(found.at, 0).memory.offloading(solution.offloads)
        return memory.curve(solution.regions).peak_bytes

    def judge(self, at: StepForm) -> Judge | None:
        """Return the judge of plans for a form; None if there is nothing to replay."""
        if self.step is None or not self._replays:
            return None
        if at not in self._judges:
            self._judges[at] = Judge(self.how, self.step, at.profile, self._on_replay)
        return self._judges[at]

    def least(self, at: StepForm, limits: Limits) -> LeastPeak:
        """Find the least peak of the step in a form once (`solvers.least_peak`), and remember its plan."""
        known = self._least.get(at)
        if known is None or not known.proved:
            self._least[at] = least_peak(self.problem(at, 0), limits)
            self.know_plan(at, self._least[at].regions)
        return self._least[at]

    def least_known_bytes(self, at: StepForm) -> int:
        """Return the least peak of the plans that are known of a form."""
        return min(each.peak_bytes for each in self._known[at])

    def know_plan(self, at: StepForm, regions: tuple[Region, ...]) -> None:
        """Remember a plan without a proof, offloading all that the link carries."""
        problem = self.problem(at, 0)
        peak_bytes = problem.curve(regions).peak_bytes
        problem = problem.with_budget(peak_bytes)
        offloads, price_us = problem.offloads_of(regions), problem.objective_us(regions)
        self.remember(at, peak_bytes, Solution("least-peak", "feasible", regions, price_us, offloads=offloads))

    def solve(
        self, at: StepForm, budget_bytes: int, limits: Limits, begin: Begin | None = None, solver: Solver | None = None
    ) -> Solution:
        """Solve the step in a form within `budget_bytes`, by the evaluator.

        begin  a plan of another form to begin from

        Raises Infeasible, or NoPlanInTime.
        """
        problem = self.problem(at, budget_bytes)
        if (trivial := self.how.trivial(problem, None)) is not None:
            return trivial
        best = self.best_known(at, budget_bytes)
        if best is None and at in self._least and self._least[at].bound_bytes > budget_bytes:
            raise infeasible(problem, self._least[at])
        if best is not None and (limits.suffices(best.objective_us, best.bound_us) or best.bound_us >= limits.below_us):
            return best
        start = best.regions if best is not None else self._transferred(begin, problem)
        limits = dataclasses.replace(limits, start=start)
        started = limits.now()
        found = search(problem, self.how, solver or self.request.solve, None, limits, may_need_none=True)
        spent_s = limits.now() - started
        if found.fits:
            self.remember(at, budget_bytes, found)
        elif best is None:
            raise self._refusal(at, problem, found, limits, spent_s)
        elif found.status == "infeasible":
            raise RematError(f"solver {found.solver} claims that no plan keeps {budget_bytes} bytes, but one does.")
        else:  # the bound of a search without a plan holds
            self.remember(at, budget_bytes, dataclasses.replace(best, bound_us=max(found.bound_us, best.bound_us)))
        merged = self.best_known(at, budget_bytes)
        assert merged is not None
        return dataclasses.replace(merged, interrupted=found.interrupted, wall_s=found.wall_s)

    def judged(self, at: StepForm, budget_bytes: int, solution: Solution, limits: Limits) -> Solution:
        """Return `solution`, or another plan, that keeps the budget as it runs. Raises Infeasible, or NoPlanInTime."""
        judge, problem = self.judge(at), self.problem(at, budget_bytes)
        if judge is None:
            return solution
        found = as_it_runs(problem, solution, judge)
        if (found.replayed_bytes or 0) <= budget_bytes:
            return found
        return solve_within(problem, self.how, self.request.solve, judge, dataclasses.replace(limits, start=None))

    def best_known(self, at: StepForm, budget_bytes: int) -> Solution | None:
        """Return the best known plan within a budget, with the best known bound; None if no plan is known."""
        known = self._known.get(at, [])
        fitting = [each.solution for each in known if each.peak_bytes <= budget_bytes]
        if not fitting:
            return None
        best, bound_us = min(fitting, key=lambda each: each.objective_us), self.bound_us(at, budget_bytes)
        best = dataclasses.replace(best, status="feasible", bound_us=min(bound_us, best.objective_us))
        return dataclasses.replace(best, status="optimal") if best.gap <= Limits().gap else best

    def bound_us(self, at: StepForm, budget_bytes: int) -> float:
        """Return the recompute time that every plan within `budget_bytes` needs; bounds of larger budgets hold too."""
        bounds = (each.solution.bound_us for each in self._known.get(at, ()) if each.budget_bytes >= budget_bytes)
        return max(bounds, default=0.0)

    def _refusal(self, at: StepForm, problem: Problem, found: Solution, limits: Limits, spent_s: float) -> Refusal:
        """Make the error of a search without a plan. Raises KeyboardInterrupt if the user ended it."""
        if found.interrupted:
            raise KeyboardInterrupt
        least = self.least(at, limits)
        if found.status == "infeasible" or least.bound_bytes > problem.budget_bytes:
            return infeasible(problem, least)

        def enough() -> int:
            return least_as_it_runs(problem, least, self.judge(at)).replayed_bytes or 0

        return not_found(problem, limits, spent_s, enough)

    def refused(self, at: StepForm, budget_bytes: int, limits: Limits) -> Infeasible:
        """Refuse a budget that no plan of a form keeps, with the least one that a plan keeps as it runs."""
        return refused(self.problem(at, budget_bytes), self.least(at, limits), self.judge(at))

    def remember(self, at: StepForm, budget_bytes: int, found: Solution) -> None:
        """Remember a plan that keeps `budget_bytes`, and its bound, which holds for all such plans."""
        if found.solver in (NONE_NEEDED, TRACING_ALONE):
            return  # whether a plan is needed depends on each budget
        peak_bytes = self.problem(at, budget_bytes).memory.offloading(found.offloads).curve(found.regions).peak_bytes
        self._known.setdefault(at, []).append(_KnownSolution(budget_bytes, found, peak_bytes))

    def _transferred(self, begin: Begin | None, problem: Problem) -> tuple[Region, ...] | None:
        """Translate a plan of another form into this form; None if that is impossible."""
        if begin is None:
            return None
        other, solution = begin
        graph = other.profile.graph
        try:
            start = from_refs(problem.graph, to_refs(graph, solution.regions, problem.space.modules))
            problem.runs_of(start)
        except KeyError:
            return None
        return start
