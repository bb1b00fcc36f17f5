"""The tables of `chain_dp.py`: R from the last cut to the first, V from the first to the last, and a plan read off R.

A table is an array over levels, the grains kept at a cut; at a cut with a tracked storage there is one for its not
being kept (k = 0) and one for its being kept (k = 1).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from remat.plans import Region
from remat.solvers.chain import Chain, Item, Transition

MOST_CELLS = 60_000_000  # of a table: longer chains get coarser grains

RECENT = 2  # segments
FREQUENT_SIZES, PARTS = 60, 200  # from which grains are tried
Track = list[np.ndarray]  # one array, or two, for k = 0 and 1


class Table:
    """R, and for every entry the run that it goes on with."""

    def __init__(self, chain: Chain, levels: tuple[int, int]):
        self.chain = chain
        self.grain = self._choose_grain(levels)
        tracked = (chain.tracked_bytes(cut) for cut in range(chain.count + 1))
        self.levels = max((max(chain.most) + max(tracked)) // self.grain + 1, 1)
        states = [1 if kept is None else 2 for kept in chain.tracked]
        self.values = [[np.full(self.levels, np.inf) for _ in range(n)] for n in states]
        self.choice = [[np.full(self.levels, -1, dtype=np.int32) for _ in range(n)] for n in states]
        for values in self.values[-1]:
            values[:] = 0.0
        for b in range(chain.count, 0, -1):
            self._cap_forward(self.values, b)
            for transition, k, through in self._through_transitions_into(b):
                self._improve(transition, k, through)
        self._cap_forward(self.values, 0)

    def least_time_ns(self) -> float | None:
        """The bound; None where no plan is left."""
        least = float(self.values[0][0][0])
        return None if math.isinf(least) else max(least, 0.0)

    def _choose_grain(self, levels: tuple[int, int]) -> int:
        """The grain, within `levels`, that loses least by rounding: sizes are often multiples of one number."""
        chain = self.chain
        room = max(min(self.chain.problem.budget_bytes, max(chain.most)), 1)
        most = min(levels[1], MOST_CELLS // (2 * (chain.count + 1)))
        finest, coarsest = max(room // most, 1), max(3 * room // most, room // levels[0], 1)
        counted = collections.Counter(self._sizes())
        counted.pop(0, None)
        sizes = np.array(list(counted), dtype=np.int64)
        times = np.array(list(counted.values()), dtype=np.int64)
        candidates = {finest, coarsest}
        for size, _ in counted.most_common(FREQUENT_SIZES):
            parts = np.arange(-(-size // coarsest), size // finest + 1)
            candidates.update((size // parts[parts > 0][:PARTS]).tolist())
        usable = [grain for grain in sorted(candidates) if finest <= grain <= coarsest]
        lost = [int((sizes % grain * times).sum()) + grain for grain in usable]
        return usable[int(np.argmin(lost))]

    def _sizes(self) -> Iterator[int]:
        """What is rounded: what each segment keeps if it is plain, saves, and hands on."""
        chain = self.chain
        for b in range(1, chain.count + 1):
            yield from (transition.keeps_bytes for transition in chain.into[b] if transition.b - transition.a == 1)
            yield from (item.bytes for item in chain.items(b - 1, b))
            yield chain.tracked_bytes(b)

    # Filling

    def _through_transitions_into(self, b: int) -> Iterator[tuple[Transition, int, np.ndarray]]:
        """Every transition that ends at `b`, with k at its start and R there if that transition is taken."""
        chain = self.chain
        unsaved = self.values[b]
        saved = self._after_saves(b)
        at = b
        for transition in chain.into[b]:
            if transition.saves:
                while at > transition.a:
                    at -= 1
                    saved = self._fold(saved, at, b)
            for k in range(len(self.values[transition.a])):
                through = self._through(saved if transition.saves else unsaved, transition, k)
                if through is not None:
                    yield transition, k, through

    def _after_saves(self, b: int) -> Track:
        """R[b] where a region ends: what is kept there must leave room for its recomputation to begin."""
        found = [values.copy() for values in self.values[b]]
        for values in found:
            self._cap(values, self.chain.most_after[b])
        return found

    def _fold(self, after: Track, segment: int, b: int) -> Track:
        """`after` with the choice of what a region that ends at `b` saves in `segment`."""
        tracked = self.chain.tracked[b]
        for item in self.chain.items(segment, b):
            if item.passes_on:
                return [self._saving(after[0], item, after[1])]
            after = [self._saving(values, item, values) for values in after]
        made_here = tracked is not None and tracked.segment == segment
        return after[:1] if made_here else after

    def _saving(self, unsaved: np.ndarray, item: Item, saved: np.ndarray) -> np.ndarray:
        """The better of not saving `item` and saving it."""
        weight = item.bytes // self.grain
        if weight == 0 and unsaved is saved:
            return unsaved - item.time_ns
        result = unsaved.copy()
        if weight < self.levels:
            end = self.levels - weight
            np.minimum(unsaved[:end], saved[weight:] - item.time_ns, out=result[:end])
        return result

    def _entry(self, transition: Transition, k: int) -> tuple[int, int, int]:
        """(k at the end of `transition`, grains that it adds, grains that may be kept before it)."""
        chain = self.chain
        at_bytes = chain.tracked_bytes(transition.a)
        kept_now = transition.wants and not k
        shift = (transition.keeps_bytes + (at_bytes if kept_now else 0)) // self.grain
        most = transition.most_bytes + (at_bytes if k and transition.counts else 0)
        goes_on = bool(k or transition.wants) if chain.persists(transition.a, transition.b) else transition.passes_on
        return int(goes_on), shift, most // self.grain

    def _through(self, after: Track, transition: Transition, k: int) -> np.ndarray | None:
        """R at the start of `transition` if it is taken, for all levels that it allows."""
        goes_on, shift, most = self._entry(transition, k)
        length = min(most + 1, self.levels - shift)
        if length <= 0:
            return None
        return after[goes_on][shift : shift + length] + transition.time_ns

    def _improve(self, transition: Transition, k: int, through: np.ndarray) -> None:
        values = self.values[transition.a][k][: len(through)]
        better = through < values
        if better.any():
            np.copyto(values, through, where=better)
            self.choice[transition.a][k][: len(through)][better] = transition.index

    def _cap_forward(self, table: list[Track], cut: int) -> None:
        for k, values in enumerate(table[cut]):
            self._cap(values, self.chain.most[cut] + (self.chain.tracked_bytes(cut) if k else 0))

    def _cap(self, values: np.ndarray, most_bytes: int) -> None:
        values[max(most_bytes // self.grain + 1, 0) :] = np.inf

    # Reduced costs

    def useful(self, most_ns: float) -> set[int]:
        """Runs that a plan faster than `most_ns` may contain: V before a run plus R through it bounds such plans."""
        reached = self._reached()
        found = set()
        for b in range(self.chain.count, 0, -1):
            for transition, k, through in self._through_transitions_into(b):
                before = reached[transition.a][k][: len(through)]
                if transition.index not in found and float((before + through).min()) < most_ns:
                    found.update(self.chain.beside[transition.a, b])
        return found

    def _reached(self) -> list[Track]:
        """V: least time of the segments before a cut that keep so much. It may understate.

        A region's limit on what is kept before it is taken as that of the loosest region with the same start; and a
        storage tracked at its end is free there if it was made more than RECENT segments before.
        """
        chain = self.chain
        table = [[np.full(self.levels, np.inf) for _ in values] for values in self.values]
        table[0][0][0] = 0.0
        out_of: list[list[Transition]] = [[] for _ in range(chain.count + 1)]
        for transitions in chain.into:
            for transition in transitions:
                out_of[transition.a].append(transition)
        for a in range(chain.count):
            self._cap_forward(table, a)
            for k, before in enumerate(table[a]):
                if not np.isinf(before).all():
                    self._reach_from(
                        table, before, k, [transition for transition in out_of[a] if transition.saves], saving=True
                    )
                    for transition in out_of[a]:
                        if not transition.saves:
                            self._reach_from(table, before, k, [transition], saving=False)
        return table

    def _reach_from(
        self, table: list[Track], before: np.ndarray, k: int, transitions: list[Transition], *, saving: bool
    ) -> None:
        """Take transitions that start at one cut, where `before` is V for `k`, into account in V at their ends."""
        if not transitions:
            return
        chain, settled = self.chain, transitions[0].a
        most = max(self._entry(transition, k)[2] for transition in transitions)
        folded = before.copy()
        folded[max(most + 1, 0) :] = np.inf
        for transition in sorted(transitions, key=lambda transition: transition.b):
            while saving and settled < transition.b - RECENT:
                for item in chain.items(settled, transition.b):
                    folded = self._with_saving(folded, self._settled_bytes(item, transition.b), item.time_ns)
                settled += 1
            track = [folded]
            for segment in range(settled, transition.b) if saving else ():
                for item in chain.items(segment, transition.b):
                    if item.passes_on:
                        kept = self._shifted(track[0], item.bytes // self.grain) - item.time_ns
                        track = [track[0], kept]
                    else:
                        track = [self._with_saving(values, item.bytes, item.time_ns) for values in track]
            goes_on, shift, _ = self._entry(transition, k)
            ends: list[tuple[int, np.ndarray]] = [(goes_on, track[0])]
            if len(track) == 2:
                ends.append((1, track[1]))
            elif saving and len(table[transition.b]) == 2 and not chain.persists(transition.a, transition.b):
                ends.append((1, track[0]))
            for end_k, values in ends:
                after = self._shifted(values, shift) + transition.time_ns
                if transition.saves:
                    self._cap(after, chain.most_after[transition.b])
                np.minimum(table[transition.b][end_k], after, out=table[transition.b][end_k])

    def _settled_bytes(self, item: Item, b: int) -> int:
        return item.bytes - (self.chain.tracked_bytes(b) if item.passes_on else 0)

    def _with_saving(self, values: np.ndarray, size_bytes: int, time_ns: int) -> np.ndarray:
        weight = size_bytes // self.grain
        result = values.copy() if weight else values - time_ns
        if 0 < weight < self.levels:
            np.minimum(values[weight:], values[:-weight] - time_ns, out=result[weight:])
        return result

    def _shifted(self, values: np.ndarray, grains: int) -> np.ndarray:
        """`values` for as many grains more kept."""
        if grains == 0:
            return values
        result = np.full_like(values, np.inf)
        if grains < self.levels:
            result[grains:] = values[:-grains]
        return result

    # Reading

    def plan(self, spare_bytes: int = 0) -> tuple[Region, ...] | None:
        """The regions that the table finds best if `spare_bytes` are taken from the start on."""
        cut, k, level = 0, 0, -(-spare_bytes // self.grain)
        if level >= self.levels or np.isinf(self.values[0][0][level]):
            return None
        regions: list[Region] = []
        while cut < self.chain.count:
            index = int(self.choice[cut][k][level])
            run = self.chain.problem.runs[index]
            transition = next(transition for transition in self.chain.into[run.b] if transition.index == index)
            value = self.values[cut][k][level] - transition.time_ns
            k, shift, _ = self._entry(transition, k)
            level += shift
            saved: list[int] = []
            if transition.saves:
                k, level, saved = self._saved(transition, k, level, value)
            if run.region is not None:
                mended = (node for node in saved if node not in run.never_again)
                regions.append(dataclasses.replace(run.region, saved=tuple(sorted(mended))))
            cut = run.b
        return tuple(regions)

    def _saved(self, transition: Transition, k: int, level: int, value: float) -> tuple[int, int, list[int]]:
        """(k, level, nodes saved) at the end of `transition`, whose R at its start is `value`."""
        folds: list[tuple[Item, Track]] = []
        after = self._after_saves(transition.b)
        for segment in range(transition.b - 1, transition.a - 1, -1):
            for item in self.chain.items(segment, transition.b):
                folds.append((item, after))
                if item.passes_on:
                    after = [self._saving(after[0], item, after[1])]
                else:
                    after = [self._saving(values, item, values) for values in after]
            if (
                len(after) == 2
                and not self.chain.persists(transition.a, transition.b)
                and self._made_in(transition.b, segment)
            ):
                after = after[:1]
        saved = []
        for item, before in reversed(folds):
            if before[k][level] == value:
                continue
            saved.append(item.node)
            level += item.bytes // self.grain
            value += item.time_ns
            k = 1 if item.passes_on else k
        return k, level, saved

    def _made_in(self, cut: int, segment: int) -> bool:
        tracked = self.chain.tracked[cut]
        return tracked is not None and tracked.segment == segment
