"""The oracle of solvers and rows, written to be obviously right rather than fast.

`every_plan` enumerates a problem's plans; `Oracle` judges each with the evaluator alone. `value_of` evaluates a row at
a plan by the definitions in the docstrings of `problem.py`. Neither knows a solver.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from remat.evaluation.plan import Region
from remat.formulation.choices import Row, Run, SharedStorage
from remat.formulation.problem import Problem


def every_plan(problem: Problem, segment: int = 0) -> Iterator[tuple[Region, ...]]:
    """Every way to partition the segments from `segment` on into runs, with every set of saves."""
    if segment == len(problem.space.segments):
        yield ()
        return
    for run in (run for run in problem.runs if run.a == segment):
        for rest in every_plan(problem, run.b):
            for region in every_saving(problem, run):
                yield (*region, *rest)


def every_saving(problem: Problem, run: Run) -> Iterator[tuple[Region, ...]]:
    """`run`'s region with every set of saves that its space allows; no region if it is plain."""
    if run.region is None:
        yield ()
        return
    within = [] if run.region.inner else [v for v in problem.space.saveable if v in run.region]
    for count in range(len(within) + 1):
        for saved in itertools.combinations(within, count):
            yield (dataclasses.replace(run.region, saved=saved),)


class Oracle:
    """Peak and recompute time of every plan of a problem."""

    def __init__(self, problem: Problem) -> None:
        times = problem.liveness.op_time_ns / 1000
        self.plans = list(every_plan(problem))
        self.peaks = [problem.memory.curve(regions).peak_bytes for regions in self.plans]
        self.times_us = [problem.memory.recompute_time_us(regions, times) for regions in self.plans]

    def least_time_us(self, budget_bytes: int) -> float | None:
        """Of the plans within the budget; None where there is none."""
        judged = zip(self.peaks, self.times_us, strict=True)
        return min((time for peak, time in judged if peak <= budget_bytes), default=None)

    def least_peak(self, *, saves: bool = True) -> int:
        judged = zip(self.peaks, self.plans, strict=True)
        return min(peak for peak, regions in judged if saves or not any(region.saved for region in regions))


@st.composite
def plans_of(draw: st.DrawFn, problem: Problem) -> tuple[Region, ...]:
    """A plan of the problem's space: runs one after the other, saves where they gain something."""
    regions, segment = [], 0
    while segment < len(problem.space.segments):
        run = draw(st.sampled_from([run for run in problem.runs if run.a == segment]))
        segment = run.b
        if run.region is None:
            continue
        within = [v for v in problem.liveness.save_time_ns if v in run.region and v not in run.never_again]
        saved = draw(st.sets(st.sampled_from(within))) if within and not run.region.inner else set()
        regions.append(dataclasses.replace(run.region, saved=tuple(sorted(saved))))
    return tuple(regions)


def decides_again(problem: Problem, regions: Sequence[Region]) -> set[int]:
    """The nodes that decide and that a plan has run again."""
    curve = problem.memory.curve(regions)
    again = curve.op[(curve.region >= 0) & curve.executed]
    return set(problem.graph.op_node[again[~problem.graph.is_made_again[again]]]) & set(problem.graph.deciding)


def chosen_runs(problem: Problem, regions: Sequence[Region]) -> list[int]:
    """Indices of the runs that a plan consists of, in order."""
    return sorted(problem.runs_of(regions), key=lambda i: problem.runs[i].a)


def is_kept(shared: SharedStorage, until: int, runs: Sequence[Run], saved: set[int]) -> bool:
    """Whether a plan has a reason to keep the storage at a site up to `until`."""
    for run in runs:
        for site in shared.sites:
            if not run.a <= site < run.b or site > until:
                continue
            if run.region is None and site in shared.packed:
                return True
            if run.region is not None and any(s < run.a and at == site for s, at in shared.taken):
                return True
    return shared.saver in saved and shared.segment <= until


def value_of(problem: Problem, row: Row, regions: Sequence[Region]) -> int:
    """The left-hand side of `row` at a plan that holds its run."""
    chosen = problem.runs_of(regions)
    runs = [problem.runs[i] for i in chosen]
    plain = {run.a for run in runs if run.region is None}
    saved = {v for region in regions for v in region.saved}
    total = row.bytes + sum(size for v, size in row.saves if v in saved)
    total += sum(size for segment, size in row.plain if segment in plain)
    if row.run is None:
        total += sum(size for i, size in row.nested if i in chosen)
        sites = row.shared
        return total + sum(
            problem.liveness.shared[u].size_bytes
            for u, site in sites
            if is_kept(problem.liveness.shared[u], site, runs, saved)
        )
    total += sum(problem.liveness.own_bytes[a] for a in plain if a < row.before)
    total += sum(problem.liveness.save_bytes[v] for v in saved if problem.liveness.segment_of_node[v] < row.before)
    for shared in problem.liveness.shared.values():
        site = shared.site_before(row.before)
        if site is None or shared.segment >= row.before or shared.storage in row.alive:
            continue
        if is_kept(shared, site, runs, saved):
            total += shared.size_bytes
    return total
