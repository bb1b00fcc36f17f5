"""A Trainer's reference model (DPO's `ref_model`): there before the step, as the batch is, of which it is a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from remat.execution.accelerate_autocast import autocast_of, is_under_autocast
from remat.integrations.settings import outputs_in_fp32
from remat.integrations.trainer_model import copy_of_model, real
from remat.workload.reference import call_reference

REFERENCE, AROUND, JUDGES = "reference", "around", "judges"  # their tensors in a batch


def reference_of(trainer: Any) -> nn.Module | None:
    found = getattr(trainer, "ref_model", None)
    return found if isinstance(found, nn.Module) else None


def named_tensors_of(model: nn.Module | None) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers()) if model is not None else ()
    return {name: tensor.detach() for name, tensor in named}


class Reference:
    """A model of shapes only, called with a batch's tensors as its own, under autocast, as accelerate does."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None, tensors: dict[str, torch.Tensor]):
        learns = {name for name, p in model.named_parameters() if p.requires_grad}  # whose casts autocast keeps
        self._tensors = {name: t.detach().requires_grad_(name in learns) for name, t in tensors.items()}
        self._model, self._autocast = model, autocast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(iter(self._tensors.values())).device.type
        with torch.autocast(device, dtype=self._autocast, enabled=self._autocast is not None):
            outputs = call_reference(self._forward, *args, **kwargs)
        torch.clear_autocast_cache()
        return outputs if self._autocast is None else outputs_in_fp32(outputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._tensors, args, kwargs)


class BareReference:
    """Makes the reference model of `trainer`, with shapes only, from its tensors in a batch, which alone count."""

    def __init__(self, trainer: Any, reference: nn.Module):
        with real(), torch.device("meta"):
            self._bare = copy_of_model(reference).train(reference.training)
        is_prepared = is_under_autocast(reference)  # as Trainers of TRL do it; training prepares the model alone
        self._autocast = autocast_of(trainer.accelerator, reference) if is_prepared else None

    def __call__(self, tensors: dict[str, torch.Tensor]) -> Reference:
        return Reference(self._bare, self._autocast, tensors)


def bare_reference(trainer: Any) -> BareReference | None:
    """Return a maker of the reference model of `trainer`, if it has one."""
    found = reference_of(trainer)
    return None if found is None else BareReference(trainer, found)
