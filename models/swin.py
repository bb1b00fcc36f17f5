"""Swin (Liu et al. 2021): attention in shifted windows, whose masks live inside the graph; drop path 0.1."""

from __future__ import annotations

from typing import Any

from remat.models.common import image_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, image_size: int, labels: int, **shape: Any) -> Workload:
    """Make a Swin workload; stage s has `depths[s]` blocks of `num_heads[s]` heads and width `embed_dim * 2**s`."""
    shape |= {"image_size": image_size, "drop_path_rate": 0.1, "attn_implementation": "sdpa"}
    return image_model(name, "Swin", shape, image_size=image_size, stride=32, labels=labels, batch_size=batch_size)


def swin_base(image_size: int = 224) -> Workload:
    shape = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "window_size": 7}
    return workload("swin-base", **shape, image_size=image_size, labels=1000, batch_size=128)
