"""Call a kernel from its signature, and time it. The file needs torch alone and runs by itself.

`python kernel_calls.py h100.csv` measures every row of a table that has no time yet on this machine's GPU, or else its
CPU, and writes it in place. `remat profile --costs h100.csv` writes such a table on a machine without the card, and
`remat plan --costs h100.csv` prices kernels by it (`kernel_table.py`). A table is a CSV file: one row a kernel, see
`COLUMNS`; the first rows, which begin with `#`, say where it was measured.

A signature gives shapes, strides and dtypes. Arguments like these are made with data in them.

Rule 1  Time is the median of several samples. A sample is one call, or a batch of calls where one is too short for the
        clock. On CUDA calls are issued while the device sleeps: what it then takes is its own, not the host's pace.
Rule 2  Data is harmless: probabilities where a kernel asserts that they are, indices within the table that they index,
        nothing that decays to denormal numbers when an operator changes its argument again and again.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # modules beside this file have names of Python's own

import csv
import functools
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

COLUMNS = ("operator", "signature", "flops", "moved_bytes", "dtype", "time_us")


class KernelKind(Protocol):
    """An operator by name ("aten.mm.default"), its arguments as JSON can say them, and its operations."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> Any: ...
    @property
    def flops(self) -> int: ...


class Timed(Protocol):
    """A call that can be timed: `renew` makes fresh data if a call changes it (`in_place`)."""

    in_place: bool

    def __call__(self) -> None: ...
    def renew(self) -> None: ...


class NotMeasurable(Exception):
    """The kernel cannot be called from its signature; the message says why."""


_SAMPLE_US = 200.0  # a shorter call is timed in batches of about this
_BATCH = 100
_BATCH_IN_PLACE = 8  # 0.5 ** 8 is no denormal number, not even in float16 (Rule 2)
_LONG_US = 1e6  # a call that takes longer is timed once
_CYCLES_PER_US = 3000  # of a device, more than any has: it sleeps half as long again as the host needs, or longer

_RENAMED = {**{f"weight{i}": f"weight{i + 1}" for i in range(4)}, "cx_": "cx_tmp"}

# Backwards of recurrent layers read what a library kept in their forward, and die of anything else: each with the
# forward, the argument that takes what that kept (its fourth result), and arguments of forward by their names here.
_AFTER_FORWARD: dict[str, tuple[str, str, dict[str, str]]] = {
    "aten.mkldnn_rnn_layer_backward.default": ("aten.mkldnn_rnn_layer.default", "workspace", _RENAMED),
    "aten._cudnn_rnn_backward.default": ("aten._cudnn_rnn.default", "reserve", {}),
    "aten.miopen_rnn_backward.default": ("aten.miopen_rnn.default", "reserve", {}),
}
_FORWARDS = {forward for forward, _, _ in _AFTER_FORWARD.values()}
_RESERVE_RESULT = 3

# Arguments that a kernel reads on the host. The seed and offset of dropout are made there by the forward of
# memory-efficient attention, and on the device by those of flash attention (a uint64 pair) and cuDNN's; the backward
# dereferences them where it expects them (ATen/native/transformers/cuda/attention_backward.cu, as of torch 2.13): a
# pointer to the device kills the process. Under CUDA graphs they are on the device; nothing is measured under those.
_ON_HOST = {
    "aten._efficient_attention_backward.default": ("philox_seed", "philox_offset"),
    "aten._scaled_dot_product_efficient_attention_backward.default": ("philox_seed", "philox_offset"),
}


# Arguments


class Call:
    """An operator with arguments made from a kind's signature; calling it drops the result."""

    def __init__(self, function: Any, kind: KernelKind, device: torch.device):
        self.function = _keeping(function) if kind.name in _FORWARDS else function
        self.in_place = bool(function._schema.is_mutable)
        self._kind = kind
        self._device = device
        self.renew()

    def renew(self) -> None:
        """Make fresh data; the old arguments are freed first, so that a kind is never in memory twice."""
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.args, self.kwargs = arguments(self._kind, self._device)

    def result(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def __call__(self) -> None:
        self.function(*self.args, **self.kwargs)


def overload(name: str) -> Any:
    """Return the overload called "aten.mm.default". Raises `NotMeasurable` if there is none."""
    try:
        return functools.reduce(getattr, name.split("."), torch.ops)
    except (AttributeError, RuntimeError) as error:
        raise NotMeasurable(f"there is no operator {name} in torch {torch.__version__}") from error


def arguments(kind: KernelKind, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Make arguments like those that `kind` was recorded with, on `device`. Raises `NotMeasurable`."""
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
    if kind.name == "aten.repeat_interleave.Tensor" and len(repeats := made[0][0]):
        total = len(repeats) if (size := made[1].get("output_size")) is None else size
        repeats.fill_(total // len(repeats))[0] += total % len(repeats)  # a GPU dies of another sum
    if kind.name.startswith(("aten.masked_scatter.", "aten.masked_scatter_.")) and made[0][0].numel():
        _mask_no_more_than_given(*made[0][:3])
    if kind.name.startswith("aten._embedding_bag_"):
        _fill_bags(kind.name, made[0])
    if kind.name in _AFTER_FORWARD:
        _run_forward(kind.name, made[0])
    return made


def _fill_bags(name: str, args: list[Any]) -> None:
    """Say that no bag is empty: gradients of empty ones are left out of the copies that a maximum needs."""
    names = [argument.name for argument in overload(name)._schema.arguments]
    if "bag_size" in names:
        args[names.index("bag_size")].fill_(1)


def _run_forward(name: str, args: list[Any]) -> None:
    """Run the forward of this backward, and put the tensors that it keeps into `args`."""
    forward, kept, renamed = _AFTER_FORWARD[name]
    places = {argument.name: place for place, argument in enumerate(overload(name)._schema.arguments)}
    function = overload(forward)
    given = [args[places[renamed.get(argument.name, argument.name)]] for argument in function._schema.arguments]
    args[places[kept]] = _keeping(function)(*given)[_RESERVE_RESULT]


def _keeping(function: Any) -> Any:
    """Return `function` with gradients enabled: only then does oneDNN keep tensors for backward."""
    return torch.enable_grad()(function)


def _names(kind: KernelKind, args: list[Any]) -> list[str]:
    """Return the names of the positional arguments; none if all belong on the device."""
    if kind.name not in _ON_HOST:
        return [""] * len(args)
    return [argument.name for argument in overload(kind.name)._schema.arguments[: len(args)]]


def _draw_probabilities(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.uniform_(0.5, 1.0)


def _tensor(
    shape: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
    below: int,
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Make a tensor with these strides (also expanded or overlapping ones) and harmless data. (Rule 2)"""
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
    """Return a limit on integer tensors, which hold indices: spread, since equal ones contend in scattering kernels.

    It is 1, which makes them zeros, for an unknown operator.
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
    """Set the end of each group of a grouped product: equal shares of the split dimension."""
    left, right, offsets = (*args, None)[:3]
    if offsets is None:
        return
    rows, shared, columns = left.shape[0], left.shape[-1], right.shape[-1]
    split = shared if left.dim() == right.dim() else rows if left.dim() == 2 else columns
    offsets.copy_(torch.arange(1, len(offsets) + 1, device=offsets.device) * split // len(offsets))


def _mask_no_more_than_given(changed: torch.Tensor, mask: torch.Tensor, given: torch.Tensor) -> None:
    """Let a mask choose as many elements of `changed` as are `given`, or fewer: a GPU dies of one more."""
    steps = [(size, step) for size, step in zip(mask.shape, mask.stride(), strict=True) if step]
    own = mask.as_strided((sum((size - 1) * step for size, step in steps) + 1,), (1,))
    has_gaps = len(own) != math.prod(size for size, _ in steps)
    own.fill_(False)
    own[: 0 if has_gaps else min(given.numel() * len(own) // changed.numel(), len(own))] = True


# Time


def samples_us(call: Timed, device: torch.device, repeats: int, seconds: float) -> list[float]:
    """Measure the times of one call, each the mean of a batch. (Rule 1)"""
    sample = _on_cuda(call) if device.type == "cuda" else _sample_cpu_us
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


def _sample_cpu_us(call: Timed, batch: int) -> float:
    begin = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - begin) * 1e6 / batch


def _on_cuda(call: Timed) -> Callable[[Timed, int], float]:
    """Return a sampler that lets the device sleep until the host has issued all calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    cycles = round(_CYCLES_PER_US * 1e6 * (time.perf_counter() - begin))
    return functools.partial(_sample_cuda_us, cycles=cycles)


def _sample_cuda_us(call: Timed, batch: int, cycles: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles * batch)
    begin.record()
    for _ in range(batch):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / batch


# Tables


class TableRow(NamedTuple):
    """One kernel of a table; `time_us` is None if it was not measured.

    flops  floating-point operations      moved_bytes  bytes read and written at least once
    """

    name: str
    signature: Any
    flops: int
    moved_bytes: int
    dtype: str
    time_us: float | None = None


def read_table(path: Path) -> tuple[dict[str, str], list[TableRow]]:
    """Read the device and torch of a table, and its rows.

    Raises ValueError if the file is not a table.
    """
    text = path.read_text(encoding="utf-8").splitlines()
    about = dict(line[1:].strip().split(": ", 1) for line in text if line.startswith("#") and ": " in line)
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"its columns are {', '.join(rows.fieldnames or ['none'])}, not {', '.join(COLUMNS)}")
    return about, [
        TableRow(
            row["operator"],
            json.loads(row["signature"]),
            int(row["flops"]),
            int(row["moved_bytes"]),
            row["dtype"],
            float(row["time_us"]) if row["time_us"] else None,
        )
        for row in rows
    ]


def table_text(about: dict[str, str], rows: Iterable[TableRow]) -> str:
    """Format a table, as `read_table` reads it."""
    found = io.StringIO()
    found.writelines(f"# {name}: {value}\n" for name, value in about.items())
    writer = csv.writer(found, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        time_us = "" if row.time_us is None else f"{row.time_us:.3f}"
        writer.writerow([row.name, json.dumps(row.signature), row.flops, row.moved_bytes, row.dtype, time_us])
    return found.getvalue()


class DeviceLost(RuntimeError):
    """A kernel failed with an error after which nothing runs on the device in this process."""


def measured(rows: Iterable[TableRow], device: torch.device) -> Iterator[TableRow]:
    """Yield `rows` with times on `device`; those with a time, or that cannot be called, are unchanged.

    Raises DeviceLost.
    """
    for row in rows:
        yield row if row.time_us is not None else row._replace(time_us=_median_us(row, device))


def _median_us(row: TableRow, device: torch.device) -> float | None:
    try:
        with torch.no_grad():
            call = Call(overload(row.name), row, device)
            call()
            return statistics.median(samples_us(call, device, 15, 0.15))
    except Exception:  # whatever an operator raises on made-up arguments
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as lost:
                raise DeviceLost(f"{row.name} made the device unusable for this process: {lost}") from lost
        return None


def main(path: str) -> None:
    """Measure the missing rows of a table, and write it in place, every hundred rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about, rows = read_table(Path(path))
    before = about.get("device", name)
    if name not in before and any(row.time_us is not None for row in rows):
        raise SystemExit(f"{path} was measured on {before}, and this is {name}: measure a table without times.")

    def write() -> None:
        Path(path).write_text(table_text({"device": name, "torch": torch.__version__}, rows), encoding="utf-8")

    done = 0
    try:
        for row in measured(list(rows), device):
            rows[done] = row
            done += 1
            if done % 100 == 0 or done == len(rows):
                write()
                print(f"{done} of {len(rows)}", file=sys.stderr)
    except DeviceLost as lost:
        del rows[done]
        write()
        raise SystemExit(
            f"{lost}. Run the command again: {path} has all times so far, and leaves this kernel out."
        ) from None
    missing = sorted({row.name for row in rows if row.time_us is None})
    print(f"{path}: {sum(row.time_us is not None for row in rows)} of {len(rows)} kernels measured on {name}")
    if missing:
        print(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("python kernel_calls.py TABLE.csv")
    main(sys.argv[1])
