"""Cached functions: `functools.lru_cache` around code of a model, whose results may be tensors.

What a cache holds can be neither copied nor put back. But to forget it changes no result: the function is run again.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

CACHED = type(functools.lru_cache(lambda: None))
_DEEPEST = 3  # results in tuples, lists and dicts that are looked into


def forget_tensors(function: Any) -> None:
    """Forget the results of a cached function if there are tensors among them."""
    if function.cache_info().currsize and any(map(_has_tensor, gc.get_referents(function))):
        function.cache_clear()


def _has_tensor(value: Any, depth: int = _DEEPEST) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    is_container = isinstance(value, (tuple, list, dict))
    return is_container and depth > 0 and any(_has_tensor(each, depth - 1) for each in gc.get_referents(value))
