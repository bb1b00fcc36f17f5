"""remat: activation checkpointing for PyTorch under a memory budget, with a proof.

    plan = remat.plan(workload, budget="20GiB")      # what to recompute, and how far that is from the best
    plan.save("gpt2.plan.json")
    remat.apply(model, "gpt2.plan.json")             # in the training script, before the optimizer is built

Names are loaded when they are first used: all need torch and numpy only. Planning proves more with OR-tools.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.compiled.backend import compile as compile
    from remat.costing.profile import Profile as Profile
    from remat.errors import CaptureError as CaptureError
    from remat.errors import FirstStepMismatch as FirstStepMismatch
    from remat.errors import Infeasible as Infeasible
    from remat.errors import NoPlanInTime as NoPlanInTime
    from remat.errors import PlanMismatch as PlanMismatch
    from remat.errors import RematError as RematError
    from remat.errors import UsageError as UsageError
    from remat.errors import ValidationFailed as ValidationFailed
    from remat.evaluation.plan import Plan as Plan
    from remat.execution.apply import apply as apply
    from remat.execution.apply import remove as remove
    from remat.execution.planned_step import planned_step as planned_step
    from remat.formulation.solution import Limits as Limits
    from remat.host.optimizer_state import offload_optimizer as offload_optimizer
    from remat.host.step_in_backward import step_in_backward as step_in_backward
    from remat.host.weights import bring_weights_back as bring_weights_back
    from remat.host.weights import offload_weights as offload_weights
    from remat.integrations.token_batches import TokenBatches as TokenBatches
    from remat.integrations.trainer_workload import loop_of as loop_of
    from remat.integrations.trainer_workload import workload_of as workload_of
    from remat.planning.checking import Verdict as Verdict
    from remat.planning.checking import check as check
    from remat.planning.comparison import compare as compare
    from remat.planning.estimate import estimate as estimate
    from remat.planning.fit import fit as fit
    from remat.planning.fit import largest_batch as largest_batch
    from remat.planning.fit import longest_sequence as longest_sequence
    from remat.planning.planner import plan as plan
    from remat.planning.profiling import profile as profile
    from remat.planning.request import FormChoice as FormChoice
    from remat.planning.sweep import sweep as sweep
    from remat.planning.token_cap import most_tokens as most_tokens
    from remat.validation.report import Report as Report
    from remat.validation.validating import validate as validate
    from remat.workload.training_loop import TrainingLoop as TrainingLoop
    from remat.workload.workload import Workload as Workload

_NAMES = {
    "remat.compiled.backend": "compile",
    "remat.costing.profile": "Profile",
    "remat.errors": "CaptureError FirstStepMismatch Infeasible NoPlanInTime PlanMismatch RematError UsageError "
    "ValidationFailed",
    "remat.evaluation.plan": "Plan",
    "remat.execution.apply": "apply remove",
    "remat.execution.planned_step": "planned_step",
    "remat.formulation.solution": "Limits",
    "remat.host.optimizer_state": "offload_optimizer",
    "remat.host.step_in_backward": "step_in_backward",
    "remat.host.weights": "bring_weights_back offload_weights",
    "remat.integrations.token_batches": "TokenBatches",
    "remat.integrations.trainer_workload": "loop_of workload_of",
    "remat.planning.checking": "Verdict check",
    "remat.planning.comparison": "compare",
    "remat.planning.estimate": "estimate",
    "remat.planning.fit": "fit largest_batch longest_sequence",
    "remat.planning.planner": "plan",
    "remat.planning.profiling": "profile",
    "remat.planning.request": "FormChoice",
    "remat.planning.sweep": "sweep",
    "remat.planning.token_cap": "most_tokens",
    "remat.validation.report": "Report",
    "remat.validation.validating": "validate",
    "remat.workload.training_loop": "TrainingLoop",
    "remat.workload.workload": "Workload",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _version() -> str:
    """Return the version of the installed package; a checkout that is not installed has none."""
    try:
        return importlib.metadata.version("remat")
    except importlib.metadata.PackageNotFoundError:
        return "0+not.installed"
