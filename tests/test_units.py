"""Sizes and times: exact where a machine reads them, legible where a person does."""

from __future__ import annotations

import pytest

from remat.errors import UsageError
from remat.units import GIB, KIB, MIB, gib, gib_above, ms, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024B", 1024),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1 MB", 10**6),
        ("512MB", 512 * 10**6),
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        (" 20 gib ", 20 * 2**30),
        ("0.5GiB", 2**29),
        ("1.5KiB", 1536),
        ("2TiB", 2 * 2**40),
        ("2TB", 2 * 10**12),
        ("21474836480B", 20 * 2**30),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "20", "GiB", "-1GiB", "20 GiB GiB", "20XB", "1e9B", "1,5GiB", ".5GiB", "5.GiB", "nanGiB", "infB", "20G"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a number in digits with a unit \(B, .*, TiB\); .* 20GiB"):
        parse_bytes(text, what="budget")


@pytest.mark.parametrize(("text", "expected"), [("90%", 900), ("100 %", 1000), ("0.5%", 5), ("12.34%", 123)])
def test_a_percentage_is_of_the_whole(text: str, expected: int) -> None:
    assert parse_bytes(text, whole_bytes=1000) == expected


def test_a_percentage_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="headroom '10%' is a percentage"):
        parse_bytes("10%", what="headroom")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (3 * MIB // 2, "1.50 MiB"),
        (GIB // 10, "102.40 MiB"),
        (GIB * 14 // 100, "143.36 MiB"),
        (
            GIB * 15 // 100,
            "153.60 MiB",
        ),
        (GIB, "1.00 GiB"),
        (20 * GIB, "20.00 GiB"),
        (-GIB, "-1.00 GiB"),
    ],
)
def test_bytes_read_in_the_largest_unit_that_shows_them(count: int, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0, "0.00 ms"), (1234, "1.23 ms"), (99_999, "100.00 ms"), (100_000, "100.0 ms"), (12_345_678, "12.3 s")],
)
def test_times_read_in_milliseconds_until_they_are_long(time_us: float, text: str) -> None:
    assert ms(time_us) == text


def test_bytes_that_look_like_their_limit_are_given_with_the_excess() -> None:
    assert gib_above(3 * GIB, 2 * GIB) == "3.00 GiB"
    assert gib_above(2 * GIB + 300, 2 * GIB) == "2.00 GiB, 300 B more"
