"""A plan in a plain training loop: GPT-2 in small learns to add.

python examples/plain_loop.py [--steps 40] [--budget 22MiB]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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

import remat

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

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(given.steps):
            batch = {name: tensor.to(DEVICE) for name, tensor in text(BATCH_SIZE).items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(1)
    model = gpt2()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(DEVICE)
    without = observed(lambda: train(model))

    model.load_state_dict(state)
    remat.apply(model, plan)
    planned = observed(lambda: train(model))
    report(without, planned)
    return without, planned


if __name__ == "__main__":
    main()
