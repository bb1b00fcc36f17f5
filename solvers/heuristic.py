"""What all heuristics share: they propose plans without a proof, and the evaluator picks the best that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from remat.plans import Region
from remat.problem import NS, Problem
from remat.solution import Solution, Status


def judge(problem: Problem, name: str, proposals: Iterable[tuple[Region, ...]]) -> Solution:
    """The proposal with least recompute time that keeps the budget; where none does, "unknown" with the nearest."""
    started = time.monotonic()
    judged = []
    for regions in proposals:
        over = max(problem.memory.curve(regions).peak_bytes - problem.budget_bytes, 0)
        time_us = problem.memory.recompute_time_us(regions, problem.op_time_ns / NS)
        judged.append((over, time_us, regions))
    over, time_us, regions = min(judged, default=(math.inf, 0.0, ()))
    status: Status = "unknown" if over else "feasible"
    return Solution(name, status, regions, time_us, 0.0, time.monotonic() - started)
