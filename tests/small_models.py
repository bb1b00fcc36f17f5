"""The ready-made architectures of `remat.models` at a size for tests and benchmarks.

In each a whole training step peaks at 250 to 500 MiB and takes about a second on two CPU cores; activations, not
parameters, are most of that peak. `TEST_SIZES` has one of each kind, `MORE_TEST_SIZES` the language models that are
fine-tuned most: separate, since tests of all of the first take long enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat import models
from remat.models.common import text_model
from remat.workload.workload import Workload

ENDS: dict[str, Any] = {"vocab_size": 1024, "max_position_embeddings": 256}
SMALL: dict[str, Any] = {
    **ENDS,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SMALLER: dict[str, Any] = {**ENDS, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
QWEN3: dict[str, Any] = {**SMALL, "head_dim": 32, "intermediate_size": 512}


def gpt2() -> Workload:
    layers = {"n_embd": 128, "n_layer": 6, "n_head": 4}
    return models.gpt2.workload("gpt2-test", **layers, n_positions=256, vocab_size=1024, batch_size=8)


def llama() -> Workload:
    shape = {**models.llama.SHAPE, **SMALL, "intermediate_size": 512, "tie_word_embeddings": True}
    return text_model("llama-test", "Llama", shape, batch_size=12, seq_len=256)


def bert() -> Workload:
    return models.bert.workload("bert-test", **{**SMALLER, "num_hidden_layers": 6}, batch_size=8)


def t5() -> Workload:
    layers = {"d_model": 128, "num_layers": 4, "num_heads": 4}
    return models.t5.workload("t5-test", **layers, vocab_size=1024, batch_size=8, seq_len=256)


def vit() -> Workload:
    layers = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    return models.vit.workload("vit-test", **layers, image_size=192, labels=10, batch_size=48)


def resnet() -> Workload:
    shape = {"embedding_size": 32, "hidden_sizes": (64, 128, 256, 256), "depths": (2, 2, 2, 2)}
    return models.resnet.workload("resnet-test", **shape, image_size=128, labels=10, batch_size=96)


def convnext() -> Workload:
    shape = {"hidden_sizes": (32, 64, 128, 256), "depths": (2, 2, 2, 2)}
    return models.convnext.workload("convnextv2-test", **shape, image_size=128, labels=10, batch_size=44)


def swin() -> Workload:
    shape = {"embed_dim": 32, "depths": (2, 2, 2), "num_heads": (1, 2, 4), "window_size": 4}
    return models.swin.workload("swin-test", **shape, image_size=128, labels=10, batch_size=56)


def qwen3_moe() -> Workload:
    layers = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 24}
    sizes = {**layers, "moe_intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": 1024}
    return text_model("qwen3-moe-test", "Qwen3Moe", {**models.qwen3_moe.SHAPE, **sizes}, batch_size=5, seq_len=128)


def qwen3() -> Workload:
    return text_model("qwen3-test", "Qwen3", {**QWEN3, "tie_word_embeddings": True}, batch_size=12, seq_len=256)


def qwen3_mixture() -> Workload:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = {**QWEN3, **experts, "num_hidden_layers": 4, "tie_word_embeddings": False}
    return text_model("qwen3-30b-a3b-test", "Qwen3Moe", shape, batch_size=12, seq_len=256)


def qwen3_5() -> Workload:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = {**SMALLER, **linear, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}
    return models.qwen3_5.workload("qwen3.5-test", {**models.qwen3_5.SHAPE, **sizes}, batch_size=6, seq_len=256)


def gpt_oss() -> Workload:
    heads = {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}
    experts = {"intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = {**models.gpt_oss.SHAPE, **SMALLER, **heads, **experts}
    return text_model("gpt-oss-test", "GptOss", shape, batch_size=8, seq_len=256)


def gemma3() -> Workload:
    sizes = {**SMALL, "intermediate_size": 512, "head_dim": 32, "sliding_window": 64}
    return models.gemma3.workload("gemma-3-test", {**models.gemma3.SHAPE, **sizes}, batch_size=8, seq_len=256)


def qwen3_vl() -> Workload:
    text = {**models.qwen3_vl.TEXT, **SMALLER, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 4, 4]}
    vision = {
        **models.qwen3_vl.VISION,
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
        "patch_size": 8,
    }
    return models.qwen3_vl.workload("qwen3-vl-test", text, vision, (1020, 1018), batch_size=4, seq_len=256)


def mistral() -> Workload:
    shape = {**models.mistral.SHAPE, **SMALL, "intermediate_size": 480}
    return text_model("mistral-test", "Mistral", shape, batch_size=12, seq_len=256)


def nemotron() -> Workload:
    shape = {
        **models.nemotron.SHAPE,
        **models.nemotron.layers("MEM*EM"),
        **ENDS,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "chunk_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    }
    return text_model("nemotron-3-test", "NemotronH", shape, batch_size=4, seq_len=256)


def phi4() -> Workload:
    sizes = {**SMALL, "intermediate_size": 480, "original_max_position_embeddings": 256}
    return text_model("phi-4-test", "Phi3", {**models.phi4.SHAPE, **sizes}, batch_size=12, seq_len=256)


def glm4() -> Workload:
    latent = {"q_lora_rank": 64, "kv_lora_rank": 32}
    latent |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2}
    sizes = {**SMALLER, **latent, **experts, "intermediate_size": 256, "num_key_value_heads": 4}
    return text_model("glm-4.7-test", "Glm4MoeLite", {**models.glm4.SHAPE, **sizes}, batch_size=8, seq_len=256)


TEST_SIZES: dict[str, Callable[[], Workload]] = {
    "gpt2": gpt2,
    "llama-1b": llama,
    "bert-large": bert,
    "t5-base": t5,
    "vit-l16": vit,
    "resnet50": resnet,
    "convnextv2-base": convnext,
    "swin-base": swin,
    "qwen3-moe": qwen3_moe,
}

MORE_TEST_SIZES: dict[str, Callable[[], Workload]] = {
    "qwen3-4b": qwen3,
    "qwen3-30b-a3b": qwen3_mixture,
    "qwen3.5-9b": qwen3_5,
    "gpt-oss-20b": gpt_oss,
    "gemma-3-1b": gemma3,
    "qwen3-vl-4b": qwen3_vl,
    "mistral-7b": mistral,
    "nemotron-3-nano": nemotron,
    "phi-4": phi4,
    "glm-4.7-flash": glm4,
}
