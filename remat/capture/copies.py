"""Copies of models: `copy.deepcopy`, and what a library put around a forward.

Such a wrapper is a function that closes over methods and modules of the model. A plain copy would go on
calling those of the original. A parametrized module has a class of its own, whose properties close over it: a plain
copy would hold the original by them, and share its cached weights.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from remat.capture.model_state import ModelState


def copied(
    model: nn.Module, memo: dict[int, Any], prepared: Callable[[nn.Module], nn.Module] = lambda made: made
) -> nn.Module:
    """Copy `model`, with forwards bound to the copy.

    memo      as in `copy.deepcopy`: replacements by id for objects that are not copied
    prepared  changes the copy, in place, before its forwards are inspected
    """
    for generator in ModelState(model, data=False).torch_generators:
        memo.setdefault(id(generator), _like(generator))
    made = prepared(copy.deepcopy(model, memo))
    for module, twin in zip(model.modules(), made.modules(), strict=True):
        memo[id(module)] = twin
    for twin in made.modules():
        if isinstance(forward := twin.__dict__.get("forward"), types.MethodType):
            twin.forward = types.MethodType(_rebound(forward.__func__, memo), forward.__self__)
        if _has_properties_of_torch(twin):
            twin.__class__ = _with_own_properties(type(twin), memo)
    return made


DECORATOR = "ConvertOutputsToFp32"  # of accelerate: an object around the forward of a model


def _like(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(generator.device)
    made.set_state(generator.get_state())
    return made


def _has_properties_of_torch(module: nn.Module) -> bool:
    """Return whether the class of `module` is one that torch made for its parametrizations."""
    own = vars(type(module))
    return is_parametrized(module) and all(isinstance(own.get(name), property) for name in module.parametrizations)  # type: ignore[union-attr]


def _with_own_properties(kind: type, twins: Mapping[int, Any]) -> type:
    """Return a class like that of a parametrized module, with properties that close over its copy."""
    table = {name: each for name, each in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    for name, each in table.items():
        if isinstance(each, property):
            table[name] = property(*(_rebound(part, twins) for part in (each.fget, each.fset, each.fdel)))
    return type(kind)(kind.__name__, kind.__bases__, table)


def _rebound(function: Any, twins: Mapping[int, Any]) -> Any:
    """Rebind the closure of `function`: methods of a copied model become those of its copy."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function

    def moved(value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType(_rebound(value.__func__, twins), twins.get(id(value.__self__), value.__self__))
        if type(value).__name__ == DECORATOR:
            made = object.__new__(type(value))  # it refuses to be copied
            vars(made).update({name: moved(part) for name, part in vars(value).items()})
            return made
        return twins.get(id(value), value) if isinstance(value, nn.Module) else _rebound(value, twins)

    cells = tuple(types.CellType(moved(cell.cell_contents)) for cell in function.__closure__)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function) if hasattr(function, "__wrapped__") else made
