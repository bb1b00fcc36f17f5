"""Qwen3's mixture of experts (2025), in a small shape: each token goes to 2 of 8 experts.

The experts run as one batched matmul. The library's default, a grouped one, takes nothing but bf16 on fake
tensors; its loop over experts asks the data which expert got which token, which a fake tensor cannot answer.
The price is a copy of an expert's weights for every token that it gets, which is why the shape is small;
those copies are most of this workload's memory.
"""

from __future__ import annotations

from remat.models.common import text_model
from remat.workload.workload import Workload


def workload(
    name: str,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    expert_mlp: int,
    batch_size: int,
    seq_len: int,
    positions: int = 32768,
    vocab: int = 151936,
) -> Workload:
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "moe_intermediate_size": expert_mlp,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "experts_implementation": "batched_mm",
    }
    return text_model(name, "Qwen3Moe", shape, batch_size=batch_size, seq_len=seq_len)


def qwen3_moe() -> Workload:
    return workload(
        "qwen3-moe",
        width=512,
        layers=8,
        heads=8,
        kv_heads=2,
        expert_mlp=256,
        batch_size=2,
        seq_len=1024,
    )


def small() -> Workload:
    return workload(
        "qwen3-moe-test",
        width=96,
        layers=4,
        heads=4,
        kv_heads=2,
        expert_mlp=64,
        batch_size=5,
        seq_len=128,
        positions=128,
        vocab=1024,
    )
