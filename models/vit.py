"""ViT (Dosovitskiy et al. 2020): patches of 16 x 16 as tokens, dropout 0.1 as in its ImageNet-1k training."""

from __future__ import annotations

from remat.models.common import image_model
from remat.workload.workload import Workload

PATCH = 16


def workload(
    name: str, *, width: int, layers: int, heads: int, batch_size: int, image_size: int, labels: int
) -> Workload:
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "image_size": image_size,
        "patch_size": PATCH,
        "hidden_dropout_prob": 0.1,
        "attn_implementation": "sdpa",
    }
    return image_model(name, "ViT", shape, image_size=image_size, stride=PATCH, labels=labels, batch_size=batch_size)


def vit_l16(image_size: int = 224) -> Workload:
    return workload("vit-l16", width=1024, layers=24, heads=16, batch_size=64, image_size=image_size, labels=1000)


def small() -> Workload:
    return workload("vit-test", width=128, layers=6, heads=4, batch_size=48, image_size=192, labels=10)
