"""The settings of PyTorch's caching allocator: the options of PYTORCH_CUDA_ALLOC_CONF that decide reserved bytes.

torch 2.13 reads PYTORCH_ALLOC_CONF first and then PYTORCH_CUDA_ALLOC_CONF; older versions read the second alone.
Options that cannot change what is reserved on one stream (about pinned memory, locks, CUDA graphs) are accepted and
left out; those that would change it in a way that is not simulated are refused by name.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from remat.errors import UsageError
from remat.units import KIB, MIB

SMALLEST_BLOCK = KIB // 2
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_INTERVALS = 16  # of `roundup_power2_divisions`: from 1 MiB on, each twice the one before
_ITEM = re.compile(r"([a-z0-9_]+):(\[[^\]]*\]|[^,\[\]]*)(?:,|$)")
_NO_MATTER = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)


@dataclasses.dataclass(frozen=True)
class AllocatorSettings:
    """The settings that decide reserved bytes; the defaults are PyTorch's.

    max_split_size_bytes      blocks of at least this size are not split; None: all are
    large_segment_bytes       size of a segment for requests between 1 and 10 MiB, and of a page of expandable segments
    roundup_power2_divisions  number of parts of the range between two powers of two, for sizes below 2 MiB, 4 MiB, ...,
                              32 GiB and above; up to 1: sizes are rounded to 512 bytes
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS

    @staticmethod
    def parse(text: str) -> AllocatorSettings:
        """Parse settings as PyTorch does. Raises UsageError for those that it refuses, or that are not simulated."""
        text = re.sub(r"\s", "", text).rstrip(",")
        found: dict[str, str] = {}
        at = 0
        while at < len(text):
            match = _ITEM.match(text, at)
            if match is None:
                raise UsageError(f"allocator settings {text!r}: {text[at:]!r} is not NAME:VALUE.")
            found[match[1]] = match[2]
            at = match.end()
        return AllocatorSettings(**{field: value for name in found for field, value in _setting(name, found[name])})

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """Return the settings of a training script started from here."""
        return AllocatorSettings.parse(next((environment[name] for name in VARIABLES if environment.get(name)), ""))

    def __str__(self) -> str:
        """Return the value of PYTORCH_CUDA_ALLOC_CONF; empty for the defaults."""
        plain, parts = AllocatorSettings(), []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        for name, field in _SIZES.items():
            if (size := getattr(self, field)) != getattr(plain, field):
                parts.append(f"{name}:{size // MIB}")
        if self.roundup_power2_divisions != plain.roundup_power2_divisions:
            steps = [f"{1 << i}:{n}" for i, n in enumerate(self.roundup_power2_divisions[:-1])]
            parts.append(f"roundup_power2_divisions:[{','.join(steps)},>:{self.roundup_power2_divisions[-1]}]")
        return ",".join(parts)

    def rounded(self, size: int) -> int:
        """Return the bytes of the smallest block for a request of `size`."""
        if size < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        divisions = self.roundup_power2_divisions[min(max(size.bit_length() - 21, 0), _INTERVALS - 1)]
        if divisions <= 1 or size <= SMALLEST_BLOCK * divisions:
            return -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK
        part = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // part) * part


_SIZES = {
    "max_split_size_mb": "max_split_size_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "large_segment_size_mb": "large_segment_bytes",
}


def _setting(name: str, value: str) -> list[tuple[str, Any]]:
    """Return the field that `name` sets, if any, with its value."""
    if name in _SIZES:
        size = _number(name, value) * MIB
        least = 2 if name == "large_segment_size_mb" else 20
        if size < least * MIB:
            raise UsageError(f"allocator setting {name}:{value} is too small; PyTorch takes {least} or more.")
        return [(_SIZES[name], size)]
    if name == "expandable_segments":
        if value not in ("True", "False"):
            raise UsageError(f"allocator setting {name} is True or False, not {value!r}.")
        return [(name, value == "True")]
    if name == "roundup_power2_divisions":
        return [(name, _divisions(value))]
    if name == "garbage_collection_threshold":  # acts only in a process that limits itself to a fraction of the card
        if not re.fullmatch(r"0?\.\d*[1-9]\d*", value):
            raise UsageError(f"allocator setting {name} is between 0 and 1, not {value!r}.")
        return []
    if name in _NO_MATTER or name.startswith("pinned_") or (name, value) == ("backend", "native"):
        return []
    raise UsageError(
        f"allocator setting {name}:{value} is not simulated; leave it out, or judge by requested bytes alone."
    )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UsageError(f"allocator setting {name} is a whole number, not {value!r}.")
    return int(value)


def _divisions(value: str) -> tuple[int, ...]:
    """Parse `4`, or `[256:1,512:2,1024:4,>:8]`: a number of divisions from each size in MiB on."""
    name = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(value, name),) * _INTERVALS
    found, last = [0] * _INTERVALS, 0
    for position, item in enumerate(value.strip("[]").split(",")):
        size, _, count = item.partition(":")
        divisions = _power_of_two(count, name)
        if size == ">":
            found[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
            continue
        index = min(_power_of_two(size, name).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            found[:index] = [divisions] * index
        found[index], last = divisions, index
    return tuple(found)


def _power_of_two(value: str, name: str) -> int:
    number = _number(name, value)
    if number & (number - 1):
        raise UsageError(f"allocator setting {name} takes powers of two, not {value}.")
    return number
