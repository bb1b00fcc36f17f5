"""The chain to the byte: what is left of its states when tables have ruled out most of them.

A table (`chain_table.py`) counts bytes in grains, rounded down, and where hundreds of small sizes are rounded its bound
stays below every plan, however fine the grain. And it counts one number of bytes, a surrogate of those that have limits
of their own (`chain.py`). Here a state is a label: the bytes that are kept as each of several chains counts them, and
the least time so far, all exact. Labels go along the chain from the first cut to the last, and the tables say what the
rest costs at least: a label whose time and that reach the limit is dropped, and so is one that another beats in all.
(Label setting with bounds on completion, as for shortest paths with resources: Dumitrescu and Boland 2003.) Where the
limit is little above the bound, of some hundred thousand states a few hundred labels are left.

What comes out is the best plan that is within the limits of every chain, if it is below the limit; else the limit is a
bound.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat.solvers.chain import Item, Transition
from remat.solvers.chain_table import Leg, Table, Values
from remat.solvers.deadline import OutOfTime, check_time

LIMITS = (0.125, 0.25, 0.5, 1.0)  # of what is between bound and best plan
MOST_LABELS = 100_000  # at one cut, or where a region chooses what it saves
BLOCK = 256  # labels that are held against others at once


class TooManyLabels(Exception):
    """The limit is too far above the bound."""


class Labels(NamedTuple):
    """Columns over labels: how they came to be (`_History`), time so far in ns, bytes kept as each chain counts."""

    origin: np.ndarray
    time: np.ndarray
    kept: tuple[np.ndarray, ...]

    def where(self, which: np.ndarray) -> Labels:
        return Labels(self.origin[which], self.time[which], tuple(kept[which] for kept in self.kept))

    def later(self, time_ns: int, bytes_kept: Iterable[int]) -> Labels:
        return Labels(
            self.origin,
            self.time + time_ns,
            tuple(kept + more for kept, more in zip(self.kept, bytes_kept, strict=True)),
        )

    def within(self, most: Iterable[int]) -> Labels:
        """Those that keep at most so many bytes."""
        return self.where(np.all([kept <= limit for kept, limit in zip(self.kept, most, strict=True)], axis=0))


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A bound on plans within all limits, and the plan that it is the time of, where that is known."""

    bound_ns: float
    legs: tuple[Leg, ...] | None = None


def climb(
    tables: Sequence[Table],
    bound_ns: float,
    most_ns: float,
    *,
    step_s: float = math.inf,
    deadline_s: float = math.inf,
    spare_bytes: int = 0,
) -> Optimum:
    """The optimum of `tables` if it is below `most_ns`, else a better bound than `bound_ns`, as far as labels are few.

    They are where the limit is little above the bound: so it goes up in steps, each of which may take `step_s`.
    """
    below_ns = most_ns - bound_ns
    found = Optimum(bound_ns)
    with contextlib.suppress(TooManyLabels, OutOfTime):
        for share in LIMITS:
            step_until_s = min(time.monotonic() + step_s, deadline_s)
            found = optimum(tables, bound_ns + share * below_ns, deadline_s=step_until_s, spare_bytes=spare_bytes)
            if found.legs is not None:
                break
    return dataclasses.replace(found, bound_ns=max(found.bound_ns, bound_ns))


def optimum(tables: Sequence[Table], limit_ns: float, *, deadline_s: float = math.inf, spare_bytes: int = 0) -> Optimum:
    """The best plan within the limits of the tables' chains, bytes counted exactly, if it is below `limit_ns`.

    Otherwise that is the bound.

    tables       of chains that differ in nothing but what they count of what is forward-held
    spare_bytes  so much less than the limits is kept

    Raises TooManyLabels where too many states may still be part of such a plan, and OutOfTime after `deadline_s`.
    """
    return _Search(tables, limit_ns, deadline_s, spare_bytes).run()


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

    def down_to(self, a: int, deadline_s: float) -> tuple[Values, list[tuple[Item | int, Values]]]:
        """R where a region begins at `a` and what it goes through from there, each with R of what comes later."""
        while self._settled > a:
            check_time(deadline_s)
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
    def __init__(self, tables: Sequence[Table], limit_ns: float, deadline_s: float, spare_bytes: int):
        self._tables, self._chains = tables, [table.chain for table in tables]
        self._limit_ns, self._deadline_s = limit_ns, deadline_s
        self._history = _History()
        none = np.zeros(1, dtype=np.int64)
        start = Labels(none, none, tuple(none + spare_bytes for _ in tables))
        self._at: list[dict[int, Labels]] = [self._settled(0, {0: [start]})]

    def run(self) -> Optimum:
        for cut in range(1, self._chains[0].count + 1):
            self._at.append(self._settled(cut, self._arriving(cut)))
        best = min(self._at[-1].values(), key=lambda labels: labels.time.min(), default=None)
        if best is None:
            return Optimum(self._limit_ns)
        at = int(best.time.argmin())
        return Optimum(max(float(best.time[at]), 0.0), self._history.legs(int(best.origin[at])))

    def _settled(self, cut: int, arriving: dict[int, list[Labels]]) -> dict[int, Labels]:
        """The labels at `cut` by k, those that none beats and that may lead to a plan below the limit."""
        found = {}
        for k, parts in arriving.items():
            labels, floor = _joined(parts), self._chains[0].problem.floor_bytes[cut]
            labels = labels._replace(kept=tuple(np.maximum(kept, floor) for kept in labels.kept))
            labels = labels.within(chain.most_at(cut, k) for chain in self._chains)
            labels = self._undominated(self._below_limit(labels, [table.values[cut][k] for table in self._tables]))
            if len(labels.time):
                found[k] = labels
        return found

    def _arriving(self, b: int) -> dict[int, list[Labels]]:
        """What transitions make of the labels where they begin, by k at `b`."""
        found: dict[int, list[Labels]] = {}
        folds: dict[frozenset[int], list[_Folds]] = {}
        for runs in self._runs_into(b):
            transition = runs[0]
            if transition.saves and transition.never_again not in folds:
                folds[transition.never_again] = [_Folds(table, b, transition.never_again) for table in self._tables]
            for k, labels in self._at[transition.a].items():
                (goes_on, *_), adds, most = zip(
                    *(chain.entry(each, k) for chain, each in zip(self._chains, runs, strict=True)), strict=True
                )
                labels = labels.within(most).later(transition.time_ns, adds)
                if not len(labels.time):
                    continue
                if transition.saves:
                    down = [each.down_to(transition.a, self._deadline_s) for each in folds[transition.never_again]]
                    ends = self._saving(transition, k, goes_on, labels, down)
                else:
                    labels = self._below_limit(labels, [table.values[b][goes_on] for table in self._tables])
                    ends = {goes_on: self._noted(labels, (transition, k))}
                for end_k, each in ends.items():
                    found.setdefault(end_k, []).append(each)
        return found

    def _runs_into(self, b: int) -> Iterator[tuple[Transition, ...]]:
        """Every run that ends at `b` and may be part of a plan, as each chain sees it."""
        if len(self._chains) == 1:
            yield from zip(self._chains[0].into[b])
            return
        # What dominates a run in one chain may not do so in another.
        first, *others = (chain.all_into[b] for chain in self._chains)
        for index, transition in first.items():
            if all(index in other for other in others):
                yield transition, *(other[index] for other in others)

    def _saving(
        self,
        transition: Transition,
        k: int,
        goes_on: int,
        labels: Labels,
        folds: list[tuple[Values, list[tuple[Item | int, Values]]]],
    ) -> dict[int, Labels]:
        """What a region makes of `labels`, by k at its end, with the choice of what it saves; `_Folds` of the rest."""
        afters, steps = zip(*folds, strict=True)
        labels = self._below_limit(labels, [after[goes_on] for after in afters])
        found = {goes_on: self._noted(labels, (transition, k))}
        for step in zip(*steps, strict=True):
            if not any(len(each.time) for each in found.values()):
                return {}
            (what, *_), rests = zip(*step, strict=True)
            parts: dict[int, list[Labels]] = {}
            for at, each in found.items():
                if isinstance(what, int):
                    each = each.within(chain.inside[what] for chain in self._chains)
                parts.setdefault(at, []).append(self._below_limit(each, [rest[at] for rest in rests]))
                if isinstance(what, Item):
                    saved = each.later(-what.time_ns, (item.bytes for item, _ in step))
                    to = 1 if what.passes_on else at
                    saved = self._below_limit(saved, [rest[to] for rest in rests])
                    parts.setdefault(to, []).append(self._noted(saved, what))
            found = {at: self._undominated(_joined(each)) if len(each) > 1 else each[0] for at, each in parts.items()}
        return {
            at: each.within(chain.most_after_saves(transition.b, at) for chain in self._chains)
            for at, each in found.items()
        }

    def _noted(self, labels: Labels, step: tuple[Transition, int] | Item) -> Labels:
        return labels._replace(origin=self._history.note(labels.origin, step)) if len(labels.time) else labels

    def _below_limit(self, labels: Labels, rests: Sequence[np.ndarray]) -> Labels:
        """Those of `labels` of which plans below the limit may come, where `rests` are R by level."""
        for at, (table, rest) in enumerate(zip(self._tables, rests, strict=True)):
            levels = labels.kept[at] // table.grain
            least = labels.time + rest[np.minimum(levels, table.levels - 1)]
            labels = labels.where((levels < table.levels) & (least < self._limit_ns))
        return labels

    def _undominated(self, labels: Labels) -> Labels:
        """Labels without those that another keeps no more than and is as fast as; by rising bytes."""
        if len(labels.time) > MOST_LABELS:
            raise TooManyLabels
        check_time(self._deadline_s)
        labels = labels.where(np.lexsort((labels.time, *reversed(labels.kept))))
        faster = np.ones(len(labels.time), dtype=bool)
        if len(labels.kept) == 1:
            faster[1:] = labels.time[1:] < np.minimum.accumulate(labels.time)[:-1]
            return labels.where(faster)
        columns = np.stack([labels.time, *labels.kept])  # of a pair, only the first may beat the other
        best = columns[:, :0]
        for begin in range(0, len(labels.time), BLOCK):
            block = columns[:, begin : begin + BLOCK]
            beaten = (best[:, :, None] <= block[:, None]).all(axis=0).any(axis=0)
            among = (block[:, :, None] <= block[:, None]).all(axis=0)
            beaten |= np.triu(among, 1).any(axis=0)
            faster[begin : begin + BLOCK] = ~beaten
            best = np.concatenate([best, block[:, ~beaten]], axis=1)
            check_time(self._deadline_s)
        return labels.where(faster)


def _joined(parts: Sequence[Labels]) -> Labels:
    origin, time_ns, kept = zip(*parts, strict=True)
    each = (np.concatenate(of_chain) for of_chain in zip(*kept, strict=True))
    return Labels(np.concatenate(origin), np.concatenate(time_ns), tuple(each))
