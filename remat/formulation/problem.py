"""Pose: turn a Graph, Costs and a budget into the data of an integer program.

The forward is cut into segments 0..m-1 (`search_space.py`). A *run* is a segment left plain, or an interval [a, b) of
segments made one region, possibly holding inner ones. A plan chooses runs that partition the segments, and nodes to
save inside chosen regions. Memory at one operator under a plan has three parts, and so has a `Row`:

* what does not depend on other runs: local life, and all that the run itself has alive there (`Row.bytes`);
* what earlier runs keep for their own backward (`Row.before`): the prefix sum over segments < a of what plain
  segments keep, what regions take, and what they save, every storage counted once (`SharedStorage`);
* what the run's own saves add or spare there (`Row.saves`);
* what later plain segments kept and autograd has not let go yet (`Row.plain`).

Evaluated at a plan the rows give `Memory.curve` at that operator, or less (see `_lingering`). There are many; a solver
starts with the few that `first_rows` gives and asks for others where the evaluator finds its plan over budget. Leaving
rows out never overstates a peak, so a bound stays a bound.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from remat.costing.costs import Costs
from remat.errors import UsageError
from remat.evaluation.evaluator import Curve
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Offload, Region, saved_nodes
from remat.formulation.beginnings import Beginnings
from remat.formulation.choices import Point, Row, Run, Shape
from remat.formulation.liveness import NS, Liveness
from remat.formulation.search_space import Space
from remat.formulation.symmetry import classes
from remat.offloading.link import Link
from remat.offloading.relief import Relief
from remat.offloading.schedule import all_offloads, fewest_offloads
from remat.work import work

INNER_WIDTHS = (1, 2, 4)  # segments in an inner region
REGION_S = 20e-6  # of work: for a region
PLAIN = -1  # the width of a run that is no region


class Problem:
    """The data of the program for one graph, space and budget.

    liveness  storages that may outlive their forward, and why; the same for every budget
    link      to the host's memory, if plans may have offloads, which `offloads_of` chooses for any regions. Rows are
              relaxed by an upper bound on offloaded bytes (`Relief`); judging is exact
    like      problem of another form of the step, whose shapes hold as far as both begin alike (`beginnings.py`)
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        space: Space,
        budget_bytes: int,
        link: Link | None = None,
        like: Problem | None = None,
    ):
        self.liveness = Liveness(graph, costs, space)
        self.graph, self.space, self.memory = graph, space, self.liveness.memory
        if link is not None and graph.inner:
            raise UsageError("nothing is offloaded where a step differentiates inside; leave `offload` out.")
        self.link = link
        self._relief = None if link is None else Relief(graph, self.liveness.op_time_us, link)
        self._alone = None
        if link is not None:
            self._alone = Problem(graph, costs, space, budget_bytes, like=like)
            self._alone.liveness, self._alone.memory = self.liveness, self.memory
        self.budget_bytes = budget_bytes
        self.step_time_us = costs.step_time_us(graph)
        self._like = like.without_link() if like is not None and link is None else None
        self._run_classes: dict[tuple[int, ...], int] = {} if self._like is None else dict(self._like._run_classes)
        self._shapes: dict[tuple[int, int], Shape | None] = {} if self._like is None else dict(self._like._shapes)
        self._inner_regions: dict[tuple[int, int], Region] = {}

    def with_budget(self, budget_bytes: int) -> Problem:
        """Return the problem under another budget; both share what was computed about the graph."""
        other = copy.copy(self)
        other.budget_bytes = budget_bytes
        return other

    def recomputing_at_most(self, time_us: float) -> Problem:
        """Return the problem for plans that recompute for at most `time_us`, in which a link brings less back."""
        if self.link is None:
            return self
        other = copy.copy(self)
        other._relief = Relief(self.graph, self.liveness.op_time_us, self.link, time_us)
        for known in ("floor_bytes", "forward_rows", "_carried_bytes"):
            vars(other).pop(known, None)
        return other

    def without_link(self) -> Problem:
        """Return the problem for plans that leave everything on the device."""
        return self if self._alone is None else self._alone.with_budget(self.budget_bytes)

    def __str__(self) -> str:
        regions = sum(run.region is not None for run in self.runs)
        return (
            f"Problem: {len(self.space.segments)} segments, {regions} possible regions, "
            f"{len(self.liveness.save_time_ns)} nodes to save, {len(self.liveness.shared)} shared storages"
        )

    # Judging

    def curve(self, regions: Sequence[Region]) -> Curve:
        """Return the bytes alive under a plan; with offloads, if it has a link and exceeds the budget without."""
        curve = self.memory.curve(regions)
        if self.link is None or curve.peak_bytes <= self.budget_bytes:
            return curve
        offloads = all_offloads(self.memory, regions, self.liveness.op_time_us, self.link)
        return self.memory.offloading(offloads).curve(regions)

    def offloads_of(self, regions: Sequence[Region]) -> tuple[Offload, ...]:
        """Choose the offloads with which a plan of these regions keeps the budget."""
        if self.link is None or self.memory.curve(regions).peak_bytes <= self.budget_bytes:
            return ()
        return fewest_offloads(self.memory, regions, self.liveness.op_time_us, self.link, self.budget_bytes)

    @property
    def fixed_bytes(self) -> int:
        """The least bytes alive at any point of forward or backward, without kept bytes."""
        return self.graph.fixed_total - (0 if self._relief is None else self._relief.most_bytes)

    def _relief_at(self, run: Run) -> int:
        """Return the bytes by which storages counted as kept before `run` may exceed those on the device meanwhile.

        It is limited by the bytes that the link brings back from there on, plus those that floors may have added.
        """
        if self._relief is None:
            return 0
        comes = self._relief.in_backward(self.backward_of[run.b - 1][0], self._most_again_ns[run.b] / NS)
        return min(self._relief.most_bytes, comes + max(self.floor_bytes[: run.a + 1]))

    @functools.cached_property
    def _carried_bytes(self) -> np.ndarray:
        """The most bytes that are off the device at every operator of forward, and at its end."""
        if self._relief is None:
            return np.zeros(self.graph.forward_end + 1, dtype=np.int64)
        return self._relief.in_forward

    def carried_between(self, op: int, cut: int) -> int:
        """Return the bytes that may leave the device between operator `op` of forward and `cut`, at least 0."""
        return max(int(self._carried_bytes[self._op_of_cut[cut]] - self._carried_bytes[op]), 0)

    @functools.cached_property
    def _op_of_cut(self) -> list[int]:
        """The operator of forward with which the segment after each cut begins."""
        nodes = self.graph.nodes
        ops = [*(nodes[segment.first].first for segment in self.space.segments), self.graph.forward_end]
        return [min(op, self.graph.forward_end) for op in ops]

    @functools.cached_property
    def _most_again_ns(self) -> list[int]:
        """The most time that recomputing all segments before each cut can take."""
        most = [0] * (len(self.space.segments) + 1)
        for run in sorted(self.runs, key=lambda run: run.a):
            most[run.b] = max(most[run.b], most[run.a] + run.time_ns)
        return most

    @functools.cached_property
    def floor_bytes(self) -> list[int]:
        """The fewest bytes that count as kept at every cut, see `Relief`."""
        if self._relief is None:
            return [0] * (len(self.space.segments) + 1)
        floors = self._relief.floors[self._op_of_cut]
        for shared in self.liveness.shared.values():  # it may leave from its making on, and is counted later
            floors[shared.segment + 1 : shared.sites[-1] + 1] -= shared.size_bytes
        return np.maximum(floors, 0).tolist()

    # Segments

    @functools.cached_property
    def backward_of(self) -> list[tuple[int, int]]:
        """The backward operators [first, end) of every segment; backward visits segments in reverse."""
        graph = self.graph
        nodes = graph.op_node[graph.forward_end : graph.backward_end]
        last = len(self.space.segments) - 1
        segments = np.where(nodes >= 0, self.liveness.segment_of_node[nodes], last)
        segments = np.minimum.accumulate(segments)
        bounds = graph.forward_end + np.searchsorted(-segments, -np.arange(last + 1), side="left")
        ends = graph.forward_end + np.searchsorted(-segments, -np.arange(last + 1), side="right")
        return list(zip(bounds.tolist(), ends.tolist(), strict=True))

    # Runs

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every run: the plain ones, in order of segments, and then the regions."""
        plain = (Run(s, s + 1, None, self._plain_shape(s)) for s in range(len(self.space.segments)))
        return (*plain, *self._find_regions())

    def _find_regions(self) -> Iterator[Run]:
        calls = [self.graph.nodes[segment.first].call for segment in self.space.segments]
        for start, stop in self.space.stretches():
            for a in range(start, stop):
                classes_in_it: tuple[int, ...] = (self._segment_classes[a],)
                for b in range(a + 1, min(stop, a + self.space.longest) + 1):
                    if calls[b - 1] != calls[a]:
                        break
                    number = self._run_classes.setdefault(classes_in_it, len(self._run_classes))
                    for width, region in self._regions(a, b):
                        shape = self._region_shape(a, b, region, (number, width))
                        work(REGION_S)
                        if shape is not None:
                            yield Run(a, b, region, shape)
                    if b < len(self._segment_classes):
                        classes_in_it = (number, self._segment_classes[b])

    @functools.cached_property
    def _segment_classes(self) -> list[int]:
        """Numbers of `symmetry.classes`; as far as both forms begin alike, those of the other form's problem."""
        own = classes(self.memory, self.space.segments, self.backward_of, self.liveness.op_time_ns, self._local_bytes)
        if self._like is None:
            return own
        known, alike = self._like._segment_classes, self._beginnings.alike(self._like._beginnings)
        return [*known[:alike], *(number + max(known, default=-1) + 1 for number in own[alike:])]

    @property
    def _beginnings(self) -> Beginnings:
        return Beginnings(self.liveness, self.backward_of, self._local_bytes)

    def _regions(self, a: int, b: int) -> Iterator[tuple[int, Region]]:
        """Yield the ways to run segments a..b-1 as a region: whole (0), or with inner regions of `width` segments."""
        segments = self.space.segments
        first, end = segments[a].first, segments[b - 1].end
        yield 0, Region(first, end)
        if self.space.depth < 2 or saved_nodes(self.graph, Region(first, end)):  # one with inner regions saves nothing
            return
        for width in INNER_WIDTHS:
            if (b - a) % width == 0 and b - a >= max(2 * width, 3):
                inner = tuple(self._inner_region(i, i + width) for i in range(a, b, width))
                yield width, Region(first, end, inner=inner)

    def _inner_region(self, a: int, b: int) -> Region:
        """Return segments a..b-1 as a region, which many runs share."""
        if (a, b) not in self._inner_regions:
            self._inner_regions[a, b] = Region(self.space.segments[a].first, self.space.segments[b - 1].end)
        return self._inner_regions[a, b]

    # Shapes

    def _plain_shape(self, a: int) -> Shape:
        key = (self._run_classes.setdefault((self._segment_classes[a],), len(self._run_classes)), PLAIN)
        if key not in self._shapes:
            highest, *_ = self._points(Run(a, a + 1, None, Shape()))
            self._shapes[key] = Shape(highest=highest)
        shape = self._shapes[key]
        assert shape is not None
        return shape

    def _region_shape(self, a: int, b: int, region: Region, key: tuple[int, int]) -> Shape | None:
        if key not in self._shapes:
            self._shapes[key] = self._find_region_shape(a, b, region)
        return self._shapes[key]

    def _find_region_shape(self, a: int, b: int, region: Region) -> Shape | None:
        recomputation = self.memory.recomputation(region)
        if recomputation is None:
            return None
        highest, firm, start = self._points(Run(a, b, region, Shape()))
        anchor = self.backward_of[b - 1][0]
        starts_at, kept_until = recomputation.trigger - anchor, recomputation.release - anchor
        time_ns = self.memory.nested_time(region, self.time_until)
        if region.inner:
            return Shape(time_ns, highest, starts_at=starts_at, kept_until=kept_until)
        ends = self.memory.node_end[region.first : region.end]
        never = tuple(np.flatnonzero(ends > recomputation.stop).tolist())
        return Shape(time_ns, highest, firm, start, never, starts_at, kept_until)

    def _points(self, run: Run) -> tuple[Point | None, Point | None, Point | None]:
        """Return the points of `run` with most bytes, with most if the running node is saved, and of its restart."""
        curve = self._alone_curve(run)
        positions = self.positions_of(run, curve)
        if not len(positions):
            return None, None, None
        alive = curve.alive_bytes[positions]
        spared = np.where(curve.region[positions] >= 0, self._spare[0][curve.op[positions]], 0)
        again = np.flatnonzero(curve.region >= 0)
        return (
            self._point(run, curve, int(positions[alive.argmax()])),
            self._point(run, curve, int(positions[(alive - spared).argmax()])),
            self._point(run, curve, int(again[0])) if len(again) else None,
        )

    def _point(self, run: Run, curve: Curve, position: int) -> Point:
        op, recomputing = self._op_at(run, curve, position), bool(curve.region[position] >= 0)
        alive = int(curve.alive_bytes[position]) - self._local_bytes_at(run)
        spare, made = (int(column[op]) if recomputing else 0 for column in self._spare)
        return Point(op - self._anchor(run, recomputing), recomputing, alive, spare, made)

    @functools.cached_property
    def _spare(self) -> tuple[np.ndarray, np.ndarray]:
        """For each operator of a node that may be saved: its workspace, and the node's bytes made so far."""
        graph = self.graph
        spare = np.where(np.isin(graph.op_node, list(self.liveness.save_time_ns)), self.memory.workspace_bytes, 0)
        made = np.zeros_like(spare)
        for node, saved in self.liveness.saved_by.items():
            for u in saved:
                made[graph.storages.birth[u] : graph.nodes[node].end] += graph.storages.size_bytes[u]
        return spare, made

    def _anchor(self, run: Run, recomputing: bool) -> int:
        """Return the operator from which a point of `run` is counted."""
        if recomputing:
            return int(self.memory.node_first[self.space.segments[run.a].first])
        return self.backward_of[run.b - 1][0]

    def local_bytes_at(self, run: Run) -> int:
        """Return the step's own bytes alive at the run's first backward operator, less those possibly off the device.

        For a run without one, the operator after its place is the anchor, even one of the optimizer.
        """
        return self._local_bytes_at(run) - self._relief_at(run)

    def _local_bytes_at(self, run: Run) -> int:
        first = min(self.backward_of[run.b - 1][0], self.graph.op_count - 1)
        return int(self._local_bytes[first])

    def fits_alone(self, run: Run) -> bool:
        """Return whether a region fits the budget with all bytes kept before it on the host.

        From the beginning of its recomputation on, everything that it takes and has saved is on the device.
        """
        saves = run.region is not None and not run.region.inner
        high = run.shape.firm if saves else run.shape.highest
        if self._relief is None or run.region is None or high is None:
            return True
        if not high.recomputing and high.op < run.shape.starts_at:
            return True
        return self._local_bytes_at(run) + high.bytes - (high.spare_bytes if saves else 0) <= self.budget_bytes

    @functools.cached_property
    def _local_bytes(self) -> np.ndarray:
        """Bytes alive at every operator if nothing were kept for backward and nothing were off the device."""
        return self.memory.curve((), plain=(0, 0)).alive_bytes

    def runs_of(self, regions: Sequence[Region]) -> set[int]:
        """Return the indices of the runs of a plan in this space. Raises KeyError for a plan of another space."""
        chosen = {self._run_of(region) for region in regions}
        covered = {s for i in chosen for s in range(self.runs[i].a, self.runs[i].b)}
        return chosen | (set(range(len(self.space.segments))) - covered)

    def _run_of(self, region: Region) -> int:
        index = self._index[region.first, region.end, len(region.inner)]
        found = self.runs[index].region
        if found is None or found.inner != region.inner:
            raise KeyError(region)
        return index

    @functools.cached_property
    def _index(self) -> dict[tuple[int, int, int], int]:
        regions = ((i, run.region) for i, run in enumerate(self.runs) if run.region)
        return {(region.first, region.end, len(region.inner)): i for i, region in regions}

    def run_at(self, regions: Sequence[Region], op: int, top: int) -> int:
        """Return the run of a plan that recomputes region `top`, or else that has the backward operator `op`."""
        if top >= 0:
            return next(i for i in self.runs_of([regions[top]]) if self.runs[i].region)
        segment = next(s for s, (first, end) in enumerate(self.backward_of) if first <= op < end)
        return next(i for i in self.runs_of(regions) if self.runs[i].a <= segment < self.runs[i].b)

    @functools.cached_property
    def time_until(self) -> np.ndarray:
        """The time in ns of the operators before each."""
        return np.concatenate([[0], np.cumsum(self.liveness.op_time_ns)])

    def objective_ns(self, regions: Sequence[Region]) -> int:
        """Return the recompute time of a plan in this space, as the program counts it."""
        times = (self.runs[i].time_ns for i in self.runs_of(regions))
        saved = (set(region.saved) - self.runs[self._run_of(region)].never_again for region in regions)
        return sum(times) - sum(self.liveness.save_time_ns[v] for of_region in saved for v in of_region)

    def objective_us(self, regions: Sequence[Region]) -> float:
        return self.objective_ns(regions) / NS

    # Rows

    def curve_of(self, run: Run) -> Curve:
        """Return the bytes alive if only `run` kept anything, less those possibly off the device in its backward.

        They are `Row.bytes` of its operators.
        """
        curve = self._alone_curve(run)
        return dataclasses.replace(curve, alive_bytes=curve.alive_bytes - self._relief_at(run))

    def _alone_curve(self, run: Run) -> Curve:
        """Return the bytes alive if only `run` kept anything."""
        segment = self.space.segments[run.a]
        if run.region is None:
            return self.memory.curve((), plain=(segment.first, segment.end))
        return self.memory.curve((run.region,), plain=(0, 0))

    def positions_of(self, run: Run, curve: Curve) -> np.ndarray:
        """Return the positions on `curve` of the operators during which `run` is recomputed or differentiated."""
        first, end = self.backward_of[run.b - 1][0], self.backward_of[run.a][1]
        own = (curve.op >= first) & (curve.op < end) & (curve.region < 0)
        return np.flatnonzero(own | (curve.region >= 0))

    def first_rows(self, index: int) -> list[Row]:
        """Return the rows of a run that a solver starts with: its highest point, and the start of its recomputation."""
        run = self.runs[index]
        local = self.local_bytes_at(run)
        return [
            self._row(index, self._anchor(run, point.recomputing) + point.op, point.recomputing, local + point.bytes)
            for point in run.shape.points
        ]

    def row(self, index: int, curve: Curve, position: int) -> Row:
        """Return the exact row of run `index` at `position` of its own curve."""
        recomputing = bool(curve.region[position] >= 0)
        op = self._op_at(self.runs[index], curve, position)
        row = self._row(index, op, recomputing, int(curve.alive_bytes[position]))
        following = int(curve.op[position + int((curve.region[position:] < 0).argmax())])
        if following < self.graph.forward_end:  # an inner backward has not come to earlier regions yet
            return row
        return dataclasses.replace(row, plain=self._lingering(row, following))

    def _op_at(self, run: Run, curve: Curve, position: int) -> int:
        """Return the operator at `position` of the run's own curve; for an older cast, the operator before it."""
        op = int(curve.op[position])
        if curve.region[position] < 0:
            return op
        assert run.region is not None
        first = int(self.memory.node_first[run.region.first])
        if op >= first:
            return op
        again = curve.op[:position][curve.region[:position] >= 0]
        own = again[again >= first]
        return int(own[-1]) if len(own) else first - 1

    def _row(self, index: int, op: int, recomputing: bool, alive_bytes: int) -> Row:
        run = self.runs[index]
        return Row(
            run=index,
            op=op,
            bytes=alive_bytes,
            before=run.a,
            alive=self._alive(run, op, recomputing),
            saves=self._save_terms(run, op, recomputing),
        )

    def _alive(self, run: Run, op: int, recomputing: bool) -> frozenset[int]:
        """Return the shared storages that the row of `run` counts already."""
        if run.region is None:
            packed, _ = self.liveness.reasons
            return frozenset(u for u, release in packed[run.a].items() if release >= op and u in self.liveness.shared)
        recomputation = self.memory.recomputation(run.region)
        assert recomputation is not None
        if not recomputing and op > recomputation.release:
            return frozenset()
        keeps = self.memory.inputs(run.region.first, run.region.end).union(
            self.memory.saved_storages(run.region).tolist()
        )
        return frozenset(u for u in keeps if u in self.liveness.shared)

    def _lingering(self, row: Row, op: int) -> tuple[tuple[int, int], ...]:
        """Return (segment, bytes) that plain segments after the run of `row` keep at backward operator `op` or later.

        A storage that several of them keep counts with the first. Those that `row` counts already, or that the run may
        save, are left out, for they would count twice; so are those that later regions keep for so long.
        """
        assert row.run is not None
        run, (packed, _) = self.runs[row.run], self.liveness.reasons
        counted = set(row.alive)
        found: dict[int, int] = {}
        for segment in range(run.b, len(self.space.segments)):
            kept = [u for u, release in packed[segment].items() if release >= op and u not in counted]
            kept = [u for u in kept if self.liveness.is_own(u) or self._is_left_to_later(u, run)]
            if self.graph.inner and run.region:  # its own curve has the saves of inner backwards
                kept = [u for u in kept if int(self.graph.storages.node[u]) not in run.region]
            counted.update(kept)
            if kept:
                found[segment] = int(sum(self.graph.storages.size_bytes[u] for u in kept))
        return tuple(found.items())

    def _is_left_to_later(self, storage: int, run: Run) -> bool:
        """Return whether nothing in or before `run` can keep `storage` for its backward, but something after it can."""
        shared = self.liveness.shared.get(storage)
        if shared is None or shared.site_before(run.a) is not None:
            return False
        if run.region is not None and shared.is_reason(run, shared.segment):  # its own row counts it
            return False
        return shared.saver is None or run.region is None or shared.saver not in run.region

    def _save_terms(self, run: Run, op: int, recomputing: bool) -> tuple[tuple[int, int], ...]:
        """Return the bytes that saving each node of `run` adds at this operator: storages not recomputed yet."""
        if run.region is None or run.region.inner:
            return ()
        if not recomputing and op >= self.memory.first_trigger(run.region):
            return ()
        storages = self.graph.storages
        terms = []
        for node in range(run.region.first, run.region.end):
            if node not in self.liveness.saved_by or node in run.never_again:
                continue
            waiting = [u for u in self.liveness.saved_by[node] if not recomputing or storages.birth[u] > op]
            size = int(sum(storages.size_bytes[u] for u in waiting if storages.death[u] < self.graph.forward_end))
            record = self.graph.nodes[node]
            if recomputing and record.first <= op < record.end and not self.graph.is_made_again[op]:
                size -= int(self.memory.workspace_bytes[op])
            if size:
                terms.append((node, size))
        return tuple(terms)

    @functools.cached_property
    def forward_rows(self) -> tuple[Row, ...]:
        """The rows of forward operators that no later one dominates: kept bytes only grow.

        Bytes that may be off the device grow too, so a link would leave many rows: only the highest of every segment
        is kept.
        """
        local = self._local_bytes[: self.graph.forward_end] - self._carried_bytes[:-1]
        later = np.concatenate([np.maximum.accumulate(local[::-1])[::-1][1:], [local.min(initial=0) - 1]])
        ops = np.flatnonzero(local > later)
        if self.graph.inner:  # saves of inner backwards count from the beginning, and exist when they end
            ops = ops[ops >= self.graph.inner.used.max()]
        if self._relief is not None:
            segments = self.liveness.segment_of_node[np.maximum(self.graph.op_node[ops], 0)]
            _, first = np.unique(segments, return_index=True)  # of each segment the highest comes first
            ops = np.sort(ops[first])
        return tuple(self.forward_row(op) for op in ops.tolist())

    def forward_row(self, op: int) -> Row:
        """Return the row of forward operator `op`: storages that were made before it and are kept for any reason."""
        storages = self.graph.storages

        def gone(found: list[int]) -> int:
            return int(sum(storages.size_bytes[u] for u in found if storages.death[u] < op))

        plain = ((s, gone(found)) for s, found in enumerate(self.liveness.own))
        nested = ((i, gone(found)) for i, found in self._kept_by_inner(op))
        saves = (
            (v, gone([u for u in found if self.liveness.is_own(u)])) for v, found in self.liveness.saved_by.items()
        )
        shared = ((k.storage, k.sites[-1]) for k in self.liveness.shared.values() if k.death < op)
        return Row(
            run=None,
            op=op,
            bytes=int(self._local_bytes[op] - self._carried_bytes[op]),
            plain=tuple((s, size) for s, size in plain if size),
            nested=tuple((i, size) for i, size in nested if size),
            saves=tuple((v, size) for v, size in saves if size),
            shared=tuple(shared),
        )

    def _kept_by_inner(self, op: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (run, storages) that only the inner region around forward operator `op` keeps there."""
        node = int(self.graph.op_node[op])
        for index in self._nested_at(int(self.liveness.segment_of_node[node])) if node >= 0 else ():
            run = self.runs[index]
            assert run.region is not None
            inner = next(part for part in run.region.inner if node in part)
            taken = (self.liveness.shared.get(u) for u in self.memory.inputs(inner.first, inner.end))
            yield index, [k.storage for k in taken if k and run.a <= k.segment and k.sites[-1] < run.b]

    def _nested_at(self, segment: int) -> list[int]:
        """Return the indices of the runs that contain `segment` in an inner region."""
        runs = enumerate(self.runs)
        return [i for i, run in runs if run.a <= segment < run.b and run.region and run.region.inner]

    @functools.cached_property
    def optimizer_peak_bytes(self) -> int:
        """The peak after backward, which is the same under every plan."""
        alive = self._local_bytes[self.graph.backward_end :]
        return int(alive.max()) if len(alive) else self.graph.fixed_total
