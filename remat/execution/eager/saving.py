"""Saving: what the operators of a saved node returned is kept below autograd, and given back in the recomputation.

A node is often several operators: casts, views, a product, a sum in place. Each is judged by its schema and by the
tensors that it returned:

  a view, or a number   runs again: it takes neither time nor memory; also a view in place, which writes no data
  a cast                runs again: autocast may have remembered it in forward, and not now, or the other way round;
                        but integers made of a kept result that is written to later are kept: they would be of what
                        was written (`quantile`)
  a write               is left out where it goes to what is kept, which is final; elsewhere (a cast) it runs again
  everything else       is kept, result by result, and given back without running the operator: tensors that are new,
                        tensors in tuples and lists, numbers and None beside them as they are. A tensor that lies in
                        an argument's storage is not kept but made from that argument again

What is kept is a tape: the recomputation must ask for the same operators in the same order. Where it does not, or where
a kept tensor was written to since, the gradients would be wrong, so both are errors.

torch's selective checkpointing looks tensors up by operator and count and keeps what aliases an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from remat._torch.training import LeanMode, sharing_versions
from remat.capture.schemas import makes_nothing, relabels, tensors_of, traits_of, written
from remat.errors import RematError

_CAST = torch.ops.aten._to_copy.default


@dataclasses.dataclass(frozen=True)
class _Argument:
    """A result in the storage of tensor `index` of the arguments; `layout` if it is not that tensor itself."""

    index: int
    layout: tuple[Any, Any, Any] | None = None

    def of(self, given: list[torch.Tensor]) -> torch.Tensor:
        tensor = given[self.index]
        return tensor if self.layout is None else tensor.as_strided(*self.layout)


class MaybeOnHost(Protocol):
    """A tensor that may be on the host."""

    def fetch(self) -> None:
        """Allocate its memory on the device, and begin to bring it back."""

    def value(self) -> torch.Tensor:
        """Return the tensor on the device."""


class _Kept:
    """A tensor as an operator returned it, detached, with its version when the node ended."""

    __slots__ = ("_away", "_tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self._tensor: torch.Tensor | None = tensor
        self._away: MaybeOnHost | None = None
        self.version = tensor._version

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            assert self._away is not None
            self._tensor, self._away = _apart(self._away.value()), None  # not a view: the node may write to it
            self.version = self._tensor._version
        return self._tensor

    @property
    def is_changed(self) -> bool:
        """Whether it was written to since."""
        return self.tensor._version != self.version

    def copy(self) -> None:
        """Keep a copy in place of the tensor."""
        self._tensor = self.tensor.clone()
        self.version = self._tensor._version

    def send(self, pack: Callable[[torch.Tensor], MaybeOnHost]) -> None:
        """Move the tensor to where `pack` puts it, until it is asked for."""
        self._away, self._tensor = pack(self.tensor), None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._away is not None:
            self._away.fetch()


class Tape:
    """The results of a saved node's operators, in order.

    results  (operator, its result with a `_Kept` or an `_Argument` in place of every tensor)
    kept     every `_Kept` in them
    writes   whether an operator wrote to something
    casts    kept casts to integers, by their number among those of kept results
    copied   whether the kept tensors are copies, since another node writes to the results
    """

    __slots__ = ("casts", "copied", "kept", "results", "writes")

    def send(self, storage: int, pack: Callable[[torch.Tensor], MaybeOnHost]) -> None:
        """Send kept tensors in `storage` to where `pack` puts them."""
        self.require_unchanged()
        for kept in self.kept:
            if storage_of(kept.tensor) == storage:
                kept.send(pack)

    def __init__(self) -> None:
        self.results: list[tuple[Any, Any]] = []
        self.kept: list[_Kept] = []
        self.casts: dict[int, _Kept] = {}
        self.writes = False
        self.copied = False

    def keep_copies(self) -> None:
        """Keep copies of the results, which another node is about to write to."""
        self.copied = True
        for kept in self.kept:
            kept.copy()

    def fetch(self) -> None:
        """Begin to bring back the sent tensors."""
        for kept in self.kept:
            kept.fetch()

    def note_versions(self) -> None:
        """Note versions, to find later writes to a kept tensor. A replay's own writes advance versions too."""
        for kept in self.kept:
            kept.version = kept.tensor._version

    def require_unchanged(self) -> None:
        for kept in self.kept:
            if kept.is_changed:
                func = next(func for func, value in self.results if any(k is kept for k in _kept_in(value)))
                raise RematError(
                    f"the output of {func}, which a region saved, was changed in place before its backward, "
                    "and recomputing with it would give wrong gradients; do not change it, or plan without "
                    "saving it."
                )


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without a history; a write to either advances the version of both."""
    with sharing_versions():
        return tensor.detach()


def _makes_integers(kwargs: Any) -> bool:
    """Return whether a cast is one to integers: as it is held until its node ends, others would change a peak."""
    dtype = kwargs.get("dtype") if kwargs else None
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of `tensor` among those alive; a sparse tensor has its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Save(LeanMode):
    """Keeps the results of operators while a saved node runs.

    tape   the kept results
    drawn  whether an operator may have drawn random numbers

    Raises RematError, naming the operator, for one that can be neither skipped nor run again.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self.drawn = False
        self._made: set[int] = set()  # storages of casts
        self._casts: list[tuple[int, _Kept]] = []  # to integers, of kept results and such casts: source and result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._casts.clear()
        self.tape.note_versions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        traits = traits_of(func)
        if traits.makes_nothing:
            return out
        if func is _CAST:
            self._made.add(storage_of(out))
            if _makes_integers(kwargs) and (source := storage_of(args[0])) in self._own | self._cast:
                self._casts.append((source, _Kept(_apart(out))))
            return out
        if traits.writes:
            self.tape.writes = True  # so there is no recipe: it keeps a view, of which autograd refuses a view in place
            self._require_own(func, args, kwargs)
            self._keep_casts({storage_of(tensor) for tensor in written(func, args, kwargs)})
        if traits.relabels:
            return out
        if traits.returns:
            self.tape.results.append((func, _encoded(func, out, args, kwargs, self.tape.kept)))
        self.drawn = self.drawn or traits.is_seeded
        return out

    @property
    def has_cast(self) -> bool:
        return bool(self._made)

    @property
    def _own(self) -> set[int]:
        """The storages of kept results."""
        return {storage_of(kept.tensor) for kept in self.tape.kept}

    @property
    def _cast(self) -> set[int]:
        return {storage_of(cast.tensor) for _, cast in self._casts}

    def _keep_casts(self, changed: set[int]) -> None:
        for number, (source, cast) in enumerate(self._casts):
            if source in changed and number not in self.tape.casts:
                self.tape.casts[number] = cast
                self.tape.kept.append(cast)

    def _require_own(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse a write to a tensor that the node did not create: it can be neither skipped nor repeated."""
        own = self._own | self._made
        if any(storage_of(tensor) not in own for tensor in written(func, args, kwargs)):
            raise RematError(
                f"operator {func} writes to a value that its node did not make, and so the node cannot be saved; "
                "take it out of the plan's saves."
            )
        returned = any(returned.alias_info is None for returned in func._schema.returns)
        if returned and any(storage_of(tensor) in self._made for tensor in written(func, args, kwargs)):
            raise RematError(
                f"operator {func} returns a value and writes to a cast besides, and so its node cannot be saved; "
                "take it out of the plan's saves."
            )


def _encoded(func: Any, out: Any, args: Any, kwargs: Any, into: list[_Kept]) -> Any:
    """Replace every tensor of `out` by a `_Kept`, added to `into`, or by an `_Argument`."""
    given = list(tensors_of(args, kwargs))
    seen: dict[int, _Kept] = {}

    def encoded(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            return seen[id(leaf)]
        storage = storage_of(leaf)
        for index, argument in enumerate(given):
            if argument is leaf:
                return _Argument(index)
            if storage_of(argument) == storage:
                if argument.dtype != leaf.dtype:
                    raise RematError(
                        f"operator {func} returns its argument's memory as another dtype without saying so, and so its "
                        "node cannot be saved; take it out of the plan's saves."
                    )
                return _Argument(index, (leaf.size(), leaf.stride(), leaf.storage_offset()))
        seen[id(leaf)] = kept = _Kept(_apart(leaf))
        into.append(kept)
        return kept

    return encoded(out) if isinstance(out, torch.Tensor) else tree_map(encoded, out)


class Recipe:
    """How to save a node without watching it: it keeps one tensor, its value, and writes nothing.

    A linear layer or an activation is such a node. If a call has the signature of an earlier one, the same operators
    run, and their results have the same places in the value. A replay watches all the same, so a node that runs other
    operators after all is an error there.
    """

    __slots__ = ("_layout", "_results")

    def __init__(self, results: list[tuple[Any, Any]], layout: tuple[Any, Any, Any] | None):
        self._results = results
        self._layout = layout

    def tape(self, value: torch.Tensor) -> Tape:
        """Return the tape that `Save` would have recorded for a call that returned `value`."""
        tape, apart = Tape(), value.detach()
        kept = _Kept(apart if self._layout is None else apart.as_strided(*self._layout))
        tape.results = [(func, result or kept) for func, result in self._results]
        tape.kept.append(kept)
        return tape


def signature_of(args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return the properties of arguments that decide which operators a call runs; None if they are unknown.

    They are unknown under autocast, which may or may not have cached a cast.
    """
    found: list[Any] = [torch.is_grad_enabled(), *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            device = value.device
            if value.layout is not torch.strided or torch.is_autocast_enabled(device.type):
                return None
            found.append((value.shape, value.stride(), value.dtype, device, value.requires_grad))
        elif kind in _PLAIN:
            found.append((kind, value))
        else:
            return None
    return tuple(found)


_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def recipe_of(save: Save, value: Any) -> Recipe | None:
    """Return the recipe of a call that `save` watched and that returned `value`; None if calls must be watched."""
    tape = save.tape
    if save.drawn or save.has_cast or tape.writes or len(tape.kept) != 1 or type(value) is not torch.Tensor:
        return None
    tensor = tape.kept[0].tensor
    if tensor.dtype != value.dtype or storage_of(tensor) != storage_of(value):
        return None
    if not all(isinstance(result, (_Kept, _Argument)) for _, result in tape.results):
        return None
    layouts = [(t.size(), t.stride(), t.storage_offset()) for t in (tensor, value)]
    results = [(func, None if isinstance(result, _Kept) else result) for func, result in tape.results]
    return Recipe(results, None if layouts[0] == layouts[1] else layouts[0])


def _kept_in(value: Any) -> Iterator[_Kept]:
    if isinstance(value, _Kept):
        yield value
    elif isinstance(value, (tuple, list)):
        for leaf in value:
            yield from _kept_in(leaf)


class RerunWatch(LeanMode):
    """Sees the operators below a `Replay`; `found` says whether any were more than views, casts and writes to casts."""

    def __init__(self) -> None:
        self.found = False
        self._made: set[int] = set()  # storages of casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func is _CAST:
            self._made.add(storage_of(out))
        elif not (makes_nothing(func) or relabels(func)):
            writes = [storage_of(tensor) in self._made for tensor in written(func, args, kwargs)]
            self.found = self.found or not writes or not all(writes)
        return out


class Replay(LeanMode):
    """Returns the results that `Save` kept, without running their operators.

    again  whether the tape will be used once more; otherwise the kept tensors themselves are returned

    Raises RematError if the node runs other operators than in forward, or a kept tensor has changed.
    """

    def __init__(self, tape: Tape, *, again: bool):
        tape.require_unchanged()
        self._again, self._copied = again, tape.copied
        # Storages of kept tensors; only writes look them up.
        self._final = {storage_of(kept.tensor) for kept in tape.kept} if tape.writes else set()
        self._results = tape.results[::-1]  # a result that is handed out is let go
        self._casts, self._cast_count = dict(tape.casts), 0
        self._cast: set[int] = set()  # storages of integers made of kept results again
        if not again:
            tape.results.clear()
            tape.kept.clear()
            tape.casts.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traits = traits_of(func)
        if traits.makes_nothing or traits.relabels:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _CAST:
            return self._cast_again(func, args, kwargs)
        value = self._next(func) if traits.returns else None
        if traits.writes and any(storage_of(t) not in self._final for t in written(func, args, kwargs)):
            func(*args, **(kwargs or {}))
        if type(value) is _Kept:
            return self._given_back(value)
        return self._decoded(value, list(tensors_of(args, kwargs)))

    def _cast_again(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        is_of_kept = _makes_integers(kwargs) and storage_of(args[0]) in self._final | self._cast
        self._cast_count += is_of_kept
        if is_of_kept and (kept := self._casts.pop(self._cast_count - 1, None)) is not None:
            return self._given_back(kept)
        out: torch.Tensor = func(*args, **kwargs) if kwargs else func(*args)
        self._final.discard(storage_of(out))  # the storage that had this address is gone
        self._cast.discard(storage_of(out))
        if is_of_kept:
            self._cast.add(storage_of(out))
        return out

    def _next(self, func: Any) -> Any:
        """Return the recorded result of the next operator, which must be `func`."""
        found, value = self._results.pop() if self._results else (None, None)
        if found is not func:
            raise RematError(
                f"a saved node ran {found or 'nothing more'} in forward, and asks for {func} when it "
                "is recomputed; what was saved cannot be given back. Plan without saving that node."
            )
        return value

    def _given_back(self, kept: _Kept) -> torch.Tensor:
        if not self._again:
            return kept.tensor
        if not self._copied:
            return _apart(kept.tensor)
        found = kept.tensor.clone()
        if self._final:  # the node writes to it
            self._final.add(storage_of(found))
        return found

    def _decoded(self, value: Any, given: list[torch.Tensor]) -> Any:
        """Decode a value of `_encoded` with the tensors of this recomputation."""
        seen: dict[int, torch.Tensor] = {}

        def decoded(leaf: Any) -> Any:
            if isinstance(leaf, _Argument):
                return leaf.of(given)
            if not isinstance(leaf, _Kept):
                return leaf
            if id(leaf) not in seen:
                seen[id(leaf)] = self._given_back(leaf)
            return seen[id(leaf)]

        return tree_map(decoded, value)
