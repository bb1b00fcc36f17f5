"""Scale: time to pose and to solve, by layers: GPT-3's layer 12 to 96 times, and two chains of 1,000.

All layers of a chain are alike, or every twentieth is a wider one.

The budget lies half way between every block checkpointed and none, and nobody sets a time limit, as in `remat plan`.
Then the least peak is asked for, as a refusal does. Times are of one run on one machine, by the clock and by the
processor: the machine may have other work. What counts is how they grow.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import gpt2
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import every_block, load
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.workload.workload import Workload

LAYERS = (12, 24, 48, 96, 192)
CHAINS = {"1000": 0, "1000-odd": 20}  # layers: every so manieth is odd
COLUMNS = ["model", "layers", "segments", "runs", "record_s", "record_cpu_s", "pose_s", "pose_cpu_s"]
COLUMNS += ["solve_s", "solve_cpu_s", "status", "gap", "least_peak_s", "least_peak_cpu_s", "memory_gib"]


def main(*layers: str) -> None:
    about = {**report.provenance(torch.device("cpu")), "target": "h200", "costs": "estimated"}
    path = report.stem("scale", torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for text in layers or [*map(str, LAYERS), *CHAINS]:
        count = int(text.removesuffix("-odd"))
        workload = mlp_chain(count, odd=CHAINS[text]) if text in CHAINS else gpt3(count)
        rows.append({"model": workload.name, "layers": count, **row_of(workload)})
        print(rows[-1], flush=True)
        report.write(path, about, rows, COLUMNS)


def gpt3(layers: int) -> Workload:
    """GPT-3 175B's layers at batch 16, so that activations bind."""
    dense = gpt2.workload("gpt3", n_embd=12288, n_layer=layers, n_head=96, n_positions=2048, batch_size=16)
    return dense.with_dtype("bf16")


class Mlp(torch.nn.Module):
    def __init__(self, layers: int, width: int, odd: int):
        super().__init__()
        wider = [2 * width if odd and at % odd == odd - 1 else width for at in range(layers)]
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, wide), torch.nn.GELU(), torch.nn.Linear(wide, width))
            if wide > width
            else torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
            for wide in wider
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp_chain(layers: int, width: int = 1024, odd: int = 0) -> Workload:
    """A chain of linear layers, each with a GELU; every `odd`-th has two, twice as wide between them."""
    return Workload(
        name="mlp-chain-odd" if odd else "mlp-chain",
        build=lambda: Mlp(layers, width, odd),
        batch=lambda batch_size, seq_len: {"x": torch.randn(batch_size, width)},
        step=lambda model, batch: model(batch["x"]).square().mean(),
        batch_size=8192,
    )


def row_of(workload: Workload) -> dict[str, Any]:
    place = find_planning_device("h200")
    times: dict[str, Any] = {}
    with _timed("record", times):
        profile = profile_step(fake_step(workload, place), place)
    with _timed("pose", times):
        problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)
        runs = len(problem.runs)
    most = problem.memory.peak_without_checkpointing
    blocks = problem.memory.curve(every_block.regions(problem)).peak_bytes
    with _timed("solve", times):
        found = load("exact")(problem.with_budget((most + blocks) // 2), Limits())
    with _timed("least_peak", times):
        least = least_peak(problem, Limits())
    return {
        "segments": len(problem.space.segments),
        "runs": runs,
        **times,
        "solver": found.solver,
        "status": found.status,
        "gap": round(found.gap, 5),
        "least_peak_gib": round(least.peak_bytes / GIB, 3),
        "least_peak_proved": least.proved,
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "space": problem.space.about(),
    }


@contextlib.contextmanager
def _timed(name: str, times: dict[str, float]) -> Iterator[None]:
    """Write down how long the block takes."""
    wall, cpu = time.monotonic(), time.process_time()
    yield
    times |= {f"{name}_s": round(time.monotonic() - wall, 1), f"{name}_cpu_s": round(time.process_time() - cpu, 1)}
