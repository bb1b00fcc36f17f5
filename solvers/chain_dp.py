"""Dynamic programming along the chain of segments, over discretised memory (after Beaumont et al., rotor, 2019).

The program is nearly a chain (`chain.py`). With R[b][k][p] = least recompute time of the segments from cut b on, if
those before it keep p bytes, among them (k = 1) or not (k = 0) the state storage of b,

    R[a][k][p] = min  t_r - sum c_v s[v] + R[b][k'][p + kept_r + sum bytes s]      over runs r = [a, b), saves s
                 where p <= B - peak_r and p + kept_r + sum bytes s <= B - start_b

Runs that end at the same cut share the choice of what they save: what a region saves in its segments does not depend
on where it began, so the table of all saves in [a, b) is that of [a+1, b) with the nodes of segment a added. That
makes a transition for every run and a knapsack item for every segment of it, instead of all its items.

Two things keep it from being exact, and both are made to err on one side:

* Bytes are counted in grains, rounded down. The plan found that way may overstep the budget by a little; then the
  best plan is taken for a start at as many bytes more.
* One number of bytes stands for several that have limits of their own, shared storages outside the state are counted
  late, and a run's rows are two. That can only understate, so the bound stands; the evaluator judges the plan.

What a table leaves near its bound is searched with bytes counted exactly, and with as many numbers of them as plans
overstep limits (`chain_labels.py`).

The bound closes the exact program, whose own relaxation is weak where layers are isomorphic: the solver there has to
tell apart permutations that all cost the same.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remat.evaluation.plan import Region
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.solution import SMALL_GAP, Limits, Solution
from remat.solvers.chain import Case, Chain, storages_outside
from remat.solvers.chain_branch import LEVELS, Branch, Count, cells_of, grain_of
from remat.solvers.chain_labels import Limit, Optimum, climb
from remat.solvers.chain_table import Leg, Table, admits, lost_bytes, regions_of
from remat.solvers.deadline import NEVER, Deadline, OutOfTime
from remat.solvers.polish import polish

NAME = "chain-dp"
TRIES = 6
FILTER_COST = 3  # time of a filter of runs over that of its table
FEWER = 0.9  # of the runs: if a filter leaves more, a table of the same grain would not differ
PROGRESS = 0.02  # of the gap: less counts as no progress
LABELS_GAP = 0.03  # the best plan must be so close to the bound, or labels are too many
COUNTS = 5  # of forward-held bytes, tried at the coarsest grain: all, none, and where the limits trade places


def solve(problem: Problem, limits: Limits) -> Solution:
    """Find a plan within `problem.budget_bytes`, if rounding leaves one, and a bound for all plans.

    Branch and bound, until bound and plan meet. A table's plan exceeds the budget either by rounding, and the grain
    gets finer, or by something that the chain leaves out, and the case is split into cases that count it
    (`Branch.parts`). Grains that cannot tell more are skipped (`chain_table.admits`). Before each refinement, runs that
    the coarser bound excludes from every better plan are dropped if that is worth its time: the finer table is then
    faster, and the chain, having fewer runs, underestimates less.
    """
    return explore(problem, limits).solution(limits)


def explore(problem: Problem, limits: Limits) -> Incumbent:
    """Solve the problem, and return the solution with the runs that a better plan could consist of."""
    started = time.monotonic()
    found = Incumbent(problem, limits.now())
    if limits.start is not None:
        found.offer(limits.start)
    try:
        _ChainSearch(problem, limits, found).run()
    except KeyboardInterrupt:
        found.interrupted = True
    found.wall_s = time.monotonic() - started
    return found


@dataclasses.dataclass
class Incumbent:
    """The best plan and bound so far; `left` lists cases that may hold a better plan, None if unknown.

    started  by `Limits.now`
    """

    problem: Problem
    started: float
    regions: tuple[Region, ...] | None = None
    objective_ns: float = math.inf
    bound_ns: float = 0.0
    left: list[Branch] | None = None
    infeasible: bool = False
    interrupted: bool = False
    wall_s: float = 0.0

    def offer(self, regions: tuple[Region, ...]) -> None:
        """Take a plan if it keeps the budget and is better."""
        if self.problem.curve(regions).peak_bytes > self.problem.budget_bytes:
            return
        time_ns = self.problem.objective_ns(regions)
        if time_ns < self.objective_ns:
            self.regions, self.objective_ns = regions, time_ns

    def raise_bound(self, bound_ns: float) -> None:
        """Raise the bound on plans that beat the best known one; infinite if none can."""
        self.infeasible = math.isinf(bound_ns) and self.regions is None
        self.bound_ns = max(self.bound_ns, min(bound_ns, self.objective_ns))

    def closed(self, gap: float) -> bool:
        return self.infeasible or self.closes(self.bound_ns, gap)

    def suffices(self, limits: Limits) -> bool:
        """Return whether the search may end: the plan is as good as any, or no better one would be used."""
        is_of_no_use = self.regions is not None and self.bound_ns >= limits.below_us * NS
        return is_of_no_use or self.infeasible or limits.suffices(self.objective_ns / NS, self.bound_ns / NS)

    def closes(self, bound_ns: float, gap: float) -> bool:
        """Return whether no plan beats the best known one by more than `gap` if `bound_ns` is a bound."""
        if self.regions is None:
            return False
        return self.objective_ns - bound_ns <= gap * max(self.objective_ns, NS)

    def patience_s(self, limits: Limits) -> float:
        """Return the seconds that finer tables may take."""
        if self.regions is None:
            return math.inf
        elapsed_s = limits.now() - self.started
        if limits.time_s is not None:
            return limits.time_s - elapsed_s
        return limits.clock.small_gap_s - elapsed_s if self.closed(SMALL_GAP) else limits.clock.finer_s

    def late(self, limits: Limits) -> bool:
        return limits.time_s is not None and limits.now() - self.started > limits.time_s

    def transition_count(self) -> float:
        """Count the transitions that are left to choose from."""
        return math.inf if self.left is None else sum(branch.transition_count for branch in self.left)

    def useful(self, deadline: Deadline = NEVER) -> set[int] | None:
        """Return the runs that a better plan may contain; None for all, or if unknown by `deadline`."""
        if self.left is None:
            return None
        try:
            each = [branch.useful_below(self.objective_ns, deadline) for branch in self.left]
        except OutOfTime:
            return None
        return None if None in each else set().union(*(runs for runs in each if runs is not None))

    def solution(self, limits: Limits) -> Solution:
        if self.infeasible:
            return Solution(NAME, "infeasible", wall_s=self.wall_s)
        bound_us = self.bound_ns / NS
        if self.regions is None:
            return Solution(NAME, "unknown", bound_us=bound_us, wall_s=self.wall_s, interrupted=self.interrupted)
        return Solution(
            NAME,
            "optimal" if self.closed(limits.gap) else "feasible",
            self.regions,
            self.objective_ns / NS,
            bound_us,
            self.wall_s,
            interrupted=self.interrupted,
        )


class _ChainSearch:
    """Branch and bound: split the case with the lowest bound, or refine its grain, until bound and plan meet."""

    def __init__(self, problem: Problem, limits: Limits, found: Incumbent):
        self.problem, self.limits, self.found = problem, limits, found
        self.open: list[Branch] = []
        self.exhausted: list[Branch] = []  # of which no table says more, or none in time
        self.spent_s, self.cells, self.labels_s = 0.0, 0, 0.0
        self.gained_at, self.gap_then_ns = found.started, math.inf
        self.deadline = Deadline.of(limits, found.started)
        self.branch = Branch(Case())  # that is being solved, or refined, or split

    def run(self) -> None:
        try:
            self._branch_and_bound()
        except OutOfTime:
            self.exhausted.append(self.branch)
            self._tell()

    def _branch_and_bound(self) -> None:
        found = self.found
        self._add(self.branch)
        self._tell()
        while self.open:
            if found.late(self.limits) or found.suffices(self.limits) or self._stalls():
                return
            self.branch = branch = self.open.pop(0)
            if any(each.bound_ns <= branch.bound_ns for each in self.exhausted):
                return
            if not branch.has_labels and self._is_for_labels(branch):
                before_ns, branch = branch.bound_ns, self._to_the_byte(branch)
                if branch.bound_ns > before_ns:
                    self._keep(branch)
                    self._tell()
                    continue
            parts = self._parts(branch)
            if not parts:
                self.exhausted.append(branch)
            for part in parts:
                if found.late(self.limits):
                    self.exhausted.append(branch)  # represents those without enough time left
                    break
                self._add(part, branch)
            self._tell()

    def _stalls(self) -> bool:
        """Return whether the gap has stalled for long, relative to the time that it took to get there.

        Without a time limit, a search that has a plan also ends some time after it began.
        """
        now, gap_ns = self.limits.now(), self.found.objective_ns - self.found.bound_ns
        if self.limits.time_s is None and now - self.found.started > self.limits.clock.chain_s and gap_ns < math.inf:
            return True
        if math.isinf(gap_ns) or gap_ns < (1 - PROGRESS) * self.gap_then_ns:
            self.gained_at, self.gap_then_ns = now, gap_ns
        return now - self.gained_at > max(self.limits.clock.stalls_s, self.gained_at - self.found.started)

    def _add(self, branch: Branch, whole: Branch | None = None) -> None:
        """Solve `branch`, which is `whole` or a part of it, and keep it if it may hold a better plan."""
        solved = self._solve_branch(branch)
        if solved.is_recounted and whole is not None and not solved.has_gained(self.found.objective_ns):
            better = max(whole, solved, key=lambda each: _or_infinite(each.table.least_time_ns()))
            solved = dataclasses.replace(better, bound_ns=solved.bound_ns, stays=True)
        self._keep(solved)

    def _keep(self, branch: Branch) -> None:
        self.open = sorted([*self.open, branch], key=lambda each: each.bound_ns)
        self.open = [each for each in self.open if each.bound_ns < self.found.objective_ns]

    def _tell(self) -> None:
        found = self.found
        found.left = [*self.open, *self.exhausted]
        found.raise_bound(min((branch.bound_ns for branch in found.left), default=math.inf))
        self._report()

    def _report(self) -> None:
        found = self.found
        if self.limits.on_progress is not None and found.regions is not None:
            self.limits.on_progress(found.objective_ns / NS, found.bound_ns / NS)

    def _parts(self, branch: Branch) -> list[Branch]:
        """Return `branch` in halves or with a finer grain, whichever gains more; empty if time allows neither."""
        is_rounding = branch.says_more_at is not None and self._is_rounding(branch)
        in_vain = not branch.is_recounted and not branch.has_gained(self.found.objective_ns)
        ways = [self._refined, self._halved] if is_rounding or in_vain else [self._halved, self._refined]
        return next((parts for way in ways if (parts := way(branch))), [])

    def _is_rounding(self, branch: Branch) -> bool:
        """Return whether rounding alone may explain that the best table's plan exceeds the budget."""
        table, legs = branch.table, branch.plan
        excess = _excess(self.problem, legs)
        return branch.legs is None and excess <= lost_bytes(table.chain, legs, table.grain)

    def _is_for_labels(self, branch: Branch) -> bool:
        """Return whether only rounding, mixed limits or storages outside the state make its plan exceed the budget.

        There must also be time for them, and the labels few: in all they take about as long as tables.
        """
        if self.found.regions is None or self.labels_s > self.spent_s + self.limits.clock.labels_s:
            return False
        chain, legs = branch.table.chain, branch.plan
        overstepped = _overstepped(self.problem, regions_of(self.problem, legs))
        if overstepped is None:
            return False
        if branch.uncounted:
            return not branch.elsewhere
        if not self.found.closes(branch.bound_ns, LABELS_GAP):
            return False
        return overstepped.limit != branch.count or not admits(chain, legs, 1)

    def _halved(self, branch: Branch) -> list[Branch]:
        if self.found.regions is None:
            return []
        tables = 2 * len(branch.tables)
        if self._expected_s(tables * [branch.cells()]) > self.found.patience_s(self.limits):
            return []
        count = None if branch.fineness == 0 else branch.count
        parts = branch.parts(self.found.regions)
        return [dataclasses.replace(part, count=count) for part in parts]

    def _solve_branch(self, branch: Branch) -> Branch:
        """Return `branch` with its tables and a better bound, infinite if it holds no plan; offer their plans.

        If a table's plan exceeds the forward's limits, the next table counts less of the forward-held bytes; if it
        counts none already, its points are those at which plans exceeded the budget so far (fictitious play: Brown
        1951).
        """
        started, tables = self.limits.now(), dict[Count, tuple[float, Table]]()
        low, high, count = 0, 100, branch.count or Count()
        while count not in tables:
            try:
                table = self._table(branch, count)
            except OutOfTime:
                if not tables:
                    raise
                break
            of_table = table.least_time_ns()
            tables[count] = _or_infinite(of_table), table
            overstepped = _offer_plans(table, self.found)
            if self.found.left is None and of_table is not None:  # a bound on all plans, reported before the next table
                self.found.raise_bound(of_table)
                self._report()
            if overstepped is None or branch.count is not None or len(tables) == COUNTS:
                break
            if self.found.suffices(self.limits):
                break
            if not overstepped.in_forward:
                low, percent = count.percent, (count.percent + high) // 2
            elif count.percent == low:
                if {overstepped.op} == {*table.chain.held_at}:
                    break
                count = dataclasses.replace(count, held_at=(*count.held_at, overstepped.op))
                continue
            else:
                known = {each.percent for each in tables}
                high, percent = count.percent, (low + count.percent) // 2 if low in known else low
            if not table.chain.has_forward_held:
                break
            count = dataclasses.replace(count, percent=percent)
        self.spent_s += self.limits.now() - started
        by_bound = sorted(tables, key=lambda count: -tables[count][0])
        best_ns = tables[by_bound[0]][0]
        return dataclasses.replace(
            branch,
            bound_ns=max(branch.bound_ns, best_ns),
            count=by_bound[0],
            tables={count: tables[count][1] for count in by_bound},
        )

    def _to_the_byte(self, branch: Branch) -> Branch:
        """Return `branch` with a bound that neither rounding nor mixed limits lower, as far as labels stay few.

        They are limited by the chain of the best table, and by chains that count the excess of the labels' plans.
        """
        started = self.limits.now()
        assert branch.count is not None
        others = (each for each in branch.counts if each != branch.count)
        aside = storages_outside(self.problem, branch.case) if branch.uncounted else ()
        branch = dataclasses.replace(branch, has_labels=True, counts=(branch.count, *others))
        among: list[Limit] = []
        while True:
            try:
                for count in branch.counts[len(among) :]:
                    table = branch.tables[count] if count in branch.tables else self._table(branch, count)
                    among.append(Limit.of(table, aside))
            except OutOfTime:
                break
            optimum = self._climb(among, branch.bound_ns)
            of_labels = () if optimum.legs is None else aside
            branch = dataclasses.replace(branch, bound_ns=optimum.bound_ns, legs=optimum.legs, aside=of_labels)
            if optimum.legs is None:
                break
            overstepped = _offer(optimum.legs, self.found)
            if overstepped is None:
                break
            is_late = self.limits.now() - started > self.spent_s + self.limits.clock.labels_s
            if overstepped.limit in branch.counts:
                # Legs of labels with storages set aside are not the table's: too little is known of them.
                chain, grain = branch.table.chain, branch.table.grain
                is_slight = bool(aside) or overstepped.bytes <= lost_bytes(chain, optimum.legs, grain)
                if is_slight and not is_late:
                    self._offer_less(among, branch.bound_ns, overstepped.bytes)
                break
            if is_late:
                break
            branch = dataclasses.replace(branch, counts=(*branch.counts, overstepped.limit))
        took_s = self.limits.now() - started
        self.labels_s += took_s
        self.gained_at += took_s  # their failure says little about tables
        return branch

    def _climb(self, among: Sequence[Limit], bound_ns: float, spare_bytes: int = 0) -> Optimum:
        """Climb with labels; those that track storages set aside replace many tables, and may take as long."""
        most_ns, step_s, deadline = self.found.objective_ns, self.limits.clock.labels_s, self.deadline
        if among[0].chain.case.aside:
            step_s, deadline = math.inf, deadline.in_at_most(self.found.patience_s(self.limits))
        return climb(among, bound_ns, most_ns, step_s=step_s, deadline=deadline, spare_bytes=spare_bytes)

    def _offer_less(self, among: Sequence[Limit], bound_ns: float, spare_bytes: int) -> None:
        """Offer the best of the plans that keep fewer bytes, as chains underestimate, and fewer again."""
        for _ in range(TRIES - 1):
            if self.found.late(self.limits):
                return
            optimum = self._climb(among, bound_ns, spare_bytes)
            overstepped = _offer(optimum.legs, self.found) if optimum.legs is not None else None
            if overstepped is None:
                return
            spare_bytes += overstepped.bytes

    def _table(self, branch: Branch, count: Count) -> Table:
        chain = Chain(
            self.problem, branch.case, branch.useful, forward_held_percent=count.percent, held_at=count.held_at
        )
        deadline = self.deadline if self.cells else NEVER  # without the first table there is no bound
        table = Table(chain, grain_of(chain, branch.fineness), deadline)
        self.cells += cells_of(chain.transition_count, table.levels)
        return table

    def _refined(self, branch: Branch) -> list[Branch]:
        """Return `branch` with a finer grain, or without the runs that cannot matter."""
        patience_s = self.found.patience_s(self.limits)
        filter_s = self._expected_s([FILTER_COST * branch.cells()] if branch.is_filtered else [])
        table_s = self._expected_s([branch.cells(branch.next_fineness)])
        if filter_s + table_s / 2 > patience_s:  # a filter may well leave half
            return []
        useful = branch.useful
        if branch.is_filtered:
            useful = branch.useful_below(self.found.objective_ns, self.deadline)
        before = len(self.problem.runs) if branch.useful is None else len(branch.useful)
        fineness = branch.next_fineness
        if branch.says_more_at is None and useful is not None and len(useful) > FEWER * before:
            fineness += 1  # which may still lead to a better plan
            if not self._is_cheap(branch, fineness, self.limits.clock.plans_s):
                return []
        return [Branch(branch.case, useful, branch.bound_ns, fineness, branch.count, counts=branch.counts)]

    def _is_cheap(self, branch: Branch, fineness: int, most_s: float) -> bool:
        return fineness < len(LEVELS) and self._expected_s([branch.cells(fineness)]) <= most_s

    def _expected_s(self, cells: Iterable[int]) -> float:
        return self.spent_s * sum(cells) / max(self.cells, 1)


def _or_infinite(time_ns: float | None) -> float:
    """Return the time of a table, infinite if it has no plan."""
    return math.inf if time_ns is None else time_ns


def _excess(problem: Problem, legs: Sequence[Leg]) -> int:
    """Return the bytes by which the plan of `legs` exceeds the budget."""
    return problem.curve(regions_of(problem, legs)).peak_bytes - problem.budget_bytes


class _Excess(NamedTuple):
    """The excess of a plan over the budget, the operator at its maximum, and whether that is in forward."""

    bytes: int
    op: int
    in_forward: bool

    @property
    def limit(self) -> Count:
        """The count with the same limit."""
        return Count(0, (self.op,)) if self.in_forward else Count()


def _overstepped(problem: Problem, regions: tuple[Region, ...]) -> _Excess | None:
    """Return the point at which a plan exceeds the budget most; None if it does not."""
    curve = problem.curve(regions)
    if curve.peak_bytes <= problem.budget_bytes:
        return None
    op = int(curve.op[curve.peak_at])
    in_forward = op < problem.graph.forward_end and curve.region[curve.peak_at] < 0
    return _Excess(curve.peak_bytes - problem.budget_bytes, op, in_forward)


def _offer(legs: Sequence[Leg], found: Incumbent) -> _Excess | None:
    """Offer the plan `legs`; return where it exceeds the budget, None if it does not."""
    problem, regions = found.problem, regions_of(found.problem, legs)
    polished = polish(problem, regions)
    if polished is not None:
        found.offer(polished)
    return _overstepped(problem, regions)


def _offer_plans(table: Table, found: Incumbent) -> _Excess | None:
    """Offer the best plan of `table` or, as a table underestimates, the best that keeps as much less as needed.

    Returns where the first one exceeds the budget, None if it does not.
    """
    first: _Excess | None = None
    spare = 0
    for _ in range(TRIES):
        legs = table.legs(spare)
        overstepped = _offer(legs, found) if legs is not None else None
        if overstepped is None:
            break
        first = first or overstepped
        spare += max(overstepped.bytes, table.grain)
    return first
