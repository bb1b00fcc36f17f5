"""Means of training together, two and three at a time, held to PyTorch's CUDA build, without a GPU.

    python -m benchmarks combinations                        nine families at test size, pairs (hours)
    python -m benchmarks combinations:llama,least            of one family, at one budget
    python -m benchmarks combinations:llama,least,triples    three at a time

As `by_name.py`. What is refused has a row with its reason. Little of a small model is computed there, so first steps
are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks import by_name
from tests import small_models

BUDGETS = ("60%step", "least")
ADAPTED = ("gpt2", "llama", "qwen3_moe")  # adapters are put into models by name, from a folder
FAMILIES = (*ADAPTED, "bert", "t5", "vit", "swin", "convnext", "resnet")
MEANS = {
    "bitwise": "--exact",
    "fused": "--fuse",
    "activations": "--offload activations",
    "optimizer": "--offload optimizer",
    "8-bit AdamW": "--optimizer adamw8bit",
    "accumulation": "--accumulation 4",
    "clipping": "--clip-grad-norm",
    "ema": "--ema",
    "DDP": "--ddp --ranks 8",
    "step in backward": "--optimizer-step backward",
}
OF_ADAPTERS = {"LoRA": "--lora r=8", "weights": "--offload weights", "nf4": "--quantize nf4"}
NEVER = ({"bitwise", "fused"},)  # two answers to one question


def main(*names: str) -> None:
    count = 3 if "triples" in names else 2
    chosen = [name for name in names if name != "triples"]
    for name in FAMILIES:
        if name in names or not {*FAMILIES} & {*names}:
            means = {**MEANS, **OF_ADAPTERS} if name in ADAPTED else MEANS
            together = [
                each for each in itertools.combinations(means, count) if not any(two <= {*each} for two in NEVER)
            ]
            forms = {" + ".join(each): options(each) for each in together}
            own = [each for each in chosen if each in (name, *forms, *BUDGETS)]
            by_name.hold("combinations", [*({name} - {*own}), *own], {name: model_of(name)}, forms, BUDGETS, "blind")


def model_of(family: str) -> str:
    """Return what `--model` takes, with options: a folder for a model that may have adapters, else a function."""
    if family not in ADAPTED:
        return f"{small_models.__file__}:{family}"
    made, folder = getattr(small_models, family)(), by_name.ROOT / "build" / "combinations" / family
    made.build().config.save_pretrained(folder)
    return f"{folder} --batch-size {made.batch_size} --seq-len {made.seq_len}"


def options(means: Sequence[str]) -> str:
    """Return the options of `remat plan` for several means."""
    known = {**MEANS, **OF_ADAPTERS}
    offloads = [name for name in means if known[name].startswith("--offload")]
    said = [known[name] for name in means if name not in offloads]
    if offloads:
        said.append(f"--offload {','.join(offloads)}")
    if {*OF_ADAPTERS} & {*means} and "LoRA" not in means:
        said.append(OF_ADAPTERS["LoRA"])
    return " ".join(said)
