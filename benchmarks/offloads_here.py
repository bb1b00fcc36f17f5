"""Offloads on this CPU: predicted against measured peak of the device's side, and loss and gradients bit by bit.

Every workload family at test size, at three budgets: the least with offloads, the least without, and half way; where
these are the same, from it to half way to the untouched step's peak. On a CPU the host's memory is the device's: what
is offloaded lies outside of torch's allocator, so that what it counts is the device's side. The link, made up, carries
a share `CARRIED` of all that the untouched step keeps while its forward runs.

`bitwise` after 20 steps is of the parameters of a training whose optimizer has its state on the host, beside one whose
optimizer has not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import remat
from benchmarks import report
from benchmarks.main_job import measured
from remat.costing.planning_device import find_planning_device
from remat.errors import RematError
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.validation.training import Training
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import DTypePolicy, Workload
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

POLICIES: tuple[DTypePolicy, ...] = ("fp32", "amp")
CARRIED, HOST_BYTES, STEPS = 0.15, 1 << 34, 20
COLUMNS = ["workload", "dtype", "least_mib", "budget_mib", "host_mib", "predicted_mib", "measured_mib"]
COLUMNS += ["error_percent", "within_budget", "loss_equal", "gradients_equal", "regions", "status", "gap", "wall_s"]
COLUMNS += ["bitwise", "failure"]


def main(*families: str) -> None:
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    path, about = report.stem("_".join(["offloads_here", *families]), cpu), report.provenance(cpu)
    for name in families or TEST_SIZES:
        for dtype in POLICIES:
            for row in _rows(TEST_SIZES[name]().with_dtype(dtype)):
                rows.append({"workload": name, "dtype": dtype, **row})
                print(rows[-1], file=sys.stderr, flush=True)
                report.write(path, about, rows, COLUMNS)  # so far


def _rows(workload: Workload) -> Iterator[dict[str, Any]]:
    place = find_planning_device("cpu")
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    space = find_space(profile.graph)
    alone = Problem(profile.graph, profile.costs, space, 0)
    most = alone.memory.peak_without_checkpointing
    kept_bytes, forward_us = most - profile.graph.fixed_total, alone.step_time_us / 3
    link = Link(CARRIED * kept_bytes / forward_us, HOST_BYTES)
    linked = Problem(profile.graph, profile.costs, space, 0, link)
    least, without = (least_peak(problem, Limits(time_s=20)).peak_bytes for problem in (linked, alone))
    for share in (0.0, 0.5, 1.0):
        budget = int(least + share * (without - least)) if without > least else int(least + share * (most - least) / 2)
        started = time.monotonic()
        row: dict[str, Any] = {"least_mib": round(without / MIB, 2), "budget_mib": round(budget / MIB, 2)}
        try:
            options: dict[str, Any] = {"space": space, "link": link, "exact": True, "limits": Limits(time_s=60)}
            plan = plan_profile(profile, Budget(budget, budget), step=step, **options)
            found, _ = measured(workload, plan, "cpu")
            row |= {**found, "host_mib": round(plan.host_bytes / MIB, 2), "regions": len(plan.regions)}
        except RematError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        yield {**row, "wall_s": round(time.monotonic() - started, 1)}
    yield {"bitwise": _trains_alike(workload)}


def _trains_alike(workload: Workload) -> bool:
    """Whether parameters are the same bits after `STEPS` steps, the optimizer's state on the host and not.

    On one thread: on two, a mixture of experts adds up in another order every time, whatever the plan.
    """
    ends, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for is_offloaded in (False, True):
        training = Training(workload, torch.device("cpu"), 0, TrainingLoop())
        training.begin_again()
        if is_offloaded:
            assert training.finish.optimizer.alone is not None
            remat.offload_optimizer(training.finish.optimizer.alone)
        for _ in range(STEPS):
            training.step()
        ends.append([parameter.detach().clone() for parameter in training.model.parameters()])
    torch.set_num_threads(threads)
    return all(map(torch.equal, *ends))
