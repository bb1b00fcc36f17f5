"""Material: what a report is made of, and which command wrote a JSON document that is handed to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Offload, Plan, Region
from remat.planning.advice import Lever

Kind = Literal["plan", "profile", "sweep", "comparison", "validation", "timeline"]

KEYS: dict[Kind, frozenset[str]] = {  # by which the documents of commands are known
    "sweep": frozenset({"points", "others", "without_checkpointing"}),
    "comparison": frozenset({"rows", "budget_bytes", "without_checkpointing"}),
    "validation": frozenset({"measured", "predicted", "untouched", "passed"}),
    "timeline": frozenset({"time_us", "parts", "phases"}),
}
FORMATS: dict[str, Kind] = {"remat-plan": "plan", "remat-profile": "profile"}
MADE_BY: dict[Kind, str] = {
    "sweep": "remat sweep --out FILE",
    "comparison": "remat compare --json",
    "validation": "remat validate --json",
    "timeline": "remat timeline --measure --json",
}


@dataclasses.dataclass(frozen=True)
class Material:
    """The documents of one step that a report shows.

    plan        None for a report of the step as it is
    others      more plans for the same step, by the name of their file
    profile     the step itself, in the form that the plan runs it; None if it cannot be recorded here
    regions, offloads  of the plan, in the graph of `profile`
    sweep, comparison, validation, timeline  documents that commands wrote; None if there is none
    levers      of `advise`; None if they were not asked for
    """

    plan: Plan | None = None
    others: tuple[tuple[str, Plan], ...] = ()
    profile: Profile | None = None
    regions: tuple[Region, ...] = ()
    offloads: tuple[Offload, ...] = ()
    sweep: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    validation: Mapping[str, Any] | None = None
    timeline: Mapping[str, Any] | None = None
    levers: Sequence[Lever] | None = None

    @property
    def memory(self) -> Memory:
        """The evaluator of the step under the plan."""
        assert self.profile is not None
        graph = self.profile.graph
        return Memory(graph, self.profile.costs.workspace_per_op(graph)).offloading(self.offloads)

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that the plan's offloads take."""
        return self.plan.host_bytes if self.plan is not None else 0

    @property
    def about(self) -> dict[str, Any]:
        """Facts about the step: workload, batch size, precision, versions."""
        if self.plan is not None:
            return self.plan.about
        assert self.profile is not None
        return self.profile.graph.about

    @property
    def target(self) -> str:
        if self.plan is not None:
            return self.plan.target
        assert self.profile is not None
        return self.profile.target.name

    @property
    def costs(self) -> str:
        """The source of the costs: "measured" or "estimated"."""
        if self.plan is not None:
            return self.plan.costs
        assert self.profile is not None
        return self.profile.costs.source


def kind_of(document: object, where: str) -> Kind:
    """Return the kind of `document`, by the command that wrote it.

    Raises UsageError for a document that a report cannot show.
    """
    if isinstance(document, dict):
        if (form := document.get("format")) in FORMATS:
            return FORMATS[form]
        for kind, keys in KEYS.items():
            if keys <= document.keys():
                return kind
    known = ", ".join(f"`{command}`" for command in MADE_BY.values())
    raise UsageError(f"{where} is neither a plan nor a profile, nor what {known} writes.")


def require_same_step(material: Material, kind: Kind, document: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a document is about another step than the plan."""
    if kind == "validation":  # it names device and batch of the run, which may be smaller than planned
        return
    wanted = {"model": material.about["workload"], "target": material.target}
    for name, value in wanted.items():
        if document.get(name) != value:
            raise UsageError(
                f"{where} is of {name} {document.get(name)}, and the plan of {value}; a report is about one step."
            )
    if material.plan is None or kind == "timeline":
        return
    own, other = material.plan.without_checkpointing, document["without_checkpointing"]
    if own["peak_bytes"] != other.get("peak_bytes"):
        raise UsageError(
            f"{where} is of another step than the plan: without checkpointing one needs {other.get('peak_bytes')} "
            f"bytes, the other {own['peak_bytes']}. Batch, precision, optimizer and loop must be the same."
        )
