"""The regions and offloads of a plan in a step that was recorded here."""

from __future__ import annotations

from collections.abc import Sequence

from remat.capture.circumstances import differences
from remat.errors import PlanMismatch
from remat.evaluation.graph import Graph
from remat.evaluation.identity import Difference, Fit, GraphMismatch, Places, compare, position_of
from remat.evaluation.plan import Offload, Plan, Region, RegionRef
from remat.formulation.search_space import legal_cuts
from remat.offloading.refs import from_offload_refs


def placed(plan: Plan, graph: Graph) -> tuple[tuple[Region, ...], tuple[Offload, ...]]:
    """Return the regions and offloads of `plan` in a step recorded here. Raises PlanMismatch as for its regions."""
    regions = require_regions_in(plan, graph)
    places = _places_in(plan, graph) if plan.offloads else None
    return regions, from_offload_refs(graph, plan.offloads, places)


def require_regions_in(plan: Plan, graph: Graph) -> tuple[Region, ...]:
    """Return the regions of `plan` in a step recorded here. Raises PlanMismatch if it is another model's."""
    regions = regions_in(plan, graph)
    if isinstance(regions, GraphMismatch):
        said = [f"{regions}", *differences(plan.about, graph.about)]
        raise PlanMismatch(
            f"the plan was made for {plan.about.get('workload')!r}, whose graph differs from that of "
            f"{graph.about['workload']!r} here {'; '.join(said)}; use it as planned, or make a plan for this model."
        )
    return regions


def regions_in(plan: Plan, graph: Graph) -> tuple[Region, ...] | GraphMismatch:
    """Return the regions of `plan` in a step recorded here, or why it is another model's."""
    found = _fits(plan, graph)
    if isinstance(found, GraphMismatch):
        return found
    cuts = frozenset(legal_cuts(graph)) if not plan.is_of_modules else None
    return tuple(_placed_in(region, graph, found, cuts) for region in plan.regions)


def _places_in(plan: Plan, graph: Graph) -> Places:
    """Find the nodes of `plan` in a step that has its regions."""
    found, cuts = _fits(plan, graph), frozenset(legal_cuts(graph))
    assert not isinstance(found, GraphMismatch)
    moved = {call: fit for call, fit in enumerate(found) if not fit.is_exact}
    here = {call: _cuts_here(graph.call_nodes[call], cuts) for call in moved}
    return Places(moved, here, frozenset((region.call, region.first.ordinal) for region in plan.regions))


def _fits(plan: Plan, graph: Graph) -> list[Fit] | GraphMismatch:
    """Find the nodes of each graph call."""
    if len(graph.call_nodes) != len(plan.fingerprints):
        return GraphMismatch(min(len(graph.call_nodes), len(plan.fingerprints)), len(graph.nodes))
    if not plan.identities or not graph.identities:
        if graph.fingerprints != plan.fingerprints:
            return GraphMismatch(0, len(graph.nodes))
        return [Fit(tuple(range(len(m))), len(m)) for m in graph.call_nodes]
    same_shapes = plan.about.get("batch") == graph.about.get("batch")
    fits = [compare(a, b, same_shapes=same_shapes) for a, b in zip(plan.identities, graph.identities, strict=True)]
    for call, fit in enumerate(fits):
        if isinstance(fit, Difference):
            return GraphMismatch(call, len(graph.call_nodes[call]), fit)
    return [fit for fit in fits if isinstance(fit, Fit)]


def _cuts_here(nodes: Sequence[int], cuts: frozenset[int]) -> set[int]:
    """Return the legal cuts in ordinals of the graph call of `nodes`."""
    return {i for i, node in enumerate(nodes) if node in cuts} | {len(nodes)}


def _placed_in(region: RegionRef, graph: Graph, fits: Sequence[Fit], cuts: frozenset[int] | None) -> Region:
    nodes, fit = graph.call_nodes[region.call], fits[region.call]
    here = None
    if cuts is not None and not fit.is_exact:
        here = _cuts_here(nodes, cuts)
    first, end = (position_of(p, fit, here) for p in (region.first.ordinal, region.last.ordinal + 1))
    saved = (fit.to[ref.ordinal] for ref in region.saved)
    return Region(
        nodes[first],
        nodes[end - 1] + 1,
        tuple(sorted(nodes[i] for i in saved if i >= 0)),
        tuple(_placed_in(inner, graph, fits, cuts) for inner in region.inner),
    )
