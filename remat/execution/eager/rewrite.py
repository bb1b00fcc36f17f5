"""Rewrite: cut a captured graph into regions and run them under `torch.utils.checkpoint`.

Rules that the rewritten graph keeps:

Rule 1  Nodes run in the captured order, and call what they called, so the same kernels are dispatched.
Rule 2  A random node that is recomputed gets the generator state that it had in forward, and the generator is put
        back afterwards: the device's, or one that the model keeps. So the stream of random numbers is the untouched
        one, whatever is saved around it.
Rule 3  The output of a saved node is kept, below autograd: when the region is recomputed its operators are not run,
        but autograd still sees them, and saves what they save. (`saving.py`) If another node changes it in place, a
        copy is kept.
Rule 4  What changes module state (running statistics, counters) changes it in forward only.
Rule 5  An inner region records and replays in the recomputation of the outer one; in forward it only drops.

Only nodes that need Rules 2-4 are wrapped; all others are called as they stand, so that a region costs no more than
plain `torch.utils.checkpoint` does. torch's own selective checkpointing intercepts every operator of a region,
restores the generator once per region (wrong as soon as one random node is saved and a later one is not), and
identifies what it saves by counting operators, which differ between devices.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

from remat.capture.anchors import changed, module_path
from remat.capture.nodes import as_function, bracket_of, called, captured_nodes, may_draw, replace_target, with_name
from remat.chunking.chunk import CHUNKED
from remat.chunking.chunked_loss import ChunkedLoss
from remat.evaluation.plan import NodeRef, OffloadRef
from remat.execution.eager.offloading import CallOffloads, Offloader
from remat.execution.eager.products import is_product
from remat.execution.eager.region_tape import Moves, Recipes, RegionTape, RewriteOptions
from remat.host.weights import HostWeights

_RUNNING_STATISTICS = ("running_mean", "running_var")


@dataclasses.dataclass(frozen=True)
class CallRegion:
    """A region within one graph call, in ordinals of that call: nodes first..last inclusive.

    saved   nodes whose outputs are kept    random  nodes that draw random numbers
    once    nodes that update module state
    """

    first: int
    last: int
    saved: frozenset[int] = frozenset()
    random: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()
    inner: tuple[CallRegion, ...] = ()


# Functions that the nodes of a rewritten graph call. A body's first argument is its region's tape.


def _states_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the module state that a node updates: running statistics, or the counter itself."""
    if called(node) != "batch_norm":
        return node.args[:1]
    return (*node.args[1:3], *(node.kwargs.get(name) for name in _RUNNING_STATISTICS))


def _place_of(node: fx.Node) -> str:
    """Describe a node for people: the function that it calls, and the module."""
    return f"`{called(node)}` in {module_path(node) or 'the model'}"


def _all_once(region: CallRegion) -> frozenset[int]:
    return region.once.union(*map(_all_once, region.inner))


@dataclasses.dataclass(frozen=True)
class _Body:
    """The nodes of a region as a function (run, *state, *inputs).

    text        its name in messages
    early_stop  end a recomputation at the last tensor that backward needs; False if that might be between the opening
                and the closing of a context, which would stay open

    The first `states` inputs are module state that the region updates. They bypass autograd, which would refuse to
    return a saved tensor that has changed since.
    """

    function: fx.GraphModule
    states: int
    early_stop: bool
    text: str

    def __call__(self, tape: RegionTape, state: tuple[Any, ...], *inputs: Any) -> Any:
        return self.function.forward(tape, *state, *tape.as_in_forward(inputs))

    def checkpointed(self, tape: RegionTape, inputs: tuple[Any, ...]) -> Any:
        if tape.recomputed is None:
            return self._checkpointed(tape, inputs)
        with tape.recomputed.watching(self.text) as check:
            return self._checkpointed(tape, inputs, determinism_check=check)

    def _checkpointed(self, tape: RegionTape, inputs: tuple[Any, ...], **options: Any) -> Any:
        return checkpoint(
            self,
            tape,
            inputs[: self.states],
            *inputs[self.states :],
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=tape.contexts,
            early_stop=self.early_stop,
            **options,
        )


def _top_region(
    body: _Body, options: RewriteOptions, event: NodeRef | None, sends: dict[int, OffloadRef], name: str
) -> Callable[..., Any]:
    """Make the function that runs an outermost region.

    event  fetches offloads when the region is recomputed
    sends  saved nodes whose values go to the host
    """

    def call(*inputs: Any) -> Any:
        options.counts.regions += 1
        offloader = options.offloader
        if offloader is None or (event is None and not sends):
            return body.checkpointed(RegionTape(options), inputs)
        moves = Moves(offloader.forward, event, sends)
        tape = RegionTape(options, moves=moves)
        value = body.checkpointed(tape, inputs)
        tape.send(moves)
        return value

    return with_name(call, name)


def _inner_region(body: _Body, key: int, name: str) -> Callable[..., Any]:
    def call(tape: RegionTape, *inputs: Any) -> Any:
        return body.checkpointed(tape.child(key), inputs)

    return with_name(call, name)


def _random(function: Callable[..., Any], key: int) -> Callable[..., Any]:
    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        return tape.random(key, function, args, kwargs)

    return call


def _saved(function: Callable[..., Any], key: int, *, copies: bool = False) -> Callable[..., Any]:
    recipes = Recipes(copies=copies)

    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        return tape.saved(key, function, args, kwargs, recipes)

    return call


_saved_copy = with_name(functools.partial(_saved, copies=True), "_saved_copy")


def _once(function: Callable[..., Any], key: int) -> Callable[..., Any]:
    """Wrap a counter update, which returns its changed argument; a recomputation skips it. (Rule 4)"""

    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        return args[0] if tape.again else function(*args, **kwargs)

    return call


def _batch_norm(function: Callable[..., Any], key: int) -> Callable[..., Any]:
    """Wrap batch normalisation in training, whose output does not depend on running statistics. (Rule 4)

    Autograd saves the statistics all the same, so the recomputation runs on copies of them.
    """

    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        if not tape.again:
            return function(*args, **kwargs)
        args = (*args[:1], *(statistic.clone() for statistic in args[1:3]), *args[3:])
        running = {name: kwargs[name].clone() for name in _RUNNING_STATISTICS if name in kwargs}
        return function(*args, **{**kwargs, **running})

    return call


def _plain(function: Callable[..., Any], key: int) -> Callable[..., Any]:
    """Wrap a node that needs nothing of its region, to have the same signature as others."""

    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _counted(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a node that is not saved, to count its recomputations."""

    def call(tape: RegionTape, *args: Any, **kwargs: Any) -> Any:
        tape.options.counts.recomputed_nodes += tape.again
        return wrapped(tape, *args, **kwargs)

    return call


# Wrapper of nodes with weights on the host.


def _using(weights: HostWeights, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a product with a weight on the host; a graph that Dynamo shares between layers uses any layer's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        layers = {layer for value in (*args, *kwargs.values()) if (layer := weights.layer_of(value)) is not None}
        if not layers:
            return function(*args, **kwargs)
        (layer,) = layers
        return weights.run(layer, function, args, kwargs)

    return call


# Nodes outside regions of a plan with offloads.


def _running(
    offloader: Offloader, function: Callable[..., Any], saves: dict[int, OffloadRef], event: NodeRef | None
) -> Callable[..., Any]:
    """Wrap a node whose saved tensors go to the host, or whose backward fetches some."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with offloader.forward.running(saves, event):
            result = function(*args, **kwargs)
            offloader.forward.leave((args, kwargs))
            return result

    return call


def _sent(offloader: Offloader, planned: OffloadRef) -> Callable[..., Any]:
    def call(value: Any) -> None:
        offloader.forward.send(planned, value)

    return call


def _between_slices(
    offloader: Offloader, head: ChunkedLoss, function: Callable[..., Any], releases: dict[int, list[OffloadRef]]
) -> Callable[..., Any]:
    """Wrap a chunked loss that releases offloads between slices; with fewer slices, the rest after it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        left = dict(sorted(releases.items()))

        def release(slices: int) -> None:
            offloader.forward.release(left.pop(slices, ()))

        watch = head.watch
        head.watch = dataclasses.replace(watch, behind_slice=release)
        try:
            result = function(*args, **kwargs)
        finally:
            head.watch = watch
        for offloads in left.values():
            offloader.forward.release(offloads)
        return result

    return call


def _released(offloader: Offloader, offloads: list[OffloadRef]) -> Callable[..., Any]:
    def call() -> None:
        offloader.forward.release(offloads)

    return call


def rewrite(
    graph_module: fx.GraphModule,
    regions: Sequence[CallRegion],
    options: RewriteOptions,
    offloads: CallOffloads | None = None,
) -> fx.GraphModule:
    """Rewrite `graph_module` so that `regions` (disjoint, in order) run under checkpoint, with `offloads`.

    Parameters stay inputs of the graph, as Dynamo made them. The result has passed `lint()`.
    """
    return _Rewriter(graph_module, options, offloads or CallOffloads()).top(regions)


class _Rewriter:
    def __init__(self, source: fx.GraphModule, options: RewriteOptions, offloads: CallOffloads):
        self._source, self._offloads = source, offloads
        self._nodes = captured_nodes(source)
        self._ordinal = {node: i for i, node in enumerate(self._nodes)}
        self._changed = changed(source)
        self._options = options

    def top(self, regions: Sequence[CallRegion]) -> fx.GraphModule:
        """Rewrite the whole graph; nodes outside regions stay unchanged."""
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        owner = {i: region for region in regions for i in range(region.first, region.last + 1)}
        for node in self._source.graph.nodes:
            ordinal = self._ordinal.get(node, -1)
            region = owner.get(ordinal)
            if region is None:
                environment[node] = copy = self._copy(graph, node, environment)
                if ordinal >= 0:
                    self._release_between(copy, ordinal)
                    self._note_saves(copy, ordinal)
                    self._offload(graph, range(ordinal, ordinal + 1), environment)
            elif ordinal == region.last:
                self._call_region(graph, region, environment, None)
                self._offload(graph, range(region.first, ordinal + 1), environment, region.saved)
        return self._module(graph)

    def _copy(self, graph: fx.Graph, node: fx.Node, environment: dict[fx.Node, fx.Node]) -> fx.Node:
        copy = graph.node_copy(node, lambda n: environment[n])
        if self._options.weights is not None and is_product(node):
            replace_target(copy, with_name(_using(self._options.weights, as_function(copy)), "using"))
        return copy

    def _release_between(self, copy: fx.Node, ordinal: int) -> None:
        releases = self._offloads.between.get(ordinal)
        if self._options.offloader is not None and releases:
            head = self._nodes[ordinal].meta[CHUNKED]
            between = _between_slices(self._options.offloader, head, as_function(copy), releases)
            replace_target(copy, with_name(between, "releasing"))

    def _note_saves(self, copy: fx.Node, ordinal: int) -> None:
        """Wrap `node` so that the offloader sees the tensors that autograd saves, if any are offloaded."""
        saves, event = self._offloads.saves.get(ordinal, {}), self._offloads.events.get(ordinal)
        if self._options.offloader is not None and (saves or event is not None):
            running = _running(self._options.offloader, as_function(copy), saves, event)
            replace_target(copy, with_name(running, "offloading"))

    def _offload(
        self,
        graph: fx.Graph,
        ordinals: range,
        environment: dict[fx.Node, fx.Node],
        saved: frozenset[int] = frozenset(),
    ) -> None:
        """Add nodes behind a node or a region that send its values and release what has been sent.

        The region itself sends the values of the nodes that it `saved`.
        """
        offloader = self._options.offloader
        if offloader is None:
            return
        for ordinal in ordinals:
            if ordinal in saved:
                continue
            for planned in self._offloads.values.get(ordinal, ()):
                value = environment[self._nodes[ordinal]]
                graph.call_function(with_name(_sent(offloader, planned), "send"), (value,))
        if released := [each for ordinal in ordinals for each in self._offloads.releases.get(ordinal, ())]:
            graph.call_function(with_name(_released(offloader, released), "release"))

    def _call_region(
        self, graph: fx.Graph, region: CallRegion, environment: dict[fx.Node, fx.Node], tape: fx.Node | None
    ) -> None:
        """Add the call of `region` to `graph`; `tape` is the enclosing region's, if there is one."""
        states, inputs, outputs = self._boundary(region)
        inputs = [*states, *inputs]
        inside = self._nodes[region.first : region.last + 1]
        early_stop = not any(bracket_of(node) for node in inside)
        text = f"the region from {_place_of(inside[0])} to {_place_of(inside[-1])}"
        body = _Body(self._body(region, inputs, outputs), len(states), early_stop, text)
        name, arguments = f"region_{region.first}_{region.last}", [environment[n] for n in inputs]
        if tape is None:
            event = self._offloads.events.get(region.first)
            values = self._offloads.values
            sends = {ordinal: planned for ordinal in region.saved for planned in values.get(ordinal, ())}
            top = _top_region(body, self._options, event, sends, name)
            call = graph.call_function(top, tuple(arguments))
        else:
            call = graph.call_function(_inner_region(body, region.first, name), (tape, *arguments))
        if len(outputs) == 1:
            environment[outputs[0]] = call
            return
        for i, output in enumerate(outputs):
            environment[output] = graph.call_function(operator.getitem, (call, i))

    def _boundary(self, region: CallRegion) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return (module state that the region updates, its other inputs, its outputs)."""
        inside = self._nodes[region.first : region.last + 1]
        members = set(inside)
        inputs = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in members)
        outputs = [node for node in inside if any(user not in members for user in node.users)]
        updating = [self._nodes[i] for i in sorted(_all_once(region))]
        states = [n for n in inputs if any(n in _states_of(node) for node in updating)]
        return states, [n for n in inputs if n not in states], outputs

    def _body(self, region: CallRegion, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        tape = graph.placeholder("tape")
        environment = {node: graph.placeholder(f"{node.name}_in") for node in inputs}
        owner = {i: part for part in region.inner for i in range(part.first, part.last + 1)}
        for ordinal in range(region.first, region.last + 1):
            node, inner = self._nodes[ordinal], owner.get(ordinal)
            if inner is None:
                environment[node] = copy = self._copy(graph, node, environment)
                self._wrap(copy, region, ordinal, tape)
            elif ordinal == inner.last:
                self._call_region(graph, inner, environment, tape)
        values = tuple(environment[node] for node in outputs)
        graph.output(values[0] if len(values) == 1 else values)
        return self._module(graph)

    def _wrap(self, node: fx.Node, region: CallRegion, ordinal: int, tape: fx.Node) -> None:
        """Call `node` through `tape` if Rules 2-4 need it."""
        if ordinal in region.once:
            wrapper: Callable[..., Any] = _batch_norm if called(node) == "batch_norm" else _once
        elif ordinal in region.saved:
            wrapper = _saved_copy if ordinal in self._changed else _saved
        elif ordinal in region.random or may_draw(node):
            wrapper = _random
        elif self._options.observe:
            wrapper = _plain
        else:
            return
        function = wrapper(as_function(node), ordinal)
        if self._options.observe and ordinal not in region.saved:
            function = _counted(function)
        replace_target(node, with_name(function, wrapper.__name__))
        node.args = (tape, *node.args)

    def _module(self, graph: fx.Graph) -> fx.GraphModule:
        graph.lint()
        targets = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        return fx.GraphModule({name: getattr(self._source, name) for name in targets}, graph)
