"""The parts of a plan and their limits: runs, their shapes and rows, and shared storages.

`problem.py` finds them; solvers read them.
"""

from __future__ import annotations

import dataclasses

from remat.evaluation.plan import Region

BEFORE_SEGMENTS = -1  # a source before all segments


@dataclasses.dataclass(frozen=True)
class Point:
    """An operator at which a run has much alive, in terms that hold for all isomorphic runs (`symmetry.py`).

    op           counted from the run's first forward operator if `recomputing`, else from its first backward one
    bytes        alive there if nothing but the run kept anything, less the step's own bytes at the run's first backward
                 operator
    spare_bytes  workspace that is not needed there if the running node is saved
    made_bytes   bytes that this node has made by then, alive once whether it is saved or recomputed
    """

    op: int
    recomputing: bool
    bytes: int
    spare_bytes: int = 0
    made_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Properties that isomorphic runs share: time to recompute one once, in ns, and the first tests of memory.

    highest      point with most bytes alive            start  beginning of its recomputation, if it may save
    firm         point with most bytes alive even if the running node is saved
    never_again  nodes after the last save, counted from the run's first: early stop leaves them out, so saving them
                 gains nothing
    starts_at    the backward operator before which a region is recomputed, counted from its first one
    kept_until   the last operator during which it keeps its inputs, counted in the same way
    """

    time_ns: int = 0
    highest: Point | None = None
    firm: Point | None = None
    start: Point | None = None
    never_again: tuple[int, ...] = ()
    starts_at: int = 0
    kept_until: int = 0

    @property
    def points(self) -> tuple[Point, ...]:
        """All points once, in the order of time."""
        found = {point for point in (self.highest, self.firm, self.start) if point is not None}
        return tuple(sorted(found, key=lambda point: (not point.recomputing, point.op)))


@dataclasses.dataclass(frozen=True)
class Run:
    """Segments a..b-1, plain (`region` None; then b = a + 1) or one region, of a certain shape."""

    a: int
    b: int
    region: Region | None
    shape: Shape

    @property
    def time_ns(self) -> int:
        return self.shape.time_ns

    @property
    def never_again(self) -> frozenset[int]:
        if self.region is None:
            return frozenset()
        return frozenset(self.region.first + offset for offset in self.shape.never_again)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: bytes + prefix(before) without `alive` + sum of saves and plain <= budget, if the run is chosen.

    run     index of the run; None: holds for every plan, and `plain`, `nested` and `shared` list the kept bytes instead
    op      the operator at which it holds
    alive   storages that `bytes` counts already
    plain   (segment, bytes kept if it is plain); for a run's row of segments after it
    nested  (run, bytes that an inner region of it keeps while it runs in forward)
    shared  (storage, site), counted if anything keeps it by then
    """

    run: int | None
    op: int
    bytes: int
    before: int = 0
    alive: frozenset[int] = frozenset()
    saves: tuple[tuple[int, int], ...] = ()
    plain: tuple[tuple[int, int], ...] = ()
    nested: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class SharedStorage:
    """A storage with more than one reason to outlive its forward. It is counted once.

    storage  its index in the graph
    segment  the segment that makes it
    sites    segments with a reason to keep it, ascending
    packed   sites at which autograd saves it, if they are plain
    taken    (source, site): a region that holds `site` but starts after `source` takes it as an input; with
             `BEFORE_SEGMENTS` for the source every region that holds `site` keeps it: there a node makes it that
             decides
    saver    the node that makes it, if saving that node saves it
    death    last operator of its local life
    """

    storage: int
    size_bytes: int
    segment: int
    sites: tuple[int, ...]
    packed: frozenset[int]
    taken: tuple[tuple[int, int], ...]
    saver: int | None
    death: int

    def is_reason(self, run: Run, site: int) -> bool:
        """Return whether `run`, which contains `site`, keeps the storage there without saving it."""
        if run.region is None:
            return site in self.packed
        return any(source < run.a and taken_at == site for source, taken_at in self.taken)

    @property
    def is_decided(self) -> bool:
        """Whether every region around the node that makes it keeps it."""
        return any(source == BEFORE_SEGMENTS for source, _ in self.taken)

    @property
    def crosses(self) -> bool:
        """Whether a later segment than the one that makes it has a reason to keep it."""
        return self.segment < self.sites[-1]

    def site_before(self, segment: int) -> int | None:
        """Return the last site before `segment`; None if there is none."""
        return max((site for site in self.sites if site < segment), default=None)
