"""Refusals: why no plan keeps a budget, with the least budget that would do."""

from __future__ import annotations

from remat.errors import Infeasible
from remat.evaluation.breakdown import at_peak
from remat.evaluation.graph import Graph
from remat.formulation.problem import Problem
from remat.solvers.least_peak import LeastPeak
from remat.units import gib


def infeasible(problem: Problem, least: LeastPeak) -> Infeasible:
    """The refusal, with the least budget that would do and what takes it."""
    memory = problem.memory.offloading(problem.with_budget(0).offloads_of(least.regions))
    parts = at_peak(memory, least.regions)
    curve = memory.curve(least.regions)
    listing = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1]))
    return Infeasible(
        f"budget {gib(problem.budget_bytes)} is below the least possible peak{_at_most(least)} {gib(least.peak_bytes)} "
        f"({where(problem.graph, int(curve.op[curve.peak_at]))}): {listing}. "
        "Raise the budget, reduce the batch, or shrink the largest item.",
        minimum_budget_bytes=least.peak_bytes,
        breakdown=parts,
    )


def _at_most(least: LeastPeak) -> str:
    """What stands before a least peak that is not proved to be one."""
    if gib(least.bound_bytes) == gib(least.peak_bytes):
        return ""
    return f", at least {gib(least.bound_bytes)} and at most"


def where(graph: Graph, op: int) -> str:
    """An operator for a person: the node that it belongs to, and the phase."""
    if op >= graph.backward_end:
        return "the optimizer step"
    node = graph.nodes[graph.op_node[op]]
    module = f" in {node.module}" if node.module else ""
    return f"node `{node.name}`{module}, {'forward' if op < graph.forward_end else 'backward'}"
