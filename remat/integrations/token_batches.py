"""Batches of rows of many lengths, each within the token cap of a plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from remat.errors import UsageError
from remat.evaluation.plan import SHORTEST, TOKEN_CAP, Plan

POOL = 50  # batches' worth of rows that are sorted by length together


@dataclasses.dataclass(frozen=True)
class TokenCap:
    """The batches that a plan fits: at most `tokens`, `rows` and, in a row, `longest` tokens."""

    tokens: int
    rows: int
    longest: int
    packed: bool

    @classmethod
    def of(cls, plan: Plan) -> TokenCap:
        """Read the cap of a plan. Raises UsageError for a plan without one."""
        if TOKEN_CAP not in plan.about:
            raise UsageError("the plan has no token cap; make it with remat.most_tokens, or `remat fit --max-tokens`.")
        return cls(**plan.about[TOKEN_CAP])

    def holds(self, rows: int, longest: int, total: int) -> bool:
        """Return whether `rows` rows of `total` tokens, the longest of `longest`, are within the cap."""
        if longest > self.longest:
            return False
        if self.packed:
            return total <= self.tokens
        most = self.rows if longest >= SHORTEST else self.tokens // self.longest
        return rows <= most and rows * longest <= self.tokens


class TokenBatches(Sampler[list[int]]):
    """A batch sampler: lists of row numbers, each list within the token cap of a plan.

    Rows of similar length come together, so that little is padding. Where the plan is for packed rows, a list holds the
    sequences of one row. Rows of one token are traced by themselves: a batch of them alone has no more rows than one of
    the longest. Under DistributedDataParallel give each rank rows of its own, with as many batches.

    Args:
        lengths: Tokens of each row of the data set.
        plan: A plan of `remat.most_tokens`, or its file.
        shuffle: Whether rows and batches come in a random order, another in each epoch.
        seed: Of that order.

    Raises:
        UsageError: The plan has no token cap, or a row is longer than its longest.

    Example:
        >>> batches = remat.TokenBatches([len(row) for row in data], plan)
        >>> loader = DataLoader(data, batch_sampler=batches, collate_fn=pad)
    """

    def __init__(
        self, lengths: Sequence[int], plan: Plan | str | os.PathLike[str], *, shuffle: bool = True, seed: int = 0
    ):
        self.cap = TokenCap.of(Plan.of(plan))
        self.lengths, self.shuffle, self.seed, self.epoch = list(lengths), shuffle, seed, 0
        longest = max(self.lengths, default=0)
        if longest > self.cap.longest:
            raise UsageError(
                f"row {self.lengths.index(longest)} has {longest} tokens, and the plan is for at most "
                f"{self.cap.longest}. Cut the row, or plan for rows of {longest}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`; each full pass goes on to the next by itself."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches()
        self.epoch += 1

    def __len__(self) -> int:
        """Return the number of batches of this epoch."""
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        order = self._order(len(self.lengths), 0)
        if self.cap.packed:
            return self._grouped(order)
        mean = max(sum(self.lengths) // max(len(order), 1), 1)
        pool = POOL * max(self.cap.tokens // mean, 1)
        batches = list[list[int]]()
        for begin in range(0, len(order), pool):
            batches += self._grouped(sorted(order[begin : begin + pool], key=self.lengths.__getitem__))
        return [batches[i] for i in self._order(len(batches), 1)]

    def _grouped(self, order: Sequence[int]) -> list[list[int]]:
        """Fill batches with rows in `order`."""
        batches, longest, total = list[list[int]](), 0, 0
        for row in order:
            length = self.lengths[row]
            longest, total = max(longest, length), total + length
            if batches and self.cap.holds(len(batches[-1]) + 1, longest, total):
                batches[-1].append(row)
            else:
                batches.append([row])
                longest, total = length, length
        return batches

    def _order(self, count: int, salt: int) -> list[int]:
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator("cpu").manual_seed((self.seed << 32) + 2 * self.epoch + salt)
        return torch.randperm(count, generator=generator, device="cpu").tolist()
