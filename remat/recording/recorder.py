"""The recorder: a tracker that attributes operators, and what autograd saves, to the nodes of captured graphs."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from remat._torch.recording import autograd_node, backward_number, next_sequence_number, untraced
from remat._torch.training import without_modes
from remat.capture.kept_tensors import strided_parts
from remat.capture.schemas import draws_random_numbers, written
from remat.chunking.chunked_loss import ChunkedLoss
from remat.evaluation.forwards import DIFFERENTIATES
from remat.evaluation.graph import (
    CAST,
    IDENTITY,
    OUTSIDE,
    Graph,
    InnerBackward,
    Node,
    Parameter,
    SavedTensors,
    Storages,
)
from remat.evaluation.identity import NodeId
from remat.recording.fake_step import FakeStep
from remat.recording.inner_nodes import AHEAD
from remat.recording.known_values import KnownValues
from remat.recording.sources import line_here
from remat.recording.tracker import FIXED_STORAGE, Moment, RecordedSpan, Tracker

OUTSIDE_OP = "outside"  # Node.op between two graphs, where no line is known
IN_BACKWARD = -1  # in the place of the row of a tensor that a graph made in backward saves


class Recorder(Tracker):
    """Attributes operators and saves to nodes while a step runs.

    given_to_heads  node -> arguments of its chunked loss, with tensors on the meta device for their shapes
    """

    def __init__(self, alignment_bytes: int, buffers: Iterable[torch.Tensor], known: KnownValues):
        super().__init__(alignment_bytes)
        self._known = known
        self._buffers = {id(part.untyped_storage()) for buffer in buffers for part in strided_parts(buffer)}
        self._nodes: list[dict[str, Any]] = []
        self.index: dict[tuple[int, str], int] = {}  # (call, name in its graph) -> node
        self._current: int | None = None
        self._op_nodes: list[int] = []
        self._storage_nodes: list[int] = []
        self._integers: set[int] = set()  # storages of integers that an operator made of floating-point values
        self._sequence: list[int] = []  # autograd sequence number at the start of each node
        self._saved_tensors: list[dict[str, int]] = []
        self._asked_inside: dict[tuple[int, int], dict[str, int]] = {}  # (row, number of an inner backward) -> request
        self._saved_of_given: dict[int, dict[str, int]] = {}  # number of a save by an inner backward's graph -> request
        self._given_inside: dict[int, dict[str, int]] = {}  # id of a request's argument -> the request
        self._sequence_after = 0
        self._open = 0
        self._readers: dict[int, set[int]] = {}  # id of a fixed storage -> nodes of forward that read it
        self._takers: dict[int, set[int]] = {}  # ... that are given it
        self._writers: dict[int, set[int]] = {}  # ... that change it
        self.wrapped_numbers = 0
        self.modules: dict[str, None] = {}  # paths of those that are called, in order
        self.given_to_heads: dict[int, tuple[Any, ...]] = {}
        self._forward_end = self._backward_end = -1
        self._gradients: tuple[int, ...] = ()
        self._gradient_of: dict[str, int] = {}
        self._stepped: dict[int, int] = {}  # storage of the gradient, by id of a parameter that is stepped in backward

    # Nodes

    def begin(
        self,
        call: int,
        name: str,
        op: str = OUTSIDE_OP,
        module: str = "",
        effect: str = "other",
        graph_inputs: set[int] = frozenset(),  # type: ignore[assignment]
        given: set[int | None] = frozenset(),  # type: ignore[assignment]
        known: NodeId | None = None,
    ) -> None:
        """Begin a node; `graph_inputs` are nodes of its own graph whose values it takes, `given` those of others.

        None in `given` stands for a tensor from before the step.
        """
        self._current = len(self._nodes)
        self.index[call, name] = self._current
        self._sequence.append(next_sequence_number())
        self._nodes.append(
            {
                "name": name,
                "op": op,
                "module": module,
                "call": call,
                "inputs": tuple(sorted(graph_inputs.union(i for i in given if i is not None))),
                "values": (),
                "first": self.op_count,
                "end": self.op_count,
                "random": False,
                "effect": effect,
                "mutates": (),
                "single_tensor": True,
                "in_context": False,
                "decides": False,
                "graph_inputs": tuple(sorted(graph_inputs)),
                "takes_fixed": None in given,
                "reused": (),
                "reused_at": (),
                "slice_ends": (),
                **({name: getattr(known, name) for name in IDENTITY} if known else {}),
            }
        )

    @contextlib.contextmanager
    def running(self, head: ChunkedLoss, given: Sequence[Any]) -> Iterator[None]:
        """Record one slice of the chunked loss that is the current node, and repeat the record for the others."""
        assert self._current is not None
        node, before = self._current, head.watch
        with without_modes():
            self.given_to_heads[node] = tree_map_only(torch.Tensor, _shape_of, tuple(given))

        def note_end(_: int) -> None:
            self._nodes[node]["slice_ends"] += (self.op_count,)

        head.watch = dataclasses.replace(before, known=self.known, behind_slice=note_end)
        try:
            yield
        finally:
            head.watch = before

    def _now(self) -> Moment:
        return Moment(self.op_count, len(self.storages), len(self._saved_tensors), self.wrapped_numbers)

    def is_closed(self, block: RecordedSpan) -> bool:
        saved = self._saved_tensors[block.begin.saved :]
        is_of_one_node = len({*self._op_nodes[block.begin.ops :]}) == 1
        is_over = all(row["unpack"] >= 0 and row["release"] >= 0 for row in saved)
        return super().is_closed(block) and is_of_one_node and is_over

    def repeat(self, block: RecordedSpan) -> None:
        now, begin, end = self._now(), block.begin, block.end
        super().repeat(block)
        later = now.ops - begin.ops
        in_forward = self._forward_end < 0
        node = self._nodes_now(in_forward)
        self._op_nodes += [node] * (end.ops - begin.ops)
        self._storage_nodes += [node if in_forward else -1] * (end.storages - begin.storages)
        self.wrapped_numbers += end.numbers - begin.numbers
        for row in self._saved_tensors[begin.saved : end.saved]:
            if row["storage"] < begin.storages:
                continue  # its replacement exists all the time, and the save is over (`settle_saves`)
            again = {name: row[name] + later for name in ("at", "unpack", "used", "release")}
            storage = row["storage"] + now.storages - begin.storages
            number = len(self._saved_tensors)
            self._saved_tensors.append({**row, **again, "node": node, "storage": storage, "number": number})
        if in_forward:
            self._nodes[node]["end"] = self.op_count

    def slice_ends(self, node: int) -> tuple[int, ...]:
        """Return `slice_ends` as in `graph.Node`."""
        found: tuple[int, ...] = self._nodes[node]["slice_ends"]
        return found

    def finish(self, value: Any, bracket: int, is_around: bool = False) -> None:
        assert self._current is not None
        node = self._nodes[self._current]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        storages = {self.storage_of(tensor) for tensor in tensors} - {FIXED_STORAGE}
        self._open += 0 if is_around else bracket
        node["values"] = tuple(sorted(storages))
        node["end"] = self.op_count
        node["single_tensor"] = is_around or isinstance(value, torch.Tensor)
        node["in_context"] = self._open > 0
        self._sequence_after = next_sequence_number()
        self._current = None

    def producer(self, tensor: Any) -> int | None:
        """Return the node that made the storage of `tensor`; None if it existed before the step."""
        storage = self.storage_of(tensor) if isinstance(tensor, torch.Tensor) else FIXED_STORAGE
        return None if storage == FIXED_STORAGE else self._storage_nodes[storage]

    def take(self, tensor: torch.Tensor) -> int | None:
        """Return `producer` for a node that takes `tensor`, and note values that came from between two graphs."""
        producer = self.producer(tensor)
        if producer is not None and (node := self._nodes[producer])["call"] == OUTSIDE:
            node["values"] = tuple(sorted({*node["values"], self.storage_of(tensor)}))
        return producer

    def note_given(self, values: Any) -> None:
        """Note that the current node takes fixed storages in `values`, also where it reads none, as a view does.

        A region keeps what its nodes are given for its recomputation, and autograd refuses what has changed since.
        """
        assert self._current is not None
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and self.storage_of(tensor) == FIXED_STORAGE:
                self._takers.setdefault(id(tensor.untyped_storage()), set()).add(self._current)

    def note_statistics(self, statistics: Iterable[torch.Tensor | None]) -> None:
        """Note that the current node updates running statistics, which the operator's schema does not say."""
        assert self._current is not None
        for tensor in statistics:
            if tensor is not None and self.storage_of(tensor) == FIXED_STORAGE:
                self._writers.setdefault(id(tensor.untyped_storage()), set()).add(self._current)

    # Operators

    def replaced(self, tensor: torch.Tensor) -> None:
        """Note that a tensor gets another storage, which happens once: readers of the old one are not recomputed."""
        if self._forward_end < 0 and self._current is not None:
            self._nodes[self._current]["effect"] = "other"
            if self.storage_of(tensor) == FIXED_STORAGE:
                self._writers.setdefault(id(tensor.untyped_storage()), set()).add(self._current)

    def dispatched(self, op: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        in_forward = self._forward_end < 0
        if in_forward and self._current is None:
            self._begin_outside(op)
        node = self._nodes_now(in_forward)
        self._op_nodes.append(node)
        self._storage_nodes += [node if in_forward else -1] * (len(self.storages) - len(self._storage_nodes))
        if in_forward:
            self._count_wrapped_numbers(func, args)
            self._note_effects(node, func, args, kwargs)
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._note_decisions(taken, out)
            self._note_reused(op, node, {*map(self.storage_of, taken)} - {FIXED_STORAGE})
            self._nodes[node]["end"] = self.op_count

    def _count_wrapped_numbers(self, func: Any, args: Any) -> None:
        """Count Python numbers in the place of tensors: autograd keeps each as a tensor that no hook sees."""
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, (int, float)) and str(argument.type) == "Tensor":
                self.wrapped_numbers += 1

    def _begin_outside(self, first: int) -> None:
        """Make a node of the operators that run between graph calls from operator `first` on."""
        last = len(self._nodes) - 1
        if last < 0 or self._nodes[last]["call"] != OUTSIDE:
            self.begin(OUTSIDE, f"outside_{len(self._nodes)}", op=str(line_here() or OUTSIDE_OP))
            # Autograd has numbered the first operator already: the node begins where the one before ended.
            self._nodes[-1]["first"], self._sequence[-1] = first, self._sequence_after
            self._current = None

    def _nodes_now(self, in_forward: bool) -> int:
        if in_forward:
            return len(self._nodes) - 1 if self._current is None else self._current
        node = autograd_node()
        if node is None or self._backward_end >= 0:
            return -1
        number = node._sequence_nr() % AHEAD
        if number >= self._sequence_end:  # gradient accumulation belongs to whoever ran before
            return self._op_nodes[-1] if self.op_count - 1 > self._forward_end else len(self._nodes) - 1
        return max(bisect.bisect_right(self._sequence, number) - 1, 0)

    def _note_decisions(self, taken: Sequence[torch.Tensor], out: Any) -> None:
        """Note integers that an operator makes of floating-point values, and mark its node once forward reads them.

        Such a node decides: which experts a token goes to, for example. What only its own gradient reads (the places of
        a maximum, the seed of an attention) decides nothing. Casts are left out: they always run again.
        """
        for storage in self._integers.intersection(map(self.storage_of, taken)):
            self._nodes[self._storage_nodes[storage]]["decides"] = True
        if any(tensor.is_floating_point() for tensor in taken):
            integers = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and _is_integer(leaf))
            made = {self.storage_of(tensor) for tensor in integers} - {FIXED_STORAGE}
            self._integers.update(u for u in made if not self.storages[u].cast)

    def _note_reused(self, op: int, node: int, taken: set[int]) -> None:
        """Note casts by an older node that are not inputs of this one.

        Autocast would make them before the casts that it makes for the same operator.
        """
        record = self._nodes[node]
        older = {u for u in taken if self.storages[u].cast and self._storage_nodes[u] < node}
        if not older:
            return
        given = {u for source in record["inputs"] for u in self._nodes[source]["values"]}
        new = sorted(older - given - {*record["reused"]})
        if not new:
            return
        kinds = list(self.kinds.values())
        while op > record["first"] and kinds[self.op_kinds[op - 1]].name == CAST:
            op -= 1
        record["reused"] += tuple(new)
        record["reused_at"] += (op,) * len(new)

    def _note_effects(self, node: int, func: Any, args: Any, kwargs: Any) -> None:
        record = self._nodes[node]
        if draws_random_numbers(func, args, kwargs):
            record["random"] = True
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self.storage_of(tensor) == FIXED_STORAGE:
                self._readers.setdefault(id(tensor.untyped_storage()), set()).add(node)
        if not func._schema.is_mutable:
            return
        if record["effect"] == "" and any(returned.alias_info is None for returned in func._schema.returns):
            record["effect"] = "other"  # it also writes elsewhere, which neither early stop nor saving handles
        for tensor in written(func, args, kwargs):
            self._note_write(record, node, tensor)

    def _note_write(self, record: dict[str, Any], node: int, tensor: torch.Tensor) -> None:
        producer = self.producer(tensor)
        if producer is None:
            self._writers.setdefault(id(tensor.untyped_storage()), set()).add(node)
            if record["effect"] == "":
                record["effect"] = "other" if tensor.is_floating_point() else "counter"
        elif producer < node:
            record["mutates"] = (*record["mutates"], producer)

    def _settle_effects(self) -> None:
        """Mark nodes that take a value that another node changes: recomputed, they would read another value.

        Counters that nothing else reads are not marked, nor are normalizations: a recomputation is given copies of
        their statistics, which it does not read.
        """
        for storage, writers in self._writers.items():
            effects = {self._nodes[node]["effect"] for node in writers}
            readers = self._readers.get(storage, set()) | writers
            if effects == {"batch_norm"}:  # which raises no version: views stay right, and what reads it afterwards
                readers = {node for node in readers - writers if node < max(writers)}
            else:
                readers |= self._takers.get(storage, set())
                if readers == writers and effects == {"counter"}:
                    continue
            for node in readers:
                self._nodes[node]["effect"] = "other"

    # What autograd saves

    @untraced
    def pack(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Give autograd a private copy, so that the life of the copy is the life of this save.

        A graph that backward makes, to run a forward again, is no part of a plan: its saves are counted as values.
        """
        if self._forward_end >= 0:
            return IN_BACKWARD, tensor.detach()
        if self._current is None:
            self._begin_outside(self.op_count)
        node = len(self._nodes) - 1 if self._current is None else self._current
        is_state = self._nodes[node]["effect"] == "batch_norm" and id(tensor.untyped_storage()) in self._buffers
        row = {
            "node": node,
            "storage": self.storage_of(tensor),
            "copy_bytes": self._rounded(tensor.nbytes) if is_state else 0,
            "at": self.op_count,
            "unpack": -1,
            "used": -1,
            "release": -1,
            "number": len(self._saved_tensors),
            "task": -1,  # of the last backward that asked for it
        }
        if (request := self._given_inside.get(id(tensor.untyped_storage()))) is not None:
            self._saved_of_given[row["number"]] = request
        self._saved_tensors.append(row)
        return len(self._saved_tensors) - 1, self._copy(tensor, row, "release")

    @untraced
    def unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        index, copy = packed
        if index == IN_BACKWARD:
            return copy
        row = self._saved_tensors[index]
        if self._forward_end < 0 and self._current is None:
            return self._asked_within_forward(row, copy)
        if row["task"] != (task := backward_number()):
            self._note_backward_before(row)
            row["task"] = task
        if row["unpack"] < 0:
            row["unpack"] = self.op_count
        return self._copy(copy, row, "used")

    def _note_backward_before(self, row: dict[str, int]) -> None:
        """Note the request of a backward before the present one, which a hook of the step's own backward runs."""
        if row["unpack"] >= 0:
            request = {"row": row["number"], "task": row["task"], "unpack": row["unpack"], "used": row["used"]}
            self._asked_inside[row["number"], row["task"]] = {**request, "kept": -1}
            row["unpack"] = row["used"] = -1

    def _asked_within_forward(self, row: dict[str, int], copy: torch.Tensor) -> torch.Tensor:
        """Note a request of a backward within forward. If its own graph saves the value, the storage is kept longer."""
        request = {"row": row["number"], "task": backward_number(), "unpack": self.op_count, "used": -1, "kept": -1}
        request = self._asked_inside.setdefault((request["row"], request["task"]), request)
        given = self._copy(copy, request, "used")
        self._given_inside[id(given.untyped_storage())] = self._saved_of_given.get(row["number"], request)
        return given

    def _copy(self, tensor: torch.Tensor, row: dict[str, int], event: str) -> torch.Tensor:
        """Return a private copy; the end of its life is written to `row[event]`."""
        self.paused = True
        with torch.no_grad():
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._known.hold_for(copy, tensor)
        self.paused = False
        storage = copy.untyped_storage()
        self._ids[id(storage)] = FIXED_STORAGE
        self._ends[id(storage)] = weakref.ref(storage, functools.partial(self._ended, row, event, id(storage)))
        return copy

    @untraced
    def _ended(self, row: dict[str, int], event: str, key: int, gone: Any) -> None:
        row[event] = self.op_count - 1
        self._ids.pop(key, None)
        self._ends.pop(key, None)
        self._given_inside.pop(key, None)

    # Phases

    @property
    def forward_end(self) -> int:
        """Number of operators in forward."""
        return self._forward_end

    def after_forward(self) -> None:
        self._forward_end = self.op_count
        self._sequence_end = next_sequence_number()

    def note_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._stepped[id(parameter)] = self.storage_of(parameter.grad)

    def after_backward(self, model: nn.Module) -> None:
        self._backward_end = self.op_count
        self._gradient_of = {
            name: self._stepped[id(p)] if p.grad is None else self.storage_of(p.grad)
            for name, p in model.named_parameters()
            if p.grad is not None or id(p) in self._stepped
        }
        self._gradients = tuple(sorted(set(self._gradient_of.values()) - {FIXED_STORAGE}))

    def parameters_of(self, step: FakeStep) -> Iterator[Parameter]:
        """Yield the parameters with the storages of their gradients at the end of backward."""
        for known in step.parameters(self):
            gradient = self._gradient_of.get(known.name, FIXED_STORAGE)
            yield dataclasses.replace(known, gradient=gradient)

    def state_of_the_step_before(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the bytes that the model keeps beside parameters and buffers: lasting, and replaced in the step.

        The replaced ones come with the operator of forward before which they exist. A replay sees those that autograd
        or a region keeps longer.
        """
        lasting = sum(each.size_bytes for each in self.older.values() if each.death is None)
        replaced = [each for each in self.older.values() if each.death is not None]
        return lasting, [(each.size_bytes, min((each.death or 0) + 1, self._forward_end)) for each in replaced]

    def settle_saves(self) -> None:
        """Drop saves for backwards that a node runs itself: their storages are alive within the node only.

        (The loss in slices, `chunking/`, makes its gradients so.) Not those that a graph of such a backward keeps: the
        first loss of an inner loop may be gone, and what it saved is there until the step's own backward.
        """
        saves = []
        kept: dict[int, int] = {}
        for (number, _), request in self._asked_inside.items():
            kept[number] = max(kept.get(number, -1), request["kept"])
        for row in self._saved_tensors:
            end = self._nodes[row["node"]]["end"]
            asked = 0 <= row["unpack"] < end or kept.get(row["number"], end) < end
            if not (asked and 0 <= row["release"] < end):
                saves.append(row)
            elif row["storage"] != FIXED_STORAGE:
                storage = self.storages[row["storage"]]
                if storage.death is not None:
                    storage.death = max(storage.death, row["release"])
        self._saved_tensors = saves

    def graph(self, fixed: dict[str, int], about: dict[str, Any]) -> Graph:
        last = self.op_count - 1
        release = [last if row["release"] < 0 else row["release"] for row in self._saved_tensors]
        for number, request in self._saved_of_given.items():
            request["kept"] = max(request["kept"], release[number])
        self._settle_effects()
        self.settle_saves()
        inner = self._inner_backward(last)
        nodes = tuple(Node(**node) for node in self._nodes)
        storages = Storages(
            size_bytes=_column(s.size_bytes for s in self.storages),
            birth=_column(s.birth for s in self.storages),
            death=_column(last if s.death is None else s.death for s in self.storages),
            node=_column(self._storage_nodes),
            cast=_column(int(s.cast) for s in self.storages),
            over=_column(int(s.over) for s in self.storages),
        )
        saved_tensors = SavedTensors(
            **{
                name: _column(last if name == "release" and row[name] < 0 else row[name] for row in self._saved_tensors)
                for name in ("node", "storage", "copy_bytes", "at", "unpack", "used", "release")
            }
        )
        return Graph(
            nodes=nodes,
            kinds=tuple(self.kinds.values()),
            op_kind=_column(self.op_kinds),
            op_node=_column(self._op_nodes),
            storages=storages,
            saved_tensors=saved_tensors,
            forward_end=self._forward_end,
            backward_end=self._backward_end,
            fixed_bytes=fixed,
            parameter_gradients=self._gradients,
            about={**about, **({DIFFERENTIATES: True} if inner.within(self._forward_end) else {})},
            inner=inner,
        )

    def _inner_backward(self, last: int) -> InnerBackward:
        """Return the requests of backwards within the forward, and how long their graphs keep their inputs."""
        place = {row["number"]: index for index, row in enumerate(self._saved_tensors)}
        requests = [request for request in self._asked_inside.values() if request["row"] in place]
        return InnerBackward(
            row=_column(place[request["row"]] for request in requests),
            task=_column(request["task"] for request in requests),
            unpack=_column(request["unpack"] for request in requests),
            used=_column(last if request["used"] < 0 else request["used"] for request in requests),
            kept=_column(request["kept"] for request in requests),
        )


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return shape.requires_grad_(tensor.requires_grad)


def _column(values: Any) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)
