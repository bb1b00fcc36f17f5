"""LoRA through peft with a plan: a frozen GPT-2 in small, whose adapters learn to add.

python examples/lora.py [--steps 40] [--budget 22MiB]
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
from peft import LoraConfig, get_peft_model
from torch import nn

import remat


def adapted() -> nn.Module:
    """Return the model with its adapters, which is trained and planned for."""
    adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model: nn.Module = get_peft_model(gpt2(), adapters)
    return model.train()


WORKLOAD = remat.Workload(
    name="sums by adapters",
    build=adapted,
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
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
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
    model = adapted()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(DEVICE)
    without = observed(lambda: train(model))

    model.load_state_dict(state)
    remat.apply(model, plan)
    planned = observed(lambda: train(model))
    remat.remove(model)  # before the adapters are merged, so that the model that is handed on has nothing of the plan
    report(without, planned)
    return without, planned


if __name__ == "__main__":
    main()
