"""Modules around the model: what a Trainer holds that calls its model, and has tensors of its own.

The losses of sentence-transformers are modules that hold the model which they call, once for each column of a batch,
and some have weights, or a guide, beside it. Others are a part of the model, or share weights with it. The step that is
planned runs on a copy of the model, so it needs copies of these modules that hold that one. Their own tensors are there
before the step, as the batch is, and are made a part of it; gradients and states of their weights are not counted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
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
    memo = _parts(trainer.model, model)
    for name, tensor in tensors_around(trainer).items():
        memo[id(tensor)] = tensors[name].detach().requires_grad_(tensor.requires_grad)
    return {name: copy.deepcopy(getattr(trainer, name), memo) for name in around_names(trainer)}


def around_names(trainer: Any) -> list[str]:
    """Return the attributes of a Trainer that are or hold modules around its model."""
    return list(dict.fromkeys(attribute for attribute, _, _ in _around(trainer)))


def _parts(whole: nn.Module, copied: nn.Module) -> dict[int, Any]:
    """Return the parts of a model's copy by the ids of the model's: itself, its modules, parameters and buffers."""
    named = [*whole.named_modules(), *whole.named_parameters(), *whole.named_buffers()]
    get = {path: functools.reduce(getattr, path.split("."), copied) if path else copied for path, _ in named}
    return {id(part): get[path] for path, part in named}


def described(trainer: Any) -> list[Any]:
    """Describe the modules around a Trainer's model, to tell them from those of another Trainer."""
    own = {id(module) for module in trainer.model.modules()}
    return [
        [attribute, name, path, f"{type(each).__module__}.{type(each).__qualname__}", settings_of(each)]
        for attribute, name, module in _around(trainer)
        for path, each in module.named_modules()
        if id(each) not in own
    ]


def settings_of(module: nn.Module) -> dict[str, str]:
    """Return numbers, text and functions that a module has as attributes."""
    found = {}
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str, list, tuple, type(None))):
            found[name] = repr(value)
        elif not isinstance(value, nn.Module) and callable(value):
            found[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return found


def _around(trainer: Any) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (attribute, key in a container of modules, module) for modules that contain the model, or a part of it.

    Others in such a container come along.
    """
    model = trainer.model
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for attribute, value in vars(trainer).items():
        if attribute in _APART:
            continue
        found = [(name, module) for name, module in _items(value) if isinstance(module, nn.Module)]
        if any(not own.isdisjoint(_ids_of_parts(module)) for _, module in found):
            yield from ((attribute, str(name), module) for name, module in found)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else (("", value),)


def _ids_of_parts(module: nn.Module) -> Iterator[int]:
    return (id(part) for part in (*module.modules(), *module.parameters(), *module.buffers()))


_APART = ("model", "model_wrapped", "deepspeed", "ref_model", "reward_funcs", "train_dataset", "eval_dataset")
