"""GLM-4.7-Flash (2026): attention through latent keys and values, and 4 of 64 experts in all layers but the first.

Shape of `config.json` in zai-org/GLM-4.7-Flash on the Hugging Face hub, without its layer that predicts further
tokens, which the library's class leaves out too.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
}


def glm_4_7_flash() -> Workload:
    return text_model("glm-4.7-flash", "Glm4MoeLite", SHAPE, batch_size=1, seq_len=4096)
