"""The chain to the byte: what is left of its states when tables have ruled out most of them.

A table (`chain_table.py`) counts bytes in grains, rounded down, and where hundreds of small sizes are rounded its bound
stays below every plan, however fine the grain. And it counts one number of bytes, a surrogate of those that have limits
of their own (`chain.py`). Here a state is a label: the bytes that are kept as each of several chains counts them, and
the least time so far, all exact. Labels go along the chain from the first cut to the last, and the tables say what the
rest costs at least: a label whose time and that reach the limit is dropped, and so is one that another beats in all.
(Label setting with bounds on completion, as for shortest paths with resources: Dumitrescu and Boland 2003.) Where the
limit is little above the bound, of some hundred thousand states a few hundred labels are left.

Labels also say which storages outside the chain's state are kept (`Case.aside`), so that the first run or save with a
reason counts them. A label beats another only if it keeps no more even with all that it lacks of the other's; so of the
many sets that there may be few are left. Tables know nothing of it: they count their own number of bytes.

What comes out is the best plan that is within the limits of every chain, if it is below the limit; else the limit is a
bound.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from remat.solvers.chain import Chain, Item, Transition
from remat.solvers.chain_table import Leg, Table, Values
from remat.solvers.deadline import NEVER, Deadline, OutOfTime
from remat.work import work

STEP_S, LABEL_S = 25e-6, 50e-9  # of work: for a filter of labels, and for each of them
PAIR_S, GROUP_S = 1.5e-9, 6e-6  # of work: for a number of two labels that are compared, for two groups of labels
LIMITS = (0.125, 0.25, 0.5, 1.0)  # of the range between bound and best plan
MOST_LABELS = 100_000  # at one cut, or while a region chooses its saves
GROWTH_UNTIL_FILTER = 1.5  # growth after which labels that others beat are dropped
BLOCK = 256  # labels that are compared with others at once


AddedBytes = int | np.ndarray
Items = tuple[Item, Item]  # one item, as the chain and as the table counts it


class Step(NamedTuple):
    """A step of a region: `segment` begins, or some of its `items` may be saved; `rest` is R after it."""

    segment: int
    items: Items | None
    rest: Values


class TooManyLabels(Exception):
    """The limit is too far above the bound."""


class Labels(NamedTuple):
    """Columns over labels.

    origin   the steps that led to them (`_History`)
    time     so far, in ns
    kept     bytes kept, as each chain counts them
    counted  those of them that each table counts; empty if it counts all
    aside    the kept storages that are set aside, a bit each
    """

    origin: np.ndarray
    time: np.ndarray
    kept: tuple[np.ndarray, ...]
    counted: tuple[np.ndarray, ...]
    aside: np.ndarray

    def where(self, which: np.ndarray) -> Labels:
        kept, counted = (tuple(column[which] for column in columns) for columns in (self.kept, self.counted))
        return Labels(self.origin[which], self.time[which], kept, counted, self.aside[which])

    def later(self, time_ns: int, kept: Sequence[AddedBytes], counted: Sequence[int], aside: int) -> Labels:
        return Labels(
            self.origin,
            self.time + time_ns,
            tuple(before + more for before, more in zip(self.kept, kept, strict=True)),
            tuple(before + more for before, more in zip(self.counted, counted, strict=False)),  # none, or all
            self.aside | aside,
        )

    def within(self, most: Iterable[AddedBytes]) -> Labels:
        """Select the labels that keep at most so many bytes."""
        return self.where(np.all([kept <= limit for kept, limit in zip(self.kept, most, strict=True)], axis=0))

    @property
    def in_tables(self) -> tuple[np.ndarray, ...]:
        """The bytes kept that each table counts."""
        return self.counted or self.kept


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limits of `chain`, and the least cost of the rest by `table`.

    The chain is that of the table, or counts some storages aside: then labels say which are kept.
    """

    table: Table
    chain: Chain

    @classmethod
    def of(cls, table: Table, aside: tuple[int, ...] = ()) -> Limit:
        """Return the limit of `table`, with storages set `aside` that are neither in the state nor settled."""
        chain = table.chain
        if not aside:
            return cls(table, chain)
        keep = {index for into in chain.all_into for index in into}
        return cls(table, chain.counting_as(dataclasses.replace(chain.case, aside=aside), keep))


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A bound on plans within all limits, and a plan with that time, if known."""

    bound_ns: float
    legs: tuple[Leg, ...] | None = None


def climb(
    limits: Sequence[Limit],
    bound_ns: float,
    most_ns: float,
    *,
    step_s: float = math.inf,
    deadline: Deadline = NEVER,
    spare_bytes: int = 0,
) -> Optimum:
    """Return the optimum of `limits` if it is below `most_ns`, else a better bound, as far as labels stay few.

    Labels are few while the limit is little above the bound: it rises in steps, each of which may take `step_s`.
    """
    below_ns = most_ns - bound_ns
    found = Optimum(bound_ns)
    with contextlib.suppress(TooManyLabels, OutOfTime):
        for share in LIMITS:
            step_end = deadline.in_at_most(step_s)
            found = optimum(limits, bound_ns + share * below_ns, deadline=step_end, spare_bytes=spare_bytes)
            if found.legs is not None:
                break
    return dataclasses.replace(found, bound_ns=max(found.bound_ns, bound_ns))


def optimum(limits: Sequence[Limit], limit_ns: float, *, deadline: Deadline = NEVER, spare_bytes: int = 0) -> Optimum:
    """Return the best plan within the limits of all chains, to the byte, if it is below `limit_ns`.

    Otherwise `limit_ns` is the bound.

    limits       of chains that differ only in how they count forward-held bytes
    spare_bytes  bytes below the limits that plans must leave free

    Raises TooManyLabels if too many states may still be part of such a plan, and OutOfTime after `deadline`.
    """
    return _LabelSearch(limits, limit_ns, deadline, spare_bytes).run()


class _History:
    """The steps that made labels: each chunk is one step, a transition or a saved item, for many labels."""

    def __init__(self) -> None:
        self._begins: list[int] = [0]
        self._chunks: list[tuple[np.ndarray, tuple[Transition, int] | Item | None]] = [(np.array([-1]), None)]
        self._count = 1

    def note(self, parents: np.ndarray, step: tuple[Transition, int] | Item) -> np.ndarray:
        """Return the origins of the labels that `step` makes from labels with origins `parents`."""
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
    """The saves of regions that end at one cut, from their last segment to the first, with R after each."""

    def __init__(self, limit: Limit, b: int, never_again: frozenset[int]):
        self._table, self._chain, self._b, self._never_again = limit.table, limit.chain, b, never_again
        self._after = self._table.after_saves(b)
        self._steps: list[Step] = []
        self._until = {b: self._after}
        self._settled = b

    def down_to(self, a: int, deadline: Deadline) -> Values:
        """Return R for a region that begins at `a`."""
        while self._settled > a:
            deadline.check()
            self._settled -= 1
            where = self._settled, self._b, self._never_again
            for items in zip(self._chain.items(*where), self._table.chain.items(*where), strict=True):
                self._steps.append(Step(self._settled, items, self._after))
                self._after = self._table.fold_item(self._after, items[1])
            self._steps.append(Step(self._settled, None, self._after))
            self._after = self._table.begun(self._after, self._settled, self._b)
            self._until[self._settled] = self._after
        return self._until[a]

    def steps(self) -> Iterator[Step]:
        """Iterate over the steps of the longest region, each with R after it."""
        return reversed(self._steps)


class _Starts:
    """Regions that end at one cut and recompute the same last nodes: labels where they begin, by cut and k."""

    def __init__(self, folds: list[_Folds]):
        self._folds = folds
        self.labels: dict[int, dict[int, list[Labels]]] = {}

    def rests(self, a: int, deadline: Deadline) -> list[Values]:
        """List R of each table for a region that begins at `a`."""
        return [fold.down_to(a, deadline) for fold in self._folds]

    def steps(self) -> Iterator[tuple[Step, ...]]:
        """Iterate over `_Folds.steps` of all tables together."""
        return zip(*(fold.steps() for fold in self._folds), strict=True)


class _LabelSearch:
    def __init__(self, limits: Sequence[Limit], limit_ns: float, deadline: Deadline, spare_bytes: int):
        self._limits = limits
        self._tables, self._chains = [each.table for each in limits], [each.chain for each in limits]
        self._aside = self._chains[0].case.aside
        self._lacking = np.array(self._chains[0].lacking_aside, dtype=np.int64)
        self._limit_ns, self._deadline = limit_ns, deadline
        self._history = _History()
        none = np.zeros(1, dtype=np.int64)
        kept = tuple(none + spare_bytes for _ in limits)
        start = Labels(none, none, kept, kept if self._aside else (), none)
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
        """Return the labels at `cut` by k that none beats and that may lead to a plan below the limit."""
        found = {}
        for k, parts in arriving.items():
            labels, floor = _joined(parts), self._chains[0].problem.floor_bytes[cut]
            labels = labels._replace(
                kept=tuple(np.maximum(kept, floor) for kept in labels.kept),
                counted=tuple(np.maximum(counted, floor) for counted in labels.counted),
                aside=labels.aside & self._chains[0].open_aside[cut],
            )
            labels = labels.within(chain.most_at(cut, k) for chain in self._chains)
            labels = self._undominated(self._below_limit(labels, [table.values[cut][k] for table in self._tables]))
            if len(labels.time):
                found[k] = labels
        return found

    def _arriving(self, b: int) -> dict[int, list[Labels]]:
        """Apply transitions to the labels where they begin; return labels by k at `b`."""
        found: dict[int, list[Labels]] = {}
        starts: dict[frozenset[int], _Starts] = {}
        for runs in self._runs_into(b):
            transition = runs[0]
            for k, labels in self._at[transition.a].items():
                goes_on, _, _ = self._chains[0].in_state(transition, k)
                added, most = self._entries(runs, k, labels.aside)
                labels = labels.later(transition.time_ns, added, self._counted(runs, k), transition.wants_aside)
                labels = labels.within(limit + more for limit, more in zip(most, added, strict=True))
                if not len(labels.time):
                    continue
                if transition.saves:
                    never_again = transition.never_again
                    if never_again not in starts:
                        starts[never_again] = _Starts([_Folds(limit, b, never_again) for limit in self._limits])
                    rests = starts[never_again].rests(transition.a, self._deadline)
                    to = starts[never_again].labels.setdefault(transition.a, {})
                else:
                    rests, to = [table.values[b] for table in self._tables], found
                labels = self._below_limit(labels, [rest[goes_on] for rest in rests])
                to.setdefault(goes_on, []).append(self._noted(labels, (transition, k)))
        for each in starts.values():
            for k, labels in self._saving(b, each).items():
                found.setdefault(k, []).append(labels)
        return found

    def _entries(
        self, runs: Sequence[Transition], k: int, aside: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (bytes that a run adds, limit on bytes kept before it), by chain and label."""
        added, most = [], []
        for chain, run in zip(self._chains, runs, strict=True):
            _, adds, limit = _by_aside(functools.partial(chain.entry, run, k), aside)
            added.append(adds)
            most.append(limit)
        return added, most

    def _counted(self, runs: Sequence[Transition], k: int) -> list[int]:
        """Return the bytes that each table counts of the storages that a run adds to those kept."""
        if not self._aside:
            return []
        found = []
        for table, run in zip(self._tables, runs, strict=True):
            of_table = table.chain.all_into[run.b][run.index]
            found.append(table.chain.in_state(of_table, k)[1])
        return found

    def _runs_into(self, b: int) -> Iterator[tuple[Transition, ...]]:
        """Yield every run that ends at `b` and may be part of a plan, as each chain sees it."""
        if len(self._chains) == 1 and not self._aside:
            yield from zip(self._chains[0].into[b])
            return
        # A run dominated in one chain may not be in another, nor if labels record storages kept aside.
        first, *others = (chain.all_into[b] for chain in self._chains)
        for index, transition in first.items():
            if all(index in other for other in others):
                yield transition, *(other[index] for other in others)

    def _saving(self, b: int, starts: _Starts) -> dict[int, Labels]:
        """Apply the choices of saves to labels in regions that end at `b`; return labels by k there.

        Labels of regions that begin later join those of earlier ones: all may save the same from there on.
        """
        found: dict[int, Labels] = {}
        counts: dict[int, int] = {}
        for step in starts.steps():
            begun = starts.labels.get(step[0].segment, {}) if step[0].items is None else {}
            parts: dict[int, list[Labels]] = {}
            for at in {**found, **begun}:
                labels = _joined([*([found[at]] if at in found else []), *begun.get(at, [])])
                for to, part in self._after_step(labels, at, step):
                    parts.setdefault(to, []).append(part)
            found = {at: joined for at, each in parts.items() if len((joined := _joined(each)).time)}
            for at, labels in found.items():
                if len(labels.time) > GROWTH_UNTIL_FILTER * counts.get(at, 0):
                    found[at] = self._undominated(labels)
                    counts[at] = len(found[at].time)
        return {
            at: labels.within(chain.most_after_saves(b, at) for chain in self._chains) for at, labels in found.items()
        }

    def _after_step(self, labels: Labels, k: int, step: Sequence[Step]) -> Iterator[tuple[int, Labels]]:
        """Apply a step of regions to `labels` in state `k`, as each table sees it; yield states and labels."""
        rests, items = [each.rest for each in step], [each.items for each in step if each.items is not None]
        if not items:
            labels = labels.within(chain.inside[step[0].segment] for chain in self._chains)
        yield k, self._below_limit(labels, [rest[k] for rest in rests])
        if items:
            item, _ = items[0]
            to = 1 if item.passes_on else k
            saved = self._below_limit(self._with(labels, items), [rest[to] for rest in rests])
            yield to, self._noted(saved, item)

    def _with(self, labels: Labels, items: Sequence[Items]) -> Labels:
        """Return `labels` with an item saved, as each chain and its table count it."""
        item, _ = items[0]
        kept: list[AddedBytes] = [each.bytes for each, _ in items]
        if item.aside:
            pairs = zip(self._chains, items, strict=True)
            kept = [_by_aside(functools.partial(chain.item_bytes, each), labels.aside) for chain, (each, _) in pairs]
        return labels.later(-item.time_ns, kept, [of_table.bytes for _, of_table in items], item.aside)

    def _noted(self, labels: Labels, step: tuple[Transition, int] | Item) -> Labels:
        return labels._replace(origin=self._history.note(labels.origin, step)) if len(labels.time) else labels

    def _below_limit(self, labels: Labels, rests: Sequence[np.ndarray]) -> Labels:
        """Select the labels that may lead to plans below the limit; `rests` are R by level."""
        for at, (table, rest) in enumerate(zip(self._tables, rests, strict=True)):
            work(STEP_S + len(labels.time) * LABEL_S)
            levels = labels.in_tables[at] // table.grain
            least = labels.time + rest[np.minimum(levels, table.levels - 1)]
            labels = labels.where((levels < table.levels) & (least < self._limit_ns))
        return labels

    def _undominated(self, labels: Labels) -> Labels:
        """Drop labels that another one beats in bytes and time; sort the rest by bytes.

        Storages set aside that only the other one keeps count as kept by both: no plan gains more by them.
        """
        if len(labels.time) > MOST_LABELS:
            raise TooManyLabels
        self._deadline.check()
        work(STEP_S + len(labels.time) * LABEL_S)
        counted = () if self._table_allows_it else labels.counted
        order = np.lexsort((-labels.aside, labels.time, *reversed((*labels.kept, *counted))))
        labels = labels.where(order)
        if len(labels.kept) == 1 and not counted:
            return labels.where(self._unbeaten(labels.time, labels.kept[0], labels.aside))
        counted = tuple(column[order] for column in counted)
        columns = np.stack([labels.time, *labels.kept, *counted])  # of a pair, only the first may beat the other
        unbeaten = np.ones(len(labels.time), dtype=bool)
        best, best_aside = columns[:, :0], labels.aside[:0]
        for begin in range(0, len(labels.time), BLOCK):
            block, aside = columns[:, begin : begin + BLOCK], labels.aside[begin : begin + BLOCK]
            work(columns.shape[0] * block.shape[1] * (best.shape[1] + block.shape[1]) * PAIR_S)
            beaten = self._beats(best, best_aside, block, aside).any(axis=0)
            among = self._beats(block, aside, block, aside)
            beaten |= np.triu(among, 1).any(axis=0)
            unbeaten[begin : begin + BLOCK] = ~beaten
            best = np.concatenate([best, block[:, ~beaten]], axis=1)
            best_aside = np.concatenate([best_aside, aside[~beaten]])
            self._deadline.check()
        return labels.where(unbeaten)

    @functools.cached_property
    def _table_allows_it(self) -> bool:
        """Whether its table allows every end of a plan that a label allows, so that its R is no longer.

        That fails if a limit mixes shares (storages alive there are deducted in full, but counted in part), or if kept
        bytes are lifted to a floor. Then a label beats another only if the tables count no more in it, too; otherwise
        its own table might exclude it after it has excluded the other.
        """
        every = (1 << len(self._aside)) - 1
        is_whole = all(
            chain.forward_held_percent == 100 and chain.counted_aside(every) == chain.bytes_aside(every)
            for chain in self._chains
        )
        return is_whole and not any(self._chains[0].problem.floor_bytes)

    def _unbeaten(self, time_ns: np.ndarray, kept: np.ndarray, aside: np.ndarray) -> np.ndarray:
        """Return which labels, sorted by bytes and then by time, no other beats."""
        groups = np.unique(aside) if self._aside else aside[:1]
        best = []  # of each group those that none of it beats: where they are, bytes, times
        for bits in groups:
            at = np.flatnonzero(aside == bits) if len(groups) > 1 else np.arange(len(time_ns))
            slowest = np.full(1, np.inf)
            at = at[time_ns[at] < np.concatenate([slowest, np.minimum.accumulate(time_ns[at])[:-1]])]
            best.append((at, kept[at], np.concatenate([slowest, time_ns[at]])))
        missing = self._missing_bytes(groups, groups) if len(groups) > 1 else None
        found = np.zeros(len(time_ns), dtype=bool)
        for i, (at, bytes_, times) in enumerate(best):
            self._deadline.check()
            work(len(best) * GROUP_S)
            stays = np.ones(len(at), dtype=bool)
            for j, (_, others_bytes, others_times) in enumerate(best):
                if missing is not None and i != j and others_bytes[0] + missing[j, i] <= bytes_[-1]:
                    before = others_bytes.searchsorted(bytes_ - missing[j, i], side="right")
                    stays &= others_times[before] > times[1:]
            found[at[stays]] = True
        return found

    def _missing_bytes(self, aside: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return the bytes that each of `aside` lacks and each of `others` keeps, by `Chain.lacking_aside`."""
        each, every = ((bits[:, None] >> np.arange(len(self._aside)) & 1) for bits in (aside, others))
        return (1 - each) @ (every * self._lacking).T

    def _beats(
        self, columns: np.ndarray, aside: np.ndarray, others: np.ndarray, others_aside: np.ndarray
    ) -> np.ndarray:
        """Return whether each of the first labels beats each of the others; columns are time, kept, counted."""
        beats = columns[0][:, None] <= others[0]
        missing, of_chains = self._missing_bytes(aside, others_aside), len(self._chains)
        for kept, other in zip(columns[1 : of_chains + 1], others[1 : of_chains + 1], strict=True):
            beats &= kept[:, None] + missing <= other
        for counted, other in zip(columns[of_chains + 1 :], others[of_chains + 1 :], strict=True):
            beats &= counted[:, None] <= other
        return beats


def _by_aside(function: Callable[[int], Any], aside: np.ndarray) -> np.ndarray:
    """Apply `function` to what each label keeps aside, in the last dimension: there are few distinct values."""
    each, which = np.unique(aside, return_inverse=True)
    return np.array([function(bits) for bits in each.tolist()], dtype=np.int64).T[..., which]


def _joined(parts: Sequence[Labels]) -> Labels:
    if len(parts) == 1:
        return parts[0]
    origin, time_ns, kept, counted, aside = zip(*parts, strict=True)
    each_kept, each_counted = (
        tuple(np.concatenate(of_chain) for of_chain in zip(*columns, strict=True)) for columns in (kept, counted)
    )
    return Labels(np.concatenate(origin), np.concatenate(time_ns), each_kept, each_counted, np.concatenate(aside))
