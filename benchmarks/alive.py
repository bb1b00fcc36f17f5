"""Bytes alive along a whole step under a plan: what is simulated, beside PyTorch's CUDA allocator, without a GPU.

    python -m benchmarks alive                     eight families at full size (an hour)
    python -m benchmarks alive:gpt2,resnet50

It needs `make card`. Plans are made by name with bitwise gradients, at a share of the step that asks for large regions,
and trained in a plain loop (`plain_loop.py`), whose fourth step is recorded request by request. Both sequences are
compared where a request is of `LEAST_BYTES` or more; releases that follow one another may be in any order. After each
request that both make, what is alive is `apart_percent` of the peak apart at most, at `points` of them. Of workspaces
of convolutions, copies of arguments alone are simulated, since the stand-in for cuDNN takes no others.
"""

from __future__ import annotations

import difflib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remat
from benchmarks import report
from benchmarks.by_name import CARD, ROOT, TARGET, last_line, make_plan
from remat.cli.commands.files import spec_in
from remat.cli.commands.source import workload_of
from remat.evaluation.argument_copies import copies_of
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, from_refs
from remat.reservation.caching_allocator import Block, CachingAllocator
from remat.reservation.fragmentation import footprint
from remat.units import GIB, KIB

MODELS = ("gpt2", "bert-large", "t5-base", "llama-1b", "vit-l16", "swin-base", "resnet50", "convnextv2-base")
SHARE = "60%step"
LEAST_BYTES = 64 * KIB
UNIT = 512  # to which the record and the allocator round
COLUMNS = ["model", "share", "regions", "recomputed_nodes", "points", "requests_unlike", "apart_percent"]
COLUMNS += ["peak_gib", "peak_off_percent", "failure"]

Request = tuple[str, int]


class Noting(CachingAllocator):
    """Notes what the last step asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def malloc(self, size_bytes: int) -> Block:
        self.asked.append(("alloc", size_bytes))
        return super().malloc(size_bytes)

    def free(self, block: Block) -> None:
        self.asked.append(("free_completed", block.requested))
        super().free(block)

    def reset_peaks(self) -> None:
        self.asked.clear()
        super().reset_peaks()


def comparable(requests: Iterable[Request], least_bytes: int = LEAST_BYTES) -> list[Request]:
    """Round sizes as the allocator does, and sort releases that follow one another, whose order changes nothing."""
    large = [(action, -(-size // UNIT) * UNIT) for action, size in requests if size >= least_bytes]
    runs = [(action, list(run)) for action, run in itertools.groupby(large, key=lambda request: request[0])]
    return [each for action, run in runs for each in (run if action == "alloc" else sorted(run))]


def main(*models: str) -> None:
    if not CARD.exists():
        raise SystemExit("alive needs the card: make card.")
    cpu = torch.device("cpu")
    path = report.stem("_".join(["alive", *models]), cpu)
    about = {**report.provenance(cpu), "measured on": "PyTorch's CUDA build, without a GPU", "target": TARGET}
    rows: list[dict[str, Any]] = []
    for model in models or MODELS:
        rows.append({"model": model, "share": SHARE, **row_of(model)})
        print(rows[-1], flush=True)
        report.write(path, about, rows, COLUMNS)
        torch._dynamo.reset()


def row_of(model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "alive.plan.json"
        if (failure := make_plan(model, "--exact", SHARE, path)) is not None:
            return {"failure": failure}
        plan = Plan.load(path)
        command = [str(CARD), str(ROOT / "benchmarks" / "plain_loop.py"), str(path), "requests"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            return {"failure": last_line(ran.stderr)}
        found = json.loads(ran.stdout.strip().splitlines()[-1])
        spec = spec_in(plan.about, path)
        assert spec is not None
        simulated = requests_of(plan, remat.profile(workload_of(spec), target=TARGET))
    return {
        "regions": len(plan.regions),
        "recomputed_nodes": plan.predicted["recomputed_nodes"],
        **compared(comparable(simulated), comparable(map(tuple, found["requests"])), plan.predicted["peak_bytes"]),
        "peak_gib": round(found["requested"] / GIB, 4),
        "peak_off_percent": round(100 * (found["requested"] / plan.predicted["peak_bytes"] - 1), 4),
    }


def requests_of(plan: Plan, profile: Any) -> list[Request]:
    """Return the requests of a steady step under a plan, as the simulated allocator gets them."""
    graph, simulated = profile.graph, Noting()
    workspaces = profile.costs.workspace_per_op(graph)
    for op, kind in enumerate(map(graph.kinds.__getitem__, graph.op_kind)):
        if "convolution" in kind.name:
            workspaces[op] = sum(copies_of(kind))
    memory = Memory(graph, workspaces)
    footprint(memory, from_refs(graph, plan.regions), allocator=simulated)
    return simulated.asked


def compared(simulated: Sequence[Request], real: Sequence[Request], peak_bytes: int) -> dict[str, Any]:
    """Compare what is alive after each request that both make."""
    matcher = difflib.SequenceMatcher(None, simulated, real, autojunk=False)
    alive, found = _alive(simulated), _alive(real)
    apart = [np.abs(alive[a : a + n] - found[b : b + n]).max(initial=0) for a, b, n in matcher.get_matching_blocks()]
    alike = sum(block.size for block in matcher.get_matching_blocks())
    return {
        "points": alike,
        "requests_unlike": max(len(simulated), len(real)) - alike,
        "apart_percent": round(100 * float(max(apart)) / peak_bytes, 5),
    }


def _alive(requests: Sequence[Request]) -> np.ndarray:
    return np.cumsum([size if action == "alloc" else -size for action, size in requests])


if __name__ == "__main__":
    main(*sys.argv[1:])
