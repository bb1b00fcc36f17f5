"""Modules: the forward of whole modules under `torch.utils.checkpoint`, untraced, as FSDP2 needs them.

The evaluator speaks of the traced graph. An untraced forward may need more, because its local variables hold on to
what the graph has let go. Lower the evaluator's budget by what the plan at hand needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.forwards import forwards_of, is_plain
from remat.evaluation.graph import Graph
from remat.evaluation.plan import RegionRef
from remat.execution.base import Execution, Try, require_depth
from remat.execution.modules.replay import replay_modules
from remat.execution.modules.search_space import find_module_space
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space
from remat.formulation.solution import NONE_NEEDED, Solution
from remat.offloading.link import Link
from remat.recording.fake_step import FakeStep


class ModulesExecution(Execution):
    name = "modules"
    patience_s = 30.0  # half of it for the first plan: a proof may take long (the note on regions of modules)

    def require_step(self, graph: Graph) -> None:
        forwards = forwards_of(graph.about, len(graph.call_nodes))
        if not is_plain(forwards):
            raise UsageError(
                f"the step calls the model, or modules of it, {len(forwards)} times before its backward, and a plan of "
                'modules is for a model that is called once: leave `execution="modules"` out, or call the model once '
                "with all samples in one batch."
            )

    def space(self, graph: Graph, depth: int | None = None) -> Space:
        require_depth(self, depth, most=1)
        return find_module_space(graph)

    def pose(
        self, profile: Profile, space: Space, budget_bytes: int, link: Link | None = None, like: Problem | None = None
    ) -> Problem:
        problem = super().pose(profile, space, budget_bytes, link, like)
        problem.runs = tuple(
            run for run in problem.runs if run.region is None or space.allows(run.region.first, run.region.end)
        )
        return problem

    def replay_seen(self, step: FakeStep, regions: Sequence[RegionRef], **options: Any) -> np.ndarray:
        return replay_modules(step, regions, **options)

    def trivial(self, problem: Problem, replayed: Callable[[], int] | None) -> Solution | None:
        needed = problem.memory.peak_without_checkpointing if replayed is None else replayed()
        return Solution(NONE_NEEDED, "optimal", replayed_bytes=needed) if needed <= problem.budget_bytes else None

    def next_budget(self, problem: Problem, tries: Sequence[Try]) -> int | None:
        lowered = super().next_budget(problem, tries)
        more = tries[-1].peak_bytes - tries[-1].evaluator_bytes
        return None if lowered is None else min(problem.budget_bytes - more, lowered)


EXECUTIONS = {"modules": ModulesExecution()}
