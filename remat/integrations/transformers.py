"""A plan in the `Trainer` of Hugging Face transformers, and in TRL's.

    Trainer(model, arguments, callbacks=[RematCallback(budget="20GiB")], ...)    # plans when training begins
    Trainer(model, arguments, callbacks=[RematCallback("gpt2.plan.json")], ...)  # applies a plan made before
    Trainer(model, arguments, callbacks=[RematCallback(budget="20GiB", compile=True)], ...)  # compiled, in its budget

A plan goes around the forward that a Trainer has made of the model's (TRL's has a head of its own), and inside what
accelerate puts around that (autocast). Trainers of TRL change the forward after the last callback of their
construction, accelerate when training starts. So the plan is applied after both, in `on_train_begin`, and accelerate's
wrapper is put around it again. What the Trainer's arguments say against a plan is said when it is made.

The Trainer does not call `model(**batch)`: it passes the number of items in the batch, for the loss. `step` does the
same, and is what a Workload for the Trainer should have as its step. `workload_of` makes a Workload of all that a built
Trainer does.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from remat.capture import trl_head
from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.execution.accelerate_autocast import autocast_put_by, beneath_autocast, name_of
from remat.execution.apply import apply, has_plan, planned_forward, remove
from remat.execution.planned_forward import PlannedForward
from remat.execution.reports import OnLarger
from remat.host.weights import weights_on_host
from remat.integrations.settings import (
    optimizer_as_planned,
    outputs_in_fp32,
    require_autocast,
    require_no_clipping,
    warn_of_accumulation,
    weights_as_planned,
)
from remat.integrations.trainer_model import own_checkpointing, turn_off_checkpointing
from remat.integrations.trainer_workload import is_trainer, loop_of, workload_of
from remat.units import gib
from remat.workload.replaced_forward import forward_under_plan
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

__all__ = ["RematCallback", "loop_of", "step", "workload_of"]


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss as the Trainer does for models that take `num_items_in_batch`: the step for a Workload."""
    items = torch.ones((), device=batch["labels"].device)  # the Trainer counts labels; here only the shape matters
    outputs = model(**batch, num_items_in_batch=items)
    if torch.is_autocast_enabled(batch["labels"].device.type):
        outputs = outputs_in_fp32(outputs)
    loss: torch.Tensor = outputs["loss"]
    return loss


class RematCallback(TrainerCallback):
    """Applies a plan to the Trainer's model: `plan`, or one for `budget` that it makes from the Trainer itself.

    budget     as for `remat.plan`; the step is that of `workload_of(trainer)`, the loop that of `loop_of(trainer)`
    cache      folder of plans made for `budget`; by default `plans` in remat's cache folder (`planned_trainer.py`)
    on_larger, verify_first_step  see `remat.apply`
    compile    train compiled by `torch.compile`, planned in its first step as by `remat.compile`
    options    more arguments of `remat.plan`, with `budget`: `exact=True`, `limits=`, ..., and `holds=` of its loop;
               with `compile` those of `remat.compile`: `numerics=`, `outside=`, `dynamic=`, `options=` of Inductor

    A model that comes with another plan, from an earlier Trainer, gets the one that this asks for in its place.

    The plan decides what is recomputed: the model's own checkpointing is turned off, whatever turned it on (TRL's
    arguments do, and LLaMA-Factory's loader), unless the plan was made for a model with it.

    Raises UsageError or PlanMismatch if the arguments of the Trainer exclude the plan.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | None = None,
        *,
        budget: str | int | None = None,
        cache: str | os.PathLike[str] | None = None,
        on_larger: OnLarger = "warn",
        verify_first_step: bool = True,
        compile: bool = False,
        **options: Any,
    ):
        if (plan is None) == (budget is None):
            raise UsageError("RematCallback takes a plan, or a budget to make one for: exactly one of the two.")
        if plan is not None and (options or cache is not None):
            raise UsageError(f"{', '.join([*options, 'cache'])} go with budget=, and not with a plan that was made.")
        if compile and (budget is None or cache is not None):
            raise UsageError("compile=True goes with budget=, and without cache=: the first step plans.")
        if known := sorted({"loop", "target"}.intersection(options)):
            raise UsageError(f"RematCallback takes {' and '.join(known)} from the Trainer: leave it out.")
        if budget is not None:
            from remat.planning.budget import require_budget  # nothing of planning is loaded for a plan that was made

            require_budget(budget)
        self._dynamic = options.pop("dynamic", None) if compile else None
        if compile:
            options = compiled_options(budget, on_larger, options)
        self.plan = None if plan is None else Plan.of(plan)
        self._compiles = compile
        self.on_larger, self.verify_first_step = on_larger, verify_first_step
        self._budget, self._options = budget, options
        self._made_for: Any = None  # the Trainer, and its arguments, that the plan within the budget was made for
        self._cache = None if cache is None else Path(cache)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs.get("model")
        self._require_settings(args, model)
        if isinstance(model, nn.Module):
            remove_earlier_plans(model)

    def _require_settings(self, args: TrainingArguments, model: Any) -> None:
        """Raise UsageError, or PlanMismatch, for settings that do not go together."""
        if args.n_gpu > 1:
            raise UsageError(
                f"the Trainer would spread each batch over {args.n_gpu} GPUs with nn.DataParallel, which copies models "
                "without their plans; start one process per GPU with torchrun."
            )
        if args.torch_compile and self._budget is not None:
            raise UsageError(
                "TrainingArguments(torch_compile=True) compiles without a budget. Leave it out, and train compiled "
                'within one by RematCallback(budget="20GiB", compile=True).'
            )
        if self._compiles and "outside" not in self._options and loss_is_outside(args, self._trainer()):
            raise UsageError(
                "this Trainer computes its loss outside of the model (label_smoothing_factor, compute_loss_func), and "
                "RematCallback(compile=True) counts what the model computes: set the bytes of logits and loss aside "
                'with outside="2GiB", or leave compile=True out.'
            )
        if self.plan is None or self._budget is not None:
            return
        if not getattr(model, "_is_accelerate_prepared", False):  # then training decides what stays of its autocast
            autocast = name_of(autocast_put_by(self._trainer().accelerator))
            setting = f"TrainingArguments(bf16={args.bf16}, fp16={args.fp16}) on {args.device.type}"
            require_autocast(self.plan, autocast, setting)
        warn_of_accumulation(self.plan, args.gradient_accumulation_steps, "TrainingArguments")
        if args.max_grad_norm and args.max_grad_norm > 0:
            require_no_clipping(self.plan, f"TrainingArguments(max_grad_norm={args.max_grad_norm})")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        gives_way = own_checkpointing(args, model) and not (self.plan and self.plan.about.get("own_checkpoints"))
        if gives_way:
            turn_off_checkpointing(model)
        from remat.integrations.planned_trainer import plan_of, tell

        trainer = self._trainer()
        asks = weakref.ref(trainer), args.to_json_string()
        if has_plan(model):
            there = planned_forward(model).plan
            if there == self.plan and (self._budget is None or self._made_for == asks):
                optimizer_as_planned(self.plan, kwargs.get("optimizer"))
                return
            if weights_on_host(model) is not None:  # which no copy for planning has
                tell(trainer, f"weights of this model are on the host: its plan for {gib(there.budget_bytes)} stays")
                return
            remove(model)
        if self._compiles:
            if gives_way:
                tell(trainer, GIVES_WAY)
            compile_in_place(model, args, kwargs.get("optimizer"), self._options, self._dynamic)
            return
        if self._budget is not None:
            self.plan = plan_of(trainer, self._budget, self._cache, **self._options)
        plan, self._made_for = self.plan, asks
        assert plan is not None
        if gives_way:
            tell(trainer, GIVES_WAY)
        if trl_head.is_on(model) and trl_head.selects_rows(trainer.args.device):
            tell(trainer, SCORES_ALL)
        weights_as_planned(plan, model)
        with beneath_autocast(model):
            apply(model, plan, on_larger=self.on_larger, verify_first_step=self.verify_first_step)
        optimizer_as_planned(plan, kwargs.get("optimizer"))

    def planned(self, workload: Workload, *, target: str, loop: TrainingLoop) -> Plan:
        """Return the plan that training would run under on `target`. Raises what `remat.plan` raises."""
        if self._compiles:
            raise UsageError(
                "RematCallback(compile=True) plans in the first step, on the machine that trains: no plan is known yet."
            )
        from remat.integrations.planned_trainer import for_data, holding, require_options
        from remat.planning.planner import plan

        options = for_data(workload, self._options)
        loop = holding(loop, options)
        require_options(options)
        return self.plan or plan(workload, budget=self._budget or "auto", target=target, loop=loop, **options)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._compiles:
            kwargs["model"]._compiled_call_impl = None  # saved, evaluated and generated from as it was before

    def _trainer(self) -> Any:
        """Return the Trainer that calls: callbacks are given its parts, never itself."""
        frame = inspect.currentframe()
        while frame is not None:
            found: Any = frame.f_locals.get("self")
            if is_trainer(found) and self in found.callback_handler.callbacks:
                return found
            frame = frame.f_back
        raise UsageError("RematCallback was called by no Trainer of transformers; give it to one as a callback.")


def remove_earlier_plans(model: nn.Module) -> None:
    """Take the plans of earlier Trainers out of `model`: Trainers of TRL are about to put a forward of their own on it.

    They stay where weights are on the host, which no copy for planning has, and beneath what others have put on top.
    """
    for module in model.modules() if weights_on_host(model) is None else ():
        if isinstance(forward_under_plan(module), PlannedForward):
            with contextlib.suppress(UsageError):
                remove(module)


def compiled_options(budget: Any, on_larger: OnLarger, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the compiler's backend. Raises UsageError for one that cannot be meant."""
    from remat.compiled.asked import CompileArguments  # nothing of compilers is loaded for plans of eager steps

    of_inductor = options.pop("options", {})
    given = {"budget": budget, "on_larger": on_larger, "holds": "loss", **options}
    try:
        CompileArguments(**given)
    except TypeError as error:
        raise UsageError(f"RematCallback(compile=True) does not take these options: {error}") from error
    return {**of_inductor, **given}


def compile_in_place(
    model: nn.Module, args: TrainingArguments, optimizer: Any, options: dict[str, Any], dynamic: bool | None
) -> None:
    """Let the Trainer's steps of `model` be compiled, and planned as they first are."""
    from remat.compiled.asked import WeakArgument
    from remat.compiled.backend import name_losses

    name_losses(model)
    of_loop = {
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "accumulation": args.gradient_accumulation_steps,
        # An optimizer step's batches are fetched at once; accelerate fetches the next one too, onto the host.
        "batches": args.gradient_accumulation_steps + (args.device.type == "cpu"),
    }
    given = {name: WeakArgument.of(value) for name, value in {"model": model, **of_loop, **options}.items()}
    model.compile(backend="remat", dynamic=dynamic, options=given)


def loss_is_outside(args: TrainingArguments, trainer: Any) -> bool:
    """Return whether the Trainer computes a loss of the model's logits itself."""
    return bool(args.label_smoothing_factor) or trainer.compute_loss_func is not None


GIVES_WAY = "the plan decides what is recomputed: the Trainer's own gradient_checkpointing is off"
SCORES_ALL = (
    "under the plan TRL's head scores every position, not those alone whose labels count: losses may differ in their "
    "last bits from those without a plan"
)
