"""Fuse: what operators cost where a compiler makes one kernel of several.

A roofline prices every operator by what it reads and writes, and a measurement times it alone. Under Inductor an
operator that follows another in one kernel finds that one's result in registers. Modelled is this much:

* which operators fuse: those that Inductor has code of its own for (pointwise ones, and what it decomposes into
  pointwise ones and reductions); products and convolutions, which call libraries, do not;
* what a fused operator costs: its time without the part of its traffic that is reading the result of the operator
  right before it.

Not modelled: results that are never written, since only the kernel reads them; fusion with operators further
away, or with products; where Inductor stops fusing. So the time of a recomputation is still overstated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch

from remat._torch.inductor import decompositions
from remat.costing.profile import Profile
from remat.evaluation.graph import OpKind


def fused(profile: Profile) -> Profile:
    """Return `profile` with the costs of a fusing compiler: operators that fuse become kinds of their own."""
    graph, costs = profile.graph, profile.costs
    made = np.bincount(graph.storages.birth, weights=graph.storages.size_bytes, minlength=len(graph.op_kind))
    rows: dict[tuple[int, int], int] = {(kind, 0): kind for kind in range(len(graph.kinds))}
    op_kind = graph.op_kind.copy()
    for op in range(1, graph.backward_end):
        before, kind = graph.kinds[graph.op_kind[op - 1]], int(graph.op_kind[op])
        result = int(made[op - 1])
        if _fuses(before) and _fuses(graph.kinds[kind]) and result in _tensor_bytes(graph.kinds[kind].signature):
            op_kind[op] = rows.setdefault((kind, result), len(rows))
    moved = [(graph.kinds[kind].moved_bytes, spared) for kind, spared in rows]
    left = [max(all_of_it - spared, 0) / all_of_it if spared and all_of_it else 1.0 for all_of_it, spared in moved]
    kinds = tuple(
        dataclasses.replace(graph.kinds[kind], moved_bytes=max(graph.kinds[kind].moved_bytes - spared, 0))
        for kind, spared in rows
    )
    return dataclasses.replace(
        profile,
        graph=dataclasses.replace(graph, kinds=kinds, op_kind=op_kind),
        costs=dataclasses.replace(
            costs,
            time_us=tuple(costs.time_us[kind] * share for (kind, _), share in zip(rows, left, strict=True)),
            workspace_bytes=tuple(costs.workspace_bytes[kind] for kind, _ in rows),
            spread=tuple(costs.spread[kind] for kind, _ in rows) if costs.spread else (),
            about={**costs.about, "fused": True},
        ),
    )


def _fuses(kind: OpKind) -> bool:
    return kind.flops == 0 and _has_code(kind.name)


@functools.cache
def _has_code(name: str) -> bool:
    """Return whether Inductor generates code for an overload such as `aten.add.Tensor`, not a call of its kernel."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.pointwise in operator.tags or operator in decompositions()
    )


def _tensor_bytes(signature: Any) -> set[int]:
    """Return the sizes of the tensors among described arguments."""
    if isinstance(signature, dict):
        if "tensor" in signature:
            shape, _, dtype = signature["tensor"]
            return {math.prod(shape) * getattr(torch, dtype).itemsize}
        signature = list(signature.values())
    if isinstance(signature, list):
        return set().union(*map(_tensor_bytes, signature))
    return set()
