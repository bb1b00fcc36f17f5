"""The table of `chain_dp.py`: R from the last cut to the first, and plans read off it.

A table is an array over levels, the grains kept at a cut; at a cut with a state storage there is one for its not
being kept (k = 0) and one for its being kept (k = 1).

Whether finer grains are worth their time is known before they are tried: where the best plan of a table is within the
chain's limits under finer grains as well (`admits`), their table says the same of it, and its bound is no higher.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.solvers.chain import Chain, Item, Transition
from remat.solvers.deadline import NEVER, Deadline
from remat.work import work

TRANSITION_S, LEVEL_S = 6e-6, 1.5e-9  # of work: for a transition or an item, and for a level of it
MOST_CELLS = 60_000_000  # of a table: longer chains get coarser grains
FREQUENT_SIZES, PARTS = 60, 200  # from which grains are tried

Values = list[np.ndarray]  # times by level: one array, or two, for k = 0 and 1


@dataclasses.dataclass(frozen=True)
class Leg:
    """One run of a plan as the chain sees it: begun in state `k`, saving `saved`."""

    transition: Transition
    k: int
    saved: tuple[Item, ...] = ()

    @property
    def passes_on(self) -> bool:
        return any(item.passes_on for item in self.saved)


def regions_of(problem: Problem, legs: Iterable[Leg]) -> tuple[Region, ...]:
    """Return the plan that `legs` describe."""
    found = []
    for leg in legs:
        run = problem.runs[leg.transition.index]
        if run.region is not None:
            found.append(dataclasses.replace(run.region, saved=tuple(sorted(item.node for item in leg.saved))))
    return tuple(found)


def admits(chain: Chain, legs: Iterable[Leg], grain: int) -> bool:
    """Return whether a table of `grain` allows the plan `legs`, whose time then limits its bound."""
    level = 0
    for leg in legs:
        transition = leg.transition
        k, adds, most = chain.entry(transition, leg.k)
        if level > most // grain:
            return False
        level += adds // grain + sum(item.bytes // grain for item in leg.saved)
        level = max(level, chain.problem.floor_bytes[transition.b] // grain)
        k = int(k or leg.passes_on)
        if transition.saves and level > chain.most_after_saves(transition.b, k) // grain:
            return False
        if level > chain.most_at(transition.b, k) // grain:
            return False
    return True


def lost_bytes(chain: Chain, legs: Iterable[Leg], grain: int) -> int:
    """Return the bytes of kept storages that rounding to `grain` leaves out."""
    return sum(
        chain.entry(leg.transition, leg.k)[1] % grain + sum(item.bytes % grain for item in leg.saved) for leg in legs
    )


def choose_grain(chain: Chain, levels: tuple[int, int], *, may_lose: float = 0.0) -> int:
    """Choose the coarsest grain within `levels` that loses at most `may_lose` of the room by rounding.

    If there is none, the grain that loses least. All sizes are rounded once.

    Sizes are often multiples of few numbers, so grains are tried among the parts of those that occur.
    """
    room = max(chain.room, 1)
    most = min(levels[1], MOST_CELLS // (2 * (chain.count + 1)))
    finest, coarsest = max(room // most, 1), max(3 * room // most, room // levels[0], 1)
    counted = collections.Counter(_sizes(chain))
    counted.pop(0, None)
    sizes = np.array(list(counted), dtype=np.int64)
    times = np.array(list(counted.values()), dtype=np.int64)
    candidates = {finest, coarsest}
    for size, _ in counted.most_common(FREQUENT_SIZES):
        parts = np.arange(-(-size // coarsest), size // finest + 1)
        candidates.update((size // parts[parts > 0][:PARTS]).tolist())
    usable = [grain for grain in sorted(candidates) if finest <= grain <= coarsest]
    lost = [int((sizes % grain * times).sum()) for grain in usable]
    little = [grain for grain, bytes_ in zip(usable, lost, strict=True) if bytes_ <= may_lose * room]
    return little[-1] if little else min(zip(map(sum, zip(usable, lost, strict=True)), usable, strict=True))[1]


def _sizes(chain: Chain) -> Iterator[int]:
    """Iterate over the sizes that are rounded: plain segments, saves, and state storages."""
    for b in range(1, chain.count + 1):
        yield from (transition.keeps_bytes for transition in chain.into[b] if transition.b - transition.a == 1)
        yield from (item.bytes for item in chain.items(b - 1, b))
        yield chain.state_storage_bytes(b)


class Table:
    """R, and the run that each entry goes on with. Raises OutOfTime after `deadline`."""

    def __init__(self, chain: Chain, grain: int, deadline: Deadline = NEVER):
        self.chain = chain
        self.grain = grain
        self.levels = max(chain.room // self.grain + 1, 1)
        states = [1 if shared is None else 2 for shared in chain.state_storages]
        self.values = [[np.full(self.levels, np.inf) for _ in range(n)] for n in states]
        self.choice = [[np.full(self.levels, -1, dtype=np.int32) for _ in range(n)] for n in states]
        for values in self.values[-1]:
            values[:] = 0.0
        for b in range(chain.count, 0, -1):
            self.cap_forward(self.values, b)
            self._lift(b)
            deadline.check()
            work(len(chain.into[b]) * (TRANSITION_S + self.levels * LEVEL_S))
            for transition, k, through in self.through_transitions_into(b):
                self._improve(transition, k, through)
        self.cap_forward(self.values, 0)

    def floor(self, cut: int) -> int:
        """Return the least number of grains that count as kept at `cut` (`offloading/relief.py`)."""
        return min(self.chain.problem.floor_bytes[cut] // self.grain, self.levels - 1)

    def _lift(self, cut: int) -> None:
        """Raise levels below the floor at `cut` to the floor."""
        floor = self.floor(cut)
        for values, choice in zip(self.values[cut], self.choice[cut], strict=True):
            values[:floor], choice[:floor] = values[floor], choice[floor]

    def least_time_ns(self) -> float | None:
        """Return the bound; None if no plan is left."""
        least = float(self.values[0][0][0])
        return None if math.isinf(least) else max(least, 0.0)

    # Filling

    def through_transitions_into(self, b: int) -> Iterator[tuple[Transition, int, np.ndarray]]:
        """Yield every transition that ends at `b`, with k at its start and R there if that transition is taken."""
        chain = self.chain
        folded: dict[frozenset[int], tuple[int, Values]] = {}  # nodes never recomputed -> (first segment folded, R)
        for transition in chain.into[b]:
            after = self.values[b]
            if transition.saves:
                at, after = folded.get(transition.never_again) or (b, self.after_saves(b))
                while at > transition.a:
                    at -= 1
                    after = self._fold(after, at, transition)
                folded[transition.never_again] = at, after
            for k in range(len(self.values[transition.a])):
                through = self._through(after, transition, k)
                if through is not None:
                    yield transition, k, through

    def after_saves(self, b: int) -> Values:
        """Return R[b] where a region ends: the kept bytes must leave room for its recomputation to begin."""
        found = [values.copy() for values in self.values[b]]
        for k, values in enumerate(found):
            self.cap(values, self.chain.most_after_saves(b, k))
        return found

    def _fold(self, after: Values, segment: int, transition: Transition) -> Values:
        """Choose the saves in `segment` of regions that end as `transition` does."""
        for item in self.chain.items(segment, transition.b, transition.never_again):
            after = self.fold_item(after, item)
        return self.begun(after, segment, transition.b)

    def fold_item(self, after: Values, item: Item) -> Values:
        """Choose whether to save `item`."""
        if item.passes_on:
            return [self._saving(after[0], item, after[1])]
        return [self._saving(values, item, values) for values in after]

    def begun(self, after: Values, segment: int, b: int) -> Values:
        """Return `after` where `segment` begins: its storages are not kept yet, and kept bytes are limited."""
        state_storage = self.chain.state_storages[b]
        if state_storage is not None and state_storage.segment == segment:
            after = after[:1]
        return self._capped(after, self.chain.inside[segment])

    def _capped(self, after: Values, most_bytes: int) -> Values:
        """Limit the bytes kept in `after`."""
        if most_bytes // self.grain >= self.levels - 1:
            return after
        found = [values.copy() for values in after]
        for values in found:
            self.cap(values, most_bytes)
        return found

    def _saving(self, unsaved: np.ndarray, item: Item, saved: np.ndarray) -> np.ndarray:
        """Return the minimum of not saving `item` and saving it."""
        weight = item.bytes // self.grain
        if weight == 0 and unsaved is saved:
            return unsaved - item.time_ns
        if weight >= self.levels:
            return unsaved
        work(TRANSITION_S + self.levels * LEVEL_S)
        result = np.empty_like(unsaved)
        end = self.levels - weight
        np.subtract(saved[weight:], item.time_ns, out=result[:end])
        np.minimum(unsaved[:end], result[:end], out=result[:end])
        result[end:] = unsaved[end:]
        return result

    def entry(self, transition: Transition, k: int) -> tuple[int, int, int]:
        """Return `Chain.entry` in grains."""
        goes_on, adds, most = self.chain.entry(transition, k)
        return goes_on, adds // self.grain, most // self.grain

    def _through(self, after: Values, transition: Transition, k: int) -> np.ndarray | None:
        """Return R at the start of `transition` if it is taken, for all levels that it allows."""
        goes_on, shift, most = self.entry(transition, k)
        length = min(most + 1, self.levels - shift)
        if length <= 0:
            return None
        return after[goes_on][shift : shift + length] + transition.time_ns

    def _improve(self, transition: Transition, k: int, through: np.ndarray) -> None:
        values = self.values[transition.a][k][: len(through)]
        better = through < values
        if not better.any():
            return
        np.copyto(values, through, where=better)
        np.copyto(self.choice[transition.a][k][: len(through)], np.int32(transition.index), where=better)

    def cap_forward(self, table: list[Values], cut: int) -> None:
        for k, values in enumerate(table[cut]):
            self.cap(values, self.chain.most_at(cut, k))

    def cap(self, values: np.ndarray, most_bytes: int) -> None:
        values[max(most_bytes // self.grain + 1, 0) :] = np.inf

    # Reading

    def legs(self, spare_bytes: int = 0) -> list[Leg] | None:
        """Read the best plan off the table with `spare_bytes` less from the start; None without a plan."""
        cut, k, level = 0, 0, -(-spare_bytes // self.grain)
        if level >= self.levels or np.isinf(self.values[0][0][level]):
            return None
        found: list[Leg] = []
        while cut < self.chain.count:
            index = int(self.choice[cut][k][level])
            cut = self.chain.problem.runs[index].b
            transition = next(transition for transition in self.chain.into[cut] if transition.index == index)
            value = self.values[transition.a][k][level] - transition.time_ns
            goes_on, shift, _ = self.entry(transition, k)
            saved = self._saved(transition, goes_on, level + shift, value) if transition.saves else ()
            found.append(Leg(transition, k, saved))
            k = int(goes_on or found[-1].passes_on)
            level = max(level + shift + sum(item.bytes // self.grain for item in saved), self.floor(cut))
        return found

    def _saved(self, transition: Transition, k: int, level: int, value: float) -> tuple[Item, ...]:
        """Return the items that `transition` saves if `value` is R and `level` is kept where its saves begin."""
        folds: list[tuple[Item, Values]] = []
        after = self.after_saves(transition.b)
        for segment in range(transition.b - 1, transition.a - 1, -1):
            for item in self.chain.items(segment, transition.b, transition.never_again):
                folds.append((item, after))
                after = self.fold_item(after, item)
            after = self.begun(after, segment, transition.b)
        saved = []
        for item, before in reversed(folds):
            if before[k][level] == value:
                continue
            saved.append(item)
            level += item.bytes // self.grain
            value += item.time_ns
            k = 1 if item.passes_on else k
        return tuple(saved)
