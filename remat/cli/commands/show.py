"""`remat show`."""

from __future__ import annotations

from remat.cli.commands import Answer
from remat.cli.commands.options import Json, PlanFile
from remat.errors import UsageError


def show(plan: PlanFile, as_json: Json = False) -> Answer:
    """Print a plan: its prediction, its regions with their saves, and its offloads."""
    from remat.cli.screen import offloads_text, plan_text, regions_text
    from remat.evaluation.plan import Plan

    found = Plan.load(plan)
    try:
        text = f"{plan_text(found)}\n\n{regions_text(found)}\n\n{offloads_text(found)}"
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{plan} is not a complete plan file ({type(error).__name__}: {error}).") from error
    return Answer(found.to_json(), text.rstrip())
