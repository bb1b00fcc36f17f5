"""A Tracker sees every operator that is dispatched and every storage that comes and goes.

It is the one instrument for memory under fake tensors: `recorder.py` uses it to make a Graph, `replay.py` to judge a
plan. Storages are followed by weak references, so what is alive is what really is referred to, by Python, by
autograd or by a region, and nothing has to be modelled.

Storages that exist before tracking starts are *fixed*: they are never counted here, but for those that are followed
because the step may let go of them (`follow_older`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from remat._torch.recording import DEVICE, autograd_node, beside_functions, untraced, unwrapped
from remat._torch.training import UnseenMode
from remat.capture.kept_tensors import strided_parts
from remat.evaluation.graph import FROM_HOST, OpKind
from remat.recording.in_place import InPlace, is_held_meanwhile, with_zeros, written_columns
from remat.recording.inner_nodes import InnerNodes
from remat.recording.kernel_results import as_kernel
from remat.recording.layouts import laid_out, with_ones_laid_out
from remat.recording.reserves import with_reserve
from remat.recording.traffic import moved_bytes, workspace_bytes

FIXED_STORAGE = -1
_SET = torch.ops.aten.set_.source_Tensor
_PRODUCTS = {"aten::mul_", "aten::_foreach_mul_"}
_MADE_AGAIN = {torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh.default}  # graph.MADE_AGAIN


@dataclasses.dataclass
class TrackedStorage:
    """One allocation: bytes, first and last operator of its life, the operator kind that made it.

    between  it was made between two operators, and may end before the second
    over     the next operator writes its result over it
    over_by  the operator that does, if it is held for longer on fakes
    """

    size_bytes: int
    birth: int
    death: int | None = None
    cast: bool = False
    between: bool = False
    over: bool = False
    over_by: int = -1


class Moment(NamedTuple):
    """Counts at one moment: operators, storages, tensors saved by autograd, wrapped numbers."""

    ops: int
    storages: int
    saved: int = 0
    numbers: int = 0


class RecordedSpan(NamedTuple):
    """The span between two moments of a record."""

    begin: Moment
    end: Moment


class Tracker(UnseenMode):
    """Numbers operators, and notes the operators during which each storage is alive.

    Only operators that allocate or write are numbered: a view takes neither time nor memory.

    alignment_bytes  allocations are rounded up to a multiple of it (512 on CUDA)
    kernels_of       type of the device whose kernels run, where that is not the fakes' own
    """

    def __init__(self, alignment_bytes: int = 1):
        super().__init__()
        self.alignment_bytes = alignment_bytes
        self.kernels_of = "cuda" if alignment_bytes > 1 else None
        self.storages: list[TrackedStorage] = []
        self.kinds: dict[str, OpKind] = {}
        self.op_kinds: list[int] = []
        self.paused = False
        self.scalar_answers = False
        self._products: set[int] = set()  # ids of storages of single numbers that were multiplied in place
        self._kind_index: dict[str, int] = {}
        self._kind_of_call: dict[Hashable, int] = {}  # the same, found without a description in JSON
        self.inner_nodes: InnerNodes | None = None  # of the forward that runs
        self._in_place = InPlace()
        self._taken_over: TrackedStorage | None = None  # the storage that the last operator would have overwritten
        self._blocks: dict[Hashable, RecordedSpan] = {}
        self._ids: dict[int, int] = {}  # id of the Python storage -> index; entries die with their storage
        self._keep: dict[int, Any] = {}  # fixed storages
        self.older: dict[int, TrackedStorage] = {}  # fixed, and followed until they are gone; by id, which may be old
        self._ends: dict[int, Any] = {}  # weak references to storages, which report their end

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answer 1 to code that asks a fake tensor for its value (optimizers do), or 0.5 for a product.

        NAdam divides by one less its running product of factors below one.
        """
        self.scalar_answers = True
        try:
            yield
        finally:
            self.scalar_answers = False
            self._products.clear()

    def _answer(self, tensor: torch.Tensor) -> float | int:
        if not tensor.is_floating_point():
            return 1
        return 0.5 if id(tensor.untyped_storage()) in self._products else 1.0

    @property
    def op_count(self) -> int:
        return len(self.op_kinds)

    def fix(self, *values: Any) -> int:
        """Mark all storages in `values` as fixed; return the bytes of those not fixed before."""
        total = 0
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        for storage in (part.untyped_storage() for tensor in tensors for part in strided_parts(tensor)):
            if id(storage) not in self._ids:
                self._ids[id(storage)] = FIXED_STORAGE
                self._keep[id(storage)] = storage
                total += self._rounded(storage.nbytes())
        return total

    def follow_older(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are not fixed, from the first operator until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := id(storage)) not in self._ids and storage.nbytes():
                self._ids[key] = FIXED_STORAGE
                self.older[key] = tracked = TrackedStorage(self._rounded(storage.nbytes()), 0)
                self._ends[key] = weakref.ref(storage, functools.partial(self._died, key, tracked))

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the index of the storage of `tensor`; FIXED for one from before."""
        return self._ids.get(id(unwrapped(tensor).untyped_storage()), FIXED_STORAGE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):  # four times an operator: no mode below need see it
            return args[0].device
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.inner_nodes is not None:
            self.inner_nodes.note()
        if self.scalar_answers and func is torch.ops.aten._local_scalar_dense.default:
            return self._answer(args[0])
        if func is _SET:
            self.replaced(args[0])
        out = func(*args, **kwargs)
        with beside_functions():
            return self._followed(func, args, kwargs, out)

    def _followed(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the result of an operator as the kernel makes it, and note the operator and its storages."""
        out = with_ones_laid_out(func, args, laid_out(func, args, out, self.kernels_of))
        out = with_reserve(func, args, as_kernel(func, args, out, self.kernels_of))
        out = out if self.kernels_of == "cuda" else with_zeros(func, args, out)
        op = self.op_count
        born = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and self._is_new(t)]
        if not born and not func._schema.is_mutable:
            return out  # a view: no kernel, no memory
        self.op_kinds.append(self._kind(func, args, kwargs, out))
        self._taken_over = self._overwritten(op, func, args, out)
        if self._taken_over is not None and is_held_meanwhile(func):
            self._taken_over.over_by = op
        columns = {self.storage_of(column): None for column in written_columns(func, args)}
        for place, index in enumerate(columns):
            if index != FIXED_STORAGE:
                self.storages[index].over_by = op
                self.storages[index].size_bytes += 0 if place else self.bytes_of(out)
        for tensor in born:
            self._follow(tensor, op, cast=func in _MADE_AGAIN)
        if self.scalar_answers and func._schema.name in _PRODUCTS:
            self._products.update(id(t.untyped_storage()) for t in tree_leaves(args[0]) if t.dim() == 0)
        self.dispatched(op, func, args, kwargs, out)
        return out

    def replaced(self, tensor: torch.Tensor) -> None:
        """Let subclasses note a tensor before it gets another storage (`parameter.data = ...`)."""

    def note_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Let subclasses note the complete gradient of `parameter` before it is freed."""

    def dispatched(self, op: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Let subclasses note an operator that has run."""

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return id(storage) not in self._ids and storage.nbytes() > 0

    def _follow(self, tensor: torch.Tensor, op: int, *, cast: bool, between: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._ids:  # two outputs of one operator, one storage
            return
        self._ids[key] = len(self.storages)
        tracked = TrackedStorage(self._rounded(storage.nbytes()), op, cast=cast, between=between)
        self.storages.append(tracked)
        self._ends[key] = weakref.ref(storage, functools.partial(self._died, key, tracked))

    def allocated(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a storage between two operators."""
        self.paused = True
        try:
            tensor = torch.empty(elements, dtype=dtype, device=device)
        finally:
            self.paused = False
        self._follow(tensor, self.op_count, cast=False, between=True)
        return tensor

    def elsewhere(self, size_bytes: int) -> torch.Tensor:
        """Allocate memory outside the device, which is not counted."""
        self.paused = True
        try:
            tensor = torch.empty(size_bytes, dtype=torch.uint8)
        finally:
            self.paused = False
        self.fix(tensor)
        return tensor

    def note_copy(self, size_bytes: int) -> None:
        """Note a copy from the host that the step waits for, as an operator that torch does not dispatch."""
        flat = {"tensor": [[size_bytes], [1], "uint8"]}
        kind = OpKind(FROM_HOST, [[flat, flat], {}], flops=0, moved_bytes=size_bytes, dtype="uint8")
        key = f"{FROM_HOST} {size_bytes}"
        self.kinds.setdefault(key, kind)
        op = self.op_count
        self.op_kinds.append(self._kind_index.setdefault(key, len(self._kind_index)))
        self._taken_over = None
        self.dispatched(op, None, (), {}, None)

    @contextlib.contextmanager
    def known(self, what: Hashable) -> Iterator[bool]:
        """Record the code within once for each value of `what`, and repeat the record afterwards; yield whether it is.

        Code whose own tensors outlive it, or that frees older ones, is recorded every time.
        """
        key = what, _place()
        block = self._blocks.get(key)
        if block is not None:
            self.repeat(block)
            yield True
            return
        begin = self._now()
        yield False
        block = RecordedSpan(begin, self._now())
        if self.is_closed(block):
            self._blocks[key] = block

    def is_closed(self, block: RecordedSpan) -> bool:
        """Return whether everything that `block` made is freed, and nothing older is."""
        older = (s.death for s in self.storages[: block.begin.storages] if s.death is not None)
        newer = self.storages[block.begin.storages :]
        return all(s.death is not None for s in newer) and max(older, default=-1) < block.begin.ops

    def _now(self) -> Moment:
        return Moment(self.op_count, len(self.storages))

    def repeat(self, block: RecordedSpan) -> None:
        """Note the operators and storages of `block` once more, as running now."""
        now = self._now()
        later = now.ops - block.begin.ops
        self.op_kinds += self.op_kinds[block.begin.ops : block.end.ops]
        for storage in self.storages[block.begin.storages : block.end.storages]:
            assert storage.death is not None
            birth, death = storage.birth + later, storage.death + later
            self.storages.append(dataclasses.replace(storage, birth=birth, death=death))
        self._taken_over = None

    def _overwritten(self, op: int, func: Any, args: Any, out: Any) -> TrackedStorage | None:
        """Return the storage of the first argument if training would write the result over it; see `in_place.py`."""
        first = args[0] if args else None
        found = (
            self.storage_of(first)
            if isinstance(first, torch.Tensor) and first.layout is torch.strided
            else FIXED_STORAGE
        )
        tracked = None if found == FIXED_STORAGE else self.storages[found]
        birth = -1 if tracked is None else tracked.birth
        return tracked if self._in_place.taken_over(op, func, args, birth, out) else None

    @untraced  # between two graphs Dynamo would trace it, for every tracker anew
    def _died(self, key: int, tracked: TrackedStorage, gone: Any) -> None:
        tracked.over = tracked is self._taken_over or tracked.over_by >= 0
        last = tracked.over_by - 1 if tracked.over_by >= 0 else self.op_count - (2 if tracked.over else 1)
        tracked.death = max(last, tracked.birth - tracked.between)
        del self._ids[key], self._ends[key]

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the storage of `tensor`."""
        return self._rounded(tensor.untyped_storage().nbytes())

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def _kind(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        call = (func, _hashable(args), *kwargs, _hashable(kwargs.values()))
        index = self._kind_of_call.get(call)
        if index is not None:
            return index
        signature = [[_describe(a) for a in args], {k: _describe(v) for k, v in kwargs.items()}]
        key = f"{func} {json.dumps(signature)}"
        index = self._kind_of_call[call] = self._kind_index.setdefault(key, len(self._kind_index))
        if key not in self.kinds:
            self.kinds[key] = OpKind(
                name=str(func),
                signature=signature,
                flops=_flops(func, args, kwargs, out),
                moved_bytes=moved_bytes(func, args, kwargs, out),
                dtype=_arithmetic_dtype(args, kwargs, out),
                workspace_bytes=workspace_bytes(func, args),
            )
        return index

    @property
    def alive_now(self) -> int:
        """Bytes of the storages that are still there, now."""
        return sum(storage.size_bytes for storage in self.storages if storage.death is None)

    def freed_by(self, release: Callable[[], None]) -> int:
        """Run `release`, and return the bytes of the storages that it frees."""
        alive = [storage for storage in self.storages if storage.death is None]
        release()
        return sum(storage.size_bytes for storage in alive if storage.death is not None)

    def alive(self, since: int = 0) -> np.ndarray:
        """Return the bytes alive during each operator, of storages made by operator `since` or later."""
        change = np.zeros(self.op_count + 1, dtype=np.int64)
        for storage in (*self.older.values(), *self.storages):
            if storage.birth < since:
                continue
            change[storage.birth] += storage.size_bytes
            if storage.death is not None:
                change[storage.death + 1] -= storage.size_bytes
        return np.cumsum(change[:-1])


def _describe(value: Any) -> Any:
    """Describe a value in JSON, so that `operator_timing.py` can build an argument like it."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [list(value.shape), list(value.stride()), _name(value.dtype)]}
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": _name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.layout):
        return {"layout": _name(value)}
    return {"other": str(value)}


def _hashable(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return values as a key that is equal only where `_describe` is, or differs by the sign of a zero."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            found.append(_hashable(value))
        elif isinstance(value, (bool, int, float, str, torch.dtype, torch.device)) or value is None:
            found += (type(value), value)
        else:
            found += (type(value), str(value))
    return tuple(found)


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    if "scaled_dot_product" in func.__name__:
        args = _as_many_heads(args)
    args = [arg for arg in args if not isinstance(arg, torch.dtype)]  # of the result: torch's counts know none
    return int(count(*args, **kwargs, out_val=out))


def _as_many_heads(args: Sequence[Any]) -> list[Any]:
    """Give keys and values as many heads as queries, in the arguments with which torch counts an attention's FLOPs.

    The kernel shares them between heads, and multiplies as often. Up to torch 2.11 the count asserts equal numbers.
    """
    tensors = [value for value in args[:4] if isinstance(value, torch.Tensor) and value.dim() == 4]
    heads = max((tensor.shape[1] for tensor in tensors), default=0)

    def shape(value: Any) -> Any:
        known = isinstance(value, torch.Tensor) and value.dim() == 4
        return torch.Size((value.shape[0], heads, *value.shape[2:])) if known else value

    return [*map(shape, args[:4]), *args[4:]]


def _arithmetic_dtype(args: Any, kwargs: Any, out: Any) -> str:
    floats = (t.dtype for t in _tensors(args, kwargs, out) if t.is_floating_point())
    return _name(next(floats, torch.float32))


def _place() -> Hashable:
    """Return what decides, beside the code itself, which operators it runs and how their storages are noted."""
    node = autograd_node()
    return (
        None if node is None or isinstance(node, BackwardCFunction) else node._sequence_nr(),
        torch.is_grad_enabled(),
        *((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")),
    )
