"""Token cap: the most tokens that a micro-batch may have within a budget, whatever the lengths of its rows.

A batch has a shape: `rows`, and the tokens of the longest of them, to which all are padded. It counts rows x longest
tokens. Or sequences are packed end to end into one row, and the row's tokens count.

Rule 1  Among the shapes under a cap, the requested peak of one plan is greatest at an end: rows as long as allowed, or
        as many rows as allowed. For the bytes of a storage grow with rows, with tokens, and with tokens x length, so at
        a fixed number of tokens every sum of them is convex in the length. Both ends are recorded and evaluated under
        the plan. So is a length one below the longest, since some kernels pad odd lengths.
Rule 2  The plan is made for the longest rows; where part of a row more fits, for one row more of less length. Where
        another long shape needs more bytes under it than the budget, the plan is made again within as many bytes less.
Rule 3  Kernels pad rows to a multiple of their own, which costs short rows most. Where the shortest rows exceed the
        budget, the number of rows is limited too: to that of a length whose rows fit. Lengths one above powers of two
        are tried, since those are padded most.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Unpack

from remat.capture.generators import generators_kept
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, RematError, UsageError
from remat.evaluation.form import Form, form_of
from remat.evaluation.plan import SHORTEST, TOKEN_CAP, Plan
from remat.evaluation.refused import RefusedSize
from remat.planning.budget import Budget
from remat.planning.checking import limit_bytes, needed_bytes
from remat.planning.estimate import estimate_under, recorded_for
from remat.planning.fit import Sizing, fewer, first_reserving, largest_rows
from remat.planning.micro_batches import MicroBatches
from remat.planning.refused_sizes import SizeRefused, with_refused
from remat.planning.request import PlanRequest, RequestKeywords
from remat.planning.windows import MOST_SAMPLES, Window, between
from remat.workload.training_loop import TrainingLoop, is_power_of_two
from remat.workload.workload import Workload

FINE = 16  # parts of a row in which a cap above full rows is looked for
CLOSE_SHARE = 0.01  # of a packed row: how near to the most tokens the search comes
ROUNDS = 4  # of Rule 2


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """A batch of `rows` rows, the longest of `length` tokens."""

    rows: int
    length: int


@generators_kept()
def most_tokens(
    workload: Workload,
    *,
    packed: bool = False,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    on_try: Callable[[str], None] | None = None,
    **wanted: Unpack[RequestKeywords],
) -> Plan:
    """Find the most tokens that a micro-batch may have within a budget, and one plan for all of them.

    Without `packed`, rows of at most `workload.seq_len` tokens are padded to the longest of their batch, and a batch
    has rows x longest tokens. With `packed`, the batch is `workload.batch(1, tokens)`: one row, with the position ids
    that tell its sequences apart.

    Args:
        workload: The training step; its `seq_len` is the length of the longest row.
        packed: Whether sequences are packed into one row.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        on_try: Called with a description of each try.
        **wanted: More arguments of `remat.plan`, `budget` among them.

    Returns:
        The plan. `plan.about["token_cap"]` has the most `tokens` of a batch, the most `rows`, and `longest`, the
        most tokens of a row. No batch within all three, with a row of two tokens or more, requests more than the
        budget. `remat.TokenBatches` makes such batches.

    Raises:
        Infeasible: Not even one row fits: one of the longest length, or packed, of two tokens.
        NoPlanInTime: A time limit came first.
        UsageError: The workload has no sequences, the execution is one whose plans are replayed, or an argument is
            wrong.

    Example:
        >>> plan = remat.most_tokens(workload, budget="20GiB")
        >>> plan.about["token_cap"]["tokens"]
    """
    sizing = Sizing.of(workload, PlanRequest.of(**wanted), find_planning_device(target, costs), loop, on_try)
    return most_tokens_of(sizing, packed=packed)


def most_tokens_of(sizing: Sizing, *, packed: bool) -> Plan:
    """Run `most_tokens` for a Sizing."""
    if sizing.workload.seq_len is None:
        raise UsageError(f"{sizing.workload.name} has no sequences; ask for the largest micro-batch.")
    if not sizing.request.how.runs_as_evaluated:
        raise UsageError(f"a cap on tokens is for eager plans; leave out `execution={sizing.request.execution!r}`.")
    search = _PackedCap(sizing) if packed else _PaddedCap(sizing)
    return first_reserving(search.caps(), search.plan)[1]


class _Cap:
    """The search for a cap: `caps` that some plan fits, from the most on, and the plan for one."""

    def __init__(self, sizing: Sizing):
        self.sizing = sizing
        self._profiles: dict[tuple[BatchShape, Form], Profile] = {}
        self._sizes: dict[int, MicroBatches] = {}
        self.refused: list[RefusedSize] = []

    def caps(self) -> Iterator[int]:
        """Yield numbers of tokens, from the most that some plan fits on."""
        raise NotImplementedError

    def shapes(self, tokens: int) -> list[BatchShape]:
        """Return the shape to plan for, and more that its plan has to fit."""
        raise NotImplementedError

    def cap(self, plan: Plan, tokens: int) -> dict[str, int | bool]:
        """Return the limits of a batch of `tokens` under `plan`."""
        raise NotImplementedError

    def plan(self, tokens: int) -> Plan:
        """Return a plan that fits every shape under a cap. Raises Infeasible. (Rules 1 and 2)"""
        budget, (first, *others) = self.sizing.budget, self.shapes(tokens)
        window = self._window(first.rows)
        for _ in range(ROUNDS):
            made = dataclasses.replace(self.sizing, budget=budget).micro_batches(first.length).plan(window)
            excess = max((self._excess(made, shape) or 0 for shape in others), default=0)
            if excess <= 0:
                made = with_refused(made, self.refused)
                return dataclasses.replace(made, about={**made.about, TOKEN_CAP: self.cap(made, tokens)})
            if made.solver.get("interrupted"):
                raise KeyboardInterrupt
            budget = _less(budget, excess)
        raise Infeasible(f"no plan was found that fits every batch of up to {tokens} tokens.")

    def _excess(self, plan: Plan, shape: BatchShape) -> int | None:
        """Return the bytes that a shape needs under `plan` beyond the budget, negative if it fits.

        None for a shape that does not run under it: the model cannot, or runs other nodes, which training refuses.
        """
        key = (shape, form_of(plan.about))
        try:
            if key not in self._profiles:
                self.sizing.on_try(f"recording {shape.rows} rows of {shape.length} tokens")
                workload = self.sizing.workload.sized(shape.rows, shape.length)
                self._profiles[key] = recorded_for(plan, workload, self.sizing.place, None)[1]
            found = estimate_under(plan, self._profiles[key], self.sizing.request.allocator)
        except RematError:
            return None
        return needed_bytes(found, self.sizing.budget)[0] - limit_bytes(self.sizing.budget)

    def _feasible(self, shape: BatchShape) -> bool:
        self.sizing.on_try(f"{shape.rows * shape.length} tokens")
        loop = self.sizing.loop
        cuts = is_power_of_two(loop.accumulation)
        try:
            return self._at(shape.length).feasible(shape.rows, accumulates=loop.accumulates, in_slices=cuts)
        except SizeRefused:
            return False

    def _at(self, length: int) -> MicroBatches:
        if length not in self._sizes:
            self._sizes[length] = self.sizing.micro_batches(length)
        return self._sizes[length]

    def _window(self, rows: int) -> Window:
        return Window(rows * self.sizing.loop.accumulation, rows)


class _PaddedCap(_Cap):
    """Rows that are padded to the longest of their batch."""

    def caps(self) -> Iterator[int]:
        longest, sizes = self._longest(), self.sizing.micro_batches()
        rows, least = sizes.taken.found(lambda: self._rows(sizes))
        self.refused = sizes.taken.refused
        if not rows:
            self.sizing.refuse(self._at(longest), self._window(least))
        beyond = (rows * longest + self._beyond(rows, longest)) // (rows + 1) * (rows + 1)  # as it is planned
        if beyond > rows * longest:
            yield beyond
        yield from (each * longest for each in fewer(rows, sizes.taken.near))

    def _rows(self, sizes: MicroBatches) -> tuple[int, int]:
        """Return the most full rows that some plan fits, and the fewest that were tried. Raises SizeRefused."""
        rows, least = largest_rows(sizes)
        if rows:
            sizes.taken.require(rows)
        return rows, least

    def _beyond(self, rows: int, longest: int) -> int:
        """Return the tokens that still fit beyond `rows` full rows, in one more row; 0 for many rows."""
        parts = FINE // rows
        if not parts:
            return 0

        def fits(part: int) -> bool:
            return self._feasible(BatchShape(rows + 1, (rows * longest + part * longest // parts) // (rows + 1)))

        return between(0, parts, fits) * longest // parts

    def shapes(self, tokens: int) -> list[BatchShape]:
        longest = self._longest()
        rows = tokens // longest
        more = [BatchShape(rows + 1, tokens // (rows + 1))] if tokens % longest else []
        odd = [BatchShape(tokens // (longest - 1), longest - 1)] if longest > SHORTEST else []
        return [*more, BatchShape(rows, longest), *odd]

    def cap(self, plan: Plan, tokens: int) -> dict[str, int | bool]:
        rows = self._most_rows(plan, tokens)
        return {"tokens": tokens, "rows": rows, "longest": self._longest(), "packed": False}

    def _most_rows(self, plan: Plan, tokens: int) -> int:
        """Return the most rows of a batch of `tokens` that `plan` fits. (Rule 3)"""
        lengths = [1 + (1 << power) for power in range(self._longest().bit_length())]
        lengths = [length for length in reversed(lengths) if length < self._longest()]

        def fits(count: int) -> bool:
            length = lengths[count - 1]
            excess = self._excess(plan, BatchShape(tokens // length + 1, length))  # no fewer tokens than the cap
            return excess is not None and excess <= 0

        found = len(lengths) if lengths and fits(len(lengths)) else between(0, len(lengths), fits)
        return tokens // lengths[found - 1] if found else self.shapes(tokens)[0].rows

    def _longest(self) -> int:
        assert self.sizing.workload.seq_len is not None
        return self.sizing.workload.seq_len


class _PackedCap(_Cap):
    """Sequences that are packed into one row."""

    def caps(self) -> Iterator[int]:
        limit, own = self.sizing.budget.limit_bytes, self.sizing.workload.seq_len
        assert own is not None
        if (found := edge(self._least_bytes, limit, own)) is None:
            self.sizing.refuse(self._at(SHORTEST), self._window(1))
        yield from fewer(found)

    def _least_bytes(self, tokens: int) -> float:
        self.sizing.on_try(f"{tokens} tokens")
        try:
            return self._at(tokens).least_bytes(self._window(1))
        except (SizeRefused, UsageError):  # as for rows longer than the model's positions
            return math.inf

    def shapes(self, tokens: int) -> list[BatchShape]:
        return [BatchShape(1, tokens), *([BatchShape(1, tokens - 1)] if tokens > SHORTEST else [])]

    def cap(self, plan: Plan, tokens: int) -> dict[str, int | bool]:
        return {"tokens": tokens, "rows": 1, "longest": tokens, "packed": True}


def edge(need: Callable[[int], float], limit: float, start: int) -> int | None:
    """Return the most tokens whose rising, convex `need` keeps `limit`, to `CLOSE_SHARE`; None for fewer than 2.

    From `start` on lengths are doubled or halved, never more: what a length needs while it is recorded is not known.
    """
    low, at_low = start, need(start)
    high, at_high = low, at_low
    while at_low > limit:
        high, at_high = low, at_low
        if low < 2 * SHORTEST:
            return None
        low //= 2
        at_low = need(low)
    while at_high <= limit:
        if high >= MOST_SAMPLES:
            return high
        low, at_low = high, at_high
        high *= 2
        at_high = need(high)
    while high - low > max(CLOSE_SHARE * low, 1):
        share = (limit - at_low) / (at_high - at_low) if math.isfinite(at_high) else 0.5  # a chord is above the curve
        guess = min(max(round(low + share * (high - low)), low + max(int(CLOSE_SHARE * low), 1)), high - 1)
        at_guess = need(guess)
        if at_guess <= limit:
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
    return low


def _less(budget: Budget, excess: int) -> Budget:
    """Return the budget, `excess` bytes smaller."""
    reserved = None if budget.reserved_bytes is None else budget.reserved_bytes - excess
    return Budget(budget.given_bytes - excess, budget.limit_bytes - excess, reserved)
