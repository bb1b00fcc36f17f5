"""The space that a solver searches: where regions may begin and end, and what they may save.

A *cut* is a position between two nodes where a region may begin or end. Every position where only single tensors
cross, no context is open and no value is about to be changed in place is legal; the solver is given those where few
storages cross. In a transformer these are the residual stream's positions between attention and MLP halves.
Where these would leave much of the forward in one piece, as in a loop that carries several states, more may cross.
Storages that live through a large part of the forward or are used by many layers (attention masks, rotary tables, an
encoder's output) are not counted as crossing: they would hide every cut.

Nodes that touch what is written in place through much of the forward are in no region: there would be no other one.
They, and those that change a module's state, as a power iteration does, are parted from others by the nearest legal
cuts, however many storages cross there: their segment is in no region, and should hold little else.
The borders of the model's layers are always cuts, so that no plan of whole layers is missed.

Runs of nodes between neighbouring cuts are *segments*. "Optimal" always means: among plans made of these segments,
these saves and this nesting depth. `Space.about` says so in the plan file.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from remat.evaluation import writes
from remat.evaluation.graph import CHUNKED_ROWS, OUTSIDE, STEP_IN_BACKWARD, Graph, block_of
from remat.evaluation.plan import SpaceSize
from remat.evaluation.writes import LONG_LIFE

DEPTH = 2  # of nesting
MANY_LAYERS = 3
MOST_SEGMENTS = 200
SMALLEST_SEGMENT = 0.05  # of the average traffic: smaller ones are merged into a neighbour
FEWEST_SEGMENTS = 4
COARSE = 1 / 3  # of the traffic: a segment that has more and can be cut is cut where more storages cross
ANY = 1 << 62  # of storages may cross
_VMAP_NESTING = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
MOST_INTERVALS = 100_000  # of segments that may be a region: beyond that, the length of a region is limited ...
SHORTEST_LIMIT = 60  # ... to no less than this


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes first..end-1; `plain` if no region may contain it."""

    first: int
    end: int
    plain: bool


@dataclasses.dataclass(frozen=True)
class Space:
    """Segments in order, covering all nodes; `saveable` nodes; how deep regions may nest, and how long one may be.

    longest  segments in a region, at most
    modules  where regions are modules: (first node, end, path) of each module that may be one, and nothing else may;
             see `execution/modules/search_space.py`
    """

    segments: tuple[Segment, ...]
    saveable: tuple[int, ...]
    depth: int
    longest: int = 1 << 30
    modules: tuple[tuple[int, int, str], ...] | None = None

    def allows(self, first: int, end: int) -> bool:
        """Return whether nodes first..end-1 may be a region, if regions must be modules."""
        return self.modules is None or (first, end) in self._modules

    @functools.cached_property
    def _modules(self) -> frozenset[tuple[int, int]]:
        return frozenset((first, end) for first, end, _ in self.modules or ())

    def about(self) -> SpaceSize:
        """Return the entry of the plan file: the space that "optimal" refers to."""
        free = sum(not segment.plain for segment in self.segments)
        found: SpaceSize = {
            "segments": free,
            "saveable_nodes": len(self.saveable),
            "nesting_depth": self.depth,
            "longest_region_segments": min(self.longest, len(self.segments)),
        }
        return found if self.modules is None else {"modules": len(self.modules), **found}

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield maximal runs [a, b) of segments that are not plain; they may span graph calls, which no region does."""
        start = None
        for i, segment in enumerate(self.segments):
            if segment.plain:
                if start is not None:
                    yield start, i
                start = None
            elif start is None:
                start = i
        if start is not None:
            yield start, len(self.segments)


def find_space(graph: Graph, *, depth: int = DEPTH) -> Space:
    """Find the default space of `graph`."""
    legal = legal_cuts(graph)
    crossing = _crossing(graph)
    for most in (1, 2, 3, ANY):
        cuts = [p for p in legal if len(crossing[p]) <= most]
        if len(cuts) >= FEWEST_SEGMENTS:
            break
    forced = forced_cuts(graph, legal) | {cut for block in blocks(graph) for cut in block}
    parts = _Parts(graph, legal)
    cuts = _merge_small(_cut_coarse(sorted({*cuts, *forced}), legal, crossing, parts), forced, crossing, parts)
    segments = tuple(
        Segment(*each, plain) for each, plain in zip(itertools.pairwise(cuts), parts.plain(cuts), strict=True)
    )
    depth = 1 if graph.inner else depth  # regions in regions were not looked at where a step differentiates inside
    return Space(segments, saveable(graph), depth, longest=max(MOST_INTERVALS // len(segments), SHORTEST_LIMIT))


def legal_cuts(graph: Graph) -> list[int]:
    """Return the positions p, between nodes p-1 and p, where a region may begin or end."""
    count = len(graph.nodes)
    legal = np.ones(count + 1, dtype=bool)
    last_use = last_uses(graph)
    apart = frozenset[int]().union(*written_for_long(graph))
    for i, node in enumerate(graph.nodes):
        if not node.single_tensor and last_use[i] > i:
            legal[i + 1 : last_use[i] + 1] = False
        if node.in_context:
            legal[i + 1] = False
        for producer in node.mutates:
            if producer not in apart:
                legal[producer + 1 : i + 1] = False
    if graph.about.get(STEP_IN_BACKWARD):
        legal[_behind_stepped(graph)] = False
    return [p for p in range(count + 1) if legal[p]]


def written_for_long(graph: Graph) -> list[frozenset[int]]:
    """List the nodes that touch each storage that is written through much of the forward, see `evaluation.writes`."""
    last: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        for producer in node.mutates:
            last |= dict.fromkeys(graph.nodes[producer].values, i)
    touched = [
        {storage for source in (i, *node.inputs, *node.mutates) for storage in graph.nodes[source].values}
        for i, node in enumerate(graph.nodes)
    ]
    return writes.written_for_long(touched, last)


def _behind_stepped(graph: Graph) -> list[int]:
    """Return positions where no region may end, since its parameters are stepped before it is recomputed.

    Backward runs its last nodes first. If these take a parameter and need no saved tensor, as the sum with a bias does,
    the parameter is stepped before an older node has the region recomputed.
    """
    asks = {int(node) for node in graph.saved_tensors.node[graph.saved_tensors.unpack >= 0]}
    differentiates = set(graph.op_node[graph.forward_end : graph.backward_end].tolist())
    found, takes = [], False
    for i, node in enumerate(graph.nodes):
        takes = i not in asks and (takes or (node.takes_fixed and i in differentiates))
        if takes:
            found.append(i + 1)
    return found


def last_uses(graph: Graph) -> list[int]:
    """Return for every node the last node that takes its value, or itself."""
    last = list(range(len(graph.nodes)))
    for i, node in enumerate(graph.nodes):
        for source in node.inputs:
            last[source] = max(last[source], i)
    return last


def saveable(graph: Graph) -> tuple[int, ...]:
    """Return the nodes whose outputs a region may save: they allocate, and nothing they touch is changed.

    Nodes that decide are left out: every region saves them. So are storages held through backward anyway, and chunked
    rows: backward recomputes them slice by slice, whatever is saved of them. Within `torch.vmap` no value has a storage
    of its own that could be given back. If a step differentiates inside, nodes that not every backward needs are left
    out too: by how much saving one shortens a region's recomputations depends on the region.
    """
    caller_held = graph.storages.death >= graph.forward_end
    allocating = set(graph.storages.node[graph.storages.cast == 0].tolist()) - set(
        graph.storages.node[caller_held].tolist()
    )
    recomputed = asked_by_all(graph) if graph.inner else range(len(graph.nodes))
    return tuple(
        i
        for i in can_be_kept(graph)
        if i in recomputed and i not in graph.changed and i in allocating and not graph.nodes[i].decides
    )


def can_be_kept(graph: Graph) -> list[int]:
    """Return the nodes whose results the executor can keep, in a copy if another node changes them."""
    mapped = _mapped(graph)
    return [
        i
        for i, node in enumerate(graph.nodes)
        if node.call != OUTSIDE
        and not node.effect
        and not node.mutates
        and not mapped[i]
        and not node.op.startswith(CHUNKED_ROWS)
    ]


def runs_once(graph: Graph) -> set[int]:
    """Return the nodes that no region can hold: they change a module's state, or decide and cannot be kept."""
    changes_state = {i for i, node in enumerate(graph.nodes) if node.effect == "other"}
    return changes_state.union(graph.deciding).difference(can_be_kept(graph))


def _in_no_region(graph: Graph) -> set[int]:
    outside = {i for i, node in enumerate(graph.nodes) if node.call == OUTSIDE}
    return runs_once(graph).union(outside, *written_for_long(graph))


def _mapped(graph: Graph) -> list[int]:
    """Return the number of `torch.vmap` around every node."""
    return list(itertools.accumulate(_VMAP_NESTING.get(node.op, 0) for node in graph.nodes))


def asked_by_all(graph: Graph) -> set[int]:
    """Return the nodes whose saves every backward of the step unpacks: each recomputes a region that has one."""
    inner, table = graph.inner, graph.saved_tensors
    found = set(table.node[table.unpack >= 0].tolist())
    for task in np.unique(inner.task):
        found &= set(table.node[inner.row[inner.task == task]].tolist())
    return found


def forced_cuts(graph: Graph, legal: Sequence[int]) -> set[int]:
    """Return the ends of the graph, borders between graph calls, and both sides of nodes that must stay plain.

    Such nodes, and borders where no region may end, are parted from others at the `legal` cuts around them.
    Neighbours stay together.
    """
    nodes = graph.nodes
    bounds = sorted({0, *legal, len(nodes)})
    borders = {i for i in range(1, len(nodes)) if nodes[i].call != nodes[i - 1].call}
    plain = runs_once(graph).union(*written_for_long(graph), borders.difference(bounds))
    between = {bisect_right(bounds, i) - 1 for i in plain}
    sides = between ^ {k + 1 for k in between}
    return {0, len(nodes), *borders, *(bounds[k] for k in sides)}


def _crossing(graph: Graph) -> list[frozenset[int]]:
    """Return for every position the storages that cross it, except long-lived ones."""
    count = len(graph.nodes)
    end: dict[int, int] = {}
    begin: dict[int, int] = {}
    layers: dict[int, set[str | None]] = {}
    for i, last in enumerate(last_uses(graph)):
        for storage in graph.nodes[i].values:
            begin.setdefault(storage, i)
            end[storage] = max(end.get(storage, 0), last)
        for source in graph.nodes[i].inputs:
            for storage in graph.nodes[source].values:
                layers.setdefault(storage, set()).add(block_of(graph.nodes[i].module))
    crossing: list[set[int]] = [set() for _ in range(count + 1)]
    for storage, first in begin.items():
        if end[storage] - first <= LONG_LIFE * count and len(layers.get(storage, ())) < MANY_LAYERS:
            for position in range(first + 1, end[storage] + 1):
                crossing[position].add(storage)
    return [frozenset(storages) for storages in crossing]


class _Parts:
    """The segments between cuts: the bytes that each reads and writes, and which no region may contain."""

    def __init__(self, graph: Graph, legal: list[int]):
        traffic = [graph.kinds[kind].moved_bytes for kind in graph.op_kind[: graph.forward_end]]
        total = np.concatenate([[0], np.cumsum(np.array(traffic, dtype=np.int64))])
        self._before = total[[*(node.first for node in graph.nodes), graph.forward_end]]  # by position
        self._behind = total[[0, *(node.end for node in graph.nodes)]]
        self._is_legal = np.zeros(len(graph.nodes) + 1, dtype=bool)
        self._is_legal[legal] = True
        is_plain = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
        is_plain[[i + 1 for i in _in_no_region(graph)]] = 1
        self._plain = np.cumsum(is_plain)  # nodes before each position
        self.sizes = graph.storages.size_bytes

    def works(self, cuts: Sequence[int]) -> np.ndarray:
        first, end = np.array(cuts[:-1]), np.array(cuts[1:])
        works: np.ndarray = np.maximum(self._behind[end], self._before[first]) - self._before[first]
        return works

    def plain(self, cuts: Sequence[int]) -> list[bool]:
        first, end = np.array(cuts[:-1]), np.array(cuts[1:])
        plain: list[bool] = (
            ~self._is_legal[first] | ~self._is_legal[end] | (self._plain[end] > self._plain[first])
        ).tolist()
        return plain


def _cut_coarse(cuts: list[int], legal: list[int], crossing: list[frozenset[int]], parts: _Parts) -> list[int]:
    """Cut segments that have much of the work where more storages cross, as few more as it takes."""
    for across in (2, 3, 5, 8, ANY):
        works = parts.works(cuts)
        large = works > COARSE * works.sum()
        inside = {
            position
            for (first, end), is_large in zip(itertools.pairwise(cuts), large, strict=True)
            for position in (legal[bisect_right(legal, first) : bisect_left(legal, end)] if is_large else ())
            if len(crossing[position]) <= across
        }
        cuts = sorted({*cuts, *inside})
    return cuts


def _merge_small(cuts: list[int], forced: set[int], crossing: list[frozenset[int]], parts: _Parts) -> list[int]:
    """Drop cuts until no segment is much smaller than the average, and there are not too many.

    A segment that may be in a region is not merged with one that may not. Neighbours of which neither may are one.
    """
    around = itertools.pairwise([False, *parts.plain(cuts), False])
    cuts = [cut for cut, sides in zip(cuts, around, strict=True) if cut in forced or not all(sides)]
    across = {cut: int(sum(parts.sizes[u] for u in crossing[cut])) for cut in cuts}
    while True:
        works, plain = parts.works(cuts), np.array(parts.plain(cuts))
        held = np.array([cut in forced for cut in cuts])
        held[1:-1] |= plain[1:] != plain[:-1]
        free = ~(held[:-1] & held[1:])
        if not free.any():
            return cuts
        smallest = int(np.where(free, works, np.iinfo(np.int64).max).argmin())
        few = len(cuts) - 1 <= MOST_SEGMENTS
        if few and works[smallest] >= SMALLEST_SEGMENT * works.sum() / len(works):
            return cuts
        sides = [i for i in (smallest, smallest + 1) if not held[i]]
        del cuts[max(sides, key=lambda i: across[cuts[i]])]


def blocks(graph: Graph) -> list[tuple[int, int]]:
    """Return runs of nodes [first, end) that belong to one layer of the model and may be a region."""
    legal = set(legal_cuts(graph))
    plain = _in_no_region(graph)
    found, start = [], 0
    names = [None if node.call == OUTSIDE else (node.call, block_of(node.module)) for node in graph.nodes]
    for i in range(1, len(names) + 1):
        if i < len(names) and names[i] == names[start]:
            continue
        name = names[start]
        if name and name[1] and start in legal and i in legal and not plain.intersection(range(start, i)):
            found.append((start, i))
        start = i
    return found
