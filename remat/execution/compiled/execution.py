"""Compiled execution: captured graphs compiled with their regions as tags, by Inductor or by AOTAutograd alone.

The evaluator speaks of eager execution, and what a compiler saves, fuses and uses twice is not in it. So several eager
budgets are asked for, and of the plans whose compiled replay keeps the budget the one with the least recomputation is
taken. The budget is kept as far as the replay is right. No bound holds for other plans, so none is given.

The code that Inductor generates depends on the machine (its device, on the CPU also the number of threads), so the
target must be the machine at hand. Under Inductor operators are priced as fused (`fusion.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.forwards import forwards_of
from remat.evaluation.graph import Graph
from remat.evaluation.plan import RegionRef
from remat.execution.base import Execution, Try, require_depth
from remat.execution.compiled.compiling import AOT_EAGER, INDUCTOR
from remat.execution.compiled.fusion import fused
from remat.execution.compiled.replay import replay_compiled
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space, find_space
from remat.formulation.solution import NONE_NEEDED, Solution
from remat.recording.fake_step import FakeStep
from remat.workload.training_loop import TrainingLoop

NEAR = 0.02  # of the budget: a smaller rest is not worth another replay


class CompiledExecution(Execution):
    bound_carries = False
    most_tries = 6

    def __init__(self, compiler: str):
        self.name = self.compiler = compiler

    def require(self, device: PlanningDevice | None, loop: TrainingLoop | None) -> None:
        if device is None:
            raise UsageError("a plan for compiled execution compiles the model, and a profile has none; use --model.")
        if device.device is None:
            raise UsageError(
                f"what {self.name} makes of a model is known only where it runs, and {device.target.name} is not this "
                'machine\'s; use `target="cpu"`, or "cuda" on a machine that has it.'
            )
        if loop is not None and loop.shard is not None:
            raise UsageError("a plan for compiled execution does not know shards; leave `shard=` out.")

    def require_step(self, graph: Graph) -> None:
        apart = [f.module for f in forwards_of(graph.about, len(graph.call_nodes)) if f.module]
        if apart:
            raise UsageError(
                f"the step calls the module {apart[0]!r} outside of the model's forward, which `torch.compile(model)` "
                f'does not compile: leave `execution="{self.name}"` out, or call the model itself.'
            )

    def space(self, graph: Graph, depth: int | None = None) -> Space:
        return find_space(graph, depth=require_depth(self, depth, most=1))

    def price(self, profile: Profile) -> Profile:
        return fused(profile) if self.name == INDUCTOR else profile

    def replay_seen(self, step: FakeStep, regions: Sequence[RegionRef], **options: Any) -> np.ndarray:
        return replay_compiled(step, regions, compiler=self.name, device=step.device, **options)

    def trivial(self, problem: Problem, replayed: Callable[[], int] | None) -> Solution | None:
        if replayed is not None and replayed() <= problem.budget_bytes:
            return Solution(NONE_NEEDED, "feasible", replayed_bytes=replayed())
        return None

    def without_plan(self, problem: Problem, replayed: Callable[[], int] | None) -> int:
        """Return the peak of the step without a plan, compiled."""
        return super().without_plan(problem, replayed) if replayed is None else replayed()

    def first_budget(self, problem: Problem, least_bytes: Callable[[], int]) -> int:
        return min(max(problem.budget_bytes, least_bytes()), problem.memory.peak_without_regions - 1)

    def next_budget(self, problem: Problem, tries: Sequence[Try], least_bytes: Callable[[], int]) -> int | None:
        """Move the evaluator's budget by the last plan's distance from the limit, or bisect if that was tried."""
        limit, last, asked = problem.budget_bytes, tries[-1], {each.asked_bytes for each in tries}
        if 0 <= limit - last.peak_bytes <= NEAR * limit:
            return None
        most = problem.memory.peak_without_regions - 1
        low = max((each.asked_bytes for each in tries if each.peak_bytes <= limit), default=least_bytes())
        high = min((each.asked_bytes for each in tries if each.peak_bytes > limit), default=most)
        towards = min(max(last.asked_bytes + limit - last.peak_bytes, low), high)
        if towards in asked:
            towards = (low + high) // 2
        return None if towards in asked else towards

    def prepare(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(model, backend=self.name))


EXECUTIONS = {name: CompiledExecution(name) for name in (INDUCTOR, AOT_EAGER)}
