"""Plan for compiled execution: the judge of a plan is the compiled replay.

The integer program speaks of eager execution, and what a compiler saves, fuses and uses twice is not in it. So it is
asked for plans under several eager budgets, and of those whose compiled replay keeps the budget the one with the least
recomputation is taken. That budget is kept, then, as far as the replay is right; but no bound holds for other plans, so
none is given. Under Inductor operators are priced as fused (`fusing.py`).

The code that Inductor generates depends on the machine (its device, on the CPU also the number of threads), so the
target must be the machine at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat.compiling import AOT_EAGER, INDUCTOR
from remat.errors import NoPlanInTime, UsageError
from remat.fusing import fused
from remat.loop import Loop
from remat.module_space import pose
from remat.planning import Budget, assemble, solve_within
from remat.plans import Plan, Region, RegionKind, place
from remat.problem import Problem
from remat.profiling import Place, Profile
from remat.record import FakeStep
from remat.replay_compiled import replay_compiled
from remat.solution import Limits, Solution
from remat.solvers import Solver, load
from remat.solvers.least_peak import least_peak
from remat.space import find_space
from remat.units import gib

COMPILERS = (INDUCTOR, AOT_EAGER)
MOST_REPLAYS = 6
NEAR = 0.02  # of the budget: what is left of it is not worth another replay


def require_plannable(compiler: str, place: Place | None, loop: Loop | None, regions: RegionKind) -> None:
    """Raise UsageError where a plan for compiled execution cannot be made; a profile out of a file has no place."""
    if compiler not in COMPILERS:
        raise UsageError(f"plans are made for the compilers {' and '.join(COMPILERS)}, not for {compiler!r}.")
    if place is None:
        raise UsageError("a plan for compiled execution compiles the model, and a profile has none; use --model.")
    if place.device is None:
        raise UsageError(
            f"what {compiler} makes of a model is known only where it runs, and {place.target.name} is not this "
            "machine's; use --target cpu, or cuda on a machine that has it."
        )
    if regions != "nodes":
        raise UsageError("a plan for compiled execution has regions of nodes; leave --regions out.")
    if loop is not None and loop.shard is not None:
        raise UsageError("a plan for compiled execution does not know shards; leave --shard out.")


def plan_compiled(
    profile: Profile,
    budget: Budget,
    step: FakeStep,
    *,
    compiler: str,
    limits: Limits | None = None,
    solver: Solver | None = None,
    on_replay: Callable[[int, int], None] | None = None,
) -> Plan:
    """The plan with the least recomputation found whose replay under `compiler` stays within `budget`.

    on_replay  called with the number of a replay and the most that there are, before each

    Raises Infeasible where not even eager plans are found, NoPlanInTime where no replay keeps the budget.
    """
    profile = fused(profile) if compiler == INDUCTOR else profile
    problem = pose(profile.graph, profile.costs, find_space(profile.graph, depth=1), budget.limit_bytes)
    search = _Search(profile, problem, step, compiler, limits or Limits(), solver or load("exact"), on_replay)
    solution, peak = search.run()
    plan = assemble(problem, solution, profile, replayed=True)
    return dataclasses.replace(
        plan,
        about={**plan.about, "compiler": compiler},
        predicted={
            **plan.predicted,
            "peak_bytes": peak,
            "eager_peak_bytes": plan.predicted["peak_bytes"],
            "judged_by": f"replay under {compiler}",
        },
        without_checkpointing={**plan.without_checkpointing, "peak_bytes": search.peak_of(())},
    )


class _Search:
    """Eager budgets asked for, and what the plans found under them need when compiled."""

    def __init__(
        self,
        profile: Profile,
        problem: Problem,
        step: FakeStep,
        compiler: str,
        limits: Limits,
        solver: Solver,
        on_replay: Callable[[int, int], None] | None,
    ):
        self.profile, self.problem, self.step, self.compiler = profile, problem, step, compiler
        self.limits, self.solver, self.on_replay = limits, solver, on_replay
        self._peaks: dict[tuple[Region, ...], int] = {}

    def peak_of(self, regions: tuple[Region, ...]) -> int:
        """Peak bytes of the step under `regions`, compiled."""
        if regions not in self._peaks:
            if self.on_replay is not None:
                self.on_replay(len(self._peaks) + 1, MOST_REPLAYS)
            graph = self.problem.graph
            alive = replay_compiled(
                self.step,
                place(graph, regions),
                compiler=self.compiler,
                alignment_bytes=self.profile.target.alignment_bytes,
                workspace_of=self.profile.workspace_of(),
                device=self.step.device,
            )
            self._peaks[regions] = int(alive.max()) + graph.unseen_bytes
        return self._peaks[regions]

    def run(self) -> tuple[Solution, int]:
        """The best solution whose peak is within the budget, and that peak."""
        limit, memory = self.problem.budget_bytes, self.problem.memory
        if (plain := self.peak_of(())) <= limit:
            return Solution("none needed", "feasible"), plain
        low, high = least_peak(self.problem, self.limits).peak_bytes, memory.peak_without_regions - 1
        best: tuple[Solution, int] | None = None
        asked, tried = min(max(limit, low), high), set[int]()
        while asked not in tried and len(self._peaks) < MOST_REPLAYS:
            tried.add(asked)
            solution = solve_within(self.problem.with_budget(asked), self.limits, self.solver, None, self.profile)
            peak = self.peak_of(solution.regions)
            if peak <= limit:
                low = asked
                if best is None or solution.objective_us < best[0].objective_us:
                    best = (dataclasses.replace(solution, status="feasible", bound_us=0.0), peak)
                if limit - peak <= NEAR * limit:
                    break
            else:
                high = asked
            asked = min(max(asked + limit - peak, low), high)
            if asked in tried:
                asked = (low + high) // 2
        if best is None:
            least = min(self._peaks.values())
            raise NoPlanInTime(
                f"of {len(self._peaks)} plans replayed under {self.compiler} none keeps {gib(limit)}; the one that "
                f"needs least needs {gib(least)}. Raise the budget."
            )
        return best
