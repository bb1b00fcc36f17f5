"""gpt-oss (2025): attention with sinks, in windows in every second layer, and 4 of 32 experts in every layer.

Shape of `config.json` in openai/gpt-oss-20b on the Hugging Face hub. Its experts are published in 4 bits (mxfp4);
here they are in the dtype of training, as the library loads them for that. The library has no fused attention with
sinks but for kernels of its own, so attention is eager, and its scores are most of what a long sequence takes.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def gpt_oss_20b() -> Workload:
    return text_model("gpt-oss-20b", "GptOss", SHAPE, batch_size=1, seq_len=4096)
