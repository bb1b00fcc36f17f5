"""Gemma 3 (2025): five layers of attention in windows for each one over everything, a large tied vocabulary.

Shape of `config.json` in google/gemma-3-1b-pt on the Hugging Face hub.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def workload(name: str, shape: dict[str, Any], batch_size: int, seq_len: int) -> Workload:
    return text_model(name, "Gemma3", shape, config="Gemma3TextConfig", batch_size=batch_size, seq_len=seq_len)


def gemma_3_1b() -> Workload:
    return workload("gemma-3-1b", SHAPE, batch_size=4, seq_len=2048)
