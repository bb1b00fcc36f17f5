"""Published training speeds against this project's estimates: `python -m benchmarks published[:NAME,...]`.

The estimate is of one micro-batch of one rank: forward and backward by `remat.costing.costs.estimated_costs`, and the
part of the optimizer's step that falls on it. `published_runs.py` lists the runs, their sources, and which of them
the roofline's parameters were fitted to.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.published_runs import Checkpointing, PublishedRun, published_runs
from remat.costing.costs import estimated_costs
from remat.costing.host_time import REGION_US, launches_us
from remat.costing.planning_device import PlanningDevice
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.search_space import blocks
from remat.planning.profiling import fake_step
from remat.recording.record import record

WITHIN_PERCENT = 20
COLUMNS = [
    "run",
    "split",
    "published_ms",
    "estimated_ms",
    "error_percent",
    "settings",
    "source",
    "differs",
    "explained",
]

_SQUAD_WAITS = (
    "the source pre-trains this model, fused by TorchScript, on 1.8 times as many sequences a second, of 512 tokens"
)
EXPLAINED = {
    "mpt-1b-8k a100-80gb": "flash-attn 1.0.9, which llm-foundry took for bf16, is half as fast as torch's kernel",
    "mpt-1b-8k h100-80gb": "flash-attn 1.0.9, which llm-foundry took for bf16, is half as fast as torch's kernel",
    "bert-large-squad-tf32 h100-80gb": "TF32 products on an H100 reach less of their peak than 16-bit ones",
    "llama-2-7b fms h100-80gb": "the source has 37 % of the peak here and 57 on an A100, and calls it a gap",
    "bert-large-squad a100-80gb": _SQUAD_WAITS,
    "bert-large-squad-tf32 a100-80gb": _SQUAD_WAITS,
}


def main(*names: str) -> None:
    path, about, rows = report.stem("published", torch.device("cpu")), report.provenance(torch.device("cpu")), []
    for run in published_runs():
        if names and run.name not in names:
            continue
        rows.append(row_of(run))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
        torch._dynamo.reset()
        report.write(path, {**about, "costs": "estimated", **summary(rows)}, rows, COLUMNS)
    print("\n".join(map(_line, rows)))


def row_of(run: PublishedRun) -> dict[str, Any]:
    estimated_ms = estimated(run) / 1e3
    return {
        "run": run.name,
        "split": run.split,
        "published_ms": round(run.published_ms, 1),
        "estimated_ms": round(estimated_ms, 1),
        "error_percent": round(100 * (estimated_ms / run.published_ms - 1), 1),
        "settings": run.settings,
        "source": run.source,
        "differs": run.differs,
        "explained": EXPLAINED.get(run.name, ""),
    }


def estimated(run: PublishedRun) -> float:
    """Microseconds of one micro-batch of one rank, with its share of the optimizer: the device's or the host's."""
    graph = record(
        fake_step(run.workload, PlanningDevice(run.target, None)), alignment_bytes=run.target.alignment_bytes
    )
    memory, regions = Memory(graph), checkpointed(graph, run.checkpointing)

    def total_us(times: np.ndarray) -> float:
        own_us, optimizer_us = float(times[: graph.backward_end].sum()), float(times[graph.backward_end :].sum())
        return own_us + memory.recompute_time_us(regions, times) + run.optimizer_share * optimizer_us

    host_us = total_us(launches_us(graph, run.target)) + REGION_US * len(regions)
    return max(total_us(estimated_costs(graph, run.target).per_op_us(graph)), host_us)


def checkpointed(graph: Graph, checkpointing: Checkpointing) -> list[Region]:
    """The layers that a run checkpoints, and what each saves."""
    layers = blocks(graph)
    if checkpointing == "none":
        return []
    if checkpointing == "products":
        return [Region(first, end, saved=_attention_and_products(graph, first, end)) for first, end in layers]
    return [Region(*layer) for layer in (layers if checkpointing == "every layer" else layers[1::2])]


def _attention_and_products(graph: Graph, first: int, end: int) -> tuple[int, ...]:
    """Attention and every other product, as torchtitan saves them."""
    products = [i for i in range(first, end) if graph.nodes[i].op == "linear"]
    attention = [i for i in range(first, end) if graph.nodes[i].op == "scaled_dot_product_attention"]
    return tuple(sorted(products[::2] + attention))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many lie within `WITHIN_PERCENT`, of those that parameters were chosen by and of the others."""
    found: dict[str, Any] = {}
    for split in ("fit", "check"):
        errors = [row["error_percent"] for row in rows if row["split"] == split]
        inside = sum(abs(error) <= WITHIN_PERCENT for error in errors)
        found[f"{split}: within {WITHIN_PERCENT} percent"] = f"{inside} of {len(errors)}"
    return found


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['run']:34s} {row['split']:5s} published {row['published_ms']:8.1f} ms"
        f"  estimated {row['estimated_ms']:8.1f} ms  {row['error_percent']:+6.1f} %"
    )
