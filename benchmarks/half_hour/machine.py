"""The machine: versions, the libraries' own bytes, the kernels that attention takes. (Part 1)"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import subprocess
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import report
from benchmarks.half_hour import observing
from benchmarks.half_hour.observing import mib
from benchmarks.half_hour.work import Work
from remat.costing.workspaces import cublas_bytes
from remat.validation.kernel_log import KernelLog


def machine(work: Work) -> None:
    findings = work.findings
    before = findings.step("used before", observing.used_on_device)
    findings.step("about", lambda: _about(work))
    findings.step("context", lambda: _context(work, before))
    findings.step("one product", lambda: _one_product(work))
    findings.step("attention", lambda: _attention_kernels(work))
    findings.step("rates", lambda: dataclasses.asdict(work.place.target))


def _about(work: Work) -> dict[str, Any]:
    found = {**report.provenance(work.device), "numpy": _version("numpy"), "platform": platform.platform()}
    found["allocator settings"] = observing.allocator_settings()
    if work.on_cuda:
        properties = torch.cuda.get_device_properties(work.device)
        found |= {
            "device properties": str(properties),
            "capability": torch.cuda.get_device_capability(work.device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "memory_bytes": torch.cuda.mem_get_info(work.device)[1],
        }
    work.findings.say(f"{found['device']}, torch {found['torch']}, transformers {found['transformers']}")
    return found


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    return ""


def _context(work: Work, before: int | None) -> dict[str, Any] | None:
    """Return the bytes of a process before its first tensor."""
    if not work.on_cuda:
        return None
    torch.cuda.init()
    torch.cuda.synchronize(work.device)
    after = observing.used_on_device()
    if before is None or after is None:
        return None
    work.findings.say(f"context: {mib(after - before)} MiB of the device")
    return {"context_bytes": after - before}


def _one_product(work: Work) -> dict[str, Any]:
    """Bytes before and after one product in forward, and in the thread that runs backward."""
    device, dtype = work.device, torch.bfloat16
    weight = torch.randn(768, 3072, device=device, dtype=dtype, requires_grad=True)
    x = torch.randn(4096, 768, device=device, dtype=dtype)
    found = {"before": observing.counts(device)}
    y = x @ weight
    found["after forward"] = observing.counts(device)
    y.backward(torch.ones_like(y))
    found["after backward"] = observing.counts(device)
    del y
    weight.grad = None
    found["results let go"] = observing.counts(device)
    bias = torch.zeros(3072, device=device, dtype=dtype)
    F.linear(x, weight.t().contiguous(), bias)
    found["after one with a bias"] = observing.counts(device)
    if work.on_cuda:
        own = found["results let go"]["allocated"] - found["before"]["allocated"]
        formula = 2 * cublas_bytes(work.place.target)
        work.findings.say(f"products in forward and backward leave {mib(own)} MiB, {mib(formula)} by formula")
    return found


ATTENTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"shape": (16, 12, 1024, 64), "dropout_p": 0.1, "is_causal": True},
    "gpt2, dropout 1/8": {"shape": (16, 12, 1024, 64), "dropout_p": 0.125, "is_causal": True},
    "gpt2, no dropout": {"shape": (16, 12, 1024, 64), "is_causal": True},
    "gpt2, fp32": {"shape": (16, 12, 1024, 64), "dropout_p": 0.1, "is_causal": True, "dtype": torch.float32},
    "llama-1b": {"shape": (4, 32, 2048, 64), "is_causal": True},
    "llama-1b, grouped": {"shape": (4, 32, 2048, 64), "heads": 8, "is_causal": True},
    "bert-large": {"shape": (16, 16, 512, 64), "dropout_p": 0.1},
    "t5-base, with a bias": {"shape": (16, 12, 512, 64), "dropout_p": 0.1, "bias": True},
    "vit-l16": {"shape": (16, 16, 197, 64)},
}


def _attention_kernels(work: Work) -> dict[str, Any]:
    """The kernels that attention takes here, forward and backward, and its bytes."""
    found = {}
    for name, case in ATTENTIONS.items():
        try:
            found[name] = _attention(work, **case)
        except Exception as error:  # one kernel that is refused says something too
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    kernels = {name: row.get("operators", ["?"])[0].split("(")[0] for name, row in found.items()}
    work.findings.say("attention: " + ", ".join(f"{name} {kernel}" for name, kernel in kernels.items()))
    return found


def _attention(
    work: Work,
    shape: tuple[int, int, int, int],
    heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    **options: Any,
) -> dict[str, Any]:
    batch, all_heads, length, width = shape if work.on_cuda else (1, shape[1], 32, shape[3])
    sizes = [(batch, count, length, width) for count in (all_heads, heads or all_heads, heads or all_heads)]
    q, k, v = (torch.randn(size, device=work.device, dtype=dtype, requires_grad=True) for size in sizes)
    if bias:
        options["attn_mask"] = torch.randn(1, all_heads, length, length, device=work.device, dtype=dtype)
    log = KernelLog()

    def run() -> None:
        with log:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=heads is not None, **options).sum().backward()

    peaks = observing.peaks_of(run, work.device)
    attention = [kernel for kernel in log.found if "attention" in kernel] or log.found
    return {"operators": attention, "peaks": peaks}
