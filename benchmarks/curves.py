"""Curves: 200 steps of training with and without a plan; the two curves of the loss must be one, to the last bit.

GPT-2 at a reduced size, fp32 with dropout, AdamW, on the CPU; two plans: one half way to the least feasible peak, one
near it. Parameters are compared too, once training is over.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.architectures import recorded
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from remat.models import gpt2
from remat.workload.workload import Workload

STEPS = 200
CPU = torch.device("cpu")
COLUMNS = [
    "share",
    "steps",
    "predicted_mib",
    "without_mib",
    "regions_entered",
    "first_loss",
    "last_loss",
    "losses_equal",
    "parameters_equal",
    "wall_s",
]


def main() -> None:
    small = gpt2.workload("gpt2-curve", n_embd=64, n_layer=4, n_head=4, batch_size=4, n_positions=64, vocab_size=512)
    workload = small.with_dtype("fp32")
    untouched, without = trained(workload, None)
    rows: list[dict[str, Any]] = []
    for share in (0.1, 0.5):
        started = time.monotonic()
        plan = recorded(workload).tight(share)
        losses, model = trained(workload, plan)
        pairs = zip(model.parameters(), without.parameters(), strict=True)
        rows.append(
            {
                "share": share,
                "steps": STEPS,
                "predicted_mib": round(plan.predicted["peak_bytes"] / 2**20, 2),
                "without_mib": round(plan.without_checkpointing["peak_bytes"] / 2**20, 2),
                "regions_entered": counts_of(model).regions,
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "losses_equal": losses == untouched,
                "parameters_equal": all(torch.equal(a, b) for a, b in pairs),
                "wall_s": round(time.monotonic() - started, 1),
                "losses": losses,
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
    report.write(report.stem("curves", CPU), report.provenance(CPU), rows, COLUMNS)


def trained(workload: Workload, plan: Plan | None) -> tuple[list[float], nn.Module]:
    """The loss of every step, and the model after the last."""
    torch.manual_seed(0)
    model = workload.build()
    if plan is not None:
        apply(model, plan)
    assert workload.optimizer is not None
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for number in range(STEPS):
        torch.manual_seed(1000 + number)
        loss = workload.step(model, workload.batch(workload.batch_size, workload.seq_len))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model
