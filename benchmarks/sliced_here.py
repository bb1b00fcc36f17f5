"""Slices on this CPU: predicted against measured peak, and promised against found numbers, with losses and MLPs cut.

Every workload family at test size, at three budgets that no plan keeps with all of it whole: the least of all forms,
one just below the least of the captured step, and one in between. So every plan here runs something in slices. A family
of which nothing can be cut says so. `gradients_near` counts the parameters that are summed in slices, `furthest` is the
largest ratio of their distances from float64, `furthest_matrix` that of the ones with two dimensions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import report
from benchmarks.main_job import measured
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import RematError
from remat.evaluation.form import form_of
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import Study
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.workload.workload import DTypePolicy, Workload
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

POLICIES: tuple[DTypePolicy, ...] = ("amp", "fp32")
COLUMNS = ["workload", "dtype", "budget_mib", "form", "predicted_mib", "measured_mib", "error_percent", "within_budget"]
COLUMNS += [
    "loss_equal",
    "gradients_equal",
    "gradients_near",
    "furthest",
    "furthest_matrix",
    "kernels_equal",
    "failure",
]


def main(*families: str) -> None:
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    path, about = report.stem("_".join(["sliced_here", *families]), cpu), report.provenance(cpu)
    for dtype in POLICIES:
        for name in families or TEST_SIZES:
            rows += _rows(name, TEST_SIZES[name]().with_dtype(dtype), dtype)
            report.write(path, about, rows, COLUMNS)  # so far


def _rows(name: str, workload: Workload, dtype: DTypePolicy) -> Iterator[dict[str, Any]]:
    place = find_planning_device("cpu")
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    forms = Study(profile, step=step).forms
    assert forms is not None
    cut = [_least(each.profile) for each in (*forms, *forms.with_rows())]
    whole, least = _least(profile), min(cut, default=0)
    about = {"workload": name, "dtype": dtype}
    if not cut or least > 0.98 * whole:
        yield {**about, "failure": "nothing can be cut" if not cut else "what can be cut is not what takes the memory"}
        return
    for budget in (least, (least + whole) // 2, int(0.99 * whole)):
        started, row = time.monotonic(), {**about, "budget_mib": round(budget / MIB, 2)}
        try:
            plan = plan_profile(profile, Budget(budget, budget), step=step, limits=Limits(time_s=60))
            found, near = measured(workload, plan, "cpu")
            with torch.device("meta"):
                dimensions = {path: p.dim() for path, p in workload.build().named_parameters()}
            matrices = [ratio for path, ratio in near.items() if dimensions[path] > 1]
            row |= {"form": str(form_of(plan.about)), **found, "gradients_near": len(near)}
            row |= {"furthest": _largest(near.values()), "furthest_matrix": _largest(matrices)}
        except RematError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        row["wall_s"] = round(time.monotonic() - started, 1)
        print(row, file=sys.stderr, flush=True)
        yield row


def _least(profile: Profile) -> int:
    """The least that any plan of a form is known to need."""
    return least_peak(Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62), Limits()).peak_bytes


def _largest(ratios: Any) -> float | None:
    found = max(ratios, default=None)
    return None if found is None else round(found, 3)
