"""Snapshot: what `torch.cuda.memory._dump_snapshot` wrote, read without torch and without running what it holds.

A snapshot has the segments that the allocator holds when it is dumped, with their blocks, and, where
`torch.cuda.memory._record_memory_history()` was on, the events before: each request with its size and its stack, each
release, each segment taken from the card and given back, and each request that the card could not meet. Sizes of
requests are those asked for, before rounding (`orig_size` in `CUDACachingAllocator.cpp`).

Events may have been dropped at the beginning: they are a ring. So counts are those of the end, followed backwards.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat.errors import UsageError

RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
HOW_TO_RECORD = (
    "torch.cuda.memory._record_memory_history() before training, torch.cuda.memory._dump_snapshot(path) after"
)


@dataclasses.dataclass(frozen=True)
class Frame:
    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} {self.name}" if self.line else f"{self.filename} {self.name}"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A request that was met; `frames` from the innermost outward, empty if no stacks were recorded."""

    address: int
    size_bytes: int
    frames: tuple[Frame, ...] = ()


@dataclasses.dataclass(frozen=True)
class SnapshotMoment:
    """The moment after one event: requested bytes of tensors, and bytes taken from the card."""

    requested_bytes: int
    reserved_bytes: int


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A failed request: its size, the bytes free on the card, and the moment before it."""

    size_bytes: int
    device_free_bytes: int
    before: SnapshotMoment


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One device of a snapshot.

    events    in the order of time, as torch wrote them
    alive     allocations alive at the end
    reserved_bytes, requested_bytes  at the end
    """

    events: tuple[dict[str, Any], ...]
    alive: tuple[Allocation, ...]
    reserved_bytes: int
    requested_bytes: int

    @property
    def has_history(self) -> bool:
        return any(event["action"] == "alloc" for event in self.events)

    @functools.cached_property
    def moments(self) -> tuple[SnapshotMoment, ...]:
        """The moments after every event; the last is the end."""
        requested, reserved, found = self.requested_bytes, self.reserved_bytes, []
        for event in reversed(self.events):
            found.append(SnapshotMoment(requested, reserved))
            action, size = event["action"], event["size"]
            requested -= size if action == "alloc" else -size if action == "free_completed" else 0
            reserved -= RESERVES.get(action, 0) * size
        return tuple(found[::-1])

    @property
    def peak_at(self) -> int | None:
        """The event after which most bytes were requested; None without a history."""
        if not self.moments:
            return None
        return max(range(len(self.moments)), key=lambda i: self.moments[i].requested_bytes)

    @property
    def peak_requested_bytes(self) -> int:
        return max([self.requested_bytes, *(moment.requested_bytes for moment in self.moments)])

    @property
    def peak_reserved_bytes(self) -> int:
        return max([self.reserved_bytes, *(moment.reserved_bytes for moment in self.moments)])

    @functools.cached_property
    def out_of_memory(self) -> OutOfMemory | None:
        """The last request that the card could not meet."""
        for event, moment in zip(reversed(self.events), reversed(self.moments), strict=True):
            if event["action"] == "oom":
                return OutOfMemory(event["size"], event.get("device_free", 0), moment)
        return None

    @property
    def sizes(self) -> list[int]:
        """The sizes of every request in the history, in order."""
        return [event["size"] for event in self.events if event["action"] == "alloc"]

    @functools.cached_property
    def files(self) -> frozenset[str]:
        """Every file that occurs in a stack."""
        named = {str(frame["filename"]) for event in self.events for frame in event.get("frames") or ()}
        return frozenset(named | {frame.filename for each in self.alive for frame in each.frames})

    def alive_at(self, index: int) -> list[Allocation]:
        """Return the allocations alive after an event: those alive at the end, with later events undone."""
        alive = {each.address: each for each in self.alive}
        made: dict[int, dict[str, Any]] = {}  # address -> the last request for it, up to the event
        for event in self.events[: index + 1]:
            if event["action"] == "alloc":
                made[event["addr"]] = event
        for event in reversed(self.events[index + 1 :]):
            if event["action"] == "alloc":
                alive.pop(event["addr"], None)
            elif event["action"] == "free_completed":
                stack = _frames(made.get(event["addr"], {}))
                alive[event["addr"]] = Allocation(event["addr"], event["size"], stack)
        return list(alive.values())


def read(path: Path) -> Snapshot:
    """Read the busiest device of the snapshot at `path`. Raises UsageError if it is none."""
    try:
        with path.open("rb") as file:
            data = _PlainUnpickler(file).load()
    except FileNotFoundError:
        raise UsageError(f"there is no snapshot at {path}.") from None
    except OSError as error:
        raise UsageError(f"the snapshot {path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # a pickle can fail in any way
        raise UsageError(f"{path} is not a memory snapshot ({error}); write one: {HOW_TO_RECORD}.") from error
    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise UsageError(
            f"{path} is not a memory snapshot: it lacks segments and device_traces; write one: {HOW_TO_RECORD}."
        )
    try:
        return of_data(data)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} is not a complete memory snapshot ({type(error).__name__}: {error}).") from error


def of_data(data: dict[str, Any]) -> Snapshot:
    """Return the busiest device of a snapshot as torch makes it."""
    segments: Sequence[dict[str, Any]] = data["segments"]
    traces: Sequence[Sequence[dict[str, Any]]] = data["device_traces"]
    devices = {segment.get("device", 0) for segment in segments} | {i for i, trace in enumerate(traces) if trace}
    device = max(devices, key=lambda i: _reserved(segments, i), default=0)
    blocks = [
        block
        for segment in segments
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]
    address = [block.get("address", i) for i, block in enumerate(blocks)]
    sizes = [block.get("requested_size", block["size"]) for block in blocks]
    alive = tuple(Allocation(at, size, _frames(b)) for at, size, b in zip(address, sizes, blocks, strict=True))
    events = tuple(traces[device]) if device < len(traces) else ()
    return Snapshot(events, alive, _reserved(segments, device), sum(sizes))


def _reserved(segments: Sequence[dict[str, Any]], device: int) -> int:
    return sum(segment["total_size"] for segment in segments if segment.get("device", 0) == device)


def _frames(of: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in of.get("frames") or ())


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, text and numbers; a snapshot contains nothing else, and nothing is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no snapshot does")
