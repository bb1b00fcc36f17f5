"""Execution: a way to run a plan's step, with what the planner has to know of it.

Each way is a folder here: the executor, which training loads (`executions.py` names it), and an `Execution`, which
planning and validation load. What differs between ways is stated there and nowhere else: what a region may be, what
a step then needs, and which budget to ask a solver for next.

A solver is asked for plans within an *evaluator's* budget. The step that runs under such a plan is replayed on fake
tensors, and may need other than the evaluator says: nothing else where traced graphs run in eager mode, more where
Python's local variables hold on to values.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.graph import Graph
from remat.evaluation.plan import OffloadRef, RegionRef
from remat.formulation.problem import Problem
from remat.formulation.search_space import DEPTH, Space
from remat.formulation.solution import Solution
from remat.offloading.link import Link

if TYPE_CHECKING:
    import numpy as np

    from remat.recording.fake_step import FakeStep

MOST_TRIES = 5


@dataclasses.dataclass(frozen=True)
class Try:
    """One plan that was replayed.

    asked_bytes      the evaluator's budget that it was asked for under
    evaluator_bytes  its peak by the evaluator
    peak_bytes       its peak by the replay
    """

    asked_bytes: int
    evaluator_bytes: int
    peak_bytes: int


class Execution(abc.ABC):
    """A way to run a plan's step.

    name            `Plan.execution`, `--execution`
    runs_as_evaluated  whether the step needs as much memory as the evaluator predicts
    runs_forms      whether the step may run in another form: losses in slices, groups fused
    runs_offloads   whether activations may be on the host between forward and backward
    patience_s      default seconds for the search; None: the solver's own default
    """

    name: str
    runs_as_evaluated: bool = False
    runs_forms: bool = False
    runs_offloads: bool = False
    patience_s: float | None = None

    def require_step(self, graph: Graph) -> None:  # noqa: B027
        """Raise UsageError if the recorded step cannot run this way."""

    @abc.abstractmethod
    def space(self, graph: Graph, depth: int | None = None) -> Space:
        """Return the plans that can run this way; regions nest `depth` deep, by default as deep as possible."""

    def pose(
        self, profile: Profile, space: Space, budget_bytes: int, link: Link | None = None, like: Problem | None = None
    ) -> Problem:
        """Pose the problem of least recomputation within the evaluator's budget; `link` allows offloads.

        like  the problem of the step in another form, which shares much with this one
        """
        return Problem(profile.graph, profile.costs, space, budget_bytes, link, like)

    def replay(
        self,
        step: FakeStep,
        graph: Graph,
        regions: Sequence[RegionRef],
        *,
        alignment_bytes: int,
        workspace_of: Mapping[tuple[str, str], int],
        offloads: Sequence[OffloadRef] = (),
    ) -> np.ndarray:
        """Replay the step under a plan, and return the bytes alive at every operator.

        graph         the record of `step`; it counts what no fake tensor shows (wrapped numbers)
        workspace_of  workspaces by operator and signature, see `Profile.workspace_of`
        """
        options: dict[str, Any] = {"alignment_bytes": alignment_bytes, "workspace_of": workspace_of}
        if offloads:
            options["offloads"] = offloads
        seen = self.replay_seen(step, regions, **options)
        return seen + graph.unseen_bytes

    @abc.abstractmethod
    def replay_seen(self, step: FakeStep, regions: Sequence[RegionRef], **options: Any) -> np.ndarray:
        """Run `replay` without the bytes that fake tensors do not show; `options` are its keywords."""

    @abc.abstractmethod
    def trivial(self, problem: Problem, replayed: Callable[[], int] | None) -> Solution | None:
        """Return the plan of no regions if it keeps the budget.

        replayed  returns its peak by the replay; None if nothing is replayed
        """

    def next_budget(self, problem: Problem, tries: Sequence[Try]) -> int | None:
        """Return the evaluator's budget to ask for after `tries`; None if the search is over.

        The evaluator's budget is lowered by the replay's excess: plans of a smaller budget are plans of a larger one
        too.
        """
        last = tries[-1]
        excess = last.peak_bytes - problem.budget_bytes
        if excess <= 0:
            return None
        # The evaluator counts outputs until this step replaces them. A region that takes them keeps them for longer.
        replaced = sum(size for size, _ in problem.graph.held_outputs) if len(tries) > 1 else 0
        return min(last.asked_bytes - excess, problem.budget_bytes - replaced)

    def __str__(self) -> str:
        return self.name


def require_depth(execution: Execution, depth: int | None, most: int = DEPTH) -> int:
    """Return `depth`, or `most` if it is None. Raises UsageError if regions cannot nest so deep."""
    if depth is not None and depth > most:
        raise UsageError(f'under `execution="{execution}"` regions do not nest; leave `depth={depth}` out.')
    return most if depth is None else depth
