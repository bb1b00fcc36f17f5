"""Trainers: what people fine-tune with, at toy size on the CPU, with `RematCallback(budget=...)` and without it.

TRL's Trainers by task, and the models that they are pointed at: 4-bit weights, mixtures of experts, text with images.
Each trains in bf16 autocast, gradients accumulated over micro-batches, once as it stands and once planned. `losses` is
whether the losses that it logs are the same bits; `measured` the peak of the whole training, which starts before the
model is made, beside `predicted` and `budget`. What is refused stays in the table, with what is said.

The last row is `examples/trl_sft.py` for 50 steps. In the others TRL's head, whose tiles are for a large vocabulary,
has tiles for a small one, and the data is such that every batch is as the planned one: all padded, or none.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from remat.errors import RematError
from remat.units import MIB
from tests import small_models

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

STEPS, STEPS_OF_EXAMPLE, LENGTH = 4, 50, 128
BUDGET = "75%step"
COLUMNS = ["trainer", "model", "steps", "losses", "without_mib", "budget_mib", "predicted_mib", "measured_mib"]
COLUMNS += ["error_percent", "regions", "said"]
Make = Callable[..., Any]


def main(*names: str) -> None:
    """`trainers:DPO,GRPO,nf4` runs the rows of these trainers only, and of models whose description has the word."""
    os.environ["TRACKIO"] = "0"
    warnings.simplefilter("ignore")
    import transformers
    from datasets import disable_progress_bars

    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    path, about = report.stem("_".join(["trainers", *names]), cpu), {**report.provenance(cpu), **_versions()}
    for trainer, model, make, steps in _all():
        if not names or any(name == trainer or name in model for name in names):
            rows.append({"trainer": trainer, "model": model, "steps": steps, **row_of(make, steps)})
            print(rows[-1], file=sys.stderr, flush=True)
            report.write(path, about, rows, COLUMNS)  # so far


def row_of(make: Make, steps: int) -> dict[str, Any]:
    """One Trainer, trained with a plan and without."""
    from common import observed

    from remat.integrations.transformers import RematCallback

    def train(*callbacks: Any, steps: int = steps) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(1)
            trainer = make(folder, steps, *callbacks)
            torch.manual_seed(2)
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with tempfile.TemporaryDirectory() as plans:
        ours = RematCallback(budget=BUDGET, cache=plans)
        try:
            train(ours, steps=1)
        except (RematError, ValueError) as error:
            return {"said": f"{type(error).__name__}: {str(error)[:300]}"}
    assert ours.plan is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without, planned = observed(train), observed(functools.partial(train, ours))
    said = {str(warning.message) for warning in caught if "remat" in warning.filename}
    predicted = ours.plan.predicted["peak_bytes"]
    return {
        "losses": "same" if without.losses == planned.losses else f"differ from step {_first(without, planned)}",
        "without_mib": round(without.peak_bytes / MIB, 2),
        "budget_mib": round(ours.plan.budget_bytes / MIB, 2),
        "predicted_mib": round(predicted / MIB, 2),
        "measured_mib": round(planned.peak_bytes / MIB, 2),
        "error_percent": round(100 * (predicted / planned.peak_bytes - 1), 2),
        "regions": len(ours.plan.regions),
        "said": "; ".join(sorted(said))[:300],
    }


def _first(one: Any, other: Any) -> int:
    return next(i for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)) if a != b) + 1


def _all() -> list[tuple[str, str, Make, int]]:
    import trl_sft  # type: ignore[import-not-found]
    from common import llama

    return [
        ("SFT", "Llama in 4 bits (nf4), LoRA", functools.partial(_trl, "SFT", nf4, text, adapters=True), STEPS),
        ("SFT", "gpt-oss, LoRA", functools.partial(_trl, "SFT", experts, text, adapters=True), STEPS),
        ("Trainer", "Qwen3-VL, LoRA, an image in each row", images, STEPS),
        ("DPO", "Llama, LoRA", functools.partial(_trl, "DPO", llama, preferences, adapters=True), STEPS),
        ("DPO", "Llama, ref_model", functools.partial(_trl, "DPO", llama, preferences, reference=llama), STEPS),
        ("KTO", "Llama, LoRA", functools.partial(_trl, "KTO", llama, judged, adapters=True), STEPS),
        ("KTO", "Llama, ref_model", functools.partial(_trl, "KTO", llama, judged, reference=llama), STEPS),
        ("Reward", "Llama, a score for a head", functools.partial(_trl, "Reward", scored, preferences), STEPS),
        ("GRPO", "Llama", functools.partial(_trl, "GRPO", llama, prompts, reward_funcs=_lengths), STEPS),
        ("SFT", "Llama, LoRA, packed", trl_sft.script, STEPS_OF_EXAMPLE),
    ]


def _lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def _trl(
    name: str,
    model: Callable[[], nn.Module],
    data: Callable[[], list[dict[str, Any]]],
    folder: str,
    steps: int,
    *callbacks: Any,
    adapters: bool = False,
    reference: Callable[[], nn.Module] | None = None,
    **given: Any,
) -> Any:
    """TRL's Trainer of that name."""
    import trl
    import trl.trainer.utils
    from common import CHARACTERS, QUIET, tokenizer
    from datasets import Dataset
    from peft import LoraConfig

    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = len(CHARACTERS) + 1
    own = {"max_completion_length": 48} if name == "GRPO" else {"max_length": LENGTH}
    arguments = getattr(trl, f"{name}Config")(
        folder,
        max_steps=steps,
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        **own,
        **QUIET,
    )
    if adapters:
        given["peft_config"] = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    if reference is not None:
        given["ref_model"] = reference()
    return getattr(trl, f"{name}Trainer")(
        model(),
        args=arguments,
        train_dataset=Dataset.from_list(data()),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **given,
    )


# Data: where completions differ in length every batch of rows is padded, and else none is.


def text() -> list[dict[str, Any]]:
    return [{"text": f"{i % 7}+{i % 3}={i % 7 + i % 3};" * (LENGTH // 6)} for i in range(64)]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": f"{i % 7}+{i % 3}="} for i in range(64)]


def preferences() -> list[dict[str, Any]]:
    return [{**row, "chosen": f"{i % 5};" * 40, "rejected": f"{i % 4};" * 50} for i, row in enumerate(prompts())]


def judged() -> list[dict[str, Any]]:
    return [{**row, "completion": f"{i % 5};" * (20 + i), "label": i % 2 == 0} for i, row in enumerate(prompts()[:32])]


# Models


def scored() -> nn.Module:
    from common import llama
    from transformers import LlamaForSequenceClassification

    config: Any = llama().config
    torch.manual_seed(1)
    return LlamaForSequenceClassification(type(config)(**{**config.to_dict(), "num_labels": 1}))


def nf4() -> nn.Module:
    """Llama as transformers quantises it when it loads one."""
    from common import llama
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16)


def experts() -> nn.Module:
    torch.manual_seed(1)
    return small_models.gpt_oss().build()


def images(folder: str, steps: int, *callbacks: Any) -> Any:
    from common import QUIET
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: (torch.cat if name in BY_PATCH else torch.stack)([row[name] for row in rows]) for name in rows[0]}

    adapters = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    arguments = TrainingArguments(
        folder, max_steps=steps, bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, **QUIET
    )
    made = get_peft_model(small_models.qwen3_vl().build(), adapters)
    return Trainer(made, arguments, collate, train_dataset=_with_images(), callbacks=list(callbacks))


@functools.cache
def _with_images() -> list[dict[str, torch.Tensor]]:
    samples = [small_models.qwen3_vl().batch(1, LENGTH) for _ in range(32)]
    return [{name: value if name in BY_PATCH else value[0] for name, value in sample.items()} for sample in samples]


BY_PATCH = ("pixel_values", "image_grid_thw")  # of all images of a batch, one after the other


def _versions() -> dict[str, Any]:
    return {name: report.version(name) for name in ("trl", "peft", "bitsandbytes", "accelerate")}
