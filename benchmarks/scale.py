"""Scale: how long it takes to pose and to solve, by layers: GPT-3's layer 12 to 96 times, and a chain of 1,000.

The budget lies half way between every block checkpointed and none. Times are of one run on one machine; what counts is
how they grow.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from benchmarks import report
from remat.models import gpt2
from remat.problem import Problem
from remat.profiling import fake_step, find_place, profile_step
from remat.solution import Limits
from remat.solvers import every_block, load
from remat.space import find_space
from remat.units import GIB
from remat.workload import Workload

LAYERS = (12, 24, 48, 96, 192)
CHAIN = 1000
COLUMNS = ["model", "layers", "segments", "runs", "record_s", "pose_s", "solve_s", "status", "gap", "memory_gib"]


def main(*layers: str) -> None:
    about = {**report.provenance(torch.device("cpu")), "target": "h200", "costs": "estimated"}
    path = report.stem("scale", torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for count in [int(text) for text in layers] or [*LAYERS, CHAIN]:
        workload = mlp_chain(count) if count >= CHAIN else gpt3(count)
        rows.append({"model": workload.name, "layers": count, **measure(workload)})
        print(rows[-1], flush=True)
        report.write(path, about, rows, COLUMNS)


def gpt3(layers: int) -> Workload:
    """GPT-3 175B's layers at batch 16, so that activations bind."""
    dense = gpt2.workload("gpt3", width=12288, layers=layers, heads=96, positions=2048, batch_size=16)
    return dense.with_dtype("bf16")


class Mlp(torch.nn.Module):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp_chain(layers: int, width: int = 1024) -> Workload:
    """A chain of linear layers, each with a GELU."""
    return Workload(
        name="mlp-chain",
        build=lambda: Mlp(layers, width),
        batch=lambda batch_size, seq_len: {"x": torch.randn(batch_size, width)},
        step=lambda model, batch: model(batch["x"]).square().mean(),
        batch_size=8192,
    )


def measure(workload: Workload) -> dict[str, Any]:
    place = find_place("h200")
    started = time.monotonic()
    profile = profile_step(fake_step(workload, place), place)
    recorded = time.monotonic()
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)
    runs = len(problem.runs)
    posed = time.monotonic()
    most = problem.memory.peak_without_checkpointing
    least = problem.memory.curve(every_block.solve(problem, Limits()).regions).peak_bytes
    found = load("exact")(problem.with_budget((most + least) // 2), Limits(time_s=60))
    return {
        "segments": len(problem.space.segments),
        "runs": runs,
        "record_s": round(recorded - started, 1),
        "pose_s": round(posed - recorded, 1),
        "solve_s": round(found.wall_s, 1),
        "status": found.status,
        "gap": round(found.gap, 5),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "space": problem.space.about(),
    }
