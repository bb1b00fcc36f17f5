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
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar, Unpack

from remat.capture.generators import generators_kept
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.errors import Infeasible, NoPlanInTime, RematError, UsageError
from remat.evaluation.plan import Plan
from remat.offloading.link import Link
from remat.planning.budget import Budget, is_share_of_step
from remat.planning.micro_batches import MicroBatches
from remat.planning.planner import refused_in_full
from remat.planning.refused_sizes import SizeRefused, with_refused
from remat.planning.request import PlanRequest, RequestKeywords
from remat.planning.windows import BatchCandidate, Near, Window, itself, largest, neighbours
from remat.workload.training_loop import TrainingLoop, is_power_of_two
from remat.workload.workload import Workload, require_workload

JOINT = "joint optimum"
STEP_DOWN = 0.05  # of a size whose plan reserves too much
SEQ_PARTS = 16  # of the workload's own sequence length: the steps in which a length is looked for
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BatchFit:
    """The fastest way to run a global batch.

    rungs       of the ladder by name, and the joint optimum; None if nothing of that kind fits, or the model refuses it
    candidates  every micro-batch with the best plan that was found for it, the largest first
    plan        of the joint optimum, recorded and replayed at its size
    samples     of all ranks in an optimizer step
    """

    rungs: dict[str, BatchCandidate | None]
    candidates: tuple[BatchCandidate, ...]
    plan: Plan
    about: dict[str, Any]
    target: str
    costs: str
    budget_bytes: int
    samples: int
    ranks: int

    @property
    def best(self) -> BatchCandidate:
        found = self.rungs[JOINT]
        assert found is not None
        return found

    @property
    def weights(self) -> tuple[float, ...]:
        """The factors of the mean loss of each micro-batch of a rank."""
        return Window(self.samples // self.ranks, self.best.micro_batch).weights

    def samples_per_s(self, candidate: BatchCandidate) -> float | None:
        return self.samples / candidate.time_us * 1e6 if candidate.time_us else None


@dataclasses.dataclass(frozen=True)
class Sizing:
    """A workload, and what holds for its step at any batch size.

    loop    ranks, shards and the rest of the training loop
    link    to the host's memory, where activations may be offloaded
    on_try  called with a description of each try
    """

    workload: Workload
    place: PlanningDevice
    budget: Budget
    loop: TrainingLoop
    request: PlanRequest
    link: Link | None = None
    on_try: Callable[[str], None] = lambda what: None

    @classmethod
    def of(
        cls,
        workload: Workload,
        request: PlanRequest,
        place: PlanningDevice,
        loop: TrainingLoop | None = None,
        on_try: Callable[[str], None] | None = None,
    ) -> Sizing:
        """Read the sizing that `request` asks for.

        Raises UsageError for options that cannot be combined, and for a budget given as a share of a step.
        """
        require_workload(workload)
        own = request.loop(loop) or TrainingLoop()
        if is_share_of_step(request.budget):
            raise UsageError(
                f"budget {request.budget!r} is a share of one step, and no step is recorded here; give it in GiB."
            )
        if request.wants_layers:
            raise UsageError("micro-batches are fitted with the weights on the device; leave weights out of `offload`.")
        request.require(place, own)
        budget, link = request.limit(place), request.link(place, own)
        if budget is None:
            raise UsageError("a micro-batch is fitted to a budget: give `budget=`.")
        return cls(workload, place, budget, own, request, link, on_try or (lambda what: None))

    def micro_batches(self, seq_len: int | None = None) -> MicroBatches:
        """Return the step at any micro-batch; with `seq_len`, each size is recorded by itself."""
        workload = self.workload if seq_len is None else self.workload.sized(seq_len=seq_len)
        common = (workload, self.place, self.budget, self.loop, self.request, self.on_try)
        return MicroBatches(*common, link=self.link, scaled=seq_len is None)

    def refuse(self, sizes: MicroBatches, window: Window) -> NoReturn:
        """Raise Infeasible: not even `window` fits."""
        with refused_in_full(sizes.study_of(window), self.budget):
            raise sizes.refusal(window)


@generators_kept()
def fit(
    workload: Workload,
    *,
    global_batch: int,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    on_try: Callable[[str], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> BatchFit:
    """Find the fastest way to run `global_batch` samples in each optimizer step within a budget.

    Args:
        workload: The training step.
        global_batch: Samples of all ranks in an optimizer step.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Ranks, shards and everything else around the step; its accumulation is chosen here.
        on_try: Called with a description of each try.
        **wanted: More arguments of `remat.plan`, `budget` among them; limits hold for each solution.

    Returns:
        Micro-batch, accumulation and plan with the least time per sample.

    Raises:
        UsageError: The global batch does not divide over the ranks, or an argument is wrong.
        Infeasible: Not even the smallest micro-batch fits that the model takes, as a rule one of one sample.
        CaptureError: The model cannot be captured, or refuses every micro-batch that was tried.

    Example:
        >>> best = remat.fit(workload, global_batch=256, budget="20GiB")
    """
    return fitted(
        Sizing.of(workload, PlanRequest.of(**wanted), find_planning_device(target, costs), loop, on_try), global_batch
    )


def fitted(sizing: Sizing, global_batch: int) -> BatchFit:
    """Run `fit` for a Sizing."""
    samples, sizes = samples_of_rank(global_batch, sizing.loop.ranks), sizing.micro_batches()
    return sizes.taken.found(lambda: _fitted(sizing, sizes, samples))


def _fitted(sizing: Sizing, sizes: MicroBatches, samples: int) -> BatchFit:
    windows = sizes.windows(samples)
    tried: list[BatchCandidate] = []
    best_us = math.inf
    for window in windows:
        found = sizes.best(window, best_us)
        if found is None:
            continue
        tried.append(found)
        best_us = min(best_us, found.time_us or math.inf)
    if best_us == math.inf:
        sizing.refuse(sizes, windows[-1])
    fitting = sorted((found for found in tried if found.time_us is not None), key=lambda found: found.time_us or 0.0)
    best, plan = first_reserving(fitting, lambda found: sizes.plan(Window(samples, found.micro_batch)))
    rungs = {**sizes.ladder(samples, windows), JOINT: best}
    return BatchFit(
        rungs=rungs,
        candidates=tuple(tried),
        plan=plan,
        about=plan.about,
        target=plan.target,
        costs=plan.costs,
        budget_bytes=sizing.budget.limit_bytes,
        samples=samples * sizing.loop.ranks,
        ranks=sizing.loop.ranks,
    )


def samples_of_rank(global_batch: int, ranks: int) -> int:
    """Return the samples of each rank. Raises UsageError if they do not divide evenly."""
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


@generators_kept()
def largest_batch(
    workload: Workload,
    *,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    on_try: Callable[[str], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Plan:
    """Plan for the largest micro-batch that fits a budget.

    Args:
        workload: The training step.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        on_try: Called with a description of each try.
        **wanted: More arguments of `remat.plan`, `budget` among them.

    Returns:
        The plan; its batch size is `plan.about["batch_size"]`.

    Raises:
        Infeasible: Not even the smallest micro-batch fits that the model takes, as a rule one of one sample.
        CaptureError: The model cannot be captured, or refuses every size that was tried.
        UsageError: An argument is wrong.

    Example:
        >>> remat.largest_batch(workload, budget="20GiB").about["batch_size"]
    """
    return largest_of(Sizing.of(workload, PlanRequest.of(**wanted), find_planning_device(target, costs), loop, on_try))


def largest_of(sizing: Sizing) -> Plan:
    """Run `largest_batch` for a Sizing."""
    sizes = sizing.micro_batches()
    return sizes.taken.found(lambda: _largest_of(sizing, sizes))


def _largest_of(sizing: Sizing, sizes: MicroBatches) -> Plan:
    loop = sizing.loop
    found, least = largest_rows(sizes)
    if not found:
        sizing.refuse(sizes, Window(least * loop.accumulation, least))
    choices = fewer(found, sizes.taken.near)
    return first_reserving(choices, lambda size: sizes.plan(Window(size * loop.accumulation, size)))[1]


def largest_rows(sizes: MicroBatches) -> tuple[int, int]:
    """Return the largest size that some plan fits, 0 for none, and the least size that was tried.

    Raises CaptureError if the model refuses all that were tried.
    """
    accumulates, cuts = sizes.loop.accumulates, is_power_of_two(sizes.loop.accumulation)
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return sizes.feasible(size, accumulates=accumulates, in_slices=cuts)

    found = largest(fits, guess=sizes.guess(accumulates=accumulates), near=sizes.taken.near)
    if not tried:
        raise sizes.taken.refusal()
    return found, min(tried)


def fewer(size: int, near: Near = itself) -> Iterator[int]:
    """Yield `size`, then smaller sizes in steps of 5 %; `near` gives those that may be tried."""
    while size:
        yield size
        size = near(min(size - 1, round((1 - STEP_DOWN) * size)), 0, size) or 0


def first_reserving(choices: Iterable[T], plan: Callable[[T], Plan]) -> tuple[T, Plan]:
    """Return the first of `choices` whose plan keeps the budget when recorded at its size.

    Sizes are chosen by requested bytes. Reserved bytes, if the budget limits those, are known of a finished plan only.
    """
    refused: Infeasible | NoPlanInTime | None = None
    for choice in choices:
        try:
            return choice, plan(choice)
        except (Infeasible, NoPlanInTime) as error:
            refused = refused or error
    assert refused is not None
    raise refused


@generators_kept()
def longest_sequence(
    workload: Workload,
    *,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    on_try: Callable[[str], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Plan:
    """Plan for the longest sequence that fits a budget at the workload's batch size, to 1 part in `SEQ_PARTS`.

    Args:
        workload: The training step; each length is recorded anew.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        on_try: Called with a description of each try.
        **wanted: More arguments of `remat.plan`, `budget` among them.

    Returns:
        The plan; its length in tokens is `plan.about["seq_len"]`.

    Raises:
        UsageError: The workload has no sequences, or an argument is wrong.
        Infeasible: Not even the shortest length tried fits.

    Example:
        >>> remat.longest_sequence(workload, budget="24GiB").about["seq_len"]
    """
    return longest_of(Sizing.of(workload, PlanRequest.of(**wanted), find_planning_device(target, costs), loop, on_try))


def longest_of(sizing: Sizing) -> Plan:
    """Run `longest_sequence` for a Sizing."""
    workload, loop = sizing.workload, sizing.loop
    if workload.seq_len is None:
        raise UsageError(f"{workload.name} has no sequences; ask for the largest batch (largest_batch, --max-batch).")
    step, size = max(workload.seq_len // SEQ_PARTS, 1), workload.batch_size
    cuts = is_power_of_two(loop.accumulation)

    @functools.cache
    def at(parts: int) -> MicroBatches:
        return sizing.micro_batches(parts * step)

    refused: dict[int, RematError] = {}

    @functools.cache
    def takes(parts: int) -> bool:
        try:
            at(parts).study(size, loop.accumulates)
        except (SizeRefused, UsageError) as error:  # as for lengths beyond the model's positions
            refused[parts] = error
            return False
        return True

    def near(parts: int, low: int, high: int) -> int | None:
        return next(filter(takes, neighbours(parts, low, high)), None)

    tried: list[int] = []

    def fits(parts: int) -> bool:
        tried.append(parts)
        return at(parts).feasible(size, accumulates=loop.accumulates, in_slices=cuts)

    window = Window(size * loop.accumulation, size)
    found = largest(fits, guess=SEQ_PARTS, near=near)
    if not tried:
        raise refused[min(refused)]
    if not found:
        sizing.refuse(at(min(tried)), window)
    made = first_reserving(fewer(found, near), lambda parts: at(parts).plan(window))[1]
    return with_refused(made, (each for parts in sorted(refused) for each in at(parts).taken.refused))
