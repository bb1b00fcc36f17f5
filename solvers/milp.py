"""The exact program (`program.py`) as a mixed integer linear one, solved by HiGHS or SCIP through OR-tools' MathOpt.

A second opinion: it shares no code with CP-SAT below the program, and its bound comes from linear relaxations. These
solvers compute in floating point, so three things are scaled or given away:

* Columns and rows are divided by powers of two until the budget is about a thousand units. A tolerance of 1e-6 is then
  a billionth of the budget. The prefixes P follow from the binaries, so they need not be integers here.
* A row under a condition becomes one without: terms + slack x <= most + slack.
* The bound is lowered by what the tolerances may have lent it: `DUAL_TOLERANCE` over the range of every column. The
  objective is an integer, so what is left is rounded up.

A plan that breaks a row by a tolerance is found by the evaluator, like any other.

HiGHS cannot be interrupted: after Ctrl-C it is left running in its thread, and its result is lost. SCIP stops and
hands over its best plan. Neither reports progress. HiGHS chooses its own number of threads (it crashes when told how
many); SCIP uses one. Both sometimes write to stdout, where an answer may be a document: while they work, stdout leads
to stderr.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Sequence
from typing import Literal

from ortools.math_opt.python import mathopt

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.solvers import program
from remat.solvers.program import Constraint, Outcome, Program, Progress
from remat.streams import stdout_to_stderr
from remat.work import work

NAME = "milp"
Engine = Literal["highs", "scip"]
ENGINES = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
UNITS = 1 << 10  # the most that a column or a row amounts to
OBJECTIVE_UNITS = 1 << 14  # the largest coefficient of the objective
DUAL_TOLERANCE = 1e-7  # of reduced costs, both engines' default
ITERATION_S, NODE_S = 5e-4, 8e-3  # of work: for an iteration of the simplex method, and for a node of SCIP's
FAR = 10  # times its limit in nodes: SCIP ends by wall time before its first nodes only
CUTOFF = 2e-6  # both engines take plans that differ by less for equally good


def solve(
    problem: Problem,
    limits: Limits,
    *,
    start: Solution | None = None,
    keep: set[int] | None = None,
    engine: Engine = "highs",
) -> Solution:
    """Solve as `program.solve` does."""
    return program.solve(NAME, lambda made: Milp(made, engine), problem, limits, start=start, keep=keep)


def _power_of_two(ratio: float) -> int:
    """Return the least power of two that is at least `ratio` and at least 1."""
    return 1 << max(math.ceil(math.log2(ratio)), 0) if ratio > 1 else 1


class Milp:
    """A program as MathOpt's model."""

    precision = 1e-6

    def __init__(self, program: Program, engine: Engine):
        self.program = program
        self.engine = engine
        self.model = mathopt.Model()
        self.scales = [_power_of_two(variable.most / UNITS) for variable in program.variables]
        self.columns = [
            self.model.add_variable(lb=0.0, ub=variable.most / scale, is_integer=variable.most == 1, name=variable.name)
            for variable, scale in zip(program.variables, self.scales, strict=True)
        ]
        weights = [abs(coefficient) * self.scales[variable] for variable, coefficient in program.objective]
        self.objective_scale = _power_of_two(max(weights, default=1) / OBJECTIVE_UNITS)
        self.model.minimize(self._sum(program.objective, self.objective_scale))
        self.translated = 0

    def _sum(self, terms: program.Terms, scale: int) -> mathopt.LinearSum:
        return mathopt.fast_sum(
            coefficient * self.scales[variable] / scale * self.columns[variable] for variable, coefficient in terms
        )

    def _translate(self) -> None:
        for constraint in self.program.constraints[self.translated :]:
            self._add(constraint)
        self.translated = len(self.program.constraints)

    def _add(self, constraint: Constraint) -> None:
        terms, most = constraint.terms, constraint.most
        if constraint.when is not None:
            terms, most = (*terms, (constraint.when, constraint.slack)), most + constraint.slack
        weights = [abs(coefficient) * self.scales[variable] for variable, coefficient in terms]
        scale = _power_of_two(max([abs(most), *weights]) / UNITS)
        self.model.add_linear_constraint(
            lb=most / scale if constraint.equal else -math.inf, ub=most / scale, expr=self._sum(terms, scale)
        )

    def run(self, limits: Limits, time_s: float | None, on_progress: Progress | None) -> Outcome:
        self._translate()
        result, interrupted = self._solve(limits, time_s)
        if result is None:
            return Outcome("unknown", interrupted=True)
        ended = time_s is not None and result.termination.limit in (mathopt.Limit.TIME, mathopt.Limit.NODE)
        work(time_s if ended and time_s is not None else ITERATION_S * result.solve_stats.simplex_iterations)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return Outcome("infeasible")  # every column has bounds
        trusted = reason in (
            mathopt.TerminationReason.OPTIMAL,
            mathopt.TerminationReason.FEASIBLE,
            mathopt.TerminationReason.NO_SOLUTION_FOUND,
        )
        bound = self._bound(result.termination.objective_bounds.dual_bound) if trusted else 0
        if not result.has_primal_feasible_solution():
            return Outcome("unknown", bound=bound, interrupted=interrupted)
        status: Status = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"
        return Outcome(status, self._values(result), bound, interrupted)

    def _values(self, result: mathopt.SolveResult) -> Sequence[int]:
        values = result.variable_values(self.columns)
        return [round(value * scale) for value, scale in zip(values, self.scales, strict=True)]

    def _bound(self, dual_bound: float) -> int:
        """Return `dual_bound` in the program's unit, less the error that tolerances may cause."""
        if not math.isfinite(dual_bound):
            return 0
        ranges = sum(variable.most / scale for variable, scale in zip(self.program.variables, self.scales, strict=True))
        lent = DUAL_TOLERANCE * ranges + CUTOFF
        return max(math.ceil((dual_bound - lent) * self.objective_scale), 0)

    def _solve(self, limits: Limits, time_s: float | None) -> tuple[mathopt.SolveResult | None, bool]:
        """Return the result, None if the engine was abandoned, and whether the user pressed Ctrl-C.

        MathOpt swallows Ctrl-C in its own thread, so it runs in another one.
        """
        parameters = mathopt.SolveParameters(relative_gap_tolerance=limits.gap, random_seed=limits.seed)
        if time_s is not None and limits.counts_work and self.engine == "scip":
            parameters.node_limit, time_s = round(time_s / NODE_S) + 1, FAR * time_s
        parameters.gscip.bool_params["misc/catchctrlc"] = True  # with MathOpt's interrupter, SCIP complains of events
        if time_s is not None:
            parameters.time_limit = datetime.timedelta(seconds=time_s)
        hint = mathopt.SolutionHint({self.columns[v]: float(value) for v, value in self.program.hints.items()})
        results: list[mathopt.SolveResult] = []
        failures: list[Exception] = []

        def work() -> None:
            try:
                result = mathopt.solve(
                    self.model,
                    ENGINES[self.engine],
                    params=parameters,
                    model_params=mathopt.ModelSolveParameters(solution_hints=[hint]),
                )
                results.append(result)
            except Exception as failure:
                failures.append(failure)

        thread = threading.Thread(target=work, daemon=True)
        with stdout_to_stderr():
            thread.start()
            try:
                thread.join()
            except KeyboardInterrupt:
                return None, True
        if failures:
            raise failures[0]
        return results[0], results[0].termination.limit == mathopt.Limit.INTERRUPTED
