"""Qwen3.5 (2026): three layers of gated delta rule for each one of attention.

Shape of the `text_config` of Qwen/Qwen3.5-9B on the Hugging Face hub, without its vision tower. The delta rule runs
in torch's own operators: the library's faster ones (flash-linear-attention, causal-conv1d) need a GPU.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


def workload(name: str, shape: dict[str, Any], batch_size: int, seq_len: int) -> Workload:
    return text_model(name, "Qwen3_5", shape, config="Qwen3_5TextConfig", batch_size=batch_size, seq_len=seq_len)


def qwen3_5_9b() -> Workload:
    return workload("qwen3.5-9b", SHAPE, batch_size=1, seq_len=4096)
