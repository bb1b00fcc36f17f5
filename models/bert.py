"""BERT (Devlin et al. 2018): bidirectional, masked language modelling, dropout 0.1.

Every position carries a label. The original labels 15 % of them, but the logits of all positions are computed
either way, and memory and time are the same.
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
    batch_size: int,
    positions: int = 512,
    vocab: int = 30522,
) -> Workload:
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return text_model(name, "Bert", shape, model="BertForMaskedLM", batch_size=batch_size, seq_len=positions)


def bert_large() -> Workload:
    return workload("bert-large", width=1024, layers=24, heads=16, batch_size=32)


def small() -> Workload:
    return workload("bert-test", width=128, layers=6, heads=4, batch_size=8, positions=256, vocab=1024)
