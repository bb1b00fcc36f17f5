"""Reslice: the record of a step with its losses in other numbers of slices, without running the step again.

Such steps differ within the nodes of chunked losses, and there in forward alone: backward multiplies what was kept. So
those nodes are run by themselves, on fakes of what they were given, in the slices of the record and in the others.
Where the first of these is, operator for operator and storage for storage, what the record says, the second takes its
place in it. Where it is not, the step has to be recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from remat.evaluation.form import Form, form_of
from remat.evaluation.graph import WRAPPED_NUMBERS, Graph, OpKind, Storages
from remat.recording.fake_step import WRAPPED_NUMBER_BYTES, FakeStep
from remat.recording.record import record_with
from remat.recording.recorder import Recorder
from remat.recording.tracker import FIXED_STORAGE, TrackedStorage

_AT_ONCE = OpKind("remat.chunked_loss.default", [[], {}], flops=0, moved_bytes=0, dtype="float32")


@dataclasses.dataclass(frozen=True, eq=False)
class HeadCall:
    """A chunked loss in a record: its node and its arguments, tensors by their shapes."""

    node: int
    call: int
    name: str
    given: tuple[Any, ...]

    def run(self, step: FakeStep, form: Form, alignment_bytes: int) -> LossRecord:
        """Record the chunked loss in `form`."""
        recorder = Recorder(alignment_bytes, (), step.known)
        recorder.kernels_of = step.kernels_of
        with step.in_form(form), step.mode:
            given = [_fake_of(value, step.device) for value in self.given]
            recorder.fix(given)
            recorder.begin(self.call, self.name)
            head = step.graphs.chunked_loss(self.call, self.name, step.form)
            with (
                torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
                recorder.running(head, given),
            ):
                loss = step.run(head, recorder, given)
            recorder.finish(loss, 0)
        return LossRecord.of(recorder, loss)

    def between(self, other: HeadCall, line: Callable[[int, int], int]) -> HeadCall:
        """Return the same loss at another batch size; `line` interpolates a size from this one's and `other`'s."""
        pairs = zip(self.given, other.given, strict=True)
        return dataclasses.replace(self, given=tuple(_between(one, two, line) for one, two in pairs))


def _between(one: Any, other: Any, line: Callable[[int, int], int]) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    shape, strides = (list(map(line, *pair)) for pair in ((one.shape, other.shape), (one.stride(), other.stride())))
    found = torch.empty_strided(shape, strides, dtype=one.dtype, device="meta")
    return found.requires_grad_(one.requires_grad)


class Resliced:
    """Records of one step in all forms that differ in slices alone; the first record gives the others."""

    def __init__(self, step: FakeStep, *, alignment_bytes: int, whole: Graph):
        self._step, self._alignment_bytes, self._whole = step, alignment_bytes, whole
        self._graph: Graph | None = None
        self.heads: list[HeadCall] = []
        self._runs: dict[tuple[HeadCall, Form], LossRecord] = {}

    def record(self, form: Form) -> Graph:
        """Return the record in `form`. Raises CaptureError as `recorder.record` does."""
        if self._graph is None or (found := self._from_first(form)) is None:
            with self._step.in_form(form):
                graph, recorder = record_with(self._step, alignment_bytes=self._alignment_bytes, whole=self._whole)
            self._graph, self._runs = graph, {}
            nodes = ((i, graph.nodes[i], given) for i, given in recorder.given_to_heads.items())
            self.heads = [HeadCall(i, node.call, node.name, given) for i, node, given in nodes]
            return graph
        return found

    def hollow(self, form: Form) -> Graph | None:
        """Return the record in `form` with losses that make what they keep at once; None if that is impossible."""
        graph = self.record(form)
        runs = [self._run(head, form) for head in self.heads]
        return _replaced(graph, self.heads, runs, [run.hollow for run in runs], form)

    def _from_first(self, form: Form) -> Graph | None:
        graph = self._graph
        assert graph is not None
        recorded_in = form_of(graph.about)
        old, new = ([self._run(head, each) for head in self.heads] for each in (recorded_in, form))
        return _replaced(graph, self.heads, old, new, form)

    def _run(self, head: HeadCall, form: Form) -> LossRecord:
        if (head, form) not in self._runs:
            self._runs[head, form] = head.run(self._step, form, self._alignment_bytes)
        return self._runs[head, form]


def filled(graph: Graph, heads: Sequence[HeadCall], step: FakeStep, form: Form, alignment_bytes: int) -> Graph | None:
    """Fill a hollow record at any batch size with its `heads` in `form`; None if it is not hollow."""
    runs = [head.run(step, form, alignment_bytes) for head in heads]
    return _replaced(graph, heads, [run.hollow for run in runs], runs, form)


def _replaced(
    graph: Graph, heads: Sequence[HeadCall], old: Sequence[LossRecord], new: Sequence[LossRecord], form: Form
) -> Graph | None:
    """Replace the records of `heads` in `graph`, which is `form`'s then; None if they differ from `old`."""
    try:
        for head, before, after in zip(heads, old, new, strict=True):
            graph = _Replacement(graph, head.node, before, after).graph()
    except _Differs:
        return None
    return dataclasses.replace(graph, about={**graph.about, **form.to_json()})


class _Differs(Exception):
    """The node by itself runs otherwise than recorded."""


def _fake_of(value: Any, device: torch.device) -> Any:
    """Make a fake tensor like `value`; with a gradient it is no leaf, since autocast caches casts of leaves."""
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return fake.requires_grad_().view_as(fake) if value.requires_grad else fake


@dataclasses.dataclass(frozen=True)
class LossRecord:
    """The record of a chunked loss in forward.

    storages  each with its operators counted from the node's first; without a death if it is kept
    kept      the loss, and the gradients of rows, weight and bias: indices of storages, FIXED for any other
    slice_ends  see `graph.Node`, counted in the same way
    """

    kinds: tuple[OpKind, ...]
    storages: tuple[TrackedStorage, ...]
    kept: tuple[int, ...]
    wrapped_numbers: int
    slice_ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, recorder: Recorder, loss: torch.Tensor) -> LossRecord:
        recorder.settle_saves()
        assert loss.grad_fn is not None
        gradients = loss.grad_fn.gradients  # type: ignore[attr-defined]  # of `ChunkedLoss`
        kept = (recorder.storage_of(each) if each is not None else FIXED_STORAGE for each in (loss, *gradients))
        kinds = list(recorder.kinds.values())
        return cls(
            tuple(kinds[kind] for kind in recorder.op_kinds),
            tuple(dataclasses.replace(storage) for storage in recorder.storages),
            tuple(kept),
            recorder.wrapped_numbers,
            recorder.slice_ends(0),
        )

    @property
    def hollow(self) -> LossRecord:
        """The record with one operator that makes everything kept."""
        kept = [self.storages[i] for i in self.kept if i != FIXED_STORAGE]
        numbers = iter(range(len(kept)))
        return LossRecord(
            (_AT_ONCE,),
            tuple(TrackedStorage(each.size_bytes, 0) for each in kept),
            tuple(FIXED_STORAGE if i == FIXED_STORAGE else next(numbers) for i in self.kept),
            0,
        )

    @property
    def keeps_no_other(self) -> bool:
        """Whether nothing outlives the run but the storages in `kept`."""
        return {i for i, storage in enumerate(self.storages) if storage.death is None} == {*self.kept} - {FIXED_STORAGE}

    @property
    def sizes_kept(self) -> list[int | None]:
        return [None if i == FIXED_STORAGE else self.storages[i].size_bytes for i in self.kept]


class _Replacement:
    """A record in which a node runs as `new` in place of `old`."""

    def __init__(self, graph: Graph, node: int, old: LossRecord, new: LossRecord):
        self._record, self._node, self._old, self._new = graph, node, old, new
        self._first, self._end = graph.nodes[node].first, graph.nodes[node].end
        self._more = len(new.kinds) - len(old.kinds)
        self._own = np.flatnonzero(graph.storages.node == node)
        self._require()

    def _require(self) -> None:
        graph, old, new = self._record, self._old, self._new
        kinds = [graph.kinds[kind].key for kind in graph.op_kind[self._first : self._end]]
        table, own = graph.storages, self._own
        rows = [(storage.size_bytes, storage.birth, storage.death, int(storage.cast)) for storage in old.storages]
        deaths = (None if death >= self._end else int(death) - self._first for death in table.death[own])
        births = table.birth[own] - self._first
        same = (
            kinds == [kind.key for kind in old.kinds]
            and rows == [*zip(table.size_bytes[own], births, deaths, table.cast[own], strict=True)]
            and own.tolist() == [*range(own[0], own[0] + len(own))]
            and old.keeps_no_other
            and new.keeps_no_other
            and old.sizes_kept == new.sizes_kept
            and graph.nodes[self._node].slice_ends == tuple(self._first + at for at in old.slice_ends)
            and not graph.gathered
        )
        if not same:
            raise _Differs

    # Places in the new record. Within the node, only its ends are known.

    def _moved_op(self, ops: np.ndarray) -> np.ndarray:
        return self._moved(ops, self._first, self._end - 1)

    def _moved_place(self, places: np.ndarray) -> np.ndarray:
        return self._moved(places, self._first + 1, self._end)

    def _moved(self, at: np.ndarray, first: int, end: int) -> np.ndarray:
        """Renumber operators, or places between them; raise _Differs for one within the node: first to end - 1."""
        if ((at >= first) & (at < end)).any():
            raise _Differs
        return np.where(at >= end, at + self._more, at)

    def _place(self, place: int) -> int:
        return int(self._moved_place(np.array([place]))[0])

    def _moved_storage(self, storages: np.ndarray) -> np.ndarray:
        begin, count = int(self._own[0]), len(self._own)
        after = storages + len(self._new.storages) - count
        found = np.where(storages >= begin + count, after, storages)
        for i in np.flatnonzero((storages >= begin) & (storages < begin + count)):
            at = int(storages[i]) - begin
            if at not in self._old.kept:
                raise _Differs
            found[i] = begin + self._new.kept[self._old.kept.index(at)]
        return found

    def _storages_of(self, storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._moved_storage(np.array(storages, dtype=np.int64)).tolist())

    # The new record

    def graph(self) -> Graph:
        record = self._record
        kinds, op_kind = self._kinds()
        new_nodes = np.full(len(self._new.kinds), self._node)
        nodes = []
        for i, node in enumerate(record.nodes):
            moved = dataclasses.replace(
                node,
                end=self._place(node.end),
                values=self._storages_of(node.values),
                reused=self._storages_of(node.reused),
                reused_at=tuple(map(self._place, node.reused_at)),
            )
            if i == self._node:
                moved = dataclasses.replace(moved, slice_ends=tuple(node.first + at for at in self._new.slice_ends))
            elif i > self._node:
                ends = tuple(map(self._place, node.slice_ends))
                moved = dataclasses.replace(moved, first=self._place(node.first), slice_ends=ends)
            nodes.append(moved)
        numbers = self._new.wrapped_numbers - self._old.wrapped_numbers
        fixed = dict(record.fixed_bytes)
        if WRAPPED_NUMBERS in fixed:
            fixed[WRAPPED_NUMBERS] += WRAPPED_NUMBER_BYTES * numbers
        saved = record.saved_tensors
        return dataclasses.replace(
            record,
            nodes=tuple(nodes),
            kinds=kinds,
            op_kind=op_kind,
            op_node=_spliced(record.op_node, self._first, self._end, new_nodes),
            storages=self._storages(),
            saved_tensors=dataclasses.replace(
                saved,
                storage=self._moved_storage(saved.storage),
                at=self._moved_place(saved.at),
                unpack=self._moved_place(saved.unpack),
                used=self._moved_op(saved.used),
                release=self._moved_op(saved.release),
            ),
            inner=dataclasses.replace(
                record.inner,
                unpack=self._moved_place(record.inner.unpack),
                used=self._moved_op(record.inner.used),
                kept=self._moved_op(record.inner.kept),
            ),
            forward_end=self._place(record.forward_end),
            backward_end=self._place(record.backward_end),
            fixed_bytes=fixed,
            parameter_gradients=tuple(sorted(self._storages_of(record.parameter_gradients))),
            parameters=tuple(
                dataclasses.replace(each, gradient=self._storages_of((each.gradient,))[0]) for each in record.parameters
            ),
            held_outputs=tuple((size, self._place(until)) for size, until in record.held_outputs),
        )

    def _kinds(self) -> tuple[tuple[OpKind, ...], np.ndarray]:
        known = {kind.key: kind for kind in (*self._record.kinds, *self._new.kinds)}
        number = {key: i for i, key in enumerate(known)}
        old = np.array([number[kind.key] for kind in self._record.kinds], dtype=np.int64)
        new = np.array([number[kind.key] for kind in self._new.kinds], dtype=np.int64)
        used, op_kind = np.unique(_spliced(old[self._record.op_kind], self._first, self._end, new), return_inverse=True)
        kinds = list(known.values())
        return tuple(kinds[i] for i in used), op_kind

    def _storages(self) -> Storages:
        table, begin, end = self._record.storages, int(self._own[0]), int(self._own[-1]) + 1
        births = np.where(table.birth >= self._end, table.birth + self._more, table.birth)
        own, other = table.death[begin:end], np.delete(table.death, self._own)
        kept = [(old, new) for old, new in zip(self._old.kept, self._new.kept, strict=True) if old != FIXED_STORAGE]
        ends = {
            new: int(death) for (_, new), death in zip(kept, self._moved_op(own[[i for i, _ in kept]]), strict=True)
        }
        written_over = {new: int(table.over[begin + old]) for old, new in kept}  # after the node
        new = [
            (
                *(each.size_bytes, self._first + each.birth, ends.get(i, self._first + (each.death or 0))),
                *(int(each.cast), written_over.get(i, int(each.over))),
            )
            for i, each in enumerate(self._new.storages)
        ]
        sizes, born, died, casts, over = np.array(new, dtype=np.int64).T
        moved = self._moved_op(other)
        return Storages(
            size_bytes=_spliced(table.size_bytes, begin, end, sizes),
            birth=_spliced(births, begin, end, born),
            death=_spliced(moved, begin, begin, died),
            node=_spliced(table.node, begin, end, np.full(len(new), self._node)),
            cast=_spliced(table.cast, begin, end, casts),
            over=_spliced(table.over, begin, end, over),
        )


def _spliced(column: np.ndarray, begin: int, end: int, middle: np.ndarray) -> np.ndarray:
    """Replace [begin, end) of `column` by `middle`."""
    return np.concatenate([column[:begin], middle, column[end:]])
