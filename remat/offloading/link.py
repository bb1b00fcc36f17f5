"""The link between a device and the host's memory, as plans count on it."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Link:
    """One copy engine out and one back, each a queue that works while the device computes.

    bytes_per_us  each way, both at once
    host_bytes    maximum bytes on the host at one time
    latency_us    of a copy, beside its bytes
    """

    bytes_per_us: float
    host_bytes: int
    latency_us: float = 10.0

    def copy_us(self, size_bytes: int) -> float:
        """Return the time of one copy."""
        return self.latency_us + size_bytes / self.bytes_per_us

    def moved_within(self, time_us: float) -> int:
        """Return the most bytes that can be off the device after `time_us`."""
        moved = self.bytes_per_us * max(time_us, 0.0)
        return self.host_bytes if moved >= self.host_bytes else math.ceil(moved)
