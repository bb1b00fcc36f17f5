"""Kernels on an L40S: tohtana/Phantora (Apache-2.0), `phantora-l40s/compute.csv`.

The profiler's time of kernels alone, a few runs in a row: L2 keeps what fits. Operands of one operator that have equal
size and dtype share one buffer there, and so they do here: it is read once. Operators are those of its
`tests/perfdb/bench.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measured.measurement import Kernels, Measurement, kernels_of, on_fakes
from remat.workload.target import TARGETS

aten = torch.ops.aten
_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "b8": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
    "Float": torch.float32,
    "Double": torch.float64,
    "BFloat16": torch.bfloat16,
    "Int64": torch.int64,
    "Int": torch.int32,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
}
_PRODUCTS = ("MM", "MatMul", "BMM", "BAddBMM", "Linear")
_FAMILIES = {
    "Softmax": "softmax",
    "SoftmaxBackward": "softmax",
    "SDPA": "attention",
    "SDPABackward": "attention",
    "Sum": "reduction",
    **dict.fromkeys(_PRODUCTS, "product"),
}
_LARGE_BYTES = 150e6
_SHORTEST_US = 1.0  # of a kernel without the gap before it

_CALLS: dict[str, Callable[..., Any]] = {
    "MM": torch.mm,
    "MatMul": torch.matmul,
    "BMM": torch.bmm,
    "BAddBMM": torch.baddbmm,
    "Linear": F.linear,
    "Mul": torch.mul,
    "Add": torch.add,
    "Div": torch.div,
    "Mul_": Tensor.mul_,
    "Add_": Tensor.add_,
    "MulScalar": lambda x: x * 2,
    "DivScalar": lambda x: x / 2,
    "Pow": lambda x: x.pow(2),
    "Sum": lambda x: x.sum(dtype=x.dtype),
    "ZerosLike": torch.zeros_like,
    "ConvDType": lambda x, dtype: x.to(_DTYPES[dtype]),
    "Softmax": lambda x, dim: torch.softmax(x, dim, dtype=x.dtype),
    "SoftmaxBackward": lambda g, y, dim: aten._softmax_backward_data(g, y, dim, g.dtype),
    "ForeachMulScalar_": lambda xs: torch._foreach_mul_(xs, 2),
    "ForeachAddCMul_": lambda xs, ys, zs: torch._foreach_addcmul_(xs, ys, zs, 2),
    "ForeachAddCDiv_": lambda xs, ys, zs: torch._foreach_addcdiv_(xs, ys, zs, 2),
    "MaskedFill": lambda x, mask: x.masked_fill(mask, -1e4),
    "MaskedFill_": lambda x, mask: x.masked_fill_(mask, -1e4),
    "Dropout": lambda x, p, train: F.dropout(x, p / 1e6, train),
    "NativeDropoutBackward": lambda g, mask, scale: aten.native_dropout_backward(g, mask, scale / 1e6),
    "Where": torch.where,
    "WhereScalar": lambda condition, x: torch.where(condition, x, 1),
}
_LISTS = ("ForeachMulScalar_",)  # one argument, which is a list
_WHOLE = ("MulScalar", "DivScalar", "Pow", "Sum", "ZerosLike")  # one argument, which is a tensor


def measurements(folder: Path) -> Iterator[Measurement]:
    """Rows of the table but for casts that do nothing (0 ns); every other row is for checking."""
    with (folder / "phantora-l40s" / "compute.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["nanos"] != "0"]
    alone = dataclasses.replace(TARGETS["l40s"].with_versions(torch.__version__), launch_us=_SHORTEST_US)
    for index, row in enumerate(rows):
        ((operator, content),) = json.loads(row["key"]).items()
        kernels = _kernels(operator, content)
        large = sum(kind.moved_bytes for kind, _ in kernels) > _LARGE_BYTES
        yield Measurement(
            "phantora l40s",
            f"{_FAMILIES.get(operator, 'pointwise')}, {'over' if large else 'up to'} 150 MB",
            row["key"][:80],
            "check" if index % 2 else "fit",
            alone,
            int(row["nanos"]) / 1e3,
            kernels,
        )


def _kernels(operator: str, content: Any) -> Kernels:
    buffers: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def value(described: Any, place: int = 0) -> Any:
        """`place`: in a list of tensors, each of which is gone through."""
        if isinstance(described, dict) and "R" in described:
            count, period = described["R"]
            described = period * count
        if isinstance(described, dict):
            described = [described["dtype"], described["shape"]]
        if isinstance(described, list) and len(described) == 2 and isinstance(described[0], str):
            code, shape = described
            key = math.prod(shape), _DTYPES[code], place
            if key not in buffers:
                buffers[key] = torch.empty(shape, dtype=key[1])
            return buffers[key] if list(buffers[key].shape) == shape else buffers[key].view(shape)
        if not isinstance(described, list):
            return described
        of_tensors = (
            operator.startswith("Foreach") and isinstance(described[0], list) and isinstance(described[0][0], str)
        )
        return [value(item, index if of_tensors else 0) for index, item in enumerate(described)]

    with on_fakes():
        if operator in ("SDPA", "SDPABackward"):
            q, k, v = (value(content[name]) for name in "qkv")
            if operator == "SDPA":
                return kernels_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=content["causal"]))
            q, k, v = (torch.empty_like(t, requires_grad=True) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=content["causal"])
            return kernels_of(lambda: torch.autograd.grad(out, (q, k, v), torch.empty_like(q)))
        given = value(content)
        if operator in _LISTS or operator in _WHOLE:
            given = [given]
        return kernels_of(lambda: _CALLS[operator](*given))
