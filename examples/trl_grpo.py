"""TRL's GRPOTrainer: LoRA, a reference, accumulation; one line of it plans the step that it trains with.

python examples/trl_grpo.py [--steps 20] [--budget 56MiB]

The reward is for digits. Each generation has other lengths, and all run under one plan.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from common import DEVICE, QUIET, TrainingResult, llama, observed, options, report, sums, tokenizer
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from remat.integrations.transformers import RematCallback
from remat.units import gib

PROMPT, COMPLETION, BATCH_SIZE, ACCUMULATION = 64, 32, 8, 2


def digits(completions: list[str], **columns: Any) -> list[float | None]:
    """Return the share of the characters of each completion that are digits."""
    return [len(re.findall(r"\d", text)) / max(len(text), 1) for text in completions]


def script(folder: str, steps: int, *callbacks: RematCallback) -> GRPOTrainer:
    """The script of a person: ours is what is in `callbacks`."""
    arguments = GRPOConfig(
        folder,
        max_steps=steps,
        max_completion_length=COMPLETION,
        num_generations=4,
        beta=0.04,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=False,  # the plan decides what is recomputed
        learning_rate=1e-3,
        **QUIET,
    )
    texts = [row["text"] for row in sums()]
    return GRPOTrainer(
        llama(),
        digits,
        arguments,
        train_dataset=Dataset.from_list([{"prompt": text[:PROMPT]} for text in texts if len(text) >= PROMPT]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        callbacks=list(callbacks),
    )


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, "77%step" if DEVICE.type == "cpu" else "92%step", steps=20).parse_args(arguments)
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
