"""A Plan from a solution, or the refusal where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.costing.profile import Profile
from remat.errors import Infeasible
from remat.evaluation.breakdown import at_peak
from remat.evaluation.graph import CALLED_MODULES, Graph
from remat.evaluation.plan import Plan, Prediction, to_refs
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.offloading.refs import to_offload_refs
from remat.planning.layers_on_host import pinned_bytes, wait_us
from remat.planning.links import state_on_host, state_wait_us
from remat.recording.fake_step import LAYERS_ON_HOST
from remat.solvers.least_peak import LeastPeak, least_peak
from remat.units import gib

if TYPE_CHECKING:
    from remat.execution.base import Execution
    from remat.planning.search import Judge


def infeasible(problem: Problem, limits: Limits) -> Infeasible:
    """The refusal, with the least budget that would do and what takes it."""
    least = least_peak(problem, limits)
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


def assemble(problem: Problem, solution: Solution, profile: Profile, execution: Execution, judge: Judge | None) -> Plan:
    """The Plan of a solution, with its predictions and its proof.

    Where it has been replayed, its peak is the replay's. `predicted["evaluator_peak_bytes"]` says where the evaluator
    expects another, as it does of modules and of compiled steps; of a plan for eager execution that is a bug.
    """
    graph, memory = problem.graph, problem.memory.offloading(solution.offloads)
    op_time_us, layers = profile.costs.per_op_us(graph), graph.about.get(LAYERS_ON_HOST, {})
    recompute_us = memory.recompute_time_us(solution.regions, op_time_us)
    weights_us = wait_us(memory, solution.regions, op_time_us, layers, profile.target.host_bytes_per_us)
    added_us = recompute_us + solution.stall_us + weights_us
    curve = memory.curve(solution.regions)
    predicted: Prediction = {
        "peak_bytes": curve.peak_bytes if solution.replayed_bytes is None else solution.replayed_bytes,
        "peak_at": where(graph, int(curve.op[curve.peak_at])),
        "step_time_us": problem.step_time_us + added_us,
        "recompute_time_us": recompute_us,
        "overhead": added_us / problem.step_time_us if problem.step_time_us else 0.0,
        "recomputed_nodes": memory.recomputed_nodes(solution.regions),
        "breakdown": at_peak(memory, solution.regions),
        "judged_by": "evaluator" if judge is None else "replay",
    }
    if unmeasured := len(profile.costs.about.get("not_measured", ())):
        predicted["unmeasured_kernels"] = unmeasured
    if solution.stall_us:
        predicted["stall_us"] = solution.stall_us
    if solution.offloads:
        predicted["offloaded_bytes"] = sum(int(graph.storages.size_bytes[each.storage]) for each in solution.offloads)
    if state := state_on_host(graph):
        predicted["state_host_bytes"] = state
        predicted["state_wait_us"] = state_wait_us(graph, profile.costs)
    if layers:
        predicted["weights_host_bytes"] = pinned_bytes(layers.values())
        predicted["weights_wait_us"] = weights_us
    if predicted["peak_bytes"] != curve.peak_bytes:
        predicted["evaluator_peak_bytes"] = curve.peak_bytes
    untouched = execution.without_plan(problem, None if judge is None else lambda: judge.peak(problem, ()))
    return Plan(
        regions=to_refs(graph, solution.regions, problem.space.modules),
        fingerprints=graph.fingerprints,
        about={name: value for name, value in graph.about.items() if name != CALLED_MODULES},
        target=profile.target.name,
        costs=profile.costs.source,
        budget_bytes=problem.budget_bytes,
        predicted=predicted,
        without_checkpointing={**problem.without_checkpointing, "peak_bytes": untouched},
        solver={
            "name": solution.solver,
            "status": solution.status,
            "objective_us": solution.objective_us,
            "bound_us": solution.bound_us,
            "gap": solution.gap,
            "wall_s": round(solution.wall_s, 3),
        },
        space=problem.space.about(),
        execution=execution.name,
        identities=graph.identities,
        offloads=to_offload_refs(problem.memory, solution.regions, solution.offloads),
    )
