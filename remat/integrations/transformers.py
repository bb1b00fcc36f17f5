"""A plan in the `Trainer` of Hugging Face transformers.

    Trainer(model, arguments, callbacks=[RematCallback("gpt2.plan.json")], ...)

The Trainer puts autocast around the model's forward (`accelerator.prepare`) when training starts, before
`on_train_begin`. So the plan is applied when the Trainer has been made, in `on_init_end`; that also comes before
distributed wrappers and before the optimizer. Only a model that is made anew at the start of training
(`model_init`) is not there yet: it must come out of `model_init` with its plan.

The Trainer does not call `model(**batch)`: it passes the number of items in the batch, for the loss. `step` does the
same, and is what a Workload for the Trainer should have as its step.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, has_plan
from remat.execution.planned_forward import OnLarger
from remat.integrations.settings import outputs_in_fp32, plan_from, require_autocast, warn_of_accumulation


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss as the Trainer computes it for models that take `num_items_in_batch`: the step for a Workload."""
    items = torch.ones((), device=batch["labels"].device)  # the Trainer counts labels; what counts here is the shape
    outputs = model(**batch, num_items_in_batch=items)
    if torch.is_autocast_enabled(batch["labels"].device.type):
        outputs = outputs_in_fp32(outputs)
    loss: torch.Tensor = outputs["loss"]
    return loss


class RematCallback(TrainerCallback):
    """Applies `plan` to the Trainer's model; see `remat.apply` for `on_larger`.

    Raises UsageError or PlanMismatch where the arguments of the Trainer cannot go with the plan, and warns where its
    own checkpointing is on too: the plan decides what is recomputed.
    """

    def __init__(self, plan: Plan | str | os.PathLike[str], *, on_larger: OnLarger = "warn"):
        self.plan = plan_from(plan)
        self.on_larger = on_larger

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._apply(args, kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if has_plan(model):
            return
        if "forward" in model.__dict__:  # by accelerate, for mixed precision
            raise UsageError(
                "the model that is about to be trained has no plan, and its forward is wrapped already: give "
                "RematCallback to the Trainer when making it, and with model_init= call remat.apply in that function."
            )
        self._apply(args, model)

    def _apply(self, args: TrainingArguments, model: nn.Module) -> None:
        if args.n_gpu > 1:
            raise UsageError(
                f"the Trainer would spread each batch over {args.n_gpu} GPUs with nn.DataParallel, which copies models "
                "without their plans; start one process per GPU with torchrun."
            )
        autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
        require_autocast(self.plan, autocast, f"TrainingArguments(bf16={args.bf16}, fp16={args.fp16})")
        if own_checkpointing(args):
            warnings.warn(
                "gradient_checkpointing is on in TrainingArguments, and a plan is applied too: layers would be "
                "recomputed twice, or the plan not fit the model. Turn it off; the plan decides what is recomputed.",
                stacklevel=2,
            )
        warn_of_accumulation(self.plan, args.gradient_accumulation_steps, "TrainingArguments")
        apply(model, self.plan, on_larger=self.on_larger)


def own_checkpointing(args: TrainingArguments) -> bool:
    """Whether the Trainer will turn on the model's own checkpointing, under the name that its version has for it."""
    return any(getattr(args, name, False) for name in ("gradient_checkpointing", "activation_checkpointing"))
