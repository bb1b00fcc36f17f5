"""Swin (Liu et al. 2021): attention in shifted windows, whose masks live inside the graph; drop path 0.1."""

from __future__ import annotations

from remat.models.common import image_model
from remat.workload.workload import Workload


def workload(
    name: str,
    *,
    width: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
    window: int,
    batch_size: int,
    image_size: int,
    labels: int,
) -> Workload:
    """Make a Swin workload; stage s has `depths[s]` blocks of `heads[s]` heads and width `width * 2**s`."""
    shape = {
        "embed_dim": width,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "image_size": image_size,
        "drop_path_rate": 0.1,
        "attn_implementation": "sdpa",
    }
    return image_model(name, "Swin", shape, image_size=image_size, stride=32, labels=labels, batch_size=batch_size)


def swin_base(image_size: int = 224) -> Workload:
    return workload(
        "swin-base",
        width=128,
        depths=(2, 2, 18, 2),
        heads=(4, 8, 16, 32),
        window=7,
        batch_size=128,
        image_size=image_size,
        labels=1000,
    )


def small() -> Workload:
    return workload(
        "swin-test",
        width=32,
        depths=(2, 2, 2),
        heads=(1, 2, 4),
        window=4,
        batch_size=56,
        image_size=128,
        labels=10,
    )
