"""Writes: storages that a forward writes into again and again.

Such are results that a loop writes into slots (`out[i] = x`), or a residual stream that each layer adds to. A region
around all writes would be most of the model. One that touches the storage nowhere may be made again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

LONG_LIFE = 0.3  # of the nodes
LONG_WRITTEN = 12  # nodes: what is written through fewer may be all within a region


def written_for_long(touched: Sequence[Collection[int]], last: Mapping[int, int]) -> list[frozenset[int]]:
    """List the nodes that touch a storage, up to its last write, for each that is written through much of the forward.

    touched  the storages that each node takes, gives or writes to
    last     the last node that writes to each storage
    """
    touching: dict[int, list[int]] = {storage: [] for storage in last}
    for i, storages in enumerate(touched):
        for storage in last.keys() & storages:
            if i <= last[storage]:
                touching[storage].append(i)
    most = max(LONG_LIFE * len(touched), LONG_WRITTEN)
    return [frozenset(found) for storage, found in touching.items() if last[storage] - found[0] > most]


def holds_or_leaves(region: Collection[int], touching: frozenset[int]) -> bool:
    """Return whether a region holds all nodes that touch a storage, or none."""
    return touching.isdisjoint(region) or touching.issubset(region)
