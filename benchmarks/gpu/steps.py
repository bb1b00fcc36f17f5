"""Plans made beforehand, trained on the GPU at hand as a user trains: bytes, bits and times of a model's steps.

    python -m benchmarks.gpu.steps MODEL PLANS FOLDER      in a checkout; writes FOLDER/MODEL.json.gz

PLANS holds MODEL.*.plan.json. The model is trained untouched and under each plan, in a plain loop: the peaks are
PyTorch's allocator's in the third step, gradients are compared with those of the untouched step, and steps are timed
by CUDA's events. One untouched step is profiled: times by operator and shapes. The same command again goes on.

Several models may run at once, one process each, with the same FOLDER: `benchmarks/device.py` runs five. They share the
card by two locks in it. A process is let onto the card when what its plan predicts fits beside the others' rooms and
contexts; while one is timed, the others wait.

DETERMINISTIC=1 asks PyTorch for deterministic kernels, so that gradients can be compared to the bit where its fastest
kernels add in any order. MEASURE_UNTIL, in seconds since 1970: nothing is begun later.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import gzip
import itertools
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only

import remat
from benchmarks.bare import make_importable
from benchmarks.gpu.runner import CUT, until

make_importable()

from remat.cli.commands.files import spec_in  # noqa: E402
from remat.cli.commands.source import workload_of  # noqa: E402
from remat.costing.timing_cache import device_name  # noqa: E402
from remat.evaluation.plan import Plan  # noqa: E402
from remat.workload.workload import Workload, trainable  # noqa: E402

WARM_UP, TIMED = 2, 6
BESIDE_BYTES = 2 << 30  # a context, and what is reserved and not used
OTHER_BYTES = 1 << 30  # of another process that is alive, beside its room: a context and what libraries keep
ROW_S = 150  # a row that takes longer hangs, and perhaps holds the lock that others wait for
ENDED = "the process ended"
COUNTS = ("requested", "allocated", "reserved")


class Run:
    """One model's loop, untouched or under a plan."""

    def __init__(self, workload: Workload, plan: Plan, *, planned: bool):
        about = plan.about
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = workload.build()
            batch = workload.batch(workload.batch_size, workload.seq_len)
        self.model: nn.Module = model.to("cuda").train()
        self.batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), batch)
        self.workload, self.accumulation = workload, about.get("accumulation", 1)
        if planned and (count := about.get("weights_on_host", 0)):
            remat.offload_weights(self.model, count, "cuda")
        if planned:
            remat.apply(self.model, plan)
        self.optimizer = workload.optimizer(trainable(self.model)) if workload.optimizer else None
        on_host = about.get("offload_optimizer") or about.get("loop", {}).get("offload_optimizer")
        if planned and on_host and self.optimizer is not None:
            remat.offload_optimizer(self.optimizer)

    def backward(self) -> torch.Tensor:
        """Forward and backward of one step; returns the last loss."""
        found = torch.zeros(())
        for _ in range(self.accumulation):
            cast = self.workload.autocast
            with torch.autocast("cuda", cast) if cast else contextlib.nullcontext():
                loss = self.workload.step(self.model, self.batch)
            loss.backward()
            found = loss.detach()
            del loss
        return found

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        self.update()
        return loss

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.detach().cpu() for p in trainable(self.model)]


def bits_of(run: Run, expected: Mapping[str, Any], *, again: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first step: its gradients beside `expected` ones, if there are any; and what later runs are compared with.

    again  the step is done twice, and compared with itself
    """
    found: dict[str, Any] = {}
    torch.manual_seed(1)
    loss = float(run.backward())
    gradients = run.gradients()
    if again:
        run.model.zero_grad()
        torch.manual_seed(1)
        second = float(run.backward())
        found["untouched again"] = compared(gradients, run.gradients()) | {"loss equal": second == loss}
    elif expected:
        found["gradients"] = compared(expected["gradients"], gradients) | {"loss equal": loss == expected["loss"]}
    run.update()
    return found, {"gradients": gradients, "loss": loss}


def measured(run: Run, *, profiled: bool) -> dict[str, Any]:
    """Bytes and times of a run."""
    found: dict[str, Any] = {}
    losses = []
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(WARM_UP):
        torch.cuda.reset_peak_memory_stats()
        losses.append(float(run.step()))
    stats = torch.cuda.memory_stats()
    found["peaks"] = {count: stats[f"{count}_bytes.all.peak"] for count in COUNTS}
    found["between"] = {count: stats[f"{count}_bytes.all.current"] for count in COUNTS}
    found["losses"] = losses
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for event in events[:-1]:
        event.record()
        run.step()
    events[-1].record()
    issued = time.perf_counter() - began
    torch.cuda.synchronize()
    each = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    found["ms"] = {"median": statistics.median(each), "each": each, "issued": 1e3 * issued / TIMED}
    if profiled:
        found["profile"] = profile_of(run)
    return found


def compared(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> dict[str, Any]:
    """How many gradients are equal, and the largest difference relative to a gradient's own largest."""
    equal, apart = 0, 0.0
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            equal += a is b
            continue
        if torch.equal(a, b):
            equal += 1
            continue
        a, b = a.cuda().double(), b.cuda().double()
        apart = max(apart, float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
    return {"parameters": len(one), "equal": equal, "largest relative difference": apart}


def profile_of(run: Run) -> list[list[Any]]:
    """One step by operator, shapes and types: calls, microseconds on the device, kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        run.step()
        torch.cuda.synchronize()
    path = Path(f"/tmp/trace.{os.getpid()}.json")
    profiler.export_chrome_trace(str(path))
    return by_operator(json.loads(path.read_text(errors="replace"))["traceEvents"])


def by_operator(events: list[dict[str, Any]]) -> list[list[Any]]:
    """Rows of (operator, shapes, types, numbers, calls, microseconds, kernels), the longest first."""
    operators = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    rows: dict[str, list[Any]] = {}
    seen: dict[str, set[Any]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        number = event.get("args", {}).get("External id")
        operator = operators.get(number, {"name": "?", "args": {}})
        args = operator["args"]
        call = [operator["name"], args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")]
        key = json.dumps(call)
        row = rows.setdefault(key, [*call, 0, 0.0, {}])
        seen.setdefault(key, set()).add(number)
        row[5] += event["dur"]
        kernel = event["name"][:90]
        row[6][kernel] = row[6].get(kernel, 0) + 1
    for key, row in rows.items():
        row[4] = len(seen[key])
    return sorted(rows.values(), key=lambda row: -row[5])


@contextlib.contextmanager
def held(folder: Path, *, alone: bool) -> Iterator[None]:
    """While the device is this process's alone, or shared with others that do not time anything."""
    with (folder / "device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            torch.cuda.synchronize()


def fits(rooms: Mapping[str, float], mine: str, size: float, memory: float) -> bool:
    """Whether `size` bytes fit beside the rooms of all other processes that are alive, 0 for one that waits.

    A process that is too large for that waits until no other has a room.
    """
    others = [taken for process, taken in rooms.items() if process != mine]
    return not any(others) or size + sum(others) + len(others) * OTHER_BYTES <= memory


def taken(folder: Path, size: float) -> bool:
    """Whether this process now has `size` bytes of the device. With 0 it has no room, and is known to be alive."""
    mine, memory = str(os.getpid()), torch.cuda.get_device_properties(0).total_memory
    with (folder / "rooms.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rooms = {pid: held for pid, held in json.loads(file.read() or "{}").items() if Path(f"/proc/{pid}").exists()}
        granted = not size or fits(rooms, mine, size, memory)
        file.truncate(0)
        file.write(json.dumps(rooms | {mine: size if granted else 0.0}))
        return granted


@contextlib.contextmanager
def room(folder: Path, size: float) -> Iterator[None]:
    """While `size` bytes of the device are this process's: it waits until they fit beside the others."""
    while not taken(folder, size):
        time.sleep(0.05)
    try:
        yield
    finally:
        taken(folder, 0.0)


class Findings:
    """The rows of a model, in a file that has each as it comes; those of an earlier call are there."""

    def __init__(self, model: str, folder: Path):
        self._path = folder / f"{model}.json.gz"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._found: dict[str, Any] = {"model": model, "device": device_name(device), "rows": []}
        self._found |= {"torch": torch.__version__, "transformers": transformers.__version__}
        with contextlib.suppress(OSError, EOFError, ValueError), gzip.open(self._path, "rt") as file:
            self._found = json.load(file)
        self.rows: list[dict[str, Any]] = self._found["rows"]

    def row(self, plan: str, *, planned: bool) -> dict[str, Any]:
        return next((row for row in self.rows if (row["plan"], row["planned"]) == (plan, planned)), {})

    @contextlib.contextmanager
    def added(self, row: dict[str, Any]) -> Iterator[None]:
        """Add a row in place of an earlier one. If this process dies it says so; if the process is ended, it goes."""
        self.rows[:] = [one for one in self.rows if (one["plan"], one["planned"]) != (row["plan"], row["planned"])]
        self.rows.append(row | {"failure": ENDED})
        self._save()
        try:
            yield
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:1500] + traceback.format_exc(limit=-6)[-2500:]
        except BaseException:
            self.rows.pop()
            self._save()
            raise
        self.rows[-1] = row
        self._save()

    def _save(self) -> None:
        temporary = self._path.with_suffix(".new")
        with gzip.open(temporary, "wt") as file:
            json.dump(self._found, file)
        temporary.replace(self._path)


def main(model: str, plans: Path, folder: Path) -> int:
    """Measure the untouched step of each form of a model, and each plan after it; returns `CUT` if some are left."""
    folder.mkdir(parents=True, exist_ok=True)
    taken(folder, 0.0)
    if os.environ.get("DETERMINISTIC"):
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # made at run time
    findings = Findings(model, folder)
    known: dict[str, dict[str, Any]] = {}  # of each form that was tried in this process: gradients, if it could train
    for path in sorted(plans.glob(f"{model}.*.plan.json"), key=lambda path: ("45" not in path.name, path.name)):
        if findings.row(path.name, planned=True):
            continue
        plan = Plan.load(path)
        form = json.dumps([plan.about["model_spec"], plan.about.get("accumulation", 1)])
        if "failure" in findings.row(path.name, planned=False):
            known.setdefault(form, {})
        for planned in (False, True):
            if not planned and form in known:
                continue
            if time.time() > until():
                return CUT
            expected = measured_row(findings, folder, path, plan, known.get(form), profiled=not known)
            if not planned:
                known[form] = expected
            print(line_of(model, findings.rows[-1]), flush=True)
    return 0


def measured_row(
    findings: Findings, folder: Path, path: Path, plan: Plan, expected: dict[str, Any] | None, *, profiled: bool
) -> dict[str, Any]:
    """Add the row of a plan, or, where nothing is expected yet, of the untouched step; returns what to expect next."""
    planned = expected is not None
    spec = spec_in(plan.about, path)
    assert spec is not None
    predicted = plan.predicted if planned else plan.without_checkpointing
    row: dict[str, Any] = {"plan": path.name, "planned": planned, "predicted": dict(predicted)}
    row["budget_bytes"] = plan.budget_bytes
    found: dict[str, Any] = {}
    began = time.monotonic()
    with room(folder, 1.06 * predicted["peak_bytes"] + BESIDE_BYTES):
        signal.alarm(ROW_S)
        row["waited_s"] = round(time.monotonic() - began, 2)
        run = None
        with findings.added(row):
            with held(folder, alone=False):
                run = Run(workload_of(spec), plan, planned=planned)
                bits, found = bits_of(run, expected or {}, again=not planned)
            row |= bits
            row["ready_s"] = round(time.monotonic() - began - row["waited_s"], 2)
            with held(folder, alone=True):
                began = time.monotonic()
                row |= measured(run, profiled=profiled)
                row["measured_s"] = round(time.monotonic() - began, 2)
        signal.alarm(0)
        run = None  # and no exception whose frames hold tensors: what is freed here is freed for all processes
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return found


def line_of(model: str, row: dict[str, Any]) -> str:
    name = f"{model} {row['plan'].split('.')[1] if row['planned'] else 'untouched'}"
    if "failure" in row:
        return f"{name}: {row['failure'].splitlines()[0][:300]}"
    predicted, peaks = row["predicted"]["peak_bytes"], row["peaks"]
    bits = row.get("gradients") or row.get("untouched again")
    equal = (
        "{equal}/{parameters} bits {largest relative difference:.1e} {loss equal}; ".format_map(bits) if bits else ""
    )
    return (
        f"{name}: requested {peaks['requested'] / 2**30:.4f} ({100 * (peaks['requested'] / predicted - 1):+.4f} %), "
        f"reserved {peaks['reserved'] / 2**30:.3f}, budget {row['budget_bytes'] / 2**30:.3f}; "
        f"{equal}{row['ms']['median']:.2f} ms (least {min(row['ms']['each']):.2f}, issued {row['ms']['issued']:.2f}, "
        f"predicted {row['predicted']['step_time_us'] / 1e3:.2f}); "
        f"{row['waited_s']}+{row['ready_s']}+{row['measured_s']} s"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
