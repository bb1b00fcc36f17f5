"""Observe a device's allocator while a function runs: the measurements that predictions are held against.

On CUDA the caching allocator keeps the counts itself. On the CPU nothing counts, but every allocation is an
event of PyTorch's profiler, with the bytes that were asked for, in the order in which they happened; the
running sum is exact. The profiler sees the calling thread, in which the backward of a CPU model runs too,
and no other.

Peaks are *above the level at the start*. What was alive before (parameters, optimizer state) is the
caller's to add. On the CPU nothing is credited for freeing it: a release counts where its allocation was seen by the
same observation. The profiler would credit more: it keeps the address of what an earlier observation saw made, does
not see it freed in between, and mistakes later allocations there for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from remat.streams import descriptor_to

_MEMORY_EVENT = "[memory]"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The memory and time of a function on the device.

    peak_bytes       peak of allocated bytes above the level at the start
    time_us          median time of one call; measured apart from memory, whose observation costs time
    reserved_bytes   peak of the bytes that CUDA's caching allocator held, None on the CPU
    requested_bytes  as peak_bytes, without the rounding of CUDA's allocator (to 512 bytes, and by up to 1 MiB
                     where a large allocation reuses a larger block); on the CPU nothing is rounded
    """

    peak_bytes: int
    time_us: float
    reserved_bytes: int | None
    requested_bytes: int


def measure_step(
    function: Callable[[], object], device: torch.device, *, warm_up: int = 1, repeats: int = 3, collect: bool = True
) -> Measurement:
    """Measure the memory of one call of `function`, then the median time of `repeats` calls, after `warm_up` calls.

    collect  see `measure_peak`
    """
    for _ in range(warm_up):
        function()
    if collect:
        gc.collect()
    peak, requested, reserved = _observe(function, device)
    times = [time_once_us(function, device) for _ in range(repeats)]
    return Measurement(peak, statistics.median(times) if times else 0.0, reserved, requested)


def measure_peak(
    function: Callable[[], object], device: torch.device, *, requested: bool = False, collect: bool = True
) -> int:
    """Run `function` once, and return the peak of allocated bytes above the level at the start.

    requested  count requested bytes, not those that CUDA's allocator rounds them to
    collect    collect cyclic garbage first; otherwise its release during the run would lower CUDA's peak
    """
    if collect:
        gc.collect()
    peak, peak_requested, _ = _observe(function, device)
    return peak_requested if requested else peak


def time_once_us(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call of `function`; on CUDA, with all the work that it queued."""
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _observe(function: Callable[[], object], device: torch.device) -> tuple[int, int, int | None]:
    """Return (peak, peak of requested bytes, reserved bytes) of one call of `function`."""
    if device.type == "cuda":
        return _observe_cuda(function, device)
    peak = max(int(allocation_curve(function).max(initial=0)), 0)
    return peak, peak, None


def _observe_cuda(function: Callable[[], object], device: torch.device) -> tuple[int, int, int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    peak = _rise(before, after, "allocated_bytes")
    requested = _rise(before, after, "requested_bytes") or peak  # not every allocator backend counts requests
    return peak, requested, int(after.get("reserved_bytes.all.peak", 0))


def context_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device outside of this process's allocator: its context, and other processes.

    Makes the context if there is none.
    """
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _rise(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    return int(after.get(f"{name}.all.peak", 0)) - int(before.get(f"{name}.all.current", 0))


def allocation_curve(function: Callable[[], object]) -> np.ndarray:
    """Run `function` once on the CPU; return the bytes above the start after each allocation and release."""
    return np.cumsum(np.array([size for _, size in allocation_events(function)], dtype=np.int64))


def allocation_events(function: Callable[[], object]) -> list[tuple[int, int]]:
    """Run `function` once on the CPU; return (time in ns, signed bytes) of each allocation and release, in order."""
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_profiler():
        profiler.start()
    try:
        function()
    finally:
        with _quiet_profiler():
            profiler.stop()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    found: list[tuple[int, int]] = []
    alive: set[int] = set()  # addresses
    for event in sorted(_events(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
        block = event.extra_fields
        if event.name != _MEMORY_EVENT or not hasattr(block, "alloc_size") or block.device.type != "cpu":
            continue
        if block.alloc_size > 0:
            alive.add(block.ptr)
        elif block.ptr in alive:
            alive.remove(block.ptr)
        else:
            continue
        found.append((event.start_time_ns, block.alloc_size))
    return found


def _events(tree: Sequence[Any]) -> Iterator[Any]:
    """Yield all events of a tree, each before those within it."""
    ahead = [*reversed(tree)]
    while ahead:
        event = ahead.pop()
        yield event
        ahead.extend(reversed(event.children))


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep messages of the profiler's C++ library (`USDT: profiler_start`) out of stderr.

    It writes to the file descriptor, not to `sys.stderr`, and reads KINETO_LOG_LEVEL only when first used.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    with warnings.catch_warnings(), open(os.devnull, "wb") as null, descriptor_to(2, null.fileno()):
        warnings.simplefilter("ignore")
        yield
