"""Architectures: Hugging Face models beyond `models/`, at tiny sizes, planned, applied, validated, compared bit by bit.

Causal and masked language models, encoder and decoder, mixtures of experts, state spaces and hybrids, vision,
segmentation, speech, text with images; each built from a configuration with random weights, fp32 on the CPU, dropout
on. Each is planned twice:

- without regions: two steps with the plan and two without must agree in loss, gradients, buffers and random state, or
  the plan must name the branch that could not be captured (`plain`);
- under a tight budget, a tenth of the way from the least feasible peak to no checkpointing, nothing in slices: steps
  must agree as above, as many nodes must be recomputed as planned, also where the model is evaluated before the plan is
  applied and between two steps (`equal`), and `remat.validate` must pass, its measured peak against the predicted one
  (`error_percent`).

`architectures:33-55` runs those that stand 33rd to 55th, `architectures:CLIPModel` one.

What cannot be planned stays in the table, with its reason. Workspaces of kernels are measured. Times are measured as
quickly as may be: nothing here depends on them but the choice among plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks import report
from remat.costing.operator_timing import device_target, time_operators
from remat.costing.profile import Profile
from remat.errors import RematError
from remat.evaluation.caveats import traced_branches
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models.common import loss_of, token_ids, transformers
from remat.planning.budget import Budget
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.studies import plan_profile

CPU = torch.device("cpu")
SHARE = 0.1
STEPS = 2
PLENTY = 1 << 62
VOCAB, WIDTH, LAYERS, HEADS, LENGTH, SAMPLES = 256, 64, 3, 4, 48, 4
INSTALLED = re.compile(r"\S*/site-packages/")  # where a message names a file
COLUMNS = [
    "architecture",
    "kind",
    "graphs",
    "nodes",
    "plain",
    "without_mib",
    "budget_mib",
    "predicted_mib",
    "measured_mib",
    "error_percent",
    "overhead_percent",
    "regions",
    "recomputed",
    "equal",
    "validated",
    "failure",
]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers, what makes its configuration tiny, and what it is given.

    outputs  whose mean squares are the loss, where the model's own loss is matched on the host
    """

    model: str
    config: str
    kind: str
    options: dict[str, Any]
    batch: Callable[[int], dict[str, torch.Tensor]]
    outputs: tuple[str, ...] = ()


def text(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(VOCAB, samples, LENGTH), "labels": token_ids(VOCAB, samples, LENGTH)}


def images(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 10, (samples,))}


def pixels(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 10, (samples, 8, 8))}


def only_pixels(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32)}


def points(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 64, 64), "input_points": 64 * torch.rand(samples, 1, 2, 2)}


def sound(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, 4000), "labels": torch.randint(0, 10, (samples,))}


def spectrogram(samples: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(samples, 16, 2 * LENGTH), "labels": token_ids(VOCAB, samples, 16)}


def pairs(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(VOCAB, samples, 16), "pixel_values": torch.randn(samples, 3, 32, 32)}


_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 128}
_TEXT = {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "use_cache": False}
_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH + 2, "pad_token_id": 0}
_CLASSES = {"num_labels": 10, "problem_type": "single_label_classification"}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "dropout": 0.1,
    "decoder_start_token_id": 1,
    **_ENDS,
}
_SPEECH: dict[str, Any] = {
    **_SIZES,
    **_CLASSES,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,  # draws its masks with numpy
    "layerdrop": 0.0,
    "classifier_proj_size": 32,
}
_CLIP: dict[str, Any] = {
    "text_config": {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": 16, "attention_dropout": 0.1, **_ENDS},
    "vision_config": {**_SIZES, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1},
    "projection_dim": 32,
}
_SEGFORMER: dict[str, Any] = {
    "hidden_sizes": (16, 32, 64, 64),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 4, 4),
    "decoder_hidden_size": 32,
    "num_labels": 10,
    "drop_path_rate": 0.1,
    "hidden_dropout_prob": 0.1,
}
_DROPPED = {"attention_dropout": 0.1}
_EXPERTS = {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_NARROW = {"head_dim": 16, "num_key_value_heads": 2}
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DEEPSEEK: dict[str, Any] = {
    **_TEXT,
    "moe_intermediate_size": 32,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_NEMOTRON: dict[str, Any] = {
    **{name: value for name, value in _TEXT.items() if name != "num_hidden_layers"},
    **_NARROW,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "hidden_dropout": 0.1,
}
_ZAMBA2: dict[str, Any] = {
    **_TEXT,
    "num_key_value_heads": HEADS,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    "mamba_d_state": 16,
    "n_mamba_heads": 4,
    "chunk_size": 16,
    "adapter_rank": 8,
}
_MASKS: dict[str, Any] = {
    "backbone_config": {
        "model_type": "swin",
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 2, 4),
        "window_size": 2,
        "drop_path_rate": 0.1,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "feature_size": 32,
    "mask_feature_size": 32,
    "hidden_dim": 32,
    "encoder_feedforward_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 2,
    "dropout": 0.1,
    "dim_feedforward": 64,
    "num_queries": 8,
}
_SAM: dict[str, Any] = {
    "vision_config": {
        **_SIZES,
        "output_channels": 32,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": (1,),
        "num_pos_feats": 16,
        "attention_dropout": 0.1,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}

IMAGE, START, END, VIDEO = 250, 251, 252, 253  # ids of tokens that stand for an image, and for what is around it
_LANGUAGE = {**_TEXT, **_NARROW, "max_position_embeddings": 2 * LENGTH}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
_TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS: dict[str, Any] = {**_TOKENS, "vision_start_token_id": START, "vision_end_token_id": END}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": LENGTH,
}


def shown(samples: int, tokens: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """Text with `tokens` in front that stand for an image or sound."""
    ids = torch.randint(3, IMAGE, (samples, LENGTH))
    ids[:, 0], ids[:, 1 : 1 + tokens], ids[:, 1 + tokens] = START, IMAGE, END
    return {"input_ids": ids, "labels": ids.clone(), **others}


def with_grid(samples: int) -> dict[str, torch.Tensor]:
    """Images of 16 and of 24 patches, merged four to one: of as many tokens as fit, so each sample has both."""
    kinds = torch.zeros(samples, LENGTH, dtype=torch.int)
    kinds[:, 1:5] = kinds[:, 6:12] = 1
    made = shown(samples, 4, mm_token_type_ids=kinds)
    made["input_ids"][:, 5], made["input_ids"][:, 6:12] = START, IMAGE
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]]).repeat(samples, 1)
    return {**made, "pixel_values": torch.randn(samples * 40, 3 * 2 * 4 * 4), "image_grid_thw": grid}


def with_image(tokens: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda samples: shown(samples, tokens, pixel_values=torch.randn(samples, 3, 16, 16))


def with_kinds(tokens: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        made = with_image(tokens)(samples)
        return {**made, "token_type_ids": (made["input_ids"] == IMAGE).long()}

    return batch


def with_sizes(tokens: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda samples: {**with_image(tokens)(samples), "image_sizes": torch.tensor([[16, 16]] * samples)}


def with_tiles(samples: int) -> dict[str, torch.Tensor]:
    return shown(samples, 4, pixel_values=torch.randn(samples, 1, 3, 16, 16))


def with_sound(samples: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(samples, 2 * LENGTH, dtype=torch.long)
    return shown(
        samples,
        LENGTH // 2,
        input_features=torch.randn(samples, 16, 2 * LENGTH),
        feature_attention_mask=mask,
        attention_mask=torch.ones(samples, LENGTH, dtype=torch.long),
    )


def spectrogram_of(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, 32, 16), "labels": torch.randint(0, 10, (samples,))}


def captioned(samples: int) -> dict[str, torch.Tensor]:
    ids = token_ids(VOCAB, samples, 16)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(samples, 3, 16, 16)}


def features(samples: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(samples, 2 * LENGTH, 16), "labels": token_ids(VOCAB, samples, 16)}


ALL = (
    Architecture(
        "MistralForCausalLM", "MistralConfig", "causal", {**_TEXT, **_DROPPED, "num_key_value_heads": 2}, text
    ),
    Architecture(
        "GemmaForCausalLM",
        "GemmaConfig",
        "causal",
        {**_TEXT, **_DROPPED, "head_dim": 16, "num_key_value_heads": 2},
        text,
    ),
    Architecture(
        "PhiForCausalLM", "PhiConfig", "causal", {**_TEXT, "resid_pdrop": 0.1, "attention_dropout": 0.1}, text
    ),
    Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        "causal",
        {**_TEXT, **_ENDS, "ffn_dim": 128, "word_embed_proj_dim": WIDTH, "dropout": 0.1},
        text,
    ),
    Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", "causal", {**_TEXT, **_DROPPED, "hidden_dropout": 0.1}, text),
    Architecture("BloomForCausalLM", "BloomConfig", "causal", {**_TEXT, "n_layer": LAYERS, "n_head": HEADS}, text),
    Architecture("MixtralForCausalLM", "MixtralConfig", "mixture of experts", {**_TEXT, **_DROPPED, **_EXPERTS}, text),
    Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "mixture of experts",
        {**_TEXT, **_DROPPED, **_NARROW, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"output_router_logits": True},
        text,
    ),
    Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        "mixture of experts",
        {**_TEXT, **_DROPPED, **_EXPERTS, **_NARROW, "sliding_window": 16},
        text,
    ),
    Architecture(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        "mixture of experts",
        {**_TEXT, **_ENDS, **_DROPPED, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        text,
    ),
    Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", "mixture of experts", _DEEPSEEK, text),
    Architecture(
        "BambaForCausalLM",
        "BambaConfig",
        "hybrid",
        {**_TEXT, **_ENDS, **_DROPPED, **_SSM, "num_key_value_heads": 2, "attn_layer_indices": [1]},
        text,
    ),
    Architecture(
        "JambaForCausalLM",
        "JambaConfig",
        "hybrid",
        {**_TEXT, **_ENDS, **_DROPPED, "num_key_value_heads": 2, "use_mamba_kernels": False, "num_experts": 2}
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 8},
        text,
    ),
    Architecture("NemotronHForCausalLM", "NemotronHConfig", "hybrid", _NEMOTRON, text),
    Architecture("Zamba2ForCausalLM", "Zamba2Config", "hybrid", {**_ZAMBA2, **_DROPPED}, text),
    Architecture(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        "hybrid",
        {**_TEXT, **_ENDS, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]},
        text,
    ),
    Architecture("MambaForCausalLM", "MambaConfig", "state space", {**_TEXT, "state_size": 8}, text),
    Architecture("RwkvForCausalLM", "RwkvConfig", "recurrent", {**_TEXT, "context_length": LENGTH}, text),
    Architecture("AlbertForMaskedLM", "AlbertConfig", "masked", {**_ENCODER, "embedding_size": 32}, text),
    Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "masked",
        {"dim": WIDTH, "hidden_dim": 128, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB, "pad_token_id": 0},
        text,
    ),
    Architecture("ElectraForMaskedLM", "ElectraConfig", "masked", {**_ENCODER, "embedding_size": 32}, text),
    Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        "masked",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
        text,
    ),
    Architecture("BartForConditionalGeneration", "BartConfig", "encoder-decoder", _SEQ2SEQ, text),
    Architecture("MarianMTModel", "MarianConfig", "encoder-decoder", _SEQ2SEQ, text),
    Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "speech",
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": LENGTH},
        spectrogram,
    ),
    Architecture("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", "speech", _SPEECH, sound),
    Architecture("HubertForSequenceClassification", "HubertConfig", "speech", _SPEECH, sound),
    Architecture(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        "vision",
        {**_SIZES, **_CLASSES, "image_size": 32, "patch_size": 8, "drop_path_rate": 0.1, "hidden_dropout_prob": 0.1},
        images,
    ),
    Architecture("SegformerForSemanticSegmentation", "SegformerConfig", "vision", _SEGFORMER, pixels),
    Architecture(
        "Mask2FormerModel",
        "Mask2FormerConfig",
        "segmentation",
        _MASKS,
        only_pixels,
        ("transformer_decoder_last_hidden_state", "pixel_decoder_last_hidden_state"),
    ),
    Architecture("SamModel", "SamConfig", "segmentation", _SAM, points, ("pred_masks", "iou_scores")),
    Architecture("CLIPModel", "CLIPConfig", "text and images", _CLIP, pairs),
    Architecture(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        "text and images",
        {
            "text_config": {**_LANGUAGE, **_MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "patch_size": 4}
            | {"mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **_QWEN_TOKENS,
        },
        with_grid,
    ),
    Architecture(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        "text and images",
        {
            "text_config": {**_LANGUAGE, **_MROPE},
            "vision_config": {**_QWEN_VISION, "out_hidden_size": WIDTH, "fullatt_block_indexes": [1]}
            | {"window_size": 16},
            **_QWEN_TOKENS,
        },
        with_grid,
    ),
    Architecture(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        "text and images",
        {
            "text_config": {**_LANGUAGE, **_MROPE},
            "vision_config": {**_QWEN_VISION, "out_hidden_size": WIDTH, "num_position_embeddings": 16}
            | {"deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
        with_grid,
    ),
    Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        "text and images",
        {
            "text_config": {"model_type": "llama", **_LANGUAGE, **_DROPPED},
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
            "image_token_index": IMAGE,
        },
        with_image(16),
    ),
    Architecture(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        "text and images",
        {
            "text_config": {"model_type": "gemma", **_LANGUAGE, **_DROPPED},
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "projection_dim": WIDTH},
            "image_token_index": IMAGE,
            "projection_dim": WIDTH,
        },
        with_kinds(16),
    ),
    Architecture(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        "text and images",
        {
            "text_config": {**_LANGUAGE, **_DROPPED, "sliding_window": 16},
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
        },
        with_kinds(4),
    ),
    Architecture(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        "text and images",
        {
            "text_config": {"model_type": "mistral", **_LANGUAGE, **_DROPPED},
            "vision_config": {"model_type": "pixtral", **_TOWER},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
        with_sizes(4),
    ),
    Architecture(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        "text and images",
        {
            "text_config": {"model_type": "llama", **_LANGUAGE, **_DROPPED, **_ENDS},
            "vision_config": _TOWER,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        with_tiles,
    ),
    Architecture(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        "text and images",
        {
            "text_config": {"model_type": "qwen2", **_LANGUAGE, **_DROPPED},
            "vision_config": {**_TOWER, "image_size": (16, 16), "patch_size": (4, 4)},
            "image_token_id": IMAGE,
        },
        with_image(4),
    ),
    Architecture(
        "BlipForConditionalGeneration",
        "BlipConfig",
        "text and images",
        {
            "text_config": {**_SIZES, **_ENDS, "vocab_size": VOCAB, "max_position_embeddings": 32}
            | {"encoder_hidden_size": 32, "sep_token_id": 2},
            "vision_config": _TOWER,
        },
        captioned,
    ),
    Architecture(
        "Qwen2AudioForConditionalGeneration",
        "Qwen2AudioConfig",
        "text and sound",
        {
            "text_config": {"model_type": "qwen2", **_LANGUAGE, **_DROPPED},
            "audio_config": {"model_type": "qwen2_audio_encoder", **_AUDIO},
            "audio_token_index": IMAGE,
        },
        with_sound,
    ),
    Architecture(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        "speech",
        {
            **_SEQ2SEQ,
            "input_feat_per_channel": 16,
            "conv_channels": 64,
            "max_source_positions": 2 * LENGTH,
            "max_target_positions": LENGTH,
            "num_conv_layers": 2,
        },
        features,
    ),
    Architecture(
        "ASTForAudioClassification",
        "ASTConfig",
        "speech",
        {**_SIZES, **_CLASSES, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "hidden_dropout_prob": 0.1}
        | {"frequency_stride": 8, "time_stride": 8},
        spectrogram_of,
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "hybrid",
        {**_TEXT, **_DROPPED, **_NARROW, **_DELTA, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4},
        text,
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        "hybrid",
        {**_TEXT, **_DROPPED, **_NARROW, **_DELTA, "num_hidden_layers": 4},
        text,
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        "mixture of experts",
        {**_TEXT, **_DROPPED, **_NARROW, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1},
        text,
    ),
    Architecture("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", "mixture of experts", _DEEPSEEK, text),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        "hybrid",
        {**_TEXT, **_ENDS, **_DROPPED, **_SSM, **_EXPERTS, "shared_intermediate_size": 32}
        | {"layers_block_type": ["mamba", "attention", "mamba"]},
        text,
    ),
    Architecture(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        "hybrid",
        {**_TEXT, **_ENDS, **_DROPPED, **_NARROW, **_SSM, "mamba_d_ssm": 128},
        text,
    ),
    Architecture(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        "hybrid",
        {**_TEXT, **_ENDS, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
        text,
    ),
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        "mixture of experts",
        {**_TEXT, **_ENDS, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
        text,
    ),
    Architecture(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        "mixture of experts",
        {**_TEXT, **_ENDS, **_DROPPED, **_EXPERTS},
        text,
    ),
    Architecture(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        "hybrid",
        {**_TEXT, **_ENDS, **_DROPPED, **_NARROW, **_EXPERTS, "block_size": 16}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        text,
    ),
)


def main(*names: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    chosen = [each for number, each in enumerate(ALL, 1) if not names or each.model in names or _within(number, names)]
    rows: list[dict[str, Any]] = []
    for each in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append({"architecture": each.model, "kind": each.kind, **verdict(workload_of(each))})
        print(rows[-1], flush=True)
        path = report.stem("_".join(["architectures", *names]), CPU)
        report.write(path, report.provenance(CPU), rows, COLUMNS)  # so far


def _within(number: int, names: Iterable[str]) -> bool:
    """Whether `33-55` or its like is among `names` and takes in `number`."""
    spans = (re.fullmatch(r"(\d+)-(\d+)", name) for name in names)
    return any(int(span[1]) <= number <= int(span[2]) for span in spans if span)


def workload_of(each: Architecture) -> Workload:
    library = transformers()

    def build() -> nn.Module:
        model = getattr(library, each.model)(getattr(library, each.config)(**each.options))
        if getattr(model, "loss_type", None) is None:
            with contextlib.suppress(AttributeError):
                model.loss_type = "ForMaskedLM" if "Masked" in each.model else "ForCausalLM"
        return model.train()

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if each.outputs:
            found = model(**batch)
            return sum((found[name].square().mean() for name in each.outputs), torch.zeros(()))
        return model(**batch, return_loss=True).loss if each.batch is pairs else loss_of(model, batch)

    sgd = functools.partial(torch.optim.SGD, lr=0.1)  # next to Adam's state, activations this small would not matter
    return Workload(each.model, build, lambda samples, length: each.batch(samples), step, SAMPLES, optimizer=sgd)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A workload's step on the CPU, recorded and costed."""

    step: FakeStep
    profile: Profile

    def plan(self, budget_bytes: int) -> Plan:
        budget = Budget(budget_bytes, budget_bytes)
        return plan_profile(self.profile, budget, step=self.step, limits=Limits(time_s=20), exact=True)

    def tight(self, share: float) -> Plan:
        """The plan `share` of the way from the least feasible peak to none."""
        problem = Problem(self.profile.graph, self.profile.costs, find_space(self.profile.graph), PLENTY)
        most = problem.memory.peak_without_checkpointing
        least = least_peak(problem, Limits(time_s=20)).peak_bytes
        return self.plan(int(least + share * (most - least)))


def recorded(workload: Workload) -> Recorded:
    step = FakeStep(workload, device=CPU)
    graph = record(step)
    return Recorded(
        step, Profile(graph, time_operators(graph.kinds, CPU, repeats=3, seconds_per_kind=0.0), device_target(CPU))
    )


def verdict(workload: Workload) -> dict[str, Any]:
    """A row: what the plans are, and whether training under them is the untouched one."""
    started = time.monotonic()
    row: dict[str, Any] = {}
    try:
        found = recorded(workload)
        graph = found.profile.graph
        row = {"graphs": len(graph.fingerprints), "nodes": len(graph.nodes)}
        expected = trained(workload, built(workload))
        row["plain"] = plain(workload, found.plan(PLENTY), expected)
        plan = found.tight(SHARE)
        row |= {
            "without_mib": round(plan.without_checkpointing["peak_bytes"] / MIB, 2),
            "budget_mib": round(plan.budget_bytes / MIB, 2),
            "predicted_mib": round(plan.predicted["peak_bytes"] / MIB, 2),
            "overhead_percent": round(100 * plan.predicted["overhead"], 1),
            "regions": len(plan.regions),
        }
        row |= compared(workload, plan, expected)
        failure = row.pop("failure")
        row |= validated(workload, plan)
        row["failure"] = "; ".join(filter(None, (failure, row["failure"])))
    except (RematError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        row["failure"] = f"{type(error).__name__}: {INSTALLED.sub('', str(error))[:400]}"
    finally:
        torch._dynamo.reset()
    return {**row, "wall_s": round(time.monotonic() - started, 1)}


def built(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build()


def differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]


def plain(workload: Workload, plan: Plan, expected: dict[str, torch.Tensor]) -> str:
    """Whether training under a plan without regions is the untouched one; what the plan names, where it is not."""
    assert not plan.regions
    differs = differing(expected, trained(workload, apply(built(workload), plan)))
    named = "; ".join(traced_branches(plan.about))
    if not differs:
        return "equal" + (f" (named: {named})" if named else "")
    return f"{len(differs)} of {len(expected)} differ, " + (f"named: {named}" if named else "NOT NAMED")


def compared(workload: Workload, plan: Plan, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Training under `plan` against the untouched one: of a fresh model, and of one evaluated before and between."""
    model = apply(built(workload), plan, observe=True)
    failures = [f"{name} differs" for name in differing(expected, trained(workload, model))[:3]]
    counts, planned = counts_of(model), plan.predicted["recomputed_nodes"]
    if not plan.regions:
        failures.append("no plan needs less than no checkpointing")
    if counts.regions != STEPS * len(plan.regions) or counts.recomputed_nodes != STEPS * planned:
        failures.append(f"{counts.regions} regions entered, {counts.recomputed_nodes} nodes recomputed")
    evaluated = evaluate(workload, built(workload))
    failures += [
        f"{name} differs after an evaluation"
        for name in differing(expected, trained(workload, apply(evaluated, plan), evaluate))[:3]
    ]
    row = {"recomputed": f"{STEPS * planned}/{counts.recomputed_nodes}", "equal": not failures}
    return {**row, "failure": "; ".join(failures)}


def validated(workload: Workload, plan: Plan) -> dict[str, Any]:
    """Validate `plan`, and return the report's fields."""
    found = validate(workload, plan, device=CPU)
    measured, predicted = found.measured["peak_bytes"], found.predicted["peak_bytes"]
    failures = [f"validation: {text}" for text in found.kernel_differences[:2]]
    if not found.within_budget:
        failures.append(f"{measured} bytes measured, {plan.budget_bytes} allowed")
    return {
        "measured_mib": round(measured / MIB, 2),
        "error_percent": round(100 * (predicted / measured - 1), 4),
        "validated": found.passed,
        "failure": "; ".join(failures),
    }


def evaluate(workload: Workload, model: nn.Module) -> nn.Module:
    """`model`, after a forward in evaluation mode, back in training mode."""
    torch.manual_seed(50)
    with torch.no_grad():
        workload.step(model.eval(), workload.batch(SAMPLES, None))
    return model.train()


def nothing(workload: Workload, model: nn.Module) -> nn.Module:
    return model


def trained(
    workload: Workload, model: nn.Module, between: Callable[[Workload, nn.Module], nn.Module] = nothing
) -> dict[str, torch.Tensor]:
    """Losses, gradients, buffers and random states of a few steps, with `between` after each."""
    found: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch = workload.batch(SAMPLES, None)
        torch.manual_seed(number)
        loss = workload.step(model, batch)
        loss.backward()
        found |= {f"loss {number}": loss.detach(), f"generator {number}": torch.get_rng_state()}
        found |= {
            f"gradient of {n} {number}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        found |= {f"{n} {number}": b.clone() for n, b in model.named_buffers()}
        model.zero_grad()
        between(workload, model)
    return found
