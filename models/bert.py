"""BERT (Devlin et al. 2018): bidirectional, masked language modelling, dropout 0.1.

Every position carries a label. The original labels 15 % of them, but the logits of all positions are computed
either way, and memory and time are the same.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, **shape: Any) -> Workload:
    """Make a workload of `shape` and Bert's own sizes, trained on sequences as long as its positions."""
    own = {"max_position_embeddings": 512, "vocab_size": 30522, "intermediate_size": 4 * shape["hidden_size"]}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    made = {**own, **dropout, **shape}
    length = made["max_position_embeddings"]
    return text_model(name, "Bert", made, model="BertForMaskedLM", batch_size=batch_size, seq_len=length)


def bert_large() -> Workload:
    return workload("bert-large", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, batch_size=32)
