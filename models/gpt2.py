"""GPT-2 (Radford et al. 2019): causal language models with learned positions and dropout 0.1 everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from remat.models.common import text_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, **shape: Any) -> Workload:
    """Make a workload of the GPT-2 class with `shape`, trained on sequences as long as its positions."""
    made = {"n_positions": 1024, "vocab_size": 50257, **shape}
    length, last = made["n_positions"], made["vocab_size"] - 1
    made |= {"bos_token_id": last, "eos_token_id": last, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    gpt = text_model(name, "GPT2", made, model="GPT2LMHeadModel", batch_size=batch_size, seq_len=length)

    def build() -> nn.Module:
        model = gpt.build()
        # The library reads the loss off the class's name, and this name does not tell: it would warn inside
        # the first forward, and logging breaks a captured graph in two.
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return model

    return dataclasses.replace(gpt, build=build)


def gpt2() -> Workload:
    return workload("gpt2", n_embd=768, n_layer=12, n_head=12, batch_size=24)


def gpt2_medium() -> Workload:
    return workload("gpt2-medium", n_embd=1024, n_layer=24, n_head=16, batch_size=16)


def gpt2_large() -> Workload:
    return workload("gpt2-large", n_embd=1280, n_layer=36, n_head=20, batch_size=8)


def gpt2_xl() -> Workload:
    return workload("gpt2-xl", n_embd=1600, n_layer=48, n_head=25, batch_size=4)
