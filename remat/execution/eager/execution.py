"""Eager execution: captured graphs run node by node, their regions under `torch.utils.checkpoint`.

The evaluator knows this way to the byte, so what it says is what the replay finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remat.evaluation.graph import Graph
from remat.evaluation.plan import RegionRef
from remat.execution.base import Execution, require_depth
from remat.execution.eager.replay import replay
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space, find_space
from remat.formulation.solution import NONE_NEEDED, TRACING_ALONE, Solution
from remat.recording.fake_step import FakeStep


class EagerExecution(Execution):
    name = "eager"
    runs_as_evaluated = True
    runs_forms = True
    runs_offloads = True

    def space(self, graph: Graph, depth: int | None = None) -> Space:
        return find_space(graph, depth=require_depth(self, depth))

    def replay_seen(self, step: FakeStep, regions: Sequence[RegionRef], **options: Any) -> np.ndarray:
        return replay(step, regions, **options)

    def trivial(self, problem: Problem, replayed: Callable[[], int] | None) -> Solution | None:
        """Return no plan if the untraced step keeps the budget, and tracing alone if only the traced one does."""
        if problem.memory.peak_without_checkpointing <= problem.budget_bytes:
            return Solution(NONE_NEEDED, "optimal")
        if problem.memory.peak_without_regions <= problem.budget_bytes:
            return Solution(TRACING_ALONE, "optimal")
        return None


EXECUTIONS = {"eager": EagerExecution()}
