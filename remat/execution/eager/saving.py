"""Saving: what the operators of a saved node returned is kept below autograd, and given back in the recomputation.

A node is often several operators: casts, views, a product, a sum in place. Each is judged by its schema and by the
tensors that it returned:

  a view, or a number   runs again: it takes neither time nor memory
  a cast                runs again: autocast may have remembered it in forward, and not now, or the other way round
  a write               is left out where it goes to what is kept, which is final; elsewhere (a cast) it runs again
  everything else       is kept, result by result, and given back without running the operator: tensors that are new,
                        tensors in tuples and lists, numbers and None beside them as they are. A tensor that lies in
                        an argument's storage is not kept but made from that argument again

What is kept is a tape: the recomputation must ask for the same operators in the same order. Where it does not, or where
somebody has written to a kept tensor since, the gradients would be wrong, so both are errors.

torch's selective checkpointing looks tensors up by operator and count and keeps what aliases an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from remat._torch.training import UnseenMode, pop_mode, push_mode, sharing_versions
from remat.capture.schemas import is_seeded, makes_nothing, tensors_of, written
from remat.errors import RematError

_CAST = torch.ops.aten._to_copy.default


class _LeanMode(UnseenMode):
    """A dispatch mode entered for one node: what `TorchDispatchMode` notes for Dynamo at its borders is left out."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Self:
        push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        pop_mode()


@dataclasses.dataclass(frozen=True)
class _Argument:
    """A result that lies in the storage of tensor `index` among the arguments; `layout` where it is not that tensor."""

    index: int
    layout: tuple[Any, Any, Any] | None = None

    def of(self, given: list[torch.Tensor]) -> torch.Tensor:
        tensor = given[self.index]
        return tensor if self.layout is None else tensor.as_strided(*self.layout)


class _Kept:
    """A tensor as an operator gave it, apart from autograd, and its version when the node had ended."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = _apart(tensor)
        self.version = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """What `func` returned, with a `_Kept` or an `_Argument` in the place of every tensor."""

    func: Any
    value: Any


def note_versions(results: list[Result]) -> None:
    """From now on, whoever writes to what is kept changes it. A replay's own writes, left out, advance versions too."""
    for result in results:
        for kept in _kept_in(result.value):
            kept.version = kept.tensor._version


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without a history; whoever writes to either advances the version of both."""
    with sharing_versions():
        return tensor.detach()


def _storage(tensor: torch.Tensor) -> int:
    """What tells the storage of `tensor` from all others alive; sparse tensors have none, and share with nobody."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Save(_LeanMode):
    """Keeps what operators return while a saved node runs.

    results  what is kept, in order
    drawn    whether an operator may have drawn random numbers

    Raises RematError, naming the operator, for what can be neither left out nor run again.
    """

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.drawn = False
        self._made: set[int] = set()  # storages of casts

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        note_versions(self.results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func is _CAST:
            self._made.add(_storage(out))
        elif not makes_nothing(func):
            if func._schema.is_mutable:
                self._require_own(func, args, kwargs)
            if func._schema.returns:
                self.results.append(Result(func, _encoded(func, out, args, kwargs)))
            self.drawn = self.drawn or is_seeded(func)
        return out

    def _kept(self) -> Iterator[_Kept]:
        for result in self.results:
            yield from _kept_in(result.value)

    def _require_own(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse a write to what the node did not make: it can be neither left out nor repeated."""
        own = {_storage(kept.tensor) for kept in self._kept()} | self._made
        if any(_storage(tensor) not in own for tensor in written(func, args, kwargs)):
            raise RematError(
                f"operator {func} writes to a value that its node did not make, and so the node cannot be saved; "
                "take it out of the plan's saves."
            )
        returned = any(returned.alias_info is None for returned in func._schema.returns)
        if returned and any(_storage(tensor) in self._made for tensor in written(func, args, kwargs)):
            raise RematError(
                f"operator {func} returns a value and writes to a cast besides, and so its node cannot be saved; "
                "take it out of the plan's saves."
            )


def _encoded(func: Any, out: Any, args: Any, kwargs: Any) -> Any:
    """`out` with a `_Kept` or an `_Argument` in the place of every tensor."""
    given = list(tensors_of(args, kwargs))
    seen: dict[int, _Kept] = {}

    def encoded(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            return seen[id(leaf)]
        storage = _storage(leaf)
        for index, argument in enumerate(given):
            if argument is leaf:
                return _Argument(index)
            if _storage(argument) == storage:
                if argument.dtype != leaf.dtype:
                    raise RematError(
                        f"operator {func} returns its argument's memory as another dtype without saying so, and so its "
                        "node cannot be saved; take it out of the plan's saves."
                    )
                return _Argument(index, (leaf.size(), leaf.stride(), leaf.storage_offset()))
        seen[id(leaf)] = kept = _Kept(leaf)
        return kept

    return tree_map(encoded, out)


def _kept_in(value: Any) -> Iterator[_Kept]:
    if isinstance(value, _Kept):
        yield value
    elif isinstance(value, (tuple, list)):
        for leaf in value:
            yield from _kept_in(leaf)


class RanAgain(_LeanMode):
    """Sees what runs below a `Replay`. `found` if that was more than views, casts and writes to casts."""

    def __init__(self) -> None:
        self.found = False
        self._made: set[int] = set()  # storages of casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func is _CAST:
            self._made.add(_storage(out))
        elif not makes_nothing(func):
            writes = [_storage(tensor) in self._made for tensor in written(func, args, kwargs)]
            self.found = self.found or not writes or not all(writes)
        return out


class Replay(_LeanMode):
    """Gives back what `Save` kept, without running the operators that made it.

    Raises RematError where the node asks for other operators than it did in forward, or a kept tensor has changed.
    """

    def __init__(self, results: list[Result]):
        self._results = results[::-1]
        self._final: set[int] = set()  # storages of what is kept
        for result in results:
            for kept in _kept_in(result.value):
                self._final.add(_storage(kept.tensor))
                if kept.tensor._version != kept.version:
                    raise RematError(
                        f"the output of {result.func}, which a region saved, was changed in place before its backward, "
                        "and recomputing with it would give wrong gradients; do not change it, or plan without "
                        "saving it."
                    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_nothing(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _CAST:
            out = func(*args, **kwargs) if kwargs else func(*args)
            self._final.discard(_storage(out))  # what had this address before is no more
            return out
        value = self._next(func) if func._schema.returns else None
        if func._schema.is_mutable and any(_storage(t) not in self._final for t in written(func, args, kwargs)):
            func(*args, **(kwargs or {}))
        return _decoded(value, list(tensors_of(args, kwargs)))

    def _next(self, func: Any) -> Any:
        """What `func` returned in forward."""
        found = self._results.pop() if self._results else None
        if found is None or found.func is not func:
            raise RematError(
                f"a saved node ran {found.func if found else 'nothing more'} in forward, and asks for {func} when it "
                "is recomputed; what was saved cannot be given back. Plan without saving that node."
            )
        return found.value


def _decoded(value: Any, given: list[torch.Tensor]) -> Any:
    """What `_encoded` has encoded, with the tensors of this recomputation."""
    seen: dict[int, torch.Tensor] = {}

    def decoded(leaf: Any) -> Any:
        if isinstance(leaf, _Argument):
            return leaf.of(given)
        if not isinstance(leaf, _Kept):
            return leaf
        if id(leaf) not in seen:
            seen[id(leaf)] = _apart(leaf.tensor)
        return seen[id(leaf)]

    return tree_map(decoded, value)
