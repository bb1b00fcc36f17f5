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
import math
import time
from collections.abc import Iterable

from remat.plans import Region
from remat.problem import NS, Problem
from remat.solution import Limits, Solution
from remat.solvers.chain import Case, Chain, lasting_storages
from remat.solvers.chain_table import Table
from remat.solvers.polish import polish

NAME = "chain-dp"
TRIES = 6
FINER_S = 20.0  # may finer tables take, where nobody set a time limit
SMALL_GAP, TIRED_S = 0.005, 8.0  # so little is not worth more time than that
LEVELS = (
    (3_000, 10_000),
    (10_000, 40_000),
    (40_000, 150_000),
    (300_000, 1_000_000),
)  # grains in a budget, coarse to fine


def solve(problem: Problem, limits: Limits) -> Solution:
    """A plan within `problem.budget_bytes` where rounding leaves one, and a bound that holds for every plan.

    Grains get finer until bound and plan meet. Before each refinement, runs that the coarser bound excludes from
    every plan better than the best known are dropped.
    """
    return explore(problem, limits).solution(limits)


def explore(problem: Problem, limits: Limits) -> Found:
    """What `solve` finds, with the runs that a better plan could consist of."""
    found = Found(problem, time.monotonic())
    if limits.start is not None:
        found.offer(limits.start)
    try:
        _refine(problem, limits, found)
    except KeyboardInterrupt:
        found.interrupted = True
    found.wall_s = time.monotonic() - found.started
    return found


@dataclasses.dataclass
class Found:
    """The best plan and bound so far; `useful` are the runs that a better plan may consist of, None for all."""

    problem: Problem
    started: float
    regions: tuple[Region, ...] | None = None
    objective_ns: float = math.inf
    bound_ns: float = 0.0
    useful: set[int] | None = None
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

    def is_good_enough(self, limits: Limits) -> bool:
        """Whether to leave it at that where nobody set a time limit."""
        tired = limits.time_s is None and time.monotonic() - self.started > TIRED_S
        return tired and self.closed(SMALL_GAP)

    def patience_s(self, limits: Limits) -> float:
        """How long finer tables may take."""
        if self.regions is None:
            return math.inf
        if limits.time_s is None:
            return FINER_S
        return limits.time_s - (time.monotonic() - self.started)

    def late(self, limits: Limits) -> bool:
        return limits.time_s is not None and time.monotonic() - self.started > limits.time_s

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


def _refine(problem: Problem, limits: Limits, found: Found) -> None:
    """Improve `found` with ever finer grains, in the cases that may still hold a better plan."""
    lasting = lasting_storages(problem)
    branches: list[_Branch] = [_Branch(Case(), None, 0.0)]
    for levels, finer in zip(LEVELS, (*LEVELS[1:], None), strict=True):
        waiting, solved = branches, []
        work = _Work()
        while waiting and not found.late(limits):
            branch, tables = _solve_case(problem, waiting.pop(), levels, found)
            work.add(tables)
            if branch.bound_ns >= found.objective_ns:
                continue
            unsettled = [u for u in lasting if u not in branch.case.pinned | branch.case.absent]
            if unsettled and not found.closes(branch.bound_ns, limits.gap):
                kept, absent = branch.case.split(unsettled[0])
                waiting += [dataclasses.replace(branch, case=absent), dataclasses.replace(branch, case=kept)]
            else:
                solved.append((branch, tables))
        left = [branch for branch, _ in solved] + waiting
        found.raise_bound(min((branch.bound_ns for branch in left), default=math.inf))
        if limits.on_progress is not None and found.regions is not None:
            limits.on_progress(found.objective_ns / NS, found.bound_ns / NS)
        if finer is None or found.late(limits) or found.closed(limits.gap) or found.is_good_enough(limits):
            return
        branches = [
            dataclasses.replace(branch, useful=_useful(branch, tables, found))
            for branch, tables in solved
            if branch.bound_ns < found.objective_ns
        ]
        found.useful = _union(branch.useful for branch in branches)
        if finer in LEVELS[2:] and work.expected_s(branches, finer) > found.patience_s(limits):
            return


class _Work:
    """How long tables took, to tell how long finer ones will."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.cells = 0

    def add(self, tables: Iterable[Table]) -> None:
        self.cells += sum(table.levels * table.chain.transition_count for table in tables)

    def expected_s(self, branches: Iterable[_Branch], levels: tuple[int, int]) -> float:
        """Seconds for one table of `levels` for each of `branches`."""
        cells = sum(sum(levels) // 2 * len(branch.useful) for branch in branches if branch.useful is not None)
        return (time.monotonic() - self.started) * cells / max(self.cells, 1)


def _union(sets: Iterable[set[int] | None]) -> set[int] | None:
    """All of them together; None stands for everything."""
    union: set[int] = set()
    for members in sets:
        if members is None:
            return None
        union |= members
    return union


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A case that may hold a better plan, made of the runs in `useful` (None: any)."""

    case: Case
    useful: set[int] | None
    bound_ns: float


def _solve_case(
    problem: Problem, branch: _Branch, levels: tuple[int, int], found: Found
) -> tuple[_Branch, list[Table]]:
    """`branch` with a better bound, infinite if it holds no plan, and the tables that say so; plans are offered."""
    tables: list[Table] = []
    for count_held in (True, False):
        table = Table(Chain(problem, branch.case, branch.useful, count_held=count_held), levels)
        tables.append(table)
        bound_ns = table.least_time_ns()
        branch = dataclasses.replace(branch, bound_ns=max(branch.bound_ns, math.inf if bound_ns is None else bound_ns))
        if math.isinf(branch.bound_ns) or not _offer_plan(table, found):
            break
    return branch, tables


def _useful(branch: _Branch, tables: list[Table], found: Found) -> set[int] | None:
    """The runs of which every table says that a better plan may contain them."""
    useful = branch.useful
    for table in tables:
        of_table = table.useful(found.objective_ns)
        useful = of_table if useful is None else useful & of_table
    return useful


def _offer_plan(table: Table, found: Found) -> bool:
    """Offer the best plan of `table` or, as a table understates, the best of those that keep so much less.

    Returns whether the first one oversteps the budget in forward.
    """
    problem = table.chain.problem
    forward_binds = False
    spare = 0
    for attempt in range(TRIES):
        regions = table.plan(spare)
        if regions is None:
            break
        curve = problem.memory.curve(regions)
        excess = curve.peak_bytes - problem.budget_bytes
        polished = polish(problem, regions)
        if polished is not None:
            found.offer(polished)
        if excess <= 0:
            break
        if attempt == 0:
            forward_binds = bool(
                curve.op[curve.peak_at] < problem.graph.forward_end and curve.region[curve.peak_at] < 0
            )
        spare += max(excess, table.grain)
    return forward_binds
