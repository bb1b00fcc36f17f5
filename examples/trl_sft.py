"""TRL's SFTTrainer as people run it: LoRA, packed rows, bf16 autocast, accumulation; one line of it plans the step.

python examples/trl_sft.py [--steps 50] [--budget 93MiB]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import torch
from common import QUIET, TrainingResult, llama, observed, options, report, sums, tokenizer
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from remat.integrations.transformers import RematCallback
from remat.units import gib

LENGTH, BATCH_SIZE, ACCUMULATION = 256, 4, 4


def script(folder: str, steps: int, *callbacks: RematCallback) -> SFTTrainer:
    """The script of a person: ours is what is in `callbacks`."""
    arguments = SFTConfig(
        folder,
        max_steps=steps,
        packing=True,
        max_length=LENGTH,
        bf16=True,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=False,  # the plan decides what is recomputed
        learning_rate=1e-2,
        **QUIET,
    )
    return SFTTrainer(
        llama(),
        arguments,
        train_dataset=Dataset.from_list(sums()),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1),
        callbacks=list(callbacks),
    )


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 93, steps=50).parse_args(arguments)
    os.environ["TRACKIO"] = "0"
    disable_progress_bars()

    def train(*callbacks: RematCallback) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = script(folder, given.steps, *callbacks)
            torch.manual_seed(2)
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ours = RematCallback(budget=given.budget)
    with tempfile.TemporaryDirectory() as folder:
        script(folder, 1, ours).train()  # plans, and keeps the plan
    print(ours.plan)
    without = observed(train)
    planned = observed(lambda: train(ours))
    report(without, planned)
    assert ours.plan is not None
    print(f"predicted {gib(ours.plan.predicted['peak_bytes'])}, budget {gib(ours.plan.budget_bytes)}")
    return without, planned


if __name__ == "__main__":
    main()
