"""Storages that outlive their forward in a graph cut into segments, with reasons and sizes.

Autograd keeps what it saves in a plain segment; a region keeps what it takes, and what it saves. Most storages have one
such reason, in the segment that makes them: they are its *own*. Those that several segments may want to keep (a
residual stream, a mask, an encoder's output) have to be counted once for all of them: they are *shared*. A storage
that the caller holds through backward, whatever the plan, is neither.
"""

from __future__ import annotations

import functools

import numpy as np

from remat.costing.costs import Costs
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.formulation.choices import BEFORE_SEGMENTS, SharedStorage
from remat.formulation.search_space import Space

NS = 1000  # nanoseconds in a microsecond: objectives are integers


class Liveness:
    """The storages that may outlive the forward of one graph, cut into the segments and saves of a space."""

    def __init__(self, graph: Graph, costs: Costs, space: Space):
        self.graph = graph
        self.space = space
        self.memory = Memory(graph, costs.workspace_per_op(graph))
        self.op_time_ns = np.round(costs.per_op_us(graph) * NS).astype(np.int64)
        for node in graph.nodes:
            if node.effect == "counter" or node.decides:  # never recomputed
                self.op_time_ns[node.first : node.end] = 0

    @functools.cached_property
    def op_time_us(self) -> np.ndarray:
        return self.op_time_ns / NS

    def saved_bytes(self, node: int) -> int:
        """Return the most bytes that saving `node` keeps."""
        sizes = self.graph.storages.size_bytes
        return int(sum(sizes[u] for u in self.saved_by[node]))

    @functools.cached_property
    def segment_of_node(self) -> np.ndarray:
        lengths = [segment.end - segment.first for segment in self.space.segments]
        return np.repeat(np.arange(len(lengths)), lengths)

    # Saves

    @functools.cached_property
    def save_time_ns(self) -> dict[int, int]:
        """The time to recompute each node that may be saved, in all backwards and without casts, if it takes any."""
        times = {}
        for node in self.space.saveable:
            record = self.graph.nodes[node]
            ops = [op for op in range(record.first, record.end) if not self.graph.is_made_again[op]]
            time = int(self.op_time_ns[ops].sum()) * self.graph.inner.backwards
            if time > 0:
                times[node] = time
        return times

    @functools.cached_property
    def saved_by(self) -> dict[int, list[int]]:
        """The storages that each node that may be saved keeps."""
        storages = self.graph.storages
        found: dict[int, list[int]] = {node: [] for node in self.save_time_ns}
        for storage in np.flatnonzero(storages.cast == 0).tolist():
            node = int(storages.node[storage])
            if node in found:
                found[node].append(storage)
        return found

    @functools.cached_property
    def reasons(self) -> tuple[dict[int, dict[int, int]], dict[int, set[tuple[int, int]]]]:
        """(segment -> storages that autograd keeps if it is plain, with release; storage -> (source, site))."""
        graph, segment = self.graph, self.segment_of_node
        packed: dict[int, dict[int, int]] = {s: {} for s in range(len(self.space.segments))}
        for p in self.memory.kept_for_backward.tolist():
            site, storage = int(segment[graph.saved_tensors.node[p]]), int(graph.saved_tensors.storage[p])
            packed[site][storage] = max(packed[site].get(storage, -1), int(graph.saved_tensors.release[p]))
        inner = graph.inner
        for row, kept, node in zip(
            inner.row.tolist(), inner.kept.tolist(), self.memory.inner_sites.tolist(), strict=True
        ):
            site, storage = int(segment[node]), int(graph.saved_tensors.storage[row])
            if kept >= graph.forward_end and storage >= 0:
                packed[site][storage] = max(packed[site].get(storage, -1), kept)
        taken: dict[int, set[tuple[int, int]]] = {}
        for i, node in enumerate(graph.nodes):
            for source in node.inputs:
                if segment[source] < segment[i]:
                    for storage in graph.nodes[source].values:
                        taken.setdefault(storage, set()).add((int(segment[source]), int(segment[i])))
        for node in graph.deciding:  # a region that makes it keeps it like one that takes it
            for storage in self.memory.allocated[node].tolist():
                taken.setdefault(storage, set()).add((BEFORE_SEGMENTS, int(segment[node])))
        return packed, taken

    @functools.cached_property
    def shared(self) -> dict[int, SharedStorage]:
        """Storages that several runs may want to keep; `own_bytes` has the others."""
        packed, taken = self.reasons
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
                continue  # caller-held: it is local under every plan
            made = int(segment[storages.node[u]])
            all_sites = {*found_sites, made} if u in saver else found_sites
            result[u] = SharedStorage(
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

    def is_own(self, storage: int) -> bool:
        """Return whether only its own segment can keep `storage`, and the caller does not hold it anyway."""
        return storage not in self.shared and self.graph.storages.death[storage] < self.graph.forward_end

    @functools.cached_property
    def own(self) -> list[list[int]]:
        """The storages of every segment that only a plain run keeps."""
        packed, _ = self.reasons
        return [[u for u in packed[s] if self.is_own(u)] for s in range(len(self.space.segments))]

    @functools.cached_property
    def saves_in(self) -> list[list[int]]:
        """The nodes of every segment that may be saved."""
        found: list[list[int]] = [[] for _ in self.space.segments]
        for node in self.save_time_ns:
            found[int(self.segment_of_node[node])].append(node)
        return found

    @functools.cached_property
    def is_packed(self) -> np.ndarray:
        """Whether autograd would keep each storage for backward."""
        packed = np.zeros(len(self.graph.storages.birth), dtype=bool)
        packed[self.graph.saved_tensors.storage[self.memory.kept_for_backward]] = True
        return packed

    @functools.cached_property
    def own_bytes(self) -> list[int]:
        sizes = self.graph.storages.size_bytes
        return [int(sum(sizes[u] for u in storages)) for storages in self.own]

    @functools.cached_property
    def save_bytes(self) -> dict[int, int]:
        """The bytes that saving each node keeps and no other reason does."""
        sizes = self.graph.storages.size_bytes
        return {node: int(sum(sizes[u] for u in saved if self.is_own(u))) for node, saved in self.saved_by.items()}
