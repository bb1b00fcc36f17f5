"""Estimates against what the allocator saw: whole optimizer steps, the first and the second, accumulated over 1 and 4.

Every workload with several optimizers, at test size on the CPU, at full size on a GPU. What a person would run is run:
all micro-batches of an optimizer step, its optimizer, gradients let go. Predictions are made before anything runs.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.models import build
from remat.planning.estimate import estimate_of
from remat.planning.profiling import fake_step, profile_step
from remat.units import MIB
from remat.validation.training import Training, release_memory, undisturbed
from remat.workload.optimizers import optimizer_named
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES

OPTIMIZERS = ("adamw", "adamw:fused", "sgd", "adafactor")
ACCUMULATIONS = (1, 4)
COLUMNS = [
    "model",
    "optimizer",
    "accumulation",
    "first_predicted_mib",
    "first_measured_mib",
    "first_error_percent",
    "predicted_mib",
    "measured_mib",
    "error_percent",
]


def main(*models: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = report.stem("estimates", device)
    about = report.provenance(device)
    rows: list[dict[str, Any]] = []
    for model in models or TEST_SIZES:
        for optimizer in OPTIMIZERS:
            workload = TEST_SIZES[model]() if device.type == "cpu" else build(model)
            workload = dataclasses.replace(workload, optimizer=optimizer_named(optimizer))
            for accumulation in ACCUMULATIONS:
                row = {"model": model, "optimizer": optimizer, "accumulation": accumulation}
                rows.append(
                    {
                        **row,
                        **compare(workload, find_planning_device(device.type), TrainingLoop(accumulation=accumulation)),
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
                report.write(path, {**about, **summary(rows)}, rows, COLUMNS)
        torch._dynamo.reset()


def compare(workload: Workload, place: PlanningDevice, loop: TrainingLoop) -> dict[str, Any]:
    """Predicted and measured peaks of the first two optimizer steps, in MiB, and by how much they differ."""
    assert place.device is not None
    step = fake_step(workload, place, loop=loop)
    peaks = estimate_of(profile_step(step, place)).peaks
    assert peaks.eager_bytes is not None  # what runs below is not traced
    first_step_bytes = peaks.first_step_bytes + peaks.eager_bytes - peaks.peak_bytes
    with undisturbed(place.device):
        training = Training(workload, place.device, 0, loop)
        training.begin_again()
        first = training.peak_of_update(place.target.alignment_bytes)
        second = training.peak_of_update(place.target.alignment_bytes)
        del training
        release_memory(place.device)
    return {
        "first_predicted_mib": _mib(first_step_bytes),
        "first_measured_mib": _mib(first),
        "first_error_percent": _percent(first_step_bytes, first),
        "predicted_mib": _mib(peaks.eager_bytes),
        "measured_mib": _mib(second),
        "error_percent": _percent(peaks.eager_bytes, second),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row[name]) for row in rows for name in ("error_percent", "first_error_percent")]
    return {
        "rows": len(rows),
        "largest error, percent": max(errors),
        "within 0.5 percent": sum(error <= 0.5 for error in errors),
        "of": len(errors),
        "predicted below measured": sum(
            row[f"{step}predicted_mib"] < row[f"{step}measured_mib"] for row in rows for step in ("", "first_")
        ),
    }


def _mib(size: int) -> float:
    return round(size / MIB, 3)


def _percent(predicted: int, measured: int) -> float:
    return round(100 * (predicted / measured - 1), 4)
