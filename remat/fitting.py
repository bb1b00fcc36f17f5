"""Fit: micro-batch, accumulation and plan chosen together, for the least time per sample at a fixed global batch.

The classic ladder tries one thing after the other: run as it is; accumulate with micro-batches that fit; checkpoint at
the largest micro-batch that fits. The joint optimum looks at every micro-batch with the best plan for it. So it is
never slower than a rung, and faster where a larger micro-batch pays for some recomputation.

A global batch is ranks x samples of a rank; the samples of a rank are accumulated over micro-batches of equal size, the
last one smaller where they do not divide. With more than one, gradients are alive through forward: a step of its own
(`Loop.accumulation`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from remat.errors import UsageError
from remat.loop import Loop
from remat.micro_batches import Candidate, MicroBatches, Window, largest
from remat.planning import Budget
from remat.plans import Plan
from remat.profiling import Place
from remat.solution import Limits
from remat.workload import Workload

JOINT = "joint optimum"
SEQ_PARTS = 16  # of the workload's own sequence length: the steps in which a length is looked for


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
    place: Place,
    budget: Budget,
    global_batch: int,
    *,
    loop: Loop | None = None,
    limits: Limits | None = None,
    on_try: Callable[[str], None] | None = None,
) -> Fit:
    """The fastest way to run `global_batch` samples in each optimizer step within `budget`.

    loop    ranks, shards and what else training does; its accumulation is chosen here
    limits  of each solution
    on_try  called with what is tried next, in words

    Raises UsageError where the global batch does not divide over the ranks, Infeasible where not even a micro-batch
    of one sample fits.
    """
    loop, limits = loop or Loop(), limits or Limits()
    samples = samples_of_rank(global_batch, loop.ranks)
    sizes = MicroBatches(workload, place, budget, loop, limits, on_try or (lambda what: None))
    windows = sizes.windows(samples)
    tried: list[Candidate] = []
    best, best_us = None, math.inf
    for window in windows:
        found = sizes.exact(window, best_us)
        if found is None:
            continue
        tried.append(found)
        if found.time_us is not None and found.time_us < best_us:
            best, best_us = found, found.time_us
    if best is None:
        raise sizes.refusal(Window(samples, 1))
    rungs = {**sizes.ladder(samples, windows), JOINT: best}
    plan = sizes.plan(Window(samples, best.micro_batch))
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
    place: Place,
    budget: Budget,
    *,
    loop: Loop | None = None,
    limits: Limits | None = None,
    on_try: Callable[[str], None] | None = None,
) -> Plan:
    """A plan for the largest micro-batch that fits `budget`; arguments and errors are those of `fit`."""
    loop = loop or Loop()
    sizes = MicroBatches(workload, place, budget, loop, limits or Limits(), on_try or (lambda what: None))
    guess = sizes.guess(accumulates=loop.accumulates)
    found = largest(lambda size: sizes.feasible(size, accumulates=loop.accumulates), guess=guess)
    if not found:
        raise sizes.refusal(Window(1, 1))
    return sizes.plan(Window(found * loop.accumulation, found))


def longest_sequence(
    workload: Workload,
    place: Place,
    budget: Budget,
    *,
    loop: Loop | None = None,
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
    loop, limits, on_try = loop or Loop(), limits or Limits(), on_try or (lambda what: None)

    @functools.cache
    def at(parts: int) -> MicroBatches:
        shaped = workload.sized(seq_len=parts * step)
        return MicroBatches(shaped, place, budget, loop, limits, on_try, scaled=False)

    def fits(parts: int) -> bool:
        try:
            return at(parts).feasible(size, accumulates=loop.accumulates)
        except UsageError:  # longer than the model's positions
            if parts == 1:
                raise
            return False

    window = Window(size * loop.accumulation, size)
    found = largest(fits, guess=SEQ_PARTS)
    if not found:
        raise at(1).refusal(window)
    return at(found).plan(window)
