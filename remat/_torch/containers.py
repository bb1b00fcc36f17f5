"""How Dynamo traces lists, deques and dictionaries that are there before a forward runs, where it does so wrongly.

Rule 1  A list that a trace only appends to is no part of the trace: what is new comes behind what the list has by then.
        Dynamo guards on the length of every list, and would trace anew each time that it has grown. An item by its
        place from the beginning may be read too. As soon as the trace reads the list in any other way, it is Dynamo's,
        length and all.
Rule 2  A deque keeps its `maxlen`, which Dynamo forgets.
Rule 3  A dictionary from which keys are taken, or in which they are moved, is written back in its new order, and its
        order decides whether a trace fits. Dynamo looks at neither where a key is moved, or the last one is taken.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from remat._torch.door import internal
from remat._torch.dynamo import Translator, Variable, constant

_PURPOSE = "trace lists, deques and dictionaries that a forward changes"
_TAKING = frozenset(("pop", "popitem", "move_to_end", "__delitem__"))  # methods that may change the order of keys


@contextlib.contextmanager
def containers_kept(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Trace lists, deques and dictionaries as the rules say, in traces for which `where` is true."""
    builder = internal("_dynamo.variables.builder.VariableBuilder", _PURPOSE)
    original = builder._wrap

    def wrap(self: Any, value: Any) -> Variable:
        if type(value) is list and where(self.tx):
            return _appended(self, value, original)
        if type(value) is deque and value.maxlen is not None and where(self.tx):
            return _bounded(self, value, original)
        return original(self, value)

    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(builder, "_wrap", wrap))
        for kind in _dictionaries():
            for name, ordered in (("call_method", _calling), ("mp_ass_subscript_impl", _setting)):
                if name in vars(kind):
                    changes.enter_context(mock.patch.object(kind, name, ordered(vars(kind)[name], where)))
        yield


# Lists (Rule 1)


def _appended(builder: Any, value: list[Any], wrap: Callable[[Any, Any], Variable]) -> Variable:
    guards = internal("_dynamo.guards.GuardBuilder", _PURPOSE)
    side_effects = builder.tx.output.side_effects
    builder.install_guards(guards.TYPE_MATCH)

    def read() -> list[Variable]:
        untracked = mock.patch.object(type(side_effects), "track_mutable", lambda self, item, variable: variable)
        with untracked:  # it already is
            return list(wrap(builder, value).items)

    made = _appended_list()(None, read, source=builder.source)
    made.held = lambda: value  # not followed as a list of variables would be
    return side_effects.track_mutable(value, made)


@functools.cache
def _appended_list() -> type[Any]:
    """Return the class of lists that were not read yet."""
    plain = internal("_dynamo.variables.ListVariable", _PURPOSE)
    new = internal("_dynamo.variables.base.ValueMutationNew", _PURPOSE)
    instruction = internal("_dynamo.bytecode_transformation.create_instruction", _PURPOSE)
    build = internal("_dynamo.variables.base.VariableTracker.build", _PURPOSE)
    item_of = internal("_dynamo.source.GetItemSource", _PURPOSE)

    class AppendedList(plain):  # type: ignore[misc, valid-type]
        """A list with items behind those that it has, which are read when they are needed.

        items  all of them: asking for them reads the list
        """

        def __init__(self, items: Any, read: Callable[[], list[Variable]] | None = None, **kwargs: Any):
            self._all: list[Variable] | None = None
            self._behind: list[Variable] = []
            super().__init__([] if items is None else items, **kwargs)
            if read is not None:
                self._read, self._all = read, None

        @property
        def items(self) -> list[Variable]:
            if self._all is None:
                self._all = [*self._read(), *self._behind]
            return self._all

        @items.setter
        def items(self, items: list[Variable]) -> None:
            self._all = items

        def clone(self, **kwargs: Any) -> Variable:
            own = ("_all", "_behind", "_read", "held")
            kept = {name: value for name, value in vars(self).items() if name not in own}
            return plain(**{"items": self.items, **kept, **kwargs})

        def modified(self, items: list[Variable], **kwargs: Any) -> Variable:
            return plain(items, **kwargs)

        def getitem_const(self, tx: Translator, arg: Variable) -> Variable:
            """Return an item: one that the list has by then, counted from its beginning, says nothing of its length."""
            if self._all is None and arg.is_python_constant():
                index, held = arg.as_python_constant(), self.held()
                if type(index) is int and 0 <= index < len(held):
                    return build(tx, held[index], item_of(self.source, index))
            return super().getitem_const(tx, arg)

        def as_python_constant(self) -> Any:  # asked as the list is written back, too
            if self._all is None and self._behind:
                raise NotImplementedError
            return super().as_python_constant()

        def __repr__(self) -> str:
            return f"{type(self).__name__}()" if self._all is None else super().__repr__()

        def call_method(self, tx: Translator, name: str, args: Any, kwargs: Any) -> Variable:
            if self._all is not None or name not in ("append", "extend") or not self.is_mutable():
                return super().call_method(tx, name, args, kwargs)
            added = plain([], mutation_type=new())
            result = added.call_method(tx, name, args, kwargs)
            if self._all is None and not any(each is self for each in added.items):
                self._behind += added.items
            else:  # meanwhile it was read
                self.items.extend(added.items)
            if added.items:
                tx.output.side_effects.mutation(self)
            return result

        def reconstruct(self, codegen: Any) -> None:
            if self._all is not None:
                super().reconstruct(codegen)
                return
            codegen.append_output(instruction("BUILD_LIST", arg=0))
            codegen(self.source)
            codegen.append_output(instruction("LIST_EXTEND", arg=1))
            codegen.foreach(self._behind)
            codegen.append_output(instruction("BUILD_LIST", arg=len(self._behind)))
            codegen.append_output(instruction("LIST_EXTEND", arg=1))

    return AppendedList


# Deques (Rule 2)


def _bounded(builder: Any, value: Any, wrap: Callable[[Any, Any], Variable]) -> Variable:
    guards = internal("_dynamo.guards.GuardBuilder", _PURPOSE)
    install = internal("_dynamo.guards.install_guard", _PURPOSE)
    attribute = internal("_dynamo.source.AttrSource", _PURPOSE)
    side_effects = builder.tx.output.side_effects
    with mock.patch.object(type(side_effects), "track_mutable", lambda self, item, variable: variable):
        items = wrap(builder, value).items
    install(attribute(builder.source, "maxlen").make_guard(guards.CONSTANT_MATCH))
    made = _bounded_deque()(items, _bound()(value.maxlen), source=builder.source)
    return side_effects.track_mutable(value, made)


@functools.cache
def _bound() -> type[Any]:
    """Return the class of constants that do not keep Dynamo from writing a deque back.

    It refuses to where the bound is not None. It empties the deque and fills it anew, which is right for every bound.
    """

    class Bound(internal("_dynamo.variables.ConstantVariable", _PURPOSE)):  # type: ignore[misc]
        def is_constant_none(self) -> bool:
            return True

    return Bound


@functools.cache
def _bounded_deque() -> type[Any]:
    """Return the class of deques whose copies have their bound too, and whose bound traced code sees as it is."""
    plain = internal("_dynamo.variables.lists.DequeVariable", _PURPOSE)

    class BoundedDeque(plain):  # type: ignore[misc, valid-type]
        def modified(self, items: list[Variable], **kwargs: Any) -> Variable:
            return plain(items, constant(self.maxlen.as_python_constant()), **kwargs)

        def var_getattr(self, tx: Translator, name: str) -> Variable:
            if name == "maxlen":
                return constant(self.maxlen.as_python_constant())
            return super().var_getattr(tx, name)

    return BoundedDeque


# Dictionaries (Rule 3)


def _dictionaries() -> list[Any]:
    module = internal("_dynamo.variables.user_defined", _PURPOSE)
    of_order = getattr(module, "OrderedDictVariable", None)  # not in older ones
    return [internal("_dynamo.variables.ConstDictVariable", _PURPOSE), *([] if of_order is None else [of_order])]


def _calling(original: Callable[..., Variable], where: Callable[[Translator], bool]) -> Callable[..., Variable]:
    def call_method(self: Variable, tx: Translator, name: str, args: Any, kwargs: Any) -> Variable:
        if name in _TAKING and where(tx):
            _keep_order(self, tx)
        return original(self, tx, name, args, kwargs)

    return call_method


def _setting(original: Callable[..., Variable], where: Callable[[Translator], bool]) -> Callable[..., Variable]:
    def mp_ass_subscript_impl(self: Variable, tx: Translator, key: Variable, value: Variable | None) -> Variable:
        if value is None and where(tx):  # deletes it
            _keep_order(self, tx)
        return original(self, tx, key, value)

    return mp_ass_subscript_impl


def _keep_order(dictionary: Variable, tx: Translator) -> None:
    inner: Variable = getattr(dictionary, "_base_vt", None)
    for each in (dictionary, inner):  # of a subclass, the dictionary that it is
        if hasattr(each, "should_reconstruct_all"):
            each.should_reconstruct_all = True
            each.install_dict_keys_match_guard()
            if each.source is not None:
                tx.output.guard_on_key_order.add(each.source)
