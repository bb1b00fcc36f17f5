"""The inputs of every part of the half hour: the device, the plans carried along, a place for findings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.half_hour import carried
from benchmarks.half_hour.findings import Findings
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.validation.training import Training, undisturbed
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

GPT2, LLAMA = carried.CARRIED["gpt2"][:2], carried.CARRIED["llama-1b"][:2]  # batch and sequence


@dataclasses.dataclass(frozen=True)
class Work:
    """Where a part runs, where the plans carried along lie, and where its findings go."""

    device: torch.device
    plans: Path
    findings: Findings

    @functools.cached_property
    def place(self) -> PlanningDevice:
        return find_planning_device(self.device.type)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def alignment_bytes(self) -> int:
        return self.place.target.alignment_bytes

    def workload(self, model: str, size: tuple[int, int] | None = None) -> Workload:
        return carried.workload_of(model, self.device, size)

    @contextlib.contextmanager
    def training(self, workload: Workload) -> Iterator[Training]:
        with undisturbed(self.device):
            training = Training(workload, self.device, 0, TrainingLoop())
            training.begin_again()
            yield training
