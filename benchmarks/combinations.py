"""Means of training together, two and three at a time, held to PyTorch's CUDA build, without a GPU.

    python -m benchmarks combinations                        nine families at test size, pairs (hours)
    python -m benchmarks combinations:llama,least            of one family, at one budget
    python -m benchmarks combinations:llama,least,triples    three at a time

As `by_name.py`. What is refused has a row with its reason. Little of a small model is computed
there, so first steps are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks import by_name
from remat.models import bert, convnext, gpt2, llama, qwen3_moe, resnet, swin, t5, vit

BUDGETS = ("60%step", "least")
FAMILIES = (gpt2, bert, t5, llama, qwen3_moe, vit, swin, convnext, resnet)
MEANS = {
    "bitwise": "--exact",
    "fused": "--fuse",
    "activations": "--offload activations",
    "optimizer": "--offload optimizer",
    "weights": "--offload weights",
    "LoRA": "--lora r=8",
    "nf4": "--quantize nf4",
    "8-bit AdamW": "--optimizer adamw8bit",
    "accumulation": "--accumulation 4",
    "clipping": "--clip-grad-norm",
    "ema": "--ema",
    "DDP": "--ddp --ranks 8",
    "step in backward": "--optimizer-step backward",
}
LANGUAGE_ONLY = ("weights", "LoRA", "nf4")  # adapters are put into language models
OF_ADAPTERS = {"weights", "nf4"}  # what is frozen beside them
NEVER = ({"bitwise", "fused"},)  # two answers to one question


def main(*names: str) -> None:
    count = 3 if "triples" in names else 2
    together = [means for means in itertools.combinations(MEANS, count) if not any(two <= {*means} for two in NEVER)]
    forms = {" + ".join(means): options(means) for means in together}
    models = {family.__name__.rpartition(".")[2]: f"{family.__file__}:small" for family in FAMILIES}
    by_name.hold("combinations", [name for name in names if name != "triples"], models, forms, BUDGETS, "blind")


def options(means: Sequence[str]) -> str:
    """Return the options of `remat plan` for several means."""
    offloads = [name for name in means if MEANS[name].startswith("--offload")]
    said = [MEANS[name] for name in means if name not in offloads]
    if offloads:
        said.append(f"--offload {','.join(offloads)}")
    if OF_ADAPTERS & {*means} and "LoRA" not in means:
        said.append(MEANS["LoRA"])
    return " ".join(said)
