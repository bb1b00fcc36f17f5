"""Chunk: replace each head, and each run that acts by row, by one node that runs in slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from remat._torch.training import without_modes
from remat.capture.nodes import called, with_name
from remat.chunking.bodies import chunked
from remat.chunking.chunked_loss import ChunkedLoss
from remat.chunking.chunked_rows import ChunkedRows
from remat.chunking.heads import CASTS, LOSSES, Head, chain_of, find_heads, kind_of, linear_arguments, loss_arguments
from remat.chunking.rows import RowRun, find_row_runs
from remat.chunking.withheld import WithheldLogits

WITHHELD = "withheld_logits"  # attribute of the graph module
CHUNKED = "chunked_loss"  # the callee of a head's node, and the key of its meta for the `ChunkedLoss`
HEAD = "head"  # key of its meta for the head's number
ROWS = "chunked_rows"  # the callee of a run's node, and the key of its meta for the `ChunkedRows`


def chunk(
    graph_module: fx.GraphModule, slices: Mapping[int, int], rows: int = 0, loss: type[ChunkedLoss] = ChunkedLoss
) -> fx.GraphModule:
    """Copy `graph_module` with head number i in `slices[i]` slices; other nodes are unchanged.

    rows  number of slices of all chunked rows (`rows.py`); 0: they stay whole
    loss  what a chunked head runs

    If a head is missing, it is another graph (say of a model before it settled), as its nodes will show.
    """
    heads = dict(enumerate(find_heads(graph_module)))
    found = {heads[i].result: (heads[i], i, count) for i, count in slices.items() if i in heads}
    runs = find_row_runs(graph_module) if rows else ()
    return _Chunker(graph_module, found, {run.result: (run, rows) for run in runs}, loss).module()


def chunked_losses(graph_module: fx.GraphModule) -> list[ChunkedLoss]:
    """List the chunked losses of a graph call."""
    return [node.meta[CHUNKED] for node in graph_module.graph.nodes if CHUNKED in node.meta]


def chunked_rows(graph_module: fx.GraphModule) -> list[ChunkedRows]:
    """List the chunked rows of a graph call."""
    return [node.meta[ROWS] for node in graph_module.graph.nodes if ROWS in node.meta]


class _Chunker:
    def __init__(
        self,
        source: fx.GraphModule,
        chunked: Mapping[fx.Node, tuple[Head, int, int]],
        runs: Mapping[fx.Node, tuple[RowRun, int]],
        loss: type[ChunkedLoss],
    ):
        self._source, self._chunked, self._loss = source, chunked, loss
        of_heads = {node for head, *_ in chunked.values() for node in _nodes_of(head)}
        self._runs = {node: run for node, run in runs.items() if of_heads.isdisjoint(run[0].nodes)}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        replaced = {node for head, *_ in self._chunked.values() for node in _nodes_of(head)}
        read = {user for node in replaced for user in node.users} - replaced
        if any(node.op == "output" for node in read):
            setattr(self._source, WITHHELD, WithheldLogits(max(count for *_, count in self._chunked.values())))
            self._copies = dict.fromkeys(replaced, self._graph.get_attr(WITHHELD))
        inside = {node for run, _ in self._runs.values() for node in run.nodes}
        for node in self._source.graph.nodes:
            if node in self._chunked:
                self._copies[node] = self._call(*self._chunked[node], node)
            elif node in self._runs:
                self._copies[node] = self._call_rows(*self._runs[node])
            elif node not in replaced and node not in inside:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        found = fx.GraphModule(self._source, self._graph)
        found.graph.lint()
        return found

    def _call(self, head: Head, number: int, slices: int, result: fx.Node) -> fx.Node:
        given = loss_arguments(head.loss)
        rows, weight, bias = linear_arguments(head.linear)
        scaled, numbers = _scaled(head)
        parts = (*_opened_and_row_losses(head), _precise(head), scaled)
        function = self._loss(*parts, slices, given["ignore_index"], given["reduction"], len(head.constants))
        arguments = (weight, bias, given["target"], *head.constants, *numbers)
        copied = [self._copies[value] if isinstance(value, fx.Node) else value for value in arguments]
        call = self._graph.call_function(_calling(function, CHUNKED), (self._rows(head, self._copies[rows]), *copied))
        call.meta = {**result.meta, "called": head.text, CHUNKED: function, HEAD: number}
        call.meta.pop("identity", None)
        return call

    def _call_rows(self, run: RowRun, slices: int) -> fx.Node:
        function, arguments = chunked(run, slices), tuple(self._copies[node] for node in (run.given, *run.beside))
        call = self._graph.call_function(_calling(function, ROWS), arguments)
        call.meta = {**run.result.meta, "called": run.text, ROWS: function}
        call.meta.pop("identity", None)
        return call

    def _rows(self, head: Head, given: fx.Node) -> fx.Node:
        """Return the head's input without the rows that it drops: they are selected before logits are computed."""
        for node in head.between:
            if kind_of(node) == "getitem":
                given = self._selected(given, node)
        return given

    def _selected(self, given: fx.Node, selection: fx.Node) -> fx.Node:
        node = self._graph.create_node(selection.op, selection.target, (given, selection.args[1]))
        with without_modes():  # the value brings its own
            value = given.meta["example_value"][selection.args[1]]
        node.meta = {**selection.meta, "example_value": value}
        return node


def _nodes_of(head: Head) -> Sequence[fx.Node]:
    return (head.linear, *head.between, head.loss, *head.scalings)


def _calling(function: ChunkedLoss | ChunkedRows, name: str) -> Any:
    def call(*args: Any) -> Any:
        return function(*args)

    return with_name(call, name)


def _opened_and_row_losses(head: Head) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Build (logits -> cast or unchanged logits), and (those, labels, constants -> loss of each row)."""
    steps = head.steps
    casts = steps[:1] if steps and kind_of(steps[0]) in CASTS else []
    graph = fx.Graph()
    graph.output(_repeated(graph, graph.placeholder("logits"), casts, {}))
    return fx.GraphModule({}, graph), _losses_of(head, steps[len(casts) :])


def _precise(head: Head) -> fx.GraphModule:
    """Build (logits, labels, *constants) -> the loss of each row, in the dtype of the logits."""
    return _losses_of(head, [node for node in head.steps if kind_of(node) not in CASTS], keeps_dtype=True)


def _losses_of(head: Head, steps: Sequence[fx.Node], *, keeps_dtype: bool = False) -> fx.GraphModule:
    graph = fx.Graph()
    value, labels = graph.placeholder("logits"), graph.placeholder("labels")
    constants = {node: graph.placeholder(f"constant_{i}") for i, node in enumerate(head.constants)}
    options = {"ignore_index": loss_arguments(head.loss)["ignore_index"], "reduction": "none"}
    value = _repeated(graph, value, steps, constants, without=("dtype",) if keeps_dtype else ())
    graph.output(graph.call_function(LOSSES[called(head.loss)], (value, labels), options))
    return fx.GraphModule({}, graph)


def _repeated(
    graph: fx.Graph,
    value: fx.Node,
    steps: Sequence[fx.Node],
    constants: Mapping[fx.Node, fx.Node],
    without: Sequence[str] = (),
) -> fx.Node:
    """Repeat `steps` in `graph`, starting at `value`, without some of their keywords."""
    for node in steps:
        copies = {**constants, chain_of(node): value}
        kwargs = {name: given for name, given in node.kwargs.items() if name not in without}
        args, kwargs = map_arg((node.args, kwargs), copies.__getitem__)
        value = graph.create_node(node.op, node.target, args, kwargs)
    return value


def _scaled(head: Head) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Build (loss, *numbers) -> the scaled loss; return it with the nodes of the numbers."""
    graph, numbers = fx.Graph(), []
    value, last = graph.placeholder("loss"), head.loss
    copies: dict[fx.Node, fx.Node] = {}
    for node in head.scalings:
        numbers += [n for n in node.all_input_nodes if n is not last and n not in numbers]
        last = node
    copies.update((number, graph.placeholder(f"number_{i}")) for i, number in enumerate(numbers))
    last = head.loss
    for node in head.scalings:
        copies[last] = value
        value = graph.node_copy(node, lambda n: copies[n])
        last = node
    graph.output(value)
    return fx.GraphModule({}, graph), numbers
