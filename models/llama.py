"""Llama 3 (2024): rotary positions, grouped key-value heads, gated MLPs, RMS norms, no dropout.

Shapes of Llama-3.2-1B (tied embeddings) and Llama-3.1-8B. Their stretched rotary frequencies are left out:
they change the numbers in one small table and nothing else.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def llama_1b() -> Workload:
    shape = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "tie_word_embeddings": True}
    return text_model("llama-1b", "Llama", {**SHAPE, **shape}, batch_size=4, seq_len=2048)


def llama_8b() -> Workload:
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "tie_word_embeddings": False}
    return text_model("llama-8b", "Llama", {**SHAPE, **shape}, batch_size=1, seq_len=4096)
