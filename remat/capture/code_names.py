"""Names in code: the globals that it reads and sets, as against attributes of the same names."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")


def as_function(callee: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, a method or a partial function as it is; another object that is called as a partial one."""
    is_function = isinstance(callee, (types.FunctionType, types.MethodType, functools.partial))
    return callee if is_function else functools.partial(callee)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield `code`, and the code of what it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals in `code`, and in functions that it defines."""
    return frozenset(
        each.argval for inner in codes_in(code) for each in dis.get_instructions(inner) if each.opname in _OF_GLOBALS
    )
