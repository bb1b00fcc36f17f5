"""The exact program, stated without a solver, and the rounds in which a solver and the evaluator settle it.

Data       segments 0..m-1; runs r = [a_r, b_r), plain or a region, with time t_r to recompute it; nodes v that may be
           saved, with time c_v and bytes; storages u kept for several reasons, with sites (segments) i; budget B;
           F bytes that are always there
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
           bytes_p + kept_p <= B  for the points p of every run r with x[r] = 1                     (6)
                     kept_p = P[a_r] + sum w_u k[u,.] over open u not alive there + sum extra[v] s[v]
                              + what plain segments after r keep so long
           forward: bytes_p + all that is kept and no longer local <= B                             (7)
           The step of the optimizer takes the same under every plan: it is looked at first.
           With a link to the host, (5) is P[a+1] >= ... and P[a+1] >= floor[a+1], see `offloading/relief.py`.

Rounding    Bytes are rounded *down* to a grain, so the program never overstates a peak and its bound is a bound. The
            evaluator (`Memory.curve`) judges the plan exactly; where it is over budget, the exact row of that point,
            valid for every plan, is added and the program solved again.
Slack       What kept_p counts is kept when forward ends, whatever r is: F + kept_p <= B holds for every plan. So where
            x[r] = 0 the row (6) may be relaxed by bytes_p - F and by no more. As one row without a condition it is
            F + kept_p + (bytes_p - F) x[r] <= B.
Least peak  Instead of (1), the peak itself is minimised, up to B; it takes the place of B in (6) and (7).

A solver sees variables, linear constraints and an objective, all in integers. It is a `Backend`, which keeps its own
model in step with a `Program` that only ever grows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from remat.evaluation.plan import Region
from remat.formulation.choices import Row, SharedStorage
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution, Status
from remat.solvers.deadline import NEVER, Deadline, OutOfTime
from remat.work import work

RUN_S = 1e-3  # of work: for the rows of a run
GRAINS = 1 << 22  # a budget is this many grains at least
MOST_ROUNDS = 60
LEAST_PEAK_GAP = 0.001

Terms = tuple[tuple[int, int], ...]  # (variable, coefficient)
Progress = Callable[[float, float], None]  # of (objective, bound), in the program's own unit


@dataclasses.dataclass(frozen=True)
class Variable:
    """An integer from 0 to `most`."""

    name: str
    most: int = 1


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A constraint: sum of coefficient * variable <= most (= most, if `equal`), if variable `when` is 1.

    slack  may be added to `most` if `when` is 0: every plan keeps that limit too
    """

    terms: Terms
    most: int
    equal: bool = False
    when: int | None = None
    slack: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A backend's result for a program: one value per variable, empty if it has none."""

    status: Status
    values: Sequence[int] = ()
    bound: float = 0.0
    interrupted: bool = False


class Backend(Protocol):
    """A solver's own model of a program.

    precision  relative error of its arithmetic: smaller gaps count as closed
    """

    precision: float

    def run(self, limits: Limits, time_s: float | None, on_progress: Progress | None) -> Outcome:
        """Solve the program with everything added since the last time."""


MakeBackend = Callable[["Program"], Backend]


def solve(
    name: str,
    make: MakeBackend,
    problem: Problem,
    limits: Limits,
    *,
    start: Solution | None = None,
    keep: set[int] | None = None,
) -> Solution:
    """Find the plan with least recompute time within `problem.budget_bytes`, and a bound.

    start  another solver's solution: its plan is the first hint, its bound a row
    keep   indices of the runs that may be chosen besides those of the plan to start from, None for all; the caller
           guarantees that no plan with another run is better
    """
    wall_s, started = time.monotonic(), limits.now()
    if problem.optimizer_peak_bytes > problem.budget_bytes:
        return Solution(name, "infeasible")
    best = _best_known(name, problem, limits, start)
    found = _Incumbent(name, best, start.bound_us if start is not None else 0.0, limits)
    try:
        program = _program(problem, limits, found, keep, Deadline.of(limits, started))
        _search(program, make(program), limits, found, started)
    except OutOfTime:
        pass
    except KeyboardInterrupt:
        found.interrupted = True
    return dataclasses.replace(found.solution(), wall_s=time.monotonic() - wall_s)


@dataclasses.dataclass
class _Incumbent:
    """The best plan that keeps the budget and the bound so far. `best` is "infeasible" once that is proved."""

    name: str
    best: Solution
    bound_us: float
    limits: Limits
    precision: float = 0.0
    interrupted: bool = False

    def on_progress(self, objective_ns: float, bound_ns: float) -> None:
        """Report a backend's progress. Its plan is not judged yet: it counts if there is no other."""
        objective_us = self.best.objective_us if self.best.status == "feasible" else objective_ns / NS
        if self.limits.on_progress is not None and objective_us < math.inf:
            self.limits.on_progress(objective_us, min(max(self.bound_us, bound_ns / NS), objective_us))

    def solution(self) -> Solution:
        if self.best.status == "infeasible":
            return self.best
        if self.best.status == "unknown":
            return dataclasses.replace(self.best, bound_us=self.bound_us, interrupted=self.interrupted)
        bound_us = min(self.bound_us, self.best.objective_us)
        found = dataclasses.replace(self.best, bound_us=bound_us, interrupted=self.interrupted)
        closed = found.gap <= max(self.limits.gap, self.precision)
        return dataclasses.replace(found, status="optimal" if closed else "feasible")


def _program(problem: Problem, limits: Limits, found: _Incumbent, keep: set[int] | None, deadline: Deadline) -> Program:
    hint = found.best.regions if found.best.status == "feasible" else limits.start
    if keep is not None and hint is not None:
        keep = keep | problem.runs_of(hint)
    program = Program(problem, keep=keep, deadline=deadline)
    program.bound_below(found.bound_us)
    program.hint(hint or ())
    return program


def _search(program: Program, backend: Backend, limits: Limits, found: _Incumbent, started: float) -> None:
    """Improve `found`: solve, judge, add the most violated row, and repeat."""
    problem = program.problem
    found.precision = backend.precision
    for _ in range(MOST_ROUNDS):
        left = limits.left(started).time_s
        if found.interrupted or left == 0.0:
            return
        outcome = backend.run(limits, left, found.on_progress if limits.on_progress else None)
        found.bound_us = max(found.bound_us, outcome.bound / NS)
        found.interrupted = outcome.interrupted
        if outcome.status == "infeasible" and found.best.status == "unknown":
            found.best = Solution(found.name, "infeasible")
        if not outcome.values:
            return
        regions = program.regions(outcome.values)
        violated = over_budget(problem, regions)
        if violated is None:
            objective_us = problem.objective_us(regions)  # SCIP's values may break a row, and claim less
            if found.best.status == "unknown" or objective_us < found.best.objective_us:
                found.best = Solution(found.name, "feasible", regions, objective_us)
            return
        program.add_exact(violated)
        program.exclude(regions)


def _best_known(name: str, problem: Problem, limits: Limits, start: Solution | None) -> Solution:
    """Return the best plan to start from that keeps the budget."""
    known = [start] if start is not None and start.status == "feasible" else []
    if limits.start is not None and problem.curve(limits.start).peak_bytes <= problem.budget_bytes:
        known.append(Solution(name, "feasible", limits.start, problem.objective_us(limits.start)))
    return min(known, key=lambda solution: solution.objective_us, default=Solution(name, "unknown"))


def least_peak(
    make: MakeBackend, problem: Problem, limits: Limits, *, keep: set[int] | None = None
) -> tuple[int, tuple[Region, ...], float]:
    """Return (peak bytes, regions, lower bound in bytes) of the plan with the least peak in the space.

    `problem.budget_bytes` must be a peak that some plan reaches, made of runs in `keep`. Nothing is saved: saving never
    lowers a peak by more than a workspace.
    """
    started = limits.now()
    best, bound = problem.memory.peak_without_regions, float(problem.optimizer_peak_bytes)
    regions: tuple[Region, ...] = ()
    try:
        program = Program(problem, least_peak=True, keep=keep, deadline=Deadline.of(limits, started))
    except OutOfTime:
        return best, regions, bound
    backend = make(program)
    for _ in range(MOST_ROUNDS):
        left = limits.left(started).time_s
        if left == 0.0:
            break
        outcome = backend.run(limits, left, None)
        bound = max(bound, outcome.bound * program.grain)
        if not outcome.values:
            break
        found = program.regions(outcome.values)
        peak = problem.with_budget(0).curve(found).peak_bytes
        if peak < best:
            best, regions = peak, found
        if outcome.interrupted:
            raise KeyboardInterrupt
        if best <= bound + LEAST_PEAK_GAP * best:
            break
        violated = over_budget(problem.with_budget(int(bound)), found)
        if violated is None:
            break
        program.add_exact(violated)
    return best, regions, bound


def over_budget(problem: Problem, regions: tuple[Region, ...]) -> Row | None:
    """Return the exact row that the plan violates most, None if it keeps the budget before the optimizer step."""
    curve = problem.curve(regions)
    position = int(np.where(curve.op < problem.graph.backward_end, curve.alive_bytes, -1).argmax())
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
    """The variables, constraints and objective, and rows added later.

    least_peak  minimise the peak, up to `problem.budget_bytes`, in place of (1); nothing is saved then
    keep        indices of the runs that may be chosen, None for all; nothing is built for the others

    Raises OutOfTime after `deadline`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        least_peak: bool = False,
        keep: set[int] | None = None,
        deadline: Deadline = NEVER,
    ):
        self.problem = problem
        self.grain = max(1, problem.budget_bytes // GRAINS)
        self.variables: list[Variable] = []
        self.constraints: list[Constraint] = []
        self.hints: dict[int, int] = {}
        self.fixed_bytes = problem.fixed_bytes
        # In grains, rounded down.
        self.peak = self._variable("peak", problem.budget_bytes // self.grain) if least_peak else None
        runs = problem.runs
        indices = [i for i in (range(len(runs)) if keep is None else sorted(keep)) if problem.fits_alone(runs[i])]
        self.x = {i: self._variable(f"x[{runs[i].a},{runs[i].b},{i}]") for i in indices}
        self.holding = self._holding()
        self.s: dict[int, int] = {}
        if not least_peak:
            self._save_inside_regions()
        self.k: dict[tuple[int, int], int] = {}
        self._opened: dict[int, list[tuple[SharedStorage, int]]] = {}
        for shared in problem.liveness.shared.values():
            deadline.check()
            self._keep_for_every_reason(shared)
        self.prefix = self._prefixes()
        self.objective: Terms = ((self.peak, 1),) if self.peak is not None else self._recomputation()
        self._partition_segments()
        for index in self.x:
            deadline.check()
            work(RUN_S)
            self._keep_budget(index)
        for row in problem.forward_rows:
            self._add(row, self.grain)

    def __str__(self) -> str:
        return (
            f"Program: {len(self.x)} runs, {len(self.s)} saves, {len(self.k)} reasons to keep; "
            f"{len(self.variables)} variables, {len(self.constraints)} constraints"
        )

    def _variable(self, name: str, most: int = 1) -> int:
        self.variables.append(Variable(name, most))
        return len(self.variables) - 1

    def _require(self, terms: Iterable[tuple[int, int]], most: int, *, equal: bool = False) -> None:
        self.constraints.append(Constraint(tuple(terms), most, equal))

    def _holding(self) -> list[list[int]]:
        """Return the runs that contain each segment."""
        holding: list[list[int]] = [[] for _ in self.problem.space.segments]
        for index in self.x:
            for segment in range(self.problem.runs[index].a, self.problem.runs[index].b):
                holding[segment].append(index)
        return holding

    def _recomputation(self) -> Terms:  # (1)
        runs = self.problem.runs
        times = [(x, runs[i].time_ns) for i, x in self.x.items() if runs[i].region]
        return (*times, *((s, -self.problem.liveness.save_time_ns[v]) for v, s in self.s.items()))

    def _partition_segments(self) -> None:  # (2)
        for indices in self.holding:
            self._require(((self.x[i], 1) for i in indices), 1, equal=True)

    def _save_inside_regions(self) -> None:  # (3)
        for segment, saves in enumerate(self.problem.liveness.saves_in):
            for recomputing, nodes in self._recomputed_by(segment, saves):
                for v in nodes:
                    self.s[v] = self._variable(f"s[{v}]")
                    self._require([(self.s[v], 1), *recomputing], 0)

    def _recomputed_by(self, segment: int, saves: list[int]) -> Iterator[tuple[Terms, list[int]]]:
        """Yield minus the x of runs that recompute nodes of `segment` which may be saved, with those nodes."""
        able = {i: run for i in self.holding[segment] if (run := self.problem.runs[i]).region and not run.region.inner}
        never = {i: run.never_again for i, run in able.items()}
        grouped: dict[frozenset[int], list[int]] = {}
        for v in saves:
            grouped.setdefault(frozenset(i for i in able if v in never[i]), []).append(v)
        for without, nodes in grouped.items():
            if recomputing := tuple((self.x[i], -1) for i in able if i not in without):
                yield recomputing, nodes

    def _keep_for_every_reason(self, shared: SharedStorage) -> None:  # (4)
        runs = self.problem.runs
        before: int | None = None
        for site in shared.sites:
            sources = [source for source, taken_at in shared.taken if taken_at == site]
            reasons = [
                self.x[i]
                for i in self.holding[site]
                if (site in shared.packed if runs[i].region is None else any(source < runs[i].a for source in sources))
            ]
            if site == shared.segment and shared.saver in self.s:
                reasons.append(self.s[shared.saver])
            if reasons:
                k = self._variable(f"k[{shared.storage},{site}]")
                self._require([*((reason, 1) for reason in reasons), (k, -1)], 0)
                if before is not None:
                    self._require([(before, 1), (k, -1)], 0)
                before = k
            if before is not None:
                self.k[shared.storage, site] = before

    def _prefixes(self) -> list[int | None]:  # (5)
        """Add P[0..m]; None is zero."""
        problem, count = self.problem, len(self.problem.space.segments)
        added: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for a in range(count):
            if a in self.x:
                added[a].append((self.x[a], problem.liveness.own_bytes[a]))
        for v, s in self.s.items():
            added[int(problem.liveness.segment_of_node[v])].append((s, problem.liveness.save_bytes[v]))
        for shared in problem.liveness.shared.values():
            if (k := self.k.get((shared.storage, shared.sites[-1]))) is not None:
                added[shared.sites[-1]].append((k, shared.size_bytes))
        most = max(problem.budget_bytes - self.fixed_bytes, 0) // self.grain
        prefix: list[int | None] = [None]
        for a in range(count):
            terms, floor = self._in_grains(added[a]), problem.floor_bytes[a + 1] // self.grain
            if not terms and not floor:
                prefix.append(prefix[a])
                continue
            total = self._variable(f"P[{a + 1}]", most)
            if (before := prefix[a]) is not None:
                terms.append((before, 1))
            self._require([*terms, (total, -1)], 0, equal=not floor)
            if floor:
                self._require([(total, -1)], -floor)
            prefix.append(total)
        return prefix

    def _in_grains(self, terms: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(variable, size // self.grain) for variable, size in terms if size // self.grain]

    def _keep_budget(self, index: int) -> None:  # (6)
        for row in self.problem.first_rows(index):
            self._add(row, self.grain)

    def add_exact(self, row: Row) -> None:
        """Add `row` in bytes, without rounding."""
        self._add(row, 1)

    def _add(self, row: Row, grain: int) -> None:
        if row.run is not None and row.run not in self.x:
            return
        terms = self._prefix_terms(row, grain) if row.run is not None else self._forward_terms(row, grain)
        terms += [(self.x[a], size // grain) for a, size in row.plain if a in self.x]
        terms += [(self.s[v], size // grain) for v, size in row.saves if v in self.s]
        most = self.problem.budget_bytes // grain
        if self.peak is not None:
            terms.append((self.peak, -self.grain // grain))
            most = self.grain // grain - 1
        own, always = row.bytes // grain, self.fixed_bytes // grain
        when = None if row.run is None else self.x[row.run]
        self.constraints.append(
            Constraint(tuple(term for term in terms if term[1]), most - own, when=when, slack=own - always)
        )

    def _prefix_terms(self, row: Row, grain: int) -> list[tuple[int, int]]:
        """Return the terms of kept_p in (6), without its saves; in bytes without P, whose terms are rounded."""
        problem = self.problem
        terms: list[tuple[int, int]] = []
        rounded = grain == self.grain
        if rounded and (prefix := self.prefix[row.before]) is not None:
            terms.append((prefix, 1))
        for shared, k in self._open(row.before):
            if shared.storage not in row.alive and not (rounded and shared.sites[-1] < row.before):
                terms.append((k, shared.size_bytes // grain))
        if not rounded:
            terms += [(self.x[a], problem.liveness.own_bytes[a]) for a in range(row.before) if a in self.x]
            terms += [
                (s, problem.liveness.save_bytes[v])
                for v, s in self.s.items()
                if problem.liveness.segment_of_node[v] < row.before
            ]
        return terms

    def _open(self, segment: int) -> list[tuple[SharedStorage, int]]:
        """Return the storages made before `segment` that earlier segments may keep, with their k."""
        if segment not in self._opened:
            sites = (
                (shared, shared.site_before(segment))
                for shared in self.problem.liveness.shared.values()
                if shared.segment < segment
            )
            self._opened[segment] = [
                (shared, self.k[shared.storage, site])
                for shared, site in sites
                if site is not None and (shared.storage, site) in self.k
            ]
        return self._opened[segment]

    def _forward_terms(self, row: Row, grain: int) -> list[tuple[int, int]]:  # (7)
        terms = [(self.x[i], size // grain) for i, size in row.nested if i in self.x]
        for storage, site in row.shared:
            if (storage, site) in self.k:
                terms.append((self.k[storage, site], self.problem.liveness.shared[storage].size_bytes // grain))
        return terms

    def bound_below(self, bound_us: float) -> None:
        """Require that every plan takes at least `bound_us`."""
        if bound_us > 0:
            self._require(((variable, -time) for variable, time in self.objective), -math.floor(bound_us * NS))

    def _chosen(self, regions: tuple[Region, ...]) -> tuple[set[int], set[int]]:
        """Return the x and s that are 1 in a plan."""
        chosen = {self.x[i] for i in self.problem.runs_of(regions) if i in self.x}
        return chosen, {self.s[v] for region in regions for v in region.saved if v in self.s}

    def hint(self, regions: tuple[Region, ...]) -> None:
        """Let the next search start from `regions`."""
        chosen, saved = self._chosen(regions)
        self.hints = {variable: int(variable in chosen) for variable in self.x.values()}
        self.hints |= {variable: int(variable in saved) for variable in self.s.values()}

    def exclude(self, regions: tuple[Region, ...]) -> None:
        """Exclude this one plan, which is over budget, whatever the rows say."""
        chosen, saved = self._chosen(regions)
        terms = [(x, 1) for x in chosen] + [(s, 1 if s in saved else -1) for s in self.s.values()]
        self._require(terms, len(chosen) + len(saved) - 1)

    def regions(self, values: Sequence[int]) -> tuple[Region, ...]:
        """Return the plan that `values` describe."""
        chosen = [self.problem.runs[i].region for i, x in self.x.items() if values[x]]
        saved = [v for v, s in self.s.items() if values[s]]
        regions = [
            Region(region.first, region.end, tuple(v for v in saved if v in region), region.inner)
            for region in chosen
            if region is not None
        ]
        return tuple(sorted(regions))
