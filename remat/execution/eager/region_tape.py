"""Region tapes: a region's random states and saved results, recorded in forward and replayed when it is recomputed.

The rules are those of `rewrite.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from remat._torch.training import fakes_are_on, keeps_graph
from remat.errors import RematError
from remat.evaluation.plan import NodeRef, OffloadRef
from remat.execution.eager.offloading import OffloadedForward, Offloader
from remat.execution.eager.saving import Recipe, Replay, RerunWatch, Save, Tape, recipe_of, signature_of, storage_of
from remat.execution.kernel_settings import KernelSettings
from remat.execution.random_states import Source, set_state, state_of
from remat.execution.recomputed import Recomputed
from remat.host.weights import HostWeights

_MOST_RECIPES = 16  # calls of one node, in all sizes that it is given
_NO_CONTEXT = contextlib.nullcontext()


class Recipes(dict[tuple[Any, ...] | None, Recipe]):
    """The recipes of one saved node, by signature; `copies`: keep copies of its results."""

    def __init__(self, *, copies: bool):
        super().__init__()
        self.copies = copies


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
