"""A plan in a loop with Hugging Face accelerate: GPT-2 in small learns to add.

python examples/accelerate_loop.py [--steps 40] [--budget 22MiB]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from common import (
    BATCH_SIZE,
    DEVICE,
    LENGTH,
    TARGET,
    TrainingResult,
    gpt2,
    observed,
    options,
    random_text,
    report,
    text,
)
from torch import nn
from torch.utils.data import DataLoader

import remat
from remat.integrations.accelerate import prepare

WORKLOAD = remat.Workload(
    name="sums",
    build=gpt2,
    batch=random_text,
    step=lambda model, batch: model(**batch).loss,
    batch_size=BATCH_SIZE,
    seq_len=LENGTH,
)


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 22).parse_args(arguments)
    plan = remat.plan(WORKLOAD, budget=given.budget, target=TARGET)
    print(plan)
    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    sums = text(BATCH_SIZE * given.steps)
    rows = [{name: tensor[i] for name, tensor in sums.items()} for i in range(BATCH_SIZE * given.steps)]

    def built() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
        torch.manual_seed(1)
        model = gpt2()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(rows, BATCH_SIZE)  # type: ignore[arg-type]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> list[float]:
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    prepared = accelerator.prepare(*built())
    without = observed(lambda: train(*prepared))

    prepared = accelerator.free_memory(*prepared)
    prepared = prepare(accelerator, *built(), plan=plan)
    planned = observed(lambda: train(*prepared))
    report(without, planned)
    return without, planned


if __name__ == "__main__":
    main()
