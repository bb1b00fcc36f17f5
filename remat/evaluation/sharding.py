"""Sharding: the graph of one rank's step when ranks share the states of training (ZeRO, Rajbhandari et al. 2020).

A recorded step holds every state whole. With D ranks, one of them keeps, of P bytes of parameters, G of gradients and
O of optimizer state (the paper's table 1):

    zero1   P + G + O/D             zero2   P + (G + O)/D             zero3 (FSDP)   (P + G + O)/D

and besides, for a while, what it gathers. Rules for that, after PyTorch's `fully_shard`:

Rule 1  A unit is a layer of the model (`block_of`); what lies outside layers is one unit more, the root.
Rule 2  zero3 has the parameters of a layer gathered while it runs, and those of the layer that is next (one unit is
        fetched ahead), in forward, backward and recomputation alike. The root stays gathered from the first forward
        operator to the last backward one. In forward the second is what the layer itself was gathered into, which
        `fully_shard` keeps until the next one is gathered; for the last layer that is the end of forward, with the loss
        if the model computes it. Backward begins with fetching that layer again, ahead of the loss's own. (Of a region
        of several layers more than two may be gathered at once: plan with regions that are layers.)
Rule 3  zero2 and zero3 scatter a unit's gradients when its backward ends: until then they are there whole. The buffer
        that they are scattered from is as large, and stays until the next unit's are.
Rule 4  The optimizer works on its shard: what it needs besides is a D-th.

A storage that a rule adds is made by the first node of its unit; like a cast it is never saved by a plan, and made
again where its node is recomputed. Times are not changed: communication is taken to hide behind computation, and the
optimizer's time is that of the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import OPTIMIZER_STATE, Graph, Parameter, Storages, block_of, forward_alone_bytes
from remat.workload.training_loop import TrainingLoop

ROOT = None  # the unit outside layers


Role = Literal["gathered", "gradient", "other"]


@dataclasses.dataclass(frozen=True)
class AddedStorage:
    """A storage to add: bytes, first and last operator, the node that makes it (-1 after forward), its role."""

    size_bytes: int
    birth: int
    death: int
    node: int
    role: Role = "gathered"


def shard(graph: Graph, loop: TrainingLoop) -> Graph:
    """Return `graph` as one of `loop.ranks` runs it; unchanged if nothing is sharded."""
    if loop.shard is None:
        return graph
    sharded = _Sharding(graph, loop)
    share_of_it = dataclasses.replace(
        sharded.graph_with(list(sharded.added())),
        fixed_bytes=sharded.fixed_bytes(),
        first_step_bytes=sharded.first_step_bytes(),
        about={**graph.about, "ranks": loop.ranks, "shard": loop.shard},
    )
    # Local variables hold no state: untraced, the share grows by as many bytes as the whole.
    less = Memory(graph).peak_without_regions - Memory(share_of_it).peak_without_regions
    more = max(forward_alone_bytes(share_of_it) - forward_alone_bytes(graph), 0)
    return dataclasses.replace(
        share_of_it, untraced_bytes=graph.untraced_bytes - less, alone_bytes=graph.alone_bytes + more
    )


def share(size_bytes: int, ranks: int) -> int:
    """Return the bytes of the largest of equal shards."""
    return -(-size_bytes // ranks)


class _Sharding:
    def __init__(self, graph: Graph, loop: TrainingLoop):
        self.graph, self.ranks, self.loop = graph, loop.ranks, loop
        self.gradients = loop.shard in ("zero2", "zero3")
        self.parameters = loop.shard == "zero3"
        self.units: dict[str | None, list[Parameter]] = {}
        for parameter in graph.parameters:
            self.units.setdefault(block_of(parameter.name), []).append(parameter)

    def fixed_bytes(self) -> dict[str, int]:
        shared = {OPTIMIZER_STATE}
        if self.gradients:
            shared.add("gradients")
        if self.parameters:
            shared |= {"parameters", "running average"}
        fixed = self.graph.fixed_bytes
        return {name: share(size, self.ranks) if name in shared else size for name, size in fixed.items()}

    def first_step_bytes(self) -> int:
        """Return the peak of the optimizer's first step: sharded parameters and gradients, and a D-th of the rest."""
        before, after = self.graph.fixed_bytes, self.fixed_bytes()
        made = {OPTIMIZER_STATE, "running average", "gradients"}
        gradient_bytes = sum(p.gradient_bytes for p in self.graph.parameters)
        kept = sum(size for name, size in before.items() if name not in made) + gradient_bytes
        rest = max(self.graph.first_step_bytes - kept, 0)
        kept_now = sum(size for name, size in after.items() if name not in made)
        kept_now += share(gradient_bytes, self.ranks) if self.gradients else gradient_bytes
        return kept_now + share(rest, self.ranks)

    # Temporary storages

    def added(self) -> Iterator[AddedStorage]:
        if self.parameters:
            yield from self._gathered()
        if self.gradients:
            yield from self._gradients()

    def _gathered(self) -> Iterator[AddedStorage]:  # Rule 2
        size = {unit: sum(p.size_bytes for p in members) for unit, members in self.units.items()}
        forward = [unit for unit in self._spans if unit is not ROOT and unit in size]
        for unit, ahead in itertools.zip_longest(forward, forward[1:]):
            node, first, last = self._spans[unit]
            yield AddedStorage(size[unit] + size.get(ahead or "", 0), first, last, node)
        if forward:
            yield AddedStorage(size[forward[-1]], self._spans[forward[-1]][1], self.graph.forward_end - 1, -1)
        backward = [unit for unit in self._backward_spans if unit in forward]
        if backward and (begin := self._backward_spans[backward[0]][0]) > self.graph.forward_end:
            yield AddedStorage(size[backward[0]], self.graph.forward_end, begin - 1, -1)
        for unit, ahead in itertools.zip_longest(backward, backward[1:]):
            yield AddedStorage(size[unit] + size.get(ahead or "", 0), *self._backward_spans[unit], -1)
        if ROOT in size:
            yield AddedStorage(size[ROOT], 0, self.graph.backward_end - 1, 0)

    def _gradients(self) -> Iterator[AddedStorage]:  # Rule 3
        graph = self.graph
        last = graph.op_count - 1
        waiting = sorted(scattered for _, scattered in self._backward_spans.values())
        for unit, members in self.units.items():
            whole = sum(p.gradient_bytes for p in members)
            if not whole or unit not in self._backward_spans:
                continue
            first, scattered = self._backward_spans[unit]
            if after := waiting[waiting.index(scattered) + 1 :]:
                yield AddedStorage(whole, scattered + 1, after[0], -1, role="other")
            if self.loop.accumulates:  # shards are fixed; the micro-batch's own gradients are whole for a while
                yield AddedStorage(whole, first, scattered, -1, role="gradient")
            else:
                yield AddedStorage(share(whole, self.ranks), scattered, last, -1, role="gradient")

    @functools.cached_property
    def _spans(self) -> dict[str | None, tuple[int, int, int]]:
        """The first node, and the first and last forward operator, of every unit."""
        found: dict[str | None, tuple[int, int, int]] = {}
        for i, node in enumerate(self.graph.nodes):
            unit = block_of(node.module)
            first_node, first, _ = found.get(unit, (i, node.first, 0))
            found[unit] = first_node, first, max(node.end - 1, first)
        return found

    @functools.cached_property
    def _backward_spans(self) -> dict[str | None, tuple[int, int]]:
        """The first and last backward operator of every unit, in the order of backward."""
        graph = self.graph
        units = [block_of(node.module) for node in graph.nodes]
        found: dict[str | None, tuple[int, int]] = {}
        for op in range(graph.forward_end, graph.backward_end):
            unit = units[graph.op_node[op]]
            found[unit] = found.get(unit, (op, op))[0], op
        return found

    # The graph

    def graph_with(self, added: list[AddedStorage]) -> Graph:
        """Return the graph with `added`, gradients freed when they are scattered, and optimizer temporaries sharded."""
        graph, old = self.graph, self.graph.storages
        size, death = old.size_bytes.copy(), old.death.copy()
        late = old.birth >= graph.backward_end
        size[late] = -(-size[late] // self.ranks)  # Rule 4
        if self.gradients:
            spans = self._backward_spans
            for parameter in graph.parameters:
                if parameter.gradient >= 0 and (unit := block_of(parameter.name)) in spans:
                    scattered = max(spans[unit][1], int(old.birth[parameter.gradient]))
                    death[parameter.gradient] = scattered
        kept = dataclasses.replace(old, size_bytes=size, death=death)
        return with_added(dataclasses.replace(graph, storages=kept), added)


def with_added(graph: Graph, added: Sequence[AddedStorage]) -> Graph:
    """Add storages to `graph`."""
    old = graph.storages
    columns: dict[str, Any] = {
        "size_bytes": np.append(old.size_bytes, [new.size_bytes for new in added]),
        "birth": np.append(old.birth, [new.birth for new in added]),
        "death": np.append(old.death, [new.death for new in added]),
        "node": np.append(old.node, [new.node for new in added]),
        "cast": np.append(old.cast, [1] * len(added)),
        "over": np.append(old.over, [0] * len(added)),
    }
    order = np.argsort(columns["birth"], kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    count = len(old.birth)
    moved = _renumbered(graph, place)
    by_role = {
        role: [int(place[count + i]) for i, new in enumerate(added) if new.role == role] for role in get_args(Role)
    }
    return dataclasses.replace(
        moved,
        storages=Storages(**{name: column[order].astype(np.int64) for name, column in columns.items()}),
        parameter_gradients=tuple(sorted([*moved.parameter_gradients, *by_role["gradient"]])),
        gathered=tuple(sorted([*moved.gathered, *by_role["gathered"]])),
    )


def _renumbered(graph: Graph, place: np.ndarray) -> Graph:
    """Renumber storage u to place[u]."""
    table = graph.saved_tensors
    storage = np.where(table.storage >= 0, place[np.maximum(table.storage, 0)], table.storage)
    return dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(
                node,
                values=tuple(sorted(int(place[u]) for u in node.values)),
                reused=tuple(int(place[u]) for u in node.reused),
            )
            for node in graph.nodes
        ),
        saved_tensors=dataclasses.replace(table, storage=storage),
        parameters=tuple(
            dataclasses.replace(p, gradient=int(place[p.gradient]) if p.gradient >= 0 else -1) for p in graph.parameters
        ),
        parameter_gradients=tuple(sorted(int(place[u]) for u in graph.parameter_gradients)),
        gathered=tuple(sorted(int(place[u]) for u in graph.gathered)),
    )
