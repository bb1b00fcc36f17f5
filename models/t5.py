"""T5 (Raffel et al. 2019): an encoder whose output every decoder layer reads, dropout 0.1.

The sequence length is the encoder's. The decoder gets a quarter of it: span corruption makes 114 targets of
512 inputs, rounded up here. Positions are relative, so no sequence is too long.
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
    seq_len: int,
    vocab: int = 32128,
) -> Workload:
    """Make a workload of an encoder and a decoder of `layers` layers each."""
    shape = {
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": vocab,
        "dropout_rate": 0.1,
        "decoder_start_token_id": 0,
    }
    return text_model(
        name,
        "T5",
        shape,
        model="T5ForConditionalGeneration",
        batch_size=batch_size,
        seq_len=seq_len,
        labels_len=lambda length: -(-length // 4),
    )


def t5_base() -> Workload:
    return workload("t5-base", width=768, layers=12, heads=12, batch_size=32, seq_len=512)


def small() -> Workload:
    return workload("t5-test", width=128, layers=4, heads=4, batch_size=8, seq_len=256, vocab=1024)
