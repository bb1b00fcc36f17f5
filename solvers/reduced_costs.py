"""Which runs a better plan may contain: those through which V and R together stay below the best known time.

V[b][k][p] is the least time of the segments before cut b that keep p bytes, as R (`chain_table.py`) is that of those
after it. It takes longer than R and may understate, in three ways:

* A region's limit on what is kept before it is that of the loosest region with the same start.
* The state storage of a region's end is free there if it was made more than RECENT segments before.
* Every node more than RECENT segments before a region's end counts as recomputed, so that saving it may gain time.
"""

from __future__ import annotations

import numpy as np

from remat.solvers.chain import Item, Transition
from remat.solvers.chain_table import LEVEL_S, TRANSITION_S, Table, Values
from remat.solvers.deadline import NEVER, Deadline
from remat.work import work

RECENT = 2  # segments


def useful_runs(table: Table, most_ns: float, deadline: Deadline = NEVER) -> set[int]:
    """Return the runs that a plan faster than `most_ns` may contain. Raises OutOfTime after `deadline`."""
    chain, reached = table.chain, _ReachedValues(table, deadline).values
    found: set[int] = set()
    for b in range(chain.count, 0, -1):
        deadline.check()
        work(len(chain.into[b]) * (TRANSITION_S + table.levels * LEVEL_S))
        for transition, k, through in table.through_transitions_into(b):
            before = reached[transition.a][k][: len(through)]
            if transition.index not in found and float((before + through).min()) < most_ns:
                found.update(chain.beside[transition.a, b])
    return found


class _ReachedValues:
    """V."""

    def __init__(self, table: Table, deadline: Deadline):
        self.table, chain = table, table.chain
        self.values = [[np.full(table.levels, np.inf) for _ in values] for values in table.values]
        self.values[0][0][0] = 0.0
        out_of = chain.out_of(transition for into in chain.into for transition in into)
        for a in range(chain.count):
            deadline.check()
            work(len(out_of[a]) * (TRANSITION_S + table.levels * LEVEL_S))
            table.cap_forward(self.values, a)
            self._lift(a)
            saving = [transition for transition in out_of[a] if transition.saves]
            others = [transition for transition in out_of[a] if not transition.saves]
            for k, before in enumerate(self.values[a]):
                if np.isinf(before).all():
                    continue
                if saving:
                    self._save_from(before, k, saving)
                for transition in others:
                    _, _, most = table.entry(transition, k)
                    self._reach(transition, k, [_up_to(before, most)])

    def _lift(self, cut: int) -> None:
        """Raise levels below the floor at `cut` to the floor."""
        floor = self.table.floor(cut)
        for values in self.values[cut]:
            values[floor] = values[: floor + 1].min()
            values[:floor] = np.inf

    def _save_from(self, before: np.ndarray, k: int, transitions: list[Transition]) -> None:
        """Reach the ends of saving regions that start at one cut, where `before` is V for `k`."""
        chain, settled = self.table.chain, transitions[0].a
        folded = _up_to(before, max(self.table.entry(transition, k)[2] for transition in transitions))
        for transition in sorted(transitions, key=lambda transition: transition.b):
            b = transition.b
            while settled < b - RECENT:
                for item in chain.items(settled, b):
                    folded = self._with_saving(folded, item, free=chain.state_storage_bytes(b) if item.passes_on else 0)
                settled += 1
            values = [folded]
            segments = range(settled, b)
            for item in (i for s in segments for i in chain.items(s, b, transition.never_again)):
                if item.passes_on:
                    kept = self._shifted(values[0], item.bytes // self.table.grain) - item.time_ns
                    values = [values[0], kept]
                else:
                    values = [self._with_saving(each, item) for each in values]
            self._reach(transition, k, values)

    def _reach(self, transition: Transition, k: int, values: Values) -> None:
        """Reach the end of `transition`, after whose saves V is `values`."""
        table, b = self.table, transition.b
        goes_on, shift, _ = table.entry(transition, k)
        ends = [(goes_on, values[0])]
        if len(values) == 2:
            ends.append((1, values[1]))
        elif transition.saves and len(self.values[b]) == 2 and not table.chain.persists(transition.a, b):
            ends.append((1, values[0]))
        for end_k, reached in ends:
            after = self._shifted(reached, shift) + transition.time_ns
            if transition.saves:
                table.cap(after, table.chain.most_after_saves(b, end_k))
            np.minimum(self.values[b][end_k], after, out=self.values[b][end_k])

    def _with_saving(self, values: np.ndarray, item: Item, free: int = 0) -> np.ndarray:
        """Return the minimum of not saving `item` and saving it; `free` of its bytes are not counted."""
        work(TRANSITION_S + len(values) * LEVEL_S)
        weight = (item.bytes - free) // self.table.grain
        result = values.copy() if weight else values - item.time_ns
        if 0 < weight < len(values):
            np.minimum(values[weight:], values[:-weight] - item.time_ns, out=result[weight:])
        return result

    def _shifted(self, values: np.ndarray, grains: int) -> np.ndarray:
        """Shift `values` by `grains` more kept."""
        if grains == 0:
            return values
        result = np.full_like(values, np.inf)
        if grains < len(values):
            result[grains:] = values[:-grains]
        return result


def _up_to(values: np.ndarray, most: int) -> np.ndarray:
    """Limit `values` to at most `most` grains kept."""
    result = values.copy()
    result[max(most + 1, 0) :] = np.inf
    return result
