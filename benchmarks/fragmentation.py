"""Requested, allocated, reserved: every model at full size on two cards, predicted under both settings.

Each model at the largest micro-batch whose untouched step requests no more than the card can give, then at a third
more, planned three ways: for what is requested alone, for 90 % of the card (the usual rule of thumb), and with `auto`,
which bounds what is reserved. Nothing runs: costs and kernels are those of the target. Models are recorded at two
micro-batches and scaled. `python -m benchmarks.fragmentation [target,target [model ...]]`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime, RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import AllocatorPeaks, Plan
from remat.formulation.solution import Limits
from remat.models import REGISTRY, build
from remat.planning.budget import Budget
from remat.planning.fit import Sizing
from remat.planning.request import PlanRequest
from remat.planning.windows import largest
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.fragmentation import CONTEXT_BYTES, footprints
from remat.solvers import load
from remat.units import MIB
from remat.workload.training_loop import TrainingLoop
from tests.studies import plan_profile

TARGETS = "h100-80gb,rtx4090"
SETTINGS = {"default": "", "expandable": "expandable_segments:True"}
RULE = 0.9  # of the card
PATIENCE = Limits(time_s=3)
COLUMNS = [
    "target",
    "model",
    "micro_batch",
    "plan",
    "overhead_percent",
    "requested_mib",
    "allocated_mib",
    "reserved_mib",
    "reserved_over_requested_percent",
    "expandable_reserved_mib",
    "expandable_over_requested_percent",
    "card_mib",
    "runs_out",
]


def main(targets: str = TARGETS, *models: str) -> None:
    device = torch.device("cpu")
    path, about = report.stem("fragmentation", device), report.provenance(device)
    about["solver"] = f"chain-dp, {PATIENCE.time_s:.0f} s"
    rows: list[dict[str, Any]] = []
    for model in models or REGISTRY:
        for target in targets.split(","):
            started = time.monotonic()
            for row in _rows(model, target):
                rows.append(row)
                print({**row, "wall_s": round(time.monotonic() - started)}, file=sys.stderr, flush=True)
            report.write(path, {**about, **summary(rows)}, rows, COLUMNS)
        torch._dynamo.reset()


def _rows(model: str, target: str) -> list[dict[str, Any]]:
    place = find_planning_device(target)
    card = place.target.memory_bytes - CONTEXT_BYTES
    sizes = Sizing(
        build(model), place, Budget(card, card), TrainingLoop(), PlanRequest(limits=PATIENCE)
    ).micro_batches()
    named = {"target": target, "model": model, "card_mib": card // MIB}
    fixed = sizes.profile(2, False).graph.fixed_total
    if fixed > card:
        return [{**named, "plan": f"states alone are {fixed // MIB} MiB"}]
    one, two = (_memory(sizes.profile(size, False)).peak_without_checkpointing for size in (2, 4))
    guess = max(int(2 + (card - one) / max((two - one) / 2, 1)), 1)
    fits = largest(lambda n: _memory(sizes.profile(n, False)).peak_without_checkpointing <= card, guess=guess)
    rows = []
    if fits:
        profile = sizes.profile(fits, False)
        default, expandable = (each.to_json() for each in footprints(_memory(profile), (), AllocatorSettings()))
        rows.append({**named, "micro_batch": fits, "plan": "untouched", **_told(default, expandable, card)})
    larger = max(fits + 1, fits * 4 // 3)
    profile = sizes.profile(larger, False)
    named["micro_batch"] = larger
    first = _planned(profile, Budget(card, card))
    ruled_bytes = int(RULE * place.target.memory_bytes)
    ruled = _planned(profile, Budget(ruled_bytes, ruled_bytes))
    rows += [{**named, "plan": name, **_row(made, card)} for name, made in (("requested", first), ("90 %", ruled))]
    for name in SETTINGS:
        auto = _planned(profile, Budget(card, card, card), SETTINGS[name])
        rows.append({**named, "plan": f"auto, {name}", **_row(auto, card)})
    return rows


def _memory(profile: Profile) -> Memory:
    return Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))


def _planned(profile: Profile, limit: Budget, settings: str = "") -> Plan | RematError:
    try:
        return plan_profile(profile, limit, limits=PATIENCE, solver=load("chain-dp"), allocator=settings)
    except (Infeasible, NoPlanInTime) as error:
        return error


def _row(made: Plan | RematError, card: int) -> dict[str, Any]:
    if isinstance(made, RematError):
        return {"runs_out": "no plan", "failure": f"{type(made).__name__}: {made}"}
    assumed, other = made.predicted["allocator"]
    default, expandable = (other, assumed) if assumed["settings"] else (assumed, other)
    found = {"overhead_percent": round(100 * made.predicted["overhead"], 1), **_told(default, expandable, card)}
    return {**found, "runs_out": "yes" if assumed["reserved_bytes"] > card else "no"}


def _told(default: AllocatorPeaks, expandable: AllocatorPeaks, card: int) -> dict[str, Any]:
    requested = default["requested_bytes"]
    return {
        "requested_mib": _mib(requested),
        "allocated_mib": _mib(default["allocated_bytes"]),
        "reserved_mib": _mib(default["reserved_bytes"]),
        "reserved_over_requested_percent": _over(default["reserved_bytes"], requested),
        "expandable_reserved_mib": _mib(expandable["reserved_bytes"]),
        "expandable_over_requested_percent": _over(expandable["reserved_bytes"], requested),
        "runs_out": "yes" if default["reserved_bytes"] > card else "no",
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often what is reserved exceeds the card, by how the plan was made."""
    found: dict[str, Any] = {}
    for plan in ("untouched", "requested", "90 %", "auto, default", "auto, expandable"):
        ends = [row["runs_out"] for row in rows if row["plan"] == plan]
        found[f"{plan}: runs out, of steps"] = f"{ends.count('yes')} of {len(ends) - ends.count('no plan')}"
        found[f"{plan}: no plan"] = ends.count("no plan")
    over = [row["reserved_over_requested_percent"] for row in rows if "reserved_mib" in row]
    found["rule of thumb: reserved is 10 % above requested"] = "simulated, default settings: " + (
        f"{min(over)} to {max(over)} %, above 10 % in {sum(each > 10 for each in over)} of {len(over)}" if over else ""
    )
    return found


def _mib(size: int) -> float:
    return round(size / MIB, 1)


def _over(size: int, base: int) -> float:
    return round(100 * (size / base - 1), 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
