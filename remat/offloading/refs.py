"""Offloads as the plan file names them, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.errors import PlanMismatch
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.identity import Places
from remat.evaluation.plan import NodeRef, Offload, OffloadRef, Region, node_refs
from remat.offloading.timeline import Timeline


def to_offload_refs(memory: Memory, regions: Sequence[Region], offloads: Sequence[Offload]) -> tuple[OffloadRef, ...]:
    """Convert `offloads` of a step under `regions` to references, with consecutive places in host memory.

    All are there when forward ends, so no two can share a place. Their order is that in which backward needs them, in
    which several are also fetched at one node.
    """
    if not offloads:
        return ()
    graph = memory.graph
    candidates = Timeline(memory, regions, np.zeros(graph.op_count)).candidates
    refs, known, offset, found = node_refs(graph), {each.storage: each for each in candidates}, 0, []
    for each in sorted(offloads, key=lambda each: known[each.storage].asked_at):
        kept = known[each.storage]
        places = refs[kept.node], kept.save, refs[each.release], refs[each.fetch]
        found.append(OffloadRef(*places, kept.size_bytes, offset, each.after_slices))
        offset += kept.size_bytes
    return tuple(found)


def require_kept(memory: Memory, regions: Sequence[Region], offloads: Sequence[Offload]) -> None:
    """Raise PlanMismatch if an offloaded storage is not kept from forward to backward, under `regions`."""
    kept = {each.storage for each in Timeline(memory, regions, np.zeros(memory.graph.op_count)).candidates}
    for each in offloads:
        if each.storage not in kept:
            node = int(memory.graph.storages.node[each.storage])
            raise kept_otherwise(memory.graph.nodes[node].name if node >= 0 else "?")


def kept_otherwise(node: str) -> PlanMismatch:
    return PlanMismatch(
        f"the plan brings to the host what the step keeps of node {node!r} on its target, and here it keeps something "
        "else; use the plan there, or make one for this device or without offloads."
    )


def from_offload_refs(
    graph: Graph, offloads: Sequence[OffloadRef], places: Places | None = None
) -> tuple[Offload, ...]:
    """Convert the references of `to_offload_refs` to offloads; the plan's nodes are at `places` in `graph`.

    Raises PlanMismatch if a node has no such value or save, as on another device.
    """
    index = {(ref.call, ref.ordinal): i for i, ref in enumerate(node_refs(graph))}
    places, table = places or Places(), graph.saved_tensors

    def at(ref: NodeRef) -> int:
        return index[ref.call, places.node(ref.call, ref.ordinal)]

    found = []
    for each in offloads:
        node = at(each.node)
        if each.save is None:
            storages = graph.nodes[node].values
        else:
            storages = tuple(table.storage[table.node == node][each.save : each.save + 1].tolist())
        if len(storages) != 1:
            raise kept_otherwise(each.node.name)
        storage = int(storages[0])
        if each.after_slices:
            release = at(each.release)
            if each.after_slices > len(graph.nodes[release].slice_ends):
                raise kept_otherwise(each.node.name)
        else:
            release = index[each.release.call, places.border(each.release.call, each.release.ordinal)]
        found.append(Offload(storage, release, at(each.fetch), each.after_slices))
    return tuple(sorted(found))
