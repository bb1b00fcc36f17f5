"""Where every byte goes: what is alive in a step under a plan, by category, by module, and over time.

Computed from the same lives of storages as the peak itself (`Memory.lives`), so the parts add up to it exactly.

A category says why the bytes are there. What was there before the step has the names of `Graph.fixed_bytes`
(parameters, gradients that accumulate, optimizer state, ...); what the step makes has the names below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from remat.evaluation.evaluator import Curve, Lives, Memory
from remat.evaluation.graph import Graph, block_of
from remat.evaluation.plan import Region

ACTIVATIONS, RECOMPUTED, HEAD, GRADIENTS, TEMPORARIES, OPTIMIZER, GATHERED = range(7)
NAMES = (
    "activations",
    "recomputed activations",
    "logits and loss",
    "gradients",
    "temporaries of backward",
    "temporaries of the optimizer",
    "gathered shards",
)
WORKSPACES = "workspaces"
HELD_OUTPUTS = "kept from the step before"
MADE_IN_STEP = (*NAMES, WORKSPACES, HELD_OUTPUTS)  # the other categories are there before it
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Bytes alive at every operator that runs, by category; the categories add up to `curve.alive_bytes`."""

    curve: Curve
    parts: dict[str, np.ndarray]


def at_peak(memory: Memory, regions: Sequence[Region]) -> dict[str, int]:
    """Return the bytes by category at the peak of the step, which they add up to."""
    return at(memory, regions, memory.curve(regions).peak_at)


def at(memory: Memory, regions: Sequence[Region], position: int) -> dict[str, int]:
    """Return the bytes by category at a position of the timeline."""
    lives = memory.lives(regions)
    alive = (lives.birth <= position) & (lives.death >= position)
    codes, sizes = _codes(memory, lives)[alive], lives.size_bytes[alive]
    found = dict(memory.graph.fixed_bytes)
    for code, size in enumerate(np.bincount(codes, sizes, minlength=len(NAMES)).astype(np.int64).tolist()):
        if size:
            found[NAMES[code]] = found.get(NAMES[code], 0) + size
    workspace = int(memory.workspace_bytes[lives.op[position]]) if lives.executed[position] else 0
    held_outputs = int(memory.held_outputs_bytes(lives.op, lives.region)[position])
    return (
        found | ({WORKSPACES: workspace} if workspace else {}) | ({HELD_OUTPUTS: held_outputs} if held_outputs else {})
    )


def by_module(memory: Memory, regions: Sequence[Region], position: int) -> dict[str, int]:
    """Return activation, logit and loss bytes at a position by the module that makes them, the largest first.

    Layers are taken together: their numbers are written as `*`.
    """
    lives = memory.lives(regions)
    codes, made_by = _codes(memory, lives), memory.graph.storages.node[lives.storage]
    wanted = (lives.birth <= position) & (lives.death >= position) & (codes <= HEAD) & (made_by >= 0)
    found: dict[str, int] = {}
    for node, size in zip(made_by[wanted].tolist(), lives.size_bytes[wanted].tolist(), strict=True):
        name = _NUMBER.sub("*", memory.graph.nodes[node].module) or "outside modules"
        found[name] = found.get(name, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def over_time(memory: Memory, regions: Sequence[Region]) -> Stack:
    """Return the bytes by category at every operator of the step."""
    lives, curve = memory.lives(regions), memory.curve(regions)
    codes, count = _codes(memory, lives), len(lives.op)
    parts = {name: np.full(count, size) for name, size in memory.graph.fixed_bytes.items()}
    for code, name in enumerate(NAMES):
        mine = codes == code
        if mine.any():
            change = np.zeros(count + 1, dtype=np.int64)
            np.add.at(change, lives.birth[mine], lives.size_bytes[mine])
            np.subtract.at(change, lives.death[mine] + 1, lives.size_bytes[mine])
            parts[name] = parts.get(name, 0) + np.cumsum(change[:-1])
    if memory.workspace_bytes.any():
        parts[WORKSPACES] = np.where(lives.executed, memory.workspace_bytes[lives.op], 0)
    if memory.graph.held_outputs:
        parts[HELD_OUTPUTS] = memory.held_outputs_bytes(lives.op, lives.region)
    return Stack(curve, parts)


def _codes(memory: Memory, lives: Lives) -> np.ndarray:
    """Return the category, an index into `NAMES`, of every life of a storage; fetched offloads come last."""
    codes = codes_of_storages(memory.graph)[lives.storage]
    again = np.arange(len(codes)) >= len(memory.graph.storages.birth)
    again[len(codes) - len(memory.offloads) :] = False
    return np.where(again & (codes == ACTIVATIONS), RECOMPUTED, codes)


def codes_of_storages(graph: Graph) -> np.ndarray:
    """Return the category, an index into `NAMES`, of every storage that is not recomputed."""
    made_by, birth = graph.storages.node, graph.storages.birth
    layers = [i for i, node in enumerate(graph.nodes) if block_of(node.module)]
    head = layers[-1] + 1 if layers else len(graph.nodes)
    codes = np.where(made_by < 0, TEMPORARIES, np.where(made_by >= head, HEAD, ACTIVATIONS))
    codes[birth >= graph.backward_end] = OPTIMIZER
    codes[list(graph.parameter_gradients)] = GRADIENTS
    codes[list(graph.gathered)] = GATHERED
    return codes
