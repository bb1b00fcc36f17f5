"""GPT-3 175B's shape (Brown et al. 2020) in the GPT-2 class: for planning, since no single device holds it.

Its banded sparse attention is not modelled; every layer is dense. Weights and optimizer state are in bf16.
"""

from __future__ import annotations

from remat.models import gpt2
from remat.workload.workload import Workload


def gpt3_175b() -> Workload:
    dense = gpt2.workload("gpt3-175b", n_embd=12288, n_layer=96, n_head=96, n_positions=2048, batch_size=1)
    return dense.with_dtype("bf16")
