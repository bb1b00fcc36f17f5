"""remat: activation checkpointing for PyTorch under a memory budget, with a proof.

    plan = remat.plan(workload, budget="20GiB")      # what to recompute, and how far that is from the best
    plan.save("gpt2.plan.json")
    remat.apply(model, "gpt2.plan.json")             # in the training script, before the optimizer is built

Names are loaded when they are first used: all need torch and numpy only. Planning proves more with OR-tools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.applying import apply, remove
    from remat.errors import CaptureError, Infeasible, PlanMismatch, RematError, UsageError
    from remat.loop import Loop
    from remat.planning import plan
    from remat.plans import Plan
    from remat.profiling import Profile, profile
    from remat.validating import validate
    from remat.workload import Workload

__version__ = "0.1.0"

_HOMES = {
    "CaptureError": "remat.errors",
    "Infeasible": "remat.errors",
    "Loop": "remat.loop",
    "Plan": "remat.plans",
    "PlanMismatch": "remat.errors",
    "Profile": "remat.profiling",
    "RematError": "remat.errors",
    "UsageError": "remat.errors",
    "Workload": "remat.workload",
    "apply": "remat.applying",
    "plan": "remat.planning",
    "profile": "remat.profiling",
    "remove": "remat.applying",
    "validate": "remat.validating",
}

__all__ = [
    "CaptureError",
    "Infeasible",
    "Loop",
    "Plan",
    "PlanMismatch",
    "Profile",
    "RematError",
    "UsageError",
    "Workload",
    "apply",
    "plan",
    "profile",
    "remove",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
