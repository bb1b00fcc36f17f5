"""Heading: what every table of plans says first."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat.planning.study import Study
from remat.shown import Shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading(Shown):
    """The heading of a table of plans: step, target, source of costs, and the step without a plan."""

    about: dict[str, Any]
    target: str
    costs: str
    without_checkpointing: dict[str, Any]
    execution: str

    @staticmethod
    def fields_of(study: Study) -> dict[str, Any]:
        profile = study.profile
        return {
            "about": profile.graph.about,
            "target": profile.target.name,
            "costs": profile.costs.source,
            "without_checkpointing": study.without_checkpointing(),
            "execution": study.how.name,
        }

    def heading_json(self) -> dict[str, Any]:
        return {
            "model": self.about["workload"],
            "target": self.target,
            "costs": self.costs,
            "without_checkpointing": self.without_checkpointing,
            "execution": self.execution,
        }
