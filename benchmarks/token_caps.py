"""Token caps: one model trains under one plan on thousands of batches of random lengths, all within the plan's cap.

At test size, within 60 % of what the model's own batch needs without checkpointing: on CUDA planned for an H100 by
name, else for this CPU, where steps take seconds. Lengths are log-normal, as in chat data, and `TokenBatches` fills the
batches. The second step of each shape is measured, so a shape that comes again is not. `at_end_percent` is the peak
with the longest rows, as a share of the budget.

    build/card/python -m benchmarks token_caps:gpt2,llama-1b       on PyTorch's CUDA build, without a GPU
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from benchmarks import report
from benchmarks.compiled_budgets import HERE, IS_LARGE, ON_CARD, requested
from remat.costing.device_allocator import measure_peak
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.formulation.solution import Limits
from remat.integrations.token_batches import TokenBatches, TokenCap
from remat.models.common import packed, padded
from remat.planning.estimate import estimate
from remat.planning.token_cap import most_tokens
from remat.recording.step_contexts import autocast_context
from remat.units import MIB
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES

MODELS = ("gpt2", "llama-1b", "bert-large", "t5-base")
NOT_PACKED = ("bert-large", "t5-base")  # which tell no sequences apart by position ids
BATCHES = 2000
SHARE = 0.6
COLUMNS = ["model", "rows_are", "budget_mib", "tokens", "rows", "longest", "batches", "shapes", "most_mib", "above"]
COLUMNS += ["at_end_percent"]
TARGET = "h100-80gb" if IS_LARGE else "cpu"
NAME = "token_caps_without_a_gpu" if ON_CARD else "token_caps"


def main(*models: str) -> None:
    path, about = report.stem(NAME, HERE), report.provenance(HERE)
    if ON_CARD:
        about["device"] = "PyTorch's CUDA build, without a GPU"
    rows: list[dict[str, Any]] = []
    for model in models or MODELS:
        for are in ("padded", "packed"):
            if are == "packed" and model in NOT_PACKED:
                continue
            torch._dynamo.reset()
            rows.append({"model": model, "rows_are": are, **row_of(model, are)})
            print(rows[-1], file=sys.stderr, flush=True)
            report.write(path, about, rows, COLUMNS)


def row_of(model: str, are: str) -> dict[str, Any]:
    own = TEST_SIZES[model]()
    budget = int(SHARE * estimate(own, target=TARGET).peaks.peak_bytes)
    workload = padded(own) if are == "padded" else packed(own)
    plan = most_tokens(workload, packed=are == "packed", target=TARGET, budget=budget, limits=Limits(time_s=20))
    cap = TokenCap.of(plan)
    found = Run(workload, plan)
    shapes = [shape_of(batch, cap) for batch in batches_of(plan, own.seq_len or 1)]
    end = (1, cap.tokens) if cap.packed else (cap.tokens // cap.longest, cap.longest)
    at_end = found.peak_bytes(*end)
    peaks = [found.peak_bytes(*shape) for shape in shapes]
    return {
        "budget_mib": round(budget / MIB, 3),
        "tokens": cap.tokens,
        "rows": cap.rows,
        "longest": cap.longest,
        "batches": len(shapes),
        "shapes": len(found.known),
        "most_mib": round(max(peaks) / MIB, 3),
        "above": sum(peak > budget for peak in peaks),
        "at_end_percent": round(100 * at_end / budget, 2),
    }


def batches_of(plan: Plan, longest: int) -> list[list[int]]:
    """Draw lengths until they fill `BATCHES` batches."""
    drawn, batches = random.Random(0), list[list[int]]()
    while len(batches) < BATCHES:
        lengths = [min(max(int(drawn.lognormvariate(math.log(longest / 4), 0.8)), 2), longest) for _ in range(5000)]
        sampler = TokenBatches(lengths, plan, seed=len(batches))
        batches += [[lengths[row] for row in batch] for batch in sampler]
    return batches[:BATCHES]


def shape_of(lengths: list[int], cap: TokenCap) -> tuple[int, int]:
    return (1, sum(lengths)) if cap.packed else (len(lengths), max(lengths))


class Run:
    """One planned model and its optimizer, for batches of any shape."""

    def __init__(self, workload: Workload, plan: Plan):
        torch.manual_seed(0)
        with HERE:
            model = workload.build().train()
        self.workload, self.model = workload, apply(model, plan, verify_first_step=not IS_LARGE)  # blind
        assert workload.optimizer is not None
        self.optimizer: Any = workload.optimizer(self.model.parameters())
        self.known: dict[tuple[int, int], int] = {}

    def peak_bytes(self, rows: int, length: int) -> int:
        if (rows, length) not in self.known:
            batch = self.workload.batch(rows, length)
            self.batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(HERE), batch)
            self()
            self.known[rows, length] = self._fixed_bytes() + measure_peak(self, HERE, requested=True)
        return self.known[rows, length]

    def _fixed_bytes(self) -> int:
        if IS_LARGE:
            return requested()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        kept = [*self.model.parameters(), *self.model.buffers(), *state, *self.batch.values()]
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in kept}.values())

    def __call__(self) -> None:
        with autocast_context(HERE, self.workload.autocast):
            loss = self.workload.step(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
