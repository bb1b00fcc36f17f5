"""Micro-batches: one workload under one budget at any size, each with the best plan for it.

Rule 1  Candidates are the divisors of a rank's samples and the largest micro-batch that fits. One whose time without
        any recomputation is not better than the best so far is not solved.
Rule 2  Sizes come from two records (`scaling.py`) where costs are estimated; measured costs need a record each, and so
        does a single sample, which broadcasting treats differently. What is chosen is recorded, solved and replayed.
Rule 3  The loss is averaged over the samples: micro-batch i counts with its share of them (`Window.weights`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from remat.costing.costs import roofline_costs, with_library_workspaces
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import Infeasible
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Region
from remat.evaluation.scaling import Family, Recorded, family
from remat.evaluation.sharding import shard
from remat.execution import executions
from remat.execution.executions import EAGER
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.planning.assemble import infeasible
from remat.planning.budget import Budget
from remat.planning.comparison import peak_of, solution_of
from remat.planning.planner import plan_profile
from remat.planning.profiling import fake_step, profile_step
from remat.planning.search import Judge
from remat.planning.untraced import with_untraced
from remat.recording.fake_step import FakeStep
from remat.recording.recorder import record
from remat.recording.tracker import Tracker
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

RUNGS = ("as is", "accumulate", "checkpoint")  # of the classic ladder
RECORDED_AT = (2, 4)  # batch sizes
SEVERAL = 2  # micro-batches: from the second on, all are alike
MOST = 1 << 20  # samples in a micro-batch, or steps of a sequence


@dataclasses.dataclass(frozen=True)
class Window:
    """The samples of one rank in one optimizer step, as micro-batches of one size, the last one smaller if need be."""

    samples: int
    micro_batch: int

    @property
    def accumulation(self) -> int:
        return -(-self.samples // self.micro_batch)

    @property
    def last(self) -> int:
        """Size of the last micro-batch."""
        return self.samples - (self.accumulation - 1) * self.micro_batch

    @property
    def weights(self) -> tuple[float, ...]:
        """What each micro-batch's mean loss is multiplied by. (Rule 3)"""
        sizes = [self.micro_batch] * (self.accumulation - 1) + [self.last]
        return tuple(size / self.samples for size in sizes)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the global batch on this budget.

    strategy       "none", "every-block" or "exact"
    time_us        of one optimizer step on a rank; None where it does not fit
    regions, gap   of its plan
    """

    strategy: str
    micro_batch: int
    accumulation: int
    last: int
    peak_bytes: int
    time_us: float | None
    overhead: float | None
    regions: tuple[Region, ...] = dataclasses.field(default=(), repr=False)
    gap: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it keeps the budget."""
        return self.time_us is not None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits, "regions": len(self.regions)}


def samples_that_fit(limit_bytes: int, fixed_bytes: float, bytes_per_sample: float) -> int:
    """floor((limit - fixed) / per sample), not less than 0: how many samples go beside what is always there."""
    return max(int((limit_bytes - fixed_bytes) // bytes_per_sample), 0)


def divisors(count: int) -> list[int]:
    """The divisors of `count`, the largest first."""
    return [size for size in range(count, 0, -1) if count % size == 0]


def between(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(fits: Callable[[int], bool], most: int = MOST, guess: int = 1) -> int:
    """The largest number from 1 to `most` that fits, looked for around `guess`, twice as far every time; 0 for none."""
    known, far = min(max(guess, 1), most), 1
    if fits(known):
        while known + far <= most and fits(known + far):
            known, far = known + far, 2 * far
        return between(known, min(known + far, most + 1), fits)
    while known > far and not fits(known - far):
        known, far = known - far, 2 * far
    return between(max(known - far, 0), known, fits)


def _even_window(micro_batch: int, accumulates: bool) -> Window:
    """A window of micro-batches of one size."""
    return Window(micro_batch * (SEVERAL if accumulates else 1), micro_batch)


class MicroBatches:
    """One workload under one budget at any micro-batch.

    execution  how the steps will run; where that is not as the evaluator says, plans are replayed at every size
    scaled     sizes come from two records where they can, else each from one of its own (Rule 2)
    """

    def __init__(
        self,
        workload: Workload,
        place: PlanningDevice,
        budget: Budget,
        loop: TrainingLoop,
        limits: Limits,
        on_try: Callable[[str], None],
        *,
        execution: str = EAGER,
        scaled: bool = True,
    ):
        self.workload, self.place, self.budget, self.loop = workload, place, budget, loop
        self.limits, self.on_try = limits, on_try
        self.how, self._scaled = executions.load(execution), scaled and place.device is None
        self.how.require(place, loop)
        self._to_record: dict[int, FakeStep] = {}
        self._families: dict[bool, Family | None] = {}
        self._profiles: dict[tuple[int, bool], Profile] = {}
        self._problems: dict[tuple[int, bool], Problem] = {}
        self._solutions: dict[tuple[int, bool, str], Solution] = {}
        self._judges: dict[tuple[int, bool], Judge] = {}

    # Steps at any size (Rule 2)

    def profile(self, micro_batch: int, accumulates: bool) -> Profile:
        key = (micro_batch, accumulates)
        if key not in self._profiles:
            scaled = self._family(accumulates) if self._scaled and micro_batch > 1 else None
            if scaled is None:
                found, _ = self.recorded(micro_batch, SEVERAL if accumulates else 1)
            else:
                graph = with_library_workspaces(scaled.at(micro_batch), self.place.target)
                found = Profile(graph, roofline_costs(graph, self.place.target), self.place.target)
            self._profiles[key] = self.how.price(found)
        return self._profiles[key]

    def _family(self, accumulates: bool) -> Family | None:
        if accumulates not in self._families:
            loop = dataclasses.replace(self.loop, accumulation=SEVERAL if accumulates else 1)
            low, high = (self._to_scale(size, loop) for size in RECORDED_AT)
            self._families[accumulates] = family(low, high, self.place.target.alignment_bytes)
        return self._families[accumulates]

    def _to_scale(self, micro_batch: int, loop: TrainingLoop) -> Recorded:
        self.on_try(f"recording micro-batch {micro_batch}")
        if micro_batch not in self._to_record:
            self._to_record[micro_batch] = fake_step(self.workload.sized(micro_batch), self.place, loop=loop)
        step = self._to_record[micro_batch]
        step.loop = loop  # accumulated or not, it is captured once
        graph, target = record(step), self.place.target
        unrounded = dataclasses.replace(target, alignment_bytes=1)
        graph = with_untraced(graph, step, roofline_costs(graph, target), unrounded)
        alignment_bytes = target.alignment_bytes
        fixed = step.fix_state(Tracker(alignment_bytes)) if alignment_bytes > 1 else graph.fixed_bytes
        tensors = [leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, torch.Tensor)]
        shared = shard(dataclasses.replace(graph, fixed_bytes=fixed), loop)
        return Recorded(shard(graph, loop), shared.fixed_bytes, tuple(t.untyped_storage().nbytes() for t in tensors))

    def recorded(self, micro_batch: int, accumulation: int) -> tuple[Profile, FakeStep]:
        """The step as it really is at this size."""
        self.on_try(f"recording micro-batch {micro_batch}")
        loop = dataclasses.replace(self.loop, accumulation=accumulation)
        compiled = self.how.compiler is not None
        step = fake_step(self.workload.sized(micro_batch), self.place, loop=loop, compiled=compiled)
        return profile_step(step, self.place), step

    def problem(self, window: Window) -> Problem:
        key = (window.micro_batch, window.accumulation > 1)
        if key not in self._problems:
            found = self.profile(*key)
            self._problems[key] = self.how.pose(found, self.how.space(found.graph), self.budget.limit_bytes)
        return self._problems[key]

    def judge(self, window: Window) -> Judge | None:
        """What replays plans at this size, where the evaluator does not know what they need."""
        if self.how.is_exact:
            return None
        key = (window.micro_batch, window.accumulation > 1)
        if key not in self._judges:
            profile, step = self.recorded(window.micro_batch, SEVERAL if window.accumulation > 1 else 1)
            self._profiles[key] = self.how.price(profile)
            self._judges[key] = Judge(self.how, step, self._profiles[key])
        return self._judges[key]

    # Candidates

    def windows(self, samples: int) -> list[Window]:
        """What may be tried, the largest micro-batch first. (Rule 1)"""
        sizes = set(divisors(samples))
        if (most := self.largest(samples)) is not None:
            sizes.add(most)
        return [Window(samples, size) for size in sorted(sizes, reverse=True) if size <= (most or 1)]

    def largest(self, at_most: int) -> int | None:
        """The largest micro-batch up to `at_most` that some plan fits; None where not even one sample does."""
        if self.feasible(at_most, accumulates=False):
            return at_most
        return between(0, at_most, lambda size: self.feasible(size, accumulates=True)) or None

    def guess(self, *, accumulates: bool) -> int:
        """How many samples fit as they are, from forward and backward of two sizes; no fewer than 1."""
        low, high = (self._peak_before_optimizer(size, accumulates) for size in RECORDED_AT)
        per_sample = (high - low) / (RECORDED_AT[1] - RECORDED_AT[0])
        fixed = low - RECORDED_AT[0] * per_sample
        return max(samples_that_fit(self.budget.limit_bytes, fixed, per_sample), 1) if per_sample > 0 else 1

    def _peak_before_optimizer(self, micro_batch: int, accumulates: bool) -> int:
        problem = self.problem(_even_window(micro_batch, accumulates))
        return int(problem.memory.curve(()).alive_bytes[: problem.graph.backward_end].max())

    def feasible(self, micro_batch: int, *, accumulates: bool) -> bool:
        """Whether some plan fits `micro_batch`."""
        window = _even_window(micro_batch, accumulates)
        if self.how.is_exact and self.problem(window).memory.peak_without_regions <= self.budget.limit_bytes:
            return True
        self.on_try(f"is there a plan for micro-batch {micro_batch}")
        return self._solved(window, "every-block").fits or self._solved(window, "exact").fits

    def exact(self, window: Window, below_us: float = math.inf) -> Candidate | None:
        """The best plan at a micro-batch; None where its time cannot be below `below_us`. (Rule 1)"""
        if self._time_us(window, ()) >= below_us:
            return None
        self.on_try(f"micro-batch {window.micro_batch}")
        return self._candidate(window, "exact", self._solved(window, "exact"))

    def ladder(self, samples: int, windows: list[Window]) -> dict[str, Candidate | None]:
        """The rungs of the classic ladder; a rung is the largest micro-batch of its kind that fits."""
        as_is = Window(samples, samples)
        rungs: dict[str, Candidate | None] = {RUNGS[0]: self._candidate(as_is, "none", self._solved(as_is, "none"))}
        for name, strategy in ((RUNGS[1], "none"), (RUNGS[2], "every-block")):
            fitting = (self._candidate(window, strategy, self._solved(window, strategy)) for window in windows)
            rungs[name] = next((found for found in fitting if found.fits), None)
        return rungs

    def _solved(self, window: Window, strategy: str) -> Solution:
        key = (window.micro_batch, window.accumulation > 1, strategy)
        if key not in self._solutions:
            judge, problem = self.judge(window), self.problem(window)
            self._solutions[key] = solution_of(problem, self.how, strategy, judge, self.limits)
        return self._solutions[key]

    def _candidate(self, window: Window, strategy: str, solution: Solution) -> Candidate:
        problem, fits, regions = self.problem(window), solution.fits, solution.regions
        peak = peak_of(problem, strategy, regions) if solution.replayed_bytes is None else solution.replayed_bytes
        plain_us, time_us = self._time_us(window, ()), self._time_us(window, regions)
        return Candidate(
            strategy=strategy,
            micro_batch=window.micro_batch,
            accumulation=window.accumulation,
            last=window.last,
            peak_bytes=peak,
            time_us=time_us if fits else None,
            overhead=time_us / plain_us - 1 if fits and plain_us else None,
            regions=regions,
            gap=solution.gap if strategy == "exact" and fits else None,
        )

    def _time_us(self, window: Window, regions: tuple[Region, ...]) -> float:
        """Time of one optimizer step: the full micro-batches, the last one, and the optimizer."""
        key = (window.micro_batch, window.accumulation > 1)
        full = self.profile(*key)
        if window.last == window.micro_batch:
            return self._update_us(full, window.accumulation, regions)
        last = self.profile(window.last, True)
        rest = self._update_us(last, 1, regions) - self._update_us(last, 0, regions)
        return self._update_us(full, window.accumulation - 1, regions) + rest

    def _update_us(self, profile: Profile, micro_batches: int, regions: tuple[Region, ...]) -> float:
        graph, costs = profile.graph, profile.costs
        again_us = Memory(graph).recompute_time_us(regions, costs.per_op_us(graph)) if regions else 0.0
        return costs.update_time_us(graph, micro_batches, again_us)

    # For real

    def plan(self, window: Window) -> Plan:
        """The plan at a micro-batch, recorded at that size, solved and replayed."""
        profile, step = self.recorded(window.micro_batch, window.accumulation)
        self.on_try(f"solving micro-batch {window.micro_batch}")
        return plan_profile(profile, self.budget, limits=self.limits, step=step, execution=self.how, exact=True)

    def refusal(self, window: Window) -> Infeasible:
        """Not even one sample at a time fits."""
        return infeasible(self.problem(window), self.limits)
