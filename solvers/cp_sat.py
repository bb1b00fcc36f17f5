"""The exact program, solved by OR-tools' CP-SAT.

Data       segments 0..m-1; runs r = [a_r, b_r), plain or a region, with time t_r to recompute it; nodes v that may be
           saved, with time c_v and bytes; storages u kept for several reasons, with sites (segments) i; budget B
Variables  x[r] = 1    run r is chosen
           s[v] = 1    the output of v is saved
           k[u,i] = 1  u is kept for a reason at site i or before
           P[a]        bytes that segments before a keep, storages whose last site is before a only
Minimise   sum t_r x[r] - sum c_v s[v]                                                              (1)
s.t.       sum of x[r] over r that hold segment i = 1                  i = 0..m-1                   (2)
           s[v] <= sum of x[r] over regions r that recompute v                                      (3)
           k[u,i] >= x[plain i] if autograd saves u there                                           (4)
                     + sum of x[r] over regions r that hold i and take u as input
                     + s[v] if i is where v makes u
           k[u,i] >= k[u,i'] for the site i' before i
           P[a+1] = P[a] + own bytes x[plain a] + sum bytes s[v] + sum w_u k[u,a] over u with last site a  (5)
           bytes_p + P[a_r] + sum w_u k[u,.] over open u not alive there + sum extra[v] s[v] <= B   (6)
                     for the points p of every run r with x[r] = 1
           forward: bytes_p + all that is kept and no longer local <= B                             (7)

Bytes are rounded *down* to a grain, so the program never overstates a peak and its bound is a bound. The evaluator
(`Memory.curve`) judges the plan exactly; where it is over budget, the exact row of that point, valid for every plan,
is added and the program solved again.
"""

from __future__ import annotations

import dataclasses
import math
import time

from ortools.sat.python import cp_model

from remat.plans import Region
from remat.problem import NS, Kept, Problem, Row
from remat.solution import Limits, Solution, Status

NAME = "cp-sat"
GRAINS = 1 << 22  # a budget is this many grains at least
MOST_ROUNDS = 60
LEAST_PEAK_GAP = 0.001


def solve(problem: Problem, limits: Limits, *, start: Solution | None = None) -> Solution:
    """The plan with least recompute time within `problem.budget_bytes`, and a bound on it.

    start  what another solver found: its plan is the first hint, its bound a row
    """
    started = time.monotonic()
    best = start if start is not None and start.status == "feasible" else Solution(NAME, "unknown")
    bound = start.bound_us if start is not None else 0.0
    program = Program(problem)
    program.bound_below(bound)
    program.hint(best.regions)
    for rounds in range(1, MOST_ROUNDS + 1):
        left = _left(limits, started)
        if left is not None and left <= 0:
            break
        outcome = program.run(limits, left)
        if outcome.status == "infeasible" and best.status == "unknown":
            return Solution(NAME, "infeasible", wall_s=time.monotonic() - started, rounds=rounds)
        bound = max(bound, outcome.bound_us)
        if outcome.status in ("infeasible", "unknown"):
            break
        violated = over_budget(problem, outcome.regions)
        if violated is None:
            if best.status == "unknown" or outcome.objective_us < best.objective_us:
                best = dataclasses.replace(outcome, rounds=rounds)
            break
        program.add_exact(violated)
        program.exclude(outcome.regions)
    if best.status == "unknown":
        return Solution(NAME, "unknown", bound_us=bound, wall_s=time.monotonic() - started)
    bound = min(bound, best.objective_us)
    closed = best.objective_us - bound <= limits.gap * max(best.objective_us, 1.0)
    status: Status = "optimal" if closed else "feasible"
    return dataclasses.replace(best, status=status, bound_us=bound, wall_s=time.monotonic() - started)


def least_peak(problem: Problem, limits: Limits) -> tuple[int, tuple[Region, ...], float]:
    """(peak bytes, regions, lower bound in bytes) of the plan of this space with the least peak.

    `problem.budget_bytes` must be a peak that some plan reaches. Nothing is saved: saving never lowers a peak by
    more than a workspace.
    """
    started = time.monotonic()
    program = Program(problem, least_peak=True)
    best, bound = problem.memory.peak_without_checkpointing, 0.0
    regions: tuple[Region, ...] = ()
    for _ in range(MOST_ROUNDS):
        left = _left(limits, started)
        if left is not None and left <= 0:
            break
        outcome = program.run(limits, left)
        if outcome.status not in ("optimal", "feasible"):
            break
        bound = max(bound, outcome.bound_us * NS * program.grain)
        peak = problem.memory.curve(outcome.regions).peak_bytes
        if peak < best:
            best, regions = peak, outcome.regions
        if best <= bound + (LEAST_PEAK_GAP * best):
            break
        violated = over_budget(problem.with_budget(int(bound)), outcome.regions)
        if violated is None:
            break
        program.add_exact(violated)
    return best, regions, bound


def _left(limits: Limits, started: float) -> float | None:
    return None if limits.time_s is None else limits.time_s - (time.monotonic() - started)


def over_budget(problem: Problem, regions: tuple[Region, ...]) -> Row | None:
    """The exact row that the plan breaks most, None if it keeps the budget."""
    curve = problem.memory.curve(regions)
    position = curve.peak_at
    if curve.alive_bytes[position] <= problem.budget_bytes:
        return None
    op, top = int(curve.op[position]), int(curve.region[position])
    if op < problem.graph.forward_end and top < 0:
        return problem.forward_row(op)
    index = problem.run_at(regions, op, top)
    run = problem.runs[index]
    own = problem.curve_of(run)
    same = (own.op == op) & (own.region >= 0 if top >= 0 else own.region < 0)
    candidates = same.nonzero()[0]
    return problem.row(index, own, int(max(candidates, key=lambda i: own.alive_bytes[i])))


class Program:
    """The model, its variables, and the rows added so far.

    least_peak  minimise the peak, up to `problem.budget_bytes`, in place of (1); nothing is saved then
    """

    def __init__(self, problem: Problem, *, least_peak: bool = False):
        self.problem = problem
        self.model = cp_model.CpModel()
        self.grain = max(1, problem.budget_bytes // GRAINS)
        most = problem.budget_bytes // self.grain
        self.limit = self.model.new_int_var(0, most, "peak") if least_peak else most  # in grains, rounded down
        self.x = [self.model.new_bool_var(f"x[{run.a},{run.b},{i}]") for i, run in enumerate(problem.runs)]
        self.s = {} if least_peak else {v: self.model.new_bool_var(f"s[{v}]") for v in problem.save_time_ns}
        self.k = {
            (kept.storage, site): self.model.new_bool_var(f"k[{kept.storage},{site}]")
            for kept in problem.kept.values()
            for site in kept.sites
        }
        self.prefix = self._prefixes()
        if least_peak:
            self.model.minimize(self.limit)
        else:
            self._minimise_recomputation()
        self._partition_segments()
        self._save_inside_regions()
        for kept in problem.kept.values():
            self._keep_for_every_reason(kept)
        for index in range(len(problem.runs)):
            self._keep_budget(index)
        for row in problem.forward_rows:
            self._add(row, self.grain)

    def _minimise_recomputation(self) -> None:  # (1)
        times = [run.time_ns * x for run, x in zip(self.problem.runs, self.x, strict=True) if run.region]
        self.objective = sum(times) - sum(self.problem.save_time_ns[v] * s for v, s in self.s.items())
        self.model.minimize(self.objective)

    def _partition_segments(self) -> None:  # (2)
        self.holding: list[list[int]] = [[] for _ in self.problem.space.segments]
        for index, run in enumerate(self.problem.runs):
            for segment in range(run.a, run.b):
                self.holding[segment].append(index)
        for indices in self.holding:
            self.model.add_exactly_one(self.x[i] for i in indices)

    def _save_inside_regions(self) -> None:  # (3)
        runs = self.problem.runs
        for v, s in self.s.items():
            segment = int(self.problem.segment_of_node[v])
            holding = [
                self.x[i]
                for i in self.holding[segment]
                if (region := runs[i].region) and not region.inner and v not in runs[i].never_again
            ]
            self.model.add(s <= sum(holding))

    def _keep_for_every_reason(self, kept: Kept) -> None:  # (4)
        runs, before = self.problem.runs, None
        for site in kept.sites:
            k = self.k[kept.storage, site]
            sources = [source for source, taken_at in kept.taken if taken_at == site]
            reasons = [
                self.x[i]
                for i in self.holding[site]
                if (site in kept.packed if runs[i].region is None else any(source < runs[i].a for source in sources))
            ]
            if site == kept.segment and kept.saver in self.s:
                reasons.append(self.s[kept.saver])
            self.model.add(k >= sum(reasons))
            if before is not None:
                self.model.add_implication(before, k)
            before = k

    def _prefixes(self) -> list[cp_model.LinearExprT]:  # (5)
        problem, count = self.problem, len(self.problem.space.segments)
        own = [bytes_ // self.grain for bytes_ in problem.own_bytes]
        terms: list[list[tuple[cp_model.IntVar, int]]] = [[(self.x[a], own[a])] for a in range(count)]
        for v, s in self.s.items():
            terms[int(problem.segment_of_node[v])].append((s, problem.save_bytes[v] // self.grain))
        for kept in problem.kept.values():
            last = kept.sites[-1]
            terms[last].append((self.k[kept.storage, last], kept.size_bytes // self.grain))
        prefix: list[cp_model.LinearExprT] = [0]
        for a in range(count):
            total = self.model.new_int_var(0, problem.budget_bytes // self.grain, f"P[{a + 1}]")
            added = [weight * var for var, weight in terms[a] if weight]
            self.model.add(total == cp_model.LinearExpr.sum([prefix[a], *added]))
            prefix.append(total)
        return prefix

    def _keep_budget(self, index: int) -> None:  # (6)
        for row in self.problem.first_rows(index):
            self._add(row, self.grain)

    def add_exact(self, row: Row) -> None:
        """Add `row` in bytes, without rounding."""
        self._add(row, 1)

    def _add(self, row: Row, grain: int) -> None:
        exact = grain == 1
        most = self.limit if not exact else self._limit_bytes()
        terms = self._prefix_terms(row, grain) if row.run is not None else self._forward_terms(row, grain)
        terms += [size // grain * self.s[v] for v, size in row.saves if v in self.s]
        constraint = self.model.add(row.bytes // grain + sum(terms) <= most)
        if row.run is not None:
            constraint.only_enforce_if(self.x[row.run])

    def _limit_bytes(self) -> cp_model.LinearExprT:
        if isinstance(self.limit, int):
            return self.problem.budget_bytes
        return self.limit * self.grain + self.grain - 1

    def _prefix_terms(self, row: Row, grain: int) -> list[cp_model.LinearExprT]:
        problem = self.problem
        terms: list[cp_model.LinearExprT] = []
        rounded = grain == self.grain
        if rounded:
            terms.append(self.prefix[row.before])
        for kept in problem.kept.values():
            closed = kept.sites[-1] < row.before
            if kept.segment >= row.before or kept.storage in row.alive or (closed and rounded):
                continue
            site = kept.site_before(row.before)
            if site is not None:
                terms.append(kept.size_bytes // grain * self.k[kept.storage, site])
        if not rounded:
            terms += [problem.own_bytes[a] * self.x[a] for a in range(row.before)]
            terms += [problem.save_bytes[v] * s for v, s in self.s.items() if problem.segment_of_node[v] < row.before]
        return terms

    def _forward_terms(self, row: Row, grain: int) -> list[cp_model.LinearExprT]:
        terms: list[cp_model.LinearExprT] = [size // grain * self.x[a] for a, size in row.plain]
        for storage, site in row.kept:
            terms.append(self.problem.kept[storage].size_bytes // grain * self.k[storage, site])
        return terms

    def bound_below(self, bound_us: float) -> None:
        """Tell the search that no plan takes less than `bound_us`."""
        if bound_us > 0:
            self.model.add(self.objective >= math.floor(bound_us * NS))

    def hint(self, regions: tuple[Region, ...]) -> None:
        """Start the next search from `regions`."""
        chosen = self.problem.runs_of(regions)
        saved = {v for region in regions for v in region.saved}
        self.model.clear_hints()
        for index, x in enumerate(self.x):
            self.model.add_hint(x, index in chosen)
        for v, s in self.s.items():
            self.model.add_hint(s, v in saved)

    def exclude(self, regions: tuple[Region, ...]) -> None:
        """Rule out this one plan, which is over budget, whatever the rows say."""
        chosen = self.problem.runs_of(regions)
        saved = {v for region in regions for v in region.saved}
        same = [self.x[i] for i in chosen] + [s if v in saved else s.negated() for v, s in self.s.items()]
        self.model.add_bool_or([literal.negated() for literal in same])

    def run(self, limits: Limits, time_s: float | None) -> Solution:
        """Solve the program as it stands."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = limits.workers
        solver.parameters.random_seed = limits.seed
        solver.parameters.relative_gap_limit = limits.gap
        if time_s is not None:
            solver.parameters.max_time_in_seconds = time_s
        started = time.monotonic()
        status = solver.solve(self.model, _Progress(limits) if limits.on_progress else None)
        wall = time.monotonic() - started
        if status == cp_model.INFEASIBLE:
            return Solution(NAME, "infeasible", wall_s=wall)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Solution(NAME, "unknown", bound_us=max(solver.best_objective_bound, 0) / NS, wall_s=wall)
        return Solution(
            NAME,
            "optimal" if status == cp_model.OPTIMAL else "feasible",
            self._extract(solver),
            solver.objective_value / NS,
            max(solver.best_objective_bound, 0) / NS,
            wall,
        )

    def _extract(self, solver: cp_model.CpSolver) -> tuple[Region, ...]:
        chosen = [run.region for run, x in zip(self.problem.runs, self.x, strict=True) if solver.boolean_value(x)]
        saved = [v for v, s in self.s.items() if solver.boolean_value(s)]
        regions = [
            Region(region.first, region.end, tuple(v for v in saved if v in region), region.inner)
            for region in chosen
            if region is not None
        ]
        return tuple(sorted(regions))


class _Progress(cp_model.CpSolverSolutionCallback):
    def __init__(self, limits: Limits):
        super().__init__()
        self._limits = limits

    def on_solution_callback(self) -> None:
        assert self._limits.on_progress is not None
        self._limits.on_progress(self.objective_value / NS, max(self.best_objective_bound, 0) / NS)
