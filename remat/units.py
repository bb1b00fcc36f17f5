"""Bytes and microseconds: integers inside, GiB and milliseconds where a person reads; short lists."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable
from typing import Any

from remat.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)([kKmMbBtT]?)")
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


def require_unit(name: str, value: Any) -> None:
    """Raise UsageError where `value` is neither a number of bytes nor text, such as a float of unknown unit."""
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Integral)):
        raise UsageError(
            f'{name}={value!r} is neither a whole number of bytes nor text with a unit; write {name}="20GiB".'
        )


def parse_bytes(text: str, *, what: str = "size", whole_bytes: int | None = None) -> int:
    """Parse bytes: a number with a unit (`20GiB`, `512MB`, `1024B`), or `90%` of `whole_bytes`.

    Raises `UsageError` if the unit is missing or unknown, and for `%` without `whole_bytes`.
    """
    text = text.strip()
    if match := _PERCENT.fullmatch(text):
        if whole_bytes is None:
            raise UsageError(f"{what} {text!r} is a percentage, but there is no total to take it of; give it as 20GiB.")
        return _whole(float(match[1]) / 100 * whole_bytes, what, text)
    if (match := _BYTES.fullmatch(text)) and (unit := _UNITS.get(match[2].lower())):
        return _whole(float(match[1]) * unit, what, text)
    if "%" in text:
        raise UsageError(f"{what} {text!r} is not a share; write for example 70%, or as a budget 70%step of the step.")
    raise UsageError(
        f"{what} {text!r} is not a number in digits with a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB); write for "
        "example 20GiB, 20GB or 21474836480B."
    )


def parse_count(text: str, *, what: str) -> int:
    """Parse a number of things: `8B`, `124M`, `1e9` or `768`. Raises `UsageError` for anything else."""
    match = _COUNT.fullmatch(text.strip())
    count = float(match[1]) * _THOUSANDS[match[2].lower()] if match else 0.0
    if not 1 <= count < 1 << 60:
        raise UsageError(f"{what} {text[:24]!r} is not a number of things; write for example 8B, 124M or 1e9.")
    return int(count)


def _whole(count: float, what: str, text: str) -> int:
    if not count < 1 << 60:
        raise UsageError(f"{what} {text[:24]!r} is more than any device has; write for example 20GiB.")
    return int(count)


def gib(count: int) -> str:
    """Format `count` bytes for a person: in GiB, or in MiB and KiB if GiB would leave too few digits."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def gib_above(count: int, limit: int) -> str:
    """Format bytes above a limit, with their excess where the two look the same."""
    return gib(count) if gib(count) != gib(limit) else f"{gib(count)}, {gib(count - limit)} more"


def first_few(said: Iterable[str], most: int = 3, between: str = ", ") -> str:
    """List the first few items, and how many more there are."""
    said = [*said]
    return between.join(said[:most]) + (f" and {len(said) - most} more" if said[most:] else "")


def ms(time_us: float) -> str:
    """Format `time_us` microseconds for a person."""
    if time_us >= 10_000_000:
        return f"{time_us / 1e6:.1f} s"
    return f"{time_us / 1000:.1f} ms" if time_us >= 100_000 else f"{time_us / 1000:.2f} ms"
