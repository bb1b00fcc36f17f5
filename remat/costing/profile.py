"""A Profile: a Graph with its Costs, as a file. A GPU machine measures it; any machine solves it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from remat.costing.costs import Costs
from remat.costing.host_time import host_time_us
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.files import read_json, write_atomically
from remat.shown import Shown
from remat.units import gib, ms
from remat.workload.target import Target

FORMAT = "remat-profile"
VERSION = 3  # 2: outputs held by the loop, 3: backwards within the forward; an older remat would not count them


@dataclasses.dataclass(frozen=True)
class Profile(Shown):
    """A recorded step and its costs on `target`.

    Attributes:
        graph: The recorded step.
        costs: Time and workspace of its operators.
        target: The device.
        whole: The graph as recorded, if `graph` is one rank's share of it; not part of the file.

    Raises:
        UsageError: `load` finds no complete profile file.

    Example:
        >>> profile = remat.Profile.load("gpt2.profile.json")
        >>> profile.peak_without_checkpointing
    """

    graph: Graph
    costs: Costs
    target: Target
    whole: Graph | None = None

    @property
    def _title(self) -> str:
        return f"Profile of {self.graph.about.get('workload')} on {self.target.name}, costs {self.costs.source}"

    @property
    def _shown(self) -> list[tuple[str, str]]:
        graph = self.graph
        return [
            ("peak without checkpointing", gib(self.peak_without_checkpointing)),
            ("step time", ms(self.step_time_us)),
            ("recorded", f"{len(graph.nodes)} nodes, {graph.op_count} operators of {len(graph.kinds)} kinds"),
        ]

    @property
    def peak_without_checkpointing(self) -> int:
        """Peak bytes of the step without a plan."""
        return Memory(self.graph, self.costs.workspace_per_op(self.graph)).peak_without_checkpointing

    @property
    def step_time_us(self) -> float:
        """Time of the step without a plan as Python runs it: the device's or the host's, whichever is longer."""
        return max(self.costs.step_time_us(self.graph), self.host_time_us(Memory(self.graph)))

    def device_time_us(
        self, memory: Memory, regions: Sequence[Region] = (), micro_batches: int = 1, waited_us: float = 0.0
    ) -> float:
        """Return the time to run an optimizer step on the device, each micro-batch waiting so long for copies."""
        again_us = memory.recompute_time_us(regions, self.costs.per_op_us(self.graph)) if regions else 0.0
        return self.costs.update_time_us(self.graph, micro_batches, again_us + waited_us)

    def host_time_us(self, memory: Memory, regions: Sequence[Region] = (), micro_batches: int = 1) -> float:
        """Return the time to launch an optimizer step from Python; 0 if costs were measured, and off CUDA."""
        if self.costs.source != "estimated":
            return 0.0
        return host_time_us(memory, self.target, regions, micro_batches)

    def workspace_of(self) -> dict[tuple[str, str], int]:
        """Return the workspaces by operator and signature, for a replay."""
        return self.costs.workspace_of(self.graph)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile file atomically."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "target": dataclasses.asdict(self.target),
            "costs": self.costs.to_json(),
            "graph": self.graph.to_json(),
        }
        write_atomically(Path(path), json.dumps(data) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile file. Raises `UsageError` if it is missing, corrupt or of a newer version."""
        data = read_json(Path(path), FORMAT, VERSION, "profile")
        try:
            return Profile(Graph.from_json(data["graph"]), Costs.from_json(data["costs"]), Target(**data["target"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a complete profile ({type(error).__name__}: {error}).") from error
