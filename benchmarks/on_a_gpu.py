"""Plans made beforehand, trained on the GPU at hand as a user trains: bytes, bits and times of a model's steps.

    python benchmarks/on_a_gpu.py MODEL PLANS FOLDER      writes FOLDER/MODEL.json

PLANS holds MODEL.*.plan.json. The model is trained untouched and under each plan, in a plain loop: the peaks are
PyTorch's allocator's in the third step, gradients are compared with those of the untouched step, and steps are timed by
CUDA's events. One untouched step is profiled: times by operator and shapes. Several may run at once: while
one is timed, the others wait.

DETERMINISTIC=1 asks PyTorch for deterministic kernels, so that gradients can be compared to the bit where its fastest
kernels add in any order.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import gzip
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import remat
from benchmarks.bare import make_importable

make_importable()

from remat.cli.commands.files import spec_in  # noqa: E402
from remat.cli.commands.source import workload_of  # noqa: E402
from remat.evaluation.plan import Plan  # noqa: E402
from remat.workload.workload import Workload, trainable  # noqa: E402

WARM_UP, TIMED = 2, 6
MOST_BYTES = 73 << 30  # of the device, for all processes together
BESIDE_BYTES = 2 << 30  # a context, and what is reserved and not used
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
        if planned and (on_host := about.get("weights_on_host", 0)):
            remat.offload_weights(self.model, on_host, "cuda")
        if planned:
            remat.apply(self.model, plan)
        self.optimizer = workload.optimizer(trainable(self.model)) if workload.optimizer else None
        if planned and (about.get("offload_optimizer") or about.get("loop", {}).get("offload_optimizer")):
            remat.offload_optimizer(self.optimizer)

    def backward(self) -> float:
        """Forward and backward of one step; returns the last loss."""
        found = 0.0
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

    def step(self) -> Any:
        loss = self.backward()
        self.update()
        return loss

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.detach().cpu() for p in trainable(self.model)]


def bits_of(run: Run, expected: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first step: its gradients beside those of the untouched step; and what the next runs are compared with."""
    found: dict[str, Any] = {}
    torch.manual_seed(1)
    loss = float(run.backward())
    gradients = run.gradients()
    if expected is None:
        run.model.zero_grad()
        torch.manual_seed(1)
        again = float(run.backward())
        found["untouched again"] = compared(gradients, run.gradients()) | {"loss equal": again == loss}
    else:
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
        key = [operator["name"], args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")]
        row = rows.setdefault(json.dumps(key), [*key, 0, 0.0, {}])
        seen.setdefault(json.dumps(key), set()).add(number)
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


@contextlib.contextmanager
def room(folder: Path, size: float) -> Iterator[None]:
    """While `size` bytes of the device are this process's: others wait until they fit beside."""
    mine, name = str(os.getpid()), folder / "rooms.lock"

    def others(change: dict[str, float]) -> bool:
        with name.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            taken = json.loads(file.read() or "{}")
            taken = {pid: held for pid, held in taken.items() if pid != mine and Path(f"/proc/{pid}").exists()}
            fits = not taken or sum(taken.values()) + change.get(mine, 0.0) < MOST_BYTES
            if fits:
                taken |= change
            file.truncate(0)
            file.write(json.dumps(taken))
            return fits

    while not others({mine: size}):
        time.sleep(0.05)
    try:
        yield
    finally:
        others({})


def main(model: str, plans: Path, folder: Path) -> None:
    """Measure the untouched step of each form of a model, and each plan after it."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("DETERMINISTIC"):
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    end = float(os.environ.get("MEASURE_UNTIL", "inf"))
    found: dict[str, Any] = {"model": model, "torch": torch.__version__, "rows": []}
    known: dict[str, dict[str, Any]] = {}
    for path in sorted(plans.glob(f"{model}.*.plan.json"), key=lambda path: ("45" not in path.name, path.name)):
        plan = Plan.load(path)
        spec = spec_in(plan.about, path)
        assert spec is not None
        form = json.dumps([plan.about["model_spec"], plan.about.get("accumulation", 1)])
        for planned in (False, True):
            if (not planned and form in known) or time.time() > end:
                continue
            predicted = plan.predicted if planned else plan.without_checkpointing
            row: dict[str, Any] = {"plan": path.name, "planned": planned, "predicted": dict(predicted)}
            row["budget_bytes"] = plan.budget_bytes
            try:
                began = time.monotonic()
                profiled = not known
                with room(folder, 1.06 * predicted["peak_bytes"] + BESIDE_BYTES):
                    row["waited_s"] = round(time.monotonic() - began, 2)
                    try:
                        with held(folder, alone=False):
                            run = Run(workload_of(spec), plan, planned=planned)
                            bits, expected = bits_of(run, known.get(form) if planned else None)
                        row |= bits
                        known.setdefault(form, expected)
                        row["ready_s"] = round(time.monotonic() - began - row["waited_s"], 2)
                        with held(folder, alone=True):
                            began = time.monotonic()
                            row |= measured(run, profiled=profiled)
                            row["measured_s"] = round(time.monotonic() - began, 2)
                    finally:
                        run = None
                        gc.collect()
                        torch._dynamo.reset()
                        torch.cuda.empty_cache()
            except Exception as error:
                row["failure"] = f"{type(error).__name__}: {error}"[:1500] + traceback.format_exc(limit=-6)[-2500:]
                if not planned:
                    known[form] = {}
            found["rows"].append(row)
            with gzip.open(folder / f"{model}.json.gz", "wt") as file:
                json.dump(found, file)
            print(line_of(model, row), flush=True)


def line_of(model: str, row: dict[str, Any]) -> str:
    name = f"{model} {row['plan'].split('.')[1] if row['planned'] else 'untouched'}"
    if "failure" in row:
        return f"{name}: {row['failure'].splitlines()[0][:300]}"
    predicted, peaks = row["predicted"]["peak_bytes"], row["peaks"]
    bits = row.get("gradients") or row["untouched again"]
    return (
        f"{name}: requested {peaks['requested'] / 2**30:.4f} ({100 * (peaks['requested'] / predicted - 1):+.4f} %), "
        f"reserved {peaks['reserved'] / 2**30:.3f}, budget {row['budget_bytes'] / 2**30:.3f}; "
        f"{bits['equal']}/{bits['parameters']} bits {bits['largest relative difference']:.1e} {bits['loss equal']}; "
        f"{row['ms']['median']:.2f} ms (least {min(row['ms']['each']):.2f}, issued {row['ms']['issued']:.2f}, "
        f"predicted {row['predicted']['step_time_us'] / 1e3:.2f}); "
        f"{row['waited_s']}+{row['ready_s']}+{row['measured_s']} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
