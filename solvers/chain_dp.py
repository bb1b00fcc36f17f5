"""Dynamic programming along the chain of segments, over discretised memory (after Beaumont et al., rotor, 2019).

The program of `cp_sat.py` is nearly a chain: what a run is limited by is only the number of bytes that the segments
before it keep. So with V[a][p] = least recompute time of segments before a that keep p bytes,

    V[b][p + kept_r + sum bytes s] = min  V[a][p] + t_r - sum c_v s[v]        over runs r = [a, b), saves s
                                     where p <= B - peak_r,  p + kept_r + sum bytes s <= B - start_r

Two things keep it from being exact, and both are made to err on one side:

* Bytes are counted in grains, rounded down. The plan found that way may overstep the budget by a little; then the
  best plan that keeps as much less is taken.
* A storage with several reasons to be kept is counted at its last site only. That can only understate, so the bound
  stands; the evaluator judges the plan.

The bound closes the exact program, whose own relaxation is weak where layers are alike: the solver there has to tell
apart permutations that all cost the same.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np

from remat.plans import Region
from remat.problem import NS, Problem, Run
from remat.solution import Limits, Solution

NAME = "chain-dp"
TRIES = 12
LEVELS = ((6_000, 16_000), (40_000, 100_000), (200_000, 400_000))  # grains in a budget, coarse to fine


@dataclasses.dataclass(frozen=True)
class _Step:
    """A run as a transition: bytes that it keeps, what P[a] and P[b] may be at most, and what it may save."""

    index: int
    run: Run
    keeps_bytes: int
    most_before: int
    most_after: int
    items: tuple[tuple[int, int, int], ...]  # node, bytes, ns


def solve(problem: Problem, limits: Limits) -> Solution:
    """A plan within `problem.budget_bytes` where rounding leaves one, and a bound that holds for every plan.

    Grains get finer until bound and plan meet. Before each refinement, runs that the coarser bound excludes from
    every plan better than the best known are dropped.
    """
    found = _Found()
    started, interrupted = time.monotonic(), False
    try:
        infeasible = _refine(problem, limits, found, started)
    except KeyboardInterrupt:
        infeasible, interrupted = False, True
    wall = time.monotonic() - started
    if infeasible:
        return Solution(NAME, "infeasible", wall_s=wall)
    if found.regions is None:
        return Solution(NAME, "unknown", bound_us=found.bound_ns / NS, wall_s=wall, interrupted=interrupted)
    return Solution(
        NAME,
        "optimal" if found.closed(limits) else "feasible",
        found.regions,
        found.objective_ns / NS,
        found.bound_ns / NS,
        wall,
        interrupted=interrupted,
    )


@dataclasses.dataclass
class _Found:
    """The best plan and bound so far."""

    regions: tuple[Region, ...] | None = None
    objective_ns: float = math.inf
    bound_ns: float = 0.0

    def closed(self, limits: Limits) -> bool:
        if self.regions is None:
            return False
        return self.objective_ns - self.bound_ns <= limits.gap * max(self.objective_ns, NS)


def _refine(problem: Problem, limits: Limits, found: _Found, started: float) -> bool:
    """Improve `found` with ever finer grains; True if the problem is proved infeasible."""
    chain = _Chain(problem, LEVELS[0])
    for finer in (*LEVELS[1:], None):
        table = chain.table()
        least = chain.least_time_ns(table)
        if least is None and found.regions is None:
            return True
        # No entry left means that nothing beats the best known.
        found.bound_ns = max(found.bound_ns, min(math.inf if least is None else least, found.objective_ns))
        for regions in _within_budget(chain, table):
            if (time_ns := problem.objective_ns(regions)) < found.objective_ns:
                found.regions, found.objective_ns = regions, time_ns
        late = limits.time_s is not None and time.monotonic() - started > limits.time_s
        if finer is None or late or found.closed(limits):
            break
        chain = _Chain(problem, finer, chain.useful(table, found.objective_ns))
    found.bound_ns = min(found.bound_ns, found.objective_ns)
    return False


def _within_budget(chain: _Chain, table: list[np.ndarray]) -> Iterator[tuple[Region, ...]]:
    """Plans that keep the budget: the best of `table`, at the budget or, as rounding down oversteps it, below."""
    memory, budget = chain.problem.memory, chain.problem.budget_bytes
    spare = 0
    for _ in range(TRIES):
        regions = chain.plan(table, spare)
        if regions is None:
            return
        excess = memory.curve(regions).peak_bytes - budget
        if excess <= 0:
            yield regions
            return
        spare += max(excess, chain.grain)


class _Chain:
    """levels  how many grains the budget is, at least and at most; keep  runs to consider, None for all"""

    def __init__(self, problem: Problem, levels: tuple[int, int], keep: set[int] | None = None):
        self.problem = problem
        self.count = len(problem.space.segments)
        self.steps: list[list[_Step]] = [[] for _ in range(self.count)]  # by first segment
        for index, run in enumerate(problem.runs):
            if keep is None or index in keep:
                step = self._step(index, run)
                if step.most_before >= 0:
                    self.steps[run.a].append(step)
        self.most = [self._forward_limit(a) for a in range(self.count + 1)]
        self.grain = self._choose_grain(levels)
        self.levels = max(max(self.most) // self.grain + 1, 1)

    def _step(self, index: int, run: Run) -> _Step:
        problem, budget = self.problem, self.problem.budget_bytes
        rows = problem.first_rows(index)
        # A node that is saved does not run again, and takes no workspace then: its term may be negative.
        highest = max((row.bytes + sum(min(size, 0) for _, size in row.saves) for row in rows), default=0)
        keeps = problem.own_bytes[run.a] if run.region is None else 0
        closing = [kept for group in problem.closing[run.a : run.b] for kept in group]
        keeps += sum(kept.size_bytes for kept in closing if kept.wanted_by(run))
        waiting = [row for row in rows if row.saves]
        inputs = sum(problem.kept[u].size_bytes for row in waiting[:1] for u in row.alive)
        after = budget
        if waiting:
            after += inputs + int(problem.memory.workspace_bytes[waiting[0].op]) - waiting[0].bytes
        items = () if run.region is None or run.region.inner else tuple(self._items(run))
        return _Step(index, run, keeps, budget - highest, after, items)

    def _items(self, run: Run) -> Iterator[tuple[int, int, int]]:
        """What `run` may save. A storage that a later run may keep anyway counts nothing here."""
        problem = self.problem
        assert run.region is not None
        for segment in range(run.a, run.b):
            for node in problem.saves_in[segment]:
                if node not in run.never_again:
                    shared = (problem.kept[u] for u in problem.saved_by[node] if u in problem.kept)
                    size = problem.save_bytes[node] + sum(k.size_bytes for k in shared if k.sites[-1] < run.b)
                    yield node, size, problem.save_time_ns[node]

    def _forward_limit(self, segment: int) -> int:
        """What segments before `segment` may keep while it runs forward.

        Casts are local until autocast ends and may be kept as well: they are counted once.
        """
        problem, storages = self.problem, self.problem.graph.storages
        segments = problem.space.segments
        first = problem.graph.nodes[segments[segment].first].first if segment < self.count else None
        most = problem.budget_bytes
        for row in problem.forward_rows:
            if first is None or row.op >= first:
                late = (storages.birth <= row.op) & (storages.death >= row.op) & (storages.node >= 0)
                twice = int(storages.size_bytes[late & problem.is_packed].sum())
                most = min(most, problem.budget_bytes - row.bytes + twice)
        return most

    def _choose_grain(self, levels: tuple[int, int]) -> int:
        """The grain, within `levels`, that loses least by rounding what runs keep and save."""
        sizes = {step.keeps_bytes for steps in self.steps for step in steps}
        sizes |= {size for steps in self.steps for step in steps for _, size, _ in step.items}
        sizes_array = np.array(sorted(sizes), dtype=np.int64)
        room = max(min(self.problem.budget_bytes, max(self.most)), 1)
        candidates = np.unique(np.geomspace(room / levels[1], room / levels[0], 400).astype(np.int64))
        candidates = candidates[candidates > 0] if candidates.any() else np.array([1])
        lost = [int((sizes_array % grain).sum()) + int(grain) for grain in candidates]
        return int(candidates[int(np.argmin(lost))])

    def table(self) -> list[np.ndarray]:
        """V: for every cut the least time by grains kept; infinite where no plan keeps so few."""
        table = [np.full(self.levels, np.inf) for _ in range(self.count + 1)]
        table[0][0] = 0.0
        for a in range(self.count):
            self._cap(table[a], self.most[a])
            if np.isinf(table[a]).all():
                continue
            for step in self.steps[a]:
                reached = self._through(table[a], step)
                if reached is not None:
                    np.minimum(table[step.run.b], reached, out=table[step.run.b])
        self._cap(table[-1], self.most[-1])
        return table

    def _cap(self, values: np.ndarray, most_bytes: int) -> None:
        values[max(most_bytes // self.grain + 1, 0) :] = np.inf

    def _through(
        self, before: np.ndarray, step: _Step, item_tables: list[np.ndarray] | None = None
    ) -> np.ndarray | None:
        """V after `step` alone; `item_tables` gets the table before each item."""
        keeps = step.keeps_bytes // self.grain
        start = before[: max(min(step.most_before // self.grain + 1, self.levels - keeps), 0)]
        if not len(start) or np.isinf(start).all():
            return None
        after = np.full(self.levels, np.inf)
        after[keeps : keeps + len(start)] = start + step.run.time_ns
        for _, size, saving in step.items:
            if item_tables is not None:
                item_tables.append(after.copy())
            weight = size // self.grain
            if weight == 0:
                after -= saving
            elif weight < len(after):
                np.minimum(after[weight:], after[:-weight] - saving, out=after[weight:])
        self._cap(after, step.most_after)
        return after

    def _backward_through(self, after: np.ndarray, step: _Step) -> np.ndarray:
        """Least time from the start of `step` to the end, by grains kept at its start; `after` is that at its end."""
        rest = after.copy()
        self._cap(rest, step.most_after)
        for _, size, saving in step.items:
            weight = size // self.grain
            if weight == 0:
                rest -= saving
            elif weight < len(rest):
                np.minimum(rest[:-weight], rest[weight:] - saving, out=rest[:-weight])
        keeps = step.keeps_bytes // self.grain
        before = np.full(self.levels, np.inf)
        if keeps < self.levels:
            before[: self.levels - keeps] = rest[keeps:] + step.run.time_ns
        self._cap(before, step.most_before)
        return before

    def useful(self, table: list[np.ndarray], objective_ns: float) -> set[int]:
        """Runs that a plan with less than `objective_ns` may contain, by the bound of `table`."""
        rest = [np.full(self.levels, np.inf) for _ in range(self.count + 1)]
        rest[-1][:] = 0.0
        self._cap(rest[-1], self.most[-1])
        found = set()
        for a in range(self.count - 1, -1, -1):
            for step in self.steps[a]:
                before = self._backward_through(rest[step.run.b], step)
                if float((table[a] + before).min()) < objective_ns:
                    found.add(step.index)
                np.minimum(rest[a], before, out=rest[a])
            self._cap(rest[a], self.most[a])
        return found

    def least_time_ns(self, table: list[np.ndarray]) -> float | None:
        least = float(table[-1].min())
        return None if np.isinf(least) else max(least, 0.0)

    def plan(self, table: list[np.ndarray], spare_bytes: int = 0) -> tuple[Region, ...] | None:
        """The regions that `table` finds best if `spare_bytes` of what may be kept at the end are left."""
        usable = table[-1][: max(self._used(table) - spare_bytes // self.grain, 0)]
        if not len(usable) or np.isinf(usable).all():
            return None
        regions: list[Region] = []
        b, level = self.count, int(usable.argmin())
        while b > 0:
            b, level, region = self._last_step(table, b, level)
            if region is not None:
                regions.append(region)
        return tuple(sorted(regions))

    def _used(self, table: list[np.ndarray]) -> int:
        """One more than the level of the best entry: where sparing has to begin."""
        return int(table[-1].argmin()) + 1

    def _last_step(self, table: list[np.ndarray], b: int, level: int) -> tuple[int, int, Region | None]:
        """The step that reached V[b][level]: where it starts, at which level, and its region with saves."""
        for a in range(b - 1, -1, -1):
            for step in self.steps[a]:
                if step.run.b != b:
                    continue
                items: list[np.ndarray] = []
                reached = self._through(table[a], step, items)
                if reached is None or reached[level] != table[b][level]:
                    continue
                value, saved = reached[level], []
                for (node, size, _), before in zip(reversed(step.items), reversed(items), strict=True):
                    if before[level] != value:
                        saved.append(node)
                        level -= size // self.grain
                        value = before[level]
                region = step.run.region
                if region is not None:
                    region = dataclasses.replace(region, saved=tuple(sorted(saved)))
                return a, level - step.keeps_bytes // self.grain, region
        raise AssertionError("no step reaches a finite entry of the table")
