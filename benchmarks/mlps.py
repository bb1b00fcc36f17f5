"""MLPs in slices: the least that plans need with them and without, the loss in 16 slices already; estimated.

`at_once` is the step without checkpointing, `whole` the least of plans that cut nothing, `loss` of those whose loss
is in slices, `mlps` of those whose MLPs are too; `added_percent` is what the last take longer without recomputing
anything else.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks import report
from benchmarks.cards import trained
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import Study
from remat.solvers.least_peak import least_peak
from remat.units import GIB

TARGET, TIME_S = "h100-80gb", 30.0
CASES = (
    ("gpt2", "as it is", 24, 1024),
    ("llama-1b", "LoRA", 1, 8192),
    ("llama-1b", "LoRA", 1, 65536),
    ("llama-8b", "LoRA", 1, 8192),
    ("llama-8b", "LoRA", 1, 65536),
)
COLUMNS = ["model", "trained", "batch", "at_once", "whole", "loss", "mlps", "form", "added_percent", "cpu_s"]


def main() -> None:
    rows: list[dict[str, Any]] = []
    path, place = report.stem("mlps", torch.device("cpu")), find_planning_device(TARGET)
    about = {**report.provenance(torch.device("cpu")), "target": TARGET, "costs": "estimated"}
    for name, how, samples, length in CASES:
        started = time.process_time()
        workload = build(name) if how == "as it is" else trained(build(name), how)
        step = fake_step(workload.sized(samples, length), place)
        profile = profile_step(step, place)
        study = Study(profile, step=step)
        assert study.forms is not None
        cut = list(study.forms.with_rows())[-1]
        row = {
            "model": name,
            "trained": how,
            "batch": f"{samples} x {length}",
            "at_once": round(profile.peak_without_checkpointing / GIB, 2),
            "whole": _least(profile),
            "loss": _least(study.forms.in_slices(max(study.request.forms.slices)).profile),
            "mlps": _least(cut.profile),
            "form": str(cut.form),
            "added_percent": round(100 * cut.extra_us / study.step_time_us, 1),
            "cpu_s": round(time.process_time() - started, 1),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        report.write(path, about, rows, COLUMNS)  # so far
        torch._dynamo.reset()


def _least(profile: Profile) -> float:
    """In GiB."""
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)
    return round(least_peak(problem, Limits(time_s=TIME_S)).peak_bytes / GIB, 2)
