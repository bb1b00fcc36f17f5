"""Answer: the one sentence that stands above everything, and the few figures beside it."""

from __future__ import annotations

import dataclasses

from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan
from remat.report.material import Material
from remat.shown import step_text
from remat.units import gib, ms


@dataclasses.dataclass(frozen=True)
class PlanAnswer:
    """The first lines of the page: a sentence, its basis, and verdicts in a word each (style, text)."""

    title: str
    step: str
    sentence: str
    rests_on: str
    verdicts: tuple[tuple[str, str], ...]


def answer_of(material: Material) -> PlanAnswer:
    about = material.about
    return PlanAnswer(
        title=str(about["workload"]),
        step=f"{step_text(about)}, on {material.target}",
        sentence=_sentence(material),
        rests_on=_rests_on(material),
        verdicts=tuple(_verdicts(material)),
    )


def _sentence(material: Material) -> str:
    plan, name = material.plan, material.about["workload"]
    if plan is None:
        profile = material.profile
        assert profile is not None
        memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
        time = ms(profile.step_time_us)
        peak = gib(memory.peak_without_checkpointing)
        return f"A step of {name} is predicted to need {peak} and to take {time} as it is."
    plain, predicted = plan.without_checkpointing, plan.predicted
    held = f"{name} is predicted to train within {gib(plan.budget_bytes)}"
    if plain["peak_bytes"] > plan.budget_bytes:
        held += f" in place of the {gib(plain['peak_bytes'])} that it needs without a plan"
    return f"{held}, {_price(predicted['overhead'])}.{_measured(material)}"


def _price(added: float) -> str:
    if abs(added) < 5e-5:
        return "and each step to take no longer"
    return f"and each step to take {100 * abs(added):.1f} % {'longer' if added > 0 else 'less time'}"


def _measured(material: Material) -> str:
    """Compare the answer with a measurement of the same step, if there is one."""
    found, about = material.validation, material.about
    if found is None or (found["batch_size"], found.get("seq_len")) != (about["batch_size"], about.get("seq_len")):
        return ""
    return f" Measured, its peak is {gib(found['measured']['peak_bytes'])}."


def _rests_on(material: Material) -> str:
    """Say which figures are predicted, estimated and measured."""
    said = []
    if (plan := material.plan) is not None:
        judge = "replayed on fake tensors" if plan.predicted.get("judged_by") == "replay" else "computed"
        said.append(f"The predicted peak is {gib(plan.predicted['peak_bytes'])}, {judge}.")
        time = f"A step is predicted to take {ms(plan.predicted['step_time_us'])}"
        plain = f"{ms(plan.without_checkpointing['step_time_us'])} without a plan"
        said.append(f"{time}, {plain}; {_times(material)}.")
        said += _on_the_host(plan)
    else:
        said.append(f"{_times(material).capitalize()}.")
    if (found := material.validation) is not None:
        size = f"{found['batch_size']}" + (f" x {found['seq_len']}" if found.get("seq_len") else "")
        said.append(
            f"Measured on {found['device']} at batch {size}: peak {gib(found['measured']['peak_bytes'])}, predicted "
            f"there {gib(found['predicted']['peak_bytes'])}."
        )
    return " ".join(said)


def _on_the_host(plan: Plan) -> list[str]:
    """Say which bytes are on the host, and their cost."""
    said, predicted = [], plan.predicted
    if plan.offloads:
        size = gib(sum(each.size_bytes for each in plan.offloads))
        waited_us = predicted.get("stall_us", 0.0)
        hidden = f"the step waits {ms(waited_us)} for copies" if waited_us else "copies hide behind computation"
        said.append(f"{size} of activations are on the host between forward and backward; {hidden} (estimated).")
    if state := predicted.get("state_host_bytes"):
        wait = ms(predicted["state_wait_us"])
        said.append(
            f"{gib(state)} of optimizer state are on the host between optimizer steps; each waits {wait} "
            "(estimated), with the plan and without."
        )
    return said


def _times(material: Material) -> str:
    if material.costs == "estimated":
        return f"times are estimated from the data sheet of {material.target}, not measured"
    return f"times are sums of operators measured on {material.target}"


def _verdicts(material: Material) -> list[tuple[str, str]]:
    plan, found = material.plan, []
    if plan is not None:
        if plan.solver["status"] == "optimal":
            found.append(("good", "proved optimal"))
        else:
            found.append(("plain", f"within {100 * plan.solver['gap']:.1f} % of the best"))
    found.append(("warn", "times estimated") if material.costs == "estimated" else ("good", "times measured"))
    if material.validation is None:
        found.append(("plain", "not validated"))
    else:
        passed = material.validation["passed"]
        found.append(("good", "validation passed") if passed else ("bad", "validation FAILED"))
    return found
