"""Measured profiles, with every workspace, beside a real step; a peak that is the optimizer's. (Parts 5, 6, 8, 9)"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from benchmarks.half_hour import carried, observing
from benchmarks.half_hour.observing import mib
from benchmarks.half_hour.work import GPT2, LLAMA, Work
from remat.costing.costs import with_library_workspaces
from remat.costing.profile import Profile
from remat.costing.workspaces import FORMULAS, workspace_bytes
from remat.evaluation.evaluator import Memory
from remat.planning.estimate import estimate_of
from remat.planning.profiling import fake_step, profile_step
from remat.recording.recorder import record
from remat.validation.training import release_memory
from remat.workload.optimizers import optimizer_named
from remat.workload.workload import Workload


def profile_of(work: Work, model: str) -> None:
    """`model` is a name, or a name and a dtype policy: `gpt2:fp32`."""
    name, _, policy = model.partition(":")
    workload = work.workload(name, {"gpt2": GPT2, "llama-1b": LLAMA}.get(name))
    if policy:
        workload = workload.with_dtype(policy)  # type: ignore[arg-type]
    found = profile_step(fake_step(workload, work.place), work.place)
    about = {**found.graph.about, "model_spec": {"model": name, **({"dtype": policy} if policy else {})}}
    file = work.findings.folder / f"{model.replace(':', '-')}.profile.json"
    dataclasses.replace(found, graph=dataclasses.replace(found.graph, about=about)).save(file)
    work.findings.note("costs", {**found.costs.about, "file": file.name, "kinds": len(found.graph.kinds)})
    work.findings.note("workspaces", _workspaces(work, found))
    work.findings.note("estimate", estimate_of(found).to_json())
    missing = found.costs.about["not_measured"]
    work.findings.say(
        f"{len(found.graph.kinds)} kinds, {len(missing)} not measured: {sorted({k['op'] for k in missing})}"
    )
    work.findings.step("step", lambda: _step_beside(work, workload, found))


def _workspaces(work: Work, profile: Profile) -> list[dict[str, Any]]:
    """Every kind that needs bytes of its own, or should by its formula, the largest first."""
    counts = np.bincount(profile.graph.op_kind, minlength=len(profile.graph.kinds))
    rows = zip(profile.graph.kinds, profile.costs.workspace_bytes, profile.costs.time_us, counts.tolist(), strict=True)
    found = []
    for kind, size, time_us, count in rows:
        formula = workspace_bytes(kind, work.place.target) if kind.name in FORMULAS and work.on_cuda else None
        if size or formula:
            row = {"op": kind.name, "signature": kind.signature, "time_us": time_us, "count": count}
            found.append({**row, "workspace_bytes": size, "formula_bytes": formula})
        if formula is not None:
            work.findings.say(f"{kind.name}: {mib(size)} MiB of its own, {mib(formula)} by formula")
    return sorted(found, key=lambda row: -row["workspace_bytes"])


def _step_beside(work: Work, workload: Workload, profile: Profile) -> dict[str, Any]:
    """A real step beside the sum of its operators, and beside the peak that the profile promises."""
    with work.training(workload) as training:
        training.update()
        peaks = observing.peaks_of(training.update, work.device)
        before = training.bytes_before(work.alignment_bytes)
        times = observing.times_of(training.step, work.device, 5)
    predicted = estimate_of(profile).peaks.peak_bytes
    total_us = profile.costs.step_time_us(profile.graph)
    allocated = peaks["allocated"] + (0 if work.on_cuda else before)
    work.findings.say(
        f"step {times['median_us'] / 1e3:.2f} ms, sum of its operators {total_us / 1e3:.2f}; "
        f"peak allocated {mib(allocated)} MiB, predicted {mib(predicted)}"
    )
    return {"peaks": peaks, "before": before, "times": times, "sum_us": total_us, "predicted_bytes": predicted}


def optimizer_peak(work: Work) -> None:
    model, size = ("gpt2-large", (1, 64)) if work.on_cuda else ("gpt2", (1, 16))
    base = carried.workload_of(model, work.device, size).sized(*size)
    for form in ("adamw" if work.on_cuda else "adamw:foreach", "adamw:fused", "adamw:single"):
        workload = dataclasses.replace(base, optimizer=optimizer_named(form))
        work.findings.step(form, functools.partial(_optimizer_step, work, workload, form))


def _optimizer_step(work: Work, workload: Workload, form: str) -> dict[str, Any]:
    recorded = record(fake_step(workload, work.place), alignment_bytes=work.alignment_bytes)
    graph = with_library_workspaces(recorded, work.place.target)
    curve = Memory(graph).curve(())
    with work.training(workload) as training:
        training.update()
        release_memory(work.device)
        before = training.bytes_before(work.alignment_bytes)
        peaks = observing.peaks_of(training.update, work.device)
    measured = peaks["requested"] if work.on_cuda else peaks["allocated"] + before
    in_optimizer = bool(curve.op[curve.peak_at] >= graph.backward_end)
    work.findings.say(
        f"{form}: {mib(measured)} MiB, {mib(curve.peak_bytes)} predicted, "
        f"{'in the optimizer' if in_optimizer else 'before the optimizer'}"
    )
    release_memory(work.device)
    return {"peaks": peaks, "before": before, "predicted": curve.peak_bytes, "in the optimizer": in_optimizer}
