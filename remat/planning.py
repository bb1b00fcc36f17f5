"""Plan: from a workload and a budget to a Plan that the replay has accepted.

This is the sentence of the package in code: capture and profile (`profiling.py`), pose (`problem.py`), solve (a
function passed in, `solvers/exact.py` by default), check (`check.py`), replay (`replay.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat import check
from remat.allocator import context_bytes
from remat.breakdown import at_peak
from remat.errors import Infeasible, NoPlanInTime, UsageError
from remat.fragmentation import CONTEXT_BYTES, assumed_settings
from remat.graph import CALLED_MODULES, Graph
from remat.loop import Loop
from remat.memory import Memory
from remat.module_replay import judge_of
from remat.module_space import pose, space_of
from remat.plans import Plan, Region, RegionKind, place
from remat.problem import Problem
from remat.profiling import Place, Profile, fake_step, find_place, profile_step
from remat.record import FakeStep
from remat.reserved import reserving_at_most, with_footprints
from remat.solution import Limits, Solution
from remat.solvers import Solver, load
from remat.space import DEPTH, Space
from remat.units import gib, parse_bytes
from remat.workload import Workload

if TYPE_CHECKING:
    from remat.solvers.least_peak import LeastPeak

AUTO_HEADROOM = "10%"
MOST_TRIES = 5
MODULES_PATIENCE_S = 15.0
NONE_NEEDED, TRACING_ALONE = "none needed", "tracing alone"  # solvers of plans without regions


@dataclasses.dataclass(frozen=True)
class Budget:
    """limit_bytes is what plans must keep: the budget given, less the headroom.

    reserved_bytes  what the caching allocator may reserve, simulated; None: whatever it does
    """

    given_bytes: int
    limit_bytes: int
    reserved_bytes: int | None = None


def parse_budget(
    budget: str | int, headroom: str | int | None, memory_bytes: int, usable_bytes: int | None = None
) -> Budget:
    """The budget meant by `budget`: bytes, text with a unit, `90%` or `auto` of the target's memory.

    headroom      subtracted first: bytes, text with a unit or a percentage of the budget; None is 0, and 10 % for an
                  `auto` without `usable_bytes`
    usable_bytes  of the memory what an allocator can reserve, where it can be simulated: then `auto` means that what it
                  reserves fits

    Raises UsageError for text without a unit, and where nothing is left.
    """
    if budget == "auto":
        given = memory_bytes if usable_bytes is None else usable_bytes
        headroom = AUTO_HEADROOM if headroom is None and usable_bytes is None else headroom
    elif isinstance(budget, int):
        given = budget
    else:
        given = parse_bytes(budget, what="budget", whole_bytes=memory_bytes)
    spare = headroom or 0
    if isinstance(spare, str):
        spare = parse_bytes(spare, what="headroom", whole_bytes=given)
    if given - spare <= 0:
        raise UsageError(f"a budget of {gib(given)} with a headroom of {gib(spare)} leaves nothing; raise the budget.")
    return Budget(given, given - spare, given - spare if budget == "auto" and usable_bytes is not None else None)


def usable_bytes(place: Place) -> int | None:
    """What the caching allocator of a CUDA card can reserve: its memory less the context; None without CUDA."""
    if place.target.device != "cuda":
        return None
    return place.target.memory_bytes - (CONTEXT_BYTES if place.device is None else context_bytes(place.device))


def plan(
    workload: Workload,
    *,
    budget: str | int,
    target: str = "auto",
    headroom: str | int | None = None,
    loop: Loop | None = None,
    limits: Limits | None = None,
    solver: Solver | None = None,
    regions: RegionKind = "nodes",
    depth: int = DEPTH,
    compiler: str | None = None,
    allocator: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """The plan with the least recomputation whose peak over the whole step stays within `budget`.

    budget, headroom  see `parse_budget`              target  see `profiling.find_place`
    loop              what training does around forward and backward: accumulation, clipping, shards, ...
    solver            any function of `remat.solvers`; the exact one by default
    regions           "modules" for regions that are whole modules, as sharding with FSDP2 needs them
    depth             how deep regions of nodes may nest: 1 for a plan that `torch.compile` can keep
    compiler          "inductor" or "aot_eager" for a plan whose peak is that of the step compiled so, on this machine
    allocator         settings of PYTORCH_CUDA_ALLOC_CONF to predict for; those of the environment by default
    on_progress       called with (done, total) while costs are measured

    Raises Infeasible with the least budget that would do, NoPlanInTime, CaptureError, UsageError.
    """
    found = find_place(target)
    simulated = usable_bytes(found) if budget == "auto" and compiler is None else None
    limit = parse_budget(budget, headroom, found.target.memory_bytes, simulated)
    if compiler is not None:
        from remat.planning_compiled import plan_compiled, require_plannable

        require_plannable(compiler, found, loop, regions)
    step = fake_step(workload, found, loop=loop, compiled=compiler is not None)
    profile = profile_step(step, found, on_progress=on_progress)
    if compiler is not None:
        return plan_compiled(profile, limit, step, compiler=compiler, limits=limits, solver=solver)
    space = space_of(profile.graph, regions, depth)
    return plan_profile(profile, limit, limits=limits, solver=solver, step=step, space=space, allocator=allocator)


def plan_profile(
    profile: Profile,
    budget: Budget,
    *,
    limits: Limits | None = None,
    solver: Solver | None = None,
    step: FakeStep | None = None,
    space: Space | None = None,
    allocator: str | None = None,
) -> Plan:
    """`plan` from a profile. With `step`, the plan is also replayed; without, the evaluator alone judges it.

    allocator  settings of PYTORCH_CUDA_ALLOC_CONF to predict for; those of the environment by default
    """
    settings = assumed_settings(profile.target, allocator)

    def within(limit_bytes: int) -> Plan:
        made = _plan_requested(profile, limit_bytes, limits, solver, step, space)
        return made if settings is None else with_footprints(made, profile, settings)

    made = within(budget.limit_bytes)
    if settings is None or budget.reserved_bytes is None:
        return made
    return reserving_at_most(budget.reserved_bytes, made, within)


def _plan_requested(
    profile: Profile,
    limit_bytes: int,
    limits: Limits | None,
    solver: Solver | None,
    step: FakeStep | None,
    space: Space | None,
) -> Plan:
    """The plan whose requested bytes stay within `limit_bytes`."""
    space = space or space_of(profile.graph, "nodes")
    problem = pose(profile.graph, profile.costs, space, limit_bytes)
    limits, solver = limits or Limits(), solver or load("exact")
    if space.kind == "modules":  # a proof may take long (see the decision note)
        limits = dataclasses.replace(limits, time_s=limits.time_s or MODULES_PATIENCE_S)
        if step is not None:
            return _plan_modules(problem, limits, solver, step, profile)
    solution = solve_within(problem, limits, solver, step, profile)
    return assemble(problem, solution, profile, replayed=step is not None)


def _plan_modules(problem: Problem, limits: Limits, solver: Solver, step: FakeStep, profile: Profile) -> Plan:
    """The plan for regions that are modules, whose peak is that of the replay.

    The evaluator speaks of the traced graph. An untraced forward may need more, with or without a plan: its local
    variables hold on to what the graph has let go. By as much as the replay is over, the evaluator is asked for less.
    """
    asked, first = problem, None
    for _ in range(MOST_TRIES):
        try:
            solution = solve_within(asked, limits, solver, None, profile)
        except Infeasible as error:
            if (more := problem.budget_bytes - asked.budget_bytes) == 0 or error.minimum_budget_bytes is None:
                raise
            raise Infeasible(
                f"budget {gib(problem.budget_bytes)} is too small: untraced, the modules need {gib(more)} more than "
                f"their graph, for which {error}",
                error.minimum_budget_bytes + more,
                error.breakdown,
            ) from None
        first = first or solution
        peak = replay_peak(step, problem, solution.regions, profile)
        if peak <= problem.budget_bytes:
            status = solution.status if solution is first else "feasible"
            bound_us = min(first.bound_us, solution.objective_us)
            judged = dataclasses.replace(solution, status=status, bound_us=bound_us, replayed_bytes=peak)
            return assemble(problem, judged, profile, replayed=True)
        more = peak - problem.memory.curve(solution.regions).peak_bytes
        excess = peak - problem.budget_bytes
        asked = problem.with_budget(min(problem.budget_bytes - more, asked.budget_bytes - excess))
    raise NoPlanInTime(
        f"no plan of modules within {gib(problem.budget_bytes)} was found in {MOST_TRIES} tries; raise the budget."
    )


def solve_within(
    problem: Problem,
    limits: Limits,
    solver: Solver,
    step: FakeStep | None,
    profile: Profile,
    limit_bytes: int | None = None,
) -> Solution:
    """A solution that the evaluator accepts, and the replay within `limit_bytes`, by default the problem's budget.

    Raises Infeasible or NoPlanInTime where there is none.
    """
    trivial = without_regions(problem)
    if trivial is not None and trivial.solver == NONE_NEEDED:
        return trivial
    solution = trivial or solver(problem, limits)
    if solution.status == "infeasible":
        raise infeasible(problem, limits)
    if solution.status == "unknown":
        raise NoPlanInTime(
            f"no plan within {gib(problem.budget_bytes)} was found in {solution.wall_s:.0f} s; raise --time-limit."
        )
    check.require(problem, solution)
    if step is None:
        return solution
    limit_bytes = problem.budget_bytes if limit_bytes is None else limit_bytes
    peak = replay_peak(step, problem, solution.regions, profile)
    excess = peak - limit_bytes
    if excess <= 0:
        return dataclasses.replace(solution, replayed_bytes=peak)
    # The evaluator is wrong about this plan, which is a bug: ask for that much less. The bound of the
    # original problem still holds, because the plans of the smaller budget are among those of the original one.
    tighter = solve_within(
        problem.with_budget(problem.budget_bytes - excess), limits, solver, step, profile, limit_bytes
    )
    return dataclasses.replace(tighter, status="feasible", bound_us=solution.bound_us)


def without_regions(problem: Problem) -> Solution | None:
    """The plan of no regions, where it keeps the budget, as a solution: nothing is recomputed, so nothing is better.

    Where the step keeps the budget without a plan, none is needed. Where it does so only traced, as under a plan, the
    plan must be applied; regions that are modules are not traced.
    """
    if problem.memory.peak_without_checkpointing <= problem.budget_bytes:
        return Solution(NONE_NEEDED, "optimal")
    if problem.space.kind == "nodes" and problem.memory.peak_without_regions <= problem.budget_bytes:
        return Solution(TRACING_ALONE, "optimal")
    return None


def replay_peak(step: FakeStep, problem: Problem, regions: tuple[Region, ...], profile: Profile) -> int:
    """Peak bytes of the rewritten step, by the executor itself.

    A replay has every state whole. Of one rank's share it tells by how much the evaluator was wrong for the whole.
    """
    alive = judge_of(problem.space.kind)(
        step,
        place(problem.graph, regions, problem.space.modules),
        alignment_bytes=profile.target.alignment_bytes,
        workspace_of=profile.workspace_of(),
    )
    peak = int(alive.max()) + problem.graph.unseen_bytes
    if profile.whole is None:
        return peak
    whole = Memory(profile.whole, profile.costs.workspace_per_op(profile.whole)).curve(regions).peak_bytes
    return problem.memory.curve(regions).peak_bytes + max(peak - whole, 0)


def infeasible(problem: Problem, limits: Limits) -> Infeasible:
    """The refusal, with the least budget that would do and what takes it."""
    from remat.solvers.least_peak import least_peak

    least = least_peak(problem, limits)
    parts = at_peak(problem.memory, least.regions)
    curve = problem.memory.curve(least.regions)
    listing = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1]))
    return Infeasible(
        f"budget {gib(problem.budget_bytes)} is below the least possible peak{_at_most(least)} {gib(least.peak_bytes)} "
        f"({where(problem.graph, int(curve.op[curve.peak_at]))}): {listing}. "
        "Raise the budget, reduce the batch, or shrink the largest item.",
        minimum_budget_bytes=least.peak_bytes,
        breakdown=parts,
    )


def _at_most(least: LeastPeak) -> str:
    """What stands before a least peak that is not proved to be one."""
    if gib(least.bound_bytes) == gib(least.peak_bytes):
        return ""
    return f", at least {gib(least.bound_bytes)} and at most"


def where(graph: Graph, op: int) -> str:
    """An operator for a person: the node that it belongs to, and the phase."""
    if op >= graph.backward_end:
        return "the optimizer step"
    node = graph.nodes[graph.op_node[op]]
    module = f" in {node.module}" if node.module else ""
    return f"node `{node.name}`{module}, {'forward' if op < graph.forward_end else 'backward'}"


def assemble(problem: Problem, solution: Solution, profile: Profile, *, replayed: bool) -> Plan:
    """The Plan of a solution, with its predictions and its proof.

    Where it has been replayed, its peak is the replay's. They should be equal; where the evaluator says otherwise of a
    plan whose nodes it knows, `predicted["evaluator_peak_bytes"]` says what.
    """
    graph, memory = problem.graph, problem.memory
    recompute_us = memory.recompute_time_us(solution.regions, profile.costs.per_op_us(graph))
    curve = memory.curve(solution.regions)
    predicted: dict[str, Any] = {
        "peak_bytes": curve.peak_bytes if solution.replayed_bytes is None else solution.replayed_bytes,
        "peak_at": where(graph, int(curve.op[curve.peak_at])),
        "step_time_us": problem.step_time_us + recompute_us,
        "recompute_time_us": recompute_us,
        "overhead": recompute_us / problem.step_time_us if problem.step_time_us else 0.0,
        "recomputed_nodes": memory.recomputed_nodes(solution.regions),
        "breakdown": at_peak(memory, solution.regions),
        "judged_by": "replay" if replayed else "evaluator",
    }
    if predicted["peak_bytes"] != curve.peak_bytes and problem.space.kind == "nodes":
        predicted["evaluator_peak_bytes"] = curve.peak_bytes
    return Plan(
        regions=place(graph, solution.regions, problem.space.modules),
        fingerprints=graph.fingerprints,
        about={name: value for name, value in graph.about.items() if name != CALLED_MODULES},
        target=profile.target.name,
        costs=profile.costs.source,
        budget_bytes=problem.budget_bytes,
        predicted=predicted,
        without_checkpointing=problem.without_checkpointing,
        solver={
            "name": solution.solver,
            "status": solution.status,
            "objective_us": solution.objective_us,
            "bound_us": solution.bound_us,
            "gap": solution.gap,
            "wall_s": round(solution.wall_s, 3),
        },
        space=problem.space.about(),
        regions_are=problem.space.kind,
        identities=graph.identities,
    )
