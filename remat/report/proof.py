"""Proof and next steps: the plan's proved quality, its limits, and ways to improve it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remat.evaluation.form import CAPTURED_FORM, WHOLE_LOSS_OVERHEAD, form_of
from remat.evaluation.plan import Plan
from remat.report.material import Material
from remat.units import GIB, gib, ms

NEAR = 0.01  # of the peak: moments as high as that count as limiting


@dataclasses.dataclass(frozen=True)
class Fact:
    """A row: its name, its value, and the meaning."""

    name: str
    value: str
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class NextStep:
    """A suggested change: its gain, and the command that makes or tests it."""

    what: str
    gain: str
    command: str = ""


def proof_of(material: Material) -> tuple[Fact, ...]:
    """List facts about the quality of the plan; empty without a plan."""
    return tuple(_proof(material, material.plan)) if material.plan is not None else ()


def _proof(material: Material, plan: Plan) -> Iterator[Fact]:
    solver = plan.solver
    if solver["status"] == "optimal":
        yield Fact("verdict", "proved optimal", "no plan of the space below takes less time within the budget")
    else:
        yield Fact("verdict", "the best plan found", "not proved optimal: a longer search may find or prove more")
    yield Fact("bound", ms(abs(solver["bound_us"])), _bound(plan))
    yield Fact("gap", f"{100 * solver['gap']:.2f} %", "of what the plan adds may be avoidable, and no more")
    yield Fact("solver", str(solver["name"]), f"{solver['wall_s']:.1f} s")
    yield Fact("space", *_space(plan))
    yield Fact("peak judged by", *_judge(plan))
    yield from _limits(material, plan)


def _bound(plan: Plan) -> str:
    if form_of(plan.about) == CAPTURED_FORM:
        return "every plan within the budget recomputes for that or more"
    if plan.solver["bound_us"] < 0:
        return "no plan within the budget makes the step shorter by more"
    return "every plan within the budget makes the step longer by that or more"


def _space(plan: Plan) -> tuple[str, str]:
    space = plan.space
    if "modules" in space:
        return f"{space['modules']} modules", "any of them may be a region; nothing is saved inside"
    nesting = f"regions nested up to {space.get('nesting_depth', 1)} deep"
    saved = f"{space.get('saveable_nodes', 0)} nodes that a region may save"
    return f"{space.get('segments', 0)} segments", f"any run of them may be a region; {saved}; {nesting}"


def _judge(plan: Plan) -> tuple[str, str]:
    if plan.predicted.get("judged_by") == "replay":
        return "replay", "the step as it will run under the plan was run on fake tensors, allocation by allocation"
    return "evaluator", "computed from the recorded step; there was no model to replay"


def _limits(material: Material, plan: Plan) -> Iterator[Fact]:
    """Iterate over the limits on time: the moment at the budget, and the price of more memory."""
    unused = plan.budget_bytes - plan.predicted["peak_bytes"]
    yield Fact("binding moment", str(plan.predicted["peak_at"]), f"{gib(unused)} of the budget are left there")
    if material.profile is not None:
        alive = material.memory.curve(material.regions).alive_bytes
        near = int((np.asarray(alive) >= (1 - NEAR) * alive.max()).sum())
        yield Fact("moments as high", f"{near:,} of {len(alive):,}", "operators within 1 % of the peak")
    price = _price_of_a_gib(material)
    if price is not None:
        yield Fact("one more GiB", f"{-100 * price:+.2f} % of the step", "by the curve, between its points")


def added_at(sweep: Mapping[str, Any], budget_bytes: float) -> float | None:
    """Return the curve's added time at a budget, interpolated between points; None outside."""
    points = [(point["peak_bytes"], point["overhead"]) for point in sweep["points"]]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= budget_bytes <= x1:
            return float(y0 + (y1 - y0) * (budget_bytes - x0) / ((x1 - x0) or 1))
    return 0.0 if points and budget_bytes > points[-1][0] and points[-1][1] == 0 else None


def _price_of_a_gib(material: Material) -> float | None:
    """Return the share of the step that one more GiB saves; a sweep knows it for the original form."""
    plan, sweep = material.plan, material.sweep
    if plan is None or sweep is None or form_of(plan.about) != CAPTURED_FORM:
        return None
    here, there = (added_at(sweep, size) for size in (plan.budget_bytes, plan.budget_bytes + GIB))
    return None if here is None or there is None else here - there


# Where to look next


def next_steps(material: Material) -> tuple[NextStep, ...]:
    """List changes that are known to help: the plan's own first, then levers that were tried."""
    own = _of_plan(material, material.plan) if material.plan is not None else ()
    return (*own, *_levers(material))


def _of_plan(material: Material, plan: Plan) -> Iterator[NextStep]:
    predicted, solver = plan.predicted, plan.solver
    form = form_of(plan.about)
    if form != CAPTURED_FORM:
        whole = predicted.get(WHOLE_LOSS_OVERHEAD)
        instead = "does not fit" if whole is None else f"adds {100 * whole:.1f} % instead of {_percent(plan)}"
        yield NextStep("The step as it was captured, every gradient bitwise", instead, "remat plan --exact")
    if not form.fused and plan.execution == "eager":
        gain = "often less memory and less time; not computed here"
        yield NextStep("Pointwise and reducing nodes compiled in groups", gain, "remat plan --fuse")
    if solver["status"] != "optimal" and solver["gap"] > 0:
        at_most = solver["objective_us"] - solver["bound_us"]
        share = at_most / (plan.without_checkpointing["step_time_us"] or 1.0)
        gain = f"at most {ms(at_most)}, {100 * share:.2f} % of the step"
        yield NextStep("A better plan, which nothing rules out", gain)
    yield from _reserved(plan)
    if (price := _price_of_a_gib(material)) and price > 0:
        budget = gib(plan.budget_bytes + GIB).replace(" ", "")
        yield NextStep("One more GiB", f"{100 * price:.2f} % of the step", f"remat plan --budget {budget}")


def _percent(plan: Plan) -> str:
    return f"{100 * plan.predicted['overhead']:.1f} %"


def _reserved(plan: Plan) -> Iterator[NextStep]:
    """Suggest the caching allocator's other setting if it would reserve less."""
    found = plan.predicted.get("allocator") or ()
    if len(found) == 2 and found[1]["reserved_bytes"] < found[0]["reserved_bytes"]:
        less = found[0]["reserved_bytes"] - found[1]["reserved_bytes"]
        setting = f"PYTORCH_CUDA_ALLOC_CONF={found[1]['settings']}"
        yield NextStep("Other settings of the allocator", f"{gib(less)} less are reserved (simulated)", setting)


def _levers(material: Material) -> Iterator[NextStep]:
    for lever in material.levers or ():
        gain = f"frees {gib(lever.frees_bytes)}, leaves {gib(lever.peak_bytes)} without checkpointing"
        yield NextStep(lever.what[0].upper() + lever.what[1:], gain)


def advice_is_missing(material: Material) -> bool:
    return material.levers is None


# What was measured


def validation_facts(validation: Mapping[str, Any] | None) -> tuple[Fact, ...]:
    """List the results of a validation."""
    return tuple(_validated(validation)) if validation is not None else ()


def _validated(found: Mapping[str, Any]) -> Iterator[Fact]:
    size = f"batch {found['batch_size']}" + (f" x {found['seq_len']}" if found.get("seq_len") else "")
    yield Fact("verdict", "passed" if found["passed"] else "FAILED", f"on {found['device']}, {size}")
    measured, predicted, untouched = found["measured"], found["predicted"], found["untouched"]
    apart = round(measured["peak_bytes"] / predicted["peak_bytes"] - 1, 5) if predicted["peak_bytes"] else 0.0
    yield Fact(
        "peak", gib(measured["peak_bytes"]), f"predicted {gib(predicted['peak_bytes'])}, {100 * apart + 0.0:+.3f} %"
    )
    if "reserved_bytes" in measured and "reserved_bytes" in predicted:
        yield Fact("reserved", gib(measured["reserved_bytes"]), f"simulated {gib(predicted['reserved_bytes'])}")
    yield Fact("budget", "kept" if found["within_budget"] else "EXCEEDED")
    slower = measured["step_time_us"] / untouched["step_time_us"] - 1 if untouched["step_time_us"] else 0.0
    against = f"{100 * slower:+.1f} % of the eager baseline's {ms(untouched['step_time_us'])}"
    yield Fact("step time", ms(measured["step_time_us"]), against)
    yield Fact("loss", "equal" if found["loss_equal"] else "DIFFERENT")
    how = "bitwise" if found.get("gradients_bitwise") else "as promised: what differs is as near to float64"
    yield Fact(
        "gradients", "equal" if found["gradients_equal"] else "DIFFERENT", how if found["gradients_equal"] else ""
    )
    nodes = found["recomputed_nodes"]
    yield Fact("nodes recomputed", str(nodes["observed"]), f"{nodes['planned']} planned")


def compared(comparison: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a comparison, best first."""
    return list(comparison["rows"]) if comparison is not None else []
