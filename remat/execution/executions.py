"""The table of executions: a seventh is a folder and two lines here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.execution.base import Execution
    from remat.execution.planned_forward import PlannedForward

EAGER = "eager"

# By name: the module of the `Execution`, under that name in its `EXECUTIONS`.
_EXECUTIONS = {
    EAGER: "remat.execution.eager.execution",
    "modules": "remat.execution.modules.execution",
    "inductor": "remat.execution.compiled.execution",
    "aot_eager": "remat.execution.compiled.execution",
}
# By name: the class that runs it in training, which loads nothing that judges a plan.
_EXECUTORS = {
    EAGER: "remat.execution.planned_forward:PlannedForward",
    "modules": "remat.execution.modules.regions:PlannedModules",
    "inductor": "remat.execution.planned_forward:PlannedForward",
    "aot_eager": "remat.execution.planned_forward:PlannedForward",
}
NAMES = tuple(_EXECUTIONS)


def load(name: str) -> Execution:
    """Load the execution `name`. Raises UsageError if it is unknown."""
    found: Execution = importlib.import_module(_EXECUTIONS[_known(name)]).EXECUTIONS[name]
    return found


def executor(name: str) -> type[PlannedForward]:
    """Return the class that runs a model's forward under a plan for `name`.

    Raises UsageError for an unknown name.
    """
    module, _, attribute = _EXECUTORS[_known(name)].partition(":")
    found: type[PlannedForward] = getattr(importlib.import_module(module), attribute)
    return found


def _known(name: str) -> str:
    if name not in _EXECUTIONS:
        raise UsageError(f"execution {name!r} is not known; choose {', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    return name
