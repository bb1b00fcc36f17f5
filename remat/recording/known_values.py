"""Known values: integers of a batch keep their values while everything else of it is a shape.

Models of images, sound and packed text compute shapes out of what a batch holds: how many patches an image has
(`grid_thw`), where a sequence ends (`cu_seqlens`), which tokens stand for an image. A fake tensor cannot answer. So
what a batch is made of without floats has a twin with data, on the host, and what is computed out of known values
alone is computed for the twins too. Where a shape or a number is asked for, the twin answers.

Rule 1  In the making of a batch random numbers are known too: drawn from a generator of their own. Once it is made,
        random floats are not: what they steered (a mask, lengths, labels) is. In a step no random number is known, nor
        is anything that depends on one, on a weight or on a buffer. Except for a buffer of one number, or of few
        integers: a flag (`if self.initialized`), a pointer into a queue. It has the value that the making of the model
        gave it, in whatever way (on the meta device, whose tensors have twins then), until a forward writes what is not
        known. `is_asked` tells those whose numbers code reads: what a forward does may depend on them.
Rule 2  Twins are views of each other where the fakes are. What is written into with unknown values is unknown. What
        is overwritten as a whole with known values is known.
Rule 3  Only small results are known (`MOST_INTEGERS`, `MOST_FLOATS`): what decides a shape is not large.
Rule 4  What is drawn in the making of a batch, or computed out of that, is known to be so: training draws others.

`torch.tensor` reads numbers off the tensors in a list beneath all dispatch; meanwhile it is handed their values. So is
who asks a tensor for a list.

A FakeTensor has a `constant` of its own, which holds one number and is lost on the way to a GPU.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from remat._torch.dynamo import know_functions, not_begun_at
from remat._torch.recording import DEVICE, untraced
from remat._torch.training import UnseenMode, without_modes
from remat.capture.eager_answers import traced_as
from remat.capture.schemas import is_seeded, written
from remat.recording.ctc_shapes import CTC_SHAPES
from remat.recording.observed_channels import FUSED_OBSERVER, give_channels
from remat.recording.passed_checks import answer_that_passes
from remat.shared import Shared

MOST_INTEGERS = 1 << 20
MOST_FLOATS = 1 << 16
MOST_OF_A_MODEL = 1 << 8  # flags, lengths and masks of features; no table of positions
_SHAPE_ONLY = {  # their result depends on their first argument's shape alone
    *(torch.ops.aten.ones_like.default, torch.ops.aten.zeros_like.default, torch.ops.aten.full_like.default),
    *(torch.ops.aten.new_ones.default, torch.ops.aten.new_zeros.default, torch.ops.aten.new_full.default),
}
_OVERWRITING = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}
_OVERWRITING |= {torch.ops.aten.zero_.default}
_MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)  # they run no operator on the meta device
_EMPTY_FACTORIES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_HOST = {"device": torch.device("cpu"), "pin_memory": False}


_View = tuple[torch.dtype, Any, tuple[int, ...], tuple[int, ...]]


class KnownValues(UnseenMode):
    """Follows known values through the operators that run under it; belongs above a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, for a tensor that autograd saved is another object when it comes back
        self._twins: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[_View, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._stale: dict[int, torch.UntypedStorage] = {}  # storages of twins; kept, so that an address stays its own
        self._generator: torch.Generator | None = None
        self._drawn: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # (Rule 4)
        self._floats: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # of random floats of a batch
        # Of buffers: the view that a value was noted for, and of what is computed out of them, the ids of theirs
        self._buffers: weakref.WeakKeyDictionary[torch.UntypedStorage, _View] = weakref.WeakKeyDictionary()
        self._origins: weakref.WeakKeyDictionary[torch.UntypedStorage, frozenset[int]] = weakref.WeakKeyDictionary()
        self._asked: set[int] = set()
        self._noted: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = weakref.WeakKeyDictionary()
        self._makes_model = False
        self.drawn_lengths = False  # whether lengths were read that are drawn

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow known values through all that runs within."""
        _following.append(self)
        try:
            with self, _lists_of_tensors(), _lists_of_values():
                yield
        finally:
            _following.remove(self)

    @contextlib.contextmanager
    def of_batch(self) -> Iterator[None]:
        """Enter the context in which a batch is made. (Rule 1)"""
        self._generator = torch.Generator().manual_seed(0)
        try:
            with self.followed():
                yield
        finally:
            self._generator = None
            for storage in self._floats:
                self._twins.pop(storage, None)
            self._floats.clear()

    @contextlib.contextmanager
    def of_model(self) -> Iterator[None]:
        """Enter the context in which a model is made on the meta device. (Rule 1)"""
        self._makes_model = True
        try:
            with self, _Made(self):
                yield
        finally:
            self._makes_model = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a fake tensor, on the host; None if they are not known."""
        twin = self._twin_of(tensor)
        return twin if twin is not None and self._is_current(twin) else None

    def note_buffer(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        """Note the values of a model's `tensor`, which are known as long as what is written into it is. (Rule 1)"""
        value = self._value_of(tensor) if _is_of_model(tensor) else None
        if value is None or not _owns_all(tensor):
            return
        noted = self._noted.setdefault(tensor.untyped_storage(), fake.untyped_storage())
        if noted is not fake.untyped_storage():  # fakes of two tensors with one storage have one each
            self._twins.pop(noted, None)
        elif not tensor.requires_grad:
            with without_modes():
                self.note(fake, value.detach().clone())
            self._buffers[noted] = _view_of(fake)

    def of_buffers(self) -> dict[torch.UntypedStorage, torch.Tensor]:
        """Return copies of the known values of the model's buffers, by storage."""
        with without_modes():
            twins = ((storage, self._twins.get(storage, {}).get(view)) for storage, view in self._buffers.items())
            return {storage: twin.clone() for storage, twin in twins if twin is not None and self._is_current(twin)}

    def give_buffers(self, values: Mapping[torch.UntypedStorage, torch.Tensor]) -> None:
        """Set the values of the model's buffers to `values`, as `of_buffers` has returned them."""
        with without_modes():
            for storage, value in values.items():
                self._twins[storage] = {self._buffers[storage]: value.clone()}

    def views_of(self, tensor: torch.Tensor) -> Mapping[_View, torch.Tensor]:
        """Return copies of the known values of all views with the storage of `tensor`."""
        if tensor.layout is not torch.strided:
            return {}
        twins = self._twins.get(tensor.untyped_storage(), {})
        return _copied({view: twin for view, twin in twins.items() if self._is_current(twin)})

    def give_views(self, tensor: torch.Tensor, values: Mapping[_View, torch.Tensor]) -> None:
        """Set the known values of all views with the storage of `tensor` to `values`, as `views_of` returned them."""
        if tensor.layout is torch.strided:
            self._twins[tensor.untyped_storage()] = _copied(values)
            self._origins.pop(tensor.untyped_storage(), None)

    def is_asked(self, tensor: torch.Tensor) -> bool:
        """Return whether code has read numbers that are computed out of `tensor`, a buffer of the model."""
        return tensor.layout is torch.strided and id(tensor.untyped_storage()) in self._asked

    def note_asked(self, *tensors: torch.Tensor) -> None:
        """Note that code reads numbers of known `tensors`."""
        self._asked |= self._origins_of(tensors)

    def hold_for(self, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give `copy` the known values of `tensor`."""
        if (value := self.of(tensor)) is not None:
            self.note(copy, value)
            if self.is_drawn(tensor):
                self._drawn.add(copy.untyped_storage())

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Return whether the values of a fake tensor depend on random numbers of the batch. (Rule 4)"""
        return tensor.untyped_storage() in self._drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        if (shaped := CTC_SHAPES.get(func)) is not None:
            return shaped(*args, **kwargs)
        if func is FUSED_OBSERVER and _has_no_data(args[0]):
            give_channels(*args, **kwargs)
        known, values = self._computed(func, args, kwargs)
        if not known and func is torch.ops.aten.index.Tensor:
            args = (args[0], [each for index in args[1] for each in self._picked(index)], *args[2:])
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not known:
                if (flag := answer_that_passes(func, args)) is None:
                    raise
                return flag
            self.note_asked(*_fakes_in((args, kwargs)))
            device = next((t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
            out = tree_map(lambda value: self._fake_of(value, device), values)
        if known:
            self.note(out, values)
            drawn = is_seeded(func)
            if drawn or (func not in _SHAPE_ONLY and any(map(self.is_drawn, _fakes_in((args, kwargs))))):
                self._drawn.update(leaf.untyped_storage() for leaf in _fakes_in(out))
            if self._generator is not None and (drawn or self._takes_random_floats(args, kwargs)):
                self._floats.update(leaf.untyped_storage() for leaf in _floats_in(out))
            if self._buffers and (origins := self._origins_of(_fakes_in((args, kwargs)))):
                for leaf in tree_leaves(out):
                    if isinstance(leaf, FakeTensor):
                        self._origins[leaf.untyped_storage()] = origins
                    else:
                        self._asked |= origins
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Return whether all inputs of `func` are known, and its result on their values."""
        changed = list(written(func, args, kwargs))
        if func in _SHAPE_ONLY:
            args = (_stand_in(args[0], kwargs.get("dtype")), *args[1:])
        if func in _OVERWRITING and self.of(args[0]) is None:
            args = (self._overwritten(args[0]), *args[1:])
        if any(_has_no_data(arg) and self.of(arg) is None for arg in args):  # as nearly always, and at once
            return False, None
        if any(not _has_no_data(tensor) for tensor in changed):
            return False, None
        name = func._schema.name.removeprefix("aten::")
        drawn = is_seeded(func)
        if name in _EMPTY_FACTORIES or (drawn and self._generator is None):
            return False, None
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(self._value_of(leaf) is not None for leaf in leaves):
            return False, None
        if _spreads(func, leaves) if leaves else not self._makes_little(func, args, kwargs):
            return False, None
        args, kwargs = tree_map(self._real_of, (args, kwargs))
        kwargs |= {key: value for key, value in _HOST.items() if key in kwargs}
        with without_modes(), torch.no_grad():
            return True, self._draw(func, args, kwargs) if drawn else func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the random `func` with our generator in place of torch's or a given one."""
        assert self._generator is not None
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        before = torch.get_rng_state()
        torch.set_rng_state(self._generator.get_state())
        try:
            return func._overloadpacket(*args, **kwargs)
        finally:
            self._generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def _takes_random_floats(self, args: Any, kwargs: Any) -> bool:
        return any(leaf.untyped_storage() in self._floats for leaf in _floats_in((args, kwargs)))

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if _has_no_data(tensor):
            return self.of(tensor)
        if type(tensor) is not torch.Tensor or not _is_small(tensor):
            return None
        if tensor.device.type == "cpu":  # a constant in the code; no compiler's wrapper
            return tensor
        return _on_host(tensor) if tensor.device.type == "cuda" else None

    def _real_of(self, leaf: Any) -> Any:
        return self._value_of(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _picked(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Replace a known mask by the indices that it selects; other indices stay."""
        value = None if index is None or index.dtype not in (torch.bool, torch.uint8) else self._value_of(index)
        if index is None or value is None:
            return [index]
        self.note_asked(index)
        with without_modes():
            found = value.nonzero().unbind(1)
        return [self._fake_of(each, index.device) for each in found]

    def _fake_of(self, value: Any, device: torch.device | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
        self.note(fake, value)
        return fake

    def note(self, out: Any, values: Any) -> None:
        """Note `values` as those of `out`, tensor by tensor."""
        for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if _has_no_data(fake) and isinstance(value, torch.Tensor) and self._keeps(value):
                self._twins.setdefault(fake.untyped_storage(), {})[_view_of(fake)] = value

    def _origins_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Return the ids of the storages of buffers that the values of `tensors` are computed out of."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        own = {id(storage) for storage in storages if storage in self._buffers}
        return frozenset(own).union(*(self._origins.get(storage, ()) for storage in storages))

    def _is_current(self, twin: torch.Tensor) -> bool:
        return _address(twin.untyped_storage()) not in self._stale

    def _twin_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        twins = self._twins.get(tensor.untyped_storage())
        return None if twins is None else twins.get(_view_of(tensor))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:  # Rule 2
        for tensor in filter(_has_no_data, written(func, args, kwargs)):
            for twin in self._twins.get(tensor.untyped_storage(), {}).values():
                storage = twin.untyped_storage()
                self._stale[_address(storage)] = storage

    def _overwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor to write into for a fake one that is written into as a whole; else the fake."""
        if not (_has_no_data(tensor) and _owns_all(tensor) and self._keeps(tensor)):
            return tensor
        with without_modes():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _makes_little(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the tensors that a factory makes are small; those of a model, on the meta device too."""
        if self._makes_model and kwargs.get("device") != torch.device("meta"):
            return False
        made = (leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor))
        return all(map(self._keeps, made))

    def _keeps(self, tensor: torch.Tensor) -> bool:
        return _is_of_model(tensor) if self._makes_model else _is_small(tensor)


class _Made(TorchFunctionMode):
    """Notes the values of tensors that are made out of numbers on the meta device, where no operator makes them."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and _has_no_data(made) and _is_of_model(made):
            with contextlib.suppress(Exception), without_modes():  # they may be numbers of tensors without data
                self._known.note(made, func(*args, **{**(kwargs or {}), "device": "cpu"}).detach().clone())
        return made


_tensor = torch.tensor


@traced_as(_tensor)
@not_begun_at
def _tensor_of_values(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        data = tree_map_only(FakeTensor, lambda fake: fake.item() if fake.numel() == 1 else fake.tolist(), data)
    return _tensor(data, *args, **kwargs)


_following: list[KnownValues] = []


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor of a fake step, on the host; None if they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    return next((values for each in _following if (values := each.of(tensor)) is not None), None)


def note_length(tensor: torch.Tensor) -> None:
    """Note that the values of `tensor` are lengths, which decide sizes."""
    for each in _following:
        each.drawn_lengths |= isinstance(tensor, FakeTensor) and each.is_drawn(tensor)


def give_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Set the values of a fake tensor, where an operator that is followed cannot tell them."""
    for each in _following:
        each.note(tensor, values)


_tolist = FakeTensor.tolist


@untraced
def _tolist_of_values(tensor: FakeTensor) -> Any:
    """Run `tolist` at once if the values are known; otherwise it asks for every number by itself."""
    known = values_of(tensor)
    if known is None:
        return _tolist(tensor)
    for each in _following:
        each.note_asked(tensor)
    with without_modes():
        return known.tolist()


def _with_values() -> Any:
    know_functions()  # by what they are: `torch.tensor` must be its own by then
    return mock.patch.object(torch, "tensor", _tensor_of_values)


_lists_of_values = Shared(lambda: mock.patch.object(FakeTensor, "tolist", _tolist_of_values))
_lists_of_tensors = Shared(_with_values)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with without_modes():
        return tensor.detach().cpu()


def _view_of(tensor: torch.Tensor) -> _View:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _copied(twins: Mapping[_View, torch.Tensor]) -> dict[_View, torch.Tensor]:
    """Copy twins; those of one storage have one storage again. (Rule 2)"""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = {}
    with without_modes():
        for view, twin in twins.items():
            storage = twin.untyped_storage()
            copy = storages.setdefault(_address(storage), storage.clone())
            copies[view] = twin.new_empty(0).set_(copy, twin.storage_offset(), twin.shape, twin.stride())
    return copies


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return an empty real tensor for a fake one that a factory fills with few integers; else the fake."""
    dtype = dtype or tensor.dtype
    is_plain = _has_no_data(tensor) and all(isinstance(size, int) for size in tensor.shape)
    if not is_plain or dtype.is_floating_point or dtype.is_complex or tensor.numel() > MOST_INTEGERS:
        return tensor
    with without_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)


def _spreads(func: Any, leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether small tensors become one that is not small, as positions become a mask of packed text."""
    if torch.Tag.pointwise not in func.tags or len(leaves) == 1:
        return False
    return math.prod(torch.broadcast_shapes(*(leaf.shape for leaf in leaves))) > MOST_INTEGERS


def _has_no_data(value: Any) -> bool:
    """Return whether `value` is a fake tensor, or one on the meta device."""
    if isinstance(value, FakeTensor):
        return True
    return type(value) in (torch.Tensor, nn.Parameter) and value.is_meta and value.layout is torch.strided


def _address(storage: torch.UntypedStorage) -> int:
    return storage.data_ptr() or storage._cdata  # an empty one has no data


def _owns_all(tensor: torch.Tensor) -> bool:
    """Return whether the storage of `tensor` holds nothing else."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.nbytes


def _is_of_model(tensor: torch.Tensor) -> bool:
    """Return whether values of a model are known: one number, or few integers."""
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.numel() <= (MOST_OF_A_MODEL if is_whole else 1)


def _fakes_in(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor))


def _floats_in(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _fakes_in(value) if leaf.is_floating_point())


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.is_floating_point() else MOST_INTEGERS)
