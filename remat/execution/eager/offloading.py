"""Offloading: what a plan keeps is taken out of autograd's hands, brought to the host and back at planned nodes.

Rule 1  Autograd keeps a `_Packed` in place of every tensor that it saves outside regions, and of what regions take.
        Those of one storage share a `_Parcel`: it is moved once, whoever asks for it.
Rule 2  A copy out begins when the storage is complete and is known to be one of the plan's. At its release compute
        waits for that copy, and the device's memory is let go.
Rule 3  Memory is allocated, and the copy back begun, at the planned fetch, or at the first request if that comes
        earlier. Compute waits for it at the first request.
Rule 4  A parcel lives as long as autograd keeps a save of it, as the storage would.
Rule 5  Every forward has host memory of its own, which the next one takes over when nothing of it is left.

Nothing here depends on how fast copies are: memory is what it was planned to be, bit for bit and byte for byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from remat._torch.training import is_wrapper
from remat.errors import PlanMismatch
from remat.execution.eager.copies import Copies, Copy, Host, copies_on

Node = tuple[int, int]  # graph call, ordinal in it


@dataclasses.dataclass(frozen=True)
class PlannedOffload:
    """`evaluation.plan.OffloadRef`, in ordinals of the graphs at hand."""

    node: Node
    save: int | None
    release: Node
    fetch: Node
    size_bytes: int
    host_offset: int


@dataclasses.dataclass
class OffloadCounts:
    """What really happened: storages that went to the host and came back, and their bytes."""

    out: int = 0
    out_bytes: int = 0
    back: int = 0
    back_bytes: int = 0


class _Parcel:
    """One storage that autograd keeps.

    flat     all of it, on the device: while it is being copied out, and from its fetch on
    packed   what autograd has in place of tensors in it
    """

    __slots__ = ("__weakref__", "_forward", "_made", "_returning", "_sent", "flat", "packed", "planned")

    def __init__(self, forward: _Forward):
        self._forward = forward
        self.flat: Tensor | None = None
        self.packed: list[weakref.ref[_Packed]] = []
        self.planned: PlannedOffload | None = None
        self._sent: Copy = None
        self._returning: Copy = None
        self._made: tuple[int, torch.dtype, torch.device] | None = None

    def send(self, tensor: Tensor, planned: PlannedOffload) -> None:
        """Begin the copy out. (Rule 2)"""
        self.planned = planned
        with torch.no_grad():
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.flat = tensor.detach().as_strided((elements,), (1,), 0)
        self._made = elements, tensor.dtype, tensor.device
        self._sent = self._forward.copies_for(tensor).out(self.flat, self._forward.host, planned.host_offset)

    def release(self) -> None:
        """Wait for the copy, and let go of the device's memory. (Rule 2)"""
        assert self.flat is not None
        copies = self._forward.copies_for(self.flat)
        copies.wait(self._sent)
        copies.let_go(self.flat)
        self.flat = None
        for reference in self.packed:
            if (packed := reference()) is not None:
                packed.leave()
        self._forward.note_out(self)

    def fetch(self) -> None:
        """Allocate, and begin the copy back, unless it is there. (Rule 3)"""
        if self.flat is not None or self._made is None:
            return
        assert self.planned is not None
        elements, dtype, device = self._made
        copies = self._forward.copies_on(device)
        self.flat = copies.room_for(elements, dtype, device)
        self._returning = copies.back(self._forward.host, self.planned.host_offset, self.flat)
        self._forward.note_back(self)

    def tensor(self, dtype: torch.dtype, layout: tuple[Any, Any, Any]) -> Tensor:
        """A tensor in it, which compute may read. (Rule 3)"""
        self.fetch()
        assert self.flat is not None
        self._settle()
        flat = self.flat if self.flat.dtype == dtype else self.flat.view(dtype)
        return flat.as_strided(*layout)

    def _settle(self) -> None:
        if self._returning is not None:
            self._forward.copies_for(self.flat).wait(self._returning)
            self._returning = None

    def __del__(self) -> None:
        if getattr(self, "_returning", None) is not None:  # its memory is used again as soon as it is let go
            self._settle()


class _Packed:
    """What autograd keeps in place of a tensor."""

    __slots__ = ("__weakref__", "_layout", "_parcel", "event", "forward", "tensor")

    def __init__(self, tensor: Tensor, parcel: _Parcel, forward: _Forward, event: Node | None):
        self.tensor: Tensor | None = tensor
        self.forward, self.event = forward, event
        self._parcel = parcel
        self._layout: tuple[torch.dtype, tuple[Any, Any, Any]] | None = None

    def leave(self) -> None:
        """From now on the parcel has the data."""
        assert self.tensor is not None
        layout = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self._layout, self.tensor = (self.tensor.dtype, layout), None

    def value(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self._layout is not None
        return self._parcel.tensor(*self._layout)


class _Forward:
    """One forward and its backward."""

    def __init__(self, offloader: Offloader):
        self._offloader = offloader
        self.host: Host = None
        self._parcels: weakref.WeakValueDictionary[int, _Parcel] = weakref.WeakValueDictionary()  # by storage
        self._out: dict[PlannedOffload, _Parcel] = {}
        self._to_fetch: dict[Node, list[weakref.ref[_Parcel]]] = {}
        self._running: Node | None = None  # the node whose saves are counted, or are an event
        self._saves: dict[int, PlannedOffload] = {}
        self._count = 0

    def copies_on(self, device: torch.device) -> Copies:
        return self._offloader.copies_on(device)

    def copies_for(self, tensor: Tensor | None) -> Copies:
        assert tensor is not None
        return self._offloader.copies_on(tensor.device)

    def note_out(self, parcel: _Parcel) -> None:
        assert parcel.planned is not None
        self._offloader.counts.out += 1
        self._offloader.counts.out_bytes += parcel.planned.size_bytes

    def note_back(self, parcel: _Parcel) -> None:
        assert parcel.planned is not None
        self._offloader.counts.back += 1
        self._offloader.counts.back_bytes += parcel.planned.size_bytes

    # What autograd saves (Rule 1)

    def pack(self, tensor: Tensor) -> Any:
        count, self._count = self._count, self._count + 1
        if is_wrapper(tensor) or tensor.layout is not torch.strided:
            return tensor
        parcel = self._parcel_of(tensor)
        packed = _Packed(tensor, parcel, self, self._running)
        parcel.packed.append(weakref.ref(packed))
        if (planned := self._saves.get(count)) is not None:
            self.send(planned, tensor)
        return packed

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.event is not None:
            packed.forward.fetch(packed.event)
        return packed.value()

    def _parcel_of(self, tensor: Tensor) -> _Parcel:
        key = tensor.untyped_storage()._cdata
        parcel = self._parcels.get(key)
        if parcel is None:
            parcel = self._parcels[key] = _Parcel(self)
        return parcel

    # Planned nodes

    @contextlib.contextmanager
    def running(self, node: Node, saves: dict[int, PlannedOffload]) -> Any:
        """While `node` runs: its saves are counted, and are known as its own."""
        self._running, self._saves, self._count = node, saves, 0
        try:
            yield
        finally:
            self._running, self._saves = None, {}

    def send(self, planned: PlannedOffload, tensor: Tensor) -> None:
        """The storage of `tensor` is complete: it is the one that `planned` names."""
        nbytes = tensor.untyped_storage().nbytes()
        if not 0 < nbytes <= planned.size_bytes:
            raise PlanMismatch(
                f"the plan brings {planned.size_bytes} bytes to the host at node {planned.node[1]}, and finds {nbytes} "
                "there: autograd saves other tensors on this device, or the batch is larger than planned. Plan again "
                "for this device and batch, or without offloads."
            )
        parcel = self._parcel_of(tensor)
        if self.host is None:
            self.host = self._offloader.take_host(self, self.copies_for(tensor))
        self._out[planned] = parcel
        self._to_fetch.setdefault(planned.fetch, []).append(weakref.ref(parcel))
        parcel.send(tensor, planned)

    def release(self, offloads: Iterable[PlannedOffload]) -> None:
        for planned in offloads:
            parcel = self._out.pop(planned, None)
            if parcel is not None and parcel.flat is not None:
                self._parcels.pop(parcel.flat.untyped_storage()._cdata, None)  # another may get its address
                parcel.release()

    def fetch(self, event: Node) -> None:
        for reference in self._to_fetch.pop(event, ()):
            if (parcel := reference()) is not None:
                parcel.fetch()


class Offloader:
    """The offloads of one plan, as the rewritten graphs of a model run them.

    counts  of what happened so far
    """

    def __init__(self, offloads: Iterable[PlannedOffload], copies: Copies | None = None):
        self._offloads = tuple(offloads)
        self._host_bytes = max((each.host_offset + each.size_bytes for each in self._offloads), default=0)
        self._copies: dict[torch.device, Copies] = {}
        self._given = copies
        self._free: list[Host] = []
        self._last_call = -1
        self.counts = OffloadCounts()
        self.forward = _Forward(self)

    def copies_on(self, device: torch.device) -> Copies:
        if self._given is not None:
            return self._given
        if device not in self._copies:
            self._copies[device] = copies_on(device)
        return self._copies[device]

    def take_host(self, forward: _Forward, copies: Copies) -> Host:
        """Host memory for one forward. (Rule 5)"""
        host = self._free.pop() if self._free else copies.host(self._host_bytes)
        weakref.finalize(forward, self._free.append, host).atexit = False
        return host

    def run(self, call: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Graph call number `call` of a forward."""
        if call <= self._last_call:
            self.forward = _Forward(self)
        self._last_call = call
        forward = self.forward
        with torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.unpack):
            return function(*args)

    # What a rewritten graph asks

    def values_at(self, node: Node) -> list[PlannedOffload]:
        return [each for each in self._offloads if each.node == node and each.save is None]

    def saves_at(self, node: Node) -> dict[int, PlannedOffload]:
        return {each.save: each for each in self._offloads if each.node == node and each.save is not None}

    def releases_at(self, node: Node) -> list[PlannedOffload]:
        return [each for each in self._offloads if each.release == node]

    def is_event(self, node: Node) -> bool:
        return any(each.fetch == node for each in self._offloads)
