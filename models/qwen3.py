"""Qwen3 (2025): head norms, grouped key-value heads, gated MLPs; dense, and as a mixture of 128 experts.

Shapes of `config.json` in Qwen/Qwen3-4B, Qwen/Qwen3-8B and Qwen/Qwen3-30B-A3B on the Hugging Face hub. The mixture
runs the library's grouped products, as it does in training; `qwen3_moe.py` is a small one of another implementation.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


def qwen3_4b() -> Workload:
    shape = {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "tie_word_embeddings": True}
    return text_model("qwen3-4b", "Qwen3", {**SHAPE, **shape}, batch_size=1, seq_len=4096)


def qwen3_8b() -> Workload:
    shape = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "tie_word_embeddings": False}
    return text_model("qwen3-8b", "Qwen3", {**SHAPE, **shape}, batch_size=1, seq_len=4096)


def qwen3_30b_a3b() -> Workload:
    shape = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    return text_model("qwen3-30b-a3b", "Qwen3Moe", {**SHAPE, **shape}, batch_size=1, seq_len=4096)
