"""The link over which a plan offloads, and the room in the host's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from remat.costing.costs import Costs
from remat.costing.host_memory import free_host_bytes
from remat.costing.planning_device import PlanningDevice
from remat.errors import UsageError
from remat.evaluation.graph import FROM_HOST, Graph
from remat.execution.base import Execution
from remat.host.optimizer_state import SMALL_BYTES
from remat.host.weights import FEWEST
from remat.offloading.link import Link
from remat.units import gib, parse_bytes
from remat.workload.training_loop import TrainingLoop

NONE, ACTIVATIONS, OPTIMIZER, WEIGHTS = "none", "activations", "optimizer", "weights"
OFFLOADS = (ACTIVATIONS, OPTIMIZER, WEIGHTS, NONE)
HOST_SHARE = 0.5  # of the host's memory that is free


def offloads_named(offload: str | None) -> frozenset[str]:
    """Parse `offload`, names with commas between them.

    Raises UsageError for a name that is none of `OFFLOADS`.
    """
    names = frozenset(name.strip() for name in (offload or NONE).split(","))
    if not names <= set(OFFLOADS) or (NONE in names and len(names) > 1):
        raise UsageError(f"offload is {', '.join(OFFLOADS[:-1])}, two with a comma, or {NONE}; not {offload!r}.")
    if names >= {ACTIVATIONS, WEIGHTS}:
        raise UsageError("activations and weights cannot be offloaded together; choose one.")
    return names - {NONE}


def loop_with(loop: TrainingLoop | None, offload: str | None) -> TrainingLoop | None:
    """Return `loop` with the optimizer's state where `offload` says; unchanged if `offload` is None."""
    if offload is None:
        return loop
    return dataclasses.replace(loop or TrainingLoop(), offload_optimizer=OPTIMIZER in offloads_named(offload))


def link_of(
    found: PlanningDevice,
    offload: str | None,
    host_budget: str | int | None = None,
    *,
    has_state: bool = False,
) -> Link | None:
    """Return the device's link with `host_budget` at its end; None if no activations are offloaded.

    has_state  whether the loop may have the optimizer's state on the host, whatever `offload` says

    Raises UsageError if there is no link, because a CPU's memory is the host's; for an `offload` that is not in
    `OFFLOADS`; and for a host budget with nothing to offload.
    """
    names, target = offloads_named(offload), found.target
    if not names and not has_state and host_budget is not None:
        raise UsageError('a host budget needs offloading: add `offload="activations"`.')
    if names and target.host_bytes_per_us <= 0:
        raise UsageError(
            f"the memory of {target.name} is the host's, so there is nowhere to offload to; leave `offload` out, or "
            "plan for a GPU (`target=`)."
        )
    if host_budget is not None:
        host_bytes_of(found, host_budget)  # so that an invalid size is refused at once
    if ACTIVATIONS not in names:
        return None
    return Link(target.host_bytes_per_us, host_bytes_of(found, host_budget))


def host_bytes_of(found: PlanningDevice, host_budget: str | int | None) -> int:
    """Return the bytes that may be on the host.

    The default is half of the host's free memory or, for a target elsewhere, whose host is unknown, the device's
    memory; rounded down to a power of two, which PyTorch pins. Raises UsageError for an invalid number of bytes.
    """
    if isinstance(host_budget, str):
        return parse_bytes(host_budget, what="host budget", whole_bytes=free_host_bytes())
    if host_budget is not None:
        if host_budget <= 0:
            raise UsageError(f"a host budget of {host_budget} bytes is not positive.")
        return host_budget
    most = found.target.memory_bytes if found.device is None else int(HOST_SHARE * free_host_bytes())
    return 1 << (most.bit_length() - 1)  # PyTorch rounds pinned memory up to a power of two


def beside_state(link: Link | None, graph: Graph, host_bytes: int) -> Link | None:
    """Return `link` less the host bytes of the optimizer's state. Raises UsageError if they do not fit."""
    if not (state := state_on_host(graph)):
        return link
    if state > host_bytes:
        raise UsageError(
            f"the optimizer's state takes {gib(state)} of the host's memory, pinned, and the host budget is "
            f"{gib(host_bytes)}; give more with `host_budget` (--host-budget), or leave it on the device."
        )
    return None if link is None else dataclasses.replace(link, host_bytes=host_bytes - state)


def state_on_host(graph: Graph) -> int:
    """Return the host bytes of the optimizer's state, in pinned pieces of a power of two each."""
    if not TrainingLoop.of(graph.about).offload_optimizer:
        return 0
    sizes = (size for parameter in graph.parameters for size in parameter.state_tensors if size >= SMALL_BYTES)
    return pinned_bytes(sizes)


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Return the host bytes of tensors of these sizes, in pinned pieces of a power of two each."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


def state_wait_us(graph: Graph, costs: Costs) -> float:
    """Return the time that an optimizer step waits for its state."""
    comes = np.array([kind.name == FROM_HOST for kind in graph.kinds], dtype=bool)[graph.op_kind]
    return float(costs.per_op_us(graph)[comes].sum())


def require_offloads(execution: Execution, loop: TrainingLoop | None) -> None:
    """Raise UsageError if activations cannot be offloaded."""
    if not execution.runs_offloads:
        raise UsageError(f'nothing is offloaded under `execution="{execution}"`; leave `execution` or `offload` out.')
    if loop is not None and loop.shard is not None:
        raise UsageError("nothing is offloaded where states are sharded; leave `offload` or `shard` out.")


def require_layers(execution: Execution, loop: TrainingLoop | None) -> None:
    """Raise UsageError if no weights can be on the host."""
    if not execution.runs_offloads:
        raise UsageError(f'no weights are on the host under `execution="{execution}"`; leave one of them out.')
    dataclasses.replace(loop or TrainingLoop(), weights_on_host=FEWEST)  # raises, naming the contradiction
