"""The search for the cheapest cut of a joint graph whose compiled code keeps the budget.

1. PyTorch's own choice is lowered. Where it fits, it is kept. On a GPU, code that would exceed frees its buffers at
   once, here and in what follows.
2. Otherwise sums that would wait for their readers get kernels of their own, backward gets inputs in their own layout
   and not in that of convolutions, and the program is solved. Its table is corrected, stage by stage, by the bytes that
   the lowered code of a choice needs: of PyTorch's own, unless what that saves exceeds the budget alone; it is not
   lowered then. The program's answer is lowered. Where that code exceeds the budget, the missing bytes of its highest
   stage (of every stage, where code frees at once) are counted to the values that the answer makes again there. Where
   the program has no answer, the choice that needs least, and PyTorch's at every ratio of its memory budget, are
   lowered instead; where the former needs what the table says, or much more than it may, no others are. After `ROUNDS`
   of this at most, the cheapest that really fits is handed out.
3. Where the first `MISSES` choices exceed, and the last comes no nearer, the first table is solved for lower limits
   than asked, if it has an answer at all. Where these exceed too, PyTorch's choices at every ratio are lowered until
   one fits, but for those that need more by the table than what was seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat.compiled.lowered_cuts import NO_LIMIT, LoweredCuts
from remat.compiled.program import Choice, CompiledBytes, Solved, judged

ROUNDS = 6
MISSES = 3
HALVINGS = 6
NEAR = 0.01  # of what a graph may need: limits that are not told apart
FAR_OFF = 0.05  # of what a graph may need: where the choice that needs least exceeds by more, none is tried
EQUAL_SHARE = 0.002  # of what a graph may need: where table and code differ by less, the table's answer is the last
LEAST_SAVING = 0.005  # of the price: an answer that saves less is not lowered


class Search(LoweredCuts):
    """The search among the cuts of one joint graph.

    tried       the choices that were lowered to be handed out
    has_answer  whether the first table has a choice that keeps the budget
    first       what the code of the first choice that was lowered needs beside the table's bytes
    on_try      is given the bytes of what was tried last
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.tried: list[Choice] = []
        self.has_answer = False
        self.on_try: Callable[[int], None] = lambda needs: None

    def note(self, choice: Choice, needs: int) -> None:
        if choice in self.tried:
            self.on_try(needs)

    def run(self) -> tuple[Choice, float | None] | None:
        """Search, and return (the cheapest choice that fits, the bound); None where none was found.

        The bound is for a table that is corrected by the code of one choice, whether that fits or not.
        """
        if self.fits_by_default() or (self.spare_bytes() and self.fits_by_default()):
            return self.default, None
        self.first = CompiledBytes(0, (0,) * len(self.default.alive_bytes))
        bound = self._learn()
        if self._cheapest() is None:
            self._tighten()
        if (best := self._cheapest()) is None:
            return None
        if bound is None:
            bound = self.solve(self.most_bytes, self._more(best), best).bound_us
        return best, bound if math.isfinite(bound) else 0.0  # the code needs less than its table

    def _hear(self, choice: Choice) -> Choice:
        """Give the table the order of calls, the bytes and the draws that the code of the first choice has.

        Returns the choice as the table judges it in that order.
        """
        self.follow(self.lower(choice, is_draft=True))
        if "portfolio" in vars(self):
            self.portfolio = [judged(self.joint, each.saved) for each in self.portfolio]
        choice = judged(self.joint, choice.saved)
        self.first = self._more(choice)
        self.save_unread(self.lower(choice).ways)
        return choice

    def _learn(self) -> float | None:
        """Lower the program's answers, and correct its table by the code of each.

        Returns the last bound; None where the table was corrected by the code of several choices.
        """
        last, bound = self.default, 0.0
        known = set[frozenset[str]]()  # the choices by whose code the table is corrected
        if self.default.saved in self.lowered:
            last = self._hear(self.default)
            known.add(last.saved)
        more = self.first
        for number in range(ROUNDS):
            solved = self.solve(self.most_bytes, more, last, quick=not known)
            self.has_answer |= number == 0 and solved.choice is not None
            bound = solved.bound_us
            if (found := self._next(self._answers(solved, more), more)) is None:
                break
            last = found
            self.tried.append(last)
            if not known:
                last = self.tried[-1] = self._hear(found)
                more, known = self.first, {last.saved}
                continue
            is_as_said = abs(more.peak_bytes(last) - self.needs(self.lower(last))) <= EQUAL_SHARE * self.most_bytes
            if not self.fits(last):
                lowered = self.lower(last)
                is_far = lowered.redrawn is not None and self.needs(lowered) > (1 + FAR_OFF) * self.most_bytes
                if solved.choice is None and (is_as_said or is_far):  # it needs least of all, as far as is known
                    break
                if lowered.redrawn is None:
                    self.save_unread(lowered.ways)
                more = self._corrected(more, last)
                known.add(last.saved)
                needed = [self.needs(self.lower(each)) for each in self.tried]
                if len(needed) >= MISSES and self._cheapest() is None and needed[-1] >= min(needed[:-1]):
                    break
            elif is_as_said:
                break
            else:
                more = dataclasses.replace(self._more(last), making=more.making)  # of other choices, it stays
                known = {last.saved} if not more.making else known | {last.saved}
        else:
            return None
        return bound if len(known) == 1 else None

    def _tighten(self) -> None:
        """Solve the first table for lower limits than asked: its answers need more bytes than it says.

        First for as much less as an answer exceeds, then halfway between a limit that is met, or the least that any
        choice needs by the table, and a limit that is not met.
        """
        more, high, last = self.first, self.most_bytes, self.default
        least = self._least(more)
        low = 0 if least is None else more.peak_bytes(least)
        limit = max(high - min((self.needs(self.lower(each)) - high for each in self.tried), default=0), low)
        for _ in range(HALVINGS if self.has_answer else 0):
            solved = self.solve(limit, more, last, quick=True)
            if solved.choice is not None:
                last = solved.choice
                self.tried.append(last)
            if solved.choice is None or self.fits(last):
                low = limit
            else:
                high = limit
            if high - low <= NEAR * self.most_bytes:
                break
            limit = (low + high) // 2
        if self._cheapest() is None and least is not None:
            self.tried.append(least)
        if self._cheapest() is None:  # tables are off by less than what tells the choices of most ratios apart
            seen = min((self.needs(self.lower(each)) for each in self.tried), default=NO_LIMIT)
            may_fit = (each for each in self.portfolio if each.kept_bytes <= self.most_bytes)
            hopeful = {each.saved: each for each in may_fit if more.peak_bytes(each) < seen}
            for choice in sorted(hopeful.values(), key=more.peak_bytes):
                self.tried.append(choice)
                if self.fits(choice):
                    break

    def _answers(self, solved: Solved, more: CompiledBytes) -> list[Choice]:
        """List the choices that may be lowered next: the program's, or while nothing fits those that need least."""
        if solved.choice is not None:
            return [solved.choice]
        if self._cheapest() is not None:
            return []
        return [*([least] if (least := self._least(more)) else []), *self.portfolio]

    def _least(self, more: CompiledBytes) -> Choice | None:
        """Return the choice that needs least by the table."""
        return self.solve(NO_LIMIT, more, self.default, least=True).choice

    def _more(self, choice: Choice) -> CompiledBytes:
        """Return the bytes that compiled code needs beside the table's: by stage, but no more than overall.

        A stage may need more because of what this choice saves, and another would not; and code that has room lets
        buffers wait for others of their size.
        """
        seen, by_stage = self.lower(choice), self._by_stage(choice)
        overall = max(by_stage.values(), default=0) - max(choice.alive_bytes, default=0)
        found, backward = overall, list[int]()
        for stage, alive in reversed(list(enumerate(choice.alive_bytes))):
            if stage in by_stage:
                found = min(by_stage[stage] - alive, overall)
            backward.insert(0, found)
        forward = (self.uses - 1) * seen.kept + seen.forward - choice.kept_bytes
        more = CompiledBytes(forward, tuple(backward))
        is_said = self.fits(choice) or more.peak_bytes(choice) > self.most_bytes
        return more if is_said else self._corrected(more, choice)

    def _by_stage(self, choice: Choice) -> Mapping[int, int]:
        """Return what the code of a choice needs in the stages of backward that call libraries."""
        seen = self.lower(choice)
        others = (self.uses - 1) * seen.kept
        found, remade, latest = defaultdict[int, int](int), 0, 0
        for name, size in seen.calls.items():
            stage = self.joint.calls.get(name, -1) if name else 0
            if stage < 0:  # it makes a value again for the next stage
                remade = max(remade, size)
                continue
            latest = max(latest, stage)  # a call that was moved counts where it runs
            found[latest] = max(found[latest], others + max(size, remade))
            remade = 0
        found[latest] = max(found[latest], others + remade)
        return found

    def _corrected(self, more: CompiledBytes, choice: Choice) -> CompiledBytes:
        """Say of a choice whose code exceeds the budget that it does.

        Where a stage needs more than was thought, values that it makes again in that stage are why, or before the call
        of the next one; if there are none, every choice needs that. Where buffers may wait for others of their size
        below the peak, this is known of the highest stage alone.
        """
        seen, backward, making = self.lower(choice), list(more.backward), dict(more.making)
        expected, by_stage = more.in_stages(choice), self._by_stage(choice)
        highest = 0 if self.frees_at_once else max(by_stage.values())
        again = set(choice.made_again.values())
        known = defaultdict[int, int](int)
        for stage, size in by_stage.items():
            if size >= highest:
                is_of_next = stage not in again and stage + 1 in again and size > expected[stage]
                known[stage + is_of_next] = max(known[stage + is_of_next], size)
        for stage, size in sorted(known.items()):
            if (missing := size - expected[stage]) <= 0:
                continue
            made = {v: self.joint.values[v].size_bytes for v, when in choice.made_again.items() if when == stage}
            if not (total := sum(made.values())):
                backward[stage] += missing
            for v, size_bytes in made.items():
                making[v, stage] = making.get((v, stage), 0) + -(-missing * size_bytes // total)
        forward = max(more.forward, (self.uses - 1) * seen.kept + seen.forward - choice.kept_bytes)
        return CompiledBytes(forward, tuple(backward), making)

    def _next(self, choices: Sequence[Choice], more: CompiledBytes) -> Choice | None:
        """Choose what to lower next: the cheapest that should fit, else the one that needs least."""
        cheapest = self._cheapest()
        untried = [choice for choice in choices if choice.saved not in self.lowered]
        hopeful = [choice for choice in untried if more.peak_bytes(choice) <= self.most_bytes]
        if cheapest is not None:
            better = (choice for choice in hopeful if choice.price_us < (1 - LEAST_SAVING) * cheapest.price_us)
            return min(better, key=_price, default=None)
        return min(hopeful, key=_price) if hopeful else min(untried, key=more.peak_bytes, default=None)

    def _cheapest(self) -> Choice | None:
        return min((choice for choice in self.tried if self.fits(choice)), key=_price, default=None)


def _price(choice: Choice) -> float:
    return choice.price_us
