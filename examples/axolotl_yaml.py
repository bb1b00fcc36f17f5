"""axolotl as people run it, from a YAML: LoRA, sample packing, bf16, accumulation; two lines of it plan the step.

python examples/axolotl_yaml.py [--steps 50] [--budget 30MiB]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # before axolotl is imported, which would report that it was run

import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import BasePlugin
from axolotl.train import setup_model_and_trainer
from common import DEVICE, TrainingResult, llama, observed, options, report, sums, tokenizer

from remat.integrations.transformers import RematCallback
from remat.units import gib

SETTINGS: dict[str, Any] = {
    "sequence_len": 256,
    "sample_packing": True,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "lora_target_linear": True,
    **{f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")},  # need a GPU
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "val_set_size": 0.0,
    "dataset_num_proc": 1,
}


class OnCpu(BasePlugin):
    """Tells transformers that bf16 without a GPU is meant, which axolotl's YAML has no key for."""

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"use_cpu": DEVICE.type == "cpu"}


def write(folder: Path, steps: int, **ours: Any) -> Path:
    """The YAML of a person, with its model and data: ours is what is in `ours`, and the plugin that reads it."""
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in sums()))
    plugins = ["axolotl_yaml.OnCpu", *(["remat.integrations.axolotl.RematPlugin"] if ours else [])]
    data = {"path": str(folder / "sums.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}
    config = {
        "base_model": str(folder / "model"),
        "datasets": [data],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "plugins": plugins,
        **SETTINGS,
        **ours,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 30, steps=50).parse_args(arguments)

    def trainer(steps: int, **ours: Any) -> Any:
        """Return the Trainer of `axolotl train`."""
        with tempfile.TemporaryDirectory() as folder:
            config = load_cfg(str(write(Path(folder), steps, **ours)))
            return setup_model_and_trainer(config, load_datasets(cfg=config))[0]

    def train(made: Any) -> TrainingResult:
        """The weights are there before, and count."""

        def run() -> list[float]:
            made.train()
            return [entry["loss"] for entry in made.state.log_history if "loss" in entry]

        weights = sum(p.numel() * p.element_size() for p in made.model.parameters())
        found = observed(run)
        return TrainingResult(found.losses, found.peak_bytes + weights)

    ours = {"remat_budget": given.budget}
    trainer(1, **ours).train()  # plans, and keeps the plan
    without = train(trainer(given.steps))
    made = trainer(given.steps, **ours)
    planned = train(made)
    plan = next(each.plan for each in made.callback_handler.callbacks if isinstance(each, RematCallback))
    assert plan is not None
    print(plan)
    report(without, planned)
    print(f"predicted {gib(plan.predicted['peak_bytes'])}, budget {gib(plan.budget_bytes)}")
    return without, planned


if __name__ == "__main__":
    main()
