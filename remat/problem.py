"""Pose: turn a Graph, Costs and a budget into the data of an integer program.

The forward is cut into segments 0..m-1 (`space.py`). A *run* is a segment left plain, or an interval [a, b) of
segments made one region, possibly holding inner ones. A plan chooses runs that partition the segments, and nodes to
save inside chosen regions. Memory at one operator under a plan has three parts, and so has a `Row`:

* what does not depend on other runs: local life, and all that the run itself has alive there (`Row.bytes`);
* what earlier runs keep for their own backward (`Row.before`): the prefix sum over segments < a of what plain
  segments keep, what regions take, and what they save, every storage counted once (`Kept`);
* what the run's own saves add or spare there (`Row.saves`).

The rows are exact: evaluated at a plan they give `Memory.curve` at that operator. There are many; a solver starts
with the few that `first_rows` gives and asks for others where the evaluator finds its plan over budget. Leaving
rows out never overstates a peak, so a bound stays a bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from remat.costs import Costs
from remat.graph import Graph
from remat.memory import Curve, Memory
from remat.plans import Region
from remat.space import Space

NS = 1000  # nanoseconds in a microsecond: objectives are integers


@dataclasses.dataclass(frozen=True)
class Run:
    """Segments a..b-1, plain (`region` None; then b = a + 1) or one region; time to recompute it once, in ns.

    never_again  nodes after the last save: early stop leaves them out, so saving them gains nothing
    """

    a: int
    b: int
    region: Region | None
    time_ns: int
    never_again: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Row:
    """bytes + prefix(before) without `alive` + sum of saves <= budget, if the run is chosen.

    run     index of the run; None: holds for every plan, and `plain` and `kept` list what is kept instead
    op      the operator at which it holds          alive  storages that `bytes` counts already
    plain   segment -> bytes kept if it is plain    kept   (storage, site) -> bytes
    """

    run: int | None
    op: int
    bytes: int
    before: int = 0
    alive: frozenset[int] = frozenset()
    saves: tuple[tuple[int, int], ...] = ()
    plain: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Kept:
    """A storage with more than one reason to outlive its forward.

    segment  where it is made                  sites   segments with a reason to keep it, ascending
    packed   sites at which autograd saves it, if they are plain
    taken    (source, site): a region that holds `site` but starts after `source` takes it as an input
    savers   node that makes it, if saving that node saves it
    """

    storage: int
    size_bytes: int
    segment: int
    sites: tuple[int, ...]
    packed: frozenset[int]
    taken: tuple[tuple[int, int], ...]
    saver: int | None
    death: int

    def wanted_by(self, run: Run) -> bool:
        """Whether `run`, which holds the last site, keeps it there."""
        if run.region is None:
            return self.sites[-1] in self.packed
        return any(source < run.a <= site < run.b for source, site in self.taken)

    def site_before(self, segment: int) -> int | None:
        """The last site before `segment`."""
        return max((site for site in self.sites if site < segment), default=None)


class Problem:
    """The data of the program for one graph, space and budget."""

    def __init__(self, graph: Graph, costs: Costs, space: Space, budget_bytes: int):
        self.graph = graph
        self.space = space
        self.budget_bytes = budget_bytes
        self.memory = Memory(graph, costs.workspace_per_op(graph))
        self.op_time_ns = np.round(costs.per_op_us(graph) * NS).astype(np.int64)
        for node in graph.nodes:
            if node.effect == "counter":  # never recomputed
                self.op_time_ns[node.first : node.end] = 0
        self.step_time_us = costs.step_time_us(graph)
        self._first_rows: dict[int, list[Row]] = {}

    def with_budget(self, budget_bytes: int) -> Problem:
        """The same problem under another budget; what was computed about the graph is shared."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other.budget_bytes = budget_bytes
        return other

    def __str__(self) -> str:
        regions = sum(run.region is not None for run in self.runs)
        return (
            f"Problem: {len(self.space.segments)} segments, {regions} possible regions, {len(self.save_time_ns)} "
            f"nodes to save, {len(self.kept)} storages kept for several reasons"
        )

    # Segments

    @functools.cached_property
    def segment_of_node(self) -> np.ndarray:
        lengths = [segment.end - segment.first for segment in self.space.segments]
        return np.repeat(np.arange(len(lengths)), lengths)

    @functools.cached_property
    def backward_of(self) -> list[tuple[int, int]]:
        """For every segment its backward operators [first, end); backward visits segments in reverse."""
        graph = self.graph
        nodes = graph.op_node[graph.forward_end : graph.backward_end]
        last = len(self.space.segments) - 1
        segments = np.where(nodes >= 0, self.segment_of_node[nodes], last)
        segments = np.minimum.accumulate(segments)
        bounds = graph.forward_end + np.searchsorted(-segments, -np.arange(last + 1), side="left")
        ends = graph.forward_end + np.searchsorted(-segments, -np.arange(last + 1), side="right")
        return list(zip(bounds.tolist(), ends.tolist(), strict=True))

    # Runs

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._find_runs())

    def _find_runs(self) -> Iterator[Run]:
        for s in range(len(self.space.segments)):
            yield Run(s, s + 1, None, 0)
        for start, stop in self.space.stretches():
            for a in range(start, stop):
                for b in range(a + 1, stop + 1):
                    for region in self._regions(a, b):
                        run = self._run(a, b, region)
                        if run is not None:
                            yield run

    def _regions(self, a: int, b: int) -> Iterator[Region]:
        """The ways to execute segments a..b-1 as a region: whole, or holding regions of equally many segments."""
        segments = self.space.segments
        first, end = segments[a].first, segments[b - 1].end
        yield Region(first, end)
        if self.space.depth < 2:
            return
        for width in (1, 2, 4):
            if b - a >= 2 * width and b - a >= 3:
                starts = range(a, b, width)
                inner = tuple(Region(segments[i].first, segments[min(i + width, b) - 1].end) for i in starts)
                yield Region(first, end, inner=inner)

    def _run(self, a: int, b: int, region: Region) -> Run | None:
        recomputation = self.memory.recomputation(region)
        if recomputation is None:
            return None
        if region.inner:
            return Run(a, b, region, self.memory.nested_time(region, self._time_until))
        again = self.op_time_ns[recomputation.first : recomputation.stop]
        ends = self.memory.node_end[region.first : region.end]
        never = frozenset((region.first + np.flatnonzero(ends > recomputation.stop)).tolist())
        return Run(a, b, region, int(again.sum()), never)

    def runs_of(self, regions: Sequence[Region]) -> set[int]:
        """Indices of the runs that a plan of this space consists of."""
        index = {
            (run.region.first, run.region.end, run.region.inner): i for i, run in enumerate(self.runs) if run.region
        }
        chosen = {index[region.first, region.end, region.inner] for region in regions}
        covered = {s for i in chosen for s in range(self.runs[i].a, self.runs[i].b)}
        return chosen | (set(range(len(self.space.segments))) - covered)

    def run_at(self, regions: Sequence[Region], op: int, top: int) -> int:
        """The run of a plan that recomputes region `top`, or else whose backward operator `op` is."""
        if top >= 0:
            return next(i for i in self.runs_of([regions[top]]) if self.runs[i].region)
        segment = next(s for s, (first, end) in enumerate(self.backward_of) if first <= op < end)
        return next(i for i in self.runs_of(regions) if self.runs[i].a <= segment < self.runs[i].b)

    @functools.cached_property
    def _time_until(self) -> np.ndarray:
        """Time in ns of the operators before each."""
        return np.concatenate([[0], np.cumsum(self.op_time_ns)])

    # What outlives forward

    @functools.cached_property
    def save_time_ns(self) -> dict[int, int]:
        """Time of recomputing each node that may be saved, casts aside; nodes that take no time are left out."""
        times = {}
        for node in self.space.saveable:
            record = self.graph.nodes[node]
            ops = [op for op in range(record.first, record.end) if not self._is_cast[op]]
            time = int(self.op_time_ns[ops].sum())
            if time > 0:
                times[node] = time
        return times

    @functools.cached_property
    def _is_cast(self) -> np.ndarray:
        names = np.array([kind.name == "aten._to_copy.default" for kind in self.graph.kinds])
        return names[self.graph.op_kind]

    @functools.cached_property
    def saved_by(self) -> dict[int, list[int]]:
        """Storages that each node to save keeps."""
        storages = self.graph.storages
        found: dict[int, list[int]] = {node: [] for node in self.save_time_ns}
        for storage in np.flatnonzero(storages.cast == 0).tolist():
            node = int(storages.node[storage])
            if node in found:
                found[node].append(storage)
        return found

    @functools.cached_property
    def _reasons(self) -> tuple[dict[int, dict[int, int]], dict[int, set[tuple[int, int]]]]:
        """(segment -> storages that autograd keeps if it is plain, with release; storage -> (source, site))."""
        graph, segment = self.graph, self.segment_of_node
        packed: dict[int, dict[int, int]] = {s: {} for s in range(len(self.space.segments))}
        for p in self.memory.kept.tolist():
            site, storage = int(segment[graph.packs.node[p]]), int(graph.packs.storage[p])
            packed[site][storage] = max(packed[site].get(storage, -1), int(graph.packs.release[p]))
        taken: dict[int, set[tuple[int, int]]] = {}
        for i, node in enumerate(graph.nodes):
            for source in node.inputs:
                if segment[source] < segment[i]:
                    for storage in graph.nodes[source].values:
                        taken.setdefault(storage, set()).add((int(segment[source]), int(segment[i])))
        return packed, taken

    @functools.cached_property
    def kept(self) -> dict[int, Kept]:
        """Storages that several runs may want to keep; `own_bytes` has the others."""
        packed, taken = self._reasons
        storages, segment = self.graph.storages, self.segment_of_node
        sites: dict[int, set[int]] = {u: {site for _, site in pairs} for u, pairs in taken.items()}
        for site, found in packed.items():
            for u in found:
                if u in sites or segment[storages.node[u]] != site:
                    sites.setdefault(u, set())
        for site, found in packed.items():
            for u in found:
                if u in sites:
                    sites[u].add(site)
        saver = {u: node for node, saved in self.saved_by.items() for u in saved}
        result = {}
        for u, found_sites in sites.items():
            if storages.death[u] >= self.graph.forward_end:
                continue  # somebody holds it through backward: it is local
            made = int(segment[storages.node[u]])
            all_sites = {*found_sites, made} if u in saver else found_sites
            result[u] = Kept(
                storage=u,
                size_bytes=int(storages.size_bytes[u]),
                segment=made,
                sites=tuple(sorted(all_sites)),
                packed=frozenset(site for site in all_sites if u in packed[site]),
                taken=tuple(sorted(taken.get(u, ()))),
                saver=saver.get(u),
                death=int(storages.death[u]),
            )
        return result

    def _is_own(self, storage: int) -> bool:
        """Whether only its own segment can keep it, and it is not held anyway."""
        return storage not in self.kept and self.graph.storages.death[storage] < self.graph.forward_end

    @functools.cached_property
    def own(self) -> list[list[int]]:
        """For every segment the storages made there that only its being plain keeps."""
        packed, _ = self._reasons
        return [[u for u in packed[s] if self._is_own(u)] for s in range(len(self.space.segments))]

    @functools.cached_property
    def closing(self) -> list[list[Kept]]:
        """For every segment the storages whose last site it is."""
        found: list[list[Kept]] = [[] for _ in self.space.segments]
        for kept in self.kept.values():
            found[kept.sites[-1]].append(kept)
        return found

    @functools.cached_property
    def saves_in(self) -> list[list[int]]:
        """For every segment its nodes that may be saved."""
        found: list[list[int]] = [[] for _ in self.space.segments]
        for node in self.save_time_ns:
            found[int(self.segment_of_node[node])].append(node)
        return found

    @functools.cached_property
    def is_packed(self) -> np.ndarray:
        """Which storages autograd would keep for backward."""
        packed = np.zeros(len(self.graph.storages.birth), dtype=bool)
        packed[self.graph.packs.storage[self.memory.kept]] = True
        return packed

    def objective_ns(self, regions: Sequence[Region]) -> int:
        """Recompute time of a plan of this space, as the program counts it."""
        runs = self.runs_of(regions)
        saved = (v for region in regions for v in region.saved)
        return sum(self.runs[i].time_ns for i in runs) - sum(self.save_time_ns[v] for v in saved)

    @functools.cached_property
    def own_bytes(self) -> list[int]:
        sizes = self.graph.storages.size_bytes
        return [int(sum(sizes[u] for u in storages)) for storages in self.own]

    @functools.cached_property
    def save_bytes(self) -> dict[int, int]:
        """Bytes that saving each node keeps and no other reason does."""
        sizes = self.graph.storages.size_bytes
        return {node: int(sum(sizes[u] for u in saved if self._is_own(u))) for node, saved in self.saved_by.items()}

    # Rows

    def curve_of(self, run: Run) -> Curve:
        """Bytes alive if nothing but `run` kept anything: `Row.bytes` for its operators."""
        segment = self.space.segments[run.a]
        if run.region is None:
            return self.memory.curve((), plain=(segment.first, segment.end))
        return self.memory.curve((run.region,), plain=(0, 0))

    def positions_of(self, run: Run, curve: Curve) -> np.ndarray:
        """Positions on `curve` of the operators during which `run` is being recomputed or differentiated."""
        first, end = self.backward_of[run.b - 1][0], self.backward_of[run.a][1]
        own = (curve.op >= first) & (curve.op < end) & (curve.region < 0)
        return np.flatnonzero(own | (curve.region >= 0))

    def first_rows(self, index: int) -> list[Row]:
        """The rows of a run with which a solver starts: its highest point, and the start of its recomputation."""
        if index not in self._first_rows:
            self._first_rows[index] = self._find_first_rows(index)
        return self._first_rows[index]

    def _find_first_rows(self, index: int) -> list[Row]:
        run = self.runs[index]
        curve = self.curve_of(run)
        positions = self.positions_of(run, curve)
        if not len(positions):
            return []
        highest = int(positions[curve.alive_bytes[positions].argmax()])
        chosen = {highest}
        if run.region is not None and not run.region.inner:
            chosen.update(np.flatnonzero(curve.region >= 0)[:1].tolist())
        return [self.row(index, curve, position) for position in sorted(chosen)]

    def row(self, index: int, curve: Curve, position: int) -> Row:
        """The exact row of run `index` at `position` of its own curve."""
        run = self.runs[index]
        op = int(curve.op[position])
        recomputing = curve.region[position] >= 0
        return Row(
            run=index,
            op=op,
            bytes=int(curve.alive_bytes[position]),
            before=run.a,
            alive=self._alive(run, op, recomputing),
            saves=self._save_terms(run, op, recomputing),
        )

    def _alive(self, run: Run, op: int, recomputing: bool) -> frozenset[int]:
        """Storages from before `run` that its row counts already."""
        if run.region is None:
            packed, _ = self._reasons
            return frozenset(u for u, release in packed[run.a].items() if release >= op and u in self.kept)
        recomputation = self.memory.recomputation(run.region)
        assert recomputation is not None
        if not recomputing and op > recomputation.release:
            return frozenset()
        return frozenset(u for u in self.memory.inputs(run.region.first, run.region.end) if u in self.kept)

    def _save_terms(self, run: Run, op: int, recomputing: bool) -> tuple[tuple[int, int], ...]:
        """What saving each node of `run` adds at this operator: all that is not made again yet."""
        if run.region is None or run.region.inner:
            return ()
        recomputation = self.memory.recomputation(run.region)
        assert recomputation is not None
        if not recomputing and op >= recomputation.trigger:
            return ()
        storages = self.graph.storages
        terms = []
        for node in range(run.region.first, run.region.end):
            if node not in self.saved_by or node in run.never_again:
                continue
            waiting = [u for u in self.saved_by[node] if not recomputing or storages.birth[u] > op]
            size = int(sum(storages.size_bytes[u] for u in waiting if storages.death[u] < self.graph.forward_end))
            record = self.graph.nodes[node]
            if recomputing and record.first <= op < record.end and not self._is_cast[op]:
                size -= int(self.memory.workspace_bytes[op])
            if size:
                terms.append((node, size))
        return tuple(terms)

    @functools.cached_property
    def forward_rows(self) -> tuple[Row, ...]:
        """Rows of forward operators that no later one dominates: what is kept only grows."""
        local = self.memory.curve((), plain=(0, 0)).alive_bytes[: self.graph.forward_end]
        later = np.concatenate([np.maximum.accumulate(local[::-1])[::-1][1:], [-1]])
        return tuple(self.forward_row(int(op)) for op in np.flatnonzero(local > later))

    def forward_row(self, op: int) -> Row:
        """The row of forward operator `op`: whatever was made before it and is kept for any reason."""
        storages = self.graph.storages
        local = self.memory.curve((), plain=(0, 0)).alive_bytes[op]

        def gone(found: list[int]) -> int:
            return int(sum(storages.size_bytes[u] for u in found if storages.death[u] < op))

        plain = ((s, gone(found)) for s, found in enumerate(self.own))
        saves = ((v, gone([u for u in found if self._is_own(u)])) for v, found in self.saved_by.items())
        kept = ((k.storage, k.sites[-1]) for k in self.kept.values() if k.death < op)
        return Row(
            run=None,
            op=op,
            bytes=int(local),
            plain=tuple((s, size) for s, size in plain if size),
            saves=tuple((v, size) for v, size in saves if size),
            kept=tuple(kept),
        )

    @functools.cached_property
    def optimizer_peak_bytes(self) -> int:
        """Peak after backward: the same under every plan."""
        alive = self.memory.curve((), plain=(0, 0)).alive_bytes[self.graph.backward_end :]
        return int(alive.max()) if len(alive) else self.graph.fixed_total
