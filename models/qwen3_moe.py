"""Qwen3's mixture of experts (2025), in a small shape: each token goes to 2 of 8 experts.

The experts run as one batched matmul. The library's default, a grouped one, takes nothing but bf16 on fake
tensors; its loop over experts asks the data which expert got which token, which a fake tensor cannot answer.
The price is a copy of an expert's weights for every token that it gets, which is why the shape is small;
those copies are most of this workload's memory.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "experts_implementation": "batched_mm",
}


def qwen3_moe() -> Workload:
    return text_model("qwen3-moe", "Qwen3Moe", SHAPE, batch_size=2, seq_len=1024)
