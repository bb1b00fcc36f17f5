"""What all heuristics share: they propose plans without a proof, and the evaluator picks the best that fits."""

from __future__ import annotations

import time
from collections.abc import Iterable

from remat.plans import Region
from remat.problem import NS, Problem
from remat.solution import Solution


def judge(problem: Problem, name: str, proposals: Iterable[tuple[Region, ...]]) -> Solution:
    """The proposal with least recompute time that keeps the budget; "unknown" if none does."""
    started = time.monotonic()
    best: tuple[float, tuple[Region, ...]] | None = None
    for regions in proposals:
        if problem.memory.curve(regions).peak_bytes > problem.budget_bytes:
            continue
        time_us = problem.memory.recompute_time_us(regions, problem.op_time_ns / NS)
        if best is None or time_us < best[0]:
            best = (time_us, regions)
    wall = time.monotonic() - started
    if best is None:
        return Solution(name, "unknown", wall_s=wall)
    return Solution(name, "feasible", best[1], best[0], 0.0, wall)
