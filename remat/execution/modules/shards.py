"""Whether `fully_shard` does with parameters and gradients what a plan counts on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from remat._torch.sharded import sharded_groups
from remat.evaluation.plan import Plan
from remat.units import gib
from remat.workload.optimizers import MasterWeights
from remat.workload.training_loop import TrainingLoop

_STATES = 4  # of a parameter: itself, its gradient, two of Adam


def shards_unlike_planned(plan: Plan, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what differs, by name and in words, and may take the peak of a sharded plan above its budget."""
    loop, peak, budget = TrainingLoop.of(plan.about), plan.predicted["peak_bytes"], plan.budget_bytes
    groups = sharded_groups(model) if loop.shard is not None else []
    told = f"the peak may exceed the planned {gib(peak)} by as much, and with it the budget of {gib(budget)}"

    is_apart = sum(each.is_root for each in groups) > 1  # layers are sharded, and what is around them is not
    stay = [each for each in groups if (is_apart if each.is_root else each.stays)]
    whole = sum(each.elements * each.computed.itemsize for each in stay)
    more = whole if loop.shard == "zero3" else whole // loop.ranks
    if more and peak + more > budget:
        yield (
            "gathered",
            f"{gib(whole)} of parameters stay gathered after forward, and the plan counts {gib(more)} less: {told}. "
            "Plan with zero3, shard the whole model after its layers (`fully_shard(model)`), and leave "
            "`reshard_after_forward` as it is.",
        )
    whole = sum(each.elements * each.stored.itemsize for each in groups if not each.reduces)
    more = whole - whole // loop.ranks
    if more and peak + more > budget:
        yield (
            "whole gradients",
            f"{gib(whole)} of gradients stay whole on every rank (`set_requires_gradient_sync(False)`), and the plan "
            f"counts shards: {told}. Let every micro-batch scatter its gradients.",
        )
    wider = [each for each in groups if each.stored.itemsize > each.computed.itemsize]
    planned = plan.about["parameter_dtypes"]
    more = sum(each.elements * (each.stored.itemsize - each.computed.itemsize) for each in wider)
    more = _STATES * more // loop.ranks
    if more and peak + more > budget and _name(wider[0].stored) not in planned and not _has_masters(plan):
        yield (
            "policy",
            f"shards, gradients and the optimizer's state are in {_name(wider[0].stored)} (MixedPrecisionPolicy), and "
            f"the plan is for {', '.join(planned)}: the peak may exceed the planned {gib(peak)} by about {gib(more)}, "
            f"and with it the budget of {gib(budget)}. Plan with `--dtype bf16-master-grads`, which counts two bytes a "
            "parameter too many.",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_masters(plan: Plan) -> bool:
    return MasterWeights.__name__ in str(plan.about.get("optimizer"))
