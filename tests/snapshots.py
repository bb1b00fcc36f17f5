"""Snapshots of runs that need no GPU: requests fed to the simulated allocator, written as torch writes its own.

The format is that of `torch.cuda.memory._snapshot` (its docstring in torch 2.13). `test_doctor.py` lets torch's own
`_memory_viz` read them.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import Block
from remat.reservation.fragmentation import footprint
from tests.limited_card import CardFull, LimitedCard

Stack = Sequence[tuple[str, int, str]]
PLANNED: Stack = (
    ("/site-packages/torch/nn/functional.py", 7, "linear"),
    ("/site-packages/remat/execution/eager/planned_graphs.py", 90, "forward"),
    ("/home/me/train.py", 12, "step"),
)
UNPLANNED: Stack = (("/site-packages/torch/nn/functional.py", 7, "linear"), ("/home/me/train.py", 12, "step"))


class Run(LimitedCard):
    """The allocator of a process that records its history.

    stack       of all requests from now on; empty where none are recorded
    card_bytes  of the whole card; others hold `others_bytes` of it
    """

    def __init__(
        self,
        stack: Stack = PLANNED,
        settings: AllocatorSettings | None = None,
        card_bytes: int = 80 << 30,
        others_bytes: int = 0,
    ) -> None:
        super().__init__(settings, card_bytes - others_bytes)
        self.stack = stack
        self.events: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[Block, Stack]] = {}
        self.blocks: list[Block] = []

    def malloc(self, size_bytes: int) -> Block:
        before = self.reserved_bytes
        try:
            block = super().malloc(size_bytes)
        except CardFull:
            self._event("oom", 0, size_bytes, device_free=self.capacity_bytes - self.reserved_bytes)
            raise
        if self.reserved_bytes > before:
            self._event("segment_alloc", block.address, self.reserved_bytes - before)
        self._event("alloc", block.address, size_bytes)
        self.alive[block.address] = (block, self.stack)
        self.blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        for action in ("free_requested", "free_completed"):
            self._event(action, block.address, block.requested)
        del self.alive[block.address]
        super().free(block)

    def _event(self, action: str, address: int, size: int, **more: int) -> None:
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(self.events)}
        self.events.append({**event, **more, "frames": _frames(self.stack)})

    def data(self) -> dict[str, Any]:
        """Return the structure of `torch.cuda.memory._snapshot()`."""
        return {"segments": self._segments(), "device_traces": [self.events], "allocator_settings": {}}

    def save(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self.data()))
        return path

    def _segments(self) -> list[dict[str, Any]]:
        heads = {}
        for block in self.blocks:
            while block.previous is not None:
                block = block.previous
            if not block.free or any(block is entry[-1] for pool in (self._small, self._large) for entry in pool.free):
                heads[id(block)] = block
        return [_segment(head, {at: stack for at, (_, stack) in self.alive.items()}) for head in heads.values()]


def _segment(head: Block, stacks: dict[int, Stack]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    block: Block | None = head
    while block is not None:
        if block.mapped:
            state = "inactive" if block.free else "active_allocated"
            row = {"address": block.address, "size": block.size, "state": state, "frames": []}
            row["requested_size"] = 0 if block.free else block.requested
            if not block.free:
                row["frames"] = _frames(stacks[block.address])
            blocks.append(row)
        block = block.next
    active = sum(row["size"] for row in blocks if row["state"] != "inactive")
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(row["size"] for row in blocks),
        "stream": 0,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": (0, 0),
        "allocated_size": active,
        "active_size": active,
        "blocks": blocks,
    }


def _frames(stack: Stack) -> list[dict[str, Any]]:
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in stack]


def trained(memory: Memory, regions: Sequence[Region], run: Run | None = None) -> Run:
    """`run` after training with a step; it goes on where the step left it, or ends where the card was full."""
    run = run or Run()
    with contextlib.suppress(CardFull):
        footprint(memory, regions, run.settings, run)
    return run
