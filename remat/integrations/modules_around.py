"""Modules around the model: what a Trainer holds that calls its model, and has tensors of its own.

The losses of sentence-transformers are modules that hold the model which they call, once for each column of a batch,
and some have weights, or a guide, beside it. The step that is planned runs on a copy of the model, so it needs copies
of these modules that hold that one. Their own tensors are there before the step, as the batch is, and are made a part
of it; gradients and states of their weights are not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


def tensors_around(trainer: Any) -> Tensors:
    """Return the tensors of modules around the Trainer's model, by attribute and name, without the model's."""
    own = {id(tensor) for tensor in (*trainer.model.parameters(), *trainer.model.buffers())}
    found: Tensors = {}
    for attribute, name, module in _around(trainer):
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in own:
                found[f"{attribute}.{name}.{path}"] = tensor
    return found


def around(trainer: Any, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copy the attributes of `trainer` around `model`, with `tensors` in place of their own."""
    memo: dict[int, Any] = {id(trainer.model): model}
    for name, tensor in tensors_around(trainer).items():
        memo[id(tensor)] = tensors[name].detach().requires_grad_(tensor.requires_grad)
    attributes = dict.fromkeys(attribute for attribute, _, _ in _around(trainer))
    return {name: copy.deepcopy(getattr(trainer, name), memo) for name in attributes}


def described(trainer: Any) -> list[Any]:
    """Describe the modules around a Trainer's model, to tell them from those of another Trainer."""
    own = {id(module) for module in trainer.model.modules()}
    return [
        [attribute, name, path, f"{type(each).__module__}.{type(each).__qualname__}", _settings(each)]
        for attribute, name, module in _around(trainer)
        for path, each in module.named_modules()
        if id(each) not in own
    ]


def _settings(module: nn.Module) -> dict[str, str]:
    """Return numbers, text and functions that a module has as attributes."""
    found = {}
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str, list, tuple, type(None))):
            found[name] = repr(value)
        elif not isinstance(value, nn.Module) and callable(value):
            found[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return found


def _around(trainer: Any) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (attribute, key in a dictionary of modules, module) for every module that contains the model."""
    for attribute, value in vars(trainer).items():
        if attribute in _THE_MODEL:
            continue
        for name, module in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(module, nn.Module) and any(each is trainer.model for each in module.modules()):
                yield attribute, str(name), module


_THE_MODEL = ("model", "model_wrapped", "deepspeed")
