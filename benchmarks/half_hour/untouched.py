"""A model untouched: three counts of bytes against prediction, times, one step by operator. (Part 3)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.half_hour import observing
from benchmarks.half_hour.observing import History, mib
from benchmarks.half_hour.work import GPT2, Work
from remat.costing.costs import estimated_costs, with_library_workspaces
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.planning.estimate import estimate_of
from remat.planning.profiling import fake_step
from remat.planning.untraced import with_untraced
from remat.recording.recorder import record
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import replayed
from remat.validation.training import Training, release_memory
from remat.workload.target import TARGETS
from remat.workload.workload import Workload

STEPS, FEW_STEPS = 20, 3


def untouched(work: Work) -> None:
    """In one setting of the allocator, which `device.py` gives this process; predicted in the default one only."""
    findings, history = work.findings, History(work.device)
    workload = work.workload("gpt2", GPT2)
    before = findings.step("used before", observing.used_on_device)  # before this process has a context
    history.begin()
    with work.training(workload) as training:
        findings.step("peaks", lambda: _peaks(work, training, history))
        if before is not None and (after := observing.used_on_device()) is not None:
            findings.note("used by this process", after - before)
            findings.say(f"{mib(after - before)} MiB of the device, context and reserved bytes together")
        if work.on_cuda:
            findings.step("history", lambda: _history(work, history))
        steps = STEPS if work.on_cuda else FEW_STEPS
        findings.step("times", lambda: observing.times_of(training.step, work.device, steps))
        findings.step("by operator", lambda: observing.by_operator(training.step, work.device))
    if not observing.allocator_settings():
        findings.step("predicted", lambda: _predicted(work, workload))


def _history(work: Work, history: History) -> dict[str, Any]:
    """The allocator's events, on disk; and simulated, against what the real one did."""
    events = history.end()
    name = f"gpt2{'-expandable' if observing.allocator_settings() else ''}.history.json.gz"
    found = history.save(work.findings.folder / name, events)
    work.findings.step("simulated", lambda: _simulated(work, events))
    return found


def _peaks(work: Work, training: Training, history: History) -> dict[str, Any]:
    """Requested, allocated and reserved in the first two optimizer steps, as on a GPU; above the start on a CPU."""
    found: dict[str, Any] = {"at the start": observing.counts(work.device)}
    for name in ("first step", "second step"):
        history.mark(name)
        release_memory(work.device)
        found[name] = observing.peaks_of(training.update, work.device)
    found["afterwards"] = observing.counts(work.device)
    found["before a step"] = training.bytes_before(work.alignment_bytes)
    text = ", ".join(f"{count} {mib(size)}" for count, size in found["second step"].items())
    work.findings.say(f"{training.workload.name}, second step, MiB: {text}")
    return found


def _simulated(work: Work, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The simulated allocator fed with what the real one was asked for: where its reserved bytes first differ."""
    requests, reserved = observing.requests_of(events)
    settings = AllocatorSettings.parse(observing.allocator_settings())
    simulated = replayed(requests, settings)
    most = max((count.reserved for count in simulated if count is not None), default=0)
    apart, first = 0, None
    for index, (count, real) in enumerate(zip(simulated, reserved, strict=True)):
        if count is None or count.reserved != real:
            apart, first = apart + 1, index if first is None else first
    work.findings.say(
        f"allocator simulated: {len(requests)} events, {apart} with other reserved bytes; "
        f"peak {mib(most)} MiB, real {mib(max(reserved, default=0))}"
    )
    return {"events": len(requests), "different": apart, "first": first, "peak": most, "real": max(reserved, default=0)}


def _predicted(work: Work, workload: Workload) -> dict[str, Any]:
    """Predict without running: recorded for the device at hand, and for its target by name."""
    places = {"recorded here": work.place}
    if work.place.target.name in TARGETS:
        places["recorded for the target"] = find_planning_device(work.place.target.name)
    return {name: _prediction(work, workload, place) for name, place in places.items()}


def _prediction(work: Work, workload: Workload, place: PlanningDevice) -> dict[str, Any]:
    step = fake_step(workload, place)
    graph = with_library_workspaces(record(step, alignment_bytes=place.target.alignment_bytes), place.target)
    costs = estimated_costs(graph, place.target)
    profile = Profile(with_untraced(graph, step, costs, place.target), costs, place.target)
    found = estimate_of(profile)
    peaks = found.peaks
    work.findings.say(
        f"predicted peak {mib(peaks.peak_bytes)} MiB traced, {mib(peaks.eager_bytes or 0)} untraced, first step "
        f"{mib(peaks.first_step_bytes)}, {found.speed.update_time_us / 1e3:.1f} ms"
    )
    kernels = [graph.kinds[kind].name for kind in graph.op_kind[: graph.forward_end].tolist()]
    attention = sorted({kernel for kernel in kernels if "attention" in kernel})
    return {**found.to_json(), "operators": len(graph.op_kind), "attention": attention}
