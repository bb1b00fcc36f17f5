"""Phi-4 (2024): the Phi-3 class, whose queries, keys and values, gate and up are one product each.

Shape of `config.json` in microsoft/phi-4 on the Hugging Face hub.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def phi_4() -> Workload:
    return text_model("phi-4", "Phi3", SHAPE, batch_size=1, seq_len=4096)
