"""Ready-made workloads: thin builders over `transformers` configurations, with random weights.

One file is one family: the shape that its sizes share, then a few lines for each published one, in the keys of its
configuration. `REGISTRY` has them all.

    workload = build("gpt2-xl").sized(batch_size=8)

Importing this package does not import `transformers`; making a workload does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from remat.errors import UsageError
from remat.models import (
    bert,
    convnext,
    gemma3,
    glm4,
    gpt2,
    gpt3,
    gpt_oss,
    llama,
    mistral,
    nemotron,
    phi4,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
    resnet,
    swin,
    t5,
    vit,
)
from remat.workload.workload import Workload

TEXT: dict[str, Callable[[], Workload]] = {
    "gpt2": gpt2.gpt2,
    "gpt2-medium": gpt2.gpt2_medium,
    "gpt2-large": gpt2.gpt2_large,
    "gpt2-xl": gpt2.gpt2_xl,
    "gpt3-175b": gpt3.gpt3_175b,
    "llama-1b": llama.llama_1b,
    "llama-8b": llama.llama_8b,
    "bert-large": bert.bert_large,
    "t5-base": t5.t5_base,
    "qwen3-moe": qwen3_moe.qwen3_moe,
    "qwen3-4b": qwen3.qwen3_4b,
    "qwen3-8b": qwen3.qwen3_8b,
    "qwen3-30b-a3b": qwen3.qwen3_30b_a3b,
    "qwen3.5-9b": qwen3_5.qwen3_5_9b,
    "gpt-oss-20b": gpt_oss.gpt_oss_20b,
    "gemma-3-1b": gemma3.gemma_3_1b,
    "qwen3-vl-4b": qwen3_vl.qwen3_vl_4b,
    "mistral-7b": mistral.mistral_7b,
    "nemotron-3-nano": nemotron.nemotron_3_nano,
    "phi-4": phi4.phi_4,
    "glm-4.7-flash": glm4.glm_4_7_flash,
}

IMAGES: dict[str, Callable[..., Workload]] = {
    "vit-l16": vit.vit_l16,
    "resnet50": resnet.resnet50,
    "convnextv2-base": convnext.convnextv2_base,
    "swin-base": swin.swin_base,
}

REGISTRY: dict[str, Callable[..., Workload]] = {**TEXT, **IMAGES}


def names() -> list[str]:
    """List the names that `build` knows."""
    return list(REGISTRY)


def build(name: str, image_size: int | None = None) -> Workload:
    """Build the workload `name`; an image model, optionally at another image size."""
    if name not in REGISTRY:
        close = difflib.get_close_matches(name, REGISTRY)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(f"model {name!r} is not known.{meant} Choose one of {', '.join(REGISTRY)}.")
    if image_size is None:
        return REGISTRY[name]()
    if name not in IMAGES:
        raise UsageError(
            f"image size {image_size} was given, but model {name} takes text. "
            f"Leave it out, or choose one of {', '.join(IMAGES)}."
        )
    return IMAGES[name](image_size)
