"""ResNet-50 (He et al. 2015): convolutions and batch norms, whose statistics a recompute must not touch."""

from __future__ import annotations

from typing import Any

from remat.models.common import image_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, image_size: int, labels: int, **shape: Any) -> Workload:
    return image_model(name, "ResNet", shape, image_size=image_size, stride=32, labels=labels, batch_size=batch_size)


def resnet50(image_size: int = 224) -> Workload:
    shape = {"embedding_size": 64, "hidden_sizes": (256, 512, 1024, 2048), "depths": (3, 4, 6, 3)}
    return workload("resnet50", **shape, image_size=image_size, labels=1000, batch_size=256)
