"""Linear layers in float16 on an A100 and an H100: microsoft/vidur (MIT), `vidur/fp16_layers_median.csv`.

Medians of kernels of one layer after another, so that L2 is as the layer before leaves it. Shapes follow from the
model, the operator and the number of tensor-parallel ranks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measured.measurement import Kernels, Measurement, card, kernels_of, on_fakes

_WIDTHS = {  # of the model, of queries, keys and values together, of the MLP
    "CodeLlama-34b-Instruct-hf": (8192, 10240, 22016),
    "Llama-2-70b-hf": (8192, 10240, 28672),
    "Llama-2-7b-hf": (4096, 12288, 11008),
    "Qwen-72B": (8192, 24576, 24576),
    "internlm-20b": (5120, 15360, 13824),
}


def measurements(folder: Path) -> Iterator[Measurement]:
    """Rows of the table, products and residual additions."""
    with (folder / "vidur" / "fp16_layers_median.csv").open() as file:
        for row in csv.DictReader(file):
            operator, tokens, ranks = row["operator"], row["num_tokens"], row["num_tensor_parallel_workers"]
            target = card(row["gpu"])
            yield Measurement(
                f"vidur {target.name}",
                "residual addition" if operator == "add" else "product",
                f"{row['model']} {operator} {tokens} / {ranks}",
                "fit" if operator == "add" and row["gpu"] == "h100" else "check",
                target,
                float(row["median_us"]),
                _kernels(row["model"], operator, int(tokens), int(ranks)),
            )


def _kernels(model: str, operator: str, tokens: int, ranks: int) -> Kernels:
    width, qkv, mlp = _WIDTHS[model]
    with on_fakes():
        if operator == "add":
            left, right = (torch.empty(tokens, width, dtype=torch.float16) for _ in range(2))
            return kernels_of(lambda: left + right)
        columns, inner = {
            "attn_pre_proj": (qkv // ranks, width),
            "attn_post_proj": (width, width // ranks),
            "mlp_up_proj": (2 * mlp // ranks, width),
            "mlp_down_proj": (width, mlp // ranks),
        }[operator]
        x, weight = (torch.empty(size, inner, dtype=torch.float16) for size in (tokens, columns))
        return kernels_of(lambda: torch.nn.functional.linear(x, weight))
