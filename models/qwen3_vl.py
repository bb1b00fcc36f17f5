"""Qwen3-VL (2025): Qwen3 after a vision tower, whose features go into the first layers of the text model too.

Shape of `config.json` in Qwen/Qwen3-VL-4B-Instruct on the Hugging Face hub. A sample is one square image and text
after it, together as long as asked for; the image takes a quarter of the tokens, 1,024 at most (of 32 x 32 pixels).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from remat.errors import UsageError
from remat.models.common import TRAINING_TEXT, Batch, loss_of, member, token_ids, transformers
from remat.workload.workload import Workload

_IMAGE, _START = 151655, 151652  # the next ids stand for videos, and for the end
TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]},
}
VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MOST_IMAGE_TOKENS, SHARE = 1024, 4


def workload(
    name: str, text: dict[str, Any], vision: dict[str, Any], tokens: tuple[int, int], *, batch_size: int, seq_len: int
) -> Workload:
    """Make a Qwen3-VL workload; `tokens` are the ids of an image's patches and of its start."""
    library = transformers()
    make_config, make_model = (
        member(library, each, name) for each in ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration")
    )
    image, start = tokens

    def build() -> nn.Module:
        config = make_config(
            text_config=copy.deepcopy(text),
            vision_config=copy.deepcopy(vision),
            tie_word_embeddings=text["tie_word_embeddings"],
            image_token_id=image,
            vision_start_token_id=start,
            video_token_id=image + 1,
            vision_end_token_id=start + 1,
            **TRAINING_TEXT,
        )
        model: nn.Module = make_model(config)
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return model.train()

    def batch(samples: int, length: int | None) -> Batch:
        if length is None or not 2 * SHARE <= length <= text["max_position_embeddings"]:
            raise UsageError(
                f"sequence length {length} does not suit model {name}: it takes {2 * SHARE} to "
                f"{text['max_position_embeddings']} tokens. Its default is {seq_len}."
            )
        return image_and_text(samples, length, text["vocab_size"], vision, tokens)

    return Workload(name, build, batch, loss_of, batch_size, seq_len, autocast=torch.bfloat16)


def image_and_text(samples: int, length: int, vocab: int, vision: dict[str, Any], tokens: tuple[int, int]) -> Batch:
    """Make samples of a square image followed by random text, `length` tokens in all."""
    merged = math.isqrt(min(length // SHARE, MOST_IMAGE_TOKENS))  # patches of a side, after merging
    side, (image, start) = merged * vision["spatial_merge_size"], tokens
    ids = token_ids(min(image, start), samples, length)
    ids[:, 0] = start
    ids[:, 1 : 1 + merged * merged] = image
    kinds = torch.zeros(samples, length, dtype=torch.int)
    kinds[:, 1 : 1 + merged * merged] = 1
    labels = ids.clone()
    labels[:, : 1 + merged * merged] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(
            samples * side * side, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        ),
        "image_grid_thw": torch.tensor([[1, side, side]] * samples),
    }


def qwen3_vl_4b() -> Workload:
    return workload("qwen3-vl-4b", TEXT, VISION, (_IMAGE, _START), batch_size=1, seq_len=4096)
