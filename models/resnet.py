"""ResNet-50 (He et al. 2015): convolutions and batch norms, whose statistics a recompute must not touch."""

from __future__ import annotations

from remat.models.common import image_model
from remat.workload.workload import Workload


def workload(
    name: str,
    *,
    stem: int,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    batch_size: int,
    image_size: int,
    labels: int,
) -> Workload:
    """Make a bottleneck ResNet workload, from the stem's width and each stage's output width and blocks."""
    shape = {
        "embedding_size": stem,
        "hidden_sizes": widths,
        "depths": depths,
    }
    return image_model(name, "ResNet", shape, image_size=image_size, stride=32, labels=labels, batch_size=batch_size)


def resnet50(image_size: int = 224) -> Workload:
    return workload(
        "resnet50",
        stem=64,
        widths=(256, 512, 1024, 2048),
        depths=(3, 4, 6, 3),
        batch_size=256,
        image_size=image_size,
        labels=1000,
    )


def small() -> Workload:
    return workload(
        "resnet-test",
        stem=32,
        widths=(64, 128, 256, 256),
        depths=(2, 2, 2, 2),
        batch_size=96,
        image_size=128,
        labels=10,
    )
