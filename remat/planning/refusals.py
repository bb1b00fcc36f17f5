"""Refusals: why no plan keeps a budget, or was found, with the least budget that would do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.breakdown import at_peak
from remat.evaluation.caveats import outside_graphs
from remat.evaluation.forwards import forwards_of, is_plain
from remat.evaluation.graph import OUTSIDE, Graph
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits
from remat.solvers.least_peak import LeastPeak
from remat.units import gib, gib_above

ENDED_EARLY_SHARE = 0.4  # of the time: a solver that took less ended by itself, since it gets at least half of it


def infeasible(problem: Problem, least: LeastPeak, replayed_bytes: int | None = None) -> Infeasible:
    """Return the refusal with the least sufficient budget and its breakdown.

    replayed_bytes  peak of the plan with the least peak as it runs; None if it was not replayed
    """
    enough = max(least.peak_bytes, replayed_bytes or 0)
    memory = problem.memory.offloading(problem.with_budget(0).offloads_of(least.regions))
    parts = at_peak(memory, least.regions)
    curve = memory.curve(least.regions)
    listing = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1]))
    why = _running(enough, least.peak_bytes) + _outside(problem.graph)
    return Infeasible(
        f"budget {gib(problem.budget_bytes)} is below the least possible peak{_least(least, problem.budget_bytes)} "
        f"({where(problem.graph, int(curve.op[curve.peak_at]))}): {listing}. {why}"
        f"Raise the budget, reduce the batch, or shrink the largest item.{_of_forwards(problem.graph)}",
        minimum_budget_bytes=enough,
        breakdown=parts,
    )


def not_found(problem: Problem, limits: Limits, spent_s: float, enough_bytes: Callable[[], int]) -> NoPlanInTime:
    """Make the error of a search that has neither a plan nor a proof that there is none.

    spent_s       seconds of the search, by `limits.now`
    enough_bytes  a budget that is known to suffice
    """
    advice = _outside(problem.graph).rstrip()
    of_work = " of work" if limits.counts_work else ""
    said = f"no plan within {gib(problem.budget_bytes)} was found in {spent_s:.0f} s{of_work}"
    if limits.time_s is None or spent_s >= ENDED_EARLY_SHARE * limits.time_s:
        remedy = "give it more time" if limits.counts_work else "raise the time limit"
        return NoPlanInTime(f"{said}; {remedy} (`time_limit=`).{f' {advice}' if advice else ''}")
    enough = enough_bytes()
    return NoPlanInTime(
        f"{said} of {limits.time_s:.0f}, when the search ended by itself, and none is proved impossible. "
        f"A budget of {enough}B ({gib(enough)}) will do.{f' {advice}' if advice else ''}"
    )


def _differentiated(graph: Graph) -> str:
    """Describe the memory that a step holds for derivatives inside it; empty if there are none."""
    inner = graph.inner.within(graph.forward_end)
    if not inner:
        return ""
    storages = np.unique(graph.saved_tensors.storage[inner.row[inner.kept >= graph.forward_end]])
    size = int(graph.storages.size_bytes[storages[storages >= 0]].sum())
    if not size:
        return (
            "The step runs backward before it ends. If that accumulates gradients, let `step` be one micro-batch, and "
            "plan with `loop=TrainingLoop(accumulation=...)`. "
        )
    return (
        f"The step differentiates inside (autograd.grad with create_graph=True), which keeps {gib(size)} of the "
        "model's values for second derivatives, whatever regions drop. "
    )


def _outside(graph: Graph) -> str:
    """Describe why regions do not reach parts of the step; empty if there are none."""
    return _differentiated(graph) + "".join(
        f"{sentence[0].upper()}{sentence[1:]}. " for sentence in outside_graphs(graph.about)
    )


def _least(least: LeastPeak, budget_bytes: int) -> str:
    """Describe the least peak, or its known range if it is not proved."""
    if gib(least.bound_bytes) == gib(least.peak_bytes):
        return f" {gib_above(least.peak_bytes, budget_bytes)}"
    proved = f"no plan stays below {gib(least.bound_bytes)}, and " if least.bound_bytes > budget_bytes else ""
    return f", which is not known exactly: {proved}the best plan that was found needs {gib(least.peak_bytes)}"


def _running(enough: int, peak_bytes: int) -> str:
    """Name the peak of the plan with the least peak as it runs, if that is higher."""
    return f"As it runs, the plan of this peak needs {gib_above(enough, peak_bytes)}. " if enough > peak_bytes else ""


def _of_forwards(graph: Graph) -> str:
    """Suggest planning the whole step if it makes several forwards."""
    forwards = forwards_of(graph.about, len(graph.call_nodes))
    if is_plain(forwards):
        return ""
    return (
        f" The step makes {len(forwards)} forwards, and no region spans two of them: a plan for "
        "`workload.with_planned_step()` may need less."
    )


def where(graph: Graph, op: int) -> str:
    """Describe an operator: its node and phase."""
    if op >= graph.backward_end:
        return "the optimizer step"
    node, phase = graph.nodes[graph.op_node[op]], "forward" if op < graph.forward_end else "backward"
    if node.call == OUTSIDE:
        return f"outside of the captured graphs, {node.op}, {phase}"
    module = f" in {node.module}" if node.module else ""
    return f"node `{node.name}`{module}, {phase}"
