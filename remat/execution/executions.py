"""The table of executions: a third is a folder and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.execution.base import Execution
    from remat.execution.planned_forward import PlannedForward

EAGER = "eager"

# By name: the module of the `Execution`, which is there under that name in `EXECUTIONS`; and the class that runs it in
# training, which loads nothing that judges a plan.
_EXECUTIONS = {
    EAGER: ("remat.execution.eager.execution", "remat.execution.eager.planned_graphs:PlannedGraphs"),
    "modules": ("remat.execution.modules.execution", "remat.execution.modules.regions:PlannedModules"),
}
NAMES = tuple(_EXECUTIONS)
EARLIER_EXECUTIONS = ("inductor", "aot_eager")  # in plans of earlier versions: compiled steps


def load(name: str) -> Execution:
    """Load the execution `name`. Raises UsageError if it is unknown."""
    require_known(name)
    found: Execution = importlib.import_module(_EXECUTIONS[name][0]).EXECUTIONS[name]
    return found


def executor(name: str) -> type[PlannedForward]:
    """Return the class that runs a model's forward under a plan for `name`.

    Raises UsageError for an unknown name.
    """
    require_known(name)
    module, _, attribute = _EXECUTIONS[name][1].partition(":")
    found: type[PlannedForward] = getattr(importlib.import_module(module), attribute)
    return found


def require_known(name: str) -> None:
    """Raise UsageError if there is no execution `name`."""
    if name in EARLIER_EXECUTIONS:
        raise UsageError(
            f"execution {name!r} is no more: a compiled step is planned where it is compiled. Use "
            "`remat.compile(model, budget=...)` in the training script, without a plan."
        )
    if name not in _EXECUTIONS:
        raise UsageError(f"execution {name!r} is not known; choose {', '.join(NAMES[:-1])} or {NAMES[-1]}.")
