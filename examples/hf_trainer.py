"""A plan in the Trainer of Hugging Face transformers: GPT-2 in small learns to add.

python examples/hf_trainer.py [--steps 40] [--budget 22MiB]
"""

from __future__ import annotations

import tempfile
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
from transformers import Trainer, TrainingArguments

import remat
from remat.integrations.transformers import RematCallback, step

WORKLOAD = remat.Workload(
    name="sums in a Trainer",
    build=gpt2,
    batch=random_text,
    step=step,  # what the Trainer does: it tells the model how many items the batch has
    batch_size=BATCH_SIZE,
    seq_len=LENGTH,
)


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 22).parse_args(arguments)
    plan = remat.plan(WORKLOAD, budget=given.budget, target=TARGET)
    print(plan)
    sums = text(BATCH_SIZE * given.steps)
    rows = [{name: tensor[i] for name, tensor in sums.items()} for i in range(BATCH_SIZE * given.steps)]

    def trainer(folder: str, *callbacks: RematCallback) -> Trainer:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=given.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=DEVICE.type == "cpu",
            dataloader_pin_memory=DEVICE.type != "cpu",
        )
        torch.manual_seed(1)
        return Trainer(gpt2(), settings, train_dataset=rows, callbacks=list(callbacks))

    def train(made: Trainer) -> list[float]:
        made.train()
        return [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    with tempfile.TemporaryDirectory() as folder:
        without = observed(lambda: train(trainer(folder)))
        planned = observed(lambda: train(trainer(folder, RematCallback(plan))))
    report(without, planned)
    return without, planned


if __name__ == "__main__":
    main()
