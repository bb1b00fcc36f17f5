"""Cards: what the ready-made language models need, and up to which length they fit 24, 40 and 80 GiB.

One sample a batch, on an H100's kernels and costs, whatever the card's size. Trained in three ways: fully, with
weights, gradients and AdamW's state in bf16; by LoRA (r=16), frozen weights in bf16, adapters and their state in
fp32, under bf16 autocast; and by QLoRA, where the linear layers' frozen weights are in 4 bits (nf4). For each of
`LENGTHS` the step is recorded and two peaks are found: without checkpointing, and the least of any plan, its loss in
16 slices where it can be cut. Both are bytes requested, as a budget is; what the allocator reserves on top is not
counted.

The longest sequence that fits a card is read off between two recorded lengths, a multiple of 256. There the peak is
taken for linear in the length. Where attention is not fused it grows faster, so a little more would fit, never less.
The longest recorded length is 65,536, or as many positions as the model has: there it means at least that. 0 means
that 1,024 do not fit. A row ends where parameters, gradients and optimizer state alone exceed the largest card.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import RematError
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import build
from remat.models.adapters import Lora, with_lora
from remat.models.quantized import quantized
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import Study
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.workload.workload import Workload

MODELS = (
    "llama-1b",
    "llama-8b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "gpt-oss-20b",
    "gemma-3-1b",
    "qwen3-vl-4b",
    "mistral-7b",
    "nemotron-3-nano",
    "phi-4",
    "glm-4.7-flash",
)
CARDS_GIB = (24, 40, 80)
LENGTHS, STEP = (1024, 8192, 65536), 256
WAYS = ("LoRA", "QLoRA", "fully")
MOST = {"qwen3.5-9b": 8192}  # its delta rule in torch's own operators is a loop over pieces of 64 tokens
BF16_ADAMW = 8  # bytes a parameter: itself, its gradient, two moments
PLENTY, SEARCH_S = 1 << 62, 20
COLUMNS = ["model", "parameters", "positions", "trained"] + [
    f"{which}_at_{n}" for n in LENGTHS for which in ("peak", "least")
]
COLUMNS += [f"{how}_{card}" for card in CARDS_GIB for how in ("without", "planned")] + ["cpu_s", "failure"]


def main(*names: str) -> None:
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    path, about = report.stem("_".join(["cards", *names]), cpu), report.provenance(cpu)
    for name in names or MODELS:
        for how in WAYS:
            rows.append({"model": name, "trained": how, **row_of(name, how)})
            print(rows[-1], file=sys.stderr, flush=True)
            report.write(path, about, rows, COLUMNS)  # so far


def row_of(name: str, how: str) -> dict[str, Any]:
    started = time.process_time()
    workload = trained(build(name), how)
    with torch.device("meta"):
        model: Any = build(name).build()
    parameters, most = sum(p.numel() for p in model.parameters()), MOST.get(name, positions_of(model))
    row: dict[str, Any] = {"parameters": parameters, "positions": most}
    if how == "fully" and parameters * BF16_ADAMW > CARDS_GIB[-1] * GIB:
        states = f"states alone take {parameters * BF16_ADAMW / GIB:.0f} GiB"
        return {
            **row,
            **{f"{each}_{card}": 0 for card in CARDS_GIB for each in ("without", "planned")},
            "failure": states,
        }
    peaks: dict[int, tuple[int, int]] = {}
    try:
        for named in LENGTHS:
            length = min(named, most)
            if length not in peaks and (not peaks or min(peaks[max(peaks)]) <= CARDS_GIB[-1] * GIB):
                peaks[length] = peaks_of(workload.sized(1, length))
                row |= {f"peak_at_{named}": _gib(peaks[length][0]), f"least_at_{named}": _gib(peaks[length][1])}
        for card in CARDS_GIB:
            for which, each in enumerate(("without", "planned")):
                row[f"{each}_{card}"] = longest({n: found[which] for n, found in peaks.items()}, card * GIB)
    except (RematError, RuntimeError) as error:
        row["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
    return {**row, "cpu_s": round(time.process_time() - started, 1)}


def positions_of(model: Any) -> int:
    """The longest sequence that a model has positions for."""
    config = getattr(model.config, "text_config", model.config)
    return int(config.max_position_embeddings)


def trained(workload: Workload, how: str) -> Workload:
    """`workload`, trained in one of `WAYS`."""
    if how == "fully":
        return workload.with_dtype("bf16")
    return with_lora(workload, Lora(16)) if how == "LoRA" else with_lora(quantized(workload, "nf4"), Lora(16), None)


def longest(peaks: dict[int, int], limit_bytes: int) -> int:
    """The longest sequence whose peak is within the limit, by straight lines between the recorded lengths."""
    fitting = [length for length, peak in peaks.items() if peak <= limit_bytes]
    beyond = [length for length, peak in peaks.items() if peak > limit_bytes]
    if not fitting or not beyond:
        return max(fitting, default=0)
    low, high = max(fitting), min(beyond)
    share = (limit_bytes - peaks[low]) / (peaks[high] - peaks[low])
    return int(low + share * (high - low)) // STEP * STEP


def peaks_of(workload: Workload) -> tuple[int, int]:
    """The peaks of a step without checkpointing, and under the plan that needs least."""
    place = find_planning_device("h100-80gb")
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    study = Study(profile, step=step)
    forms, slices = study.forms, max(study.request.forms.slices)
    least = forms.in_slices(slices).profile if forms is not None and forms.are_losses else profile
    torch._dynamo.reset()
    return _problem(profile).memory.peak_without_checkpointing, least_peak(
        _problem(least), Limits(time_s=SEARCH_S)
    ).peak_bytes


def _problem(profile: Profile) -> Problem:
    return Problem(profile.graph, profile.costs, find_space(profile.graph), PLENTY)


def _gib(size_bytes: int) -> float:
    return round(size_bytes / GIB, 2)
