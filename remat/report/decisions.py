"""Decisions: what a plan does with every node, as a tree of modules.

All bytes and times are the evaluator's. *Held* is what of a node's results is alive on the device from forward into
backward under the plan; *without regions* is the same where nothing is recomputed or offloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from remat.costing.profile import Profile
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import CHUNKED_ROWS, Graph
from remat.evaluation.plan import Offload, Region, saved_nodes

Decision = Literal["kept", "saved", "recomputed", "offloaded", "in slices", "fused", "nothing to keep"]
DECISIONS: tuple[Decision, ...] = ("kept", "in slices", "fused", "saved", "offloaded", "recomputed", "nothing to keep")
SLICED_OPS, FUSED_OP = ("chunked_loss", CHUNKED_ROWS), "fused("  # how the operators of forms are spelled in a graph
MOST_ROWS = 4000  # nodes of which each has a row


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A node: its decision, its bytes held under the plan and without one, and its times.

    host_bytes  of its results that are on the host in between
    again_us    of running it a second (third, ...) time
    """

    index: int
    name: str
    op: str
    decision: Decision
    held_bytes: int
    plain_bytes: int
    forward_us: float
    again_us: float
    host_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it neither takes time nor makes anything lasting: a view, a placeholder."""
        return not (self.forward_us or self.held_bytes or self.plain_bytes or self.again_us or self.host_bytes)


@dataclasses.dataclass(frozen=True)
class DecisionBranch:
    """A module: its nodes and modules in the order in which they run first, and their sums."""

    name: str
    path: str
    parts: tuple[DecisionBranch | Leaf, ...]

    @property
    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves if isinstance(part, DecisionBranch) else (part,)

    @property
    def held_bytes(self) -> int:
        return sum(leaf.held_bytes for leaf in self.leaves)

    @property
    def plain_bytes(self) -> int:
        return sum(leaf.plain_bytes for leaf in self.leaves)

    @property
    def host_bytes(self) -> int:
        return sum(leaf.host_bytes for leaf in self.leaves)

    @property
    def forward_us(self) -> float:
        return sum(leaf.forward_us for leaf in self.leaves)

    @property
    def again_us(self) -> float:
        return sum(leaf.again_us for leaf in self.leaves)

    def shares(self) -> list[tuple[Decision, float]]:
        """Return the decisions with their share of the forward's time below this module, in percent."""
        total = self.forward_us or 1.0
        of = dict.fromkeys(DECISIONS, 0.0)
        for leaf in self.leaves:
            of[leaf.decision] += 100 * leaf.forward_us / total
        return [(decision, round(share, 2)) for decision, share in of.items() if share >= 0.01]


def tree_of(profile: Profile, regions: Sequence[Region], offloads: Sequence[Offload] = ()) -> DecisionBranch:
    """Build the tree of every node under `regions` and `offloads`, below its modules."""
    leaves = _leaves(profile, regions, offloads)
    return _grown([(node.module, leaf) for node, leaf in zip(profile.graph.nodes, leaves, strict=True)])


def _leaf_regions(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield the regions without inner regions."""
    for region in regions:
        yield from _leaf_regions(region.inner) if region.inner else (region,)


def _leaves(profile: Profile, regions: Sequence[Region], offloads: Sequence[Offload]) -> list[Leaf]:
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph)).offloading(offloads)
    count, op_us = len(graph.nodes), profile.costs.per_op_us(graph)
    held, plain = _held_bytes(memory, regions), _held_bytes(memory.offloading(()), ())
    sent = [each.storage for each in offloads]
    host = np.bincount(graph.storages.node[sent], graph.storages.size_bytes[sent], minlength=count).astype(np.int64)
    forward = np.arange(graph.op_count) < graph.forward_end
    forward_us = np.bincount(graph.op_node[forward], op_us[forward], minlength=count)
    curve = memory.curve(regions)
    again = (curve.region >= 0) & curve.executed
    again_us = np.bincount(graph.op_node[curve.op[again]], op_us[curve.op[again]], minlength=count)
    called_again = _called_again(memory, regions, np.unique(graph.op_node[curve.op[again]]))
    saved = {node for region in _leaf_regions(regions) for node in saved_nodes(graph, region)}
    return [
        Leaf(
            index=i,
            name=node.name,
            op=node.op,
            decision=_decision(graph, i, i in saved, i in called_again, bool(host[i]), bool(held[i])),
            held_bytes=int(held[i]),
            plain_bytes=int(plain[i]),
            forward_us=float(forward_us[i]),
            again_us=float(again_us[i]),
            host_bytes=int(host[i]),
        )
        for i, node in enumerate(graph.nodes)
    ]


def _decision(graph: Graph, node: int, saved: bool, again: bool, on_host: bool, held: bool) -> Decision:
    if saved:
        return "offloaded" if on_host else "saved"
    if again:
        return "recomputed"
    if on_host:
        return "offloaded"
    op = graph.nodes[node].op
    if any(each in op for each in SLICED_OPS):
        return "in slices"
    if op.startswith(FUSED_OP):
        return "fused"
    return "kept" if held else "nothing to keep"


def _called_again(memory: Memory, regions: Sequence[Region], run_again: np.ndarray) -> set[int]:
    """Return the nodes that are called a second time, including those without operators, such as views."""
    found = set(run_again.tolist())
    for region in _leaf_regions(regions):
        count = memory.recomputed_nodes((region,))
        saved = saved_nodes(memory.graph, region)
        found |= set([node for node in range(region.first, region.end) if node not in saved][:count])
    return found


def _held_bytes(memory: Memory, regions: Sequence[Region]) -> np.ndarray:
    """Return for every node the bytes of its results that are on the device from forward into backward."""
    graph, lives = memory.graph, memory.lives(regions)
    count = len(graph.storages.birth)
    backward = int(np.flatnonzero((lives.region >= 0) | (lives.op >= graph.forward_end)).min(initial=len(lives.op)))
    crosses = (lives.birth[:count] < backward) & (lives.death[:count] >= backward) & (graph.storages.node >= 0)
    sizes = np.bincount(graph.storages.node[crosses], graph.storages.size_bytes[crosses], minlength=len(graph.nodes))
    return sizes.astype(np.int64)


# The tree


def _grown(placed: Sequence[tuple[str, Leaf]]) -> DecisionBranch:
    """Place leaves below the modules in their paths."""
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

    def branch(path: str, name: str) -> DecisionBranch:
        own = below[path]
        if path and len(own) == 1 and next(iter(own.values())) is None:  # a module that holds one module alone
            inner = next(iter(own)).removeprefix("module ")
            return branch(f"{path}.{inner}", f"{name}.{inner}")
        parts = tuple(
            leaf if leaf is not None else branch(f"{path}.{key[7:]}".lstrip("."), key[7:]) for key, leaf in own.items()
        )
        layer = f"{path.split('.')[-2]}.{name}" if name.isdigit() and "." in path else name
        return DecisionBranch(layer, path, parts)

    return branch("", "")
