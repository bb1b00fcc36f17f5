"""The memory and time of a step under a plan, computed from its Graph.

This is the evaluator: it knows no solver, judges every plan alike, and is what the integer program has to agree
with. It states how the executor (`rewrite.py`: `torch.utils.checkpoint`, non-reentrant, early stop) behaves:

Rule 1  Operators run in recorded order. The local life of a storage is what was recorded, whatever the plan.
Rule 2  A save made outside regions keeps its storage until its recorded release.
Rule 3  A region keeps the values that it takes while it runs, and then, with the outputs that it saves, until the
        last release of a save made inside it, asked for or not; a saved output moves from the region to autograd when
        it is replayed.
Rule 4  A region is recomputed before the first operator of backward that follows a request for one of its saves,
        from its first operator to its last save (early stop). What it saves lives until it has been used (the
        checkpoint hands it out and forgets it), everything else as long as in forward, at most until the recomputation
        ends.
        A region that opens or closes a context (autocast) is recomputed to its end.
Rule 5  While a region with inner ones is recomputed, an inner region runs as in forward: it keeps its inputs until it
        is recomputed itself, when one of its own saves is asked for.
Rule 6  Counters of a module are not advanced by a recomputation. Batch normalisation works there on copies of its
        running statistics, which autograd saves.
Rule 7  A cast that belongs to a saved node (autocast's copies) is not saved; it is made again, and so is a constant
        (`torch.tensor(2.0)`). So is a cast that autocast remembered from before a region: in forward it lasts as long
        as autocast is on, in a recomputation as long as that.
Rule 8  An offloaded storage is on the device until its release, and again from its fetch, or the first request for it,
        if that is earlier, until autograd or its last region lets go of it. How fast it is copied changes times only.
Rule 9  A region is recomputed once for every backward that asks for its saves: for those within the forward too. What
        such a backward's own graph keeps, it keeps as that recomputation made it; what the region took, as it is.
Rule 10 Every region saves the nodes that decide (`Node.decides`), but those around and inside other regions. If another
        node changes their values in place, it saves copies.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from remat.evaluation.graph import OPTIMIZER_STATE, STEP_IN_BACKWARD, Graph
from remat.evaluation.plan import Offload, Region, saved_nodes
from remat.work import work

CURVE_S, POINT_S = 0.45e-3, 35e-9  # of work: for a curve, and for an operator of it

_Position = Callable[[np.ndarray], np.ndarray]


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """A step under a plan, one entry per operator that runs.

    alive_bytes  bytes alive during it, including fixed bytes, workspaces and outputs held from the step before
    op           the recorded operator: in a recomputation maybe a cast from before its region (Rule 7)
    region       index of the top-level region that it recomputes for, -1 in forward, backward and optimizer
    executed     False for an operator of a saved node that is only replayed
    """

    alive_bytes: np.ndarray
    op: np.ndarray
    region: np.ndarray
    executed: np.ndarray

    @property
    def peak_bytes(self) -> int:
        return int(self.alive_bytes.max())

    @property
    def peak_at(self) -> int:
        return int(self.alive_bytes.argmax())

    def phases(self, graph: Graph) -> dict[str, np.ndarray]:
        """Return which operators run in forward, backward and the optimizer; recomputations are part of backward."""
        is_forward, is_again = self.op < graph.forward_end, self.region >= 0
        return {
            "forward": is_forward & ~is_again,
            "backward": is_again | (~is_forward & (self.op < graph.backward_end)),
            "optimizer": self.op >= graph.backward_end,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Lives:
    """The lives of every storage of a step under a plan, one per computation, and their timeline.

    storage, size_bytes, birth, death  columns over lives: a storage of the graph, and the positions between which it
                                       is alive
    op, region, executed               columns over positions, as in `Curve`
    """

    storage: np.ndarray
    size_bytes: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    op: np.ndarray
    region: np.ndarray
    executed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Copies:
    storage: np.ndarray
    size_bytes: np.ndarray
    birth: np.ndarray
    death: np.ndarray


def _joined(parts: Sequence[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Join the parts into one array, and return it with the number of the part of each entry."""
    if not parts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    lengths = [len(part) for part, _ in parts]
    return np.concatenate([part for part, _ in parts]), np.repeat([number for _, number in parts], lengths)


@dataclasses.dataclass
class Recomputation:
    """Operators [first, stop), inserted before backward operator `trigger`.

    top            index of the top-level region
    release        last operator during which its inputs are kept
    level          0, or 1 for an inner one
    saved_tensors  rows of `Graph.saved_tensors` that it makes again
    inner          recomputations of its inner regions
    casts          storages of older casts that it makes again, in order
    cast_at        operators before which it makes them (Rule 7)
    used           last use of each of `saved_tensors`, if that is by a backward within the forward (Rule 9)
    start          its position on the timeline
    """

    region: Region
    top: int
    first: int
    stop: int
    trigger: int
    release: int
    level: int
    saved_tensors: np.ndarray
    inner: tuple[Recomputation, ...] = ()
    used: np.ndarray | None = None
    casts: np.ndarray = dataclasses.field(default_factory=_none)
    cast_at: np.ndarray = dataclasses.field(default_factory=_none)
    start: int = -1

    @property
    def length(self) -> int:
        return self.stop - self.first + len(self.casts)

    @property
    def last(self) -> int:
        """Its last position on the timeline."""
        return self.start + self.length - 1

    def positions(self, ops: Any) -> Any:
        """Return the positions of its own operators on the timeline."""
        return self.start + ops - self.first + np.searchsorted(self.cast_at, ops, side="right")

    @property
    def cast_positions(self) -> np.ndarray:
        return self.start + self.cast_at - self.first + np.arange(len(self.casts))


def _placed(recomputations: Sequence[Recomputation], by: np.ndarray, ops: np.ndarray) -> np.ndarray:
    """Return the timeline positions of operators, each in the recomputation that `by` gives."""
    shift = np.array([r.start - r.first for r in recomputations], dtype=np.int64)
    placed = shift[by] + ops
    for i, r in enumerate(recomputations):
        if len(r.casts):
            placed[by == i] = r.positions(ops[by == i])
    return placed


def _is_outside(inner: Sequence[Region], nodes: np.ndarray) -> np.ndarray:
    """Mark the nodes that are in none of the inner regions."""
    starts, ends = (np.array([getattr(part, side) for part in inner]) for side in ("first", "end"))
    holder = np.searchsorted(starts, nodes, side="right") - 1
    return (holder < 0) | (nodes >= ends[holder])


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The parts of `Recomputation` that do not depend on the place of a region without inner regions."""

    first: int
    stop: int
    trigger: int
    release: int
    saved_tensors: np.ndarray
    casts: np.ndarray
    cast_at: np.ndarray

    def of(self, region: Region, top: int, level: int) -> Recomputation:
        columns = (self.first, self.stop, self.trigger, self.release, level, self.saved_tensors)
        return Recomputation(region, top, *columns, casts=self.casts, cast_at=self.cast_at)


class Memory:
    """The evaluator for one Graph; `workspace_bytes` are those of every operator's kernel.

    offloads  storages that every plan judged here has on the host between forward and backward
    """

    offloads: tuple[Offload, ...] = ()

    def __init__(self, graph: Graph, workspace_bytes: np.ndarray | None = None):
        self.graph = graph
        self.workspace_bytes = np.zeros(graph.op_count, dtype=np.int64) if workspace_bytes is None else workspace_bytes
        table = graph.saved_tensors
        self.kept_for_backward = np.flatnonzero((table.storage >= 0) & (table.release >= graph.forward_end))
        self._inputs: dict[tuple[int, int], frozenset[int]] = {}
        self._input_arrays: dict[tuple[int, int], np.ndarray] = {}
        self._leaves: dict[tuple[int, int], _Leaf | None] = {}
        self._enters: dict[tuple[int, int], bool] = {}
        self._latest: tuple[Region | None, list[Recomputation]] = None, []
        self.node_first = np.array([node.first for node in graph.nodes], dtype=np.int64)
        self.node_end = np.array([node.end for node in graph.nodes], dtype=np.int64)

    def offloading(self, offloads: Sequence[Offload]) -> Memory:
        """Return the evaluator of plans with these offloads; both share what was computed about the graph."""
        other = copy.copy(self)
        other.offloads = tuple(offloads)
        return other

    def inputs(self, first: int, end: int) -> frozenset[int]:
        """Return the storages from before node `first` whose values nodes first..end-1 take. (Rule 3)"""
        key = (first, end)
        if key not in self._inputs:
            nodes = self.graph.nodes
            sources = {source for node in nodes[first:end] for source in node.inputs if source < first}
            self._inputs[key] = frozenset(storage for source in sources for storage in nodes[source].values)
        return self._inputs[key]

    def _inputs_array(self, region: Region) -> np.ndarray:
        """Return `inputs` of a region as a sorted array."""
        key = (region.first, region.end)
        if key not in self._input_arrays:
            self._input_arrays[key] = np.array(sorted(self.inputs(*key)), dtype=np.int64)
        return self._input_arrays[key]

    @functools.cached_property
    def peak_without_regions(self) -> int:
        """Peak of a plan of no regions, whose forward is traced all the same."""
        return self.offloading(()).curve(()).peak_bytes

    @functools.cached_property
    def peak_without_checkpointing(self) -> int:
        """Peak of the step without a plan; if unknown, that of a plan without regions."""
        return max(self.peak_without_regions, int(self.graph.untraced_bytes.max(initial=0)))

    def first_step_peak(self, regions: Sequence[Region]) -> int:
        """Return the peak of the very first step, in which the optimizer allocates its state."""
        graph, curve = self.graph, self.curve(regions)
        alive = curve.alive_bytes - self.held_outputs_bytes(curve.op, curve.region)  # there is no step before
        before = alive[curve.op < graph.backward_end].max()
        if graph.about.get(STEP_IN_BACKWARD):  # its state is made within backward: later steps have as much alive
            return int(before)
        return max(int(before) - graph.fixed_bytes.get(OPTIMIZER_STATE, 0), graph.first_step_bytes)

    def saved_tensors_in(self, first: int, end: int) -> np.ndarray:
        """Return the indices of the saves made by nodes first..end-1, in order."""
        low, high = np.searchsorted(self.graph.saved_tensors.node, (first, end))
        return np.arange(low, high)

    def curve(self, regions: Sequence[Region], *, plain: tuple[int, int] | None = None) -> Curve:
        """Compute the bytes alive at every operator of a step under `regions` (disjoint, in order).

        plain  of autograd's saves outside regions, count only those of nodes first..end-1: the share of one run,
               for the rows of the integer program
        """
        lives = self.lives(regions, plain)
        work(CURVE_S + POINT_S * len(lives.op))
        change = np.zeros(len(lives.op) + 1, dtype=np.int64)
        np.add.at(change, lives.birth, lives.size_bytes)
        np.subtract.at(change, lives.death + 1, lives.size_bytes)
        alive = np.cumsum(change[:-1]) + self.graph.fixed_total
        alive += np.where(lives.executed, self.workspace_bytes[lives.op], 0)
        alive += self.held_outputs_bytes(lives.op, lives.region)
        return Curve(alive, lives.op, lives.region, lives.executed)

    def held_outputs_bytes(self, op: np.ndarray, region: np.ndarray) -> np.ndarray:
        """Return the bytes of the last step's outputs that the loop still holds, at positions of a timeline.

        They are there while a region is recomputed for a backward within the forward, too.
        """
        sizes = np.zeros(len(op), dtype=np.int64)
        for size, until in self.graph.held_outputs:
            sizes[: int(np.argmax(np.append((op >= until) & (region < 0), True)))] += size
        return sizes

    def lives(self, regions: Sequence[Region], plain: tuple[int, int] | None = None) -> Lives:
        """Compute when every storage is alive: the recorded ones first, then recomputed ones, then copies."""
        recomputations = self.recomputations(regions)
        position, ops, owner = self.timeline(recomputations)
        storages = self.graph.storages
        death = position(self._deaths_of_originals(regions, recomputations, plain))
        again, again_birth, again_death, made_by = self._made_again(recomputations, position)
        executed = np.ones(len(ops), dtype=bool)
        for i, recomputation in enumerate(recomputations):
            if self._saves(recomputation):
                is_saved = np.zeros(len(storages.birth), dtype=bool)
                is_saved[self.saved_storages(recomputation.region)] = True
                saved = (made_by == i) & is_saved[again]
                death[again[saved]] = np.maximum(death[again[saved]], again_death[saved])
                self._end_with_replay(death, recomputation)
                made_by[saved] = -1
            self._mark_replayed(executed, recomputation)
        instances = made_by >= 0
        again, again_birth, again_death = again[instances], again_birth[instances], again_death[instances]
        copies, copied = self._copies(recomputations, position), self._copied(regions)
        fetched, fetched_birth, fetched_death = self._fetched(regions, recomputations, position, death)
        return Lives(
            storage=np.concatenate([np.arange(len(storages.birth)), again, copies.storage, fetched, copied]),
            size_bytes=np.concatenate(
                [
                    *(storages.size_bytes, storages.size_bytes[again], copies.size_bytes),
                    *(storages.size_bytes[fetched], storages.size_bytes[copied]),
                ]
            ),
            birth=np.concatenate(
                [position(storages.birth), again_birth, copies.birth, fetched_birth, position(storages.birth[copied])]
            ),
            death=np.concatenate([death, again_death, copies.death, fetched_death, position(storages.death[copied])]),
            op=ops,
            region=owner,
            executed=executed,
        )

    def saved_storages(self, region: Region) -> np.ndarray:
        """Return the storages that a region saves: those that its saved nodes allocate, without casts. (Rule 7)"""
        saved = saved_nodes(self.graph, region)
        return np.sort(np.concatenate([self.allocated[node] for node in saved])) if saved else _none()

    def _saves(self, r: Recomputation) -> tuple[int, ...]:
        """Return the nodes whose results `r` takes from forward. (Rule 10)"""
        return saved_nodes(self.graph, r.region) if r.level == 0 else r.region.saved

    @functools.cached_property
    def allocated(self) -> list[np.ndarray]:
        """The storages that each node allocates, without casts."""
        storages = self.graph.storages
        own = np.flatnonzero((storages.cast == 0) & (storages.node >= 0))
        own = own[np.argsort(storages.node[own], kind="stable")]
        borders = np.searchsorted(storages.node[own], np.arange(len(self.graph.nodes) + 1))
        return [own[a:b] for a, b in itertools.pairwise(borders)]

    def recompute_time_us(self, regions: Sequence[Region], op_time_us: np.ndarray) -> float:
        """Return the time of all operators that run a second (third, ...) time under `regions`."""
        curve = self.curve(regions)
        again = (curve.region >= 0) & curve.executed
        return float(op_time_us[curve.op[again]].sum())

    def nested_time(self, region: Region, time_until: np.ndarray) -> int:
        """Return the time of recomputing `region` and its inner regions.

        time_until  the time of all operators before each one
        """
        found = self.recomputations([region])
        first, stop = (np.array([getattr(r, side) for r in found], dtype=np.int64) for side in ("first", "stop"))
        return int((time_until[stop] - time_until[first]).sum()) + sum(self._cast_time(r, time_until) for r in found)

    def time_of(self, r: Recomputation, time_until: np.ndarray) -> int:
        """Return the time of recomputation `r` alone, ignoring its saves."""
        return int(time_until[r.stop] - time_until[r.first]) + self._cast_time(r, time_until)

    def _cast_time(self, r: Recomputation, time_until: np.ndarray) -> int:
        cast = self.graph.storages.birth[r.casts]
        return int((time_until[cast + 1] - time_until[cast]).sum()) if len(cast) else 0

    def recomputed_nodes(self, regions: Sequence[Region]) -> int:
        """Count recomputed nodes; a node of an inner region counts once for each level."""
        count = 0
        for r in self.recomputations(regions):
            last = self._last_called(r.region)
            count += last + 1 - r.region.first - sum(v <= last for v in self._saves(r))
        return count

    # Building the timeline

    def recomputation(self, region: Region) -> Recomputation | None:
        """Return the recomputation of `region` for the step's own backward; None if it is not recomputed."""
        found = [r for r in self.recomputations([region]) if r.level == 0]
        return found[-1] if found else None  # that of the step's own backward

    def first_trigger(self, region: Region) -> int:
        """Return the operator before which `region` is first recomputed after forward: a hook may ask early."""
        triggers = [r.trigger for r in self.recomputations([region]) if r.level == 0]
        return min((trigger for trigger in triggers if trigger >= self.graph.forward_end), default=triggers[-1])

    def recomputations(self, regions: Sequence[Region]) -> list[Recomputation]:
        """Return the recomputations of a plan in the order of the timeline; the last ones of one region are kept."""
        if len(regions) != 1:
            return self._recomputations(regions)
        if regions[0] is not self._latest[0]:
            self._latest = regions[0], self._recomputations(regions)
        return self._latest[1]

    def _recomputations(self, regions: Sequence[Region]) -> list[Recomputation]:
        found: list[Recomputation] = []
        for top, region in enumerate(regions):
            inner = [self._recomputation(part, top, level=1) for part in region.inner]
            outer = self._outer(region, top, [r for r in inner if r]) if region.inner else None
            found += [r for r in (outer or self._recomputation(region, top, level=0), *inner) if r]
            found += self._within_forward(region, top) if self.graph.inner else ()
        return sorted(found, key=lambda r: (r.trigger, r.level, -r.first))

    def _recomputation(self, region: Region, top: int, level: int) -> Recomputation | None:
        key = (region.first, region.end)
        if key not in self._leaves:
            self._leaves[key] = self._leaf(region)
        leaf = self._leaves[key]
        return None if leaf is None else leaf.of(region, top, level)

    def _within_forward(self, region: Region, top: int) -> Iterator[Recomputation]:
        """Yield the recomputations of a region for backwards within the forward. (Rule 9)"""
        inner, rows = self.graph.inner, self.saved_tensors_in(region.first, region.end)
        asked = np.isin(inner.row, rows)
        for task in np.unique(inner.task[asked]):
            requests = asked & (inner.task == task)
            leaf = self._leaf_of(region, rows, int(inner.unpack[requests].min())).of(region, top, 0)
            used = np.maximum(inner.used, inner.kept)[requests]
            yield dataclasses.replace(leaf, saved_tensors=inner.row[requests], used=used)

    def _leaf(self, region: Region) -> _Leaf | None:
        """Return the recomputation of a region without inner regions; None if nothing of it is unpacked. (Rule 4)"""
        table, rows = self.graph.saved_tensors, self.saved_tensors_in(region.first, region.end)
        asked = table.unpack[rows]
        return self._leaf_of(region, rows, int(asked[asked >= 0].min())) if (asked >= 0).any() else None

    def _leaf_of(self, region: Region, rows: np.ndarray, trigger: int) -> _Leaf:
        table = self.graph.saved_tensors
        stop = self._stop(region, int(table.at[rows].max()))
        casts, cast_at = self._casts_again(region, stop)
        return _Leaf(
            first=int(self.node_first[region.first]),
            stop=stop,
            trigger=trigger,
            release=int(table.release[rows].max()),
            saved_tensors=rows,
            casts=casts,
            cast_at=cast_at,
        )

    def _casts_again(self, region: Region, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (casts, operators): older casts that a recomputation makes again, and before which operators.

        (Rule 7).
        """
        if not self._reuses:
            return _none(), _none()
        found: dict[int, int] = {}
        for node in range(region.first, self._last_called(region) + 1):
            record = self.graph.nodes[node]
            for u, at in zip(record.reused, record.reused_at, strict=True):
                if self.graph.storages.node[u] < region.first and at <= stop:
                    found.setdefault(u, at)
        return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)

    @functools.cached_property
    def _reuses(self) -> bool:
        return any(node.reused for node in self.graph.nodes)

    def _stop(self, region: Region, last_save: int) -> int:
        """Return the end of the recomputation of `region`: its last save, unless a context might be open there."""
        return int(self.node_end[region.end - 1]) if self._holds_context(region) else last_save

    def _last_called(self, region: Region) -> int:
        """Return the last node of `region` that its recomputation calls, at most where the last inner region begins."""
        if self._holds_context(region):
            return region.end - 1
        saving = self.graph.saved_tensors.node[self.saved_tensors_in(region.first, region.end)]
        if not region.inner:
            return int(saving[-1])
        own = saving[_is_outside(region.inner, saving)]
        return max([region.first - 1, *(first - 1 for first in self._entered(region)), *own[-1:].tolist()])

    def _entered(self, region: Region) -> list[int]:
        """Return the beginnings of inner regions with a tensor input; the recomputation goes up to the last one."""
        return [part.first for part in region.inner if self._is_entered(part)]

    def _is_entered(self, part: Region) -> bool:
        key = (part.first, part.end)
        if key not in self._enters:
            self._enters[key] = bool(self.inputs(*key)) or self._takes_fixed(part)
        return self._enters[key]

    def _takes_fixed(self, region: Region) -> bool:
        """Return whether `region` takes a parameter or the like, except a counter, which autograd need not keep."""
        nodes = self.graph.nodes[region.first : region.end]
        return any(node.takes_fixed and node.effect != "counter" for node in nodes)

    def _holds_context(self, region: Region) -> bool:
        return bool(self._in_context[region.end] > self._in_context[region.first])

    @functools.cached_property
    def _in_context(self) -> np.ndarray:
        """The number of nodes before each that are inside a context or close one."""
        nodes = self.graph.nodes
        inside = [node.in_context or (i > 0 and nodes[i - 1].in_context) for i, node in enumerate(nodes)]
        return np.concatenate([[0], np.cumsum(inside)])

    def _outer(self, region: Region, top: int, inner: list[Recomputation]) -> Recomputation | None:
        """Return the recomputation of a region with inner regions; None if nothing of it is unpacked. (Rule 5)"""
        table, rows = self.graph.saved_tensors, self.saved_tensors_in(region.first, region.end)
        rows = rows[_is_outside(region.inner, table.node[rows])]
        asked = table.unpack[rows]
        triggers = [*asked[asked >= 0].tolist(), *(r.trigger for r in inner)]
        if not triggers:
            return None
        entered = self.node_first[[region.first, *self._entered(region)]].tolist()
        stop = self._stop(region, max([*table.at[rows].tolist(), *entered]))
        casts, cast_at = self._casts_again(region, stop)
        return Recomputation(
            region,
            top,
            first=int(self.node_first[region.first]),
            stop=stop,
            trigger=min(triggers),
            release=max([*table.release[rows].tolist(), *(r.release for r in inner)]),
            level=0,
            saved_tensors=rows,
            inner=tuple(inner),
            casts=casts,
            cast_at=cast_at,
        )

    def timeline(self, recomputations: list[Recomputation]) -> tuple[_Position, np.ndarray, np.ndarray]:
        """Return (map from operators to positions, operator at each position, its region or -1)."""
        count = self.graph.op_count
        triggers = np.array([r.trigger for r in recomputations], dtype=np.int64)
        lengths = np.array([r.length for r in recomputations], dtype=np.int64)
        total = np.concatenate([[0], np.cumsum(lengths)])

        def position(op: np.ndarray) -> np.ndarray:
            return op + total[np.searchsorted(triggers, op, side="right")]

        ops = np.empty(count + int(total[-1]), dtype=np.int64)
        owner = np.full(len(ops), -1, dtype=np.int64)
        ops[position(np.arange(count))] = np.arange(count)
        for r, before in zip(recomputations, total, strict=False):
            r.start = r.trigger + int(before)
            owner[r.start : r.last + 1] = r.top
            if len(r.casts):
                ops[r.positions(np.arange(r.first, r.stop))] = np.arange(r.first, r.stop)
                ops[r.cast_positions] = self.graph.storages.birth[r.casts]
            else:
                ops[r.start : r.last + 1] = np.arange(r.first, r.stop)
        return position, ops, owner

    def _deaths_of_originals(
        self, regions: Sequence[Region], recomputations: list[Recomputation], only: tuple[int, int] | None
    ) -> np.ndarray:
        """Return the last operator during which each storage from forward is alive. (Rules 1-3)"""
        table = self.graph.saved_tensors
        death = self.graph.storages.death.copy()
        plain = np.flatnonzero(table.storage >= 0)
        if only is not None:
            plain = plain[(table.node[plain] >= only[0]) & (table.node[plain] < only[1])]
        for region in regions:
            plain = plain[(table.node[plain] < region.first) | (table.node[plain] >= region.end)]
        np.maximum.at(death, table.storage[plain], table.release[plain])
        if self.graph.inner:
            storage, kept = self._kept_by_inner_backwards(regions, only)
            np.maximum.at(death, storage, kept)
        parts = [part for region in regions for part in (region, *region.inner)]
        if parts:
            taken = [self._inputs_array(part) for part in parts]
            until = self.node_end[[part.end - 1 for part in parts]] - 1
            np.maximum.at(death, np.concatenate(taken), np.repeat(until, [len(found) for found in taken]))
        for r in recomputations:
            if r.level == 0:
                keeps = self._inputs_array(r.region)
                death[keeps] = np.maximum(death[keeps], r.release)
                saved = self.saved_storages(r.region)
                replayed = self.graph.storages.node[saved] <= self._last_called(r.region)
                last = r.release if self._is_retained(r) else r.trigger - 1
                death[saved] = np.maximum(death[saved], np.where(replayed, last, r.release))
        asked = {r.region for r in recomputations if r.level == 0}
        for region in regions:
            if region not in asked:
                rows = self.saved_tensors_in(region.first, region.end)
                keeps = np.concatenate([self._inputs_array(region), self.saved_storages(region)])
                last = int(table.release[rows].max(initial=int(self.node_end[region.end - 1]) - 1))
                death[keeps] = np.maximum(death[keeps], last)
        return death

    def _is_retained(self, r: Recomputation) -> bool:
        """Return whether the last of several backwards in a hook has kept the graph, and with it what was saved."""
        inner, table, rows = self.graph.inner, self.graph.saved_tensors, r.saved_tensors
        if not inner or not np.isin(inner.row[inner.unpack >= self.graph.forward_end], rows).any():
            return False
        return bool(table.release[rows].min() > table.used[rows].max())

    def _kept_by_inner_backwards(
        self, regions: Sequence[Region], only: tuple[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (storages, last operators) that graphs of backwards within the forward keep. (Rule 9)"""
        inner, table = self.graph.inner, self.graph.saved_tensors
        storage, site = table.storage[inner.row], self.inner_sites
        found = (inner.kept >= 0) & (storage >= 0)
        if only is not None:
            found &= (site >= only[0]) & (site < only[1])
        for region in regions:
            made = self.graph.storages.node[storage]
            made_again = (made >= region.first) & (made < region.end)
            found &= ~(made_again & (table.node[inner.row] >= region.first) & (table.node[inner.row] < region.end))
        return storage[found], inner.kept[found]

    @functools.cached_property
    def inner_sites(self) -> np.ndarray:
        """The node in which each request of a backward within the forward runs."""
        inner = self.graph.inner
        return self.graph.op_node[inner.unpack] if inner else inner.unpack

    def _made_again(
        self, recomputations: list[Recomputation], position: _Position
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (recomputed storages, births, deaths, index of the recomputation). (Rules 4, 5 and 7)"""
        storages, table = self.graph.storages, self.graph.saved_tensors
        first = np.array([r.first for r in recomputations], dtype=np.int64)
        stop = np.array([r.stop for r in recomputations], dtype=np.int64)
        low, high = np.searchsorted(storages.birth, first), np.searchsorted(storages.birth, stop)
        count = high - low
        place = np.cumsum(count) - count - low  # storage u made by recomputation r is entry u + place[r]
        by = np.repeat(np.arange(len(recomputations)), count)
        made = np.arange(int(count.sum())) - place[by]
        ends = np.array([r.last for r in recomputations], dtype=np.int64)
        in_it = storages.death[made] < stop[by]
        death = np.where(in_it, _placed(recomputations, by, storages.death[made]), ends[by])

        def live_until_used(rows: np.ndarray, by: np.ndarray, used: np.ndarray | None = None) -> None:
            storage, used = table.storage[rows], table.used[rows] if used is None else used
            own = (storage >= low[by]) & (storage < high[by]) & (used >= 0)
            np.maximum.at(death, storage[own] + place[by[own]], position(used[own]))

        rows, owner = _joined([(r.saved_tensors, i) for i, r in enumerate(recomputations)])
        live_until_used(rows, owner, np.concatenate([_none(), *map(self._used_by, recomputations)]))
        for i, idle, end in self._idle(recomputations):
            keeps = self._inputs_array(idle)
            own = keeps[(keeps >= low[i]) & (keeps < high[i])]
            np.maximum.at(death, own + place[i], recomputations[i].positions(end - 1))
        for i, outer in enumerate(recomputations):
            if not outer.inner:
                continue
            keeps, inner = _joined([(self._inputs_array(part.region), k) for k, part in enumerate(outer.inner)])
            own = (keeps >= low[i]) & (keeps < high[i])
            until = position(np.array([part.trigger for part in outer.inner])) - 1
            np.maximum.at(death, keeps[own] + place[i], until[inner[own]])
            rows, inner_of_row = _joined([(part.saved_tensors, k) for k, part in enumerate(outer.inner)])
            # A pair (inner region, storage) as one number, to find the saves of the region's inputs.
            pairs = inner_of_row * (1 << 32) + table.storage[rows]
            again = rows[np.isin(pairs, inner[own] * (1 << 32) + keeps[own])]
            live_until_used(again, np.full(len(again), i))
        birth = _placed(recomputations, by, storages.birth[made])
        casts = self._cast_again(recomputations, position)
        own_and_casts = zip((made, birth, death, by), casts, strict=True)
        columns = [np.concatenate(pair) if len(casts[0]) else pair[0] for pair in own_and_casts]
        return columns[0], columns[1], columns[2], columns[3]

    def _used_by(self, r: Recomputation) -> np.ndarray:
        """Return the last use of each save that `r` makes again."""
        return self.graph.saved_tensors.used[r.saved_tensors] if r.used is None else r.used

    def _cast_again(
        self, recomputations: list[Recomputation], position: _Position
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the lives of casts from before a region that are made again: autocast caches them. (Rule 7)"""
        table = self.graph.saved_tensors
        casts, by = _joined([(r.casts, i) for i, r in enumerate(recomputations)])
        birth, _ = _joined([(r.cast_positions, i) for i, r in enumerate(recomputations) if len(r.casts)])
        death = np.array([r.last for r in recomputations], dtype=np.int64)[by]
        for k, u in enumerate(casts.tolist()):
            rows = recomputations[by[k]].saved_tensors
            used = table.used[rows[table.storage[rows] == u]]
            death[k] = max([death[k], *position(used[used >= 0]).tolist()])
        return casts, birth, death, by

    def _idle(self, recomputations: list[Recomputation]) -> Iterator[tuple[int, Region, int]]:
        """Yield (index, region, end) for inner regions that rerun although none of their saves is unpacked.

        They keep their inputs while they run. (Rule 5)
        """
        for i, r in enumerate(recomputations):
            asked = {part.region for part in r.inner}
            for part in r.region.inner:
                if part not in asked:
                    yield i, part, min(int(self.node_end[part.end - 1]), r.stop)

    def _copies(self, recomputations: list[Recomputation], position: _Position) -> _Copies:
        """Return copies of module state, counted with the first storage of their node. (Rule 6)"""
        table = self.graph.saved_tensors
        rows, by = _joined([(r.saved_tensors, i) for i, r in enumerate(recomputations)])
        stop = np.array([r.stop for r in recomputations], dtype=np.int64)
        copied = (table.copy_bytes[rows] > 0) & (table.at[rows] < stop[by])
        rows, by = rows[copied], by[copied]
        birth = _placed(recomputations, by, table.at[rows])
        return _Copies(self._first_storage[table.node[rows]], table.copy_bytes[rows], birth, position(table.used[rows]))

    def _copied(self, regions: Sequence[Region]) -> np.ndarray:
        """Return the storages of which regions save copies, so that in forward there are two of each. (Rule 10)"""
        changed = [v for region in regions for v in saved_nodes(self.graph, region) if v in self.graph.changed]
        return np.concatenate([self.allocated[node] for node in changed]) if changed else _none()

    def _fetched(
        self, regions: Sequence[Region], recomputations: list[Recomputation], position: _Position, death: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (offloaded storages, births and deaths after the fetch); end their first lives in `death`. (Rule 8)"""
        if not self.offloads:
            return _none(), _none(), _none()
        storage = np.array([each.storage for each in self.offloads], dtype=np.int64)
        fetches = np.array([self.event(recomputations, position, each.fetch) for each in self.offloads])
        asked = self.first_requests(regions, recomputations, position)[storage]
        last = death[storage]
        nodes = self.graph.nodes
        death[storage] = [nodes[each.release].end_after(each.after_slices) - 1 for each in self.offloads]
        return storage, np.minimum(fetches, asked), last

    def event(self, recomputations: list[Recomputation], position: _Position, node: int) -> int:
        """Return the position at which `node` is needed: by its region's recomputation, or by its own save."""
        for r in recomputations:
            if r.level == 0 and node in r.region:
                return r.start
        table, rows = self.graph.saved_tensors, self.saved_tensors_in(node, node + 1)
        asked = table.unpack[rows]
        return int(position(asked[asked >= 0]).min())

    def first_requests(
        self, regions: Sequence[Region], recomputations: list[Recomputation], position: _Position
    ) -> np.ndarray:
        """Return for every storage its first use in backward, by a save outside regions or as a region's input.

        Saved values and inputs of a region are first used when its recomputation begins.
        """
        never = np.iinfo(np.int64).max
        first = np.full(len(self.graph.storages.birth), never, dtype=np.int64)
        table = self.graph.saved_tensors
        plain = np.flatnonzero((table.storage >= 0) & (table.unpack >= 0))
        for region in regions:
            plain = plain[(table.node[plain] < region.first) | (table.node[plain] >= region.end)]
        np.minimum.at(first, table.storage[plain], position(table.unpack[plain]))
        for r in recomputations:
            if r.level == 0:
                taken = np.concatenate([self._inputs_array(r.region), self.saved_storages(r.region)])
                first[taken] = np.minimum(first[taken], r.start)
        return first

    @functools.cached_property
    def _first_storage(self) -> np.ndarray:
        """A storage that each node makes, or 0."""
        first = np.zeros(len(self.graph.nodes), dtype=np.int64)
        made = self.graph.storages.node >= 0
        first[self.graph.storages.node[made][::-1]] = np.flatnonzero(made)[::-1]
        return first

    def _end_with_replay(self, deaths: np.ndarray, r: Recomputation) -> None:
        """Free the tensors that the last replayed node saves beyond the early stop when the recomputation ends."""
        saved = self.saved_storages(r.region)
        unused = saved[(self.graph.storages.birth[saved] >= r.stop)]
        unused = unused[self.graph.storages.node[unused] <= self._last_called(r.region)]
        deaths[unused] = np.maximum(deaths[unused], r.last)

    def _mark_replayed(self, executed: np.ndarray, r: Recomputation) -> None:
        saved = [np.arange(self.node_first[node], self.node_end[node]) for node in self._saves(r)]
        if not saved and not len(self._counting):
            return
        ops = np.concatenate([*saved, self._counting])
        ops = ops[(ops >= r.first) & (ops < r.stop)]
        executed[r.positions(ops)] = self.graph.is_made_again[ops]

    @functools.cached_property
    def _counting(self) -> np.ndarray:
        """The operators of counter nodes, ascending; they are not recomputed."""
        counters = [i for i, node in enumerate(self.graph.nodes) if node.effect == "counter"]
        each = [np.arange(self.node_first[i], self.node_end[i]) for i in counters]
        return np.concatenate([np.zeros(0, dtype=np.int64), *each])
