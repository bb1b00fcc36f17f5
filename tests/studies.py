"""Studies of what tests recorded: comparisons, curves and sizes of a batch, with a link and a budget of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.evaluation.form import Form
from remat.evaluation.plan import Plan
from remat.execution.executions import load
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space
from remat.formulation.solution import Limits, Solution
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.comparison import Comparison, compare_study
from remat.planning.fit import BatchFit, Sizing, fitted
from remat.planning.forms import StepForms
from remat.planning.micro_batches import MicroBatches
from remat.planning.planner import plan_study
from remat.planning.request import FormChoice, PlanRequest, RequestKeywords
from remat.planning.search import OnReplay
from remat.planning.study import Study
from remat.planning.sweep import Sweep, sweep_study
from remat.recording.fake_step import FakeStep
from remat.solvers import Solver
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload


def study_of(
    profile: Profile,
    step: FakeStep | None = None,
    *,
    limit: Budget | None = None,
    link: Link | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Study:
    return Study(profile, PlanRequest.of(**wanted), step, budget=limit, link=link)


def plan_profile(
    profile: Profile,
    limit: Budget,
    *,
    step: FakeStep | None = None,
    link: Link | None = None,
    space: Space | None = None,
    on_replay: OnReplay | None = None,
    on_form: Callable[[Form], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Plan:
    """Plan a profile; the other arguments are those of a Study and of a `PlanRequest`."""
    request = PlanRequest.of(**wanted)
    return plan_study(
        Study(profile, request, step, budget=limit, link=link, space=space, on_replay=on_replay, on_form=on_form)
    )


def compared(
    profile: Profile,
    limit: Budget,
    *,
    strategies: Sequence[str] | None = None,
    step: FakeStep | None = None,
    link: Link | None = None,
    on_strategy: Callable[[str, int, int], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Comparison:
    study = study_of(profile, step, limit=limit, link=link, **wanted)
    return compare_study(study, strategies=strategies, on_strategy=on_strategy)


def traced(
    profile: Profile,
    *,
    points: int = 20,
    strategies: Sequence[str] | None = None,
    step: FakeStep | None = None,
    link: Link | None = None,
    on_point: Callable[[str, int, int], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Sweep:
    study = study_of(profile, step, link=link, **wanted)
    return sweep_study(study, points=points, strategies=strategies, on_point=on_point)


def sizing(
    workload: Workload,
    place: PlanningDevice,
    limit: Budget,
    loop: TrainingLoop | None = None,
    *,
    link: Link | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Sizing:
    return Sizing(workload, place, limit, loop or TrainingLoop(), PlanRequest.of(**wanted), link)


def micro_batches(
    workload: Workload,
    place: PlanningDevice,
    limit: Budget,
    loop: TrainingLoop | None = None,
    **wanted: Unpack[RequestKeywords],
) -> MicroBatches:
    return sizing(workload, place, limit, loop, **wanted).micro_batches()


def fit_all(
    workload: Workload,
    place: PlanningDevice,
    limit: Budget,
    global_batch: int,
    *,
    link: Link | None = None,
    **wanted: Unpack[RequestKeywords],
) -> BatchFit:
    return fitted(sizing(workload, place, limit, link=link, **wanted), global_batch)


def forms_of(step: FakeStep, profile: Profile, choice: FormChoice | None = None) -> StepForms:
    """The forms of a step that runs eagerly."""
    return StepForms(load("eager"), step, profile, choice)


def changing(solve: Solver, change: Callable[[Solution, int], Solution]) -> Solver:
    """A solver whose solutions are changed: `change(solution, number)` of the number-th search, from 1."""
    searches = 0

    def changed(problem: Problem, limits: Limits) -> Solution:
        nonlocal searches
        searches += 1
        return change(solve(problem, limits), searches)

    return changed
