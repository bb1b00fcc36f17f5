"""Decisions: what a plan does with every node, as a tree of modules, and what another choice there would cost.

All bytes and times are the evaluator's. *Held* is what of a node's results is alive from forward into backward under
the plan; *without regions* is the same where nothing is recomputed. What it would cost to decide otherwise is asked of
the evaluator one node at a time, with all other decisions as they are. It is asked of nodes that a region saves or
could save. Whether a region should begin or end elsewhere is not asked: that is the solver's whole question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.search_space import saveable

Decision = Literal["kept", "saved", "recomputed", "in slices", "fused", "nothing to keep"]
DECISIONS: tuple[Decision, ...] = ("kept", "in slices", "fused", "saved", "recomputed", "nothing to keep")
SLICED_OP, FUSED_OP = "chunked_loss", "fused("  # how the operators of forms are spelled in a graph
MOST_CHANGES = 400  # other choices that are asked for, those of the largest results first
MOST_ROWS = 4000  # nodes of which each has a row
OUTSIDE_MODULES = "outside modules"


@dataclasses.dataclass(frozen=True)
class Change:
    """One decision taken otherwise, all others as they are: the peak then, and what the step gains or loses."""

    to: Decision
    peak_bytes: int
    more_us: float


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A node: what is decided of it, its bytes held under the plan and without one, and its times.

    again_us  of running it a second (third, ...) time    change  what deciding otherwise would cost; None: not asked
    """

    index: int
    name: str
    op: str
    decision: Decision
    held_bytes: int
    plain_bytes: int
    forward_us: float
    again_us: float
    change: Change | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it neither takes time nor makes anything that lasts: a view, a placeholder."""
        return not (self.forward_us or self.held_bytes or self.plain_bytes or self.again_us)


@dataclasses.dataclass(frozen=True)
class Branch:
    """A module: its nodes and modules in the order in which they run first, and their sums."""

    name: str
    path: str
    parts: tuple[Branch | Leaf, ...]

    @property
    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves if isinstance(part, Branch) else (part,)

    @property
    def held_bytes(self) -> int:
        return sum(leaf.held_bytes for leaf in self.leaves)

    @property
    def plain_bytes(self) -> int:
        return sum(leaf.plain_bytes for leaf in self.leaves)

    @property
    def forward_us(self) -> float:
        return sum(leaf.forward_us for leaf in self.leaves)

    @property
    def again_us(self) -> float:
        return sum(leaf.again_us for leaf in self.leaves)

    def shares(self) -> list[tuple[Decision, float]]:
        """Decisions with their share of the forward's time below this module, in percent."""
        total = self.forward_us or 1.0
        of = dict.fromkeys(DECISIONS, 0.0)
        for leaf in self.leaves:
            of[leaf.decision] += 100 * leaf.forward_us / total
        return [(decision, round(share, 2)) for decision, share in of.items() if share >= 0.01]


def tree_of(profile: Profile, regions: Sequence[Region], *, changes: int = MOST_CHANGES) -> Branch:
    """Every node under `regions`, below the modules that they are in."""
    leaves = _leaves(profile, regions)
    if changes and regions:
        for index, change in _changes(profile, regions, leaves, changes):
            leaves[index] = dataclasses.replace(leaves[index], change=change)
    return _grown([(node.module, leaf) for node, leaf in zip(profile.graph.nodes, leaves, strict=True)])


def _leaves(profile: Profile, regions: Sequence[Region]) -> list[Leaf]:
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    count, op_us = len(graph.nodes), profile.costs.per_op_us(graph)
    held, plain = (_held_bytes(memory, under) for under in (regions, ()))
    forward = np.arange(graph.op_count) < graph.forward_end
    forward_us = np.bincount(graph.op_node[forward], op_us[forward], minlength=count)
    curve = memory.curve(regions)
    again = (curve.region >= 0) & curve.executed
    again_us = np.bincount(graph.op_node[curve.op[again]], op_us[curve.op[again]], minlength=count)
    called_again = _called_again(memory, regions, np.unique(graph.op_node[curve.op[again]]))
    saved = {node for region in leaf_regions(regions) for node in region.saved}
    return [
        Leaf(
            index=i,
            name=node.name,
            op=node.op,
            decision=_decision(graph, i, i in saved, i in called_again, bool(held[i])),
            held_bytes=int(held[i]),
            plain_bytes=int(plain[i]),
            forward_us=float(forward_us[i]),
            again_us=float(again_us[i]),
        )
        for i, node in enumerate(graph.nodes)
    ]


def _decision(graph: Graph, node: int, saved: bool, again: bool, held: bool) -> Decision:
    if saved:
        return "saved"
    if again:
        return "recomputed"
    op = graph.nodes[node].op
    if SLICED_OP in op:
        return "in slices"
    if op.startswith(FUSED_OP):
        return "fused"
    return "kept" if held else "nothing to keep"


def _called_again(memory: Memory, regions: Sequence[Region], run_again: np.ndarray) -> set[int]:
    """Nodes that are called a second time, those included that run no operator: views, say."""
    found = set(run_again.tolist())
    for region in leaf_regions(regions):
        count = memory.recomputed_nodes((region,))
        found |= set([node for node in range(region.first, region.end) if node not in region.saved][:count])
    return found


def _held_bytes(memory: Memory, regions: Sequence[Region]) -> np.ndarray:
    """Of every node the bytes of its results that are alive from forward into backward."""
    graph, lives = memory.graph, memory.lives(regions)
    count = len(graph.storages.birth)
    backward = int(np.flatnonzero((lives.region >= 0) | (lives.op >= graph.forward_end)).min(initial=len(lives.op)))
    crosses = (lives.birth[:count] < backward) & (lives.death[:count] >= backward) & (graph.storages.node >= 0)
    sizes = np.bincount(graph.storages.node[crosses], graph.storages.size_bytes[crosses], minlength=len(graph.nodes))
    return sizes.astype(np.int64)


def leaf_regions(regions: Sequence[Region]) -> Iterator[Region]:
    """The regions that hold no others."""
    for region in regions:
        yield from leaf_regions(region.inner) if region.inner else (region,)


# Other choices


def _changes(
    profile: Profile, regions: Sequence[Region], leaves: Sequence[Leaf], most: int
) -> Iterator[tuple[int, Change]]:
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    op_us = profile.costs.per_op_us(graph)
    may_save, before_us = set(saveable(graph)), _again_us(memory, regions, op_us)
    wanted = [
        leaf
        for region in leaf_regions(regions)
        for leaf in leaves[region.first : region.end]
        if leaf.decision == "saved" or (leaf.decision == "recomputed" and leaf.index in may_save)
    ]
    for leaf in sorted(wanted, key=lambda leaf: (-leaf.plain_bytes, leaf.index))[:most]:
        other = tuple(_toggled(region, leaf.index) for region in regions)
        to: Decision = "recomputed" if leaf.decision == "saved" else "saved"
        yield (
            leaf.index,
            Change(to, memory.curve(other).peak_bytes, _again_us(memory, other, op_us) - before_us),
        )


def _again_us(memory: Memory, regions: Sequence[Region], op_us: np.ndarray) -> float:
    return memory.recompute_time_us(regions, op_us)


def _toggled(region: Region, node: int) -> Region:
    """`region` with `node` saved where it was not, and not saved where it was."""
    if node not in region:
        return region
    if region.inner:
        return dataclasses.replace(region, inner=tuple(_toggled(inner, node) for inner in region.inner))
    return dataclasses.replace(region, saved=tuple(sorted(set(region.saved) ^ {node})))


# The tree


def _grown(placed: Sequence[tuple[str, Leaf]]) -> Branch:
    """Leaves below the modules that their paths name."""
    below: dict[str, dict[str, Leaf | None]] = {"": {}}  # path -> its parts in order; None is a module of that name

    def module(path: str) -> None:
        if path not in below:
            parent, _, name = path.rpartition(".")
            module(parent)
            below[parent][f"module {name}"] = None
            below[path] = {}

    for path, leaf in placed:
        module(path)
        below[path][f"node {leaf.index}"] = leaf

    def branch(path: str, name: str) -> Branch:
        own = below[path]
        if path and len(own) == 1 and next(iter(own.values())) is None:  # a module that holds one module alone
            inner = next(iter(own)).removeprefix("module ")
            return branch(f"{path}.{inner}", f"{name}.{inner}")
        parts = tuple(
            leaf if leaf is not None else branch(f"{path}.{key[7:]}".lstrip("."), key[7:]) for key, leaf in own.items()
        )
        layer = f"{path.split('.')[-2]}.{name}" if name.isdigit() and "." in path else name
        return Branch(layer, path, parts)

    return branch("", "")
