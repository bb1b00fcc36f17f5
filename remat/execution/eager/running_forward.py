"""One call of a model under a plan, while it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from remat.capture.attention_masks import Masks
from remat.capture.circumstances import given_to
from remat.capture.dynamo import GraphCalls, element_counts, named_tensors
from remat.capture.model_state import ModelState
from remat.errors import PlanMismatch
from remat.execution.forwards import CurrentForward, ModuleForward


@dataclasses.dataclass
class RunningForward:
    """A call of a model, or of a module of it, under a plan.

    at        the forward that was called        now     the plan's forward that it runs as
    args      its arguments, with `kwargs`       graphs  the graphs that it is traced to
    before    the model's state as it began, where it may complete the model
    mismatch  the error that it will end in
    is_early  whether it is an early forward (`early_forwards.py`)
    is_rehearsed  whether it is only traced, and runs again
    excess    in words: the memory that it needs above the planned; empty if there is none
    unexplained  in words: how its graph differs from the planned one, where nothing else is known to differ
    """

    at: ModuleForward
    now: CurrentForward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graphs: GraphCalls
    before: ModelState | None = None
    mismatch: PlanMismatch | None = None
    is_early: bool = False
    is_rehearsed: bool = False
    excess: str = ""
    unexplained: str = ""

    def let_go(self) -> None:
        """Let go of the arguments, once the forward has returned."""
        self.args, self.kwargs = (), {}

    @property
    def given(self) -> dict[str, str]:
        """The arguments in words, as in `Forward.given`."""
        return given_to(self.at.original, self.args, self.kwargs)

    @property
    def element_counts(self) -> dict[str, int]:
        """The elements of its input tensors, by name."""
        return element_counts(self.tensors)

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Its input tensors, with their names."""
        return named_tensors(self.at.original, self.args, self.kwargs)

    @property
    def planned_masks(self) -> Masks:
        """The masks of the planned batches."""
        return Masks(**self.now.forward.masks)

    @property
    def is_unpacked(self) -> bool:
        """Whether a batch without packed rows runs with the mask of packed ones."""
        seen, graphs = self.graphs.seen, self.graphs
        return "position_ids" in graphs.elements and graphs.masks.packed and not (seen.packed or seen.padded)

    @property
    def has_other_mask(self) -> bool:
        """Whether a batch runs with an explicit mask that it would do without."""
        return self.is_unpacked or self.graphs.masks.padded != self.graphs.seen.padded
