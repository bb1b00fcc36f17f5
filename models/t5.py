"""T5 (Raffel et al. 2019): an encoder whose output every decoder layer reads, dropout 0.1.

The sequence length is the encoder's. The decoder gets a quarter of it: span corruption makes 114 targets of
512 inputs, rounded up here. Positions are relative, so no sequence is too long.
"""

from __future__ import annotations

from typing import Any

from remat.models.common import text_model
from remat.workload.workload import Workload


def workload(name: str, *, batch_size: int, seq_len: int, **shape: Any) -> Workload:
    """Make a workload of an encoder and a decoder of `num_layers` layers each."""
    width = shape["d_model"]
    own = {"vocab_size": 32128, "d_kv": width // shape["num_heads"], "d_ff": 4 * width}
    return text_model(
        name,
        "T5",
        {**own, "dropout_rate": 0.1, "decoder_start_token_id": 0, **shape},
        model="T5ForConditionalGeneration",
        batch_size=batch_size,
        seq_len=seq_len,
        labels_len=lambda length: -(-length // 4),
    )


def t5_base() -> Workload:
    return workload("t5-base", d_model=768, num_layers=12, num_heads=12, batch_size=32, seq_len=512)
