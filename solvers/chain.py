"""The problem seen as a chain: what every run does to the number of bytes kept, for `chain_dp.py`.

What limits a run is little more than the number of bytes that the segments before it keep. That number, and for one
storage at every cut whether it is in it, is the state of the dynamic program; a `Transition` is what a run does to it.

A shared storage (a residual stream: saved by the region that made it, taken by the next, or kept by autograd there)
must be counted once. `Chain.state_storages` names for every cut at most one storage that crosses it, and the state says
whether some run before the cut keeps it already; so it is counted by the first run that has a reason. A storage crosses
many cuts with one name: state storages are chosen so that their stretches do not overlap, the most bytes first
(weighted interval scheduling).

Any other shared storage (an encoder's output, a position bias, a UNet's skip connection) is counted at
one of its sites, if the run there keeps it: at the last one, or wherever `Case.counted` says. That may understate what
a plan needs and never overstates it: a bound stays a bound. Where it understates too much, cases settle it (`Case`):
in one there is a reason to keep the storage at a certain site or before, and it is counted there; in the other there
is none, and nothing may want it so far. (To count it where it is made would overstate: what only a later site wants is
let go before backward comes back to the runs between.) Or it is set aside (`Case.aside`): then no run counts it, and a
bit for each says what is kept, so that the first run with a reason does (`chain_labels.py`, `least_peak.py`).

A storage is *forward-held* if it is local at a certain point of the forward, by default its last, whatever the plan:
autocast holds its copies of weights so long, for example. A plain run or a save may keep it for longer. At that point
it must not be counted as kept; in backward it must be. So two numbers of bytes have limits of their own: P without the
forward-held storages, and P + H with them. A chain counts a share w of H. It limits P + w H by (1 - w) times the one
limit plus w times the other: a surrogate of the two (Glover 1968), which every plan keeps. So it is with several points
of the forward: P is then the mean of what is kept beside that which is local at each, and so is its limit. Every share
and every choice of points gives a bound; the best is found by trying (`chain_dp.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from remat.formulation.choices import Row, Run, SharedStorage
from remat.formulation.problem import Problem
from remat.work import work

ADDED_S = 25e-6  # of work: for a transition
AFTER_ALL_SITES = 1 << 30  # comes after every site
UNBOUNDED_BYTES = 1 << 55  # bytes
MOST_ASIDE = 62  # bits of an integer of numpy
SMALLEST_STORAGE_DIVISOR = 2000  # a storage smaller than a 2000th of the budget is not worth it


@dataclasses.dataclass(frozen=True)
class Case:
    """The plans in which storages outside the state are kept from a certain site on, or not until then.

    pinned  storage -> site: it is kept for a reason at that site or before, and not before the one it is `absent` until
    absent  storage -> site: nothing at that site or before is a reason to keep it
    counted storage -> site: it is counted at that site, if the run there keeps it; at its last one by default. This
            excludes no plan, whatever the site.
    aside   storages that are not counted: the caller passes a bitmask of those that are kept. MOST_ASIDE at most
    """

    pinned: Mapping[int, int] = dataclasses.field(default_factory=dict)
    absent: Mapping[int, int] = dataclasses.field(default_factory=dict)
    counted: Mapping[int, int] = dataclasses.field(default_factory=dict)
    aside: tuple[int, ...] = ()

    def split(self, storage: int, site: int) -> tuple[Case, Case]:
        """Split the case into the plans that keep `storage` for a reason at `site` or before, and the others."""
        return (
            dataclasses.replace(self, pinned={**self.pinned, storage: site}),
            dataclasses.replace(self, absent={**self.absent, storage: site}),
        )

    def counting(self, sites: Mapping[int, int]) -> Case:
        """Return a case with the same plans that counts other storages at these sites."""
        return dataclasses.replace(self, counted={**self.counted, **sites})

    def site(self, shared: SharedStorage) -> int:
        """Return the site at which `shared` is counted, unless it is a state storage."""
        if shared.storage in self.aside:
            return AFTER_ALL_SITES
        return self.pinned.get(shared.storage, self.counted.get(shared.storage, shared.sites[-1]))


def storages_outside(problem: Problem, case: Case) -> tuple[int, ...]:
    """List storages, largest first, that are neither in the state nor settled by `case`: a possible `Case.aside`."""
    settled = {shared.storage for shared in _choose_state_storages(problem, len(problem.space.segments)) if shared}
    shared = problem.liveness.shared
    outside = (u for u in shared if u not in settled and u not in case.pinned and shared[u].crosses)
    sizes = {u: problem.liveness.shared[u].size_bytes for u in outside}
    return tuple(sorted((u for u in sizes if sizes[u] > 0), key=lambda u: (-sizes[u], u))[:MOST_ASIDE])


@dataclasses.dataclass(frozen=True)
class Item:
    """A node that a region may save: bytes that saving keeps, ns that it spares.

    passes_on  whether it keeps the state storage of the region's end
    aside      the storages of `Case.aside` that it keeps, a bit each
    """

    node: int
    bytes: int
    time_ns: int
    passes_on: bool = False
    aside: int = 0


@dataclasses.dataclass(frozen=True)
class Transition:
    """The run with this index, from cut a to cut b.

    keeps_bytes  bytes that it keeps, without saves and the state storage of `a`
    most_bytes   most bytes that may be kept before it
    wants        whether it has a reason of its own to keep the state storage of `a` ...
    counts       ... and whether `most_bytes` has deducted that storage
    passes_on    whether it is plain, made the state storage of `b`, and keeps it
    saves        whether it is a region that may save
    never_again  nodes that it does not recompute, so that saving them gains nothing (early stop)
    wants_aside  storages of `Case.aside` that it has a reason of its own to keep, a bit each
    alive_aside  those that `most_bytes` has deducted
    """

    index: int
    a: int
    b: int
    time_ns: int
    keeps_bytes: int
    most_bytes: int
    wants: bool
    counts: bool
    passes_on: bool = False
    saves: bool = False
    never_again: frozenset[int] = frozenset()
    wants_aside: int = 0
    alive_aside: int = 0


class Chain:
    """The transitions of `problem` in one case: those of the runs in `keep`, or of all runs.

    forward_held_percent  the share w of forward-held storages that is counted
    held_at  operators of forward at which these are local, with equal weight; by default the last one that limits kept
             bytes. No choice excludes a plan

    all_into        the transitions that end at each cut, by the index of their run
    into            the same, the shortest first, without those that others dominate
    beside          the runs between each pair of cuts, including those left out
    state_storages  the storage of each cut that the state k says is kept, or None
    forward         most bytes, for each cut and k, that segments before it may keep while later ones run forward,
                    without forward-held storages
    backward        the same with forward-held storages
    most_after      most bytes that may be kept at each cut when a region that ends there is recomputed
    inside          most bytes that may be kept before each cut if a region goes on there
    """

    def __init__(
        self,
        problem: Problem,
        case: Case | None = None,
        keep: set[int] | None = None,
        *,
        forward_held_percent: int = 100,
        held_at: tuple[int, ...] = (),
    ):
        self.problem = problem
        self.case = case or Case()
        self.forward_held_percent = forward_held_percent
        self.held_at = held_at or (max((row.op for row in problem.forward_rows), default=0),)
        self.count = len(problem.space.segments)
        self._items: dict[tuple[int, int, frozenset[int]], tuple[Item, ...]] = {}
        self._insides: dict[int, np.ndarray] = {}
        self.state_storages = _choose_state_storages(problem, self.count)
        self.open = _open_storages(problem, self.count)
        self.forward = self._forward_limits()
        self.backward = [self._backward_limits(cut) for cut in range(self.count + 1)]
        self.most_after = [0] * (self.count + 1)
        self.inside = [self._inside_limit(cut) for cut in range(self.count + 1)]
        self.all_into: list[dict[int, Transition]] = [{} for _ in range(self.count + 1)]
        for index, run in enumerate(problem.runs):
            if keep is None or index in keep:
                self._add(index, run)
                work(ADDED_S)
        self.beside: dict[tuple[int, int], list[int]] = {}
        self.into: list[list[Transition]] = []
        for b, transitions in enumerate(self.all_into):
            for transition in transitions.values():
                self.beside.setdefault((transition.a, b), []).append(transition.index)
            undominated = self._undominated(transitions.values())
            self.into.append(sorted(undominated, key=lambda transition: -transition.a))

    def counting_as(self, case: Case, keep: set[int]) -> Chain:
        """Return the transitions of the runs in `keep` in another case, counting forward-held bytes in the same way."""
        percent, held_at = self.forward_held_percent, self.held_at
        return Chain(self.problem, case, keep, forward_held_percent=percent, held_at=held_at)

    @property
    def transition_count(self) -> int:
        return sum(map(len, self.into))

    def out_of(self, transitions: Iterable[Transition]) -> list[list[Transition]]:
        """List the transitions that begin at each cut, in their order."""
        found: list[list[Transition]] = [[] for _ in range(self.count + 1)]
        for transition in transitions:
            found[transition.a].append(transition)
        return found

    @property
    def room(self) -> int:
        """The most bytes that may be kept anywhere."""
        return max(self.most_at(cut, k) for cut, limits in enumerate(self.forward) for k in range(len(limits)))

    def state_storage_bytes(self, cut: int) -> int:
        """Return the counted bytes of the state storage of `cut`."""
        shared = self.state_storages[cut]
        return self._counted(shared) if shared is not None else 0

    def persists(self, a: int, b: int) -> bool:
        """Return whether cuts `a` and `b` have the same state storage."""
        return self.state_storages[a] is not None and self.state_storages[a] is self.state_storages[b]

    def entry(self, transition: Transition, k: int, aside: int = 0) -> tuple[int, int, int]:
        """Return (k at the end of `transition`, bytes that it adds, limit on bytes kept before it) in state `k`.

        aside  storages of `Case.aside` that are kept already, a bit each
        """
        goes_on, adds, backward = self.in_state(transition, k)
        adds += self.counted_aside(transition.wants_aside & ~aside)
        backward += self.bytes_aside(transition.alive_aside & aside)
        most = self._surrogate(backward, self.forward[transition.a][k])
        return goes_on, adds, min(most, self._least_inside(transition.a, transition.b) - adds)

    def in_state(self, transition: Transition, k: int) -> tuple[int, int, int]:
        """Return (k at the end of `transition`, bytes that it adds, its own limit on bytes kept before it)."""
        adds = transition.keeps_bytes + (self.state_storage_bytes(transition.a) if transition.wants and not k else 0)
        state_storage = self.state_storages[transition.a] if k and transition.counts else None
        backward = transition.most_bytes + (state_storage.size_bytes if state_storage is not None else 0)
        goes_on = k or transition.wants if self.persists(transition.a, transition.b) else transition.passes_on
        return int(bool(goes_on)), adds, backward

    @functools.cached_property
    def lacking_aside(self) -> list[int]:
        """The most bytes that lacking each of `Case.aside` may cost: its size, once it is wanted.

        If kept bytes have a floor, it is beyond all limits: a state that keeps less may be lifted to the floor first.
        """
        has_floor = any(self.problem.floor_bytes)
        return [UNBOUNDED_BYTES if has_floor else self.problem.liveness.shared[u].size_bytes for u in self.case.aside]

    @functools.cached_property
    def open_aside(self) -> list[int]:
        """The storages of `Case.aside` that matter to runs from each cut on, a bit each."""
        found = [0] * (self.count + 1)
        for transition in (transition for into in self.all_into for transition in into.values()):
            found[transition.a] |= transition.wants_aside | transition.alive_aside
        for cut in range(self.count - 1, -1, -1):
            found[cut] |= found[cut + 1]
        return found

    def item_bytes(self, item: Item, aside: int) -> int:
        """Return the bytes that `item` adds if the storages `aside` of `Case.aside` are kept already."""
        return item.bytes + self.counted_aside(item.aside & ~aside)

    def counted_aside(self, bits: int) -> int:
        """Return the counted bytes of these storages of `Case.aside` if they are kept."""
        return sum(self._counted(shared) for shared in self._set_aside(bits))

    def bytes_aside(self, bits: int) -> int:
        """Return the bytes of these storages of `Case.aside`."""
        return sum(shared.size_bytes for shared in self._set_aside(bits))

    def _set_aside(self, bits: int) -> Iterator[SharedStorage]:
        while bits:
            yield self.problem.liveness.shared[self.case.aside[bits.bit_length() - 1]]
            bits -= 1 << bits.bit_length() - 1

    def passing_on(self, transition: Transition) -> list[int]:
        """List the bytes of each save of `transition` that would keep the state storage of its end."""
        state_storage = self.state_storages[transition.b]
        if state_storage is None or not transition.a <= state_storage.segment < transition.b:
            return []
        items = self.items(state_storage.segment, transition.b, transition.never_again)
        return [item.bytes for item in items if item.passes_on]

    def most_at(self, cut: int, k: int) -> int:
        """Return the most bytes that may be kept at `cut` in state `k` under any continuation."""
        return self._surrogate(self.backward[cut][k], self.forward[cut][k])

    def most_after_saves(self, cut: int, k: int) -> int:
        """Return the most bytes that may be kept at `cut` in state `k` if a region that saves ends there."""
        return self._surrogate(self.most_after[cut], self.forward[cut][k])

    def _inside_limit(self, cut: int) -> int:
        """Return the most bytes that may be kept before `cut` in any state."""
        later = sum(map(self._counted, itertools.chain.from_iterable(self._decided_in[cut:])))
        return max(self.most_at(cut, k) for k in range(len(self.forward[cut]))) + self._pinned_from(cut) + later

    def _pinned_from(self, segment: int) -> int:
        """Return the counted bytes of storages pinned at `segment` or later: a region counts all of them at once."""
        pinned = self.case.pinned.items()
        return sum(self._counted(self.problem.liveness.shared[u]) for u, site in pinned if site >= segment)

    def _least_inside(self, a: int, b: int) -> int:
        """Return the most bytes that may be kept if a region goes on at every cut between `a` and `b`."""
        if a not in self._insides:
            self._insides[a] = np.minimum.accumulate([1 << 62, *self.inside[a + 1 :]])
        return int(self._insides[a][b - a - 1])

    def _surrogate(self, backward: int, forward: int) -> int:
        """Return the limit on P + w H, if P + H is limited by `backward` and P by `forward`."""
        mixed = self.forward_held_percent * backward + (100 - self.forward_held_percent) * forward
        return min(backward, -(-mixed // 100))

    def items(self, segment: int, b: int, never_again: frozenset[int] = frozenset()) -> tuple[Item, ...]:
        """Return the items that a region which contains `segment` and ends at cut `b` may save in that segment.

        Regions that end at one cut stop early at one node, but for those that open a context: they run to their end.
        """
        segment_of = self.problem.liveness.segment_of_node
        excluded = frozenset(node for node in never_again if segment_of[node] == segment)
        key = (segment, min(b, self._settled[segment]), excluded)
        if key not in self._items:
            self._items[key] = self._find_items(*key)
        return self._items[key]

    @functools.cached_property
    def _settled(self) -> list[int]:
        """For every segment, the cut from which on its items are the same."""
        problem = self.problem
        found = list(range(1, self.count + 1))
        for segment, nodes in enumerate(problem.liveness.saves_in):
            saved = (
                problem.liveness.shared[u]
                for node in nodes
                for u in problem.liveness.saved_by[node]
                if u in problem.liveness.shared
            )
            found[segment] = max([found[segment], *(shared.sites[-1] + 1 for shared in saved)])
        return found

    def _find_items(self, segment: int, b: int, excluded: frozenset[int]) -> tuple[Item, ...]:
        problem, state_storage = self.problem, self.state_storages[b]
        found = []
        for node in problem.liveness.saves_in[segment]:
            if node in excluded:
                continue
            saved = [
                problem.liveness.shared[u] for u in problem.liveness.saved_by[node] if u in problem.liveness.shared
            ]
            if any(shared.segment <= self.case.absent.get(shared.storage, -1) for shared in saved):
                continue
            passes_on = state_storage is not None and any(shared is state_storage for shared in saved)
            late = (
                k for k in saved if k.storage not in self.case.pinned and (k is state_storage or self.case.site(k) < b)
            )
            size = problem.liveness.save_bytes[node] - self._uncounted(
                u for u in problem.liveness.saved_by[node] if problem.liveness.is_own(u)
            )
            size += sum(map(self._counted, late))
            aside = self.bits(problem.liveness.saved_by[node])
            found.append(Item(node, size, problem.liveness.save_time_ns[node], passes_on, aside))
        return tuple(sorted(found, key=lambda item: item.passes_on))

    def _add(self, index: int, run: Run) -> None:
        if self._wants_what_is_absent(run) or not self.problem.fits_alone(run):
            return
        transition = self._plain_transition(index, run) if run.region is None else self._region_transition(index, run)
        at_most = transition.most_bytes + self.bytes_aside(transition.alive_aside)
        if at_most + (self.state_storage_bytes(run.a) if transition.counts else 0) >= 0:
            self.all_into[run.b][index] = transition

    def _wants_what_is_absent(self, run: Run) -> bool:
        for u, until in self.case.absent.items():
            shared = self.problem.liveness.shared[u]
            if run.region is None and run.a <= until and run.a in shared.packed:
                return True
            if run.region is not None and _is_taken(shared, run, until):
                return True
        return False

    def _undominated(self, transitions: Iterable[Transition]) -> list[Transition]:
        """Drop transitions that another one with the same ends dominates: it is as fast, and fits wherever they do."""
        found: dict[int, list[Transition]] = {}
        for transition in sorted(transitions, key=lambda transition: (transition.time_ns, not transition.saves)):
            rivals = found.setdefault(transition.a, [])
            if all(
                rival.keeps_bytes > transition.keeps_bytes or not self._covers(rival, transition) for rival in rivals
            ):
                rivals.append(transition)
        return [transition for rivals in found.values() for transition in rivals]

    def _covers(self, rival: Transition, transition: Transition) -> bool:
        """Return whether `rival` fits wherever `transition` does."""
        if transition.saves and not (rival.saves and rival.never_again <= transition.never_again):
            return False
        if rival.wants != transition.wants or rival.passes_on != transition.passes_on:
            return False
        if rival.saves and self.most_after[rival.b] < max(self.backward[rival.b]):
            return False
        ample = rival.most_bytes >= max(self.backward[rival.a])
        return ample or (rival.most_bytes >= transition.most_bytes and rival.counts >= transition.counts)

    def _pinned_bytes(self, run: Run) -> int:
        """Return the counted bytes in `run` of storages that the case settles as kept."""
        pinned = self.case.pinned.items()
        return sum(self._counted(self.problem.liveness.shared[u]) for u, site in pinned if run.a <= site < run.b)

    def _is_counted_before(self, shared: SharedStorage, cut: int) -> bool:
        """Return whether `shared`, once kept before `cut`, is counted there, a state storage or not."""
        return self.case.site(shared) < cut

    def _counts_in(self, shared: SharedStorage, run: Run) -> bool:
        """Return whether `shared` is counted in `run` if the run wants it."""
        is_open = shared is not self.state_storages[run.a] and shared.storage not in self.case.pinned
        return is_open and run.a <= self.case.site(shared) < run.b

    @functools.cached_property
    def _counted_in(self) -> list[list[SharedStorage]]:
        """The storages that are counted in each segment."""
        found: list[list[SharedStorage]] = [[] for _ in range(self.count)]
        for shared in self.problem.liveness.shared.values():
            if (site := self.case.site(shared)) < self.count:
                found[site].append(shared)
        return found

    @functools.cached_property
    def _decided_in(self) -> list[list[SharedStorage]]:
        """The storages of every segment that a region around it keeps, whatever it saves."""
        found: list[list[SharedStorage]] = [[] for _ in range(self.count)]
        for shared in self.problem.liveness.shared.values():
            if shared.is_decided:
                found[shared.segment].append(shared)
        return found

    def bits(self, storages: Iterable[int]) -> int:
        """Return the storages that are set aside, a bit each."""
        aside = self.case.aside
        return sum(1 << aside.index(u) for u in set(storages).intersection(aside))

    def _plain_transition(self, index: int, run: Run) -> Transition:
        problem, at, end = self.problem, self.state_storages[run.a], self.state_storages[run.b]
        (row,) = problem.first_rows(index) or [Row(index, 0, problem.fixed_bytes)]
        keeps = (
            problem.liveness.own_bytes[run.a] - self._uncounted(problem.liveness.own[run.a]) + self._pinned_bytes(run)
        )
        here = (shared for shared in self._counted_in[run.a] if self._counts_in(shared, run))
        keeps += sum(self._counted(shared) for shared in here if shared.is_reason(run, run.a))
        passes_on = end is not None and end is not at and run.a in end.packed
        alive = (problem.liveness.shared[u] for u in row.alive)
        earlier = [shared for shared in alive if shared is not at and self._is_counted_before(shared, run.a)]
        return Transition(
            index,
            run.a,
            run.b,
            0,
            keeps + (self._counted(end) if passes_on and end is not None else 0),
            problem.budget_bytes
            - row.bytes
            + sum(shared.size_bytes for shared in earlier)
            - self._always_before[run.a],
            wants=at is not None and run.a in at.packed,
            counts=at is not None and at.storage in row.alive,
            passes_on=passes_on,
            wants_aside=self.bits(u for u in self.case.aside if problem.liveness.shared[u].is_reason(run, run.a)),
            alive_aside=self.bits(row.alive),
        )

    def _region_transition(self, index: int, run: Run) -> Transition:
        problem, at, shape = self.problem, self.state_storages[run.a], run.shape
        assert run.region is not None
        decided = itertools.chain.from_iterable(self._decided_in[run.a : run.b])
        taken = [shared for shared in (*self.open[run.a], *decided) if _is_taken(shared, run)]
        late = [shared for shared in taken if self._counts_in(shared, run)]
        earlier = [shared for shared in taken if shared is not at and self._is_counted_before(shared, run.a)]
        before = sum(shared.size_bytes for shared in earlier)
        local, saves = problem.local_bytes_at(run), not run.region.inner
        least, counts, aside = problem.fixed_bytes, False, self.bits(shared.storage for shared in taken)
        if (high := shape.firm if saves else shape.highest) is not None:
            counts = high.recomputing or high.op <= shape.kept_until
            least = local + high.bytes - (high.spare_bytes if saves else 0) - (before if counts else 0)
        if saves:
            inputs = sum(
                shared.size_bytes
                for shared in taken
                if shared is at or shared.storage in self.case.aside or self._is_counted_before(shared, run.b)
            )
            begun = problem.fixed_bytes
            if (start := shape.start) is not None:
                begun = local + start.bytes - start.spare_bytes - start.made_bytes - inputs
            most = problem.budget_bytes - begun - self._always_before[run.b]
            self.most_after[run.b] = max(self.most_after[run.b], most)
        return Transition(
            index,
            run.a,
            run.b,
            shape.time_ns,
            sum(map(self._counted, late)) + self._pinned_bytes(run),
            problem.budget_bytes - least - self._always_before[run.a],
            wants=at in taken,
            counts=counts and at in taken,
            saves=saves,
            never_again=run.never_again if saves else frozenset(),
            wants_aside=aside,
            alive_aside=aside if counts else 0,
        )

    def _forward_limits(self) -> list[list[int]]:
        """Return for every cut and k the most bytes that earlier segments may keep by the rows of forward."""
        each = [self._limits_beside(op) for op in self.held_at]
        return [
            [-(-sum(most) // len(each)) - always for most in zip(*of_cut, strict=True)]
            for always, *of_cut in zip(self._always_before, *each, strict=False)
        ]

    def _limits_beside(self, held_at: int) -> list[list[int]]:
        """Return `_forward_limits` beside the storages that are local at one operator.

        A row excludes storages made later, and counts those local there once.
        """
        problem, storages = self.problem, self.problem.graph.storages
        ample = problem.budget_bytes - problem.fixed_bytes
        limits = [[ample] * (1 if shared is None else 2) for shared in self.state_storages]
        for row in problem.forward_rows:
            besides = (storages.death >= row.op) & (storages.death < held_at) & self._may_count
            made = np.bincount(self._made_in[besides], storages.size_bytes[besides], minlength=self.count + 1)
            before = [0, *np.cumsum(made).astype(np.int64).tolist()]
            for cut, (most, shared) in enumerate(zip(limits, self.state_storages, strict=True)):
                limit = problem.budget_bytes - row.bytes + before[cut] + problem.carried_between(row.op, cut)
                most[-1] = min(most[-1], limit)
                if shared is not None:
                    most[0] = min(most[0], limit - (shared.size_bytes if besides[shared.storage] else 0))
        return limits

    def _backward_limits(self, cut: int) -> list[int]:
        """Return for every k the most bytes that segments before `cut` may keep in all.

        It is the forward's limit plus all forward-held bytes, and at most what backward may start with.
        """
        most = self.problem.budget_bytes - self.problem.fixed_bytes - self._always_before[cut]
        return [min(forward + self._forward_held_before[cut], most) for forward in self.forward[cut]]

    @functools.cached_property
    def _forward_held_before(self) -> list[int]:
        """The forward-held bytes made before every cut, averaged over `held_at`."""
        held = self._times_held * self.problem.graph.storages.size_bytes * self._may_count
        sizes = np.bincount(self._made_in, held, minlength=self.count + 1)
        return [0, *(-(-np.cumsum(sizes).astype(np.int64) // len(self.held_at))).tolist()]

    @functools.cached_property
    def _made_in(self) -> np.ndarray:
        """The segment that makes each storage; the last for those made in backward."""
        made_by = self.problem.graph.storages.node
        return np.where(made_by >= 0, self.problem.liveness.segment_of_node[made_by], self.count)

    @functools.cached_property
    def _times_held(self) -> np.ndarray:
        """The number of operators in `held_at` at which each storage is local, if it exists by then."""
        death = self.problem.graph.storages.death
        return np.stack([death >= op for op in self.held_at]).sum(axis=0)

    @functools.cached_property
    def forward_held_in(self) -> list[int]:
        """The forward-held bytes that every segment keeps if it is plain."""
        held = self._times_held * self.problem.graph.storages.size_bytes // len(self.held_at)
        return [int(sum(held[u] for u in own)) for own in self.problem.liveness.own]

    @property
    def has_forward_held(self) -> bool:
        """Whether the counted share makes a difference."""
        return self._forward_held_before[-1] > 0

    def _uncounted(self, storages: Iterable[int]) -> int:
        """Return the bytes of `storages` that this chain does not count if they are kept."""
        return sum(int(self._uncounted_bytes[u]) for u in storages)

    @functools.cached_property
    def _uncounted_bytes(self) -> np.ndarray:
        """The bytes of every storage that this chain does not count if it is kept, rounded up."""
        sizes = self.problem.graph.storages.size_bytes
        share = (100 - self.forward_held_percent) * self._times_held
        found = -(-sizes * share // (100 * len(self.held_at)))
        found[self._always_kept] = sizes[self._always_kept]
        return found

    @functools.cached_property
    def _always_kept(self) -> list[int]:
        """The storages that every plan keeps from the segment that makes them: by a region around it, or plain.

        They are deducted from limits instead, so that regions of one layer still keep sizes that few grains divide.
        """
        if any(self.problem.floor_bytes):
            return []
        alone = (shared for decided in self._decided_in for shared in decided if not shared.crosses)
        return [s.storage for s in alone if s.segment in s.packed and not self._times_held[s.storage]]

    @functools.cached_property
    def _always_before(self) -> list[int]:
        """The bytes of those made before every cut."""
        sizes = self.problem.graph.storages.size_bytes[self._always_kept]
        made = np.bincount(self._made_in[self._always_kept], sizes, minlength=self.count + 1)
        return [0, *np.cumsum(made).astype(np.int64).tolist()]

    def _counted(self, shared: SharedStorage) -> int:
        """Return the bytes of `shared` that this chain counts if it is kept."""
        return shared.size_bytes - self._uncounted([shared.storage])

    @functools.cached_property
    def _may_count(self) -> np.ndarray:
        """Storages that this chain may count as kept."""
        problem = self.problem
        found = problem.liveness.is_packed.copy()
        found[[u for saved in problem.liveness.saved_by.values() for u in saved]] = True
        found[list(problem.liveness.shared)] = True
        return found


def _is_taken(shared: SharedStorage, run: Run, until: int = AFTER_ALL_SITES) -> bool:
    """Return whether a region takes `shared` at one of its own sites up to `until`."""
    return any(source < run.a <= site < run.b and site <= until for source, site in shared.taken)


def _open_storages(problem: Problem, count: int) -> list[list[SharedStorage]]:
    """Return for every cut the storages that cross it and have a reason after it."""
    found: list[list[SharedStorage]] = [[] for _ in range(count + 1)]
    for shared in problem.liveness.shared.values():
        for cut in range(shared.segment + 1, shared.sites[-1] + 1):
            found[cut].append(shared)
    return found


def _choose_state_storages(problem: Problem, count: int) -> list[SharedStorage | None]:
    """Choose a state storage for every cut: disjoint stretches with the most bytes in all."""
    crossing = (shared for shared in problem.liveness.shared.values() if shared.crosses and not shared.is_decided)
    stretches = [(shared.segment + 1, shared.sites[-1], shared) for shared in crossing]
    stretches.sort(key=lambda s: (s[1], s[0], s[2].storage))
    ends = [end for _, end, _ in stretches]
    best = [0]  # bytes, by number of stretches considered
    taken: list[bool] = []
    for first, _, shared in stretches:
        before = bisect.bisect_left(ends, first)
        with_it = best[before] + shared.size_bytes
        taken.append(with_it > best[-1])
        best.append(max(with_it, best[-1]))
    chosen: list[SharedStorage | None] = [None] * (count + 1)
    i = len(stretches)
    while i > 0:
        first, end, shared = stretches[i - 1]
        if taken[i - 1]:
            chosen[first : end + 1] = [shared] * (end + 1 - first)
            i = bisect.bisect_left(ends, first)
        else:
            i -= 1
    return chosen
