"""The captured graphs of a step, and their copies in a form, with the kernels of the device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from torch import fx

from remat.capture.anchors import Signature, identity_of, module_path, signature_of
from remat.chunking.chunk import CHUNKED, HEAD, chunked_losses, chunked_rows
from remat.chunking.chunked_loss import ChunkedLoss, Watch
from remat.chunking.heads import WholeLoss, find_heads, whole_losses
from remat.chunking.rows import RowRun, find_row_runs
from remat.evaluation.form import Chunk, Form, slices_in
from remat.evaluation.forwards import Forward
from remat.fusion.formed import formed
from remat.recording.tracker import Tracker

Autocast = torch.dtype | None


class StepGraphs:
    """The captured graphs of a step, by graph call. Calls of one graph share it, and are known by the first of them.

    A call that was traced anew, as a number of the model had changed, is of its last graph.

    prepare  changes a graph before its first run in an autocast dtype (the target's kernels)
    """

    def __init__(self, prepare: Callable[[fx.GraphModule, Autocast], None] | None = None):
        self._prepare = prepare
        self._seen: dict[int, fx.GraphModule] = {}  # by id; kept, so that an id stays its own
        self._called: dict[int, fx.GraphModule] = {}
        self._autocast_of: dict[int, Autocast] = {}
        self._prepared: dict[tuple[int, int, Autocast, Form], fx.GraphModule] = {}  # by id and first call
        self._watch = Watch()  # of everything chunked

    def clear(self) -> None:
        for table in (self._seen, self._called, self._autocast_of, self._prepared):
            table.clear()

    def note(self, call: int, graph_module: fx.GraphModule, autocast: Autocast) -> None:
        self._called[call], self._autocast_of[call] = graph_module, autocast
        self._seen[id(graph_module)] = graph_module

    @property
    def captured(self) -> list[fx.GraphModule]:
        """The graphs, one a call, as they were captured."""
        return list(self._called.values())

    def ready(self, call: int, form: Form) -> fx.GraphModule:
        """Return a copy of the graph of a call in `form`, with the kernels of the device."""
        graph_module, autocast = self._called[call], self._autocast_of[call]
        first = self._first_of(graph_module)
        key = (id(graph_module), first, autocast, form)
        if key not in self._prepared:
            ready = formed(graph_module, form, first)
            identity_of(ready)  # before kernels are put in
            if self._prepare is not None:
                self._prepare(ready, autocast)
            for head in chunked_losses(ready):
                head.watch = self._watch
            for run in chunked_rows(ready):
                run.watch = self._watch
                run.alike = None if run.is_fused else tuple(map(_described, (run.body, run.again)))
            self._prepared[key] = ready
        return self._prepared[key]

    @contextlib.contextmanager
    def slices_repeated(self, tracker: Tracker) -> Iterator[None]:
        """Let `tracker` repeat its record of a slice for the others while the context is open."""
        before, self._watch.known = self._watch.known, tracker.known
        try:
            yield
        finally:
            self._watch.known = before

    def chunked_loss(self, call: int, name: str, form: Form) -> ChunkedLoss:
        """Return the chunked loss of a node in `form`, with the kernels of the device.

        A form with other slices that is prepared already is reused: a graph of thousands of nodes takes a second.
        """
        graph_module, alike = self._called[call], form.in_one_slice
        first = self._first_of(graph_module)
        wanted = id(graph_module), first, self._autocast_of[call], alike
        prepared = (
            known for (*which, other), known in self._prepared.items() if (*which, other.in_one_slice) == wanted
        )
        ready = next(prepared, None) or self.ready(call, form)
        node = next(node for node in ready.graph.nodes if node.name == name)
        found: ChunkedLoss = node.meta[CHUNKED]
        return dataclasses.replace(found, slices=slices_in(form.chunks, first)[node.meta[HEAD]])

    @property
    def distinct(self) -> list[tuple[int, fx.GraphModule]]:
        """Every graph, with the call that it was first."""
        graphs = {id(graph_module): graph_module for graph_module in self._called.values()}
        return [(self._first_of(graph_module), graph_module) for graph_module in graphs.values()]

    def _first_of(self, graph_module: fx.GraphModule) -> int:
        return min(call for call, called in self._called.items() if called is graph_module)

    @property
    def autocasts(self) -> list[Autocast]:
        """The autocast dtypes that calls ran in."""
        return list(self._autocast_of.values())

    def of(self, forward: Forward) -> list[fx.GraphModule]:
        """Return the graphs that a forward called."""
        return [self._called[forward.first + number] for number in range(forward.calls)]

    def signatures(self, forwards: Iterable[Forward]) -> tuple[Signature, ...]:
        return tuple(signature_of(graph_module) for forward in forwards for graph_module in self.of(forward))

    # Places for chunks; known once the step has run

    @property
    def heads(self) -> Iterator[tuple[Chunk, int]]:
        """The heads that may be chunked, each as one chunk, with the bytes of its logits."""
        for call, graph_module in self.distinct:
            for number, head in enumerate(find_heads(graph_module)):
                if head.takes_contiguous_rows:
                    yield Chunk(call, number, 1, module_path(head.linear)), head.logits_bytes

    @property
    def whole_losses(self) -> Iterator[WholeLoss]:
        """Losses that are left whole, and why."""
        for _, graph_module in self.distinct:
            yield from whole_losses(graph_module)

    @property
    def row_runs(self) -> Iterator[tuple[int, RowRun]]:
        """The runs of nodes that may be chunked by rows, each with its graph call."""
        for call, graph_module in self.distinct:
            for run in find_row_runs(graph_module):
                yield call, run

    def shape_of(self, head: Chunk) -> tuple[int, int, int]:
        """Return (rows, classes, width) of a head."""
        graph_module = next(module for call, module in self.distinct if call == head.call)
        return find_heads(graph_module)[head.head].shape


def _described(graph_module: fx.GraphModule) -> Hashable:
    """Describe what a graph without attributes computes."""
    nodes = graph_module.graph.nodes
    return graph_module.code, tuple(node.target for node in nodes if node.op == "call_function")
