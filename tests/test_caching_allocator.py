"""The simulated caching allocator: PyTorch's own cases, recorded traces, an independent simulation, and laws."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.errors import UsageError
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import Block, CachingAllocator
from remat.units import GIB, KIB, MIB
from tests.limited_card import CardFull, Event, Levels, LimitedCard, replayed

EXPANDABLE = AllocatorSettings(expandable_segments=True)
RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "allocator_traces.json.gz").read_bytes()))


# PyTorch's own cases


@pytest.mark.parametrize(
    ("settings", "size", "allocated"),
    [
        # The comment on roundup_power2_next_division: 1200 among 1024, 1280, 1536, 1792 ...
        pytest.param("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB, id="source-comment"),
        # test_cuda.py, test_allocator_settings: 84 MiB and 400 MiB
        pytest.param("", 84 * MIB, 84 * MIB, id="plain"),
        pytest.param("garbage_collection_threshold:0.5,roundup_power2_divisions:4", 84 * MIB, 96 * MIB, id="div4"),
        pytest.param("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84 * MIB, 88 * MIB, id="div8"),
        pytest.param("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400 * MIB, 512 * MIB, id="div2"),
    ],
)
def test_sizes_are_rounded_as_documented(settings: str, size: int, allocated: int) -> None:
    found = replayed([("m", 0, size)], AllocatorSettings.parse(settings))
    assert found[0] is not None
    assert (found[0].requested, found[0].allocated) == (size, allocated)


def test_the_settings_of_pytorchs_config_test() -> None:
    """c10/test/core/AllocatorConfig_test.cpp: divisions for 32 MiB, 64 MiB, ..., 2 GiB."""
    found = AllocatorSettings.parse(
        "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
        "pinned_use_background_threads:True"
    )
    assert found.max_split_size_bytes == 40 * MIB
    assert found.max_non_split_rounding_bytes == 30 * MIB
    assert found.expandable_segments
    # indices 5 to 11: 32 MiB << i; below the first that is named as that one
    assert found.roundup_power2_divisions[5:12] == (8, 8, 2, 4, 2, 4, 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("foo:1,bar:2", "foo:1 is not simulated"),  # the first three: test_allocator_settings
        ("garbage_collection_threshold:1.2", "between 0 and 1"),
        ("max_split_size_mb:2", "PyTorch takes 20 or more"),
        ("expandable_segments:yes", "True or False"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("backend:cudaMallocAsync", "not simulated"),
        ("per_process_memory_fraction:0.5", "not simulated"),
        ("expandable_segments", "not NAME:VALUE"),
    ],
)
def test_settings_that_pytorch_refuses_or_that_are_not_simulated_are_refused(settings: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        AllocatorSettings.parse(settings)


@pytest.mark.parametrize("settings", [row["settings"] for row in RECORDED[::2]])
def test_settings_print_as_what_is_read_again(settings: str) -> None:
    found = AllocatorSettings.parse(settings)
    assert AllocatorSettings.parse(str(found)) == found


def test_the_environment_is_read_as_pytorch_reads_it() -> None:
    read = AllocatorSettings.from_environment
    assert read({}) == AllocatorSettings()
    assert read({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) == EXPANDABLE
    both = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert read(both) == AllocatorSettings(max_split_size_bytes=64 * MIB)


# Rules, with the arithmetic


@pytest.mark.parametrize(
    ("settings", "sizes", "expected"),
    [
        pytest.param(AllocatorSettings(), [1], Levels(1, 512, 2 * MIB), id="small: 512 of a segment of 2 MiB"),
        pytest.param(AllocatorSettings(), [MIB, MIB], Levels(2 * MIB, 2 * MIB, 2 * MIB), id="two fill a small segment"),
        pytest.param(AllocatorSettings(), [MIB + 1], Levels(MIB + 1, MIB + 512, 20 * MIB), id="large, below 10 MiB"),
        pytest.param(AllocatorSettings(), [10 * MIB], Levels(10 * MIB, 10 * MIB, 10 * MIB), id="10 MiB: its own"),
        # 21 MiB get a segment of 22; the 1 MiB left over is not more than 1 MiB: the block keeps it
        pytest.param(AllocatorSettings(), [21 * MIB], Levels(21 * MIB, 22 * MIB, 22 * MIB), id="slack of 1 MiB"),
        pytest.param(
            AllocatorSettings(), [21 * MIB - 512], Levels(21 * MIB - 512, 21 * MIB - 512, 22 * MIB), id="split"
        ),
        # pages of 20 MiB: 21 + 21 = 42 need three
        pytest.param(EXPANDABLE, [21 * MIB, 21 * MIB], Levels(42 * MIB, 42 * MIB, 60 * MIB), id="expandable"),
        pytest.param(EXPANDABLE, [1, 21 * MIB], Levels(21 * MIB + 1, 21 * MIB + 512, 42 * MIB), id="one for each pool"),
    ],
)
def test_segments_and_blocks(settings: AllocatorSettings, sizes: list[int], expected: Levels) -> None:
    assert replayed([("m", i, size) for i, size in enumerate(sizes)], settings)[-1] == expected


def test_a_freed_hole_is_reused_only_by_what_fits() -> None:
    """30 MiB freed: 24 fit and leave 6, which 8 do not fit into and 5 do."""
    events: list[Event] = [("m", 0, 30 * MIB), ("f", 0), ("m", 1, 24 * MIB), ("m", 2, 8 * MIB), ("m", 3, 5 * MIB)]
    reserved = [counts.reserved // MIB for counts in replayed(events) if counts]
    assert reserved == [30, 30, 30, 50, 50]
    # growing in place, nothing is left over but the page: 37 of 40
    assert [c.reserved // MIB for c in replayed(events, EXPANDABLE) if c] == [40, 40, 40, 40, 40]


def test_blocks_above_the_largest_split_size_serve_only_their_like() -> None:
    settings = AllocatorSettings(max_split_size_bytes=64 * MIB)
    events: list[Event] = [("m", 0, 100 * MIB), ("f", 0), ("m", 1, 30 * MIB), ("m", 2, 70 * MIB), ("m", 3, 90 * MIB)]
    # 30 gets a segment; 70 too, for 100 is 20 or more above it; 90 takes the 100 whole
    assert [tuple(c)[1:] for c in replayed(events, settings) if c] == [
        (100 * MIB, 100 * MIB),
        (0, 100 * MIB),
        (30 * MIB, 130 * MIB),
        (100 * MIB, 200 * MIB),
        (200 * MIB, 200 * MIB),
    ]


def test_a_full_card_gives_cached_segments_back_before_it_refuses() -> None:
    allocator = LimitedCard(capacity_bytes=100 * MIB)
    first = allocator.malloc(60 * MIB)
    allocator.free(first)
    held = allocator.malloc(80 * MIB)  # 60 + 80 > 100: the cached 60 go
    assert (allocator.reserved_bytes, allocator.retries, allocator.peak_reserved_bytes) == (80 * MIB, 1, 80 * MIB)
    with pytest.raises(CardFull, match="do not fit"):
        allocator.malloc(30 * MIB)
    allocator.free(held)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(held)


def test_peaks_count_from_their_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(50 * MIB))
    allocator.reset_peaks()
    allocator.malloc(10 * MIB)
    assert (allocator.peak_requested_bytes, allocator.peak_reserved_bytes) == (10 * MIB, 50 * MIB)


# PyTorch's allocator itself


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_counts_are_those_of_pytorchs_allocator(number: int) -> None:
    """Recorded by benchmarks/real_allocator.py from libc10_cuda.so of torch 2.13."""
    row = RECORDED[number]
    found = replayed(map(tuple, row["trace"]), AllocatorSettings.parse(row["settings"]), row["card_bytes"])
    assert [counts and list(counts) for counts in found] == row["counts"]


def test_the_recorded_traces_reach_every_rule() -> None:
    """A card that refuses, emptied caches, and all settings."""
    assert sum(counts is None for row in RECORDED for counts in row["counts"]) > 50
    assert sum(event[0] == "e" for row in RECORDED for event in row["trace"]) > 10
    assert {row["settings"] for row in RECORDED} >= {"", "expandable_segments:True", "max_split_size_mb:64"}


# An independent simulation


class Slow:
    """The default rules with nothing but lists: a segment is a list of [size, who holds it]."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int | None]]]] = []
        self.requested: dict[int, int] = {}

    def event(self, event: Event) -> Levels:
        if event[0] == "m":
            self._request(event[1], event[2])
        elif event[0] == "f":
            self._release(event[1])
        else:
            self.segments = [s for s in self.segments if len(s[1]) > 1 or s[1][0][1] is not None]
        held = [size or 0 for _, blocks in self.segments for size, who in blocks if who is not None]
        everything = sum(size or 0 for _, blocks in self.segments for size, _ in blocks)
        return Levels(sum(self.requested.values()), sum(held), everything)

    def _request(self, who: int, size: int) -> None:
        self.requested[who] = size
        size = max((size + 511) // 512 * 512, 512)
        small = size <= MIB
        fits = [
            (int(block[0] or 0), at, i)
            for at, (kind, blocks) in enumerate(self.segments)
            for i, block in enumerate(blocks)
            if kind == small and block[1] is None and int(block[0] or 0) >= size
        ]
        if not fits:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            fits = [(whole, len(self.segments) - 1, 0)]
        have, at, i = min(fits)
        blocks = self.segments[at][1]
        if have - size >= 512 if small else have - size > MIB:
            blocks[i : i + 1] = [[size, who], [have - size, None]]
        else:
            blocks[i][1] = who

    def _release(self, who: int) -> None:
        del self.requested[who]
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == who:
                    block[1] = None
            for i in range(len(blocks) - 1, 0, -1):
                if blocks[i][1] is None and blocks[i - 1][1] is None:
                    blocks[i - 1 : i + 1] = [[int(blocks[i - 1][0] or 0) + int(blocks[i][0] or 0), None]]


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Requests of a few sizes near those where a rule changes, releases in any order, emptied caches."""
    near = st.builds(
        lambda size, off: max(size + off, 1),
        st.sampled_from([512, 4 * KIB, 700 * KIB, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 21 * MIB, 40 * MIB]),
        st.sampled_from([-512, -1, 0, 1, 512, 1024]),
    )
    sizes = draw(st.lists(near, min_size=1, max_size=5))
    events: list[Event] = []
    live: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        choice = draw(st.integers(0, 9))
        if choice == 0:
            events.append(("e",))
        elif choice < 6 or not live:
            live.append(number)
            events.append(("m", number, draw(st.sampled_from(sizes))))
        else:
            events.append(("f", live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


@given(traces())
def test_counts_equal_those_of_the_slow_simulation(events: list[Event]) -> None:
    slow = Slow()
    assert replayed(events) == [slow.event(event) for event in events]


# Whatever happens


def _rows(allocator: CachingAllocator, held: list[Block]) -> list[list[Block]]:
    """All blocks, those of one segment in a row, found from the ones that are held and those that are free."""
    pools = (allocator._small, allocator._large)
    known = [*held, *(block for pool in pools for _, _, block in pool.free)]
    known += [block for pool in pools for _, block in pool.unmapped]
    rows = []
    for block in known:
        if block.previous is None:
            row = [block]
            while row[-1].next is not None:
                row.append(row[-1].next)
            rows.append(row)
    return rows


@given(traces(), st.sampled_from([AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_size_bytes=30 * MIB)]))
def test_what_must_hold(events: list[Event], settings: AllocatorSettings) -> None:
    allocator, held = LimitedCard(settings, capacity_bytes=GIB), dict[int, Block]()
    for event in events:
        if event[0] == "m":
            held[event[1]] = allocator.malloc(event[2])
            assert held[event[1]].size >= event[2]
        elif event[0] == "f":
            allocator.free(held.pop(event[1]))
        else:
            allocator.empty_cache()
        rows = _rows(allocator, list(held.values()))
        for row in rows:
            for one, following in itertools.pairwise(row):
                assert following.previous is one
                assert one.address + one.size == following.address  # nothing overlaps, nothing is lost
                assert not (one.free and following.free and one.mapped == following.mapped)
        mapped = [block for row in rows for block in row if block.mapped]
        assert sum(block.size for block in mapped) == allocator.reserved_bytes
        assert {id(block) for block in mapped if not block.free} == {id(block) for block in held.values()}
        assert sum(block.size for block in held.values()) == allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.requested_bytes <= allocator.allocated_bytes
    for block in held.values():
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.counts == (0, 0, 0)
