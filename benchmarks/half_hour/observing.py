"""Observe a step in the half hour: the allocator's counts and its history, times, kernels.

The history of the allocator is kept without stack traces and trimmed to what a simulation needs: which event, where,
how many bytes. Sizes of allocations are those asked for; segments are what the card gives. `marks` say at which event
a step begins. On a CPU there is no such allocator: the counts are the profiler's, and there is no history.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from remat.costing.device_allocator import measure_step, synchronize, time_once_us
from remat.reservation.caching_allocator import Event
from remat.units import MIB

COUNTS = ("requested", "allocated", "reserved")
MOST_EVENTS = 400_000
MOST_BYTES = 4 << 20  # of a history, compressed
MOST_ROWS = 80  # of a table by operator
LETTERS = {  # of torch.cuda.memory._snapshot()["device_traces"]
    "alloc": "a",
    "free_requested": "r",
    "free_completed": "f",
    "segment_alloc": "S",
    "segment_free": "s",
    "segment_map": "M",
    "segment_unmap": "u",
    "oom": "o",
}


def mib(size: float) -> float:
    return round(size / MIB, 3)


# The allocator


def counts(device: torch.device, which: str = "current") -> dict[str, int]:
    """Bytes requested, allocated and reserved now, or at their peaks; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(f"{name}_bytes.all.{which}", 0)) for name in COUNTS}


def peaks_of(function: Callable[[], object], device: torch.device) -> dict[str, int]:
    """The three peaks during one call, what was there before included; above the start on a CPU."""
    if device.type != "cuda":
        peak = measure_step(function, device, warm_up=0, repeats=0).peak_bytes
        return {"requested": peak, "allocated": peak}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return counts(device, "peak")


class History:
    """Every event of CUDA's allocator from `begin` to `save`; nothing on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str, float]] = []
        self.counts: dict[str, dict[str, int]] = {}

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.init()
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)

    def mark(self, name: str) -> None:
        """Name the events that follow."""
        synchronize(self._device)
        self._marks.append((name, time.time() * 1e6))
        self.counts[name] = counts(self._device)

    def end(self) -> list[Mapping[str, Any]]:
        """The events so far; the allocator keeps no more."""
        if self._device.type != "cuda":
            return []
        synchronize(self._device)
        found: Any = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        return list(found[self._device.index or 0])

    def save(self, path: Path, events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Write the trimmed history, compressed, of its first events where it is too long; says what was kept."""
        data = trimmed(events, self._marks) | {"counts": self.counts, "settings": allocator_settings()}
        packed = gzip.compress(json.dumps(data).encode(), 6)
        while len(packed) > MOST_BYTES:
            keep = int(len(data["events"]) * 0.9 * MOST_BYTES / len(packed))
            for column in ("events", "addresses", "sizes", "streams"):
                data[column] = data[column][:keep]
            data["cut_at"] = keep
            packed = gzip.compress(json.dumps(data).encode(), 6)
        path.write_bytes(packed)
        return {"file": path.name, "events": len(data["events"]), "bytes": len(packed), "marks": data["marks"]}


def trimmed(events: Iterable[Mapping[str, Any]], marks: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Columns of the known events, and at which of them each mark (name, microseconds) stands."""
    known = [event for event in events if event["action"] in LETTERS]
    times = [event.get("time_us", 0) for event in known]
    return {
        "events": "".join(LETTERS[event["action"]] for event in known),
        "addresses": [event.get("addr", event.get("device_free", 0)) for event in known],
        "sizes": [event["size"] for event in known],
        "streams": [event.get("stream", 0) for event in known],
        "marks": {name: bisect.bisect_left(times, at) for name, at in marks},
    }


def allocator_settings() -> str:
    """PYTORCH_CUDA_ALLOC_CONF as this process has it, under either of its names."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def used_on_device() -> int | None:
    """Bytes that all processes hold on the first GPU, asked of nvidia-smi, which needs no context; None without it.

    Asked before and after this process got its context, the difference is what this process holds.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    text = ran.stdout.strip()
    return int(text) * MIB if text.isdigit() else None


# Time


def times_of(step: Callable[[], object], device: torch.device, repeats: int) -> dict[str, Any]:
    """Microseconds of `repeats` steps one by one, and of as many back to back."""
    single = [round(time_once_us(step, device), 1) for _ in range(repeats)]
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    together = (time.perf_counter() - began) * 1e6 / repeats
    return {"median_us": statistics.median(single), "back_to_back_us": round(together, 1), "each_us": single}


def by_operator(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """One step profiled: time on the device by operator and by kernel, the longest first."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    rows: dict[str, list[tuple[str, int, float]]] = {"operators": [], "kernels": []}
    for event in profiler.key_averages():
        time_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if time_us > 0:
            is_kernel = on_cuda and event.device_type != DeviceType.CPU
            rows["kernels" if is_kernel else "operators"].append((event.key[:160], event.count, round(time_us, 1)))
    sums = {f"{name}_us": round(sum(row[2] for row in found), 1) for name, found in rows.items()}
    longest = {name: sorted(found, key=lambda row: -row[2])[:MOST_ROWS] for name, found in rows.items()}
    return {**sums, **longest}


# For the simulated allocator


def requests_of(events: Iterable[Mapping[str, Any]]) -> tuple[list[Event], list[int]]:
    """Return the allocator's requests, event by event, and the bytes reserved after each.

    Segments given back in a row, without a request that needed room, are one emptying of the cache.
    """
    asked: list[Event] = []
    reserved: list[int] = []
    held, now, emptying = dict[int, int](), 0, False

    def after(event: Event) -> None:
        asked.append(event)
        reserved.append(now)

    for event in events:
        letter = LETTERS.get(event["action"], "")
        if emptying and letter not in "su":
            after(("e",))
            emptying = False
        if letter in "SM":
            now += event["size"]
        elif letter in "su":
            now -= event["size"]
            emptying = True
        elif letter == "a":
            held[event["addr"]] = len(asked)
            after(("m", len(asked), event["size"]))
        elif letter == "f" and event["addr"] in held:
            after(("f", held.pop(event["addr"])))
    if emptying:
        after(("e",))
    return asked, reserved
