"""Branches of the branch and bound along the chain: a case that may hold a better plan, with its tables.

A branch is split where its best table's plan oversteps the budget by what the chain leaves out (`Branch.parts`), and
its tables get a finer grain where rounding may be why (`Branch.says_more_at`). `chain_dp.py` decides which, and when.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from remat.formulation.choices import Run, SharedStorage
from remat.formulation.problem import Problem
from remat.solvers.chain import SMALLEST_STORAGE_DIVISOR, Case, Chain
from remat.solvers.chain_table import Leg, Table, admits, choose_grain, regions_of
from remat.solvers.deadline import NEVER, Deadline
from remat.solvers.heuristic import Proposal
from remat.solvers.program import over_budget
from remat.solvers.reduced_costs import useful_runs

LEVELS = (
    (500, 10_000),
    (10_000, 40_000),
    (40_000, 150_000),
    (300_000, 1_000_000),
)  # grains in a budget, coarse to fine
FIRST_MAY_LOSE = 0.002  # of the room, by rounding; a table that is too coarse costs little
FILTER_FROM = 4  # times as many levels: then it pays to drop runs first
NUMPY_LEVELS = 3_000  # whose time equals the overhead of a numpy call
SPLIT_GAIN = 0.1  # of the gap: a split that closes less of it is the last


@dataclasses.dataclass(frozen=True)
class Count:
    """How a chain counts forward-held bytes (`chain.py`): a share of those that are local at operators of forward."""

    percent: int = 100
    held_at: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Branch:
    """A case that may hold a better plan, made of the runs in `useful` (None: any).

    fineness  index into LEVELS of its tables, present or future
    count     the count of forward-held bytes with the best bound so far; None before the first table
    tables    the tables that prove `bound_ns`, by count, the one with the best bound first
    whole_ns  the bound of the branch that it is a part of, None if that one's tables have another grain
    counts    the counts whose chains limit labels (`chain_labels.py`)
    aside     the storages that labels count themselves
    legs      the best plan within the limits of all of them, None if unknown; its transitions are of chains that set
              `aside` aside, so not the tables'
    has_labels  whether labels have searched for it
    is_recounted  whether it differs from the whole only in the sites at which storages are counted
    stays     whether counting them at other sites again cannot raise the bound, at this grain
    """

    case: Case
    useful: set[int] | None = None
    bound_ns: float = 0.0
    fineness: int = 0
    count: Count | None = None
    tables: Mapping[Count, Table] = dataclasses.field(default_factory=dict)
    whole_ns: float | None = None
    is_recounted: bool = False
    stays: bool = False
    counts: tuple[Count, ...] = ()
    aside: tuple[int, ...] = ()
    legs: tuple[Leg, ...] | None = None
    has_labels: bool = False

    @property
    def table(self) -> Table:
        """The table with the best bound."""
        return next(iter(self.tables.values()))

    @property
    def plan(self) -> Sequence[Leg]:
        """A plan that costs at most the bound."""
        legs = self.table.legs() if self.legs is None else self.legs
        assert legs is not None
        return legs

    def has_gained(self, best_ns: float) -> bool:
        """Return whether the last split closed more than a little of the gap to the best plan."""
        if self.whole_ns is None:
            return True
        return self.bound_ns - self.whole_ns > SPLIT_GAIN * (best_ns - self.bound_ns)

    @functools.cached_property
    def uncounted(self) -> list[tuple[int, int]]:
        """The uncounted storages that its plan keeps where it exceeds the budget, largest first (`uncounted_in`)."""
        return uncounted_in(self.table.chain, dataclasses.replace(self.case, aside=self.aside), self.plan)

    @property
    def elsewhere(self) -> dict[int, int]:
        """Other sites for uncounted storages that exclude its plan, if these may raise the bound."""
        if self.stays or self.legs is not None:
            return {}
        return {u: site for u, site in self.uncounted if self.case.counted.get(u) != site}

    @property
    def transition_count(self) -> int:
        return max(table.chain.transition_count for table in self.tables.values())

    @functools.cached_property
    def says_more_at(self) -> int | None:
        """The next fineness that excludes the plan of its best table, so that it may raise the bound by itself."""
        if self.legs is not None:
            return None
        chain, finer = self.table.chain, range(self.fineness + 1, len(LEVELS))
        return next((f for f in finer if not admits(chain, self.plan, grain_of(chain, f))), None)

    @property
    def next_fineness(self) -> int:
        """The fineness to go on with. A chain of fewer runs may raise the bound at the same fineness."""
        return self.fineness if self.says_more_at is None else self.says_more_at

    @property
    def is_filtered(self) -> bool:
        """Whether filtering runs before going on is worth its time."""
        return self.says_more_at is None or self.levels(self.next_fineness) >= FILTER_FROM * self.levels()

    def levels(self, fineness: int | None = None) -> int:
        """Return the number of levels of its tables, or of its tables at another fineness."""
        if fineness is None:
            return max(table.levels for table in self.tables.values())
        return max(table.levels * table.grain // grain_of(table.chain, fineness) for table in self.tables.values())

    def cells(self, fineness: int | None = None) -> int:
        return cells_of(self.transition_count, self.levels(fineness))

    def useful_below(self, most_ns: float, deadline: Deadline = NEVER) -> set[int] | None:
        """Return the runs that every table allows in a plan faster than `most_ns`; None for all."""
        useful = self.useful
        for table in self.tables.values():
            of_table = useful_runs(table, most_ns, deadline)
            useful = of_table if useful is None else useful & of_table
        return useful

    def parts(self, other: Proposal) -> list[Branch]:
        """Return the branch recounted, or its halves, so that none contains the plan over budget of its best table.

        other  a plan that keeps the budget

        Storages that the plan keeps and the chain does not count are counted at the plan's first reason. If that has
        not helped, one half counts the largest and the other does not keep it. If there are none, the halves differ in
        how a segment runs, or in whether there is a cut: at a place where tables of other shares disagree.
        """
        table, legs = self.table, self.plan
        problem = table.chain.problem
        half = dataclasses.replace(
            self,
            tables={},
            whole_ns=self.bound_ns,
            is_recounted=False,
            stays=False,
            aside=(),
            legs=None,
            has_labels=False,
        )
        if elsewhere := self.elsewhere:
            return [dataclasses.replace(half, case=self.case.counting(elsewhere), is_recounted=True)]
        if uncounted := self.uncounted:
            return [dataclasses.replace(half, case=case) for case in self.case.split(*uncounted[0])]
        plan = _runs(problem, regions_of(problem, legs))
        others = [each for each in self.tables.values() if each is not table]
        rivals = [regions_of(problem, found) for each in others if (found := each.legs()) is not None]
        useful = set(range(len(problem.runs))) if self.useful is None else self.useful
        without = _disagreement(table.chain, useful, plan, [_runs(problem, regions) for regions in rivals])
        without = without or _disagreement(table.chain, useful, plan, [_runs(problem, other)])
        return [dataclasses.replace(half, useful=useful - runs) for runs in without]


def _runs(problem: Problem, regions: Proposal) -> list[Run]:
    """Return the run that contains each segment."""
    found = sorted((problem.runs[i] for i in problem.runs_of(regions)), key=lambda run: run.a)
    return [run for run in found for _ in range(run.a, run.b)]


def _disagreement(
    chain: Chain, useful: set[int], plan: list[Run], rivals: list[list[Run]]
) -> tuple[set[int], set[int]] | tuple[()]:
    """Split `useful` into two sets of excluded runs, so that neither half contains `plan` and one of its rivals.

    Of the segments that are plain in one of them, it takes the one with most forward-held bytes: surrogates err there.
    """
    runs = chain.problem.runs

    def differ(choice: Callable[[Run, int], bool], at: int) -> bool:
        return any(choice(plan[at], at) != choice(rival[at], at) for rival in rivals)

    at_segments = [at for at in range(len(plan)) if differ(lambda run, _: run.region is None, at)]
    for at in sorted(at_segments, key=lambda at: (-chain.forward_held_in[at], -chain.problem.liveness.own_bytes[at])):
        holding = {i for i in useful if runs[i].a <= at < runs[i].b}
        plain = {i for i in holding if runs[i].region is None}
        if plain and plain != holding:
            return holding - plain, plain
    for at in range(len(plan) - 1):
        if differ(lambda run, at: run.b == at + 1, at):
            across = {i for i in useful if runs[i].a <= at < runs[i].b - 1}
            ending = {i for i in useful if at + 1 in (runs[i].a, runs[i].b)}
            if across and ending:
                return across, ending
    return ()


def uncounted_in(chain: Chain, case: Case, legs: Sequence[Leg]) -> list[tuple[int, int]]:
    """List the storages that the plan of `legs` keeps over the budget without `chain` counting them.

    The largest is first; each has the first site at which the plan has a reason to keep it.
    """
    problem = chain.problem
    regions = regions_of(problem, legs)
    row = over_budget(problem, regions)
    if row is None or row.run is None:
        return []
    before, runs = row.before, _runs(problem, regions)
    saved = {u for region in regions for node in region.saved for u in problem.liveness.saved_by[node]}
    in_state = {shared.storage for shared in chain.state_storages if shared is not None}

    def is_reason(shared: SharedStorage, site: int) -> bool:
        return shared.is_reason(runs[site], site) or (site == shared.segment and shared.storage in saved)

    found = []
    for shared in problem.liveness.shared.values():
        if shared.storage in in_state or shared.storage in case.pinned or shared.storage in row.alive:
            continue
        if shared.storage in case.aside:
            continue
        first = next((at for at in shared.sites if runs[at].b <= before and is_reason(shared, at)), None)
        site = case.site(shared)
        counted = runs[site].b <= before and is_reason(shared, site)
        if first is not None and not counted and first > case.absent.get(shared.storage, -1):
            found.append((shared.size_bytes, shared.storage, first))
    return [
        (u, site)
        for size, u, site in sorted(found, reverse=True)
        if size > problem.budget_bytes // SMALLEST_STORAGE_DIVISOR
    ]


def cells_of(transition_count: int, levels: int) -> int:
    """Return the number of cells of a table, to which its time is proportional."""
    return transition_count * (levels + NUMPY_LEVELS)


def grain_of(chain: Chain, fineness: int) -> int:
    return choose_grain(chain, LEVELS[fineness], may_lose=0.0 if fineness else FIRST_MAY_LOSE)
