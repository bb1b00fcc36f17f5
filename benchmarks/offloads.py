"""Offloads: what the host's memory brings, over budgets from much to little, at full size, estimated for a target.

For every budget the best plan with offloads and its gap, what it brings to the host, the best plan without, every block
a region, and what people do by hand: all that autograd keeps to the host (`offload-all`), every block's input
(`offload-inputs`), with what their steps wait for copies. Overhead is of the step without checkpointing.

Models whose training does not fit a card otherwise have the optimizer's state on the host, in every column; what each
of its steps waits is in the step's time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.slices import percent
from remat.costing.planning_device import find_planning_device
from remat.errors import RematError
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.budget import Budget
from remat.planning.comparison import compare_study
from remat.planning.links import ACTIVATIONS, beside_state, host_bytes_of, link_of, state_wait_us
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import PlanRequest
from remat.planning.strategies import OFFLOAD_ALL, OFFLOAD_INPUTS
from remat.planning.study import Study
from remat.units import GIB
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

TARGETS = ("h100-80gb", "h200")
TIME_S = 20.0
COLUMNS = [
    *("model", "target", "budget_gib", "with_offloads", "gap", "host_gib", "without", "every_block"),
    *("offload_all", "offload_inputs", "step_ms", "state_wait_ms", "wall_s"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    workload: Callable[[], Workload]
    budgets_gib: tuple[float, ...]
    loop: TrainingLoop = dataclasses.field(default_factory=TrainingLoop)
    targets: tuple[str, ...] = TARGETS


def in_bf16(name: str, length: int) -> Workload:
    """A micro-batch of one sequence, with weights, gradients and state in bf16."""
    return dataclasses.replace(build(name).with_dtype("bf16"), batch_size=1, seq_len=length)


CASES = {
    "gpt2": Case(lambda: build("gpt2"), (24, 20, 16, 12, 8, 5)),
    "llama-1b": Case(lambda: build("llama-1b"), (40, 35, 30, 27, 25)),
    "llama-8b": Case(
        lambda: in_bf16("llama-8b", 8192), (70, 60, 50, 40), TrainingLoop(offload_optimizer=True), ("h100-80gb",)
    ),
    "qwen3-8b": Case(lambda: in_bf16("qwen3-8b", 32768), (76, 60, 50), TrainingLoop(offload_optimizer=True)),
}


def main(*models: str) -> None:
    rows: list[dict[str, Any]] = []
    path = report.stem("_".join(["offloads", *models]), torch.device("cpu"))
    about = {**report.provenance(torch.device("cpu")), "costs": "estimated"}
    for model in models or CASES:
        case = CASES[model]
        for target in case.targets:
            place = find_planning_device(target)
            step = fake_step(case.workload(), place, loop=case.loop)
            profile = profile_step(step, place)
            link = beside_state(link_of(place, ACTIVATIONS), profile.graph, host_bytes_of(place, None))
            study = Study(profile, PlanRequest(limits=Limits(time_s=TIME_S)), step, link=link)
            for budget_gib in case.budgets_gib:
                found = _row(study, budget_gib)
                rows.append({"model": model, "target": target, "budget_gib": budget_gib, **found})
                print(rows[-1], flush=True)
                report.write(path, about, rows, COLUMNS)


def _row(study: Study, budget_gib: float) -> dict[str, Any]:
    limit, started, profile = int(budget_gib * GIB), time.monotonic(), study.profile
    at_this, strategies = study.within(Budget(limit, limit)), ("every-block", "exact")
    try:
        found, without = (compare_study(each, strategies=strategies) for each in (at_this, at_this.without_link))
    except RematError as error:
        return {"with_offloads": type(error).__name__, "wall_s": round(time.monotonic() - started, 1)}
    best = next(row for row in found.rows if row.strategy == "exact")
    return {
        "with_offloads": percent(found, "exact"),
        "gap": best.gap,
        "host_gib": round(best.plan.host_bytes / GIB, 2) if best.plan is not None else 0.0,
        "without": percent(without, "exact"),
        "every_block": percent(found, "every-block"),
        "offload_all": percent(found, OFFLOAD_ALL),
        "offload_inputs": percent(found, OFFLOAD_INPUTS),
        "step_ms": round(best.plan.predicted["step_time_us"] / 1000, 1) if best.plan is not None else None,
        "state_wait_ms": round(state_wait_us(profile.graph, profile.costs) / 1000, 1),
        "wall_s": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    main()
