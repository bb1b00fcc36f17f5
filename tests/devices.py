"""Where claims that hold on any device are tested: on the CPU, and with `pytest --device cuda` on a CUDA device.

A test that is marked `any_device` builds its model on `DEVICE`. With `--device cuda` those tests run, and those marked
`cuda`; all others are left out, for they are about the CPU or about no device at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device(os.environ.get("REMAT_TEST_DEVICE", "cpu"))  # set by conftest.py, for processes it starts too
ON_CARD = "CARD_HOME" in os.environ  # tests/card: PyTorch's CUDA build, without a GPU
# A missing wait is seen where copies are as late as they may be: on a GPU that is chance.
WHERE_LATE = pytest.mark.skipif(DEVICE.type == "cuda" and not ON_CARD, reason="a GPU's copies are late by chance")
SCHEDULES = ("late-copies", "late-compute", *(f"shuffled:{seed}" for seed in range(6)))


@contextmanager
def streams(schedule: str) -> Iterator[None]:
    """The card's streams run by a schedule of tests/card/runtime/streams.h; elsewhere nothing changes."""
    if not ON_CARD:
        yield
        return
    torch.ops.card.streams(schedule)
    try:
        yield
    finally:
        torch.ops.card.streams("now")
