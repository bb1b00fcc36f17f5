"""ConvNeXt V2 (Woo et al. 2023): depthwise convolutions, global response norms, drop path 0.1."""

from __future__ import annotations

from typing import Any

from remat.models.common import image_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, image_size: int, labels: int, **shape: Any) -> Workload:
    shape |= {"image_size": image_size, "drop_path_rate": 0.1}
    return image_model(
        name, "ConvNextV2", shape, image_size=image_size, stride=32, labels=labels, batch_size=batch_size
    )


def convnextv2_base(image_size: int = 224) -> Workload:
    shape = {"hidden_sizes": (128, 256, 512, 1024), "depths": (3, 3, 27, 3)}
    return workload("convnextv2-base", **shape, image_size=image_size, labels=1000, batch_size=128)
