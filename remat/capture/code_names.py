"""Names in code: the globals that it reads and sets, as against attributes of the same names, and those of modules."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")


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


@functools.cache
def attributes_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes, of whatever, in `code`, and in functions that it defines."""
    return frozenset(
        each.argval for inner in codes_in(code) for each in dis.get_instructions(inner) if each.opname in _OF_ATTRIBUTES
    )


@functools.cache
def _imports_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that `code` imports as it runs; with leading dots where they are relative."""
    found = set()
    for inner in codes_in(code):
        instructions = [each for each in dis.get_instructions(inner) if each.opname != "EXTENDED_ARG"]
        for at, each in enumerate(instructions):
            if each.opname == "IMPORT_NAME":  # behind the level and the names that are imported
                found.add("." * int(instructions[at - 2].argval) + each.argval)
    return frozenset(found)


@dataclasses.dataclass(frozen=True)
class NamesOfModule:
    """Names of a module that code may read or set there: `helpers.count`."""

    module: types.ModuleType
    names: frozenset[str]

    @property
    def name(self) -> str:
        return _name_of(self.module)


def _name_of(module: types.ModuleType) -> str:
    return str(vars(module).get("__name__", ""))


def modules_named(function: types.FunctionType, is_wanted: Callable[[str], bool]) -> Iterator[NamesOfModule]:
    """Yield the modules that `function` names, or imports as it runs, with the names of each that it may mean.

    is_wanted  by a module's name; the modules of one that is not are left out as well
    """
    table, code, seen = function.__globals__, function.__code__, set[str]()
    waiting = [each for key in globals_in(code) if isinstance(each := table.get(key), types.ModuleType)]
    for name in _imports_in(code):
        with contextlib.suppress(ImportError, ValueError):  # relative to no package
            absolute = importlib.util.resolve_name(name, table.get("__package__"))
            imported = (sys.modules.get(each) for each in (absolute, absolute.partition(".")[0]))
            waiting += [each for each in imported if isinstance(each, types.ModuleType)]  # None blocks an import
    while waiting:
        module = waiting.pop()
        name = _name_of(module)
        if name in seen or not is_wanted(name):
            continue
        seen.add(name)
        names = attributes_in(code) & vars(module).keys()
        waiting += [each for key in names if isinstance(each := vars(module)[key], types.ModuleType)]
        yield NamesOfModule(module, names)
