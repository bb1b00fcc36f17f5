"""A Plan, assembled once from what a study found."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from remat.evaluation.breakdown import at_peak
from remat.evaluation.evaluator import Curve
from remat.evaluation.form import LEFT_WHOLE, SLICED_OVERHEAD, WHOLE_LOSS_OVERHEAD
from remat.evaluation.forwards import forwards_of
from remat.evaluation.graph import CALLED_MODULES, OUTSIDE, Graph
from remat.evaluation.plan import Plan, Prediction, Proof, to_refs
from remat.offloading.refs import to_offload_refs
from remat.planning.layers_on_host import weights_wait_us
from remat.planning.links import pinned_bytes, state_on_host, state_wait_us
from remat.planning.portfolio import BestPlan
from remat.planning.refusals import where
from remat.planning.study import FoundPlan, Study
from remat.recording.fake_step import LAYERS_ON_HOST


def plan_of(study: Study, outcome: BestPlan, budget_bytes: int) -> Plan:
    """Return the plan of an outcome with its proof and the cost of its alternatives."""
    found = outcome.found
    proof = proof_of(found, status=outcome.status, bound_us=outcome.bound_us, gap=outcome.gap)
    if outcome.interrupted:
        proof["interrupted"] = True
    if outcome.cut_short:
        proof["cut_short"] = True
    predicted = predict(study, found)
    if outcome.captured is not None:
        predicted[WHOLE_LOSS_OVERHEAD] = predict(study, outcome.captured)["overhead"]
    if outcome.left is not None:
        predicted[SLICED_OVERHEAD] = predict(study, outcome.left)["overhead"]
    return assemble(study, found, budget_bytes, predicted, proof)


def assemble(
    study: Study,
    found: FoundPlan,
    budget_bytes: int,
    predicted: Prediction | None = None,
    proof: Proof | None = None,
) -> Plan:
    """Assemble the plan of a solution, by default with the proof that its strategy gave."""
    problem, solution, profile = study.problem(found.at, budget_bytes), found.solution, found.at.profile
    graph = problem.graph
    return Plan(
        regions=to_refs(graph, solution.regions, problem.space.modules),
        fingerprints=graph.fingerprints,
        about=_about(study, found),
        target=profile.target.name,
        costs=profile.costs.source,
        budget_bytes=budget_bytes,
        predicted=predicted or predict(study, found),
        without_checkpointing=study.without_checkpointing(),
        solver=proof or proof_of(found),
        space=problem.space.about(),
        execution=study.how.name,
        identities=graph.identities,
        offloads=to_offload_refs(problem.memory, solution.regions, solution.offloads),
    )


def _peak_of_backward(graph: Graph, curve: Curve) -> int:
    """Return the most bytes from the first operator on that goes back through a captured graph.

    Before it runs the backward of a loss outside of the model, which may need the model's outputs.
    """
    calls = np.array([node.call for node in graph.nodes])
    within = (curve.op >= graph.forward_end) & (calls[graph.op_node[curve.op]] != OUTSIDE)
    begin = int(within.argmax()) if within.any() else graph.forward_end
    return int(curve.alive_bytes[begin:].max())


def _kept_before(graph: Graph, curve: Curve) -> list[int]:
    """Return the bytes that the step has made and that are alive as each of its forwards begins, if it has several."""
    forwards = forwards_of(graph.about, len(graph.call_nodes))
    if len(forwards) == 1:
        return []
    last = len(graph.nodes) - 1  # in place of a forward that makes nothing
    firsts = [next((node for call in graph.call_nodes[each.first :] for node in call), last) for each in forwards]
    begins = [int((curve.op >= graph.nodes[node].first).argmax()) for node in firsts]
    fixed_bytes = sum(graph.fixed_bytes.values())
    return [max(int(curve.alive_bytes[at - 1]) - fixed_bytes, 0) if at else 0 for at in begins]


def _about(study: Study, found: FoundPlan) -> dict[str, Any]:
    about = {name: value for name, value in found.at.profile.graph.about.items() if name != CALLED_MODULES}
    reasons = study.forms.left_whole if study.forms is not None else []
    return {**about, LEFT_WHOLE: reasons} if reasons else about


def proof_of(found: FoundPlan, **better: Unpack[Proof]) -> Proof:
    """Return the proof that the strategy of a plan gave, with what is known `better`."""
    solution = found.solution
    own: Proof = {
        "name": solution.solver,
        "status": solution.status,
        "objective_us": found.price_us,
        "bound_us": found.bound_us,
        "gap": solution.gap,
        "wall_s": round(solution.wall_s, 3),
    }
    return {**own, **better}


def predict(study: Study, found: FoundPlan) -> Prediction:
    """Predict peak and time of the step under a plan.

    The peak is the replay's if the plan was replayed. `evaluator_peak_bytes` then records a different peak by the
    evaluator, which modules may have; for a plan that runs eagerly, it is a bug.
    """
    problem, solution, profile = study.problem(found.at, 0), found.solution, found.at.profile
    graph, memory = problem.graph, problem.memory.offloading(solution.offloads)
    recompute_us = memory.recompute_time_us(solution.regions, profile.costs.per_op_us(graph))
    weights_us = weights_wait_us(profile, memory, solution.regions)
    added_us = recompute_us + solution.stall_us + weights_us
    curve, plain_us = memory.curve(solution.regions), study.step_time_us
    device_us, host_us = problem.step_time_us + added_us, study.host_time_us(found.at, solution.regions)
    step_us = max(device_us, host_us)
    peak_bytes = curve.peak_bytes if solution.replayed_bytes is None else solution.replayed_bytes
    predicted: Prediction = {
        "peak_bytes": peak_bytes,
        "peak_at": where(graph, int(curve.op[curve.peak_at])),
        "backward_peak_bytes": peak_bytes - curve.peak_bytes + _peak_of_backward(graph, curve),
        **({"kept_before_bytes": kept} if (kept := _kept_before(graph, curve)) else {}),
        "step_time_us": step_us,
        "recompute_time_us": recompute_us,
        "overhead": (step_us - plain_us) / plain_us if plain_us else 0.0,
        "recomputed_nodes": memory.recomputed_nodes(solution.regions),
        "breakdown": at_peak(memory, solution.regions),
        "judged_by": "replay" if found.is_judged else "evaluator",
    }
    if found.at is not study.captured:
        predicted["form_time_us"] = found.at.extra_us
    if unmeasured := len(profile.costs.about.get("not_measured", ())):
        predicted["unmeasured_kernels"] = unmeasured
    if step_us > device_us or plain_us > study.device_time_us:
        predicted["host_us"], predicted["host_again_us"] = _with_added(study.host_time_us(study.captured), host_us)
        predicted["device_us"], predicted["device_again_us"] = _with_added(study.device_time_us, device_us)
    if solution.stall_us:
        predicted["stall_us"] = solution.stall_us
    if solution.offloads:
        predicted["offloaded_bytes"] = sum(int(graph.storages.size_bytes[each.storage]) for each in solution.offloads)
    if state := state_on_host(graph):
        predicted["state_host_bytes"] = state
        predicted["state_wait_us"] = state_wait_us(graph, profile.costs)
    if layers := graph.about.get(LAYERS_ON_HOST):
        predicted["weights_host_bytes"] = pinned_bytes(layers.values())
        predicted["weights_wait_us"] = weights_us
    if predicted["peak_bytes"] != curve.peak_bytes:
        predicted["evaluator_peak_bytes"] = curve.peak_bytes
    return predicted


def _with_added(plain_us: float, planned_us: float) -> tuple[float, float]:
    """Return the time without the plan, and the time that the plan adds."""
    return plain_us, planned_us - plain_us
