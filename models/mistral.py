"""Mistral 7B (2023): Llama's block; version 0.3 has no sliding window.

Shape of `config.json` in mistralai/Mistral-7B-v0.3 on the Hugging Face hub.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def mistral_7b() -> Workload:
    return text_model("mistral-7b", "Mistral", SHAPE, batch_size=1, seq_len=4096)
