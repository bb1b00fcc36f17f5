"""The link that a plan's offloads go over: how fast, and how much may lie at its other end."""

from __future__ import annotations

from remat.costing.host_memory import free_host_bytes
from remat.costing.planning_device import PlanningDevice
from remat.errors import UsageError
from remat.execution.base import Execution
from remat.offloading.link import Link
from remat.recording.fake_step import FakeStep
from remat.units import parse_bytes

NONE, ACTIVATIONS = "none", "activations"
OFFLOADS = (ACTIVATIONS, NONE)
HOST_SHARE = 0.5  # of the host's memory that is free


def link_of(found: PlanningDevice, offload: str | None, host_budget: str | int | None = None) -> Link | None:
    """The link of a device, with `host_budget` at its end; None where nothing is to be offloaded.

    Without a budget that is half of what the host has free; for a target elsewhere, whose host nobody knows, as much as
    the device has; of either the next lower power of two, which is what PyTorch pins.

    Raises UsageError where there is no link, because a CPU's memory is the host's; for an `offload` that is none of
    `OFFLOADS`; and for a host budget with nothing to offload.
    """
    if offload not in (None, *OFFLOADS):
        raise UsageError(f"offload is {' or '.join(map(repr, OFFLOADS))}, not {offload!r}.")
    if offload in (None, NONE):
        if host_budget is not None:
            raise UsageError('a host budget is for what is offloaded: say `offload="activations"` too.')
        return None
    target = found.target
    if target.host_bytes_per_us <= 0:
        raise UsageError(f"{target.name} has no memory beside the host's to offload from; leave `offload` out.")
    return Link(target.host_bytes_per_us, _host_bytes(found, host_budget))


def _host_bytes(found: PlanningDevice, host_budget: str | int | None) -> int:
    if isinstance(host_budget, str):
        return parse_bytes(host_budget, what="host budget", whole_bytes=free_host_bytes())
    if host_budget is not None:
        return host_budget
    most = found.target.memory_bytes if found.device is None else int(HOST_SHARE * free_host_bytes())
    return 1 << (most.bit_length() - 1)  # PyTorch rounds pinned memory up to a power of two


def require_offloads(execution: Execution, step: FakeStep | None) -> None:
    """Raise UsageError where what is kept cannot go to the host."""
    if not execution.runs_offloads:
        raise UsageError(f'nothing is offloaded under `execution="{execution}"`; leave `execution` or `offload` out.')
    if step is not None and step.loop.shard is not None:
        raise UsageError("nothing is offloaded where states are sharded; leave `offload` or `shard` out.")
