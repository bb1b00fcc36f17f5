"""Measure: how long each kind of operator takes on the device at hand, and what its kernel needs meanwhile.

A Graph describes each kind by the shapes, strides and dtypes of its arguments. Here such arguments are made
again with data in them, one kind at a time, and the operator is called on them: so a step can be profiled
that would never fit in memory as a whole.

Rule 1  Time is the median of several samples. A sample is one call, or a batch of calls where one is too
        short for the clock. Calls are issued back to back, as a training step does: on CUDA a tiny operator
        costs its launch.
Rule 2  Workspace is the peak of allocated bytes during a call less the outputs that are new. The first call
        is left out: libraries keep what they allocate then (cuBLAS's workspace), once for the process.
        Those bytes are `Costs.about["library_bytes"]`. Libraries let go of what they hold before, for a process that
        has multiplied already would find nothing.
Rule 3  Data is harmless: probabilities where a kernel asserts that they are, indices within the table that
        they index, nothing that decays to denormal numbers when an operator changes its argument again and
        again.
Rule 4  What cannot be made again or run costs nothing here, and is named in `Costs.about["not_measured"]`:
        an operator without a kernel on this device, an argument that JSON cannot say, a kind that does not
        fit, a kind that ended the process in which it was last measured.

Results are kept in the user's cache folder (`timing_cache.py`): a kind is measured once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
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
from remat.costing.timing_cache import Cache, KindCost, NotMeasurable, default_cache, device_name
from remat.errors import UsageError
from remat.evaluation.graph import FROM_HOST, OpKind
from remat.recording.tracker import Tracker
from remat.units import gib
from remat.workload.target import PCIE_4, Target, target_of

_SAMPLE_US = 200.0  # a shorter call is timed in batches of about this
_BATCH = 100
_BATCH_IN_PLACE = 8  # 0.5 ** 8 is no denormal number, not even in float16 (Rule 3)
_LONG_US = 1e6  # a call that takes longer is timed once


_OPAQUE = {  # backwards of recurrent layers: one argument is the library's own notes
    "aten.mkldnn_rnn_layer_backward.default",
    "aten._cudnn_rnn_backward.default",
    "aten.miopen_rnn_backward.default",
}


# Arguments that a kernel reads on the host. The seed and offset of dropout are made there by the forward of
# memory-efficient attention, and on the device by those of flash attention (a uint64 pair) and cuDNN's; the backward
# dereferences them where it expects them (ATen/native/transformers/cuda/attention_backward.cu, as of torch 2.13): a
# pointer to the device kills the process. Under CUDA graphs they are on the device; nothing is measured under those.
_ON_HOST = {
    "aten._efficient_attention_backward.default": ("philox_seed", "philox_offset"),
    "aten._scaled_dot_product_efficient_attention_backward.default": ("philox_seed", "philox_offset"),
}


def time_operators(
    kinds: Sequence[OpKind],
    device: torch.device,
    *,
    cache: Path | Literal["default"] | None = "default",
    repeats: int = 15,
    seconds_per_kind: float = 0.15,
    on_progress: Callable[[int, int], None] | None = None,
) -> Costs:
    """Costs of `kinds`, row by row, measured on `device`.

    cache             folder with earlier results, None to measure everything anew and keep nothing
    repeats           samples for a median: at least 3, fewer than this once `seconds_per_kind` are over
    on_progress       called with (kinds done, kinds in all)
    """
    begin = time.perf_counter()
    known = Cache.open(default_cache() if cache == "default" else cache, device)
    rows: list[KindCost] = []
    failed: list[dict[str, Any]] = []
    hits = 0
    with _ready(device), known:
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
                _forget_failure(kind, device, known)  # outside `except`: the error holds what it was called with
                row = KindCost(0.0, 0.0, 0)
            rows.append(row)
            if on_progress is not None:
                on_progress(index + 1, len(kinds))
        known.library_bytes = max(known.library_bytes, _allocated(device) - before)  # nothing of ours is left
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
def _ready(device: torch.device) -> Iterator[None]:
    """No gradients, `device` current, and the random state of the caller as it was."""
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
    """Time and workspace of one kind; raises `NotMeasurable`."""
    function = None if kind.name == FROM_HOST else _overload(kind.name)
    _check_memory(kind, device)
    try:
        call = _HostCopy(kind, device) if function is None else _Call(function, kind, device)
        call()  # Rule 2: libraries and caches get ready
        synchronize(device)
        workspace = _workspace_bytes(call, device)
        times = _samples_us(call, device, repeats, seconds_per_kind)
    except NotMeasurable:
        raise
    except Exception as error:  # whatever an operator may raise on arguments that are not quite the real ones
        raise NotMeasurable(_first_line(error)) from error
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    return KindCost(float(median), float((high - low) / 2 / median) if median else 0.0, workspace)


def _forget_failure(kind: OpKind, device: torch.device, known: Cache) -> None:
    """Let go of what a kind left behind. Raises UsageError where that is a device on which nothing runs any more."""
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
    """Refuse what would make a CPU swap or kill the process; CUDA says so itself. (Rule 4)"""
    if device.type != "cpu":
        return
    available = available_bytes()
    if kind.moved_bytes > available:
        raise NotMeasurable(f"needs {gib(kind.moved_bytes)}, and {gib(available)} are available")


# ---- calling a kind --------------------------------------------------------------------------------------


class _Call:
    """An operator with arguments made from a kind's signature; calling it drops the result."""

    def __init__(self, function: Any, kind: OpKind, device: torch.device):
        self.function = function
        self.in_place = bool(function._schema.is_mutable)
        self._kind = kind
        self._device = device
        self.renew()

    def renew(self) -> None:
        """Fresh data; the old arguments are let go first, so that a kind is never in memory twice."""
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.args, self.kwargs = arguments(self._kind, self._device)

    def result(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def __call__(self) -> None:
        self.function(*self.args, **self.kwargs)


class _HostCopy:
    """A copy from the host, of pinned memory where there is such, that the device waits for."""

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


def _overload(name: str) -> Any:
    """The overload called "aten.mm.default"; raises `NotMeasurable` where there is none."""
    if name in _OPAQUE:
        raise NotMeasurable("it takes what only its forward can make, and dies of anything else")
    try:
        return functools.reduce(getattr, name.split("."), torch.ops)
    except (AttributeError, RuntimeError) as error:
        raise NotMeasurable(f"there is no operator {name} in torch {torch.__version__}") from error


def arguments(kind: OpKind, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments like those that `kind` was recorded with, on `device`; raises `NotMeasurable`."""
    args, kwargs = kind.signature
    below = _index_limit(kind.name, args)
    draw = torch.Tensor.normal_ if kind.flops else _draw_probabilities

    def value(described: Any, on: torch.device = device) -> Any:
        if isinstance(described, list):
            return [value(item, on) for item in described]
        if not isinstance(described, dict):
            return described
        ((what, content),) = described.items()
        if what == "tensor":
            shape, stride, dtype = content
            return _tensor(shape, stride, getattr(torch, dtype), on, below, draw)
        if what == "device":
            return device
        if what in ("dtype", "memory_format", "layout"):
            return getattr(torch, content)
        raise NotMeasurable(f"the argument {content!r} cannot be made again")

    places = [torch.device("cpu") if name in _ON_HOST.get(kind.name, ()) else device for name in _names(kind, args)]
    made = list(map(value, args, places)), {name: value(v) for name, v in kwargs.items()}
    if kind.name.startswith("aten._grouped_mm."):
        _spread_groups(made[0])
    return made


def _names(kind: OpKind, args: list[Any]) -> list[str]:
    """Of the positional arguments; none for an operator whose arguments all belong on the device."""
    if kind.name not in _ON_HOST:
        return [""] * len(args)
    return [argument.name for argument in _overload(kind.name)._schema.arguments[: len(args)]]


def _draw_probabilities(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.uniform_(0.5, 1.0)  # Rule 3


def _tensor(
    shape: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
    below: int,
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A tensor with these strides (expanded and overlapping ones too) and harmless data. (Rule 3)"""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    length = last + 1 if all(shape) else 0
    if dtype == torch.bool:
        flat = torch.rand(length, device=device) < 0.5
    elif dtype.is_floating_point and dtype.itemsize >= 2:
        flat = draw(torch.empty(length, dtype=dtype, device=device))
    elif below > 1 and dtype in (torch.int32, torch.int64):
        flat = torch.randint(below, (length,), dtype=dtype, device=device)
    else:
        flat = torch.zeros(length, dtype=dtype, device=device)
    return flat.as_strided(shape, stride)


def _index_limit(name: str, args: list[Any]) -> int:
    """Integer tensors hold indices below this: spread, because equal ones contend in scattering kernels.

    1, that is all zeros, where nothing is known about the operator.
    """
    op = name.split(".")[1]
    shapes = [a["tensor"][0] if isinstance(a, dict) and "tensor" in a else None for a in args]
    if op == "embedding" and shapes[0]:
        return int(shapes[0][0])
    if op == "embedding_dense_backward":
        return int(args[2])
    if op in ("nll_loss_forward", "nll_loss_backward"):
        scores = shapes[0 if op == "nll_loss_forward" else 1]
        return int(scores[1]) if scores and len(scores) > 1 else 1
    if op in ("index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_") and shapes[0]:
        indexed = [size for size, index in zip(shapes[0], args[1], strict=False) if index is not None]
        return int(min(indexed, default=1))
    if op in ("gather", "index_select", "index_add", "index_add_", "scatter", "scatter_", "scatter_add"):
        return int(shapes[0][args[1]]) if shapes[0] else 1
    return 1


def _spread_groups(args: list[Any]) -> None:
    """End of each group of a grouped product: equal shares of the dimension that is split."""
    left, right, offsets = (*args, None)[:3]
    if offsets is None:
        return
    rows, shared, columns = left.shape[0], left.shape[-1], right.shape[-1]
    split = shared if left.dim() == right.dim() else rows if left.dim() == 2 else columns
    offsets.copy_(torch.arange(1, len(offsets) + 1, device=offsets.device) * split // len(offsets))


# ---- workspace -------------------------------------------------------------------------------------------


def _workspace_bytes(call: _Call | _HostCopy, device: torch.device) -> int:
    """Peak of what the kernel allocates, beyond the outputs that it makes. (Rule 2)"""
    results: list[Any] = []
    peak = measure_peak(lambda: results.append(call.result()), device, requested=True, collect=False)
    given = {storage.data_ptr() for storage in _storages((call.args, call.kwargs))}
    new = {s.data_ptr(): s.nbytes() for s in _storages(results) if s.data_ptr() not in given}
    return max(peak - sum(new.values()), 0)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


# ---- time ------------------------------------------------------------------------------------------------


def _samples_us(call: _Call | _HostCopy, device: torch.device, repeats: int, seconds: float) -> list[float]:
    """Times of one call, each the mean of a batch. (Rule 1)"""
    sample = _sample_cuda_us if device.type == "cuda" else _sample_cpu_us
    once = sample(call, 1)
    if once > _LONG_US:
        return [once]
    most = _BATCH_IN_PLACE if call.in_place else _BATCH
    batch = max(1, min(most, round(_SAMPLE_US / max(once, 0.1))))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < repeats and time.perf_counter() < end):
        if call.in_place:
            call.renew()
        times.append(sample(call, batch))
    return times


def _sample_cpu_us(call: _Call | _HostCopy, batch: int) -> float:
    begin = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - begin) * 1e6 / batch


def _sample_cuda_us(call: _Call | _HostCopy, batch: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(batch):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / batch


# ---- the device at hand ----------------------------------------------------------------------------------


def device_target(device: torch.device, *, cache: Path | Literal["default"] | None = "default") -> Target:
    """The device at hand as a Target; its rates, for estimates only, are a data sheet's or measured once."""
    if device.type == "cuda":
        memory, name = int(torch.cuda.mem_get_info(device)[1]), torch.cuda.get_device_name(device)
        if (known := target_of(name)) is not None:
            return dataclasses.replace(known, memory_bytes=memory)
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
        torch=torch.__version__.partition("+")[0] if properties else "",
    )


def _rates(device: torch.device, cache: Path | Literal["default"] | None) -> dict[str, float]:
    """Bytes per microsecond of a large copy, and operations per microsecond of a large product by dtype."""
    known = Cache.open(default_cache() if cache == "default" else cache, device)
    if not {"bytes", "float32"} <= known.rates.keys():
        with _ready(device), known:
            known.rates = _measured_rates(device)
    return dict(known.rates)


def _measured_rates(device: torch.device) -> dict[str, float]:
    length, side = (64 << 20, 4096) if device.type == "cuda" else (4 << 20, 512)
    vector = {"tensor": [[length], [1], "float32"]}
    copy = OpKind("aten.clone.default", [[vector], {}], 0, 8 * length, "float32")
    rates = {"bytes": copy.moved_bytes / time_operator(copy, device).time_us}
    for dtype in ("float32", "bfloat16", "float16"):
        matrix = {"tensor": [[side, side], [side, 1], dtype]}
        product = OpKind("aten.mm.default", [[matrix, matrix], {}], 2 * side**3, 0, dtype)
        with contextlib.suppress(NotMeasurable):  # a dtype that this device has no product for
            rates[dtype] = product.flops / time_operator(product, device).time_us
    return rates


def measured_workspaces(
    tracker: Tracker, known: Mapping[tuple[str, str], int], device: torch.device
) -> dict[tuple[str, str], int]:
    """The kernels' own bytes of what `tracker` has seen and `known` has not, measured."""
    found = {kind.key: kind for kind in tracker.kinds.values()}
    missing = {key: kind for key, kind in found.items() if key not in known and "empty" not in kind.name}
    costs = time_operators(tuple(missing.values()), device)
    return dict(zip(missing, costs.workspace_bytes, strict=True))
