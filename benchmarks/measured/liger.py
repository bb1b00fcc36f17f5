"""Training kernels of eager torch, forward and backward: linkedin/Liger-Kernel (BSD-2), `liger-kernel/torch_speed.csv`.

Medians by Triton's `do_bench`, which empties L2 before every sample. The cases do as the scripts in `benchmark/scripts`
do, gradients included: those that `grad_to_none` does not name are there already, and are added to. What is called
"backward" of Megatron's norm and SwiGLU contains the forward and a sum.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measured.measurement import Kernels, Measurement, Split, card, flushed, kernels_of, on_fakes
from benchmarks.published_runs import rtx3090

BF16 = torch.bfloat16


@dataclasses.dataclass
class Case:
    """One script: a forward, its backward, and the gradients that it drops."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    dropped: tuple[Tensor, ...] = ()
    joined: bool = False  # "backward" contains the forward

    def kernels(self, mode: str) -> Kernels:
        self.backward(self.forward())  # gradients that nobody drops are there
        for tensor in self.dropped:
            tensor.grad = None
        if mode == "forward":
            return kernels_of(self.forward)
        if mode == "full" or self.joined:
            return kernels_of(lambda: self.backward(self.forward()))
        given = self.forward()
        return kernels_of(lambda: self.backward(given))


def _scalar(loss: Tensor) -> None:
    loss.backward(retain_graph=True)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def _from(gradient: Tensor) -> Callable[[Tensor], None]:
    return lambda out: out.backward(gradient, retain_graph=True)


def _cross_entropy(size: int, extra: dict[str, Any]) -> Case:
    rows = extra["B"] * extra["T"]
    logits, labels = _leaf(rows, size), torch.empty(rows, dtype=torch.int64)
    return Case(lambda: F.cross_entropy(logits, labels), _scalar)


def _embedding(size: int, extra: dict[str, Any]) -> Case:
    table, ids = nn.Embedding(size, extra["D"]), torch.empty(extra["B"], extra["T"], dtype=torch.int64)
    return Case(lambda: table(ids), lambda out: out.backward(torch.randn_like(out)))


def _layer_norm(size: int, extra: dict[str, Any]) -> Case:
    layer, x = nn.LayerNorm(size), _leaf(extra["M"], size)
    return Case(lambda: layer(x), _from(torch.empty(extra["M"], size)), (x,))


class _LlamaNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        single = x.to(torch.float32)
        scaled = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


def _rms_norm(size: int, extra: dict[str, Any]) -> Case:
    layer, x = _LlamaNorm(size), _leaf(extra["M"], size, dtype=_dtype(extra))
    return Case(lambda: layer(x), _from(torch.empty_like(x)), (x,))


def _add_rms_norm(size: int, extra: dict[str, Any]) -> Case:
    layer, x, residual = _LlamaNorm(size), _leaf(extra["M"], size), _leaf(extra["M"], size)
    gradients = torch.empty(extra["M"], size), torch.empty(extra["M"], size)

    def forward() -> tuple[Tensor, Tensor]:
        total = x + residual
        return layer(total), total

    return Case(forward, lambda out: torch.autograd.backward(out, gradients, retain_graph=True), (x, residual))


def _megatron_rms_norm(size: int, extra: dict[str, Any]) -> Case:
    layer, x = nn.RMSNorm(size, eps=1e-6, dtype=BF16), _leaf(extra["S"], extra["B"], size, dtype=BF16)
    return Case(lambda: layer(x), lambda out: out.sum().backward(), (x,), joined=True)


def _megatron_swiglu(size: int, extra: dict[str, Any]) -> Case:
    x = _leaf(extra["S"], extra["B"], 2 * size, dtype=BF16)

    def forward() -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        return F.silu(gate) * up

    return Case(forward, lambda out: out.sum().backward(), (x,), joined=True)


def _relu_squared(size: int, extra: dict[str, Any]) -> Case:
    x = _leaf(extra["M"], size, dtype=BF16)
    return Case(lambda: torch.square(F.relu(x)), _from(torch.empty(extra["M"], size, dtype=BF16)), (x,))


def _tvd(size: int, extra: dict[str, Any]) -> Case:
    rows = extra["B"] * extra["T"]
    p, q = _leaf(rows, size).softmax(dim=-1), torch.empty(rows, size)
    return Case(lambda: torch.sum(torch.abs(p - q) / 2.0) / rows, _scalar)


def _kl_div(size: int, extra: dict[str, Any]) -> Case:
    rows = extra["B"] * extra["T"]
    log_p, q = _leaf(rows, size).log_softmax(dim=-1), torch.empty(rows, size)
    return Case(lambda: F.kl_div(log_p, q, reduction="batchmean"), _scalar)


def _jsd(size: int, extra: dict[str, Any]) -> Case:
    rows = extra["B"] * extra["T"]
    log_q, log_p = _leaf(rows, size).log_softmax(dim=-1), torch.empty(rows, size)

    def forward() -> Tensor:
        middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        one, other = (
            0.5 * F.kl_div(torch.log(middle), of, reduction="none", log_target=True).sum(dim=-1)
            for of in (log_p, log_q)
        )
        return ((one + other) / rows).sum()

    return Case(forward, _scalar)


def _softmax(size: int, extra: dict[str, Any]) -> Case:
    x = _leaf(extra["M"], size, dtype=_dtype(extra))
    return Case(lambda: torch.softmax(x, -1), _from(torch.empty_like(x)), (x,))


class _GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=BF16)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


def _gated_mlp(size: int, extra: dict[str, Any]) -> Case:
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    layer = _GatedMLP(extra["hidden_size"], extra["intermediate_size"], F.silu if "silu" in str(extra) else gelu)
    x = _leaf(extra.get("B") or extra["bsz"], size, extra["hidden_size"], dtype=BF16)
    return Case(lambda: layer(x), lambda out: out.backward(torch.empty_like(out), retain_graph=True), (x,))


def _heads(size: int, extra: dict[str, Any], x_name: str) -> tuple[Tensor, Tensor]:
    length, width = (extra["seq_len"], size) if x_name == "H" else (size, extra["hidden_size"])
    head = width // extra["num_q_heads"]
    q, k = (_leaf(1, length, extra[f"num_{of}_heads"], head, dtype=BF16) for of in ("q", "kv"))
    return q, k


def _grads(q: Tensor, k: Tensor) -> Callable[[Any], Any]:
    gradients = torch.empty_like(q), torch.empty_like(k)
    return lambda out: torch.autograd.grad(out, (q, k), gradients, allow_unused=True, retain_graph=True)


def _rope(size: int, extra: dict[str, Any], x_name: str) -> Case:
    q, k = (t.transpose(1, 2) for t in _heads(size, extra, x_name))
    cos, sin = (torch.empty(1, q.shape[2], q.shape[3], dtype=BF16) for _ in range(2))

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def forward() -> tuple[Tensor, Tensor]:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * c) + (turned(q) * s), (k * c) + (turned(k) * s)

    return Case(forward, _grads(q, k))


def _llama4_rope(size: int, extra: dict[str, Any], x_name: str) -> Case:
    q, k = _heads(size, extra, x_name)
    turn = torch.empty(1, q.shape[1], q.shape[3] // 2, dtype=torch.complex64)

    def forward() -> tuple[Tensor, ...]:
        found = []
        for x in (q, k):
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            found.append(torch.view_as_real(pairs * turn[:, :, None, :]).flatten(3).type_as(x))
        return tuple(found)

    return Case(forward, _grads(q, k))


def _head_loss(size: int, extra: dict[str, Any]) -> Case:
    head = nn.Linear(extra["H"], extra["V"], bias=False, dtype=BF16)
    x, labels = _leaf(size, extra["H"], dtype=BF16), torch.empty(size, dtype=torch.int64)
    return Case(lambda: F.cross_entropy(head(x), labels), _scalar)


_CASES: dict[str, Callable[..., Case]] = {
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _add_rms_norm,
    "megatron_rms_norm": _megatron_rms_norm,
    "megatron_swiglu": _megatron_swiglu,
    "relu_squared": _relu_squared,
    "tvd": _tvd,
    "kl_div": _kl_div,
    "jsd": _jsd,
    "softmax": _softmax,
    "geglu": _gated_mlp,
    "swiglu": _gated_mlp,
    "tiled_geglu": _gated_mlp,
    "tiled_swiglu": _gated_mlp,
    "rope": _rope,
    "llama4_rope": _llama4_rope,
    "fused_linear_cross_entropy": _head_loss,
}
# The card that parameters were chosen by; the others test them.
_FITTED = "NVIDIA H100 80GB HBM3"
_CARDS = (_FITTED, "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090")


def _dtype(extra: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, extra["dtype"].removeprefix("torch."))
    return found


def measurements(folder: Path) -> Iterator[Measurement]:
    """Forward, and backward where that was timed alone, else both together, of the kernels above."""
    with (folder / "liger-kernel" / "torch_speed.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu_name"] in _CARDS and row["kernel_name"] in _CASES]
    alone = {(row["gpu_name"], row["kernel_name"]) for row in rows if row["kernel_operation_mode"] == "backward"}
    for row in rows:
        gpu, name, mode = row["gpu_name"], row["kernel_name"], row["kernel_operation_mode"]
        if mode == "full" and (gpu, name) in alone:
            continue
        make, extra = _CASES[name], json.loads(row["extra_benchmark_config_str"])
        given = (int(row["x_value"]), extra, *([row["x_name"]] if "rope" in name else []))
        with on_fakes():
            kernels = make(*given).kernels(mode)
        target = flushed(rtx3090() if gpu.endswith("3090") else card(gpu))
        if row["timestamp"].startswith("2024"):
            target = target.with_versions("2.5", (9, 1))  # the newest of that year
        split: Split = "fit" if gpu == _FITTED else "check"
        measured = 1e3 * float(row["y_value_50"])
        described = f"{name} {row['x_value']} {mode} {row['extra_benchmark_config_str'][:60]}"
        yield Measurement(f"liger {target.name}", f"{name} {mode}", described, split, target, measured, kernels)
