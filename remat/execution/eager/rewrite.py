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

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from remat._torch.training import fakes_are_on, keeps_graph
from remat.capture.anchors import changed, module_path
from remat.capture.nodes import as_function, bracket_of, called, captured_nodes, may_draw, replace_target, with_name
from remat.chunking.chunk import CHUNKED
from remat.chunking.chunked_loss import ChunkedLoss
from remat.errors import RematError
from remat.evaluation.plan import NodeRef, OffloadRef
from remat.execution.eager.offloading import CallOffloads, OffloadedForward, Offloader
from remat.execution.eager.products import is_product
from remat.execution.eager.saving import Recipe, Replay, RerunWatch, Save, Tape, recipe_of, signature_of, storage_of
from remat.execution.kernel_settings import KernelSettings
from remat.execution.random_states import Source, set_state, state_of
from remat.execution.recomputed import Recomputed
from remat.host.weights import HostWeights

_RUNNING_STATISTICS = ("running_mean", "running_var")
_MOST_RECIPES = 16  # calls of one node, in all sizes that it is given


class Recipes(dict[tuple[Any, ...] | None, Recipe]):
    """The recipes of one saved node, by signature; `copies`: keep copies of its results."""

    def __init__(self, *, copies: bool):
        super().__init__()
        self.copies = copies


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


@dataclasses.dataclass
class Counts:
    """Count regions entered and nodes run again in one step. A saved node counts if it ran again."""

    regions: int = 0
    recomputed_nodes: int = 0


@dataclasses.dataclass
class RegionWatch:
    """Hooks around regions.

    recomputed  compares the tensors that regions of a forward save with the recomputed ones, if set during that forward
    """

    recomputed: Recomputed | None = None


@dataclasses.dataclass(frozen=True)
class RewriteOptions:
    """Options of a rewritten graph.

    counts             where regions and recomputations are counted
    observe            count every recomputed node, at the price of a Python call for each
    recompute_context  context of recomputations, and of copies for them
    offloader          brings storages to the host and back, if the plan has offloads
    weights            weights of the model that are on the host, if there are any
    watch              hooks of a first step around regions
    """

    counts: Counts
    observe: bool = False
    recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    offloader: Offloader | None = None
    weights: HostWeights | None = None
    watch: RegionWatch = dataclasses.field(default_factory=RegionWatch)

    @contextlib.contextmanager
    def context_of_recomputation(self) -> Iterator[None]:
        with self.weights.recomputing() if self.weights is not None else _NO_CONTEXT, self.recompute_context():
            yield


@dataclasses.dataclass(frozen=True)
class Moves:
    """Copies to and from the host that one region makes in a forward and its backward.

    event  when it is recomputed: fetches the offloads planned for it
    sends  saved nodes whose values are sent
    """

    forward: OffloadedForward
    event: NodeRef | None
    sends: dict[int, OffloadRef]


class RegionTape:
    """Record a region in forward, and replay the record when the region is recomputed.

    replaying  whether it is being recomputed for its own backward
    again      whether its nodes run another time: in that recomputation, or in that of the region around it
    moves      copies to and from the host of its region, if any
    recomputed compares its recomputed tensors in a first step

    A parameter may be frozen while the forward runs, and not when backward does (the critic of a generator's loss).
    The recomputation is given it as it was.

    A random node whose generator is unchanged since the random node before it needs no state of its own: this holds in
    the recomputation too. The generator is restored when the recomputation ends.
    """

    __slots__ = (
        *("_before", "_drawn_on", "_learned", "_outer", "_saved", "_sent", "_states"),
        *("children", "moves", "options", "recomputed", "replaying"),
    )

    def __init__(self, options: RewriteOptions, outer: RegionTape | None = None, moves: Moves | None = None):
        self.options, self.moves = options, moves
        self.recomputed = options.watch.recomputed
        self.replaying = False
        self._learned: tuple[bool | None, ...] = ()  # which inputs required gradients in forward
        self._sent: dict[int, torch.Tensor] = {}
        self.children: dict[int, RegionTape] = {}
        self._outer = outer
        self._drawn_on: Source | None = None  # whose generator is as the last random node left it
        self._states: dict[int, Any] = {}
        self._before: dict[Source, Any] = {}  # generators as they were when the recomputation began to draw
        self._saved: dict[int, Tape] = {}

    @property
    def again(self) -> bool:
        return self.replaying or (self._outer is not None and self._outer.again)

    def contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return _NO_CONTEXT, _Recomputation(self, KernelSettings())

    def child(self, key: int) -> RegionTape:
        """Return the tape of inner region `key`; a recomputation gets the same one as forward. (Rule 5)"""
        self._drawn_on = None
        if key not in self.children:
            self.children[key] = RegionTape(self.options, self)
        return self.children[key]

    def random(self, key: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run random node `key`. (Rule 2)"""
        source = _source_of(args, kwargs)
        if source is None:
            return function(*args, **kwargs)
        if self.again:
            self._go_back(key, source)
        elif source != self._drawn_on:
            self._states[key], self._drawn_on = state_of(source), source
        return function(*args, **kwargs)

    def as_in_forward(self, inputs: tuple[Any, ...]) -> Iterable[Any]:
        """Return the region's inputs; in a recomputation, each requires gradients if it did in forward."""
        learn = tuple(getattr(each, "requires_grad", None) for each in inputs)
        if not self.replaying:
            self._learned = learn
        if learn == self._learned:
            return inputs
        pairs = zip(inputs, learn, self._learned, strict=True)
        return [each if now == then else each.detach().requires_grad_(then) for each, now, then in pairs]

    def _go_back(self, key: int, source: Source) -> None:
        """Put the generator where it was before random node `key`; `restore` undoes it."""
        if (state := self._states.get(key)) is None:
            return
        tape: RegionTape | None = self
        while tape is not None and not tape.replaying:
            tape = tape._outer
        assert tape is not None
        if source not in tape._before:
            tape._before[source] = state_of(source)
        set_state(source, state)

    def restore(self) -> None:
        """Put generators back to where they were before the recomputation."""
        while self._before:
            set_state(*self._before.popitem())

    def saved(self, key: int, function: Callable[..., Any], args: Any, kwargs: Any, recipes: Recipes) -> Any:
        """Run saved node `key`, or replay its results. (Rule 3)"""
        if not self.replaying:
            if self._outer is not None and not self.again:  # Rule 5
                self._drawn_on = None
                return function(*args, **kwargs)
            return self._kept(key, function, args, kwargs, recipes)
        keep = keeps_graph()
        if key not in self._saved:
            raise RematError(
                "a region that saves outputs was asked to recompute twice; call backward(retain_graph=True) for the "
                "first backward, or plan without saved nodes."
            )
        try:
            tape = self._saved[key] if keep else self._saved.pop(key)
            return self._replayed(Replay(tape, again=keep), function, args, kwargs)
        finally:  # an early stop is an exception
            if keep:
                self._saved[key].note_versions()

    def _kept(self, key: int, function: Callable[..., Any], args: Any, kwargs: Any, recipes: Recipes) -> Any:
        value = self._watched(key, function, args, kwargs, recipes)
        if self.moves is not None and key in self.moves.sends:
            self._sent[key] = value.detach()
        return value

    def send(self, moves: Moves) -> None:
        """Begin to send the saved nodes' values after the region has run, in the order in which they were made."""
        for key, value in self._sent.items():
            self._saved[key].send(storage_of(value), moves.forward.keep)
            moves.forward.send(moves.sends[key], value)
        self._sent.clear()

    def fetch(self) -> None:
        """Fetch the planned offloads and the saved values when the region's recomputation begins."""
        if self.moves is None:
            return
        if self.moves.event is not None:
            self.moves.forward.fetch(self.moves.event)
        for key in self.moves.sends:
            if (tape := self._saved.get(key)) is not None:
                tape.fetch()

    def _watched(self, key: int, function: Callable[..., Any], args: Any, kwargs: Any, recipes: Recipes) -> Any:
        signature = None if recipes.copies else signature_of(args, kwargs)
        if (recipe := recipes.get(signature)) is not None:
            value = function(*args, **kwargs)
            self._saved[key] = recipe.tape(value)
            return value
        with Save() as save:
            value = function(*args, **kwargs)
        if recipes.copies:
            with self.options.recompute_context():  # the untouched step has no such operators
                save.tape.keep_copies()
        self._saved[key] = save.tape
        if save.drawn:
            self._drawn_on = None
        if signature is not None and len(recipes) < _MOST_RECIPES and (recipe := recipe_of(save, value)) is not None:
            recipes[signature] = recipe
        return value

    def _replayed(self, replay: Replay, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.options.observe:
            with replay:
                return function(*args, **kwargs)
        with (watch := RerunWatch()), replay:
            try:
                return function(*args, **kwargs)
            finally:
                self.options.counts.recomputed_nodes += watch.found


_NO_CONTEXT = contextlib.nullcontext()


class _Recomputation:
    """The context of a region's recomputation; entered once for every backward through the region."""

    __slots__ = ("_context", "_settings", "_tape")

    def __init__(self, tape: RegionTape, settings: KernelSettings):
        self._tape, self._settings = tape, settings

    def __enter__(self) -> None:
        if self._tape.recomputed is not None:
            self._tape.recomputed.begins()
        self._tape.fetch()
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._settings.restored())
        self._context.enter_context(self._tape.options.context_of_recomputation())
        self._tape.replaying = True

    def __exit__(self, *error: Any) -> None:
        self._tape.replaying = False
        self._tape.restore()
        self._context.__exit__(*error)
        if self._tape.recomputed is not None:
            self._tape.recomputed.ends()


def _source_of(args: Any, kwargs: Any) -> Source | None:
    """Return the generator given to a random node, or the device that has it; None under fakes, which draw none."""
    if fakes_are_on():
        return None
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.Generator):
            return given
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device(kwargs.get("device") or "cpu")


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
