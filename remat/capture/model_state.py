"""Model state: save and restore everything that a forward may change beside parameters.

A forward changes more than buffers: it keeps a memory from batch to batch as a plain attribute, appends to a list,
counts its calls, draws from a generator of its own, fills a cache of its class. A run of one forward more than
training does must leave no trace of it.

Rule 1  What is reached from the model counts: modules and their hooks, plain objects, containers, what functions close
        over, attributes of the objects' classes, and the globals that the code of those classes and functions names.
        The machinery of libraries (loggers, trainers, data sets, devices) is left alone.
Rule 2  What holds references is noted with those that it holds, and gets them back in place: who refers to the holder
        goes on to.
Rule 3  Data of tensors and arrays is copied to the host, and put back where it has changed. Parameters are too large
        for that: what was written into them stays, and `changes` says so. `written_parameters.py` undoes it.
Rule 4  Generators get their states back: the global ones of torch, Python and numpy, and those that are reached.
Rule 5  Iterators over what can be counted are copied. Others, and Python generators, give a value once: `only_once`
        names them, and `put_back` refuses where one has gone on.

`changes` says by name what is other than it was. A copy of the model in place of all this was rejected: it would take
as much memory again, and who refers to the model's parts would refer to the old ones.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import enum
import functools
import itertools
import random
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from remat._torch.training import without_modes
from remat.capture.code_names import globals_in
from remat.errors import CaptureError

MOST_OBJECTS = 100_000  # that are looked into, of those that are reached through code
LARGEST_BYTES = 1 << 24  # of a tensor or an array that is reached through code
NUMBER, TENSOR, GROWN, OTHER = "number", "tensor", "list", "other"  # kinds of changes; a list that has grown
Change = tuple[str, str]  # its name and kind

_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property, type)
_ATOMS = (*_NUMBERS, type(None), type, torch.dtype, torch.device, torch.Size, enum.Enum, types.ModuleType, range)
_TABLES = ("_modules", "_parameters", "_buffers")  # whose keys are attributes of their module
_FORWARD = "forward"
_LEFT_ALONE = (
    *("torch", "remat", "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "weakref"),
    *("io", "re", "inspect", "contextlib", "pathlib", "datasets", "tokenizers"),
    *("lightning", "pytorch_lightning", "accelerate"),
    *("transformers.trainer", "transformers.tokenization_utils_base", "torchvision.datasets", "wandb"),
)
_LOOKED_INTO = ("torch.nn", "torch.distributions")  # of what is left alone


class StateLost(CaptureError):
    """The state of a model could not be restored."""


class ModelState:
    """The state of `model` at the moment of construction.

    data              whether tensors have data; fake ones have none
    step              a function that calls the model: its own state counts, and a loss module or a frozen model that it
                      names (a teacher). Another model that trains does not: it may be the one that is copied here
    torch_generators  torch's generators that were reached
    """

    def __init__(self, model: nn.Module, *, data: bool = True, step: Callable[..., Any] | None = None):
        self.model = model
        self._begin(data, {})
        self._buffers = {id(buffer) for buffer in model.buffers()}
        with without_modes():
            self._look_from("", model)
            self._own, self._own_holders, self._entries = dict(self._seen), len(self._holders), list(self._code)
            own_generators = len(self._generators)
            self._look_into_code()
            if step is not None:
                self._without_models = True
                self._entries.append(("step", step))
                self._code.append(("step", step))
                self._look_into_code()
            self._shared_generators = self._generators[own_generators:]
            devices = {p.device for p in model.parameters() if p.device.type == "cuda"} if data else set()
            self._generators += global_generators(devices)

    def _begin(self, data: bool, seen: dict[int, Any]) -> None:
        self._data, self._seen = data, seen  # objects are kept, so that an id stays its own
        self._without_models = self._is_shared = False
        self._beside: set[int] = set()  # ids of parameters of modules that a step names
        self._holders: list[_Holder] = []
        self._generators: list[_Generator] = []
        self._tensors: list[_KeptTensor] = []
        self.torch_generators: list[torch.Generator] = []
        self._code: list[tuple[str, Any]] = []  # functions and classes that are not looked into yet
        self._named: dict[int, set[str]] = {}  # globals that were noted, by the id of their table
        self._most = MOST_OBJECTS
        self._not_looked_into: str | None = None

    def shared(self) -> ModelState:
        """Return the present state that the model shares with the rest of the program, reached through code alone.

        Generators are left out.
        """
        found = ModelState.__new__(ModelState)
        found._begin(self._data, dict(self._own))
        found._code, found._own_holders = list(self._entries), 0
        found._without_models = self._without_models
        with without_modes():
            found._look_into_code()
        found._generators.clear()
        return found

    def put_back(self) -> None:
        """Restore the state. Raises StateLost, naming what could not be restored, after restoring everything else."""
        failures: list[tuple[str, Exception]] = []
        with without_modes():
            everything: list[_Holder | _KeptTensor | _Generator] = [*self._holders, *self._tensors, *self._generators]
            for kept in everything:
                try:
                    kept.put_back()
                except Exception as error:  # any error of a user's object that is written to
                    failures.append((kept.name, error))
        for name, failure in failures:
            if isinstance(failure, StateLost):
                raise failure
            raise StateLost(
                f"`{name}` of the model cannot be put back to what it was before a forward: {failure}."
            ) from failure

    def put_statistics_back(self) -> None:
        """Restore the data of registered buffers, and generators, which `changes` leaves out without `statistics`."""
        with without_modes(), torch.no_grad():
            for tensor in self._tensors:
                if id(tensor.value) in self._buffers:
                    tensor.put_back()
        self.put_generators_back()

    def put_generators_back(self) -> None:
        with without_modes():
            for generator in self._generators:
                generator.put_back()

    def changes(self, *, statistics: bool = True) -> dict[str, str]:
        """Return the parts of the model that have changed, kinds by name. Generators are left out.

        statistics  registered buffers that were written into count too
        """
        with without_modes():
            changes = [change for holder in self._holders for change in holder.changes()]
            found = dict(sorted(changes, key=lambda change: change[1] != GROWN))  # a list that was replaced, too
            tensors = [t for t in self._tensors if statistics or id(t.value) not in self._buffers]
            return found | {tensor.name: TENSOR for tensor in tensors if tensor.has_changed()}

    @property
    def only_once(self) -> list[str]:
        """Names of sources that give each value once, and of unknown state: one forward more changes them for good."""
        once = [holder.name for holder in self._holders if isinstance(holder, _GivenOnce)]
        return once + [f"what is reached from {self._not_looked_into}"] * (self._not_looked_into is not None)

    @property
    def shared_generators(self) -> list[_Generator]:
        """Generators reached through code alone, as they were."""
        return self._shared_generators

    @property
    def holders(self) -> tuple[_Holder, ...]:
        return tuple(self._holders)

    @property
    def shared_names(self) -> set[str]:
        """Names of state reached through code: attributes of classes, globals, closures of hooks."""
        return {holder.named(key) for holder in self._holders[self._own_holders :] for key in holder.read()}

    def replace(self, make: Callable[[torch.Tensor], torch.Tensor], *, own: bool = False) -> None:
        """Replace each tensor by the result of `make`; only in the model's `own` state."""
        for holder in self._holders[: self._own_holders if own else None]:
            holder.replace(make)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that was reached, except parameters of other modules than those beside the model."""
        kept = [tensor.value for tensor in self._tensors]
        return [value for value in kept if not isinstance(value, nn.Parameter) or id(value) in self._beside]

    @property
    def unregistered(self) -> list[torch.Tensor]:
        """Every tensor that was reached and is neither a parameter nor a buffer."""
        return [tensor for tensor in self.tensors if id(tensor) not in self._buffers]

    # How it is read (Rule 1)

    def _look_from(self, name: str, value: Any) -> None:
        waiting = collections.deque(((name, value),))
        while waiting:
            waiting.extend(self._noted(*waiting.popleft()))

    def _look_into_code(self) -> None:
        """Look into code last, so that the model's own state is known as such."""
        self._is_shared, self._most = True, len(self._seen) + MOST_OBJECTS
        while self._code:
            for name, value in self._of_code(*self._code.pop(0)):
                self._look_from(name, value)

    def _noted(self, name: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Note `value`, and return the named values that it leads to."""
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return ()
        if self._is_shared and len(self._seen) >= self._most:
            self._not_looked_into = self._not_looked_into or name
            return ()
        if (self._without_models and _trains(value)) or (self._is_shared and self._is_data(value)):
            return ()
        self._seen[id(value)] = value
        if self._without_models and isinstance(value, nn.Module):
            self._beside |= {id(parameter) for parameter in value.parameters()}
        if isinstance(value, torch.Tensor):
            self._tensors.append(_KeptTensor(name, value, self._data))
        elif (generator := _generator_of(value)) is not None:
            self._generators.append(generator)
            self.torch_generators += [value] if isinstance(value, torch.Generator) else []
        elif isinstance(value, (tuple, frozenset)):
            return [(name, each) for each in value]
        elif isinstance(value, _FUNCTIONS):
            self._code += [] if _is_own(value) else [(name, value)]
        elif (holder := _container(name, value)) is not None:
            return self._held(holder)
        elif not _is_left_alone(value):
            return self._of_object(name, value)
        return ()

    def _is_data(self, value: Any) -> bool:
        """Return whether `value` is more likely a program's data than state that a model changes."""
        is_large = isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes > LARGEST_BYTES
        return is_large and id(value) not in self._beside

    def _held(self, holder: _Holder) -> Iterator[tuple[str, Any]]:
        self._holders.append(holder)
        return ((holder.named(key), value) for key, value in holder.was.items())

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Collect the state of a module or another object."""
        kinds = type(value).__mro__
        if isinstance(own := getattr(value, "__dict__", None), dict):
            tables = [own[table] for table in _TABLES if isinstance(value, nn.Module)]
            self._seen |= {id(table): table for table in tables}
            for attributes in (own, *tables):
                yield from self._held(_Attributes(name, attributes))
            yield name, own.get(_FORWARD)
        if any(map(_slots_of, kinds)):
            yield from self._held(_Slots(name, value))
        self._code += ((kind.__qualname__, kind) for kind in kinds if id(kind) not in self._seen)
        self._seen |= {id(kind): kind for kind in kinds}

    def _of_code(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Collect the state of a class, a method, a partial function, or a function."""
        if isinstance(value, types.MethodType):
            yield from ((name, each) for each in (value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((name, each) for each in (value.func, value.args, value.keywords))
        elif _is_left_alone(value):
            return
        elif isinstance(value, type):
            functions = (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(value).values())
            yield from ((name, each) for each in functions if isinstance(each, types.FunctionType))
            yield from self._held(_ClassAttributes(name, value))
        else:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((_joined(name, variable), cell) for variable, cell in cells)
            yield from ((name, given) for given in (value.__defaults__, value.__kwdefaults__) if given)
            yield from self._held(_Attributes(name, vars(value)))
            known = self._named.setdefault(id(value.__globals__), set())
            names = globals_in(value.__code__) - known
            known |= names
            yield from self._held(_Globals(str(value.__module__), value.__globals__, names))


class Numbers:
    """The numbers of a state of some `names`, at the moment of construction."""

    def __init__(self, state: ModelState | None, names: Collection[str]):
        holders = () if state is None else state.holders
        held = ((holder, key, value) for holder in holders for key, value in holder.was.items())
        self._held = [each for each in held if isinstance(each[2], _NUMBERS) and each[0].named(each[1]) in names]

    def put_back(self) -> None:
        for holder, key, value in self._held:
            holder.put(key, value)


class AppendedLists:
    """Lists in a state of some `names` that a forward only appends to."""

    def __init__(self, state: ModelState | None, names: Collection[str]):
        holders = () if state is None else state.holders
        held = ((holder, key) for holder in holders for key, value in holder.was.items() if isinstance(value, list))
        self._held = [(holder, key) for holder, key in held if holder.named(key) in names]

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Empty the lists while the context is open, since a trace would specialize on their length; then join them."""
        lists = [found for holder, key in self._held if isinstance(found := holder.read().get(key), list)]
        before = [list(found) for found in lists]
        for found in lists:
            found.clear()
        try:
            yield
        finally:
            for found, kept in zip(lists, before, strict=True):
                found[:0] = kept


class SharedState:
    """State that a model on fake tensors and its `step` share with the program; the program's stays unchanged.

    fake  makes the fake of a tensor; the model's own state gets its fakes at once
    """

    def __init__(
        self, model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor], step: Callable[..., Any] | None = None
    ):
        self._model, self._fake = ModelState(model, data=False, step=step), fake
        self._model.replace(fake, own=True)
        _kept.get([]).extend(self._model.shared_generators)
        self._inside: ModelState | None = None  # as the model has it
        self._depth = 0

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Restore the state as the model left it last, with fake tensors, while the context is open."""
        if self._depth:
            yield
            return
        outside = self._model.shared()
        inside, self._inside = self._inside, None
        if inside is None:
            outside.replace(self._fake)
        else:
            inside.put_back()
        del inside  # so that objects dropped by the model are freed
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            self._inside = self._model.shared()
            outside.put_back()

    def require_kept(self) -> None:
        """Raise StateLost if the model has taken values from a source that gives each value once."""
        for holder in self._model.holders:
            if isinstance(holder, _GivenOnce):
                holder.put_back()


def _trains(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_left_alone(value: Any) -> bool:
    """Return whether `value` belongs to the machinery of a library."""
    if isinstance(value, nn.Module):
        return False
    homes = [value] if isinstance(value, (type, types.FunctionType)) else type(value).__mro__[:-1]
    modules = [str(getattr(home, "__module__", "")) for home in homes]
    return any(_is_in(module, _LEFT_ALONE) and not _is_in(module, _LOOKED_INTO) for module in modules)


def _is_own(value: Any) -> bool:
    """Return whether `value` is a function of this library: a hook that brings weights from the host."""
    while isinstance(value, functools.partial):
        value = value.func
    return isinstance(value, _FUNCTIONS) and _is_in(str(value.__module__), ("remat",))


@functools.cache
def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_state(value: Any) -> bool:
    """Return whether a global, or an attribute of a class, may be state: neither code nor text."""
    if isinstance(value, (torch.Tensor, torch.Generator)):
        return True
    is_code = isinstance(value, (*_CODE, types.ModuleType, str)) or hasattr(type(value), "__get__")
    return not is_code and not _is_left_alone(value)


@functools.cache
def _slots_of(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    return [name for name in names if isinstance(vars(kind).get(name), types.MemberDescriptorType)]


# What holds references (Rule 2)


class _Holder:
    """Something that holds references by key, and the values that it held.

    read   the values held now        write  hold these values, and no others
    named  the name of the value under a key
    """

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
    return type(one) is type(other) and isinstance(one, _NUMBERS) and bool(one == other or one != one)


def _kind_of(one: Any, other: Any) -> str:
    if isinstance(other, torch.Tensor):
        return TENSOR
    counts = (*_NUMBERS, itertools.count)
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


class _Attributes(_Holder):
    """The table of an object's attributes, without its `forward`, which is no state."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {key: each for key, each in self._held.items() if key != _FORWARD}

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            del self._held[key]
        self._held.update(items)

    def named(self, key: Any) -> str:
        return _joined(self.name, key)


class _Globals(_Attributes):
    """Globals of a module that code names."""

    __slots__ = ("_names",)

    def __init__(self, name: str, held: dict[str, Any], names: Iterable[str]):
        self._names = [key for key in names if key not in held or _is_state(held[key])]
        super().__init__(name, held)

    def read(self) -> dict[Any, Any]:
        return {key: self._held[key] for key in self._names if key in self._held}


class _ClassAttributes(_Attributes):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        own = vars(self._held).items()
        return {key: each for key, each in own if _is_state(each) and not key.startswith("__")}

    def put(self, key: Any, value: Any) -> None:
        setattr(self._held, key, value)

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            delattr(self._held, key)
        for key, each in items.items():
            setattr(self._held, key, each)


class _Slots(_Attributes):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        names = (name for kind in type(self._held).__mro__ for name in _slots_of(kind))
        return {name: getattr(self._held, name) for name in names if hasattr(self._held, name)}

    def put(self, key: Any, value: Any) -> None:
        object.__setattr__(self._held, key, value)

    def write(self, items: dict[Any, Any]) -> None:
        for key in self.read().keys() - items.keys():
            object.__delattr__(self._held, key)
        for key, each in items.items():
            object.__setattr__(self._held, key, each)


class _Dict(_Holder):
    """A dictionary; in dictionaries of hooks, this library's own hooks do not count."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {key: each for key, each in self._held.items() if not _is_own(each)}

    def write(self, items: dict[Any, Any]) -> None:
        own = {key: each for key, each in self._held.items() if _is_own(each)}
        self._held.clear()
        self._held.update(items | own)

    def named(self, key: Any) -> str:
        return f"{self.name}[{key!r}]"


class _List(_Holder):
    """A list or a deque."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._held))

    def write(self, items: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.extend(items.values())

    def changes(self) -> Iterator[Change]:
        before = len(self.was)
        keeps = isinstance(self._held, list) and all(
            a is b for a, b in zip(self.was.values(), self._held, strict=False)
        )
        if keeps and len(self._held) > before:
            yield self.name, GROWN
        else:
            yield from super().changes()


class _Set(_Holder):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {each: each for each in self._held}

    def write(self, items: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.update(items)


class _Cell(_Holder):
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


class _Array(_Holder):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"": self._held.tobytes()}

    def write(self, items: dict[Any, Any]) -> None:
        self._held[...] = np.frombuffer(items[""], dtype=self._held.dtype).reshape(self._held.shape)


class _GivenOnce(_Holder):
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
    if isinstance(value, (*_NUMBERS, type(None))):
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


_CONTAINERS: tuple[tuple[Any, type[_Holder]], ...] = (
    (dict, _Dict),
    ((list, collections.deque), _List),
    (set, _Set),
    (types.CellType, _Cell),
    (np.ndarray, _Array),
)


def _container(name: str, value: Any) -> _Holder | None:
    """Hold a container, a closure's variable, an array or an iterator; None for other objects."""
    if _gives_once(value):
        return _GivenOnce(name, value)
    return next((holder(name, value) for kinds, holder in _CONTAINERS if isinstance(value, kinds)), None)


# Tensors (Rule 3)


class _KeptTensor:
    """A tensor, and the data that it held; for a parameter, also its storage."""

    def __init__(self, name: str, value: torch.Tensor, data: bool):
        self.name, self.value, self._version = name, value, _version_of(value)
        is_parameter = isinstance(value, nn.Parameter)
        has_storage = is_parameter and type(value) in (nn.Parameter, FakeTensor)
        self._storage = StorageWeakRef(value.untyped_storage()) if has_storage else None
        self._data = value.detach().to("cpu", copy=True) if data and not is_parameter else None
        self._alias = None if self._data is None or value.layout is not torch.strided else value.detach()

    def has_changed(self) -> bool:
        if self._data is not None:
            return self._is_other
        return self._version != _version_of(self.value) or self._is_elsewhere

    def put_back(self) -> None:
        if self._data is not None and self._is_other:
            with torch.no_grad():
                if self._alias is not None:  # it may have been resized, or given the storage of another tensor
                    self.value.data = self._alias
                self.value.copy_(self._data)  # not into `detach()`: that of a sparse tensor has other indices then

    @property
    def _is_elsewhere(self) -> bool:
        """Whether it was given another storage (`parameter.data = ...`)."""
        known = self._storage
        return known is not None and (known.expired() or known.cdata != self.value.untyped_storage()._cdata)

    @property
    def _is_other(self) -> bool:
        """Whether the data differs bitwise, as far as bits are readable."""
        if self._data is None or not can_be_compared(self.value):
            return self._version != _version_of(self.value)
        return not are_bitwise_equal(self.value.detach().cpu(), self._data)


def are_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal; False if that is unknown."""
    return can_be_compared(one) and _are_bitwise_equal(one, other)


def can_be_compared(tensor: torch.Tensor) -> bool:
    """Return whether the bits of `tensor` are readable."""
    return (tensor.layout is torch.strided or tensor.layout in _PARTS) and not tensor.is_quantized


_COMPRESSED_PARTS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _COMPRESSED_PARTS[0]),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COMPRESSED_PARTS[1]),
}


def _are_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.layout, one.dtype, one.shape) != (other.layout, other.dtype, other.shape):
        return False
    if one.layout in _PARTS:
        parts = ((getattr(one, part)(), getattr(other, part)()) for part in _PARTS[one.layout])
        return all(_are_bitwise_equal(*both) for both in parts)
    return torch.equal(*map(_bytes_of, (one, other)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# Generators (Rule 4)


class _Generator:
    """A generator, and the state that it had."""

    name = "a generator"

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]):
        self._put, self._was = put, get()

    def put_back(self) -> None:
        self._put(self._was)


def _generator_of(value: Any) -> _Generator | None:
    """Hold a generator of torch, Python or numpy; None for other objects."""
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def global_generators(devices: Iterable[torch.device] = ()) -> list[_Generator]:
    """List the generators of Python, numpy and torch: on the host, and on the CUDA devices among `devices`."""
    found = [
        _Generator(random.getstate, random.setstate),
        _Generator(np.random.get_state, np.random.set_state),
        _Generator(torch.get_rng_state, torch.set_rng_state),
    ]
    get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    for device in devices:
        found.append(_Generator(functools.partial(get, device), functools.partial(put, device=device)))
    return found


_kept: contextvars.ContextVar[list[_Generator]] = contextvars.ContextVar("generators that are put back")


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore generators afterwards: global ones of the host, and those that models share and put on fakes.

    May decorate a function.
    """
    with without_modes():
        kept = global_generators()
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        with without_modes():
            for generator in kept:
                generator.put_back()
