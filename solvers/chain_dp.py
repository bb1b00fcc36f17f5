"""Dynamic programming along the chain of segments, over discretised memory (after Beaumont et al., rotor, 2019).

The program is nearly a chain (`chain.py`). With R[b][k][p] = least recompute time of the segments from cut b on, if
those before it keep p bytes, among them (k = 1) or not (k = 0) the storage tracked at b,

    R[a][k][p] = min  t_r - sum c_v s[v] + R[b][k'][p + kept_r + sum bytes s]      over runs r = [a, b), saves s
                 where p <= B - peak_r and p + kept_r + sum bytes s <= B - start_b

Runs that end at the same cut share the choice of what they save: what a region saves in its segments does not depend
on where it began, so the table of all saves in [a, b) is that of [a+1, b) with the nodes of segment a added. That
makes a transition for every run and a knapsack item for every segment of it, instead of all its items.

Two things keep it from being exact, and both are made to err on one side:

* Bytes are counted in grains, rounded down. The plan found that way may overstep the budget by a little; then the
  best plan is taken for a start at as many bytes more.
* Storages that are not tracked are counted late, and a run's rows are two. That can only understate, so the bound
  stands; the evaluator judges the plan.

The bound closes the exact program, whose own relaxation is weak where layers are alike: the solver there has to tell
apart permutations that all cost the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from remat.evaluation.plan import Region
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.chain import Case, Chain, lasting_storages
from remat.solvers.chain_table import Table, admits, choose_grain, regions_of
from remat.solvers.polish import polish
from remat.solvers.reduced_costs import useful_runs

NAME = "chain-dp"
TRIES = 6
FINER_S = 20.0  # may finer tables take, where nobody set a time limit
SMALL_GAP, TIRED_S = 0.005, 8.0  # so little is not worth more time than that
LEVELS = (
    (500, 10_000),
    (10_000, 40_000),
    (40_000, 150_000),
    (300_000, 1_000_000),
)  # grains in a budget, coarse to fine
FIRST_MAY_LOSE = 0.002  # of the room, by rounding; a table that is too coarse costs little
PLANS_S = 3.0  # for tables that promise no better bound, but may lead to a better plan
FILTER_FROM = 4  # times as many levels: then it pays to drop runs first, ...
FILTER_COST = 3  # ... which takes so many times as long as the table did
FEWER = 0.9  # of the runs: where a filter leaves more, a table of the same grain would say the same
NUMPY_LEVELS = 3_000  # that take as long as it takes to call numpy for any
SHARES = 5  # of what is held, tried at the coarsest grain: all, nothing, and between where the limits trade places


def solve(problem: Problem, limits: Limits) -> Solution:
    """A plan within `problem.budget_bytes` where rounding leaves one, and a bound that holds for every plan.

    Grains get finer until bound and plan meet, and skip what cannot tell more (`chain_table.admits`). Before each
    refinement, runs that the coarser bound excludes from every plan better than the best known are dropped where that
    pays: then the finer table takes less time, and the chain, being of fewer runs, understates less.
    """
    return explore(problem, limits).solution(limits)


def explore(problem: Problem, limits: Limits) -> Found:
    """What `solve` finds, with the runs that a better plan could consist of."""
    found = Found(problem, time.monotonic())
    if limits.start is not None:
        found.offer(limits.start)
    try:
        _Search(problem, limits, found).run()
    except KeyboardInterrupt:
        found.interrupted = True
    found.wall_s = time.monotonic() - found.started
    return found


@dataclasses.dataclass(frozen=True)
class Branch:
    """A case that may hold a better plan, made of the runs in `useful` (None: any).

    fineness  index into LEVELS of its tables, or of those that are to come
    held_percent  the share of what is held (`chain.py`) with the best bound so far; None before the first table
    tables    that say what `bound_ns` is
    """

    case: Case
    useful: set[int] | None = None
    bound_ns: float = 0.0
    fineness: int = 0
    held_percent: int | None = None
    tables: tuple[Table, ...] = ()

    @property
    def transition_count(self) -> int:
        return max(table.chain.transition_count for table in self.tables)

    @functools.cached_property
    def says_more_at(self) -> int | None:
        """The next fineness that rules out a plan of its tables, so that their bound may rise by that alone."""
        plans = [(table, legs) for table in self.tables if (legs := table.legs()) is not None]
        return next(
            (
                fineness
                for fineness in range(self.fineness + 1, len(LEVELS))
                if not all(admits(table.chain, legs, _grain(table.chain, fineness)) for table, legs in plans)
            ),
            None,
        )

    @property
    def next_fineness(self) -> int:
        """The fineness to go on with. A chain of fewer runs may say more at the same."""
        return self.fineness if self.says_more_at is None else self.says_more_at

    @property
    def is_filtered(self) -> bool:
        """Whether it pays to filter runs before going on."""
        return self.says_more_at is None or self.levels(self.next_fineness) >= FILTER_FROM * self.levels()

    def levels(self, fineness: int | None = None) -> int:
        """Levels of its tables, or of those that it would have at another fineness."""
        if fineness is None:
            return max(table.levels for table in self.tables)
        return max(table.levels * table.grain // _grain(table.chain, fineness) for table in self.tables)

    def cells(self, fineness: int | None = None) -> int:
        return _cells(self.transition_count, self.levels(fineness))

    def useful_below(self, most_ns: float) -> set[int] | None:
        """The runs of which every table says that a plan faster than `most_ns` may contain them."""
        useful = self.useful
        for table in self.tables:
            of_table = useful_runs(table, most_ns)
            useful = of_table if useful is None else useful & of_table
        return useful


@dataclasses.dataclass
class Found:
    """The best plan and bound so far; `left` are the cases that may hold a better plan, None if there may be others."""

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
        if self.problem.memory.curve(regions).peak_bytes > self.problem.budget_bytes:
            return
        time_ns = self.problem.objective_ns(regions)
        if time_ns < self.objective_ns:
            self.regions, self.objective_ns = regions, time_ns

    def raise_bound(self, bound_ns: float) -> None:
        """Take a bound on what could beat the best known; infinite where nothing can."""
        self.infeasible = math.isinf(bound_ns) and self.regions is None
        self.bound_ns = max(self.bound_ns, min(bound_ns, self.objective_ns))

    def closed(self, gap: float) -> bool:
        return self.infeasible or self.closes(self.bound_ns, gap)

    def closes(self, bound_ns: float, gap: float) -> bool:
        """Whether a plan can be at most `gap` better than the best known if `bound_ns` bounds it."""
        if self.regions is None:
            return False
        return self.objective_ns - bound_ns <= gap * max(self.objective_ns, NS)

    def patience_s(self, limits: Limits) -> float:
        """How long finer tables may take."""
        if self.regions is None:
            return math.inf
        elapsed_s = time.monotonic() - self.started
        if limits.time_s is not None:
            return limits.time_s - elapsed_s
        return TIRED_S - elapsed_s if self.closed(SMALL_GAP) else FINER_S

    def late(self, limits: Limits) -> bool:
        return limits.time_s is not None and time.monotonic() - self.started > limits.time_s

    def transition_count(self) -> float:
        """How many transitions are left to choose from."""
        return math.inf if self.left is None else sum(branch.transition_count for branch in self.left)

    def useful(self) -> set[int] | None:
        """The runs that a better plan may consist of; None for all."""
        if self.left is None:
            return None
        union: set[int] = set()
        for branch in self.left:
            useful = branch.useful_below(self.objective_ns)
            if useful is None:
                return None
            union |= useful
        return union

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


class _Search:
    """Improves `found` with ever finer grains, in the cases that may still hold a better plan."""

    def __init__(self, problem: Problem, limits: Limits, found: Found):
        self.problem, self.limits, self.found = problem, limits, found
        self.lasting = lasting_storages(problem)
        self.spent_s, self.cells = 0.0, 0

    def run(self) -> None:
        found, limits = self.found, self.limits
        waiting, exhausted = [Branch(Case())], list[Branch]()
        while waiting:
            solved, waiting = self._solve(waiting)
            left = [*exhausted, *solved, *waiting]
            found.raise_bound(min((branch.bound_ns for branch in left), default=math.inf))
            found.left = None if waiting else left
            if limits.on_progress is not None and found.regions is not None:
                limits.on_progress(found.objective_ns / NS, found.bound_ns / NS)
            if found.late(limits) or found.closed(limits.gap):
                return
            waiting, done = self._refined([branch for branch in solved if branch.bound_ns < found.objective_ns])
            exhausted += done
            if any(branch.bound_ns <= found.bound_ns for branch in exhausted):
                return

    def _solve(self, waiting: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        """(those that may hold a better plan, solved and split as far as that helps; those that it was too late for)"""
        found, solved = self.found, list[Branch]()
        while waiting and not found.late(self.limits):
            branch = self._solve_branch(waiting.pop())
            if branch.bound_ns >= found.objective_ns:
                continue
            unsettled = [u for u in self.lasting if u not in branch.case.pinned | branch.case.absent]
            if unsettled and not found.closes(branch.bound_ns, self.limits.gap):
                kept, absent = branch.case.split(unsettled[0])
                waiting += [dataclasses.replace(branch, case=case, tables=()) for case in (absent, kept)]
            else:
                solved.append(branch)
        return solved, waiting

    def _solve_branch(self, branch: Branch) -> Branch:
        """`branch` with a better bound, infinite if it holds no plan, and the tables that say so; plans are offered."""
        started, tables, bounds = time.monotonic(), list[Table](), dict[int, float]()
        low, high, percent = 0, 100, 100 if branch.held_percent is None else branch.held_percent
        while percent not in bounds:
            table = self._table(branch, percent)
            tables.append(table)
            of_table = table.least_time_ns()
            bounds[percent] = math.inf if of_table is None else of_table
            overstepped = _offer_plan(table, self.found)
            is_last = branch.held_percent is not None or not table.chain.holds_any or len(tables) == SHARES
            if overstepped is None or is_last:
                break
            if overstepped == "forward":
                high, percent = percent, (low + percent) // 2 if low in bounds else low
            else:
                low, percent = percent, (percent + high) // 2
        self.spent_s += time.monotonic() - started
        best = max(bounds, key=lambda percent: bounds[percent])
        bound_ns = max(branch.bound_ns, bounds[best])
        return dataclasses.replace(branch, bound_ns=bound_ns, held_percent=best, tables=tuple(tables))

    def _table(self, branch: Branch, held_percent: int) -> Table:
        chain = Chain(self.problem, branch.case, branch.useful, held_percent=held_percent)
        table = Table(chain, _grain(chain, branch.fineness))
        self.cells += _cells(chain.transition_count, table.levels)
        return table

    def _refined(self, branches: Sequence[Branch]) -> tuple[list[Branch], list[Branch]]:
        """(`branches` for the next tables, without the runs that need not be considered; those of which no table says
        more). Neither where that takes too long.
        """
        patience_s = self.found.patience_s(self.limits)
        filter_s = self._expected_s(FILTER_COST * branch.cells() for branch in branches if branch.is_filtered)
        table_s = self._expected_s(branch.cells(branch.next_fineness) for branch in branches)
        if filter_s + table_s / 2 > patience_s:  # a filter may well leave half
            return [], []
        refined, exhausted = list[Branch](), list[Branch]()
        for branch in branches:
            useful = branch.useful_below(self.found.objective_ns) if branch.is_filtered else branch.useful
            before = len(self.problem.runs) if branch.useful is None else len(branch.useful)
            fineness = branch.next_fineness
            if branch.says_more_at is None and useful is not None and len(useful) > FEWER * before:
                fineness += 1  # which may still lead to a better plan
                if not self._is_cheap(branch, fineness, PLANS_S / len(branches)):
                    exhausted.append(branch)
                    continue
            refined.append(Branch(branch.case, useful, branch.bound_ns, fineness, branch.held_percent))
        return refined, exhausted

    def _is_cheap(self, branch: Branch, fineness: int, most_s: float) -> bool:
        return fineness < len(LEVELS) and self._expected_s([branch.cells(fineness)]) <= most_s

    def _expected_s(self, cells: Iterable[int]) -> float:
        return self.spent_s * sum(cells) / max(self.cells, 1)


def _cells(transition_count: int, levels: int) -> int:
    """What the time of a table is proportional to."""
    return transition_count * (levels + NUMPY_LEVELS)


def _grain(chain: Chain, fineness: int) -> int:
    return choose_grain(chain, LEVELS[fineness], may_lose=0.0 if fineness else FIRST_MAY_LOSE)


def _offer_plan(table: Table, found: Found) -> Literal["forward", "backward"] | None:
    """Offer the best plan of `table` or, as a table understates, the best of those that keep so much less.

    Returns where the first one oversteps the budget most.
    """
    problem = table.chain.problem
    overstepped: Literal["forward", "backward"] | None = None
    spare = 0
    for attempt in range(TRIES):
        legs = table.legs(spare)
        if legs is None:
            break
        regions = regions_of(problem, legs)
        curve = problem.memory.curve(regions)
        excess = curve.peak_bytes - problem.budget_bytes
        polished = polish(problem, regions)
        if polished is not None:
            found.offer(polished)
        if excess <= 0:
            break
        if attempt == 0:
            forward = curve.op[curve.peak_at] < problem.graph.forward_end and curve.region[curve.peak_at] < 0
            overstepped = "forward" if forward else "backward"
        spare += max(excess, table.grain)
    return overstepped
