"""Phases of a Trainer that generates, beside its training step, and how much memory they take.

Generation and scoring run without gradients, and without the plan: a planned model runs its own forward there. Their
peaks are part of the run's all the same. Both run here on fake tensors, on what the plan's batch is made of:

generation  of all rows of one generation at once, by the model's own `generate`: the prompts, then the last token of
            the longest completions, when the cache of keys and values is full
scoring     of `per_device_train_batch_size` rows, by the Trainer's own method: old log-probabilities, and those of a
            reference, which is the model without its adapters, or one as large

What is there meanwhile is what the plan counts as there before a training step, and gradients where a generation falls
between two micro-batches.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from remat.costing.planning_device import find_planning_device
from remat.errors import DoesNotFit
from remat.evaluation.breakdown import MADE_IN_STEP
from remat.evaluation.plan import Plan
from remat.integrations.trainer_step import as_in_training, stand_in_of
from remat.integrations.trainer_workload import loop_of
from remat.planning.profiling import fake_step
from remat.recording.tracker import Tracker
from remat.units import gib
from remat.workload.workload import Workload

_REMEDIES = {
    "generation": "lower steps_per_generation (or generation_batch_size) or max_completion_length",
    "scoring": "lower per_device_train_batch_size or max_completion_length",
}


def phases_of(trainer: Any, workload: Workload, plan: Plan, target: str) -> dict[str, int]:
    """Return the peak of each phase of the run in bytes, including the training step's under `plan`.

    Raises DoesNotFit if a phase that no plan changes exceeds the budget.
    """
    there = _there_before(trainer, workload, plan)
    peaks = {name: there + size for name, size in _made(trainer, workload, target).items()}
    for name, peak in peaks.items():
        if peak > plan.budget_bytes:
            raise DoesNotFit(
                f"{name} peaks at {gib(peak)}, above the budget of {gib(plan.budget_bytes)}, and runs without the plan "
                f"(the training step takes {gib(plan.predicted['peak_bytes'])}): {_REMEDIES[name]}, or raise the "
                "budget."
            )
    return {"training step": plan.predicted["peak_bytes"], **peaks}


def said_of(peaks: dict[str, int]) -> str:
    highest = max(peaks, key=peaks.__getitem__)
    each = ", ".join(f"{name} {gib(size)}" for name, size in peaks.items())
    return f"the highest peak is that of the {highest} ({each})"


def _there_before(trainer: Any, workload: Workload, plan: Plan) -> int:
    parts = plan.predicted.get("breakdown", {})
    there = sum(size for name, size in parts.items() if name not in MADE_IN_STEP)
    generates_every = trainer.args.steps_per_generation * trainer.num_iterations
    if generates_every % trainer.args.gradient_accumulation_steps:
        there += sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
    return there


def _made(trainer: Any, workload: Workload, target: str) -> dict[str, int]:
    """Return the peak bytes of each phase, beyond those alive before it."""
    place = find_planning_device(target, None)
    step = fake_step(workload, place, loop=loop_of(trainer))
    phases = {} if trainer.use_vllm else {"generation": _generation}
    if any(name.endswith("logps") for name in step.batch["inputs"]):
        phases["scoring"] = _scoring
    found = {}
    for name, phase in phases.items():
        tracker = Tracker(place.target.alignment_bytes)
        with step.between_steps(tracker), as_in_training(step.model, workload.autocast):
            since = phase(trainer, step.model, step.batch["inputs"], tracker)
        found[name] = max(int(tracker.alive()[part].max(initial=0)) for part in since)
    return found


def _generation(trainer: Any, model: nn.Module, inputs: Any, tracker: Tracker) -> tuple[slice, ...]:
    """Generate the first token, and the last; return the operators that count."""
    config = copy.deepcopy(trainer.generation_config)
    config.max_new_tokens, config.return_dict_in_generate = 1, True
    rows = trainer.args.steps_per_generation

    def text(completion: int) -> dict[str, Any]:
        parts = (("input_ids", "ids"), ("attention_mask", "mask"))
        return {
            name: torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"][:, :completion]], dim=1).repeat(rows, 1)
            for name, of in parts
        }

    longest = inputs["completion_ids"].shape[1]
    model.generate(**text(0), generation_config=config)  # type: ignore[operator]
    first = slice(0, tracker.op_count)
    if longest < 2:
        return (first,)
    cache = model.generate(**text(longest - 2), generation_config=config).past_key_values  # type: ignore[operator]
    last = slice(tracker.op_count, None)
    model.generate(**text(longest - 1), past_key_values=cache, generation_config=config)  # type: ignore[operator]
    return first, last


def _scoring(trainer: Any, model: nn.Module, inputs: Any, tracker: Tracker) -> tuple[slice, ...]:
    ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
    keep = inputs["completion_ids"].shape[1]
    stand_in_of(trainer, model)._get_per_token_logps_and_entropies(model, ids, mask, keep, batch_size=len(ids))
    return (slice(None),)
