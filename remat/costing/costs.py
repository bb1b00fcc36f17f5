"""Costs: how long every kind of operator takes, and what its kernel needs beside its outputs.

Either measured on a device (`operator_timing.py`), or estimated from a target's roofline and, where there is one, a
table of kernels that were measured on it (`kernel_table.py`). Whatever is derived from estimated costs is labelled so.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from remat.costing.kernel_table import SOURCES, KernelTable
from remat.costing.roofline import kernel_us
from remat.costing.workspaces import cublas_bytes, with_libraries, without_formula, workspace_bytes
from remat.evaluation.graph import FORWARD_ALONE, Graph, OpKind, forward_alone_bytes
from remat.workload.target import Target

KERNEL_TIMES = "kernel_times"  # key of `Graph.about` and `Plan.about`


@dataclasses.dataclass(frozen=True)
class Costs:
    """Rows parallel to `Graph.kinds`.

    source           "measured" or "estimated"       device   name of the device or target
    time_us          median time of one call         spread   half the interquartile range over the median
    workspace_bytes  peak of the kernel's own allocations, beyond inputs and outputs
    about            repeats, versions, date; "table": shares of the step's time that a table of kernels knows
    table            that table, for other forms of the same step; not part of a file
    """

    source: Literal["measured", "estimated"]
    device: str
    time_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    spread: tuple[float, ...] = ()
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    table: KernelTable | None = None

    @property
    def about_table(self) -> dict[str, Any]:
        """Entry of `Graph.about`: shares of the step's time that a table of kernels knows, if there is one."""
        return {KERNEL_TIMES: self.about["table"]} if "table" in self.about else {}

    def per_op_us(self, graph: Graph) -> np.ndarray:
        """Return the time of every operator of `graph`, in microseconds."""
        return np.array(self.time_us, dtype=np.float64)[graph.op_kind]

    def workspace_per_op(self, graph: Graph) -> np.ndarray:
        """Return the workspace of every operator of `graph`, in bytes."""
        return np.array(self.workspace_bytes, dtype=np.int64)[graph.op_kind]

    def workspace_of(self, graph: Graph) -> dict[tuple[str, str], int]:
        """Return the workspaces by operator and signature, for a replay."""
        return {kind.key: size for kind, size in zip(graph.kinds, self.workspace_bytes, strict=True)}

    def step_time_us(self, graph: Graph) -> float:
        """Return the time of the step without checkpointing: its operators one after the other."""
        return float(self.per_op_us(graph).sum())

    def update_time_us(self, graph: Graph, micro_batches: int, recompute_us: float = 0.0) -> float:
        """Return the time of one optimizer step over `micro_batches`, each recomputing for `recompute_us`."""
        times = self.per_op_us(graph)
        micro_batch_us, rest_us = float(times[: graph.backward_end].sum()), float(times[graph.backward_end :].sum())
        return micro_batches * (micro_batch_us + recompute_us) + rest_us

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(dataclasses.replace(self, table=None))
        return {name: value for name, value in found.items() if name != "table"}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Costs:
        rows: dict[str, Any] = {name: tuple(data[name]) for name in ("time_us", "workspace_bytes", "spread")}
        return Costs(data["source"], data["device"], **rows, about=data["about"])


def kind_key(kind: OpKind) -> str:
    """Return a key that kinds of equal cost share: operator, shapes, strides, dtypes, arguments."""
    return f"{kind.name} {kind.signature}"


def estimated_costs(graph: Graph, target: Target, table: KernelTable | None = None) -> Costs:
    """Estimate the costs of `graph` on a target that is not at hand, by `roofline.py` and `workspaces.py`.

    table  kernels measured on the target, whose times are used; `about` has their share of the step's time
    """
    about: dict[str, Any] = {}
    if table is None:
        times = tuple(kernel_us(kind, target) for kind in graph.kinds)
    else:
        priced = table.price(graph.kinds, target)
        times = tuple(us for us, _ in priced)
        about = {"table": {"measured_on": table.device, **_shares(graph, priced)}}
    return Costs(
        source="estimated",
        device=target.name,
        time_us=times,
        workspace_bytes=tuple(workspace_bytes(kind, target) for kind in graph.kinds),
        about={"model": "roofline", **about},
        table=table,
    )


def _shares(graph: Graph, priced: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return the shares of the step's time that each source of times priced, between 0 and 1."""
    found: Counter[str] = Counter()
    for kind in graph.op_kind:
        found[priced[kind][1]] += priced[kind][0]
    return {source: round(found[source] / max(found.total(), 1e-9), 4) for source in SOURCES}


def with_library_workspaces(graph: Graph, target: Target, costs: Costs | None = None) -> Graph:
    """Add the workspaces that the target's libraries keep to `graph`: measured for one thread, or by formula."""
    if target.device != "cuda":
        return graph
    measured = costs is not None and costs.source == "measured"
    return with_libraries(graph, costs.about["library_bytes"] if measured and costs else cublas_bytes(target))


def with_forward_alone(graph: Graph, costs: Costs) -> Graph:
    """Count the workspaces of kernels, and what Python's names keep, in what the forward of `graph` takes by itself.

    Where the untraced forward is not known, names keep all that is made.
    """
    workspaces, known = costs.workspace_per_op(graph), graph.alone_bytes
    traced = forward_alone_bytes(graph, workspaces, frees=len(known) > 0)
    return dataclasses.replace(graph, about={**graph.about, FORWARD_ALONE: max(traced, int(known.max(initial=0)))})


def assumptions(graph: Graph, target: Target) -> dict[str, Any]:
    """Return the assumptions of a prediction for a target by name: versions, attention, workspaces not counted."""
    names = {kind.name.removeprefix("aten._scaled_dot_product_") for kind in graph.kinds}
    attention = sorted(name.removesuffix("_attention.default") for name in names if name.endswith("_attention.default"))
    return {
        "assumes": target.assumes,
        "attention": attention,
        "workspaces_not_counted": list(without_formula(graph.kinds)) if target.device == "cuda" else [],
    }
