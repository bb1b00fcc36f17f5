"""Holders: whatever holds references to state by key, noted with those that it holds, which it gets back in place."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import pathlib
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from remat.capture.cached_functions import CACHED
from remat.errors import CaptureError
from remat.workload.held_outputs import slots_of

NUMBER, TENSOR, GROWN, OTHER = "number", "tensor", "list", "other"  # kinds of changes; a list that has grown
Change = tuple[str, str]  # its name and kind
NUMBERS = (bool, int, float, complex, str, bytes, np.generic)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
FORWARD = "forward"

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property, type)
_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))
_PACKAGES = {"site-packages", "dist-packages"}  # folders of packages
_LEFT_ALONE = (
    *("torch", "remat", "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "weakref"),
    *("io", "re", "inspect", "contextlib", "pathlib", "datasets", "tokenizers"),
    *("lightning", "pytorch_lightning", "accelerate"),
    *("transformers.trainer", "transformers.tokenization_utils_base", "torchvision.datasets", "wandb"),
)
_LOOKED_INTO = ("torch.nn", "torch.distributions")  # of what is left alone


class StateLost(CaptureError):
    """The state of a model could not be restored."""


def joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def is_left_alone(value: Any) -> bool:
    """Return whether `value` belongs to the machinery of a library."""
    if isinstance(value, nn.Module):
        return False
    homes = [value] if isinstance(value, (type, types.FunctionType)) else type(value).__mro__[:-1]
    modules = [str(getattr(home, "__module__", "")) for home in homes]
    return any(_is_in(module, _LEFT_ALONE) and not _is_in(module, _LOOKED_INTO) for module in modules)


def is_looked_into(value: Any, homes: Container[str]) -> bool:
    """Return whether a function or a class that code names has state of the model too.

    Of code that is installed, that of `homes` alone has, where classes of the model are: libraries name much of each
    other.
    """
    if not isinstance(value, (*FUNCTIONS, CACHED, type)):
        return False
    home = str(getattr(value.func if isinstance(value, functools.partial) else value, "__module__", ""))
    return is_module_looked_into(home, homes)


def is_module_looked_into(module: str, homes: Container[str]) -> bool:
    """Return whether functions of the module of this name have state of the model."""
    return module in homes or not (_is_installed(module) or _is_in(module, _LEFT_ALONE))


@functools.cache
def _is_installed(module: str) -> bool:
    """Return whether a module is of Python or of a package; the one of a notebook, which has no file, is not."""
    if module == "__main__" and not hasattr(sys.modules[module], "__file__"):
        return False
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), "")  # a folder's has no file
    return not file or file.startswith(_STANDARD) or not _PACKAGES.isdisjoint(pathlib.PurePath(file).parts)


def is_own(value: Any) -> bool:
    """Return whether `value` is a function of this library: a hook that brings weights from the host."""
    while isinstance(value, functools.partial):
        value = value.func
    return isinstance(value, FUNCTIONS) and _is_in(str(value.__module__), ("remat",))


@functools.cache
def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_state(value: Any) -> bool:
    """Return whether a global, or an attribute of a class, may be state: neither code nor text."""
    if isinstance(value, (torch.Tensor, torch.Generator)):
        return True
    is_code = isinstance(value, (*_CODE, types.ModuleType, str)) or hasattr(type(value), "__get__")
    return not is_code and not is_left_alone(value)


class Holder:
    """Something that holds references by key, and the values that it held.

    read   the values held now        write  hold these values, and no others
    named  the name of the value under a key
    has_length  whether it is a list, a deque, a dictionary or a set
    """

    has_length = False
    __slots__ = ("_held", "_iterators", "name", "was")

    def __init__(self, name: str, held: Any):
        self.name, self._held = name, held
        self.was = self.read()
        self._iterators = {key: copied for key, each in self.was.items() if (copied := _copied(each)) is not None}

    def read(self) -> dict[Any, Any]:
        raise NotImplementedError

    def write(self, items: dict[Any, Any]) -> None:
        raise NotImplementedError

    def named(self, key: Any) -> str:
        return self.name

    def put(self, key: Any, value: Any) -> None:
        """Hold `value` under an existing key."""
        self._held[key] = value

    def is_whole(self, names: Container[str], *, numbers: bool = True) -> bool:
        """Return whether this is a list, a dictionary or a set of one of the `names`; of `numbers` alone."""
        if not self.has_length or self.name not in names:
            return False
        return not numbers or all(isinstance(each, NUMBERS) for each in self.was.values())

    def put_back(self) -> None:
        gone_on = {key: copy.copy(it) for key, it in self._iterators.items() if not _is_at(self._held_at(key), it)}
        if gone_on or any(True for _ in self.changes()):
            self.write(self.was | gone_on)

    def _held_at(self, key: Any) -> Any:
        return self.read().get(key, _ABSENT)

    def replace(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made = {key: _made_of(each, make) for key, each in self.was.items()}
        if any(made[key] is not each for key, each in self.was.items()):
            self.write(made)

    def changes(self) -> Iterator[Change]:
        now = self.read()
        for key in {**self.was, **now}:
            one, other = self.was.get(key, _ABSENT), now.get(key, _ABSENT)
            copied = self._iterators.get(key)
            is_same = _is_at(other, copied) if copied is not None else one is other or _are_equal(one, other)
            if not is_same:
                yield self.named(key), _kind_of(one, other)


_ABSENT = object()
_COPIED_ITERATORS = (
    *map(type, (iter([]), iter(()), iter(range(0)), reversed([]), iter(""), iter(b""))),
    itertools.count,
    itertools.repeat,
)


def _is_at(iterator: Any, copied: Any) -> bool:
    """Return whether an iterator is where it was copied."""
    return type(iterator) is type(copied) and _position(iterator) == _position(copied)


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two numbers are equal; a NaN is equal to itself here."""
    return (
        type(one) is type(other) and isinstance(one, NUMBERS) and bool(one == other or (one != one and other != other))
    )


def _kind_of(one: Any, other: Any) -> str:
    if isinstance(other, torch.Tensor):
        return TENSOR
    counts = (*NUMBERS, itertools.count)
    return NUMBER if isinstance(one, counts) and isinstance(other, counts) else OTHER


def _copied(value: Any) -> Any:
    """Copy an iterator at its present position; None for other values, or if it cannot be copied. (Rule 5)"""
    return copy.copy(value) if type(value) in _COPIED_ITERATORS else None


def _gives_once(value: Any) -> bool:
    """Return whether `value` is a Python generator, or an iterator whose copy would consume the same source."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__") and kind not in _COPIED_ITERATORS


def _made_of(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return make(value)
    has_tensors = isinstance(value, tuple) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    return tree_map_only(torch.Tensor, make, value) if has_tensors else value


class Attributes(Holder):
    """The table of an object's attributes, without its `forward`, which is no state."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {key: each for key, each in self._held.items() if key != FORWARD}

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            del self._held[key]
        self._held.update(items)

    def named(self, key: Any) -> str:
        return joined(self.name, key)


class Globals(Attributes):
    """Globals of a module that code names."""

    __slots__ = ("_names",)

    def __init__(self, name: str, held: dict[str, Any], names: Iterable[str]):
        self._names = [key for key in names if key not in held or _is_state(held[key])]
        super().__init__(name, held)

    def read(self) -> dict[Any, Any]:
        return {key: self._held[key] for key in self._names if key in self._held}


class _WrittenWhole(Holder):
    """A holder of which nothing can be written alone."""

    __slots__ = ()

    def put(self, key: Any, value: Any) -> None:
        self.write({**self.read(), key: value})


class Defaults(_WrittenWhole):
    """Defaults of a function's arguments: by position, then by name."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {**dict(enumerate(self._held.__defaults__ or ())), **(self._held.__kwdefaults__ or {})}

    def write(self, items: dict[Any, Any]) -> None:
        by_name = {key: each for key, each in items.items() if isinstance(key, str)}
        by_position = tuple(each for key, each in items.items() if not isinstance(key, str))
        self._held.__defaults__, self._held.__kwdefaults__ = by_position or None, by_name or None


class PartialArguments(_WrittenWhole):
    """The arguments by position that a partial function holds."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._held.args))

    def write(self, items: dict[Any, Any]) -> None:
        partial = self._held
        partial.__setstate__((partial.func, tuple(items.values()), partial.keywords, vars(partial)))


class ClassAttributes(Attributes):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        own = vars(self._held).items()
        return {key: each for key, each in own if _is_state(each) and not key.startswith("__")}

    def put(self, key: Any, value: Any) -> None:
        setattr(self._held, key, value)

    def replace(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # of a class whose attributes cannot be set
            super().replace(make)

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            delattr(self._held, key)
        for key, each in items.items():
            setattr(self._held, key, each)


class Slots(Attributes):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        names = (name for kind in type(self._held).__mro__ for name in slots_of(kind))
        return {name: getattr(self._held, name) for name in names if hasattr(self._held, name)}

    def put(self, key: Any, value: Any) -> None:
        object.__setattr__(self._held, key, value)

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            object.__delattr__(self._held, key)
        for key, each in items.items():
            object.__setattr__(self._held, key, each)


def _items_of(held: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dictionary, also of a class whose own `items` raises."""
    kind = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
    return kind.items(held)


class _Dict(Holder):
    """A dictionary; in dictionaries of hooks, this library's own hooks do not count."""

    has_length = True
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {key: each for key, each in _items_of(self._held) if not is_own(each)}

    def write(self, items: dict[Any, Any]) -> None:
        own = {key: each for key, each in _items_of(self._held) if is_own(each)}
        self._held.clear()
        self._held.update(items | own)

    def named(self, key: Any) -> str:
        return f"{self.name}[{key!r}]"

    def changes(self) -> Iterator[Change]:
        yield from super().changes()
        now = self.read()
        if [key for key in self.was if key in now] != [key for key in now if key in self.was]:  # their order
            yield self.name, OTHER


class _List(Holder):
    """A list or a deque."""

    has_length = True
    __slots__ = ()

    def put(self, key: Any, value: Any) -> None:
        if key < len(self._held):
            self._held[key] = value

    def read(self) -> dict[Any, Any]:
        kind = list if isinstance(self._held, list) else collections.deque
        return dict(enumerate(kind.__iter__(self._held)))

    def write(self, items: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.extend(items.values())

    def changes(self) -> Iterator[Change]:
        before = len(self.was)
        keeps = isinstance(self._held, list) and all(
            a is b for a, b in zip(self.was.values(), self.read().values(), strict=False)
        )
        if keeps and len(self._held) > before:
            yield self.name, GROWN
        else:
            yield from super().changes()


class _Set(Holder):
    has_length = True
    __slots__ = ()

    def put(self, key: Any, value: Any) -> None:
        self._held.add(value)

    def read(self) -> dict[Any, Any]:
        return {each: each for each in self._held}

    def write(self, items: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.update(items)


class _Cell(Holder):
    """A variable that a function closes over."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        try:
            return {"": self._held.cell_contents}
        except ValueError:  # empty
            return {}

    def put(self, key: Any, value: Any) -> None:
        self._held.cell_contents = value

    def write(self, items: dict[Any, Any]) -> None:
        if items:
            self._held.cell_contents = items[""]
        else:
            del self._held.cell_contents


class _Array(Holder):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"": self._held.tobytes()}

    def write(self, items: dict[Any, Any]) -> None:
        self._held[...] = np.frombuffer(items[""], dtype=self._held.dtype).reshape(self._held.shape)


class GivenOnce(Holder):
    """A Python generator or an iterator, and its position, as far as it is visible."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"": _position(self._held)}

    def changes(self) -> Iterator[Change]:
        if self.was != self.read():
            yield self.name, OTHER

    def write(self, items: dict[Any, Any]) -> None:
        raise StateLost(
            f"`{self.name}` of the model is a Python generator or an iterator, which a forward has taken values of: it "
            "cannot be put back to where it was. Keep the values in a list and count, or draw with a torch.Generator."
        )


def _position(value: Any) -> Any:
    """Return the position of an iterator: its own state, and that of the iterators that it reads."""
    if isinstance(value, types.GeneratorType):  # a loop that yields stands at the same line each time
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, *map(_position, frame.f_locals.values()))
    if isinstance(value, (*NUMBERS, type(None))):
        return value
    if isinstance(value, tuple):
        return tuple(map(_position, value))
    if not hasattr(type(value), "__next__"):
        return len(value) if isinstance(value, list) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 announces that `itertools` will not be copied any more
        try:
            made = value.__reduce__()
        except TypeError:
            return None
    return (type(value), *map(_position, made[1:]))


_CONTAINERS: tuple[tuple[Any, type[Holder]], ...] = (
    (dict, _Dict),
    ((list, collections.deque), _List),
    (set, _Set),
    (types.CellType, _Cell),
    (np.ndarray, _Array),
)


def container(name: str, value: Any) -> Holder | None:
    """Hold a container, a closure's variable, an array or an iterator; None for other objects."""
    if _gives_once(value):
        return GivenOnce(name, value)
    return next((holder(name, value) for kinds, holder in _CONTAINERS if isinstance(value, kinds)), None)
