"""LLaMA-Factory as people run it, from a dictionary: LoRA, bf16, accumulation; one callback plans the step.

python examples/llama_factory.py [--steps 50] [--budget 25MiB]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import QUIET, TrainingResult, llama, observed, options, report, sums, tokenizer
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

from remat.integrations.transformers import RematCallback
from remat.units import gib

SETTINGS: dict[str, Any] = {
    "stage": "pt",
    "do_train": True,
    "dataset": "sums",
    "template": "empty",
    "cutoff_len": 256,  # rows are packed into this, as this stage does
    "finetuning_type": "lora",
    "lora_target": "all",
    "lora_rank": 16,
    "lora_dropout": 0.1,
    "bf16": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    **QUIET,
}


class Losses(TrainerCallback):
    """Keeps the losses of a run, of which run_exp returns nothing."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.found += [logs["loss"]] if logs and "loss" in logs else []


def train(steps: int, *callbacks: TrainerCallback, **settings: Any) -> list[float]:
    """The script of a person: ours is what is in `callbacks`."""
    losses = Losses()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama().save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        (folder / "sums.json").write_text(json.dumps(sums()))
        known = {"sums": {"file_name": "sums.json", "columns": {"prompt": "text"}}}
        (folder / "dataset_info.json").write_text(json.dumps(known))
        where = {"model_name_or_path": f"{name}/model", "dataset_dir": name, "output_dir": f"{name}/out"}
        run_exp({**SETTINGS, **where, "max_steps": steps, **settings}, callbacks=[losses, *callbacks])
    return losses.found


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 25, steps=50).parse_args(arguments)
    ours = RematCallback(budget=given.budget)
    train(1, ours)  # plans, and keeps the plan
    print(ours.plan)
    # Its loader turns gradient checkpointing on, which gives way to a plan; without a plan it is to be told.
    without = observed(lambda: train(given.steps, disable_gradient_checkpointing=True))
    planned = observed(lambda: train(given.steps, ours))
    report(without, planned)
    assert ours.plan is not None
    print(f"predicted {gib(ours.plan.predicted['peak_bytes'])}, budget {gib(ours.plan.budget_bytes)}")
    return without, planned


if __name__ == "__main__":
    main()
