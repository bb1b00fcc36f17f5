"""The step that a Trainer of transformers, or one of TRL's, runs: as a Workload, read off the built Trainer.

    trainer = SFTTrainer(model, args=args, train_dataset=data)
    plan = remat.plan(remat.workload_of(trainer), budget="20GiB", loop=remat.loop_of(trainer))

Nothing of a Trainer is described a second time, here and in the files `trainer_*.py`. Its own `compute_loss` runs, on a
copy of its model, with a batch that its own collator makes of rows of its own data set.

Rule 1  The model is copied, on the meta device while planning, so that the Trainer's own is never touched. What a
        library put around a forward comes along (`copies.py`); accelerate's autocast does not, a plan goes beneath it.
Rule 2  The batch is the largest that is in sight: the longest rows of those looked at, as many as a device gets. It
        has padding where a batch of rows of several lengths has, even if the longest are all of one. Under fakes it
        has its shapes and its integers, and masks that are known to be of ones; on a device, its data.
Rule 3  Accelerate runs the model's forward under autocast, and nothing else of the step, and hands out fp32. Copies
        of weights that autocast keeps go when that forward ends, and not with the step.
Rule 4  A reference model (DPO's `ref_model`) is there before the step, as the batch is: its tensors are a part of it.
        So are those of modules that hold the model (`modules_around.py`: the losses of sentence-transformers). What
        else the loss has beside the model (`trainer_beside.py`: a teacher) is followed, as for any step.
Rule 5  Trainers read numbers off tensors for their logs, and pick elements by a mask. Outside of the model's forward
        the number is one while planning, unless it is known, and the mask picks all; inside, both are errors as ever.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from remat.capture import trl_head
from remat.capture.beside_parameters import is_quantized
from remat.capture.generators import generators_kept
from remat.errors import UsageError
from remat.execution.accelerate_autocast import autocast_of
from remat.integrations.generated_batches import makes_batches, refuse_unknown_batches
from remat.integrations.modules_around import around
from remat.integrations.trainer_beside import ATTRIBUTES, Beside, as_references, beside, refusing_others
from remat.integrations.trainer_model import copy_of_model, own_checkpointing
from remat.integrations.trainer_reference import AROUND, REFERENCE, BareReference, bare_reference, reference_of
from remat.integrations.trainer_rows import Batch, TrainerRows
from remat.integrations.trainer_step import as_in_training, hooks_too, stand_in_of
from remat.workload.optimizers import MakeOptimizer
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload


@generators_kept()
def workload_of(trainer: Any) -> Workload:
    """Make a workload from the step of a built `Trainer`: its model, loss, optimizer, precision and largest batch.

    Rows are cut or repeated for other batch sizes and lengths.

    Args:
        trainer: A Trainer of transformers or TRL.

    Returns:
        The workload.

    Raises:
        UsageError: No plan can be made for this Trainer, or it has no training data.

    Example:
        >>> plan = remat.plan(remat.workload_of(trainer), loop=remat.loop_of(trainer), budget="20GiB")
    """
    _refuse(trainer)
    rows = TrainerRows(trainer)
    autocast = autocast_of(trainer.accelerator, trainer.model)
    checkpoints = own_checkpointing(trainer.args, trainer.model)
    return Workload(
        name=f"{type(trainer).__name__} of {type(trainer.model).__name__}",
        build=functools.partial(copy_of_model, trainer.model, checkpoints=not checkpoints),
        batch=rows.batch,
        step=functools.partial(_step, trainer, autocast, bare_reference(trainer), beside=beside(trainer)),
        batch_size=rows.batch_size,
        seq_len=rows.length,
        optimizer=_optimizer_of(trainer),
        autocast=autocast,
    )


def loop_of(trainer: Any) -> TrainingLoop:
    """Return the training loop of a built `Trainer`.

    Args:
        trainer: A Trainer of transformers or TRL.

    Returns:
        Its accumulation, clipping, DDP and ranks.

    Raises:
        UsageError: `trainer` is no Trainer.

    Example:
        >>> remat.loop_of(trainer).accumulation
    """
    _require_trainer(trainer)
    args = trainer.args
    return TrainingLoop(
        accumulation=args.gradient_accumulation_steps,
        clip_grad_norm=bool(args.max_grad_norm and args.max_grad_norm > 0),
        ddp=args.world_size > 1 and not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled,
        ranks=args.world_size,
    )


def is_trainer(value: Any) -> bool:
    """Return whether `value` is a Trainer, without importing transformers."""
    return any(
        known.__name__ == "Trainer" and known.__module__ == "transformers.trainer" for known in type(value).__mro__
    )


def _require_trainer(value: Any) -> None:
    if not is_trainer(value):
        raise UsageError(f"a Trainer of transformers or TRL is needed, not {type(value).__name__}.")


def _refuse(trainer: Any) -> None:
    _require_trainer(trainer)
    if trainer.model is None:
        raise UsageError("this Trainer has no model yet (model_init=); give it one, or plan with a Workload.")
    if (reference := reference_of(trainer)) is not None and any(map(is_quantized, reference.parameters())):
        raise UsageError(
            "this Trainer keeps a reference model in 4 bits beside its own (ref_model), which a plan cannot count: "
            "train adapters (peft_config=), whose reference is the same model without them."
        )
    if makes_batches(trainer):
        refuse_unknown_batches(trainer)
    if getattr(trainer.args, "activation_offloading", False):
        raise UsageError("activation_offloading is on, which moves what a plan would count: turn it off.")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UsageError(
            "this Trainer shards its states (DeepSpeed or FSDP), and a plan from the Trainer itself does not: plan "
            "with a Workload and `loop=TrainingLoop(ranks=..., shard=...)`."
        )
    if not trl_head.is_known() and trainer.args.device.type == "cuda" and trl_head.is_on(trainer.model):
        raise UsageError(
            "on CUDA the head that this version of TRL puts on this model selects tokens by their labels: a shape that "
            "depends on data, which no plan can be made for. Use TRL 1.16, or train with transformers' own Trainer: "
            "its loss may run in chunks."
        )


def _step(
    trainer: Any,
    autocast: torch.dtype | None,
    reference: BareReference | None,
    model: nn.Module,
    batch: Batch,
    *,
    beside: Beside,
) -> torch.Tensor:
    """Compute the loss as the Trainer does; serves as Workload.step."""
    stand_in = stand_in_of(trainer, model)
    vars(stand_in).update(beside[ATTRIBUTES])
    copies = around(trainer, model, batch.get(AROUND, {}))
    vars(stand_in).update(copies)
    if reference is not None:
        stand_in.ref_model = reference(batch[REFERENCE])
    with (
        refusing_others(type(trainer).__name__, beside),
        as_references(beside, copies),
        as_in_training(model, autocast) as answers,
        hooks_too(lambda: as_in_training(model, autocast), answers),
    ):
        loss = stand_in.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=batch["items"])
        return loss if _is_scaled(trainer, batch) else loss / trainer.args.gradient_accumulation_steps


def _is_scaled(trainer: Any, batch: Batch) -> bool:
    """Return whether `training_step` leaves the loss unscaled."""
    if trainer.args.gradient_accumulation_steps == 1:
        return True
    if (said := getattr(trainer, "loss_is_scaled_for_ga", None)) is not None:
        return bool(said)
    counted = trainer.model_accepts_loss_kwargs and batch["items"] is not None
    return bool(counted or trainer.compute_loss_func is not None)


# The optimizer


def _optimizer_of(trainer: Any) -> MakeOptimizer:
    """Return a function that makes an optimizer of the Trainer's class, with its settings."""
    made = trainer.optimizer
    made = getattr(made, "optimizer", made)  # accelerate's wrapper
    if made is not None:
        make, settings = type(made), dict(made.defaults)
    elif getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        make, settings = trainer.optimizer_cls_and_kwargs
    else:
        make, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)) or settings.keys() & _MODEL_KEYS:
        raise UsageError(
            f"the optimizer {getattr(make, '__name__', make)!r} of this Trainer is made out of the model itself, which "
            "remat cannot step on fakes; plan with a Workload whose `optimizer` stands for it."
        )
    taken = inspect.signature(make).parameters
    return functools.partial(make, **{name: value for name, value in settings.items() if name in taken})


_MODEL_KEYS = {"params", "model", "optimizer_dict"}
