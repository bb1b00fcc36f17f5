"""Bytes that CUDA's caching allocator takes for a step under a plan: requested, allocated, reserved.

The lives of the evaluator (`Memory.lives`) say what is requested and when; `CachingAllocator` says what that takes.
Training is fed in the order in which it happens:

1. What was there before the first step: parameters one by one, buffers, then what else is fixed. Gradients that
   accumulate count among it, one by one: they are taken to stay from one optimizer step to the next.
2. A first step, in which the optimizer makes its state, parameter by parameter, before anything else of its own, and
   libraries take their workspaces: forward's first product does, and backward's, in a thread of its own. That one
   finds free what forward has let go of, is cut out of it, and stays: what came out of one block then, needs another.
3. Steps until a whole one reserves nothing more: the steady state. Peaks are those of the last.

Assumptions. Within one operator: copies of its arguments; what it makes, in the recorded order (dropout makes its mask
first); then its workspace, taken in its parts (`workspace_parts.py`); these are given back; then what is let go. A
result that is written over an argument has its block. Sizes are those of the record, each rounded up to 512 bytes, as
the allocator does anyway. What is fixed and not listed one by one (buffers, the batch) is one block each. One stream.
Nothing is freed to make room: a card that would be full is not asked again, so what is predicted is what is reserved
without the stalls that giving cached memory back means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from remat.evaluation.argument_copies import copies_of
from remat.evaluation.evaluator import Lives, Memory
from remat.evaluation.graph import LIBRARY_WORKSPACES, OPTIMIZER_STATE, Graph, OpKind
from remat.evaluation.libraries import products, threads_that_multiply
from remat.evaluation.plan import AllocatorPeaks, Region
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import Block, CachingAllocator
from remat.reservation.workspace_parts import parts_of
from remat.units import MIB
from remat.workload.target import Target

MOST_STEPS = 12
# What a process takes from a card beside all that the allocator reserves: the context, and kernels as they are loaded.
# After the first operators 274 MiB on a card of 2022 (pytorch/pytorch, pull request 86509), 426 MiB on an RTX 6000 Ada
# (torch 2.10, CUDA 13: unslothai/unsloth-zoo, pull request 1053); a step's kernels come on top. Measured on the card
# at hand where there is one (`device_allocator.context_bytes`).
CONTEXT_BYTES = 600 * MIB


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Peaks of a step in the steady state, in bytes, under `settings` of the allocator.

    steps  number of steps until nothing more was reserved
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    settings: str
    steps: int

    def to_json(self) -> AllocatorPeaks:
        return cast(AllocatorPeaks, dataclasses.asdict(self))

    def with_more(self, size_bytes: int) -> Footprint:
        """Add as many bytes to each: those that the recorded lives do not contain."""
        more = {name: getattr(self, name) + size_bytes for name in ("requested_bytes", "allocated_bytes")}
        return dataclasses.replace(self, **more, reserved_bytes=self.reserved_bytes + size_bytes)


def footprint(
    memory: Memory,
    regions: Sequence[Region],
    settings: AllocatorSettings | None = None,
    allocator: CachingAllocator | None = None,
) -> Footprint:
    """Simulate the step of `memory` under `regions` until it is steady, on `allocator` if given, which is empty."""
    allocator = allocator or CachingAllocator(settings)
    step = _Step(memory, regions)
    graph = memory.graph
    known = {name: size for name, size in graph.fixed_bytes.items() if name != LIBRARY_WORKSPACES}
    for size in before_first_step(dataclasses.replace(graph, fixed_bytes=known)):
        allocator.malloc(size)
    step.execute(allocator, state=states(graph), is_first=True)
    steps, reserved = 1, -1
    while allocator.reserved_bytes > reserved and steps < MOST_STEPS:
        steps, reserved = steps + 1, allocator.reserved_bytes
        allocator.reset_peaks()
        step.execute(allocator)
    counts = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.reserved_bytes)
    return Footprint(*counts, str(allocator.settings), steps)


def assumed_settings(target: Target, text: str | None) -> AllocatorSettings | None:
    """Return the settings that a prediction for `target` assumes: `text`, or the environment's; None off CUDA.

    Raises UsageError for settings that are not simulated.
    """
    if target.device != "cuda":
        return None
    return AllocatorSettings.from_environment() if text is None else AllocatorSettings.parse(text)


def footprints(memory: Memory, regions: Sequence[Region], settings: AllocatorSettings) -> tuple[Footprint, Footprint]:
    """Simulate footprints under `settings`, and with expandable segments switched."""
    other = dataclasses.replace(settings, expandable_segments=not settings.expandable_segments)
    return footprint(memory, regions, settings), footprint(memory, regions, other)


# What training makes before and in its first step


def before_first_step(graph: Graph) -> Iterator[int]:
    """Yield the sizes of what exists before the first step, in the order in which it is allocated."""
    fixed, threads = graph.fixed_bytes, threads_that_multiply(graph)
    one_by_one = {
        LIBRARY_WORKSPACES: threads * [fixed.get(LIBRARY_WORKSPACES, 0) // max(threads, 1)],
        "parameters": [p.size_bytes for p in graph.parameters],
        "gradients": [p.gradient_bytes for p in graph.parameters],
        "running average": [p.size_bytes for p in graph.parameters],
    }
    for name in sorted(fixed, key=lambda name: name != "parameters"):
        if name != OPTIMIZER_STATE:
            yield from _shared_out(fixed[name], one_by_one.get(name, ()))


def states(graph: Graph) -> list[int]:
    """List the sizes of the optimizer's state, parameter by parameter."""
    sizes = [size for p in graph.parameters for size in p.state_tensors or (p.state_bytes,)]
    return list(_shared_out(graph.fixed_bytes.get(OPTIMIZER_STATE, 0), sizes))


def _shared_out(total: int, sizes: Iterable[int]) -> Iterator[int]:
    """Yield `total` in pieces of these sizes, or in their proportion (one rank's share), then the rest."""
    sizes = [size for size in sizes if size]
    whole = sum(sizes)
    if whole > total:
        sizes = [size * total // whole for size in sizes]
    yield from (size for size in sizes if size)
    if rest := total - sum(sizes):
        yield rest


# One step


_COPY, _MAKE, _LIBRARY, _WORK, _FREE = range(5)  # in this order within an operator
_LAST_FIRST = frozenset(
    {"aten.native_dropout.default"}
)  # its second result is made first (ATen/native/cuda/Dropout.cu)


class _Step:
    """The requests and releases of one step, in order."""

    def __init__(self, memory: Memory, regions: Sequence[Region]):
        graph, lives = memory.graph, memory.lives(regions)
        real = np.flatnonzero((lives.size_bytes > 0) & (lives.death >= lives.birth))
        workspace = np.where(lives.executed, memory.workspace_bytes[lives.op], 0)
        working = np.flatnonzero(workspace)
        requests = {
            at: _requests(graph.kinds[graph.op_kind[lives.op[at]]], int(workspace[at])) for at in working.tolist()
        }
        self._copies = {at: copies for at, (copies, _) in requests.items() if copies}
        self._workspace = {at: parts for at, (_, parts) in requests.items()}
        copying = np.array([*self._copies], dtype=np.int64)
        first = _first_products(graph, lives)
        # Outputs of the step before exist when this one begins, in blocks of their own.
        until = np.array([until for _, until in graph.held_outputs], dtype=np.int64)
        held = len(lives.size_bytes) + np.arange(len(until))
        begun = np.full(len(held), -1)
        self._over = _written_over(graph, lives, real)
        freed = real[~np.isin(real, [*self._over.values()])]
        position = np.concatenate([copying, begun, lives.birth[real], first, working, lives.death[freed], until - 1])
        counts = [len(copying), len(held) + len(real), len(first), len(working), len(freed) + len(held)]
        kind = np.repeat([_COPY, _MAKE, _LIBRARY, _WORK, _FREE], counts)
        who = np.concatenate([copying, held, real, first, working, freed, held])
        inside = (position >= 0) & (kind == _MAKE)
        last_first = np.zeros(len(position), dtype=bool)
        last_first[inside] = _is_any_of(graph, _LAST_FIRST)[lives.op[position[inside]]]
        order = np.lexsort((np.where(last_first, -who, who), kind, position))
        optimizer = int(np.argmax(np.append(lives.op, graph.op_count) >= graph.backward_end))
        self._optimizer = int(np.searchsorted(position[order], optimizer))
        self._kind, self._who = kind[order].tolist(), who[order].tolist()
        self._sizes = [*lives.size_bytes.tolist(), *(size for size, _ in graph.held_outputs)]
        self._library_bytes = graph.fixed_bytes.get(LIBRARY_WORKSPACES, 0) // max(len(first), 1)

    def execute(self, allocator: CachingAllocator, state: Iterable[int] = (), *, is_first: bool = False) -> None:
        """Run the step on `allocator`; `state` is allocated when the optimizer begins, and stays.

        is_first  whether libraries allocate their workspaces in it
        """
        held: dict[int, Block] = {}
        library_bytes = self._library_bytes if is_first else 0
        self._feed(allocator, held, 0, self._optimizer, library_bytes)
        for size in state:
            allocator.malloc(size)
        self._feed(allocator, held, self._optimizer, len(self._kind), library_bytes)

    def _feed(
        self, allocator: CachingAllocator, held: dict[int, Block], begin: int, end: int, library_bytes: int
    ) -> None:
        sizes, over, malloc, free = self._sizes, self._over, allocator.malloc, allocator.free
        copies: list[Block] = []
        for kind, who in zip(self._kind[begin:end], self._who[begin:end], strict=True):
            if kind == _MAKE:
                held[who] = held.pop(over[who]) if who in over else malloc(sizes[who])
            elif kind == _FREE:
                free(held.pop(who))
            elif kind == _COPY:
                copies = [malloc(size) for size in self._copies[who]]
            elif kind == _WORK:
                for block in [*(malloc(size) for size in self._workspace[who]), *copies]:
                    free(block)
                copies = []
            elif library_bytes:
                malloc(library_bytes)


def _requests(kind: OpKind, workspace_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (copies of arguments, other parts of the workspace) of a kernel, in order."""
    copies = copies_of(kind)
    rest = workspace_bytes - sum(copies)
    return (copies, parts_of(kind, rest) if rest else ()) if rest >= 0 else ((), (workspace_bytes,))


def _is_any_of(graph: Graph, names: frozenset[str]) -> np.ndarray:
    """Mark the operators of the step with one of these names."""
    return np.array([kind.name in names for kind in graph.kinds], dtype=bool)[np.asarray(graph.op_kind)]


def _written_over(graph: Graph, lives: Lives, real: np.ndarray) -> dict[int, int]:
    """Return results that overwrite an argument: life -> the life whose block it takes, which ends right before."""
    ended = real[graph.storages.over[lives.storage[real]] == 1]
    before = {(int(lives.death[life]), int(lives.size_bytes[life])): life for life in ended.tolist()}
    found = ((life, (int(lives.birth[life]) - 1, int(lives.size_bytes[life]))) for life in real.tolist())
    return {life: before.pop(end) for life, end in found if end in before}


def _first_products(graph: Graph, lives: Lives) -> np.ndarray:
    """Return the positions of the first cuBLAS calls of forward's thread and of backward's."""
    asks = products(graph)[lives.op] & lives.executed
    in_forward = (lives.op < graph.forward_end) & (lives.region < 0)
    in_backward = ~in_forward & (lives.op < graph.backward_end)
    return np.array(
        [int(np.argmax(asks & part)) for part in (in_forward, in_backward) if (asks & part).any()], np.int64
    )
