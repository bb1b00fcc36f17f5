"""Check: judge the plan of any solver against a Problem. Knows no solver.

Every rule is a short function that states facts and numbers. A solver's claim counts only after this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from remat.errors import RematError
from remat.evaluation.plan import Region
from remat.evaluation.writes import holds_or_leaves
from remat.formulation.problem import Problem
from remat.formulation.search_space import legal_cuts, runs_once, written_for_long
from remat.formulation.solution import Solution


def check(problem: Problem, solution: Solution) -> list[str]:
    """List the faults of `solution`, one sentence each; empty if there are none."""
    faults = list(_disjoint(solution.regions))
    faults += [fault for region in solution.regions for fault in _region(problem, region)]
    if faults:
        return faults
    return [*_within_budget(problem, solution), *_objective(problem, solution)]


def require(problem: Problem, solution: Solution) -> None:
    """Raise if `check` finds a fault: a bug in the solver, never the user's."""
    faults = check(problem, solution)
    if faults:
        raise RematError(f"solver {solution.solver} gave a plan that does not hold: {'; '.join(faults)}")


def _disjoint(regions: Sequence[Region]) -> Iterator[str]:
    for left, right in itertools.pairwise(regions):
        if right.first < left.end:
            yield f"regions at nodes {left.first} and {right.first} overlap"


def _region(problem: Problem, region: Region) -> Iterator[str]:
    graph = problem.graph
    legal = set(legal_cuts(graph))
    if not problem.space.allows(region.first, region.end):
        yield f"the region at node {region.first} is not the forward of a module"
    for cut in (region.first, region.end):
        if cut not in legal:
            yield f"a region begins or ends at node {cut}, where it may not"
    inside = graph.nodes[region.first : region.end]
    if len({node.call for node in inside}) > 1:
        yield f"the region at node {region.first} spans several graph calls"
    for i in sorted(runs_once(graph).intersection(range(region.first, region.end))):
        why = "decides and cannot be kept" if graph.nodes[i].decides else "changes module state"
        yield f"the region at node {region.first} holds {graph.nodes[i].name}, which {why}"
    for touching in written_for_long(graph):
        if not holds_or_leaves(range(region.first, region.end), touching):
            yield f"the region at node {region.first} holds some of the writes to {graph.nodes[min(touching)].name}"
    if region.inner and any(node.decides for node in inside):
        yield f"the region at node {region.first} holds regions and nodes that decide, and so would not save these"
    saveable = set(problem.space.saveable)
    for node_index in region.saved:
        if node_index not in region or node_index not in saveable:
            yield f"node {node_index} cannot be saved by the region at node {region.first}"
    if region.inner and region.saved:
        yield f"the region at node {region.first} both holds regions and saves"
    yield from _disjoint(region.inner)
    for part in region.inner:
        if part.first < region.first or part.end > region.end:
            yield f"an inner region leaves the region at node {region.first}"
        yield from _region(problem, part)


def _within_budget(problem: Problem, solution: Solution) -> Iterator[str]:
    curve = problem.memory.offloading(solution.offloads).curve(solution.regions)
    if curve.peak_bytes > problem.budget_bytes:
        node = problem.graph.op_node[curve.op[curve.peak_at]]
        name = problem.graph.nodes[node].name if node >= 0 else "the optimizer step"
        yield f"peak {curve.peak_bytes} bytes at {name} exceeds the budget {problem.budget_bytes}"


def _objective(problem: Problem, solution: Solution) -> Iterator[str]:
    time = problem.memory.recompute_time_us(solution.regions, problem.liveness.op_time_us)
    time += solution.stall_us
    if abs(time - solution.objective_us) > 0.01 + 1e-6 * time:
        yield f"recompute time is {time:.3f} us, the solver claims {solution.objective_us:.3f} us"
