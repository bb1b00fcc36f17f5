"""The exact program (`program.py`) solved by OR-tools' CP-SAT: the fastest proofs, and a live bound."""

from __future__ import annotations

import threading

from ortools.sat.python import cp_model

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.solvers import program
from remat.solvers.program import Constraint, Outcome, Program, Progress
from remat.work import work

NAME = "cp-sat"


def solve(problem: Problem, limits: Limits, *, start: Solution | None = None, keep: set[int] | None = None) -> Solution:
    """Solve as `program.solve` does."""
    return program.solve(NAME, CpSat, problem, limits, start=start, keep=keep)


def least_peak(
    problem: Problem, limits: Limits, *, keep: set[int] | None = None
) -> tuple[int, tuple[Region, ...], float]:
    """Find the least peak as `program.least_peak` does."""
    return program.least_peak(CpSat, problem, limits, keep=keep)


class CpSat:
    """A program as CP-SAT's model."""

    precision = 0.0

    def __init__(self, program: Program):
        self.program = program
        self.model = cp_model.CpModel()
        self.variables = [self.model.new_int_var(0, v.most, v.name) for v in program.variables]
        self.translated = 0
        self.model.minimize(self._sum(program.objective))

    def _sum(self, terms: program.Terms) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.weighted_sum([self.variables[v] for v, _ in terms], [c for _, c in terms])

    def _translate(self) -> None:
        for constraint in self.program.constraints[self.translated :]:
            self._add(constraint)
        self.translated = len(self.program.constraints)
        self.model.clear_hints()
        for variable, value in self.program.hints.items():
            self.model.add_hint(self.variables[variable], value)

    def _add(self, constraint: Constraint) -> None:
        total, most = self._sum(constraint.terms), constraint.most
        added = self.model.add_linear_constraint(total, most if constraint.equal else cp_model.INT_MIN, most)
        if constraint.when is not None:
            added.only_enforce_if(self.variables[constraint.when])

    def run(self, limits: Limits, time_s: float | None, on_progress: Progress | None) -> Outcome:
        self._translate()
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = limits.workers
        solver.parameters.random_seed = limits.seed
        solver.parameters.relative_gap_limit = limits.gap
        # Workers take turns, whatever else runs, for the same plan each time.
        solver.parameters.interleave_search = limits.counts_work
        if time_s is not None and limits.counts_work:
            solver.parameters.max_deterministic_time = time_s
        elif time_s is not None:
            solver.parameters.max_time_in_seconds = time_s
        watch = None
        if on_progress is not None:
            watch = _Watch(on_progress)
            solver.best_bound_callback = watch.on_bound
        status, interrupted = self._solve(solver, watch)
        work(solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return Outcome("infeasible")
        bound = max(round(solver.best_objective_bound), 0)  # an integer, but for the solver's own scaling
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Outcome("unknown", bound=bound, interrupted=interrupted)
        found: Status = "optimal" if status == cp_model.OPTIMAL else "feasible"
        values = [solver.value(variable) for variable in self.variables]
        return Outcome(found, values, bound, interrupted=interrupted)

    def _solve(self, solver: cp_model.CpSolver, watch: _Watch | None) -> tuple[cp_model.CpSolverStatus, bool]:
        """Return the solver's status, and whether the user pressed Ctrl-C, which it reports as a reached limit.

        Python receives signals in its main thread only, and only while that is not in the solver.
        """
        solver.parameters.catch_sigint_signal = False
        results: list[cp_model.CpSolverStatus] = []
        failures: list[BaseException] = []
        ended, interrupted = threading.Event(), False

        def work() -> None:
            try:
                results.append(solver.solve(self.model, watch))
            except BaseException as failure:
                failures.append(failure)
            finally:
                ended.set()

        threading.Thread(target=work, daemon=True).start()
        while not ended.is_set():
            try:
                ended.wait()
            except KeyboardInterrupt:
                interrupted = True
                solver.stop_search()
        if failures:
            raise failures[0]
        return results[0], interrupted


class _Watch(cp_model.CpSolverSolutionCallback):
    """Receives better plans and better bounds."""

    def __init__(self, on_progress: Progress):
        super().__init__()
        self._on_progress = on_progress
        self._objective, self._bound = float("inf"), 0.0

    def on_solution_callback(self) -> None:
        self._objective = self.objective_value
        self.on_bound(self.best_objective_bound)

    def on_bound(self, bound: float) -> None:
        self._bound = max(self._bound, bound)
        self._on_progress(self._objective, self._bound)
