"""The space of plans whose regions are whole modules: what `torch.utils.checkpoint` around a module's forward can do.

Sharding (FSDP2's `fully_shard`) gathers and frees parameters in hooks around the forward of modules. A region that
begins or ends inside a module, or that spans several, runs past those hooks; a region that *is* a module's forward
lies inside them. Such plans are fewer: same solver, same evaluator, fewer cuts.

Rule 1  A module may be a region if its forward runs once, as one run of nodes of one graph call between legal cuts.
Rule 2  It holds nothing that must happen once, except the running statistics of batch normalisation, which its
        recomputation can be kept from (`regions.py`); another counter would advance twice.
Rule 3  Modules lie inside one another (layer, attention, activation): each may be a region, no two of them that do.
        Several layers in a row are no region: they are not called as one.
Rule 4  It keeps nothing of its own from forward to forward: run again, it would start from what it has left.
Rule 5  A region saves nothing. So none holds a node that decides (`Node.decides`): the experts of a token are chosen
        outside of regions. What it may do in place of that is be a smaller module.
"""

from __future__ import annotations

import itertools

from remat.errors import UsageError
from remat.evaluation.graph import CALLED_MODULES, Graph
from remat.evaluation.writes import holds_or_leaves
from remat.formulation.search_space import (
    MOST_SEGMENTS,
    Segment,
    Space,
    forced_cuts,
    legal_cuts,
    written_for_long,
)

FEWEST_NODES = 2  # checkpointing a single operator keeps its input, as autograd does
Module = tuple[int, int, str]  # first node, end, path


def find_module_space(graph: Graph) -> Space:
    """Find the plans whose regions are modules; the smallest modules are left out if there are too many segments.

    Raises UsageError for a graph from an older profile, which does not name the modules that were called.
    """
    if CALLED_MODULES not in graph.about:
        raise UsageError("this profile does not say which modules were called; make it again with `remat profile`.")
    modules = eligible_modules(graph)
    depths = sorted({path.count(".") for _, _, path in modules}, reverse=True)
    cuts = _cuts(graph, modules)
    while len(cuts) - 1 > MOST_SEGMENTS and len(depths) > 1:
        deepest = depths.pop(0)
        modules = tuple(module for module in modules if module[2].count(".") < deepest)
        cuts = _cuts(graph, modules)
    open_ = {i for first, end, _ in modules for i in range(first, end)}
    segments = tuple(Segment(first, end, first not in open_) for first, end in itertools.pairwise(cuts))
    index = {cut: i for i, cut in enumerate(cuts)}
    longest = max((index[end] - index[first] for first, end, _ in modules), default=1)
    return Space(segments, saveable=(), depth=1, longest=longest, modules=modules)


def eligible_modules(graph: Graph) -> tuple[Module, ...]:
    """List the modules that may be regions, outer ones first. (Rules 1, 2 and 4)"""
    legal, written = set(legal_cuts(graph)), written_for_long(graph)
    found: dict[tuple[int, int], str] = {}
    for path, members in _members(graph).items():
        first, end = members[0], members[-1] + 1
        once = end - first == len(members) and graph.nodes[first].call == graph.nodes[end - 1].call
        large = sum(graph.nodes[i].effect != "counter" for i in members) >= FEWEST_NODES
        is_cut = {first, end} <= legal and all(holds_or_leaves(members, touching) for touching in written)
        if once and large and is_cut and _may_run_again(graph, path, members):
            found.setdefault((first, end), path)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], -item[0][1]))
    return tuple((first, end, path) for (first, end), path in ordered)


def _members(graph: Graph) -> dict[str, list[int]]:
    """Return the nodes that run inside each module whose forward is called, outer modules first."""
    members: dict[str, list[int]] = {path: [] for path in graph.about.get(CALLED_MODULES, ()) if path}
    for i, node in enumerate(graph.nodes):
        parts = node.module.split(".") if node.module else []
        for length in range(1, len(parts) + 1):
            if (path := ".".join(parts[:length])) in members:
                members[path].append(i)
    return {path: nodes for path, nodes in members.items() if nodes}


def _may_run_again(graph: Graph, path: str, members: list[int]) -> bool:
    if any(name.startswith(f"{path}.") for name in graph.about.get("carried", ())) or "carried_shared" in graph.about:
        return False
    nodes = [graph.nodes[i] for i in members]
    norms = {node.module for node in nodes if node.effect == "batch_norm"}
    return not any(
        node.decides or node.effect == "other" or (node.effect == "counter" and node.module not in norms)
        for node in nodes
    )


def _cuts(graph: Graph, modules: tuple[Module, ...]) -> list[int]:
    return sorted(forced_cuts(graph, legal_cuts(graph)) | {cut for first, end, _ in modules for cut in (first, end)})
