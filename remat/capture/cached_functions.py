"""Cached functions: `functools.lru_cache` around code of a model, whose results may be tensors.

What a cache holds can be neither copied nor put back. But to forget it changes no result: the function is run again.
"""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

CACHED = type(functools.lru_cache(lambda: None))
_DEEPEST = 4  # containers within one another that are looked into
_ATOMS = (str, bytes, int, float, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Tensor)


def forget_tensors(function: Any) -> None:
    """Forget the results of a cached function if there are tensors among them."""
    _forget(function, torch.Tensor, (tuple, list, dict))


def forget_fakes(function: Any) -> None:
    """Forget the results of a cached function if there are fake tensors in them, also in objects and modules."""
    _forget(function, FakeTensor, (object,))


def _forget(function: Any, kind: type, containers: tuple[type, ...]) -> None:
    if function.cache_info().currsize and any(_holds(each, kind, containers) for each in gc.get_referents(function)):
        function.cache_clear()


def _holds(value: Any, kind: type, containers: tuple[type, ...], depth: int = _DEEPEST) -> bool:
    """Return whether `value` is of a `kind` of tensor, or holds one in `containers`."""
    if isinstance(value, kind):
        return True
    if isinstance(value, _ATOMS) or not isinstance(value, containers) or not depth:
        return False
    inside = vars(value).values() if hasattr(value, "__dict__") else gc.get_referents(value)
    return any(_holds(each, kind, containers, depth - 1) for each in list(inside))
