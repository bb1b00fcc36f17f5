"""Llama 3 (2024): rotary positions, grouped key-value heads, gated MLPs, RMS norms, no dropout.

Shapes of Llama-3.2-1B (tied embeddings) and Llama-3.1-8B. Their stretched rotary frequencies are left out:
they change the numbers in one small table and nothing else.
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
    mlp: int,
    tied: bool,
    batch_size: int,
    seq_len: int,
    positions: int = 131072,
    vocab: int = 128256,
) -> Workload:
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    return text_model(name, "Llama", shape, batch_size=batch_size, seq_len=seq_len)


def llama_1b() -> Workload:
    return workload(
        "llama-1b",
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        mlp=8192,
        tied=True,
        batch_size=4,
        seq_len=2048,
    )


def llama_8b() -> Workload:
    return workload(
        "llama-8b",
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        mlp=14336,
        tied=False,
        batch_size=1,
        seq_len=4096,
    )


def small() -> Workload:
    return workload(
        "llama-test",
        width=192,
        layers=6,
        heads=6,
        kv_heads=2,
        mlp=512,
        tied=True,
        batch_size=12,
        seq_len=256,
        positions=256,
        vocab=1024,
    )
