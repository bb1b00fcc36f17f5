"""The model of a Trainer, as a plan needs it: a copy with accelerate's wrappers off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remat._torch.training import without_modes
from remat.capture.beside_parameters import HOLDERS, carry_over
from remat.capture.copies import copied
from remat.execution.accelerate_autocast import take_off
from remat.execution.model_as_planned import checkpoints_itself
from remat.host.weights import weights_on_host

INPUTS_HOOK = "make_inputs_require_grad"  # of transformers (plural) and of peft


def own_checkpointing(args: Any, model: nn.Module) -> bool:
    """Return whether the model's own checkpointing is on (as by LLaMA-Factory's loader), or the Trainer turns it on.

    The argument for it has two names, by the version of transformers.
    """
    named = ("gradient_checkpointing", "activation_checkpointing")
    return any(getattr(args, name, False) for name in named) or checkpoints_itself(model)


def turn_off_checkpointing(model: nn.Module) -> None:
    """Turn the model's own checkpointing off, and the gradients of its inputs, which adapters need for that alone."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for key, hook in list(module._forward_hooks.items()):  # transformers may hold a handle of the last one only
            if getattr(hook, "__name__", "").startswith(INPUTS_HOOK):
                del module._forward_hooks[key]


def copy_of_model(model: nn.Module, *, checkpoints: bool = True) -> nn.Module:
    """Copy a model in training mode; on the meta device, its shapes alone.

    checkpoints  whether the model's own checkpointing stays as it is; otherwise it is off, as `RematCallback` does
    """
    on_meta = torch.get_default_device().type == "meta"
    memo: dict[int, Any] = {}
    if (on_host := weights_on_host(model)) is not None:
        memo[id(on_host)] = on_host  # which no copy has a part in
    if on_meta:
        for tensor in (*model.parameters(), *model.buffers()):
            bare = _on_meta(tensor)
            kept = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
            carry_over(tensor, kept, lambda beside: memo.setdefault(id(beside), _on_meta(beside)))
            for name in HOLDERS:  # which a library's layer may hold too
                if hasattr(kept, name):
                    memo[id(getattr(tensor, name))] = getattr(kept, name)
            memo[id(tensor)] = kept
    made = copied(model, memo, _bare)
    if not checkpoints:
        turn_off_checkpointing(made)
    return made.train()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _bare(model: nn.Module) -> nn.Module:
    """Restore in place the forward of `model` that accelerate has wrapped."""
    take_off(model)
    return model


def real() -> Any:
    """Return a context of real tensors on the host, whatever modes are active around it."""
    return without_modes()
