"""`remat show`."""

from __future__ import annotations

from remat.commands import Answer
from remat.commands.options import Json, PlanFile
from remat.errors import UsageError


def show(plan: PlanFile, as_json: Json = False) -> Answer:
    """Print a plan: what it promises, its regions, and what each saves."""
    from remat.plans import Plan
    from remat.screen import plan_text, regions_text

    found = Plan.load(plan)
    try:
        text = f"{plan_text(found)}\n\n{regions_text(found)}"
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{plan} is not a complete plan file ({type(error).__name__}: {error}).") from error
    return Answer(found.to_json(), text.rstrip())
