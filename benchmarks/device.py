"""One command for a borrowed GPU: `python -m benchmarks.device FOLDER [--plans FOLDER] [--seconds 450]`.

It needs torch, numpy and transformers, not OR-tools, and writes what it has after every part, so that a call that is
cut off leaves what was done. For each model, at full size on a GPU and at test size on a CPU:

1. the measured profile, as a file to plan from elsewhere
2. the estimate against what the allocator saw in the first two optimizer steps: allocated, reserved, device-wide, with
   and without expandable segments; predicted against measured step time
3. plans by the dynamic program at several budgets, and every plan file that was carried along: validated
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from remat.estimating import estimate
from remat.loop import Loop
from remat.models import TEST_SIZES, build
from remat.planning import Budget, plan_profile
from remat.plans import Plan
from remat.profiling import Place, Profile, fake_step, find_place, profile_step
from remat.solution import Limits
from remat.solvers import load
from remat.training import Training, release_memory, undisturbed
from remat.validating import validate
from remat.workload import Workload

MODELS = ("gpt2", "llama-1b")
SHARES = (0.75, 0.55, 0.4)  # of the way from the least peak to the peak without checkpointing
SETTINGS = {"": "", "expandable_segments": "expandable_segments:True"}  # of CUDA's allocator


def main() -> None:
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.child:
        _print_measured(options)
        return
    run = _Run(options)
    for model in options.models:
        run.part(model, "profile", lambda model=model: run.profile(model))
        for setting in SETTINGS:
            run.part(model, f"estimate {setting}".strip(), lambda m=model, s=setting: run.estimate(m, s))
        for share in SHARES:
            run.part(model, f"plan at {share:.0%}", lambda m=model, s=share: run.plan(m, s))
    for path in sorted(options.plans.glob("*.plan.json")) if options.plans else ():
        run.part(path.stem, "carried plan", lambda path=path: run.carried(path))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write device.json and the profiles")
    parser.add_argument("--plans", type=Path, help="folder of plan files to validate")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin nothing after so long")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _workload(model: str, device: str) -> Workload:
    return TEST_SIZES[model]() if device == "cpu" else build(model)


class _Run:
    """What was found so far, on disk after every part."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.began = options, time.monotonic()
        self.place: Place = find_place(options.device)
        self.profiles: dict[str, Profile] = {}
        self.found: dict[str, Any] = {"about": report.provenance(torch.device(options.device)), "parts": []}

    def part(self, model: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Run one part, whatever becomes of it, unless the time is over."""
        begin = time.monotonic()
        row: dict[str, Any] = {"model": model, "part": name}
        if begin - self.began > self.options.seconds:
            row["skipped"] = "the time was over"
        else:
            try:
                row |= work()
            except Exception as error:  # the parts after it are worth having
                row["error"] = f"{type(error).__name__}: {error}"
                row["traceback"] = traceback.format_exc(limit=-4)
            row["seconds"] = round(time.monotonic() - begin, 1)
        self.found["parts"].append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "traceback"})[:400], flush=True)
        (self.options.folder / "device.json").write_text(json.dumps(self.found, indent=1) + "\n")
        release_memory(torch.device(self.options.device))

    def profile(self, model: str) -> dict[str, Any]:
        workload = _workload(model, self.options.device)
        found = profile_step(fake_step(workload, self.place), self.place)
        self.profiles[model] = found
        path = self.options.folder / f"{model}.profile.json"
        about = {**found.graph.about, "model_spec": {"model": model}}
        dataclasses.replace(found, graph=dataclasses.replace(found.graph, about=about)).save(path)
        about_costs = {key: found.costs.about.get(key) for key in ("library_bytes", "not_measured", "seconds")}
        return {"estimate": estimate(found).to_json(), "kinds": len(found.graph.kinds), "measured": about_costs}

    def estimate(self, model: str, setting: str) -> dict[str, Any]:
        """In a process of its own: the allocator's settings are read once."""
        command = [sys.executable, "-m", "benchmarks.device", str(self.options.folder), "--child", model]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[setting]}
        ran = subprocess.run(
            [*command, "--device", self.options.device], env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"exit {ran.returncode}")
        peaks = estimate(self.profiles[model]).peaks
        predicted = {"first_bytes": peaks.first_step_bytes, "peak_bytes": peaks.peak_bytes}
        predicted["step_time_us"] = round(self.profiles[model].costs.step_time_us(self.profiles[model].graph))
        return {"predicted": predicted, "measured": json.loads(ran.stdout.strip().splitlines()[-1])}

    def plan(self, model: str, share: float) -> dict[str, Any]:
        """A plan by the dynamic program, which needs no OR-tools, run here."""
        found = self.profiles[model]
        from remat.advice import least_peak_of
        from remat.memory import Memory

        most = Memory(found.graph, found.costs.workspace_per_op(found.graph)).peak_without_checkpointing
        least = least_peak_of(found.graph, found.costs)
        limit = round(least + share * (most - least))
        step = fake_step(_workload(model, self.options.device), self.place)
        step.warm_up()
        made = plan_profile(found, Budget(limit, limit), limits=Limits(time_s=30), solver=load("chain-dp"), step=step)
        made.save(self.options.folder / f"{model}.{share:.2f}.plan.json")
        return {"budget_bytes": limit, "predicted": made.predicted, "solver": made.solver, **self._ran(model, made)}

    def carried(self, path: Path) -> dict[str, Any]:
        plan = Plan.load(path)
        return self._ran(plan.about["model_spec"]["model"], plan)

    def _ran(self, model: str, plan: Plan) -> dict[str, Any]:
        about = plan.about
        workload = _workload(model, self.options.device).sized(about["batch_size"], about["seq_len"])
        return {"report": validate(workload, plan, device=self.options.device, repeats=5).to_json()}


def _print_measured(options: argparse.Namespace) -> None:
    """The first two optimizer steps of one model: peaks, what the device lost, and time."""
    device = torch.device(options.device)
    workload = _workload(options.child, options.device)
    alignment_bytes = find_place(options.device).target.alignment_bytes
    found: dict[str, Any] = {}
    with undisturbed(device):
        training = Training(workload, device, 0, Loop())
        training.begin_again()
        found["first_bytes"] = training.peak_of_update(alignment_bytes)
        found["peak_bytes"] = training.peak_of_update(alignment_bytes)
        if device.type == "cuda":
            stats = torch.cuda.memory_stats()
            found["reserved_bytes"] = stats["reserved_bytes.all.peak"]
            found["fragmentation"] = round(1 - stats["allocated_bytes.all.peak"] / stats["reserved_bytes.all.peak"], 4)
            total = torch.cuda.mem_get_info()[1]
            found["device_used_bytes"] = total - torch.cuda.mem_get_info()[0]
        measured, _ = training.measure(alignment_bytes, 5)
        found["step_time_us"] = round(measured.time_us)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
