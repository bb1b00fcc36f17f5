"""A Graph: one training step, recorded as what it runs, what it allocates and what autograd keeps.

The record is made once, without checkpointing (`record.py`). Everything later (the memory of any plan, the
integer program, the estimated time) is computed from it, without torch, so a step recorded on a GPU machine can be
planned on a laptop.

The record distinguishes three ways in which a storage can be alive, because a plan changes each differently:

* *local*: something other than autograd refers to it: a value that a later node takes, a result that the caller
  holds, a gradient on its way. `Storages.death` is the last operator during which that is so. A plan does not
  change it.
* *packed*: autograd keeps it for a backward. Every single save is a row of `SavedTensors`, with the operator after
  which it is let go. A region drops its saved tensors in forward and makes them again when it is recomputed.
* *fixed*: it was there before the step (parameters, buffers, optimizer state, the batch): `Graph.fixed_bytes`.

Operators are numbered through the step: `forward_end` first ones are the forward, then the backward up to
`backward_end`, then the optimizer. A storage with birth b and death d is alive during operators b..d inclusive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from remat.evaluation.identity import Identity, NodeId, canonical
from remat.units import gib

OPTIMIZER_STATE = "optimizer state"  # in `Graph.fixed_bytes`: missing in the first step
STATE = "state of the model"  # in `Graph.fixed_bytes`: tensors that it keeps, and that are no parameters or buffers
FROM_HOST = "remat.from_host.default"  # an operator: bytes of optimizer state that come from the host
STEP_IN_BACKWARD = "step_in_backward"  # key of `Graph.about`: see `TrainingLoop`
LIBRARY_WORKSPACES = "library workspaces"  # in `Graph.fixed_bytes`: kept by cuBLAS, see `workspaces.py`
WRAPPED_NUMBERS = "numbers"  # in `Graph.fixed_bytes`: Python numbers that autograd keeps as tensors on the CPU
CHUNKED_ROWS = "chunked_rows("  # prefix of `Node.op` for chunked rows
OUTSIDE = -1  # Node.call of operators outside the captured graphs
CAST = "aten._to_copy.default"  # the operator kind that changes the dtype
# Kinds whose result is never saved: the second brings in a constant, the third sets strides (pooling to one pixel).
MADE_AGAIN = (CAST, "aten.lift_fresh.default", "aten.as_strided_.default")
DRAWN_LENGTHS = "drawn_lengths"  # key of `Graph.about`: whether lengths of sequences depend on what the batch draws
GRAPH_CALLS = "graph_calls"  # key of `Graph.about`: how many a step makes, where the last of them have no nodes
CALLED_MODULES = "called_modules"  # key of `Graph.about`: paths of the modules whose forward was called
IDENTITY = ("anchor", "tensors", "draws", "made_bytes")  # fields of a Node that its `NodeId` has too
UNKNOWN = -1  # Node.tensors in a record from before nodes had an identity
FORWARD_ALONE = "forward_alone_bytes"  # ... the most that the forward makes, where nothing is kept for backward
WITH_STEP = "with_step"  # ... whether the plan is for model and step, not for the model's forward alone
TRACED_ONLY = "not_untraced"  # ... why only the traced step is known
DRAWN_OUTSIDE = "drawn_outside"  # ... lines of forwards that draw numbers outside of torch, where a graph ends
KEPT_OUTSIDE = "kept_outside"  # ... lines between two graphs, each with the bytes that autograd keeps of its results


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator of a captured fx graph; with call = OUTSIDE, the operators that the step ran between two graphs.

    name           its name in the fx graph
    op             its callee, as text; between two graphs, the line that the first operator comes from
    module         path of the module that it is in
    call           the step's graph call that it belongs to
    inputs         nodes whose values it takes
    values         storages that its value refers to, without fixed ones; between two graphs, those that a later node
                   takes
    first          first of its forward operators
    end            one past its last forward operator
    random         whether it draws random numbers
    effect         its effect on storages older than itself: "" none, "batch_norm" and "counter" update module
                   state in a known way, "other" updates the state of a module in a way that must happen exactly once
    mutates        older nodes whose values it changes in place
    single_tensor  whether its value is a single tensor, so that it can enter and leave a region, or no region takes it
    in_context     whether a context (autocast, no_grad) is open after it that a later node closes
    graph_inputs   those of `inputs` that are nodes of the same graph call
    takes_fixed    whether it takes a tensor from before the step: a parameter, a buffer, the batch
    reused         storages of cached autocast copies of weights: an older node made them, and this node uses them
                   without taking them as inputs
    reused_at      operators before which those copies would otherwise be made
    anchor, tensors, draws, made_bytes  see `identity.NodeId`
    slice_ends     for a chunked loss: operators run by the end of each slice but the last
    decides        whether it makes integers of floating-point values, and forward reads them: run again, it might
                   decide otherwise, so every region around it saves it
    """

    name: str
    op: str
    module: str
    call: int
    inputs: tuple[int, ...]
    values: tuple[int, ...]
    first: int
    end: int
    random: bool = False
    effect: str = ""
    mutates: tuple[int, ...] = ()
    single_tensor: bool = True
    in_context: bool = False
    graph_inputs: tuple[int, ...] = ()
    takes_fixed: bool = False
    reused: tuple[int, ...] = ()
    reused_at: tuple[int, ...] = ()
    anchor: bool = False
    tensors: int = UNKNOWN
    draws: bool = False
    made_bytes: int = 0
    slice_ends: tuple[int, ...] = ()
    decides: bool = False

    def end_after(self, slices: int) -> int:
        """Return the number of operators run after so many of its slices; 0 stands for the whole node."""
        return self.slice_ends[slices - 1] if slices else self.end

    def to_json(self) -> list[Any]:
        row = list(dataclasses.astuple(self))
        while row[-1] in ((), False) and len(row) > _FIRST_FIELDS:  # files without are read by older versions
            row.pop()
        return row


_FIRST_FIELDS = [field.name for field in dataclasses.fields(Node)].index("slice_ends")
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.|$)")


def block_of(module: str) -> str | None:
    """Return the outermost numbered module around `module`, a layer of the model; None outside layers."""
    match = _BLOCK.match(module)
    return match[0] if match else None


def fingerprint(rows: Iterable[tuple[str, str, list[int]]]) -> str:
    """Hash a captured graph: (callee, module, ordinals of inputs) of every node in order.

    Shapes, names and versions are left out. Plans of file version 1 are identified by this alone: two versions of a
    library spell one graph in two ways, see `identity.py`.
    """
    return hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class OpKind:
    """An operator with the shapes, strides and dtypes of its arguments: what is timed once.

    name   aten overload                       signature  its arguments, as JSON can say them
    flops  floating-point operations           moved_bytes  bytes read and written at least once
    dtype  of the arithmetic                   workspace_bytes  known without a formula or a measurement
    """

    name: str
    signature: Any
    flops: int
    moved_bytes: int
    dtype: str
    workspace_bytes: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Operator and signature: the key of workspaces in a replay."""
        return self.name, json.dumps(self.signature)


@dataclasses.dataclass(frozen=True, eq=False)
class Storages:
    """Columns over storages: size, first and last operator of their local life, producing node (-1 in backward).

    cast   1 if the producing operator only changes the dtype, or brings in a constant: such a result is never saved,
           but recomputed
    over   1 if the next operator after its last writes its result over it (`recording/in_place.py`)
    """

    size_bytes: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    node: np.ndarray
    cast: np.ndarray
    over: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.over) != len(self.birth):  # of an older file
            object.__setattr__(self, "over", np.zeros_like(self.birth))


@dataclasses.dataclass(frozen=True, eq=False)
class SavedTensors:
    """Columns over the tensors that autograd saved, in the order of saving.

    node        node during which it was saved
    storage     which storage, -1 for fixed ones
    copy_bytes  size of the copy of module state that is saved in its place when the node is recomputed, or 0
    at          operators run before the saving
    unpack      operators run before backward asked for it, -1 if never
    used        last operator of the gradient function that asked for it, -1 if never
    release     last operator during which autograd still keeps it (a little later: the engine sums broadcast
                gradients before it lets go)
    """

    node: np.ndarray
    storage: np.ndarray
    copy_bytes: np.ndarray
    at: np.ndarray
    unpack: np.ndarray
    used: np.ndarray
    release: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class InnerBackward:
    """Requests of a backward inside the forward (`torch.autograd.grad`): forces, gradient penalties, residuals.

    Columns over requests: a saved tensor was asked for in an inner backward. So it is by one in a hook of the step's
    own backward (an equilibrium model's), but for the last one that asks, whose request is in `SavedTensors`.

    row     of `SavedTensors`          task  numbers the backward
    unpack  operators run before       used  last operator of the gradient function that asked for it
    kept    last operator during which the inner backward's own graph keeps the tensor, for the backward of the step;
            -1 if it does not
    """

    row: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    task: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    unpack: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    used: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    kept: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __bool__(self) -> bool:
        return bool(len(self.row))

    def within(self, forward_end: int) -> InnerBackward:
        """Return the requests before operator `forward_end`: those of backwards within the forward itself."""
        chosen = self.unpack < forward_end
        return InnerBackward(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})

    @property
    def backwards(self) -> int:
        """Number of backwards, including the step's own."""
        return 1 + len(np.unique(self.task))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter and the sizes of its training states, for sharding them.

    gradient_bytes  0 if it needs no gradient         state_bytes  of the optimizer, after its first step
    gradient        storage of its complete gradient; -1: none, or one from before the step
    state_tensors   `state_bytes` tensor by tensor; empty in files from before it was recorded
    """

    name: str
    size_bytes: int
    gradient_bytes: int = 0
    state_bytes: int = 0
    gradient: int = -1
    state_tensors: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """One recorded training step.

    op_kind, op_node   columns over operators: index into `kinds`, and the node it belongs to: in forward the node
                       that ran it, in backward the node whose gradient it computes
    fixed_bytes        bytes from before the step, by category
    parameter_gradients  storages of parameters' complete gradients
    about              its origin: workload, batch size, sequence length, dtype policy, device, versions
    parameters         one by one, in the order of the model
    gathered           storages that sharding added: shards of other ranks, while they are needed
    first_step_bytes   most bytes alive while the optimizer runs for the first time, and makes its state; 0: not known
    untraced_bytes     alive during every operator of the same step without a trace (`untraced.py`), including fixed
                       bytes and workspaces; empty: not known
    alone_bytes        made by its untraced forward where nothing is kept for backward: of every way to run it so
    held_outputs       tensors of the step before that this one replaces, as (bytes, operators before which they exist):
                       outputs that the loop still holds, state of the model itself, and what its loss still keeps
    inner              backwards within the forward; empty in nearly every step
    """

    nodes: tuple[Node, ...]
    kinds: tuple[OpKind, ...]
    op_kind: np.ndarray
    op_node: np.ndarray
    storages: Storages
    saved_tensors: SavedTensors
    forward_end: int
    backward_end: int
    fixed_bytes: dict[str, int]
    parameter_gradients: tuple[int, ...]
    about: dict[str, Any]
    parameters: tuple[Parameter, ...] = ()
    first_step_bytes: int = 0
    gathered: tuple[int, ...] = ()
    untraced_bytes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    alone_bytes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    held_outputs: tuple[tuple[int, int], ...] = ()
    inner: InnerBackward = dataclasses.field(default_factory=InnerBackward)

    @property
    def op_count(self) -> int:
        return len(self.op_kind)

    @property
    def fixed_total(self) -> int:
        return sum(self.fixed_bytes.values())

    @functools.cached_property
    def is_made_again(self) -> np.ndarray:
        """For every operator, whether its result is recomputed even if its node is saved."""
        return np.array([kind.name in MADE_AGAIN for kind in self.kinds], dtype=bool)[self.op_kind]

    @functools.cached_property
    def deciding(self) -> tuple[int, ...]:
        """The nodes that decide, ascending."""
        return tuple(i for i, node in enumerate(self.nodes) if node.decides)

    @functools.cached_property
    def changed(self) -> frozenset[int]:
        """The nodes whose values another node changes in place."""
        return frozenset(producer for node in self.nodes for producer in node.mutates)

    @property
    def unseen_bytes(self) -> int:
        """Fixed bytes that no replay sees: Python numbers kept as tensors, libraries' workspaces."""
        return self.fixed_bytes.get(WRAPPED_NUMBERS, 0) + self.fixed_bytes.get(LIBRARY_WORKSPACES, 0)

    @functools.cached_property
    def call_nodes(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of every graph call, in order; a graph may have none, and only hand a value on."""
        calls: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            calls.setdefault(node.call, []).append(i)
        count = max(max(calls, default=OUTSIDE) + 1, self.about.get(GRAPH_CALLS, 0))
        return tuple(tuple(calls.get(call, ())) for call in range(count))

    @functools.cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """`fingerprint` of every graph call, in order."""
        return tuple(map(self._fingerprint_of, self.call_nodes))

    @functools.cached_property
    def identities(self) -> tuple[Identity, ...]:
        """The identity of every graph call; empty for a record of an older version."""
        if any(self.nodes[i].tensors == UNKNOWN for members in self.call_nodes for i in members):
            return ()
        return tuple(map(self._identity_of, self.call_nodes))

    def _identity_of(self, members: tuple[int, ...]) -> Identity:
        ordinal = {i: k for k, i in enumerate(members)}
        return tuple(
            NodeId(
                canonical(node.op),
                node.module,
                tuple(ordinal[j] for j in node.graph_inputs),
                **{name: getattr(node, name) for name in IDENTITY},
            )
            for node in (self.nodes[i] for i in members)
        )

    def _fingerprint_of(self, members: tuple[int, ...]) -> str:
        ordinal = {i: k for k, i in enumerate(members)}
        return fingerprint(
            (self.nodes[i].op, self.nodes[i].module, [ordinal[j] for j in self.nodes[i].graph_inputs]) for i in members
        )

    def __str__(self) -> str:
        packed = np.unique(self.saved_tensors.storage[self.saved_tensors.storage >= 0])
        return (
            f"Graph of {self.about.get('workload', '?')}: {len(self.nodes)} nodes, {self.forward_end} forward and "
            f"{self.backward_end - self.forward_end} backward operators of {len(self.kinds)} kinds; "
            f"autograd keeps {gib(int(self.storages.size_bytes[packed].sum()))}; fixed {gib(self.fixed_total)}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [node.to_json() for node in self.nodes],
            "kinds": [dataclasses.astuple(kind) for kind in self.kinds],
            "op_kind": self.op_kind.tolist(),
            "op_node": self.op_node.tolist(),
            "storages": _columns_to_json(self.storages),
            "packs": _columns_to_json(self.saved_tensors),
            "forward_end": self.forward_end,
            "backward_end": self.backward_end,
            "fixed_bytes": self.fixed_bytes,
            "parameter_gradients": list(self.parameter_gradients),
            "about": self.about,
            "parameters": [dataclasses.astuple(parameter) for parameter in self.parameters],
            "first_step_bytes": self.first_step_bytes,
            "gathered": list(self.gathered),
            "untraced_bytes": self.untraced_bytes.tolist(),
            "alone_bytes": self.alone_bytes.tolist(),
            "held": [list(row) for row in self.held_outputs],
            **({"inner": _columns_to_json(self.inner)} if self.inner else {}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Graph:
        """Read a graph from the result of `to_json`. Raises KeyError, TypeError or ValueError for other data."""
        return Graph(
            nodes=tuple(Node(*_with_tuples(row)) for row in data["nodes"]),
            kinds=tuple(OpKind(*row) for row in data["kinds"]),
            op_kind=np.array(data["op_kind"], dtype=np.int64),
            op_node=np.array(data["op_node"], dtype=np.int64),
            storages=Storages(**_columns_from_json(data["storages"])),
            saved_tensors=SavedTensors(**_columns_from_json(data["packs"])),
            forward_end=data["forward_end"],
            backward_end=data["backward_end"],
            fixed_bytes=data["fixed_bytes"],
            parameter_gradients=tuple(data["parameter_gradients"]),
            about=data["about"],
            parameters=tuple(Parameter(*_with_tuples(row)) for row in data.get("parameters", ())),
            first_step_bytes=data.get("first_step_bytes", 0),
            gathered=tuple(data.get("gathered", ())),
            untraced_bytes=np.array(data.get("untraced_bytes", ()), dtype=np.int64),
            alone_bytes=np.array(data.get("alone_bytes", ()), dtype=np.int64),
            held_outputs=tuple((size, until) for size, until in data.get("held", ())),
            inner=InnerBackward(**_columns_from_json(data.get("inner", {}))),
        )


def _with_tuples(row: list[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in row]


def _columns_to_json(table: Storages | SavedTensors | InnerBackward) -> dict[str, list[int]]:
    return {field.name: getattr(table, field.name).tolist() for field in dataclasses.fields(table)}


def _columns_from_json(columns: dict[str, list[int]]) -> dict[str, np.ndarray]:
    return {name: np.array(values, dtype=np.int64) for name, values in columns.items()}


def forward_alone_bytes(graph: Graph, workspace_bytes: np.ndarray | None = None, *, frees: bool = True) -> int:
    """Return the peak bytes that the forward of `graph` allocates if autograd keeps nothing.

    workspace_bytes  of every operator's kernel, where known
    frees            whether values are freed behind their last use; otherwise at the end
    """
    change, found = np.zeros(graph.forward_end + 2, dtype=np.int64), graph.storages
    made = found.birth < graph.forward_end
    np.add.at(change, found.birth[made], found.size_bytes[made])
    last = found.death[made] + found.over[made]  # verified under a mode, where nothing is written over its argument
    if not frees:
        last = np.full_like(last, graph.forward_end)
    np.subtract.at(change, np.minimum(last, graph.forward_end) + 1, found.size_bytes[made])
    alive = np.cumsum(change)
    if workspace_bytes is not None:
        alive[: graph.forward_end] += workspace_bytes[: graph.forward_end]
    return int(alive.max(initial=0))
