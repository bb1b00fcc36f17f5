"""PyTorch's caching allocator for CUDA, simulated: the memory that a process takes from the card for what it allocates.

A run does not die of the bytes that tensors need. It dies of what the allocator has *reserved*: segments of the card,
cut into blocks, that it keeps for later. Three counts, as `torch.cuda.memory_stats` has them:

* requested  bytes asked for
* allocated  bytes of the blocks handed out for them: rounded to 512, and up to 1 MiB more where a block is not split
* reserved   bytes of the segments that the card has given

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` of torch 2.13, one stream,
no CUDA graphs:

Rule 1  A request is rounded up to 512 bytes, or to a division of a power of two (`roundup_power2_divisions`). Up to
        1 MiB it belongs to the small pool, above to the large one.
Rule 2  Best fit: the smallest free block of the pool that is large enough, of equal ones that at the lowest address.
        With `max_split_size` a block of at least that size serves only requests of at least that size, and then
        only where less than `max_non_split_rounding` is left over.
Rule 3  A block is split where what is left over is 512 bytes or more (small pool, expandable segments), or more than
        1 MiB (large pool), unless the request is of `max_split_size` or more.
Rule 4  Where no block fits, the card gives a segment: 2 MiB for small requests, `large_segment_size` (20 MiB) for those
        below 10 MiB, otherwise the request rounded up to 2 MiB.
Rule 5  A freed block merges with free neighbours of its segment.
Rule 6  Expandable segments: one segment for each pool, as long as the address space, into which pages of 2 MiB (small)
        or 20 MiB (large) are mapped at the lowest address where the request then fits. Among free blocks that fit, one
        at the end counts as large as it could grow.

The card gives whatever is asked for. `tests/limited_card.py` adds the rule of a card that is full.

Held to the allocator itself: `benchmarks/real_allocator.py` drives libc10_cuda.so of a CUDA build, with a stand-in for
the card, and compares all counts after every event. `garbage_collection_threshold` is left out: it acts only where a
process limits itself to a fraction of the card.
"""

from __future__ import annotations

import bisect

from remat.reservation.allocator_settings import SMALLEST_BLOCK, AllocatorSettings
from remat.units import MIB

SMALL_REQUEST = MIB  # the largest
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB  # the smallest that gets a segment of its own size
SEGMENT_ROUNDING = 2 * MIB
ADDRESSES = 1 << 46  # bytes of an expandable segment


class Block:
    """A piece of a segment.

    begin   address of its segment if it is expandable; else None
    mapped  False for address space of an expandable segment without memory behind it
    """

    __slots__ = ("address", "begin", "free", "mapped", "next", "pool", "previous", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool, begin: int | None = None, *, mapped: bool = True):
        self.address, self.size, self.pool = address, size, pool
        self.begin, self.mapped = begin, mapped
        self.free, self.requested = True, 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    @property
    def room(self) -> int:
        """The size that the block could grow to. (Rule 6)"""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


class Pool:
    """Free blocks of one kind, by (size, address), and the unmapped ends of expandable segments, by address."""

    def __init__(self, *, small: bool):
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def take_out(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The allocator of one card.

    requested_bytes, allocated_bytes, reserved_bytes  present counts; with `peak_` the maximum so far
    addresses  bytes of an expandable segment
    """

    addresses = ADDRESSES

    def __init__(self, settings: AllocatorSettings | None = None):
        self.settings = settings or AllocatorSettings()
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_requested_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = SEGMENT_ROUNDING

    def malloc(self, size_bytes: int) -> Block:
        """Allocate a block for a request of `size_bytes` > 0."""
        size = self.settings.rounded(size_bytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size) or self._from_card(pool, size)
        if self._splits(block, size):
            self._split(block, size)
        block.free, block.requested = False, size_bytes
        self.requested_bytes += size_bytes
        self.allocated_bytes += block.size
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool. (Rule 5)"""
        if block.free:
            raise ValueError(f"the block at {block.address} is free already")
        self.requested_bytes -= block.requested
        self.allocated_bytes -= block.size
        block.free = True
        self._merge(block)
        block.pool.add(block)

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    # Finding a block (Rule 2)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free, most = pool.free, self.settings.max_split_size_bytes
        at = bisect.bisect_left(free, (size,))
        if at == len(free):
            return None
        if free[at][2].begin is not None:  # Rule 6
            while at + 1 < len(free) and free[at + 1][2].room < free[at][2].room:
                at += 1
        found = free[at][2]
        if most is not None:
            if size < most <= found.size:
                return None
            if size >= most and found.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        del free[at]
        return found

    # Splitting and merging (Rules 3 and 5)

    def _splits(self, block: Block, size: int) -> bool:
        rest, most = block.size - size, self.settings.max_split_size_bytes
        if block.pool.small or self.settings.expandable_segments:
            return rest >= SMALLEST_BLOCK
        return rest > SMALL_REQUEST and (most is None or size < most)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, block.begin)
        self._insert_after(block, rest)
        block.size = size
        block.pool.add(rest)

    @staticmethod
    def _insert_after(block: Block, new: Block) -> None:
        new.previous, new.next = block, block.next
        if block.next is not None:
            block.next.previous = new
        block.next = new

    @staticmethod
    def _merge(block: Block) -> None:
        """Merge `block`, which is in no pool, with free neighbours that are mapped or unmapped as it is."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            before.pool.take_out(before)
            block.address, block.size, block.previous = before.address, before.size + block.size, before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free and after.mapped == block.mapped:
            after.pool.take_out(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.previous = block

    # The card (Rules 4 and 6)

    def _from_card(self, pool: Pool, size: int) -> Block:
        return self._expanded(pool, size) if self.settings.expandable_segments else self._new_segment(pool, size)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        if pool.small:
            whole = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            whole = self.settings.large_segment_bytes
        else:
            whole = rounded_up(size, SEGMENT_ROUNDING)
        self._reserve(whole)
        return Block(self._addresses(whole), whole, pool)

    def _addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += rounded_up(size, SEGMENT_ROUNDING)
        return address

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes

    def _expanded(self, pool: Pool, size: int) -> Block:
        """Return a free block of at least `size` at the lowest possible address. (Rule 6)"""
        block = self._expandable(pool, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            after = block.next
            assert after is not None
            self._map(after, min(size - block.size, after.size))
            block = after
        pool.take_out(block)
        return block

    def _expandable(self, pool: Pool, size: int) -> Block:
        """Find adjacent free and unmapped blocks with room for `size`; a new segment if there are none."""
        for _, start in pool.unmapped:
            before = start.previous
            found = before if before is not None and before.free else start
            room, block = 0, found
            walk: Block | None = block
            while walk is not None and walk.free and room < size:
                room, walk = room + walk.size, walk.next
            if room >= size:
                return found
        whole = rounded_up(self.addresses, self._page(pool))
        begin = self._addresses(whole)
        new = Block(begin, whole, pool, begin, mapped=False)
        pool.add(new)
        return new

    def _map(self, block: Block, size: int) -> None:
        """Put memory behind the first `size` bytes, whole pages, of an unmapped block."""
        pool = block.pool
        size = min(rounded_up(size, self._page(pool)), block.size)
        self._reserve(size)
        pool.take_out(block)
        if size < block.size:
            rest = Block(block.address + size, block.size - size, pool, block.begin, mapped=False)
            self._insert_after(block, rest)
            block.size = size
            pool.add(rest)
        block.mapped = True
        self._merge(block)
        pool.add(block)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
