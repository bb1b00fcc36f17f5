"""How far counted work (`remat/work.py`) is from CPU time, by model and budget.

Each search is the default one, of the captured step, on one core. A ratio far from 1 means that searches of such models
end later or sooner than `Clock` says. `counted_work:gpt2` tries one model; `skips` is a net whose skips all differ, so
that searches set much aside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

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
from remat.workload.workload import Workload

COLUMNS = ["model", "budget_gib", "cpu_s", "work_s", "ratio", "gap"]
TARGET = "h100-80gb"
MODELS = ("gpt2", "llama-1b", "bert-large", "vit-l16", "resnet50", "convnextv2-base", "swin-base", "t5-base", "skips")
SHARES = (0.1, 0.3, 0.6)  # of the way from the least peak to no checkpointing


class Skips(nn.Module):
    """Convolutions, each with a skip of its own width; all are read in the order in which they were made."""

    def __init__(self, count: int = 12, width: int = 16):
        super().__init__()
        widths = [8 + 3 * (i % 7) + i for i in range(count)]
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)
        self.skips = nn.ModuleList(nn.Conv2d(width, each, 1) for each in widths)
        self.up = nn.ModuleList(nn.Conv2d(width + each, width, 3, padding=1) for each in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down, skip in zip(self.down, self.skips, strict=True):
            x = down(x).relu()
            kept.append(skip(x).tanh())
        for up, each in zip(self.up, kept, strict=True):
            x = up(torch.cat([x, each], 1)).relu()
        return x.mean()


SKIPS = Workload("skips", Skips, lambda n, _: torch.randn(n, 16, 24, 24), lambda model, x: model(x), batch_size=4)


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
    found = profile(SKIPS if model == SKIPS.name else build(model), target=TARGET)
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
