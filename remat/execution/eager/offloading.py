"""Offloading: what a plan keeps is taken out of autograd's hands, brought to the host and back at planned nodes.

Rule 1  Autograd keeps a `_Packed` in place of every tensor that it saves outside regions, and of what regions take; and
        so does a region of what it has saved and is to be moved. Those of one storage share a `_Parcel`: it is moved
        once.
Rule 2  A copy out begins when the node, or the region, that makes the storage has ended: a node may still write to what
        it has saved. At its release compute waits for that copy, and the device's memory is let go.
Rule 3  Memory is allocated, and the copy back begun, at the planned fetch, or at the first request if that comes
        earlier. Compute waits for it at every request: it may be another stream that asks.
Rule 4  A parcel lives as long as autograd keeps a save of it, as the storage would.
Rule 5  Every forward has host memory of its own, which the next one takes over when nothing of it is left.
Rule 6  Hooks switch off autograd's own check that saved tensors are unchanged; it is made here, as long as the
        tensor is on the device.

Nothing here depends on how fast copies are: memory is what it was planned to be, bit for bit and byte for byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat._torch.training import is_wrapper
from remat.errors import PlanMismatch
from remat.evaluation.identity import Places
from remat.evaluation.plan import NodeRef, OffloadRef
from remat.host.copies import Copies, Copy, Host, copies_on


@dataclasses.dataclass
class CallOffloads:
    """A plan's offloads by the nodes of one graph call, as ordinals in the graph at hand.

    values    nodes whose values are sent
    saves     nodes of whose saved tensors some are sent, by number
    releases  nodes after which offloads are released
    between   chunked losses: offloads released after so many slices
    events    nodes at whose recomputation or backward something is fetched, with the plan's node
    """

    values: dict[int, list[OffloadRef]] = dataclasses.field(default_factory=dict)
    saves: dict[int, dict[int, OffloadRef]] = dataclasses.field(default_factory=dict)
    releases: dict[int, list[OffloadRef]] = dataclasses.field(default_factory=dict)
    between: dict[int, dict[int, list[OffloadRef]]] = dataclasses.field(default_factory=dict)
    events: dict[int, NodeRef] = dataclasses.field(default_factory=dict)


def offloads_in(call: int, offloads: Iterable[OffloadRef], places: Places | None = None) -> CallOffloads:
    """Return the offloads of one graph call, whose nodes are at `places` in the graph at hand."""
    places = places or Places()
    found = CallOffloads()
    for each in offloads:
        if each.node.call == call and each.save is None:
            found.values.setdefault(places.node(call, each.node.ordinal), []).append(each)
        elif each.node.call == call and each.save is not None:
            found.saves.setdefault(places.node(call, each.node.ordinal), {})[each.save] = each
        if each.release.call == call and each.after_slices:
            of_node = found.between.setdefault(places.node(call, each.release.ordinal), {})
            of_node.setdefault(each.after_slices, []).append(each)
        elif each.release.call == call:
            found.releases.setdefault(places.border(call, each.release.ordinal), []).append(each)
        if each.fetch.call == call:
            found.events[places.node(call, each.fetch.ordinal)] = each.fetch
    return found


@dataclasses.dataclass
class OffloadCounts:
    """Count the storages, and their bytes, that went to the host and came back."""

    out: int = 0
    out_bytes: int = 0
    back: int = 0
    back_bytes: int = 0

    def note_out(self, size_bytes: int) -> None:
        self.out, self.out_bytes = self.out + 1, self.out_bytes + size_bytes

    def note_back(self, size_bytes: int) -> None:
        self.back, self.back_bytes = self.back + 1, self.back_bytes + size_bytes


class _Parcel:
    """One storage that autograd keeps.

    flat     the whole storage on the device, before its release and after its fetch
    packed   the objects that autograd holds in place of its tensors
    """

    __slots__ = ("__weakref__", "_forward", "_made", "_place", "_returning", "_sent", "flat", "packed")

    def __init__(self, forward: OffloadedForward):
        self._forward = forward
        self.flat: Tensor | None = None
        self.packed: list[weakref.ref[_Packed]] = []
        self._place: tuple[Host, int] | None = None  # its place on the host
        self._made: tuple[int, torch.dtype, torch.device] | None = None
        self._sent: Copy = None
        self._returning: tuple[Copy] | None = None

    def send(self, tensor: Tensor, place: tuple[Host, int]) -> None:
        """Begin the copy to the host. (Rule 2)"""
        with torch.no_grad():
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            plain = tensor.conj() if tensor.is_conj() else tensor
            self.flat = plain.detach().as_strided((elements,), (1,), 0)
        self._made, self._place = (elements, tensor.dtype, tensor.device), place
        self._sent = self._forward.copies_on(tensor.device).out(self.flat, *place)

    def release(self) -> None:
        """Wait for the copy, then free the device's memory. (Rule 2)"""
        assert self.flat is not None
        copies = self._forward.copies_on(self.flat.device)
        for reference in self.packed:
            if (packed := reference()) is not None:
                packed.leave()
        copies.wait(self._sent)
        self._sent = None
        copies.let_go(self.flat)
        self._forward.counts.note_out(self.flat.nbytes)
        self.flat = None

    def fetch(self) -> None:
        """Allocate, and begin the copy back, unless it is on the device. (Rule 3)"""
        if self.flat is not None or self._made is None or self._place is None:
            return
        elements, dtype, device = self._made
        copies = self._forward.copies_on(device)
        self.flat = copies.room_for(elements, dtype, device)
        self._returning = (copies.back(*self._place, self.flat),)
        self._forward.counts.note_back(self.flat.nbytes)

    def tensor(self, dtype: torch.dtype, layout: tuple[Any, Any, Any]) -> Tensor:
        """Return a tensor in the storage, which compute may read. (Rule 3)"""
        self.fetch()
        assert self.flat is not None
        if self._returning is not None:
            self._forward.copies_on(self.flat.device).wait(*self._returning)
        flat = self.flat if self.flat.dtype == dtype else self.flat.view(dtype)
        return flat.as_strided(*layout)

    def __del__(self) -> None:
        if self._returning is not None and self.flat is not None:  # its memory is reused as soon as it is freed
            self._forward.copies_on(self.flat.device).abandon(*self._returning)


class _Packed:
    """The object that autograd keeps in place of a tensor."""

    __slots__ = ("__weakref__", "_is_conj", "_layout", "_parcel", "_version", "event", "forward", "tensor")

    def __init__(self, tensor: Tensor, parcel: _Parcel, forward: OffloadedForward, event: NodeRef | None):
        self.tensor: Tensor | None = tensor
        self.forward, self.event = forward, event
        self._parcel = parcel
        self._version = 0 if tensor.is_inference() else tensor._version
        self._layout: tuple[torch.dtype, tuple[Any, Any, Any]] | None = None
        self._is_conj = tensor.is_conj()

    def leave(self) -> None:
        """Leave the data to the parcel."""
        tensor = self._unchanged()
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._layout, self.tensor = (tensor.dtype, layout), None

    def fetch(self) -> None:
        if self.tensor is None:
            self._parcel.fetch()

    def value(self) -> Tensor:
        if self.tensor is not None:
            return self._unchanged()
        assert self._layout is not None
        found = self._parcel.tensor(*self._layout)
        return found.conj() if self._is_conj else found

    def _unchanged(self) -> Tensor:
        """Return the tensor; raise RuntimeError, as autograd does, if it was written to. (Rule 6)"""
        tensor = self.tensor
        assert tensor is not None
        if not tensor.is_inference() and tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.dtype}, {list(tensor.shape)}] is at version {tensor._version}; expected version "
                f"{self._version} instead."
            )
        return tensor


class OffloadedForward:
    """One forward and its backward."""

    def __init__(self, offloader: Offloader):
        self._offloader = offloader
        self._host: tuple[Host] | None = None
        self._parcels: weakref.WeakValueDictionary[int, _Parcel] = weakref.WeakValueDictionary()  # by storage
        self._out: dict[int, _Parcel] = {}  # by place on the host
        self._to_fetch: dict[NodeRef, dict[int, weakref.ref[_Parcel]]] = {}  # by event, and by place on the host
        self._event: NodeRef | None = None  # the event of the running node's saves
        self._saves: dict[int, OffloadRef] = {}
        self._count = 0
        self._due: list[tuple[OffloadRef, Tensor]] = []  # saves of the running node that are to be sent

    @property
    def counts(self) -> OffloadCounts:
        return self._offloader.counts

    def copies_on(self, device: torch.device) -> Copies:
        return self._offloader.copies_on(device)

    # What autograd saves (Rule 1)

    def pack(self, tensor: Tensor) -> Any:
        count, self._count = self._count, self._count + 1
        kept = tensor.detach()  # an output that its own gradient function keeps would hold that function
        if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.is_neg():
            return kept
        packed = self.keep(kept, self._event)
        if (planned := self._saves.get(count)) is not None and not isinstance(tensor, torch.nn.Parameter):
            self._due.append((planned, kept))
        return packed

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.event is not None:
            packed.forward.fetch(packed.event)
        return packed.value()

    def keep(self, tensor: Tensor, event: NodeRef | None = None) -> _Packed:
        """Return the object that autograd or a region keeps in place of `tensor`; its unpacking counts as `event`."""
        parcel = self._parcel_of(tensor)
        packed = _Packed(tensor, parcel, self, event)
        parcel.packed.append(weakref.ref(packed))
        return packed

    def _parcel_of(self, tensor: Tensor) -> _Parcel:
        key = tensor.untyped_storage()._cdata
        parcel = self._parcels.get(key)
        if parcel is None:
            parcel = self._parcels[key] = _Parcel(self)
        return parcel

    # Planned nodes

    @contextlib.contextmanager
    def running(self, saves: dict[int, OffloadRef], event: NodeRef | None) -> Iterator[None]:
        """Count the saves of a node while it runs; `event` is when they are unpacked."""
        self._saves, self._event, self._count = saves, event, 0
        try:
            yield
            for planned, tensor in self._due:
                self.send(planned, tensor)
        finally:
            self._saves, self._event = {}, None
            self._due.clear()

    def leave(self, values: Any) -> None:
        """Drop due saves that are tensors among `values`, the node's inputs, since others may read them.

        If a kernel saves its input, and on fake tensors saved a copy, nothing is sent, and `release` reports it.
        """
        if self._due:
            tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and not is_wrapper(t))
            others = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
            self._due = [due for due in self._due if due[1].untyped_storage()._cdata not in others]

    def send(self, planned: OffloadRef, tensor: Tensor) -> None:
        """Begin to send the storage of `tensor`, which is complete, as `planned`."""
        parcel = self._parcel_of(tensor)
        self._out[planned.host_offset] = parcel
        self._to_fetch.setdefault(planned.fetch, {})[planned.host_offset] = weakref.ref(parcel)
        parcel.send(tensor, self._place_of(planned, tensor))

    def _place_of(self, planned: OffloadRef, tensor: Tensor) -> tuple[Host, int]:
        """Return the place on the host; a storage larger than planned gets memory of its own."""
        copies, nbytes = self.copies_on(tensor.device), tensor.untyped_storage().nbytes()
        if nbytes > planned.size_bytes:
            return copies.host(nbytes), 0
        if self._host is None:
            self._host = (self._offloader.take_host(self, copies),)
        return self._host[0], planned.host_offset

    def release(self, offloads: Iterable[OffloadRef]) -> None:
        """Release the device memory of `offloads`. Raises PlanMismatch if one was never sent."""
        for planned in offloads:
            parcel = self._out.pop(planned.host_offset, None)
            if parcel is None:
                raise PlanMismatch(
                    f"the plan brings to the host what autograd saves at node {planned.node.name!r}, and it saves less "
                    "there: as it does on another device, or where nothing before needs a gradient. Plan again for "
                    "this device and model, or without offloads."
                )
            if parcel.flat is not None:
                self._parcels.pop(parcel.flat.untyped_storage()._cdata, None)  # another may get its address
                parcel.release()

    def give_up(self) -> None:
        """Drop everything that this failed forward was about to move."""
        self._out.clear()
        self._to_fetch.clear()

    def fetch(self, event: NodeRef) -> None:
        """Begin to bring back the offloads planned for `event`, in the order in which they are used."""
        for _, reference in sorted(self._to_fetch.pop(event, {}).items()):
            if (parcel := reference()) is not None:
                parcel.fetch()


class Offloader:
    """The offloads of one plan, as the rewritten graphs of a model run them.

    counts  of what happened so far
    """

    def __init__(self, offloads: Iterable[OffloadRef], copies: Copies | None = None):
        self._offloads = tuple(offloads)
        self._host_bytes = max((each.host_offset + each.size_bytes for each in self._offloads), default=0)
        self._copies: dict[torch.device, Copies] = {}
        self._given = copies
        self._free: list[Host] = []
        self._last_call = -1
        self.counts = OffloadCounts()
        self.forward = OffloadedForward(self)

    def copies_on(self, device: torch.device) -> Copies:
        if self._given is not None:
            return self._given
        if device not in self._copies:
            self._copies[device] = copies_on(device)
        return self._copies[device]

    def take_host(self, forward: OffloadedForward, copies: Copies) -> Host:
        """Return host memory for one forward. (Rule 5)"""
        host = self._free.pop() if self._free else copies.host(self._host_bytes)
        weakref.finalize(forward, self._free.append, host).atexit = False
        return host

    def run(self, call: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run graph call `call` of a forward."""
        if call <= self._last_call:
            self.forward = OffloadedForward(self)
        self._last_call = call
        forward = self.forward
        try:
            with torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.unpack):
                return function(*args)
        except BaseException:
            forward.give_up()
            self._last_call = sys.maxsize  # the next call begins a forward
            raise
