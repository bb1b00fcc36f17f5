"""The host's memory: what there is, and what may still be taken."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def physical_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" is no number
    return total


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: free pages and those that only cache files."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, physical_memory())
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical_memory() // 2


def free_host_bytes() -> int:
    """Return `available_bytes`, limited in a container to the rest of its limit."""
    return min(available_bytes(), physical_memory() - _used_by_container())


def _used_by_container() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup/memory.current").read_text())
    return 0
