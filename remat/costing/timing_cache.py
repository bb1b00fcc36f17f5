"""The cache of measured kernels: a file for each device, torch and setting of workspaces, in the user's cache folder.

A kernel that is called with what it does not expect may end the process (it reads a device's pointer on the host, say),
and everything measured before would be lost with it, again and again. So rows are saved every few seconds, and the kind
that is being measured has a file of its own while it lasts: one that a dead process left behind names what killed it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from remat.costing.costs import kind_key
from remat.costing.kernel_calls import NotMeasurable
from remat.errors import UsageError
from remat.evaluation.graph import OpKind
from remat.files import write_atomically

_FORMAT = "remat-kernel-costs"
_VERSION = 1
_MARKER = ".trying"
SAVE_S = 5.0
# of aten/src/ATen/cuda/CublasHandlePool.cpp
_WORKSPACE_SETTINGS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
_INSTRUCTION_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
FATAL = "it ended the process in which it was last measured"


@dataclasses.dataclass(frozen=True)
class KindCost:
    """One row of `Costs`."""

    time_us: float
    spread: float
    workspace_bytes: int


class Cache:
    """Rows measured earlier on one device with one torch version; a context that saves when it ends.

    It is a convenience and never an error: a file that cannot be read is measured again, a folder that cannot
    be written is left alone. Saving also happens on an interrupt, so that what was measured is not lost.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: dict[str, KindCost] = {}
        self.library_bytes = 0
        self.rates: dict[str, float] = {}
        self.fatal: set[str] = set()  # kinds that ended the process which measured them
        self._saved_at = time.monotonic()

    def row(self, kind: OpKind) -> KindCost | None:
        return self.rows.get(_hash(kind))

    def add(self, kind: OpKind, row: KindCost) -> KindCost:
        self.rows[_hash(kind)] = row
        if time.monotonic() - self._saved_at >= SAVE_S:
            self.save()
        return row

    @contextlib.contextmanager
    def trying(self, kind: OpKind) -> Iterator[None]:
        """Mark that `kind` is being measured. Raises NotMeasurable if an earlier process died during that."""
        key = _hash(kind)
        if key in self.fatal:
            raise NotMeasurable(FATAL)
        if self.path is None:
            yield
            return
        marker = self.path.with_name(f"{self.path.stem}.{os.getpid()}{_MARKER}")
        with contextlib.suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(key)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                marker.unlink()

    def note_fatal(self, kind: OpKind) -> None:
        self.fatal.add(_hash(kind))
        self.save()

    @staticmethod
    def open(folder: Path | None, device: torch.device) -> Cache:
        if folder is None:
            return Cache(None)
        name = f"{device_name(device)} torch {torch.__version__}"
        if settings := workspace_settings(device):
            name += f" workspaces {hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
        cache = Cache(folder / f"{slug}.json")
        cache._load()
        cache._collect_fatal()
        return cache

    def _collect_fatal(self) -> None:
        """Collect the measurements during which processes died."""
        assert self.path is not None
        for marker in self.path.parent.glob(f"{self.path.stem}.*{_MARKER}"):
            pid = marker.name.removesuffix(_MARKER).rpartition(".")[2]
            with contextlib.suppress(OSError):
                if pid.isdigit() and not _is_alive(int(pid)):
                    self.fatal.add(marker.read_text())
                    self.save()
                    marker.unlink()

    def _load(self) -> None:
        """Add the file's rows that are missing here; a corrupt or foreign file has none."""
        if self.path is None:
            return
        try:
            data = json.loads(self.path.read_text())
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                return
            rows = {key: KindCost(float(t), float(s), int(w)) for key, (t, s, w) in data["rows"].items()}
            rates = {name: float(rate) for name, rate in data["rates"].items()}
            library_bytes = int(data["library_bytes"])
            fatal = set(map(str, data.get("fatal", ())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        self.rows = {**rows, **self.rows}
        self.rates = {**rates, **self.rates}
        self.library_bytes = max(self.library_bytes, library_bytes)
        self.fatal |= fatal

    def save(self) -> None:
        self._saved_at = time.monotonic()
        if self.path is None or not (self.rows or self.rates or self.fatal):
            return
        self._load()  # another process may have written meanwhile
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "library_bytes": self.library_bytes,
            "rates": self.rates,
            "fatal": sorted(self.fatal),
            "rows": {key: dataclasses.astuple(row) for key, row in self.rows.items()},
        }
        with contextlib.suppress(OSError, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(data))

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another process's
        return True
    return True


def _hash(kind: OpKind) -> str:
    return hashlib.sha256(kind_key(kind).encode()).hexdigest()[:24]


def device_name(device: torch.device) -> str:
    """Return the name under which results measured on `device` are filed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu {_cpu_model()}, {threads} thread{'s' if threads != 1 else ''}"


def workspace_settings(device: torch.device) -> list[str]:
    """List all but the device's name that changes how many bytes libraries take on `device`.

    These are variables of the environment and, of a CPU, its vector instructions: libraries have kernels for each set,
    and machines with processors of one name may differ in them.
    """
    on_gpu = device.type == "cuda"
    names = _WORKSPACE_SETTINGS if on_gpu else _INSTRUCTION_SETTINGS
    settings = [f"{name}={value}" for name in names if (value := os.environ.get(name))]
    return settings if on_gpu else [*settings, *_vector_instructions()]


@functools.cache
def _vector_instructions() -> list[str]:
    """List the flags of an x86 processor that name vector instructions, or all features of an ARM one."""
    known = [flag for flag in _cpu_info("flags").split() if flag.startswith(("avx", "amx"))]
    return sorted(known or _cpu_info("Features").split()) or [torch.backends.cpu.get_cpu_capability()]


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


@functools.cache
def _cpu_info(name: str) -> str:
    """Return the first line `name` of what Linux says of the processor; empty where it says nothing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
