"""Sources: what a forward reads that torch does not know of, and that is another at each forward.

Python's and NumPy's generators, the clock, the operating system's noise, and numbers that a module counts. torch's
generators steer no Python: a tensor that is drawn has no number while planning.

Whether a forward may read one is looked up in the code of its modules (`Sources.of`). Where it did is found by running
it under a tracer (`watched`), which is slow: only who has to say it does that.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import gc
import itertools
import linecache
import os
import random
import secrets
import sys
import time
import types
import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from remat._torch.recording import untraced
from remat.capture.code_names import codes_in, globals_in

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_SYSTEM_SOURCES = (
    time,
    secrets,
    uuid,
    os.urandom,
    datetime,
    datetime.datetime,
    datetime.date,
    random.SystemRandom,
    np.random.default_rng,
)
_LIBRARIES = frozenset(("torch", "numpy"))  # whose own code is not searched
_READ_BY_CALLER = frozenset(("random", "secrets", "uuid", "numpy"))  # whose caller reads
_READ_FOR_CALLER = (
    _LIBRARIES | sys.stdlib_module_names | {"functorch", "remat"}
)  # their code reads on behalf of its callers
_UNTRACKED_READERS = _READ_FOR_CALLER - _READ_BY_CALLER  # ... or does not steer a forward
_MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}  # tables of torch's own
DEEPEST, LONGEST = 2, 1000  # containers that are looked into
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WORDS = 624  # of a Mersenne Twister
_WORD_OF_ONES = 0x12DD9BB3  # the word of its state that comes out as ones alone


@dataclasses.dataclass(frozen=True)
class Read:
    """A line that reads a source."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"`{text}` at {self.file}:{self.line}" if text else f"{self.file}:{self.line}"


class Sources:
    """The values outside of the batch that the code of a model and its step may read.

    generators  generators that it names or keeps
    has_clock   whether it names a clock, or the system's noise
    names       global names that it uses, each with its namespace
    """

    def __init__(self) -> None:
        self.generators: dict[int, Any] = {}
        self.has_clock = False
        self.names: dict[str, Mapping[str, Any]] = {}
        self._known: set[Any] = set()

    @classmethod
    def of(cls, model: nn.Module, step: Callable[..., Any]) -> Sources:
        """Find the sources of `step`, and of the forwards of `model`, its parts and everything that they call."""
        found = cls()
        found._note(random)
        found._note(np.random)
        found._note(step if isinstance(step, _FUNCTIONS) else vars(type(step)).get("__call__"), type(step))
        for module in model.modules():
            for value in vars(module).values():
                found._note_kept(value)
            kind = type(module)
            if kind not in found._known and not _is_of_library(kind):
                found._known.add(kind)
                found._note(kind.forward, kind)
        return found

    def _note_kept(self, value: Any, kind: type | None = None) -> None:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for part in parts:
            if isinstance(part, (*GENERATORS, types.FunctionType, functools.partial)):
                self._note(part, kind)

    def _note(self, value: Any, kind: type | None = None) -> None:
        """Note that code names `value`, as a method of `kind` if that is given."""
        if value is random:
            value = random._inst
        elif value is np or value is np.random:
            value = np.random.mtrand._rand
        value = getattr(value, "func", value) if isinstance(value, functools.partial) else value
        value = getattr(value, "__func__", value)
        owner = getattr(value, "__self__", None)  # of `from random import random`
        if isinstance(owner, GENERATORS):
            value = owner
        if isinstance(value, GENERATORS):
            self.generators[id(value)] = value
        elif any(value is each for each in _SYSTEM_SOURCES) or getattr(value, "__module__", None) == "time":
            self.has_clock = True
        elif isinstance(value, types.FunctionType) and (value.__code__, kind) not in self._known:
            self._known.add((value.__code__, kind))
            if str(value.__module__).partition(".")[0] not in _LIBRARIES:
                self._read(value, kind)

    def _read(self, function: types.FunctionType, kind: type | None) -> None:
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        known = globals_in(function.__code__).intersection(function.__globals__)
        for name in names - known:
            if isinstance(method := getattr(kind, name, None), (types.FunctionType, types.MethodType)):
                self._note(method, kind)
        for name in known:
            self.names[name] = function.__globals__
            value = function.__globals__[name]
            if value is not os or "urandom" in names:
                self._note(os.urandom if value is os else value)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                self._note_kept(cell.cell_contents, kind)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers and text under global names, those in containers included."""
        return {name: n for name, space in self.names.items() if (n := _number(space.get(name), DEEPEST)) is not None}

    def states(self) -> list[Any]:
        """Return the states of the generators; they change if a random number is drawn in between."""
        return [_state_of(each) for each in self.generators.values()]

    def drive(self, *, high: bool, seed: int) -> None:
        """Set generators so that their numbers are close to one or to zero; those that cannot be set are reseeded."""
        for number, generator in enumerate(self.generators.values()):
            _drive(generator, high, seed + 100 * number)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators afterwards."""
        before = [(each, _state_of(each)) for each in self.generators.values()]
        try:
            yield
        finally:
            for generator, state in before:
                _set_state(generator, state)


def numbers_of(model: nn.Module) -> dict[str, Any]:
    """Return the numbers and text that modules of `model` and their classes keep, in containers too, by path."""
    found: dict[str, Any] = {}
    kinds: dict[type, None] = {}
    for path, module in model.named_modules():
        kinds |= dict.fromkeys(kind for kind in type(module).__mro__ if not _is_of_library(kind))
        found |= _counted(f"{path}." if path else "", vars(module))
    for kind in kinds:
        found |= _counted(f"{kind.__qualname__}.", vars(kind))
    return found


def _counted(prefix: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{prefix}{name}": number
        for name, value in attributes.items()
        if name not in _MODULE_TABLES and (number := _number(value, DEEPEST)) is not None
    }


def _number(value: Any, deepest: int) -> Any:
    """Return the comparable part of `value`, without its tensors; None if there is none."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, itertools.count):
        return repr(value)
    if deepest and isinstance(value, dict):
        value = [*value, *value.values()]
    if deepest and isinstance(value, (list, tuple, set, collections.deque)) and len(value) <= LONGEST:
        return (len(value), *(_number(each, deepest - 1) for each in value))
    return None


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES or kind is object


@contextlib.contextmanager
def watched(sources: Sources, within: Callable[[], bool] = lambda: True) -> Iterator[list[Read]]:
    """Yield a list that is filled at the end with the lines that read a source while `within` was true."""
    found: dict[Read, None] = {}
    seen: list[Read] = []
    states = sources.states()

    def note(frame: Any, line: int) -> None:
        if within():
            found[Read(frame.f_code.co_filename, line)] = None

    def compare(frame: Any, line: int) -> None:
        nonlocal states
        now = sources.states()
        if not same(now, states):
            states = now
            note(frame, line)

    @untraced
    def called(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and _reads_system(function):
            reader = _outside_of(frame, _READ_BY_CALLER)
            if reader is not None and _home(reader) not in _UNTRACKED_READERS and not _collects(reader):
                note(reader, reader.f_lineno)

    @untraced
    def entered(frame: Any, event: str, argument: Any) -> Any:
        if (
            (is_passing := _home(frame) in _READ_FOR_CALLER)
            and frame.f_back
            and _home(frame.f_back) in _READ_FOR_CALLER
        ):
            return None  # what is drawn from here on is seen when the line that went into libraries has been run
        caller = _outside_of(frame.f_back, _READ_FOR_CALLER)
        if caller is not None:
            compare(caller, caller.f_lineno)
        if is_passing:
            return None
        last = frame.f_lineno

        def line(frame: Any, event: str, argument: Any) -> Any:
            nonlocal last
            compare(frame, last)  # the line before has been run
            last = frame.f_lineno
            return line

        return line

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(entered)
    sys.setprofile(called)
    try:
        yield seen
    finally:
        restart = getattr(before[1], "enable", None)  # cProfile's, which is no function
        restart() if restart else sys.setprofile(before[1])
        sys.settrace(before[0])
        seen += found


def _home(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _collects(frame: Any) -> bool:
    """Return whether `frame` runs in a callback of the garbage collector, which runs anywhere and is no forward's."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def line_here() -> Read | None:
    """Return the line of the user's code that runs now; None if there is none."""
    frame = _outside_of(sys._getframe(1), _READ_FOR_CALLER)
    return frame and Read(frame.f_code.co_filename, frame.f_lineno)


def _outside_of(frame: Any, packages: Container[str]) -> Any:
    """Return the innermost frame, from `frame` outwards, outside `packages`; None if there is none."""
    while frame is not None and _home(frame) in packages:
        frame = frame.f_back
    return frame


def _reads_system(function: Any) -> bool:
    """Return whether a C function reads a clock or the system's noise."""
    if function is os.urandom or getattr(function, "__module__", None) == "time":
        return True
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, datetime.date) and function.__name__ != "fromtimestamp"


# Generators


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def same(left: Any, right: Any) -> bool:
    """Return whether two states of generators are equal."""
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    with contextlib.suppress(ValueError):  # arrays in it
        return bool(left == right)  # the 625 numbers of Python's generator at once
    if isinstance(left, dict):
        return all(same(left[name], right[name]) for name in left)
    return len(left) == len(right) and all(map(same, left, right))


def _drive(generator: Any, high: bool, seed: int) -> None:
    """Set every second word of a Mersenne Twister to an extreme, and so every number made of two words.

    If all words were extreme, code that draws until a number is in a range would never end.
    """
    words = np.random.default_rng(seed).integers(1 << 32, size=_WORDS, dtype=np.uint32)
    words[::2] = _WORD_OF_ONES if high else 0
    if isinstance(generator, random.SystemRandom):
        return
    if isinstance(generator, random.Random):
        generator.setstate((generator.VERSION, (*map(int, words), 0), None))
    elif isinstance(generator, np.random.RandomState):
        if generator.get_state(legacy=False)["bit_generator"] == "MT19937":
            generator.set_state(("MT19937", words, 0, 0, 0.0))
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
