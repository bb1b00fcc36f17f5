"""A workload: a model, a batch, a step, an optimizer and a dtype policy.

It is the only thing that remat needs to know about a training. The functions are called twice: when
planning, under fake tensors, so that no weight is ever allocated; when validating, on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from remat.errors import UsageError
from remat.workload.optimizers import MakeOptimizer, MasterWeights

Step = Callable[[nn.Module, Any], torch.Tensor]

DTYPE_POLICIES = ("amp", "fp32", "bf16", "bf16-master", "bf16-master-grads")
DTypePolicy = Literal["amp", "fp32", "bf16", "bf16-master", "bf16-master-grads"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The description of one training step.

    Attributes:
        name: Name in reports.
        build: () -> nn.Module, in training mode, with any initialisation.
        batch: (batch_size, seq_len) -> the batch of `step`; tensors on the default device.
        step: (model, batch) -> loss, a scalar tensor. Code outside of `model` counts in the peak and is never part of a
            region, see `with_planned_step`.
        batch_size: Default number of samples.
        seq_len: Default sequence length in tokens, None if there is none. Where batches differ in another size, that:
            pixels of an image's side, images in a batch.
        optimizer: (parameters) -> Optimizer, a list of them, or an object that steps some; None for forward and
            backward alone.
        autocast: dtype of `torch.autocast` around `step`, None without autocast.

    Raises:
        UsageError: A field has the wrong type.

    Example:
        >>> workload = remat.Workload("mine", MyModel, make_batch, step, batch_size=32)
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int | None], Any]
    step: Step
    batch_size: int
    seq_len: int | None = None
    optimizer: MakeOptimizer | None = torch.optim.AdamW
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("build", "batch", "step"):
            if not callable(getattr(self, field)):
                raise UsageError(f"workload {self.name!r}: `{field}` must be a function.")
        if isinstance(self.build, nn.Module):
            raise UsageError(f"workload {self.name!r}: `build` must be a function that returns the model, not a model.")
        if self.optimizer is not None and not callable(self.optimizer):
            raise UsageError(
                f"workload {self.name!r}: `optimizer` must be a function of the parameters, as a class of torch.optim "
                f"is, or None, not an object of type {type(self.optimizer).__name__}."
            )
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise UsageError(
                f"workload {self.name!r}: `autocast` must be torch.bfloat16, torch.float16 or None, not "
                f"{self.autocast!r}."
            )
        for field in ("batch_size", "seq_len"):
            value = getattr(self, field)
            if value is None and field == "seq_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"workload {self.name!r}: `{field}` must be a whole number of at least 1, not {value!r}."
                )

    def sized(self, batch_size: int | None = None, seq_len: int | None = None) -> Workload:
        """Return the workload with another default batch or sequence length; None keeps the old one."""
        return dataclasses.replace(
            self,
            batch_size=self.batch_size if batch_size is None else batch_size,
            seq_len=self.seq_len if seq_len is None else seq_len,
        )

    def with_planned_step(self) -> Workload:
        """Return the same workload, in which regions and chunks may hold all that `step` computes.

        This includes a loss outside of the model's forward. Its plans are for `remat.planned_step`.
        """
        build, step = self.build, self.step
        return dataclasses.replace(self, build=lambda: StepModule(build(), step), step=_loss_of)

    def with_dtype(self, policy: DTypePolicy) -> Workload:
        """Return the workload under another dtype policy.

        amp          fp32 weights, bf16 autocast around the step
        fp32         fp32 weights and arithmetic
        bf16         weights, gradients and optimizer state in bf16, no autocast
        bf16-master  weights and gradients in bf16; the optimizer keeps fp32 weights and state
        bf16-master-grads  the same, and fp32 gradients
        """
        weights, optimizer = weights_and_optimizer(policy, self.optimizer)
        build, batch = self.build, self.batch
        return dataclasses.replace(
            self,
            build=lambda: build().to(weights),
            batch=lambda batch_size, seq_len: floats_to(batch(batch_size, seq_len), weights),
            optimizer=optimizer,
            autocast=torch.bfloat16 if policy == "amp" else None,
        )


def require_workload(value: Any) -> None:
    """Raise UsageError where `value`, given to a function of remat, is no Workload."""
    if isinstance(value, Workload):
        return
    kinds = [base.__name__ for base in type(value).__mro__]
    if "Trainer" in kinds:
        how = "Make one by remat.workload_of(trainer)."
    else:
        how = 'Describe it: remat.Workload("mine", build_model, make_batch, step, batch_size=8).'
    raise UsageError(f"the step to plan is a remat.Workload, not {kinds[0]}. {how}")


class StepModule(nn.Module):
    """A model and a step as one module, from a batch to its loss."""

    def __init__(self, model: nn.Module, step: Step):
        super().__init__()
        self.model, self.step = model, step
        self.training = model.training

    def forward(self, batch: Any) -> torch.Tensor:
        return self.step(self.model, batch)


def _loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


def weights_and_optimizer(
    policy: DTypePolicy, optimizer: MakeOptimizer | None
) -> tuple[torch.dtype, MakeOptimizer | None]:
    """Return the weights' dtype under a dtype policy, and its optimizer; see `Workload.with_dtype`."""
    if policy not in DTYPE_POLICIES:
        raise UsageError(f"dtype {policy!r} is not known; choose one of {', '.join(DTYPE_POLICIES)}.")
    if policy.startswith("bf16-master") and optimizer is not None:
        optimizer = functools.partial(MasterWeights, make=optimizer, gradients=policy.endswith("grads"))
    return (torch.bfloat16 if policy.startswith("bf16") else torch.float32), optimizer


def floats_to(batch: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor of `batch` to `dtype`."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch
    )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of `model` that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
