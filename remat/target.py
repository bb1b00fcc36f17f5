"""Targets: the devices that a plan can be made for without being there.

A target is data: how much memory, how fast, and which kernels PyTorch would dispatch to on it. Numbers are the
vendors' dense peaks; `efficiency` says which share of them a large kernel reaches in practice, so that an
estimated step time is a plausible one. Nothing estimated is ever shown without that label.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from remat.units import GIB


@dataclasses.dataclass(frozen=True)
class Target:
    """A device as the planner sees it.

    name             how `--target` calls it
    device           "cuda" or "cpu": whose kernels are dispatched
    memory_bytes     what an allocator can hand out
    bytes_per_us     memory bandwidth
    flops_per_us     peak rate by dtype name ("float32", "bfloat16", ...)
    launch_us        least time of a kernel
    efficiency       share of both peaks that a large kernel reaches
    alignment_bytes  allocations are rounded up to a multiple of this
    host_bytes_per_us  between the device and the host's memory, one way
    """

    name: str
    device: Literal["cuda", "cpu"]
    memory_bytes: int
    bytes_per_us: float
    flops_per_us: dict[str, float]
    launch_us: float = 2.0
    efficiency: float = 0.75
    alignment_bytes: int = 512
    host_bytes_per_us: float = 50e3  # PCIe 5.0 x16, as measured by copies: of 64 GB/s about 50

    def swap_us(self, size_bytes: int) -> float:
        """Time to move so much to the host's memory, or back."""
        return size_bytes / self.host_bytes_per_us

    def exposed_swap_us(self, size_bytes: int, behind_us: float) -> float:
        """What of that remains to wait for, if computation of `behind_us` runs meanwhile."""
        return max(self.swap_us(size_bytes) - behind_us, 0.0)


def _gpu(name: str, memory_gib: float, tb_per_s: float, tf32: float, bf16: float) -> Target:
    """A GPU from its data sheet: terabytes and dense teraflops per second."""
    rates = {"float32": tf32 * 1e6, "bfloat16": bf16 * 1e6, "float16": bf16 * 1e6}
    return Target(name, "cuda", int(memory_gib * GIB), tb_per_s * 1e6, rates)


# float32 is the rate of full fp32 arithmetic: PyTorch's default does not use TF32 for matrix products. Sources:
# NVIDIA's data sheets of the A100 (40 and 80 GB), H100 (PCIe: November 2022; SXM, NVL: 2024), H200 and GH200 (96 GB of
# HBM3), whose 16-bit rates with sparsity are halved. A name without a form factor is that of the SXM module.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _gpu("a100-40gb", 39.4, 1.555, 19.5, 312),
        _gpu("a100-80gb", 79.2, 2.039, 19.5, 312),
        _gpu("a100-80gb-pcie", 79.2, 1.935, 19.5, 312),
        _gpu("h100-80gb", 79.1, 3.35, 66.9, 989),
        _gpu("h100-pcie", 79.1, 2.0, 51.2, 756),
        _gpu("h100-nvl", 93.1, 3.9, 60, 835),
        _gpu("h200", 139.8, 4.8, 66.9, 989),
        _gpu("h200-nvl", 139.8, 4.8, 60, 835),
        _gpu("gh200", 94.5, 4.0, 66.9, 989),
        _gpu("rtx4090", 23.5, 1.008, 82.6, 165),
    )
}

# What drivers call them, after "NVIDIA". Whole names: a share of a GPU (MIG), a laptop's or a vendor's own variant has
# other rates behind a name that begins alike.
_DRIVER_NAMES = {
    "A100-SXM4-40GB": "a100-40gb",
    "A100-PCIE-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100-80gb",
    "A100 80GB PCIe": "a100-80gb-pcie",
    "H100 80GB HBM3": "h100-80gb",
    "H100 PCIe": "h100-pcie",
    "H100 NVL": "h100-nvl",
    "H200": "h200",
    "H200 NVL": "h200-nvl",
    "GH200 480GB": "gh200",  # of the CPU's memory
    "GH200 120GB": "gh200",
    "GeForce RTX 4090": "rtx4090",
}


def target_of(device_name: str) -> Target | None:
    """The target that a driver calls `device_name`; None for a device without a data sheet here."""
    known = _DRIVER_NAMES.get(device_name.removeprefix("NVIDIA "))
    return TARGETS[known] if known else None
