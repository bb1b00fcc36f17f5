"""Polish: bring a plan under its budget by saving less, or use what it leaves by saving more.

A plan read off a table of rounded bytes oversteps its budget by a little, or stays a little below it. What its regions
save is then changed, not the regions: the least time that frees the excess, and the most that the slack has room for.
The evaluator judges every change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem

TRIES = 12


def polish(problem: Problem, regions: tuple[Region, ...]) -> tuple[Region, ...] | None:
    """Change the saves of `regions` so that they fit the budget; None if saving less is not enough."""
    for _ in range(TRIES):
        excess = problem.curve(regions).peak_bytes - problem.budget_bytes
        if excess <= 0:
            return _fill(problem, regions, -excess)
        saved = [v for region in regions for v in region.saved if v in problem.liveness.save_time_ns]
        given_up = _cheapest(problem, saved, excess)
        if not given_up:
            return None
        regions = _with_saves(regions, set(saved) - given_up)
    return None


def _cheapest(problem: Problem, saved: Sequence[int], excess: int) -> set[int]:
    """Return nodes of `saved` that together keep `excess` bytes, of little time: one node, or many.

    The faster of both ways is taken.
    """
    time_ns, size = problem.liveness.save_time_ns, {v: problem.liveness.saved_bytes(v) for v in saved}
    single = min((v for v in saved if size[v] >= excess), key=lambda v: time_ns[v], default=None)
    many: list[int] = []
    for v in sorted((v for v in saved if size[v]), key=lambda v: time_ns[v] / size[v]):
        if sum(size[u] for u in many) >= excess:
            break
        many.append(v)
    for v in sorted(many, key=lambda v: -time_ns[v]):
        if sum(size[u] for u in many) - size[v] >= excess:
            many.remove(v)
    if single is not None and time_ns[single] <= sum(time_ns[v] for v in many):
        return {single}
    return set(many)


def _fill(problem: Problem, regions: tuple[Region, ...], slack: int) -> tuple[Region, ...]:
    """Add saves to `regions`, as far as `slack` bytes and the evaluator allow."""
    runs = [problem.runs[i] for i in problem.runs_of(regions)]
    saved = {v for region in regions for v in region.saved}
    open_ = [
        v
        for run in runs
        if run.region is not None and not run.region.inner
        for v in problem.liveness.save_time_ns
        if v in run.region and v not in saved and v not in run.never_again
    ]
    rejected: set[int] = set()
    for _ in range(TRIES):
        fitting = [
            v for v in open_ if v not in saved and v not in rejected and problem.liveness.saved_bytes(v) <= slack
        ]
        if not fitting:
            break
        best = max(fitting, key=lambda v: problem.liveness.save_time_ns[v])
        proposal = _with_saves(regions, saved | {best})
        left = problem.budget_bytes - problem.curve(proposal).peak_bytes
        if left < 0:
            rejected |= {v for v in fitting if problem.liveness.saved_bytes(v) >= problem.liveness.saved_bytes(best)}
            continue
        regions, saved, slack = proposal, saved | {best}, left
    return regions


def _with_saves(regions: Sequence[Region], saved: set[int]) -> tuple[Region, ...]:
    return tuple(
        dataclasses.replace(region, saved=tuple(sorted(v for v in saved if v in region)))
        if not region.inner
        else region
        for region in regions
    )
