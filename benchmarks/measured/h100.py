"""Kernels measured on an H100 by this project: `h100_kernels.csv.gz` beside this module.

The card is an H100 80GB HBM3 (SXM, 700 W) with torch 2.11.0, CUDA 13.0, cuBLAS 13.1.0.3 and cuDNN 9.19, November 2026.
`remat.costing.operator_timing` timed one kind of kernel after another. The set "steps" has the kernels of training
steps of the ready-made models; the column `models` names the models whose steps have a kernel, each with how often its
step in its own sizes runs it, 0 where only other sizes do. The set "sweep" has kernels of chosen shapes. It was in
view when some rules were chosen (kernels of a convolution, attention's heads of 65 to 128, masks, order of `copy_`,
softmax in 16 bits, products whose rows are multiples of 8 bytes): for those it is no check.

Some 800 kernels of steps, all of at least 30 us, were timed by calls back to back, which adds the 2 us between two
kernels; the others by the device's own time. The table leaves out shorter ones that were only timed by calls: they
show the pace of the host. The reader leaves out `_foreach_addcmul_`: Adam hands it the gradient twice, so a step reads
it once, and the measurement, whose arguments are apart, twice.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measured.measurement import Measurement, Split
from remat.costing.roofline import operator_name
from remat.evaluation.graph import OpKind
from remat.workload.target import TARGETS

TABLE = Path(__file__).with_name("h100_kernels.csv.gz")
WHOLE_STEP = "whole step"
STEPS, SWEEP = "steps h100-80gb", "sweep h100-80gb"
_FITTED = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b", "bert-large", "resnet50", "swin-base"}
_ALIASED, _BY_EIGHT = "_foreach_addcmul_", 50260
_FAMILIES = {
    "product": "mm addmm bmm",
    "convolution": "convolution convolution_backward",
    "norm": "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward",
    "reduction": "sum mean linalg_vector_norm",
    "softmax and loss": "_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward",
    "copy": "_to_copy clone copy_ cat constant_pad_nd slice_backward roll",
    "table": "embedding embedding_dense_backward index index_put gather",
    "dropout": "native_dropout native_dropout_backward",
    "pooling": "max_pool2d_with_indices max_pool2d_with_indices_backward",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def measurements(_folder: Path) -> Iterator[Measurement]:
    """Kernels one by one, then the steps of the ready-made models as the sums of theirs."""
    target = TARGETS["h100-80gb"].with_versions("2.11.0", (9, 19))
    rows = list(_rows())
    for kind, time_us, models in rows:
        described, chosen = f"{kind.name} {json.dumps(kind.signature)[:60]}", STEPS if models else SWEEP
        yield Measurement(chosen, _family(kind), described, _split(kind, set(models)), target, time_us, ((kind, 1),))
    for model in sorted({model for _, _, models in rows for model, count in models.items() if count}):
        kernels = tuple((kind, models.get(model, 0)) for kind, _, models in rows)
        measured = sum(models.get(model, 0) * time_us for _, time_us, models in rows)
        split: Split = "fit" if model in _FITTED else "check"
        yield Measurement(STEPS, WHOLE_STEP, model, split, target, measured, kernels)


def _rows() -> Iterator[tuple[OpKind, float, dict[str, int]]]:
    with gzip.open(TABLE, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            signature: Any = json.loads(row["signature"])
            kind = OpKind(row["operator"], signature, int(row["flops"]), int(row["moved_bytes"]), row["dtype"])
            counts = (item.rsplit(":", 1) for item in row["models"].split())
            if operator_name(kind) != _ALIASED:
                yield kind, float(row["time_us"]), {model: int(count) for model, count in counts}


def _split(kind: OpKind, models: set[str]) -> Split:
    """Fitted are kernels of some models, and two kinds that only other rows have (`_WIDE` and `_Shares.loads`)."""
    name, args = operator_name(kind), kind.signature[0]
    wide = name == "_scaled_dot_product_efficient_attention_backward" and args[1]["tensor"][0][-1] > 128
    return "fit" if models & _FITTED or wide or (name == "mm" and _BY_EIGHT in args[1]["tensor"][0]) else "check"


def _family(kind: OpKind) -> str:
    name = operator_name(kind)
    if "attention" in name:
        return "attention, backward" if name.endswith("backward") else "attention"
    return "optimizer" if name.startswith("_foreach") else _FAMILY_OF.get(name, "pointwise")
