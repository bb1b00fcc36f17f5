"""The simulated allocator on a card that can be full, and traces of events fed to it.

The rule that `remat/reservation/caching_allocator.py` does not need, since it predicts what a step reserves on a card
that gives whatever is asked for:

Rule 7  A card that has nothing more to give is asked again after enough blocks above `max_split_size` were given back,
        and then after everything that is free as a whole was: segments, pages of expandable segments.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import ADDRESSES, Block, CachingAllocator, Pool, rounded_up

Event = tuple[Literal["m"], int, int] | tuple[Literal["f"], int] | tuple[Literal["e"]]


class Levels(NamedTuple):
    """Bytes at one moment."""

    requested: int
    allocated: int
    reserved: int


class CardFull(MemoryError):
    """The card has no room for a request, even after everything cached was given back."""


class LimitedCard(CachingAllocator):
    """The allocator of a card that can give `capacity_bytes`.

    retries  number of requests for which cached memory had to be given back
    """

    def __init__(self, settings: AllocatorSettings | None = None, capacity_bytes: int = ADDRESSES):
        super().__init__(settings)
        self.capacity_bytes, self.addresses = capacity_bytes, capacity_bytes + capacity_bytes // 8
        self.retries = 0

    @property
    def counts(self) -> Levels:
        return Levels(self.requested_bytes, self.allocated_bytes, self.reserved_bytes)

    def empty_cache(self) -> None:
        """Give entirely free segments back to the card."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):
                if block.begin is not None:
                    self._unmap(block)
                elif block.whole:
                    self._release(block)

    def _from_card(self, pool: Pool, size: int) -> Block:
        with contextlib.suppress(CardFull):
            return super()._from_card(pool, size)
        if self._gave_back_enough(pool, size):
            with contextlib.suppress(CardFull):
                return super()._from_card(pool, size)
        self.empty_cache()
        self.retries += 1
        return super()._from_card(pool, size)

    def _reserve(self, size: int) -> None:
        if self.reserved_bytes + size > self.capacity_bytes:
            held, whole = self.reserved_bytes, self.capacity_bytes
            raise CardFull(f"{size} bytes more do not fit beside the {held} reserved of {whole}")
        super()._reserve(size)

    def _release(self, block: Block) -> None:
        block.pool.take_out(block)
        self.reserved_bytes -= block.size

    def _gave_back_enough(self, pool: Pool, size: int) -> bool:
        """Give back blocks above `max_split_size`: one that is large enough, or else several, the largest first."""
        most = self.settings.max_split_size_bytes
        if most is None:
            return False
        wanted = max(size, most)
        segments = [entry for entry in pool.free if entry[2].begin is None and entry[0] >= most]
        given = 0
        for size_bytes, _, block in segments[bisect.bisect_left(segments, (wanted,)) :][:1] or reversed(segments):
            if given < wanted:
                given += size_bytes
                self._release(block)
        return given >= wanted

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        pool, page, base = block.pool, self._page(block.pool), block.begin
        assert base is not None
        begin = base + rounded_up(block.address - base, page)
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        pool.take_out(block)
        if before_size := begin - block.address:
            before = Block(block.address, before_size, pool, block.begin)
            before.previous, before.next = block.previous, block
            if block.previous is not None:
                block.previous.next = before
            block.previous = before
            pool.add(before)
        if after_size := block.address + block.size - end:
            after = Block(end, after_size, pool, block.begin)
            self._insert_after(block, after)
            pool.add(after)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge(block)
        self.reserved_bytes -= end - begin
        if not block.whole:  # otherwise the segment goes
            pool.add(block)


def replayed(
    events: Iterable[Event], settings: AllocatorSettings | None = None, capacity_bytes: int = ADDRESSES
) -> list[Levels | None]:
    """Return the counts after every event: ("m", id, bytes) requests, ("f", id) releases, ("e",) empties the cache.

    The count is None if a request is refused; its release then does nothing.
    """
    allocator, held, found = LimitedCard(settings, capacity_bytes), dict[int, Block](), list[Levels | None]()
    for event in events:
        try:
            if event[0] == "m":
                held[event[1]] = allocator.malloc(event[2])
            elif event[0] == "f":
                if (block := held.pop(event[1], None)) is not None:
                    allocator.free(block)
            else:
                allocator.empty_cache()
            found.append(allocator.counts)
        except CardFull:
            found.append(None)
    return found
