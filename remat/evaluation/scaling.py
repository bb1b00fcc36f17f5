"""Scaling: the graph of a step at any batch size, from its records at two.

What a step runs does not depend on its batch, and the bytes of every storage, like the operations and the traffic of
every operator, grow with it in a straight line. So two records give all others, without tracing again; where a model is
not like that (it decides something by its batch), `family` says so and each size is recorded by itself.

A graph found this way serves to choose a size. What is chosen is recorded for real before it is handed out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.forwards import FORWARDS
from remat.evaluation.graph import FORWARD_ALONE, STATE, Graph, OpKind, SavedTensors, Storages, forward_alone_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class UnroundedRecord:
    """A record whose sizes are not rounded, with the rounded fixed bytes.

    fixed_bytes  as in the graph, but rounded      batch_bytes  of each tensor of the batch, not rounded
    """

    graph: Graph
    fixed_bytes: dict[str, int]
    batch_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Two records of one step, at batch sizes low < high, that differ in sizes only.

    alignment_bytes  every allocation is rounded up to a multiple of it
    """

    low: UnroundedRecord
    high: UnroundedRecord
    alignment_bytes: int

    def at(self, batch_size: int) -> Graph:
        """Return the step at `batch_size`, with fractional sizes rounded up."""
        low, high = self.low.graph, self.high.graph
        begin, end = low.about["batch_size"], high.about["batch_size"]

        def line(a: Any, b: Any) -> Any:
            grown = (np.asarray(b, dtype=np.int64) - np.asarray(a, dtype=np.int64)) * (batch_size - begin)
            return np.maximum(a + -(-grown // (end - begin)), 0)

        kinds, op_kind = _kinds(low, high, line)
        sizes = line(low.storages.size_bytes, high.storages.size_bytes)
        batch = line(self.low.batch_bytes, self.high.batch_bytes)
        nodes = (
            dataclasses.replace(a, made_bytes=int(line(a.made_bytes, b.made_bytes)))
            for a, b in zip(low.nodes, high.nodes, strict=True)
        )
        fixed = low.fixed_bytes
        state = {STATE: int(line(fixed[STATE], high.fixed_bytes[STATE]))} if STATE in fixed else {}
        bare = dataclasses.replace(
            low,
            nodes=tuple(nodes),
            kinds=kinds,
            op_kind=op_kind,
            storages=dataclasses.replace(low.storages, size_bytes=sizes),
            fixed_bytes={**fixed, **state, "batch": int(batch.sum())},
            first_step_bytes=int(line(low.first_step_bytes, high.first_step_bytes)),
            held_outputs=tuple(
                (int(line(a, b)), until) for (a, until), (b, _) in zip(low.held_outputs, high.held_outputs, strict=True)
            ),
            about={
                **low.about,
                "batch_size": batch_size,
                "batch_elements": int(line(low.about["batch_elements"], high.about["batch_elements"])),
                "batch_inputs": {
                    name: int(line(elements, high.about["batch_inputs"][name]))
                    for name, elements in low.about["batch_inputs"].items()
                },
                **({FORWARDS: _forwards(low, high, line)} if FORWARDS in low.about else {}),
            },
        )
        rounded = dataclasses.replace(
            bare,
            storages=dataclasses.replace(low.storages, size_bytes=self._rounded(sizes)),
            saved_tensors=dataclasses.replace(
                low.saved_tensors, copy_bytes=self._rounded(low.saved_tensors.copy_bytes)
            ),
            fixed_bytes={**self.low.fixed_bytes, **state, "batch": int(self._rounded(batch).sum())},
            held_outputs=tuple((int(self._rounded(np.asarray(size))), until) for size, until in bare.held_outputs),
        )
        # Storages of the untraced step are not known one by one: rounding adds as much there as at the traced peak.
        more = Memory(rounded).peak_without_regions - Memory(bare).peak_without_regions
        untraced_bytes = line(low.untraced_bytes, high.untraced_bytes) + more
        traced_bytes = forward_alone_bytes(rounded)
        most = max(traced_bytes - forward_alone_bytes(bare), more, 0)  # its own gradients may keep what a trace frees
        alone_bytes = line(low.alone_bytes, high.alone_bytes) + most
        alone = {FORWARD_ALONE: traced_bytes} if FORWARD_ALONE in low.about else {}
        return dataclasses.replace(
            rounded, untraced_bytes=untraced_bytes, alone_bytes=alone_bytes, about={**rounded.about, **alone}
        )

    def _rounded(self, sizes: np.ndarray) -> np.ndarray:
        return -(-sizes // self.alignment_bytes) * self.alignment_bytes


def _forwards(low: Graph, high: Graph, line: Any) -> list[dict[str, Any]]:
    """Return the forwards of the step at another size; their arguments are described as in the first record."""
    return [
        {**a, "elements": {name: int(line(size, b["elements"][name])) for name, size in a["elements"].items()}}
        for a, b in zip(low.about[FORWARDS], high.about[FORWARDS], strict=True)
    ]


def family(low: UnroundedRecord, high: UnroundedRecord, alignment_bytes: int) -> Family | None:
    """Return the family of two records; None if they differ in more than sizes."""
    same = _structure(low.graph) == _structure(high.graph) and len(low.batch_bytes) == len(high.batch_bytes)
    return Family(low, high, alignment_bytes) if same else None


def _structure(graph: Graph) -> tuple[Any, ...]:
    """Return everything in a graph but its sizes."""
    storages, saved = graph.storages, graph.saved_tensors
    columns = [graph.op_node, *_columns(storages, "size_bytes"), *_columns(saved, "copy_bytes")]
    return (
        tuple(dataclasses.replace(node, made_bytes=0) for node in graph.nodes),
        tuple(graph.kinds[kind].name for kind in graph.op_kind),
        tuple(column.tobytes() for column in columns),
        graph.forward_end,
        graph.backward_end,
        graph.parameters,
        graph.parameter_gradients,
        graph.gathered,
        tuple(graph.fixed_bytes),
        len(graph.untraced_bytes),
        len(graph.alone_bytes),
        tuple(until for _, until in graph.held_outputs),
    )


def _columns(table: Storages | SavedTensors, without: str) -> list[np.ndarray]:
    names = [field.name for field in dataclasses.fields(table)]
    return [np.ascontiguousarray(getattr(table, name)) for name in names if name != without]


def _kinds(low: Graph, high: Graph, line: Any) -> tuple[tuple[OpKind, ...], np.ndarray]:
    """Return the kinds at another size: one for every pair of kinds that an operator has in the two records."""
    pairs, op_kind = np.unique(np.stack([low.op_kind, high.op_kind]), axis=1, return_inverse=True)
    kinds = []
    for a, b in pairs.T.tolist():
        one, other = low.kinds[a], high.kinds[b]
        kinds.append(
            dataclasses.replace(
                one,
                signature=_signature(one.signature, other.signature, line),
                flops=int(line(one.flops, other.flops)),
                moved_bytes=int(line(one.moved_bytes, other.moved_bytes)),
            )
        )
    return tuple(kinds), op_kind.reshape(-1)


def _signature(low: Any, high: Any, line: Any) -> Any:
    """Interpolate a signature: sizes and strides on their line, the rest as in the first."""
    if isinstance(low, list) and isinstance(high, list) and len(low) == len(high):
        return [_signature(a, b, line) for a, b in zip(low, high, strict=True)]
    if isinstance(low, dict) and isinstance(high, dict) and low.keys() == high.keys():
        return {name: _signature(low[name], high[name], line) for name in low}
    return int(line(low, high)) if type(low) is type(high) is int and low != high else low
