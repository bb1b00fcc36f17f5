"""GPT-2 (Radford et al. 2019): causal language models with learned positions and dropout 0.1 everywhere."""

from __future__ import annotations

import dataclasses

from torch import nn

from remat.models.common import text_model
from remat.workload.workload import Workload


def workload(
    name: str,
    *,
    width: int,
    layers: int,
    heads: int,
    batch_size: int,
    positions: int = 1024,
    vocab: int = 50257,
) -> Workload:
    """Make a workload of the GPT-2 class, trained on sequences as long as its positions."""
    shape = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocab,
        "bos_token_id": vocab - 1,
        "eos_token_id": vocab - 1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    made = text_model(name, "GPT2", shape, model="GPT2LMHeadModel", batch_size=batch_size, seq_len=positions)

    def build() -> nn.Module:
        model = made.build()
        # The library reads the loss off the class's name, and this name does not tell: it would warn inside
        # the first forward, and logging breaks a captured graph in two.
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return model

    return dataclasses.replace(made, build=build)


def gpt2() -> Workload:
    return workload("gpt2", width=768, layers=12, heads=12, batch_size=24)


def gpt2_medium() -> Workload:
    return workload("gpt2-medium", width=1024, layers=24, heads=16, batch_size=16)


def gpt2_large() -> Workload:
    return workload("gpt2-large", width=1280, layers=36, heads=20, batch_size=8)


def gpt2_xl() -> Workload:
    return workload("gpt2-xl", width=1600, layers=48, heads=25, batch_size=4)


def small() -> Workload:
    return workload("gpt2-test", width=128, layers=6, heads=4, batch_size=8, positions=256, vocab=1024)
