"""The machine: versions, nvidia-smi's figures, bytes of a context. `python -m benchmarks.gpu.machine FOUND.json`"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import write

ASKED = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,"
ASKED += "temperature.gpu,pcie.link.gen.current,pcie.link.width.current,clocks_throttle_reasons.active"
PACKAGES = ("torch", "transformers", "numpy", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "accelerate", "peft")


def asked_of_nvidia_smi() -> dict[str, str]:
    """Ask nvidia-smi, which needs no context of this process; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(ASKED.split(","), ran.stdout.strip().split(", "), strict=False))


def about() -> dict[str, Any]:
    """Return all of it; this process gets a context."""
    import torch

    before = asked_of_nvidia_smi()
    free, total = torch.cuda.mem_get_info()
    after = asked_of_nvidia_smi()
    found: dict[str, Any] = {"nvidia-smi": before, "platform": platform.platform(), "python": platform.python_version()}
    if before.get("memory.used", "").isdigit() and after["memory.used"].isdigit():
        found["context_bytes"] = (int(after["memory.used"]) - int(before["memory.used"])) << 20
    return found | {
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "properties": str(torch.cuda.get_device_properties(0)),
        "total_bytes": total,
        "free_bytes": free,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    found = about()
    write(Path(sys.argv[1]), found)
    print(", ".join(f"{name} {value}" for name, value in (found["nvidia-smi"] | found["packages"]).items()))
    print(f"context {found.get('context_bytes', 0) / 2**20:.0f} MiB, {found['properties']}")
