"""The least peak of any plan: what a refusal names, and where a sweep begins.

The chain (`chain.py`) without times. With M[b][k] = the bytes that segments before cut b may keep at most, if those
after it are to stay within the budget B,

    M[a][k] = max  min(most_r, M[b][k'] - kept_r)      over runs r = [a, b)

and no table: one number a cut, in bytes, without rounding. All limits are B less something, so M falls byte for byte
with B, and B - M[0][0] is the least budget that the chain allows. It bounds every plan, those that save included. The
plan read off M reaches it in most models. Where it does not, because storages outside the chain's state cross it, the
fewest bytes kept at every cut are found for every set of those that are kept (`_Reach`), in a budget between the bound
and the best plan, and again in half of what is between. What is left to search then are the runs through which a lower
peak than the best known may be reached, and that is CP-SAT's (`program.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits
from remat.solvers import equal_regions, has_ortools
from remat.solvers.chain import Case, Chain, Transition, storages_outside
from remat.solvers.deadline import NEVER, Deadline, OutOfTime
from remat.work import work

TRANSITION_S, STATE_S = 11e-6, 5e-6  # of work: for a transition, and for a state that it leaves
PAIR_S = 2e-6  # of work: for two states that are compared
MOST_STATES = 500  # at a cut
NO_CONTINUATION = -(1 << 62)  # the bytes that may be kept without any continuation


class TooManyStates(Exception):
    """The storages that cross are so small that no set of them is better than another."""


@dataclasses.dataclass(frozen=True)
class LeastPeak:
    """A plan's peak, and a lower bound on every plan's peak."""

    peak_bytes: int
    regions: tuple[Region, ...]
    bound_bytes: int

    @property
    def proved(self) -> bool:
        return self.bound_bytes >= self.peak_bytes

    def decides(self, budget_bytes: int | None) -> bool:
        """Return whether it is known if a plan fits `budget_bytes`; for None, whether the plan is the best."""
        return self.proved or (budget_bytes is not None and not self.bound_bytes <= budget_bytes < self.peak_bytes)


def least_peak(problem: Problem, limits: Limits, *, fits_bytes: int | None = None) -> LeastPeak:
    """Find the plan with the least peak in the problem's space, as far as time allows, whatever the budget.

    fits_bytes  stop as soon as it is known whether any plan fits it
    """
    started = limits.now()
    highest = problem.with_budget(problem.memory.peak_without_regions)
    best = LeastPeak(highest.budget_bytes, (), problem.optimizer_peak_bytes)
    solved = _Extents(highest)
    best = _better(best, highest, solved.plan())
    if problem.graph.inner:
        best = _better(best, highest, equal_regions.lowest(highest))
    best = dataclasses.replace(best, bound_bytes=min(max(best.bound_bytes, solved.least_bytes), best.peak_bytes))
    deadline = Deadline.of(limits, started)
    if not best.decides(fits_bytes) and (aside := storages_outside(highest, Case())):
        chain = solved.chain.counting_as(Case(aside=aside), solved.useful(best.peak_bytes))
        best = _halved(best, chain, deadline, fits_bytes)
    if best.decides(fits_bytes) or deadline.is_past:
        return best
    return _searched(highest, limits, best, solved.useful(best.peak_bytes), started)


def _better(best: LeastPeak, problem: Problem, regions: tuple[Region, ...] | None) -> LeastPeak:
    """Return `best`, or the plan `regions` if its peak is lower."""
    if regions is None:
        return best
    for plan in (regions, _without_workspace(problem, regions)):
        peak = problem.with_budget(0).curve(plan).peak_bytes
        if peak < best.peak_bytes:
            best = dataclasses.replace(best, peak_bytes=peak, regions=plan)
    return best


def _halved(best: LeastPeak, chain: Chain, deadline: Deadline, fits_bytes: int | None) -> LeastPeak:
    """Bisect budgets to raise the bound of `best`, counting storages set aside, and to find better plans.

    The first budget is one byte less than the best plan's peak, again after each better plan, until `deadline`, or
    until `best` decides about `fits_bytes`.
    """
    with contextlib.suppress(OutOfTime, TooManyStates):
        budget = highest = best.peak_bytes - 1
        while best.bound_bytes <= highest and not best.decides(fits_bytes):
            before, regions = best.peak_bytes, _Reach(chain, budget, deadline).plan()
            if regions is None:
                best = dataclasses.replace(best, bound_bytes=budget + 1)
            else:
                best = _better(best, chain.problem, regions)
                highest = min(budget, best.peak_bytes) - 1
            budget = highest if best.peak_bytes < before else (best.bound_bytes + highest) // 2
    return best


def _searched(problem: Problem, limits: Limits, best: LeastPeak, keep: set[int], started: float) -> LeastPeak:
    """Improve `best` by CP-SAT among the runs in `keep`, which contain every plan with a lower peak.

    Without OR-tools, `best` is returned with the chain's bound.
    """
    if not keep:
        return dataclasses.replace(best, bound_bytes=best.peak_bytes)
    if not has_ortools():
        return best
    from remat.solvers import cp_sat

    tight, keep = problem.with_budget(best.peak_bytes), keep | problem.runs_of(best.regions)
    peak, regions, bound = cp_sat.least_peak(tight, limits.left(started), keep=keep)
    if peak < best.peak_bytes:
        best = dataclasses.replace(best, peak_bytes=peak, regions=regions)
    # The program knows no saves; they may spare one kernel's workspace.
    bound_bytes = int(bound) - int(problem.memory.workspace_bytes.max(initial=0))
    return dataclasses.replace(best, bound_bytes=min(max(best.bound_bytes, bound_bytes), best.peak_bytes))


def _without_workspace(problem: Problem, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Save the node that is recomputed at the peak, which spares its kernel's workspace."""
    curve = problem.memory.curve(regions)
    top, node = int(curve.region[curve.peak_at]), int(problem.graph.op_node[curve.op[curve.peak_at]])
    if top < 0 or regions[top].inner or node not in problem.liveness.save_time_ns:
        return regions
    saved = tuple(sorted({*regions[top].saved, node}))
    return (*regions[:top], dataclasses.replace(regions[top], saved=saved), *regions[top + 1 :])


_State = tuple[int, int]  # k, and the storages kept aside, a bit each


class _Extents:
    """M, the minimum that a plan takes.

    A chain that counts forward-held bytes and one that does not both give a bound (`Chain.forward_held_percent`).
    Counting them is tighter if backward limits the kept bytes, as it does here.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.chain = chain = Chain(problem)
        self.most = [[NO_CONTINUATION] * (1 if shared is None else 2) for shared in chain.state_storages]
        self.choice: list[list[Transition | None]] = [[None] * len(states) for states in self.most]
        self.most[-1] = [chain.most_at(chain.count, k) for k in range(len(self.most[-1]))]
        for b in range(chain.count, 0, -1):
            self._cap(b)
            work(len(chain.into[b]) * TRANSITION_S)
            for transition in chain.into[b]:
                for k in range(len(self.most[transition.a])):
                    before = self._before(transition, k)
                    if before > self.most[transition.a][k]:
                        self.most[transition.a][k], self.choice[transition.a][k] = before, transition
        self._cap(0)

    def _cap(self, cut: int) -> None:
        for k, most in enumerate(self.most[cut]):
            self.most[cut][k] = min(most, self.chain.most_at(cut, k))

    def _before(self, transition: Transition, k: int) -> int:
        """Return the most bytes that may be kept before `transition` if it is taken in state `k`."""
        goes_on, adds, most = self.chain.entry(transition, k)
        after, _ = self._after(transition, goes_on)
        return min(most, after - adds)

    def _after(self, transition: Transition, k: int) -> tuple[int, int]:
        """Return (limit on bytes kept behind `transition`, best state to leave) if it leaves state `k`."""
        most = self.most[transition.b]
        if not transition.saves:
            return most[k], k
        ends = [(most[k], k)]
        if not k and len(most) == 2:
            ends += [(most[1] - size, 1) for size in self.chain.passing_on(transition)]
        after, k = max(ends)
        return min(after, self.chain.most_after[transition.b]), k

    @property
    def least_bytes(self) -> int:
        """A lower bound on every plan's peak."""
        return self.problem.budget_bytes - self.most[0][0]

    def plan(self) -> tuple[Region, ...] | None:
        """Read off the plan of M, without saves; None if there is none."""
        regions, cut, k = [], 0, 0
        while cut < self.chain.count:
            transition = self.choice[cut][k]
            if transition is None:
                return None
            if (region := self.problem.runs[transition.index].region) is not None:
                regions.append(region)
            goes_on, _, _ = self.chain.entry(transition, k)
            _, k = self._after(transition, goes_on)
            cut = transition.b
        return tuple(regions)

    def useful(self, peak_bytes: int) -> set[int]:
        """Return the runs that a plan with a peak below `peak_bytes` may contain."""
        chain, found = self.chain, set[int]()
        kept = [np.full(len(states), -NO_CONTINUATION) for states in self.most]  # at least, before every cut
        kept[0][0] = 0
        out_of = chain.out_of(transition for into in chain.into for transition in into)
        for a in range(chain.count):
            for transition in out_of[a]:
                for k, before in enumerate(kept[a].tolist()):
                    goes_on, adds, _ = chain.entry(transition, k)
                    # What its saves pass on is free here.
                    for end in range(goes_on, len(kept[transition.b]) if transition.saves else goes_on + 1):
                        kept[transition.b][end] = min(kept[transition.b][end], before + adds)
                    if self.problem.budget_bytes + before - self._before(transition, k) < peak_bytes:
                        found.update(chain.beside[a, transition.b])
        return found


class _Reach:
    """The fewest bytes kept at every cut within a budget, by state and by the kept storages set aside.

    Times do not matter: of two entries with equal state and storages, the one that keeps less is enough; so is one that
    keeps less even with everything that it lacks. Saves are left out, except those of the state storage.

    Raises OutOfTime after `deadline`, and TooManyStates.
    """

    def __init__(self, chain: Chain, budget_bytes: int, deadline: Deadline = NEVER):
        self._chain, self._deadline = chain, deadline
        self._spare = chain.problem.budget_bytes - budget_bytes  # all limits are that much lower
        self._kept: list[dict[_State, int]] = [{} for _ in range(chain.count + 1)]
        self._came: dict[tuple[int, _State], tuple[Transition, _State]] = {}
        self._kept[0][0, 0] = self._spare
        out_of = chain.out_of(transition for into in chain.all_into for transition in into.values())
        for cut in range(chain.count + 1):
            deadline.check()
            self._kept[cut] = self._fewest(cut)
            for transition in out_of[cut]:
                deadline.check()
                work(len(self._kept[cut]) * STATE_S)
                for state, kept in self._kept[cut].items():
                    self._take(transition, state, kept)

    def _fewest(self, cut: int) -> dict[_State, int]:
        """Select sets of storages kept at `cut` that are within its limit and that no other state beats."""
        chain, floor = self._chain, self._chain.problem.floor_bytes[cut] + self._spare
        found: dict[_State, int] = {}
        if len(self._kept[cut]) > MOST_STATES:
            raise TooManyStates
        for (k, aside), kept in sorted(self._kept[cut].items(), key=lambda each: (each[1], -each[0][1].bit_count())):
            self._deadline.check()
            work(len(found) * PAIR_S)
            kept = max(kept, floor)
            rivals = (each for each in found.items() if each[0][0] == k)
            if kept <= chain.most_at(cut, k) and not any(
                fewer + self._lacking(aside & ~has) <= kept for (_, has), fewer in rivals
            ):
                found[k, aside] = kept
        return found

    def _lacking(self, bits: int) -> int:
        return sum(bytes_ for i, bytes_ in enumerate(self._chain.lacking_aside) if bits >> i & 1)

    def _take(self, transition: Transition, state: _State, kept: int) -> None:
        chain, (k, aside) = self._chain, state
        goes_on, adds, most = chain.entry(transition, k, aside)
        if kept > most:
            return
        b = transition.b
        aside = (aside | transition.wants_aside) & chain.open_aside[b]
        ends = [(goes_on, kept + adds)]
        if transition.saves:
            if not goes_on and len(chain.forward[b]) == 2:
                ends += [(1, kept + adds + size) for size in chain.passing_on(transition)]
            ends = [(end, bytes_) for end, bytes_ in ends if bytes_ <= chain.most_after[b]]
        for end, bytes_ in ends:
            if bytes_ < self._kept[b].get((end, aside), 1 << 62):
                self._kept[b][end, aside] = bytes_
                self._came[b, (end, aside)] = transition, state

    def plan(self) -> tuple[Region, ...] | None:
        """Return a plan that is within the budget as the chain counts; None if there is none."""
        cut = self._chain.count
        state = next(iter(self._kept[cut]), None)
        if state is None:
            return None
        regions = []
        while cut:
            transition, state = self._came[cut, state]
            if (region := self._chain.problem.runs[transition.index].region) is not None:
                regions.append(region)
            cut = transition.a
        return tuple(reversed(regions))
