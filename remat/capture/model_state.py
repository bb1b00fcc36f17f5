"""Model state: save and restore everything that a forward may change beside parameters.

A forward changes more than buffers: it keeps a memory from batch to batch as a plain attribute, appends to a list,
counts its calls, draws from a generator of its own, fills a cache of its class. A run of one forward more than
training does must leave no trace of it.

Rule 1  What is reached from the model counts: modules and their hooks, plain objects, containers, what functions close
        over, attributes of the objects' classes, and the globals that the code of those classes and functions names.
        Functions and classes that this code names count too, also of modules that it names (`helpers.count()`): their
        tensors are `named`. They may never run, so of these what is large is taken for a program's data.
        The step of a `StepModule` is code as well: the program shares the object that it may be.
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
import enum
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat._torch.training import without_modes
from remat.capture.beside_parameters import is_quantized, names_beside
from remat.capture.cached_functions import CACHED, forget_fakes, forget_tensors
from remat.capture.code_names import NamesOfModule, as_function, globals_in, modules_named
from remat.capture.generators import KeptGenerator, generator_of, global_generators, let_be_put_back
from remat.capture.holders import (
    FORWARD,
    FUNCTIONS,
    GROWN,
    NUMBERS,
    TENSOR,
    Attributes,
    ClassAttributes,
    Defaults,
    GivenOnce,
    Globals,
    Holder,
    PartialArguments,
    Slots,
    StateLost,
    container,
    is_left_alone,
    is_looked_into,
    is_module_looked_into,
    is_own,
    joined,
)
from remat.capture.kept_tensors import KeptTensor, strided_parts
from remat.workload.held_outputs import slots_of
from remat.workload.workload import StepModule

MOST_OBJECTS = 100_000  # that are looked into, of those that are reached through code
MOST_NAMED_OBJECTS = 5_000  # of those that only functions which code names reach, and items of a container there
LARGEST_BYTES = 1 << 24  # of a tensor or an array that is reached through code
MOST_NAMED_BYTES = 1 << 26  # of all those that are copied, reached through functions that code names

_ATOMS = (*NUMBERS, type(None), type, torch.dtype, torch.device, torch.Size, enum.Enum, types.ModuleType, range)
_SIZED = (list, dict, set, collections.deque, tuple, frozenset)
_TABLES = ("_modules", "_parameters", "_buffers")  # whose keys are attributes of their module


class ModelState:
    """The state of `model` at the moment of construction.

    data              whether tensors have data; fake ones have none
    named             whether data of tensors that are `named` is copied: a plan counts no such copies
    step              a function that calls the model: its own state counts, and a loss module or a frozen model that it
                      names (a teacher). Another model that trains does not: it may be the one that is copied here
    torch_generators  torch's generators that were reached
    cached            functions that keep their results
    """

    def __init__(
        self, model: nn.Module, *, data: bool = True, named: bool = True, step: Callable[..., Any] | None = None
    ):
        self.model, self._copies_named = model, named
        self._homes = {type(module).__module__ for module in model.modules()}
        self._begin(data, {})
        self._buffers = {id(buffer) for buffer in model.buffers()}
        own = itertools.chain(model.parameters(), model.buffers())
        self._registered = {id(tensor) for tensor in own}
        self._with_step = isinstance(model, StepModule)
        with without_modes():
            self._look_from_own(model)
            self._own, self._own_holders, self._entries = dict(self._seen), len(self._holders), list(self._code)
            own_generators = len(self._generators)
            self._look_into_code()
            if step is not None:
                self._without_models = self._with_step = True
                self._entries.append(("step", as_function(step)))
                self._code.append(self._entries[-1])
                self._look_into_code()
            self._shared_generators = self._generators[own_generators:]
            devices = {p.device for p in model.parameters() if p.device.type == "cuda"} if data else set()
            self._generators += global_generators(devices)

    def _begin(self, data: bool, seen: dict[int, Any]) -> None:
        self._data, self._seen = data, seen  # objects are kept, so that an id stays its own
        self._without_models = self._with_step = self._is_shared = False
        self._beside: set[int] = set()  # ids of tensors of a step's object, and of frozen modules that it names
        self._holders: list[Holder] = []
        self._generators: list[KeptGenerator] = []
        self._tensors: list[KeptTensor] = []
        self._aside: set[int] = set()  # ids of tensors that are `named`
        self._is_aside = False
        self._aside_bytes = 0
        self.cached: list[Any] = []
        self.torch_generators: list[torch.Generator] = []
        self._code: list[tuple[str, Any]] = []  # functions and classes that are not looked into yet
        self._named_code: list[tuple[str, Any]] = []  # those that other code names
        self._named: dict[int, set[str]] = {}  # globals that were noted, by the id of their table
        self._most = MOST_OBJECTS
        self._not_looked_into: str | None = None

    def shared(self) -> ModelState:
        """Return the present state that the model shares with the rest of the program, reached through code alone.

        Generators are left out.
        """
        found = ModelState.__new__(ModelState)
        found._homes, found._copies_named = self._homes, self._copies_named
        found._begin(self._data, dict(self._own))
        found._code, found._own_holders = list(self._entries), 0
        found._without_models, found._with_step = self._without_models, self._with_step
        found._registered, found._beside = self._registered, set(self._beside)
        with without_modes():
            found._look_into_code()
        found._generators.clear()
        return found

    def keep_changed(self) -> None:
        """Let go of copies that take memory of the model's device, where their tensors are as they were."""
        with without_modes():
            self._tensors = [each for each in self._tensors if not each.has_copy_beside or each.has_changed()]

    def put_back(self) -> None:
        """Restore the state. Raises StateLost, naming what could not be restored, after restoring everything else."""
        failures: list[tuple[str, Exception]] = []
        with without_modes():
            everything: list[Holder | KeptTensor | KeptGenerator] = [*self._holders, *self._tensors, *self._generators]
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
    def lengths(self) -> dict[str, int]:
        """Lengths of lists, deques, dictionaries and sets, by name."""
        return {each.name: len(each.was) for each in self._holders if each.has_length}

    @property
    def only_once(self) -> list[str]:
        """Names of sources that give each value once, and of unknown state: one forward more changes them for good."""
        once = [holder.name for holder in self._holders if isinstance(holder, GivenOnce)]
        return once + [f"what is reached from {self._not_looked_into}"] * (self._not_looked_into is not None)

    @property
    def have_generators_drawn(self) -> bool:
        """Whether a generator of Python or numpy that is reached through code alone has drawn."""
        return any(generator.has_drawn for generator in self._shared_generators)

    @property
    def shared_generators(self) -> list[KeptGenerator]:
        """Generators reached through code alone, as they were."""
        return self._shared_generators

    @property
    def holders(self) -> tuple[Holder, ...]:
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
        """Every tensor that was reached; of parameters, only those of frozen modules that a step names."""
        kept = [tensor.value for tensor in self._tensors]
        return [value for value in kept if not isinstance(value, nn.Parameter) or id(value) in self._beside]

    @property
    def unregistered(self) -> list[torch.Tensor]:
        """Every tensor that was reached and is neither a parameter nor a buffer; without `named`."""
        return [tensor for tensor in self.tensors if id(tensor) not in self._buffers and id(tensor) not in self._aside]

    @property
    def named(self) -> list[torch.Tensor]:
        """Every tensor that was reached through functions and classes that code names: it may never run them."""
        return [tensor.value for tensor in self._tensors if id(tensor.value) in self._aside]

    # How it is read (Rule 1)

    def _look_from_own(self, model: nn.Module) -> None:
        """Look from `model`, and not from the step that it may hold as an attribute: that is code, like its globals."""
        step = vars(model).get("step") if isinstance(model, StepModule) else None
        if step is None:
            self._look_from("", model)
            return
        self._seen[id(step)] = step
        self._look_from("", model)
        del self._seen[id(step)]
        self._code.append(("step", as_function(step)))
        held = tree_leaves(dict(getattr(getattr(step, "__self__", step), "__dict__", {})))  # state, however large it is
        data = (each for each in held if isinstance(each, (torch.Tensor, np.ndarray)))
        self._beside |= {id(each) for each in data if not isinstance(each, nn.Parameter)} - self._registered

    def _look_from(self, name: str, value: Any) -> None:
        waiting = collections.deque(((name, value),))
        while waiting:
            waiting.extend(self._noted(*waiting.popleft()))

    def _look_into_code(self) -> None:
        """Look into code last, so that the model's own state is known as such."""
        self._is_shared, self._most = True, len(self._seen) + MOST_OBJECTS
        self._look_into_rest()
        self._is_aside, self._most = True, min(self._most, len(self._seen) + MOST_NAMED_OBJECTS)
        while self._named_code:
            name, value = self._named_code.pop(0)
            if id(value) not in self._seen and len(self._seen) < self._most:
                self._seen[id(value)] = value
                self._code.append((name, value))
                self._look_into_rest()
        self._is_aside = False

    def _look_into_rest(self) -> None:
        while self._code:
            for name, value in self._of_code(*self._code.pop(0)):
                self._look_from(name, value)

    def _noted(self, name: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Note `value`, and return the named values that it leads to."""
        if isinstance(value, type) and self._is_followed(value):
            self._named_code.append((name, value))
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return ()
        if self._is_shared and len(self._seen) >= self._most:
            if not (self._data and self._is_aside):  # of what code names, the rest stays as it is
                self._not_looked_into = self._not_looked_into or name
            return ()
        if self._is_aside and not self._copies_named and isinstance(value, np.ndarray):
            return ()
        if self._data and self._is_aside and self._copies_named and not self._has_room_for(value):
            self._not_looked_into = self._not_looked_into or name
            return ()
        if (self._without_models and _trains(value)) or (self._is_shared and self._is_data(value)):
            return ()
        self._seen[id(value)] = value
        if self._with_step and self._is_shared and isinstance(value, nn.Module) and not _trains(value):
            found = itertools.chain(value.parameters(), () if self._data else value.buffers())
            self._beside |= {id(tensor) for tensor in found} - self._registered
        if isinstance(value, torch.Tensor):
            has_data = self._data and not value.is_meta and (self._copies_named or not self._is_aside)
            self._tensors.append(KeptTensor(name, value, has_data))
            if self._is_aside:
                self._aside.add(id(value))
            return self._beside_tensor(name, value)
        if (generator := generator_of(value)) is not None:
            self._generators.append(generator)
            self.torch_generators += [value] if isinstance(value, torch.Generator) and not self._is_aside else []
        elif isinstance(value, (tuple, frozenset)):
            return [(name, each) for each in value]
        elif isinstance(value, (*FUNCTIONS, CACHED)):
            self._code += [] if is_own(value) else [(name, value)]
        elif (holder := container(name, value)) is not None:
            return self._held(holder)
        elif not is_left_alone(value):
            return self._of_object(name, value)
        return ()

    def _is_data(self, value: Any) -> bool:
        """Return whether `value` is more likely a program's data than state that a model changes."""
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            return self._is_aside and isinstance(value, _SIZED) and len(value) > MOST_NAMED_OBJECTS
        return _stored_bytes(value) > LARGEST_BYTES and id(value) not in self._beside

    def _is_followed(self, value: Any) -> bool:
        return id(value) not in self._seen and is_looked_into(value, self._homes)

    def _has_room_for(self, value: Any) -> bool:
        """Count the copies of what code names, and return whether they may have that of `value` too."""
        is_copied = isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, nn.Parameter)
        if is_copied and not self._is_data(value):
            self._aside_bytes += _stored_bytes(value)
        return self._aside_bytes <= MOST_NAMED_BYTES

    def _held(self, holder: Holder) -> Iterator[tuple[str, Any]]:
        self._holders.append(holder)
        return ((holder.named(key), value) for key, value in holder.was.items())

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Collect the state of a module or another object."""
        kinds = type(value).__mro__
        if isinstance(own := getattr(value, "__dict__", None), dict):
            tables = [own[table] for table in _TABLES if isinstance(value, nn.Module)]
            self._seen |= {id(table): table for table in tables}
            for attributes in (own, *tables):
                yield from self._held(Attributes(name, attributes))
            yield name, own.get(FORWARD)
        if any(map(slots_of, kinds)):
            yield from self._held(Slots(name, value))
        self._code += ((kind.__qualname__, kind) for kind in kinds if id(kind) not in self._seen)
        self._seen |= {id(kind): kind for kind in kinds}

    def _beside_tensor(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
        """Collect the attributes of a tensor but for its own numbers, and scales that a library keeps."""
        names = [] if is_quantized(tensor) else names_beside(tensor)
        names = [each for each in names if not _is_alias(vars(tensor)[each], tensor)]
        return self._held(Globals(name, vars(tensor), names)) if names else ()

    def _of_code(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Collect the state of a class, a method, a partial function, or a function."""
        if isinstance(value, CACHED):
            self.cached.append(value)
            yield name, value.__wrapped__
        elif isinstance(value, types.MethodType):
            yield from ((name, each) for each in (value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((name, each) for each in (value.func, value.keywords))
            yield from self._held(PartialArguments(name, value))
        elif isinstance(value, NamesOfModule):
            yield from self._of_globals(value.name, vars(value.module), value.names)
        elif is_left_alone(value):
            return
        elif isinstance(value, type):
            yield from ((name, each) for each in map(_function_of, vars(value).values()) if each is not None)
            yield from self._held(ClassAttributes(name, value))
            related = (*value.__mro__[1:], *(each for each in vars(value).values() if isinstance(each, type)))
            self._named_code += ((each.__qualname__, each) for each in related if self._is_followed(each))
        else:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((joined(name, variable), cell) for variable, cell in cells)
            if value.__defaults__ or value.__kwdefaults__:
                yield from self._held(Defaults(name, value))
            yield from self._held(Attributes(name, vars(value)))
            yield from self._of_globals(str(value.__module__), value.__globals__, globals_in(value.__code__))
            is_wanted = functools.partial(is_module_looked_into, homes=self._homes)
            self._named_code += ((each.name, each) for each in modules_named(value, is_wanted))

    def _of_globals(self, name: str, table: dict[str, Any], names: Collection[str]) -> Iterator[tuple[str, Any]]:
        known = self._named.setdefault(id(table), set())
        new = set(names) - known
        known |= new
        yield from self._held(Globals(name, table, new))
        self._named_code += ((key, table[key]) for key in new if key in table and self._is_followed(table[key]))


def _is_alias(value: Any, tensor: torch.Tensor) -> bool:
    if not (isinstance(value, torch.Tensor) and value.layout is tensor.layout is torch.strided):
        return False
    return value.untyped_storage()._cdata == tensor.untyped_storage()._cdata


class Numbers:
    """The numbers of a state of some `names`, at the moment of construction.

    lists  names of lists that are put back to what they were, whatever they hold
    """

    def __init__(self, state: ModelState | None, names: Collection[str], *, lists: Collection[str] = ()):
        holders = () if state is None else state.holders
        self._whole = [each for each in holders if each.is_whole(names) or each.is_whole(lists, numbers=False)]
        held = ((holder, key, value) for holder in holders for key, value in holder.was.items())
        self._held = [
            (holder, key, value)
            for holder, key, value in held
            if isinstance(value, NUMBERS) and holder.named(key) in names and holder not in self._whole
        ]

    def put_back(self) -> None:
        for holder in self._whole:
            holder.put_back()
        for holder, key, value in self._held:
            holder.put(key, value)


class SharedState:
    """State that a model on fake tensors and its `step` share with the program; the program's stays unchanged.

    fake  makes the fake of a tensor; the model's own state gets its fakes at once
    """

    def __init__(
        self, model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor], step: Callable[..., Any] | None = None
    ):
        self._model, self._fake = ModelState(model, data=False, step=step), fake
        self._model.replace(fake, own=True)
        let_be_put_back(self._model.shared_generators)
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
        for function in outside.cached:
            forget_tensors(function)
        runs = {id(function): function.cache_info().misses for function in outside.cached}
        del inside  # so that objects dropped by the model are freed
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            self._inside = self._model.shared()
            outside.put_back()
            for function in self._inside.cached:
                if function.cache_info().misses != runs.get(id(function)):
                    forget_fakes(function)

    def require_kept(self) -> None:
        """Raise StateLost if the model has taken values from a source that gives each value once."""
        for holder in self._model.holders:
            if isinstance(holder, GivenOnce):
                holder.put_back()


def _stored_bytes(value: torch.Tensor | np.ndarray) -> int:
    parts = [value] if isinstance(value, np.ndarray) else strided_parts(value)
    return sum(part.nbytes for part in parts)


def _trains(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())


def _function_of(attribute: Any) -> Any:
    """Return the function of a class's attribute: of a method of any kind, a property, a cached property; or None."""
    if isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    elif isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, (functools.cached_property, functools.partialmethod)):
        attribute = attribute.func
    return attribute if isinstance(attribute, (types.FunctionType, CACHED)) else None
