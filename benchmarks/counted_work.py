"""How far counted work (`remat/work.py`) is from CPU time, by model and budget.

Each search is the default one, of the captured step, on one core. A ratio far from 1 means that searches of such models
end later or sooner than `Clock` says. `counted_work:gpt2` tries one model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import report
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.profiling import profile
from remat.solvers import exact
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.work import worked_s

COLUMNS = ["model", "budget_gib", "cpu_s", "work_s", "ratio", "gap"]
TARGET = "h100-80gb"
MODELS = ("gpt2", "llama-1b", "bert-large", "vit-l16", "resnet50", "convnextv2-base", "swin-base", "t5-base")
SHARES = (0.1, 0.3, 0.6)  # of the way from the least peak to no checkpointing


def main(*models: str) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    path, rows = report.stem("_".join(["counted_work", *models]), cpu), list[dict[str, Any]]()
    about = {**report.provenance(cpu), "target": TARGET, "costs": "estimated"}
    for model in models or MODELS:
        for row in _rows(model):
            print(row, flush=True)
            rows.append(row)
            report.write(path, about, rows, COLUMNS)


def _rows(model: str) -> Iterator[dict[str, Any]]:
    found = profile(build(model), target=TARGET)
    problem = Problem(found.graph, found.costs, find_space(found.graph), 1 << 62)
    least, most = least_peak(problem, Limits()).peak_bytes, problem.memory.peak_without_checkpointing
    for share in SHARES:
        budget, cpu_s, work_s = int(least + share * (most - least)), time.process_time(), worked_s()
        solution = exact.solve(problem.with_budget(budget), Limits(workers=1))
        cpu_s, work_s = time.process_time() - cpu_s, worked_s() - work_s
        yield {
            "model": model,
            "budget_gib": round(budget / GIB, 3),
            "cpu_s": round(cpu_s, 2),
            "work_s": round(work_s, 2),
            "ratio": round(work_s / cpu_s, 2),
            "gap": round(solution.gap, 5),
        }
