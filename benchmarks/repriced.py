"""Plans under other prices: `python -m benchmarks repriced:COMMIT[,MODEL...]`.

A plan that was best under the roofline of COMMIT, beside the best under today's, within the same budget: whether they
are the same, and what the old one costs too much where today's prices are right (its regret, of the step without a
plan). Where the solver ran out of time a regret can be negative: within its gap.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.roofline import roofline_of
from remat.costing.costs import Costs
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space, find_space
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.profiling import profile
from remat.solvers import exact
from remat.solvers.least_peak import least_peak
from remat.units import GIB

TARGET = "h100-80gb"
TIME_S = 20.0
SHARES = (0.1, 0.3, 0.6)  # of the way from the least peak to no plan at all
MODELS = ("gpt2", "resnet50", "llama-1b", "bert-large", "t5-base", "vit-l16", "swin-base", "convnextv2-base")
COLUMNS = [
    *("model", "budget_gib", "same_plan", "nodes_that_differ", "regret_percent", "old_overhead_percent"),
    *("overhead_percent", "step_ms_before", "step_ms", "gaps"),
]


def main(commit: str = "", *models: str) -> None:
    """Write `results/repriced_*`."""
    if not commit:
        raise SystemExit("repriced:COMMIT[,MODEL...] needs the commit whose prices plans are compared with.")
    cpu = torch.device("cpu")
    about = report.provenance(cpu) | {"before": commit, "target": TARGET, "time_limit_s": TIME_S}
    rows: list[dict[str, Any]] = []
    for model in models or MODELS:
        for row in _rows(model, commit):
            print(row, flush=True)
            rows.append(row)
            report.write(report.stem("repriced", cpu), {**about, **_summary(rows)}, rows, COLUMNS)
        torch._dynamo.reset()
        gc.collect()


def _rows(model: str, commit: str) -> Iterator[dict[str, Any]]:
    found, limits = profile(build(model), target=TARGET), Limits(time_s=TIME_S)
    graph, price = found.graph, roofline_of(commit)
    before = dataclasses.replace(found.costs, time_us=tuple(price(kind, found.target) for kind in graph.kinds))
    space = find_space(graph)
    least = least_peak(Problem(graph, found.costs, space, 1 << 62), limits).peak_bytes
    most = Problem(graph, found.costs, space, 1 << 62).memory.peak_without_checkpointing
    for share in SHARES:
        yield _row(model, graph, space, (before, found.costs), int(least + share * (most - least)), limits)


def _row(
    model: str, graph: Graph, space: Space, costs: tuple[Costs, Costs], budget_bytes: int, limits: Limits
) -> dict[str, Any]:
    problems = [Problem(graph, each, space, budget_bytes) for each in costs]
    old, new = (exact.solve(problem, limits) for problem in problems)
    times, memory = costs[1].per_op_us(graph), problems[1].memory
    old_us, new_us = (memory.recompute_time_us(solution.regions, times) for solution in (old, new))
    step_us = float(times.sum())
    again = [_recomputed(solution.regions) for solution in (old, new)]
    return {
        "model": model,
        "budget_gib": round(budget_bytes / GIB, 2),
        "same_plan": old.regions == new.regions,
        "nodes_that_differ": len(again[0] ^ again[1]),
        "regret_percent": round(100 * (old_us - new_us) / step_us, 3),
        "old_overhead_percent": round(100 * old_us / step_us, 2),
        "overhead_percent": round(100 * new_us / step_us, 2),
        "step_ms_before": round(costs[0].step_time_us(graph) / 1e3, 1),
        "step_ms": round(step_us / 1e3, 1),
        "gaps": f"{old.gap:.4f}, {new.gap:.4f}",
    }


def _recomputed(regions: Iterable[Region]) -> set[int]:
    """Nodes within a region that neither it nor one inside it saves."""
    return {node for region in regions for node in range(region.first, region.end)} - set(_saved(regions))


def _saved(regions: Iterable[Region]) -> Iterator[int]:
    for region in regions:
        yield from region.saved
        yield from _saved(region.inner)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    regrets = np.array([row["regret_percent"] for row in rows])
    changed = sum(not row["same_plan"] for row in rows)
    return {
        "plans that change": f"{changed} of {len(rows)}",
        "regret": f"median {np.median(regrets):.2f} %, most {regrets.max():.2f} %",
    }
