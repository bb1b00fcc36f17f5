"""Targets: the devices that a plan can be made for without being there.

A target is data: how much memory, how fast, and which kernels PyTorch would dispatch to on it. Numbers are the
vendors' dense peaks; `roofline.py` knows which share of them kernels reach in practice. Nothing estimated is ever shown
without that label.

Which attention kernel runs, and what it keeps, is decided by the device, torch and cuDNN together. The machine that
plans and the one that trains may differ in the latter two, so a target says which it assumes: by default the torch that
plans, with the cuDNN of its wheels. `h100-80gb,torch=2.11,cudnn=9.10` names others, and is that target's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from remat.errors import UsageError
from remat.units import GIB

# The cuDNN that torch's Linux wheels of each release ask for, as their metadata on PyPI say.
_CUDNN_OF_WHEELS = {(2, 11): (9, 19), (2, 12): (9, 20), (2, 13): (9, 20), (2, 14): (9, 24), (2, 15): (9, 26)}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device as the planner sees it.

    name             its name for `--target`
    device           "cuda" or "cpu": whose kernels are dispatched
    memory_bytes     bytes that an allocator can give
    bytes_per_us     memory bandwidth
    flops_per_us     peak rate by dtype name ("float32", "bfloat16", ...), and "tf32" of float32 on tensor cores
    launch_us        least time of a kernel
    efficiency       share of both peaks that a large kernel reaches, if `roofline.py` has none for the capability;
                     1 if the rates were measured on kernels
    alignment_bytes  allocations are rounded up to a multiple of this
    host_bytes_per_us  between the device and the host's memory, each way; 0 if they are the same
    capability       compute capability times ten: 90 for 9.0; 0 if there is none
    processors       streaming multiprocessors
    l2_bytes         last cache before memory; 0: unknown
    geforce          runs above its rated clock, as GeForce cards do
    torch, cudnn     versions that are assumed to train there: "2.13.0", (9, 20); "" and () assume nothing
    """

    name: str
    device: Literal["cuda", "cpu"]
    memory_bytes: int
    bytes_per_us: float
    flops_per_us: dict[str, float]
    launch_us: float = 2.0
    efficiency: float = 0.75
    alignment_bytes: int = 512
    host_bytes_per_us: float = 0.0
    capability: int = 0
    processors: int = 0
    l2_bytes: int = 0
    geforce: bool = False
    torch: str = ""
    cudnn: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cudnn", tuple(self.cudnn))  # JSON knows lists only

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor version of the torch that is assumed."""
        found = _version(self.torch)
        return (found[0], found[1]) if len(found) > 1 else (0, 0)

    @property
    def prefers_cudnn(self) -> bool:
        """Whether cuDNN's attention is tried before flash attention.

        `check_prefer_cudnn_attention` of torch's sdp_utils.cpp, 2.11 to 2.15: compute capabilities 9 and 10 with a
        cuDNN after 9.15.0; `TORCH_CUDNN_SDPA_DEPRIORITIZED=1` turns it off.
        """
        return self.capability // 10 in (9, 10) and self.cudnn > (9, 15, 0)

    @property
    def assumes(self) -> str:
        """The versions that are assumed, for a person."""
        named = {"torch": self.torch, "cuDNN": ".".join(map(str, self.cudnn))}
        return ", ".join(f"{name} {version}" for name, version in named.items() if version)

    def with_versions(self, torch: str, cudnn: tuple[int, ...] | None = None) -> Target:
        """Return the target for `torch`, with the cuDNN that its wheels bring unless another is given."""
        known = dataclasses.replace(self, torch=torch)
        if cudnn is None:
            release = min(known.torch_release, max(_CUDNN_OF_WHEELS))
            cudnn = _CUDNN_OF_WHEELS.get(release, ())
        return dataclasses.replace(known, cudnn=cudnn)


def named(text: str, targets: Mapping[str, Target], torch: str, cudnn: tuple[int, ...] | None = None) -> Target | None:
    """Return the target called `text`, with the versions that it states; None for an unknown name."""
    name, *settings = text.split(",")
    if name not in targets:
        return None
    given = dict(setting.partition("=")[::2] for setting in settings)
    for key, value in given.items():
        if key not in ("torch", "cudnn") or not _version(value):
            raise UsageError(f"target {text!r}: {key}={value} is no version; write {name},torch=2.13,cudnn=9.20.")
    if "torch" in given:
        torch, cudnn = given["torch"], None
        if _version(torch)[:2] not in _CUDNN_OF_WHEELS:
            first, last = (".".join(map(str, release)) for release in (min(_CUDNN_OF_WHEELS), max(_CUDNN_OF_WHEELS)))
            raise UsageError(f"target {text!r}: the kernels of torch {torch} are not known; {first} to {last} are.")
    cudnn = _version(given["cudnn"]) if "cudnn" in given else cudnn
    return dataclasses.replace(targets[name].with_versions(torch, cudnn), name=text)


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of 2.13.0+cu130."""
    found = re.match(r"\d+(\.\d+)+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


# Bytes per microsecond that pinned copies reach, of a data sheet's 32, 64 and 450 GB/s each way.
PCIE_4, PCIE_5, NVLINK_C2C = 25e3, 50e3, 350e3


def _gpu(
    name: str,
    memory_gib: float,
    tb_per_s: float,
    fp32: float,
    bf16: float,
    capability: int,
    processors: int,
    l2_mib: int,
    host: float = PCIE_5,
    *,
    geforce: bool = False,
) -> Target:
    """Make a GPU from its data sheet: TB/s and dense TFLOPS; `host` as `Target.host_bytes_per_us`."""
    rates = {"float32": fp32 * 1e6, "tf32": bf16 * 1e6 / 2, "bfloat16": bf16 * 1e6, "float16": bf16 * 1e6}
    return Target(
        name,
        "cuda",
        int(memory_gib * GIB),
        tb_per_s * 1e6,
        rates,
        host_bytes_per_us=host,
        capability=capability,
        processors=processors,
        l2_bytes=l2_mib << 20,
        geforce=geforce,
    )


# float32 is the rate of full fp32 arithmetic: PyTorch's default does not use TF32 for matrix products. Sources:
# NVIDIA's data sheets of the A100 (40 and 80 GB), H100 (PCIe: November 2022; SXM, NVL: 2024), H200, GH200 (96 GB of
# HBM3) and L40S, whose 16-bit rates with sparsity are halved; L2 from the architectures' white papers. A name without a
# form factor is that of the SXM module.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _gpu("a100-40gb", 39.4, 1.555, 19.5, 312, 80, 108, 40, PCIE_4),
        _gpu("a100-80gb", 79.2, 2.039, 19.5, 312, 80, 108, 40, PCIE_4),
        _gpu("a100-80gb-pcie", 79.2, 1.935, 19.5, 312, 80, 108, 40, PCIE_4),
        _gpu("h100-80gb", 79.1, 3.35, 66.9, 989, 90, 132, 50),
        _gpu("h100-pcie", 79.1, 2.0, 51.2, 756, 90, 114, 50),
        _gpu("h100-nvl", 93.1, 3.9, 60, 835, 90, 132, 50),
        _gpu("h200", 139.8, 4.8, 66.9, 989, 90, 132, 50),
        _gpu("h200-nvl", 139.8, 4.8, 60, 835, 90, 132, 50),
        _gpu("gh200", 94.5, 4.0, 66.9, 989, 90, 132, 50, NVLINK_C2C),
        _gpu("l40s", 44.3, 0.864, 91.6, 362, 89, 142, 96, PCIE_4),
        _gpu("rtx4090", 23.5, 1.008, 82.6, 165, 89, 128, 72, PCIE_4, geforce=True),
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
    "L40S": "l40s",
    "GeForce RTX 4090": "rtx4090",
}


def target_of(device_name: str) -> Target | None:
    """Return the target that a driver calls `device_name`; None for a device without a data sheet here."""
    known = _DRIVER_NAMES.get(device_name.removeprefix("NVIDIA "))
    return TARGETS[known] if known else None
