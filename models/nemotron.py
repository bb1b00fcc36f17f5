"""Nemotron 3 Nano (2025): Mamba-2 layers, mixtures of 128 experts, and six layers of attention.

Shape of `config.json` in nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 on the Hugging Face hub, whose layers stand in
`hybrid_override_pattern`. Mamba-2 runs in torch's own operators: the library's faster ones (mamba-ssm) need a GPU, and
need far less memory.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload

_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SHAPE: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
}


def layers(pattern: str) -> dict[str, list[str]]:
    return {"layers_block_type": [_KINDS[letter] for letter in pattern]}


def nemotron_3_nano() -> Workload:
    return text_model("nemotron-3-nano", "NemotronH", {**SHAPE, **layers(_PATTERN)}, batch_size=1, seq_len=4096)
