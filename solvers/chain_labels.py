"""The chain to the byte: what is left of its states when a table has ruled out most of them.

A table (`chain_table.py`) counts bytes in grains, rounded down, and where hundreds of small sizes are rounded its bound
stays below every plan, however fine the grain. Here a state is a label: the bytes that are kept and the least time so
far, both exact. Labels go along the chain from the first cut to the last, and the table says what the rest costs at
least: a label whose time and that reach the limit is dropped, and so is one that another beats in both. (Label setting
with bounds on completion, as for shortest paths with resources: Dumitrescu and Boland 2003.) Where the limit is little
above the bound, of some hundred thousand states a few hundred labels are left.

What comes out is the chain's optimum if that is below the limit, with its plan; else the limit is a bound.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from remat.solvers.chain import Item, Transition
from remat.solvers.chain_table import Leg, Table, Values

MOST_LABELS = 100_000  # at one cut, or where a region chooses what it saves


class TooManyLabels(Exception):
    """The limit is too far above the bound."""


class Labels(NamedTuple):
    """Columns over labels: bytes that are kept, time so far in ns, and how they came to be (`_History`)."""

    kept: np.ndarray
    time: np.ndarray
    origin: np.ndarray

    def where(self, mask: np.ndarray) -> Labels:
        return Labels(self.kept[mask], self.time[mask], self.origin[mask])


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The least time of the chain, and its plan; infinite, and none, where it is not below the limit."""

    time_ns: float
    legs: tuple[Leg, ...] = ()


def optimum(table: Table, limit_ns: float, time_s: float = math.inf, spare_bytes: int = 0) -> Optimum:
    """The optimum of the table's chain, bytes counted exactly, if that is below `limit_ns`.

    With `spare_bytes` it is that of plans that keep so much less.

    Raises TooManyLabels where too many states may still be part of such a plan, or too many to look at in `time_s`.
    """
    return _Search(table, limit_ns, time.monotonic() + time_s, spare_bytes).run()


class _History:
    """Steps that made labels: each chunk is one step, the transition taken or the item saved, for many of them."""

    def __init__(self) -> None:
        self._begins: list[int] = [0]
        self._chunks: list[tuple[np.ndarray, tuple[Transition, int] | Item | None]] = [(np.array([-1]), None)]
        self._count = 1

    def note(self, parents: np.ndarray, step: tuple[Transition, int] | Item) -> np.ndarray:
        """Origins of the labels that `step` makes of those of origin `parents`."""
        self._begins.append(self._count)
        self._chunks.append((parents, step))
        self._count += len(parents)
        return np.arange(self._count - len(parents), self._count)

    def legs(self, origin: int) -> tuple[Leg, ...]:
        found: list[Leg] = []
        saved: list[Item] = []
        while True:
            at = bisect.bisect_right(self._begins, origin) - 1
            parents, step = self._chunks[at]
            if step is None:
                return tuple(reversed(found))
            if isinstance(step, Item):
                saved.append(step)
            else:
                found.append(Leg(*step, tuple(reversed(saved))))
                saved = []
            origin = int(parents[origin - self._begins[at]])


class _Folds:
    """What regions that end at one cut may save, from their last segment to the first, with R of what comes later."""

    def __init__(self, table: Table, b: int, never_again: frozenset[int]):
        self._table, self._b, self._never_again = table, b, never_again
        self._after = table.after_saves(b)
        self._steps: list[tuple[Item | int, Values]] = []  # an item, or a segment that begins
        self._until = {b: (0, self._after)}
        self._settled = b

    def down_to(self, a: int) -> tuple[Values, list[tuple[Item | int, Values]]]:
        """R where a region begins at `a` and what it goes through from there, each with R of what comes later."""
        while self._settled > a:
            self._settled -= 1
            for item in self._table.chain.items(self._settled, self._b, self._never_again):
                self._steps.append((item, self._after))
                self._after = self._table.fold_item(self._after, item)
            self._steps.append((self._settled, self._after))
            self._after = self._table.begun(self._after, self._settled, self._b)
            self._until[self._settled] = len(self._steps), self._after
        count, after = self._until[a]
        return after, self._steps[count - 1 :: -1] if count else []


class _Search:
    def __init__(self, table: Table, limit_ns: float, deadline_s: float, spare_bytes: int):
        self._table, self._chain, self._limit_ns, self._deadline_s = table, table.chain, limit_ns, deadline_s
        self._history = _History()
        start = Labels(*(np.array([value], dtype=np.int64) for value in (spare_bytes, 0, 0)))
        self._at: list[dict[int, Labels]] = [self._settled(0, {0: [start]})]

    def run(self) -> Optimum:
        for cut in range(1, self._chain.count + 1):
            self._at.append(self._settled(cut, self._arriving(cut)))
        best = min(self._at[-1].values(), key=lambda labels: labels.time[-1], default=None)  # the last is the fastest
        if best is None:
            return Optimum(math.inf)
        return Optimum(max(float(best.time[-1]), 0.0), self._history.legs(int(best.origin[-1])))

    def _settled(self, cut: int, arriving: dict[int, list[Labels]]) -> dict[int, Labels]:
        """The labels at `cut` by k, those that none beats and that may lead to a plan below the limit."""
        found = {}
        for k, parts in arriving.items():
            labels = _joined(parts)
            kept = np.maximum(labels.kept, self._chain.problem.floor_bytes[cut])
            labels = labels._replace(kept=kept).where(kept <= self._chain.most_at(cut, k))
            labels = self._undominated(self._below_limit(labels, self._table.values[cut][k]))
            if len(labels.kept):
                found[k] = labels
        return found

    def _arriving(self, b: int) -> dict[int, list[Labels]]:
        """What transitions make of the labels where they begin, by k at `b`."""
        found: dict[int, list[Labels]] = {}
        folds: dict[frozenset[int], _Folds] = {}
        for transition in self._chain.into[b]:
            for k, labels in self._at[transition.a].items():
                goes_on, adds, most = self._chain.entry(transition, k)
                labels = labels.where(labels.kept <= most)
                labels = Labels(labels.kept + adds, labels.time + transition.time_ns, labels.origin)
                if not len(labels.kept):
                    continue
                if transition.saves:
                    known = folds.setdefault(transition.never_again, _Folds(self._table, b, transition.never_again))
                    ends = self._saving(transition, k, goes_on, labels, *known.down_to(transition.a))
                else:
                    labels = self._below_limit(labels, self._table.values[b][goes_on])
                    ends = {goes_on: self._noted(labels, (transition, k))}
                for end_k, each in ends.items():
                    found.setdefault(end_k, []).append(each)
        return found

    def _saving(
        self,
        transition: Transition,
        k: int,
        goes_on: int,
        labels: Labels,
        after: Values,
        steps: list[tuple[Item | int, Values]],
    ) -> dict[int, Labels]:
        """What a region makes of `labels`, by k at its end, with the choice of what it saves; `_Folds` of the rest."""
        chain = self._chain
        found = {goes_on: self._noted(self._below_limit(labels, after[goes_on]), (transition, k))}
        for what, rest in steps:
            if not any(len(each.kept) for each in found.values()):
                return {}
            parts: dict[int, list[Labels]] = {}
            for at, each in found.items():
                if isinstance(what, int):
                    each = each.where(each.kept <= chain.inside[what])
                parts.setdefault(at, []).append(self._below_limit(each, rest[at]))
                if isinstance(what, Item):
                    saved = Labels(each.kept + what.bytes, each.time - what.time_ns, each.origin)
                    to = 1 if what.passes_on else at
                    parts.setdefault(to, []).append(self._noted(self._below_limit(saved, rest[to]), what))
            found = {at: self._undominated(_joined(each)) if len(each) > 1 else each[0] for at, each in parts.items()}
        return {at: each.where(each.kept <= chain.most_after_saves(transition.b, at)) for at, each in found.items()}

    def _noted(self, labels: Labels, step: tuple[Transition, int] | Item) -> Labels:
        return labels._replace(origin=self._history.note(labels.origin, step)) if len(labels.kept) else labels

    def _below_limit(self, labels: Labels, rest: np.ndarray) -> Labels:
        """Those of `labels` of which plans below the limit may come, where `rest` is R by level."""
        levels = labels.kept // self._table.grain
        fits = levels < self._table.levels
        least = labels.time + rest[np.minimum(levels, self._table.levels - 1)]
        return labels.where(fits & (least < self._limit_ns))

    def _undominated(self, labels: Labels) -> Labels:
        """Labels without those that another keeps no more than and is as fast as; by rising bytes and falling time."""
        if len(labels.kept) > MOST_LABELS or time.monotonic() > self._deadline_s:
            raise TooManyLabels
        labels = labels.where(np.lexsort((labels.time, labels.kept)))
        faster = np.ones(len(labels.time), dtype=bool)
        faster[1:] = labels.time[1:] < np.minimum.accumulate(labels.time)[:-1]
        return labels.where(faster)


def _joined(parts: Iterable[Labels]) -> Labels:
    columns = [*zip(*parts, strict=True)] or [[np.zeros(0, dtype=np.int64)]] * 3
    return Labels(*map(np.concatenate, columns))
