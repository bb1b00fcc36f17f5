"""Measure: how long each kind of operator takes on the device at hand, and what its kernel needs meanwhile.

A Graph describes each kind by the shapes, strides and dtypes of its arguments. Here such arguments are made again with
data in them, one kind at a time, and the operator is called on them (`kernel_calls.py`): so a step can be profiled that
would never fit in memory as a whole.

Rule 1  Workspace is the peak of allocated bytes during a call less the outputs that are new. The first call is left
        out: libraries keep what they allocate then (cuBLAS's workspace), once for the process. Those bytes are
        `Costs.about["library_bytes"]`. Libraries let go of what they hold before, for a process that has multiplied
        already would find nothing.
Rule 2  What cannot be made again or run costs nothing here, and is named in `Costs.about["not_measured"]`: an operator
        without a kernel on this device, an argument that JSON cannot say, a kind that does not fit, a kind that ended
        the process in which it was last measured.

Results are kept in the user's cache folder (`timing_cache.py`): a kind is measured once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from remat._torch.training import clear_cublas_workspaces
from remat.costing.costs import Costs
from remat.costing.device_allocator import measure_peak, synchronize
from remat.costing.host_memory import available_bytes, physical_memory
from remat.costing.kernel_calls import Call, NotMeasurable, overload, samples_us
from remat.costing.timing_cache import Cache, KindCost, device_name
from remat.errors import UsageError
from remat.evaluation.graph import FROM_HOST, OpKind
from remat.files import default_cache
from remat.recording.tracker import Tracker
from remat.units import gib
from remat.workload.target import PCIE_4, Target, target_of


def time_operators(
    kinds: Sequence[OpKind],
    device: torch.device,
    *,
    cache: Path | Literal["default"] | None = "default",
    repeats: int = 15,
    seconds_per_kind: float = 0.15,
    on_progress: Callable[[int, int], None] | None = None,
) -> Costs:
    """Measure the costs of `kinds`, row by row, on `device`.

    cache             folder with earlier results, None to measure everything anew and keep nothing
    repeats           samples for a median: at least 3, fewer than this once `seconds_per_kind` are over
    on_progress       called with (kinds done, kinds in all)
    """
    begin = time.perf_counter()
    known = Cache.open(default_cache() if cache == "default" else cache, device)
    rows: list[KindCost] = []
    failed: list[dict[str, Any]] = []
    hits = 0
    with measuring(device), known:
        before = _allocated(device)
        for index, kind in enumerate(kinds):
            row = known.row(kind)
            hits += row is not None
            if row is None and hits == index:
                # Before the first: garbage must not be freed while a GPU's bytes count.
                gc.collect()
            if row is None:
                try:
                    with known.trying(kind):
                        row = known.add(kind, time_operator(kind, device, repeats, seconds_per_kind))
                except NotMeasurable as error:
                    failed.append({"kind": index, "op": kind.name, "reason": str(error)})
            if row is None:
                _forget_failure(kind, device, known)  # outside `except`: the error refers to the arguments
                row = KindCost(0.0, 0.0, 0)
            rows.append(row)
            if on_progress is not None:
                on_progress(index + 1, len(kinds))
        known.library_bytes = max(known.library_bytes, _allocated(device) - before)  # our own tensors are freed
    return Costs(
        source="measured",
        device=device_name(device),
        time_us=tuple(row.time_us for row in rows),
        workspace_bytes=tuple(row.workspace_bytes for row in rows),
        spread=tuple(row.spread for row in rows),
        about={
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "repeats": repeats,
            "seconds": round(time.perf_counter() - begin, 3),
            "from_cache": hits,
            "library_bytes": known.library_bytes,
            "not_measured": failed,
        },
    )


@contextlib.contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Disable gradients, make `device` current, and restore the caller's random state afterwards."""
    on_cuda = device.type == "cuda"
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
    ):
        torch.manual_seed(0)
        if on_cuda:
            torch.cuda.synchronize(device)
            clear_cublas_workspaces()
        yield
    if on_cuda:
        torch.cuda.empty_cache()


def time_operator(kind: OpKind, device: torch.device, repeats: int = 15, seconds_per_kind: float = 0.15) -> KindCost:
    """Measure the time and workspace of one kind. Raises `NotMeasurable`."""
    function = None if kind.name == FROM_HOST else overload(kind.name)
    _check_memory(kind, device)
    try:
        call = _HostCopy(kind, device) if function is None else Call(function, kind, device)
        call()  # Rule 1: libraries and caches get ready
        synchronize(device)
        workspace = _workspace_bytes(call, device)
        times = samples_us(call, device, repeats, seconds_per_kind)
    except NotMeasurable:
        raise
    except Exception as error:  # any error of an operator on artificial arguments
        raise NotMeasurable(_first_line(error)) from error
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    return KindCost(float(median), float((high - low) / 2 / median) if median else 0.0, workspace)


def _forget_failure(kind: OpKind, device: torch.device, known: Cache) -> None:
    """Free the arguments of a failed kind. Raises UsageError if nothing runs on the device any more."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        known.note_fatal(kind)
        raise UsageError(
            f"{kind.name} made the device unusable for this process while it was measured ({_first_line(error)}). "
            "Run the command again: what was measured is kept, and this kind is left out."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_memory(kind: OpKind, device: torch.device) -> None:
    """Refuse a kind that would make a CPU swap or kill the process; CUDA raises by itself. (Rule 2)"""
    if device.type != "cpu":
        return
    available = available_bytes()
    if kind.moved_bytes > available:
        raise NotMeasurable(f"needs {gib(kind.moved_bytes)}, and {gib(available)} are available")


class _HostCopy:
    """A copy from the host that the device waits for, from pinned memory if possible."""

    in_place = False

    def __init__(self, kind: OpKind, device: torch.device):
        self._host = torch.zeros(kind.moved_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._to = torch.empty(kind.moved_bytes, dtype=torch.uint8, device=device)
        self.args: list[Any] = [self._to]
        self.kwargs: dict[str, Any] = {}

    def renew(self) -> None:
        pass

    def result(self) -> Any:
        return self._to.copy_(self._host, non_blocking=True)

    def __call__(self) -> None:
        self.result()


# ---- workspace -------------------------------------------------------------------------------------------


def _workspace_bytes(call: Call | _HostCopy, device: torch.device) -> int:
    """Return the peak of a kernel's allocations, without its outputs. (Rule 1)"""
    results: list[Any] = []
    peak = measure_peak(lambda: results.append(call.result()), device, requested=True, collect=False)
    given = {storage.data_ptr() for storage in _storages((call.args, call.kwargs))}
    new = {s.data_ptr(): s.nbytes() for s in _storages(results) if s.data_ptr() not in given}
    return max(peak - sum(new.values()), 0)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


# ---- the device at hand ----------------------------------------------------------------------------------


def device_target(device: torch.device, *, cache: Path | Literal["default"] | None = "default") -> Target:
    """Describe the device at hand as a Target; its rates, for estimates only, are a data sheet's or measured once."""
    release = torch.__version__.partition("+")[0] if device.type == "cuda" else ""
    if device.type == "cuda":
        memory, name = int(torch.cuda.mem_get_info(device)[1]), torch.cuda.get_device_name(device)
        if (known := target_of(name)) is not None:
            return dataclasses.replace(known, memory_bytes=memory, torch=release)
        name = name.lower()
    else:
        name, memory = "cpu", physical_memory()
    rates = _rates(device, cache)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Target(
        name=name,
        device="cuda" if device.type == "cuda" else "cpu",
        memory_bytes=memory,
        bytes_per_us=rates.pop("bytes"),
        flops_per_us=rates,
        efficiency=1.0,  # these are rates that kernels reached
        alignment_bytes=512 if device.type == "cuda" else 1,
        host_bytes_per_us=PCIE_4 if device.type == "cuda" else 0.0,
        capability=10 * properties.major + properties.minor if properties else 0,
        processors=properties.multi_processor_count if properties else 0,
        torch=release,
    )


def _rates(device: torch.device, cache: Path | Literal["default"] | None) -> dict[str, float]:
    """Return the rates per microsecond: bytes of a large copy, and operations of a large product by dtype."""
    known = Cache.open(default_cache() if cache == "default" else cache, device)
    if not {"bytes", "float32"} <= known.rates.keys():
        with measuring(device), known:
            known.rates = _measured_rates(device)
    return dict(known.rates)


def _measured_rates(device: torch.device) -> dict[str, float]:
    length, side = (64 << 20, 4096) if device.type == "cuda" else (4 << 20, 512)
    vector = {"tensor": [[length], [1], "float32"]}
    copy = OpKind("aten.clone.default", [[vector], {}], 0, 8 * length, "float32")
    rates = {"bytes": copy.moved_bytes / _fastest_us(copy, device)}
    for dtype in ("float32", "bfloat16", "float16"):
        matrix = {"tensor": [[side, side], [side, 1], dtype]}
        product = OpKind("aten.mm.default", [[matrix, matrix], {}], 2 * side**3, 0, dtype)
        with contextlib.suppress(NotMeasurable):  # a dtype that this device has no product for
            rates[dtype] = product.flops / _fastest_us(product, device)
    return rates


def _fastest_us(kind: OpKind, device: torch.device) -> float:
    """Return the least of several medians: rates are kept, and other work may slow a few samples down forty times."""
    return min(time_operator(kind, device, repeats=3).time_us for _ in range(8))


def measured_workspaces(
    tracker: Tracker, known: Mapping[tuple[str, str], int], device: torch.device
) -> dict[tuple[str, str], int]:
    """Measure the workspaces of the kinds that `tracker` has seen and that are not in `known`."""
    found = {kind.key: kind for kind in tracker.kinds.values()}
    missing = {key: kind for key, kind in found.items() if key not in known and "empty" not in kind.name}
    costs = time_operators(tuple(missing.values()), device)
    return dict(zip(missing, costs.workspace_bytes, strict=True))
