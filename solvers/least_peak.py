"""The least peak of any plan: what a refusal names, and where a sweep begins.

The chain (`chain.py`) without times. With M[b][k] = the bytes that segments before cut b may keep at most, if those
after it are to stay within the budget B,

    M[a][k] = max  min(most_r, M[b][k'] - kept_r)      over runs r = [a, b)

and no table: one number a cut, in bytes, without rounding. All limits are B less something, so M falls byte for byte
with B, and B - M[0][0] is the least budget that the chain allows. It bounds every plan, those that save included. The
plan read off M reaches it in most models. Where it does not, because storages cross the chain, the same is asked case
by case; what is left to search then are the runs through which a lower peak than the best known may be reached, and
that is CP-SAT's (`program.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

import numpy as np

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits
from remat.solvers import has_ortools
from remat.solvers.chain import Case, Chain, Transition, long_lived_storages
from remat.solvers.deadline import OutOfTime, check_time, deadline_of

NOTHING = -(1 << 62)  # what may be kept where nothing goes on


@dataclasses.dataclass(frozen=True)
class LeastPeak:
    """A plan's peak, and what no plan's peak is below."""

    peak_bytes: int
    regions: tuple[Region, ...]
    bound_bytes: int

    @property
    def proved(self) -> bool:
        return self.bound_bytes >= self.peak_bytes


def least_peak(problem: Problem, limits: Limits) -> LeastPeak:
    """The plan of the problem's space with the least peak that is found in time, whatever the problem's budget."""
    started = time.monotonic()
    highest = problem.with_budget(problem.memory.peak_without_regions)
    best = LeastPeak(highest.budget_bytes, (), problem.optimizer_peak_bytes)
    solved = [_Extents(highest, Case())]
    best = _better(best, solved)
    deadline_s = deadline_of(limits, started)
    if not best.proved and (long_lived := long_lived_storages(highest)):
        cases = [Case()]
        for storage in long_lived:
            shared = highest.liveness.shared[storage]
            site = next((site for site in shared.sites if site > shared.segment), shared.sites[-1])
            cases = [half for case in cases for half in case.split(storage, site)]
        with contextlib.suppress(OutOfTime):
            solved = [_Extents(highest, case, deadline_s) for case in cases]
            best = _better(best, solved)
    if best.proved or time.monotonic() > deadline_s:
        return best
    keep = set.union(*(extents.useful(best.peak_bytes) for extents in solved))
    return _searched(highest, limits, best, keep, started)


def _better(best: LeastPeak, solved: list[_Extents]) -> LeastPeak:
    """`best` with the best plan of `solved`, and with the least that every plan takes in one of them."""
    for extents in solved:
        if (regions := extents.plan()) is None:
            continue
        for plan in (regions, _without_workspace(extents.problem, regions)):
            peak = extents.problem.with_budget(0).curve(plan).peak_bytes
            if peak < best.peak_bytes:
                best = dataclasses.replace(best, peak_bytes=peak, regions=plan)
    bound = min(extents.least_bytes for extents in solved)
    return dataclasses.replace(best, bound_bytes=min(max(best.bound_bytes, bound), best.peak_bytes))


def _searched(problem: Problem, limits: Limits, best: LeastPeak, keep: set[int], started: float) -> LeastPeak:
    """`best`, or what CP-SAT finds among the runs in `keep`, which are all that a lower peak could be made of.

    Without OR-tools it is `best`, and its bound is the chain's.
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
    """`regions`, where the node that is recomputed at the peak is saved instead: that spares its kernel's workspace."""
    curve = problem.memory.curve(regions)
    top, node = int(curve.region[curve.peak_at]), int(problem.graph.op_node[curve.op[curve.peak_at]])
    if top < 0 or regions[top].inner or node not in problem.liveness.save_time_ns:
        return regions
    saved = tuple(sorted({*regions[top].saved, node}))
    return (*regions[:top], dataclasses.replace(regions[top], saved=saved), *regions[top + 1 :])


class _Extents:
    """M of one case, and with it the least that a plan of the case takes. Raises OutOfTime after `deadline_s`.

    A chain that counts forward-held bytes and one that does not both give a bound (`Chain.forward_held_percent`).
    Counting them is tighter where backward limits what is kept, as it does here.
    """

    def __init__(self, problem: Problem, case: Case, deadline_s: float = math.inf):
        check_time(deadline_s)
        self.problem = problem
        self.chain = chain = Chain(problem, case)
        self.most = [[NOTHING] * (1 if shared is None else 2) for shared in chain.state_storages]
        self.choice: list[list[Transition | None]] = [[None] * len(states) for states in self.most]
        self.most[-1] = [chain.most_at(chain.count, k) for k in range(len(self.most[-1]))]
        for b in range(chain.count, 0, -1):
            self._cap(b)
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
        """What may be kept before `transition` if it is taken in state `k`."""
        goes_on, adds, most = self.chain.entry(transition, k)
        after, _ = self._after(transition, goes_on)
        return min(most, after - adds)

    def _after(self, transition: Transition, k: int) -> tuple[int, int]:
        """(what may be kept behind `transition`, which leaves state `k`; the state that it does best to leave)."""
        most = self.most[transition.b]
        if not transition.saves:
            return most[k], k
        ends = [(most[k], k)]
        if not k and len(most) == 2:
            ends += [(most[1] - size, 1) for size in self._passing_on(transition)]
        after, k = max(ends)
        return min(after, self.chain.most_after[transition.b]), k

    def _passing_on(self, transition: Transition) -> list[int]:
        """Bytes of the save that would keep the state storage of the end of `transition`."""
        state_storage = self.chain.state_storages[transition.b]
        assert state_storage is not None
        if not transition.a <= state_storage.segment < transition.b:
            return []
        items = self.chain.items(state_storage.segment, transition.b, transition.never_again)
        return [item.bytes for item in items if item.passes_on]

    @property
    def least_bytes(self) -> int:
        """No plan of the case has a lower peak."""
        return self.problem.budget_bytes - self.most[0][0]

    def plan(self) -> tuple[Region, ...] | None:
        """The plan that M is read off, saves left out; None where the case has none."""
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
        """Runs that a plan with a peak below `peak_bytes` may contain."""
        chain, found = self.chain, set[int]()
        kept = [np.full(len(states), -NOTHING) for states in self.most]  # at least, before every cut
        kept[0][0] = 0
        out_of: list[list[Transition]] = [[] for _ in range(chain.count + 1)]
        for transition in (transition for into in chain.into for transition in into):
            out_of[transition.a].append(transition)
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
