"""ViT (Dosovitskiy et al. 2020): patches of 16 x 16 as tokens, dropout 0.1 as in its ImageNet-1k training."""

from __future__ import annotations

from typing import Any

from remat.models.common import image_model
from remat.workload.workload import Workload

PATCH = 16


def workload(name: str, *, batch_size: int, image_size: int, labels: int, **shape: Any) -> Workload:
    shape |= {"intermediate_size": 4 * shape["hidden_size"], "image_size": image_size, "patch_size": PATCH}
    shape |= {"hidden_dropout_prob": 0.1, "attn_implementation": "sdpa"}
    return image_model(name, "ViT", shape, image_size=image_size, stride=PATCH, labels=labels, batch_size=batch_size)


def vit_l16(image_size: int = 224) -> Workload:
    layers = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    return workload("vit-l16", **layers, image_size=image_size, labels=1000, batch_size=64)
