"""Fixtures and results that a file or a process needs once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, called once for the same arguments, whether they are given or left to their defaults.

    `functools.cache` takes `f()`, `f(1)` and `f(n=1)` for three calls: a step was recorded as often.
    """
    signature, known = inspect.signature(function), functools.cache(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return known(*given.args, **given.kwargs)

    return call
