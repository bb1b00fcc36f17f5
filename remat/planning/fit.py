"""Fit: micro-batch, accumulation and plan chosen together, for the least time per sample at a fixed global batch.

The classic ladder tries one thing after the other: run as it is; accumulate with micro-batches that fit; checkpoint at
the largest micro-batch that fits; offload all that is kept, where there is a link to the host. The joint optimum looks
at every micro-batch with the best plan for it. So it is never slower than a rung, but for one whose steps wait for
copies, and faster where a larger micro-batch pays for some recomputation.

A global batch is ranks x samples of a rank; the samples of a rank are accumulated over micro-batches of equal size, the
last one smaller where they do not divide. With more than one, gradients are alive through forward: a step of its own
(`TrainingLoop.accumulation`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from remat.costing.planning_device import PlanningDevice
from remat.errors import Infeasible, NoPlanInTime, UsageError
from remat.evaluation.plan import Plan
from remat.execution.executions import EAGER
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.micro_batches import Candidate, MicroBatches, Window, largest
from remat.planning.variants import is_power_of_two
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

JOINT = "joint optimum"
STEP_DOWN = 0.05  # of a size whose plan reserves too much
SEQ_PARTS = 16  # of the workload's own sequence length: the steps in which a length is looked for
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fit:
    """rungs       of the ladder by name, and the joint optimum; None where nothing of that kind fits
    candidates  every micro-batch with the best plan that was found for it, the largest first
    plan        of the joint optimum, recorded and replayed at its size
    samples     of all ranks in an optimizer step
    """

    rungs: dict[str, Candidate | None]
    candidates: tuple[Candidate, ...]
    plan: Plan
    about: dict[str, Any]
    target: str
    costs: str
    budget_bytes: int
    samples: int
    ranks: int

    @property
    def best(self) -> Candidate:
        found = self.rungs[JOINT]
        assert found is not None
        return found

    @property
    def weights(self) -> tuple[float, ...]:
        """What the mean loss of each micro-batch of a rank is multiplied by."""
        return Window(self.samples // self.ranks, self.best.micro_batch).weights

    def samples_per_s(self, candidate: Candidate) -> float | None:
        return self.samples / candidate.time_us * 1e6 if candidate.time_us else None


def fit(
    workload: Workload,
    place: PlanningDevice,
    budget: Budget,
    global_batch: int,
    *,
    loop: TrainingLoop | None = None,
    execution: str = EAGER,
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    limits: Limits | None = None,
    on_try: Callable[[str], None] | None = None,
) -> Fit:
    """The fastest way to run `global_batch` samples in each optimizer step within `budget`.

    loop       ranks, shards and what else training does; its accumulation is chosen here
    execution  how the step will run, as in `planner.plan`
    exact      leave losses whole, as there        fuse  fuse groups, likewise
    link       to the host's memory, for offloads, as in `planner.plan_profile`
    limits     of each solution
    on_try     called with what is tried next, in words

    Raises UsageError where the global batch does not divide over the ranks, Infeasible where not even a micro-batch
    of one sample fits.
    """
    loop, limits = loop or TrainingLoop(), limits or Limits()
    samples = samples_of_rank(global_batch, loop.ranks)
    say = on_try or (lambda what: None)
    how: dict[str, Any] = {"execution": execution, "exact": exact, "fuse": fuse, "link": link}
    sizes = MicroBatches(workload, place, budget, loop, limits, say, **how)
    windows = sizes.windows(samples)
    tried: list[Candidate] = []
    best_us = math.inf
    for window in windows:
        found = sizes.exact(window, best_us)
        if found is None:
            continue
        tried.append(found)
        best_us = min(best_us, found.time_us or math.inf)
    if best_us == math.inf:
        raise sizes.refusal(Window(samples, 1))
    fitting = sorted((found for found in tried if found.time_us is not None), key=lambda found: found.time_us or 0.0)
    best, plan = _reserving(fitting, lambda found: sizes.plan(Window(samples, found.micro_batch)), budget)
    rungs = {**sizes.ladder(samples, windows), JOINT: best}
    return Fit(
        rungs=rungs,
        candidates=tuple(tried),
        plan=plan,
        about=plan.about,
        target=plan.target,
        costs=plan.costs,
        budget_bytes=budget.limit_bytes,
        samples=global_batch,
        ranks=loop.ranks,
    )


def samples_of_rank(global_batch: int, ranks: int) -> int:
    """Samples of each rank. Raises UsageError where there is no such number."""
    if global_batch < ranks:
        raise UsageError(
            f"a global batch of {global_batch} leaves {ranks - global_batch} of {ranks} ranks without a sample; "
            f"choose at least {ranks}."
        )
    if rest := global_batch % ranks:
        below = global_batch - rest
        raise UsageError(
            f"a global batch of {global_batch} does not divide over {ranks} ranks; choose {below} or {below + ranks}."
        )
    return global_batch // ranks


def largest_batch(
    workload: Workload,
    place: PlanningDevice,
    budget: Budget,
    *,
    loop: TrainingLoop | None = None,
    execution: str = EAGER,
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    limits: Limits | None = None,
    on_try: Callable[[str], None] | None = None,
) -> Plan:
    """A plan for the largest micro-batch that fits `budget`; arguments and errors are those of `fit`."""
    loop, on_try = loop or TrainingLoop(), on_try or (lambda what: None)
    limits = limits or Limits()
    how: dict[str, Any] = {"execution": execution, "exact": exact, "fuse": fuse, "link": link}
    sizes = MicroBatches(workload, place, budget, loop, limits, on_try, **how)
    guess, cuts = sizes.guess(accumulates=loop.accumulates), is_power_of_two(loop.accumulation)
    found = largest(lambda size: sizes.feasible(size, accumulates=loop.accumulates, in_slices=cuts), guess=guess)
    if not found:
        raise sizes.refusal(Window(1, 1))
    return _reserving(_fewer(found), lambda size: sizes.plan(Window(size * loop.accumulation, size)), budget)[1]


def _fewer(size: int) -> Iterator[int]:
    """`size`, and smaller ones in steps of 5 %."""
    while size:
        yield size
        size = min(size - 1, round((1 - STEP_DOWN) * size))


def _reserving(choices: Iterable[T], plan: Callable[[T], Plan], budget: Budget) -> tuple[T, Plan]:
    """The first of `choices` with a plan that keeps the budget, recorded at its size.

    Sizes are chosen by what they request; what the caching allocator reserves, where the budget is that, is known of a
    finished plan only.
    """
    refused: Infeasible | NoPlanInTime | None = None
    for choice in choices:
        try:
            return choice, plan(choice)
        except (Infeasible, NoPlanInTime) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def longest_sequence(
    workload: Workload,
    place: PlanningDevice,
    budget: Budget,
    *,
    loop: TrainingLoop | None = None,
    execution: str = EAGER,
    exact: bool = False,
    fuse: bool = False,
    link: Link | None = None,
    limits: Limits | None = None,
    on_try: Callable[[str], None] | None = None,
) -> Plan:
    """A plan for the longest sequence that fits `budget` at the workload's batch size, to 1 part in `SEQ_PARTS`.

    Each length is recorded by itself. Raises UsageError for a workload without sequences, Infeasible where not even the
    shortest length looked at fits.
    """
    if workload.seq_len is None:
        raise UsageError(f"{workload.name} has no sequences; ask for --max-batch.")
    step, size = max(workload.seq_len // SEQ_PARTS, 1), workload.batch_size
    loop, limits, on_try = loop or TrainingLoop(), limits or Limits(), on_try or (lambda what: None)
    cuts = is_power_of_two(loop.accumulation)

    @functools.cache
    def at(parts: int) -> MicroBatches:
        shaped = workload.sized(seq_len=parts * step)
        how: dict[str, Any] = {"execution": execution, "exact": exact, "fuse": fuse, "link": link, "scaled": False}
        return MicroBatches(shaped, place, budget, loop, limits, on_try, **how)

    def fits(parts: int) -> bool:
        try:
            return at(parts).feasible(size, accumulates=loop.accumulates, in_slices=cuts)
        except UsageError:  # longer than the model's positions
            if parts == 1:
                raise
            return False

    window = Window(size * loop.accumulation, size)
    found = largest(fits, guess=SEQ_PARTS)
    if not found:
        raise at(1).refusal(window)
    return _reserving(_fewer(found), lambda parts: at(parts).plan(window), budget)[1]
