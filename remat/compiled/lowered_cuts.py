"""Lowered cuts: the ways to cut a joint graph into forward and backward, and the bytes that their code needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat._torch.compiled_draws import draw_again, draws_alike, seed_of
from remat._torch.inductor import free_at_once, keep_apart, keep_layouts, partition_saving
from remat._torch.training import without_modes
from remat.compiled.joint import Joint, Value, device_of, joint_of, late_sums
from remat.compiled.kept import ResultCache
from remat.compiled.peak import Halves, halves
from remat.compiled.program import Choice, CompiledBytes, Solved, judged, solve
from remat.costing.planning_device import find_planning_device

RATIOS = tuple(tenth / 10 for tenth in range(10))
NO_LIMIT = 1 << 62

TorchChoice = Callable[[float], list[fx.Node]]  # what PyTorch would save itself at a ratio of its memory budget
GraphHalves = tuple[fx.GraphModule, fx.GraphModule]


class LoweredCuts:
    """A joint graph, and its cuts that were lowered.

    joint     its table              default     what PyTorch would save
    lowered   what the code of a choice needs, by the values that it saves
    earlier   bytes that earlier graphs of the step need while this one's are saved
    keeps     read and write results of earlier processes
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[Any],
        options: dict[str, Any],
        most_bytes: int,
        uses: int,
        holds_results: bool,
        earlier: int = 0,
        *,
        keeps: bool = False,
    ):
        self.gm, self.inputs, self.options, self.earlier = gm, joint_inputs, options, earlier
        self.most_bytes, self.uses, self.holds_results = most_bytes, uses, holds_results
        self.lowered: dict[frozenset[str], Halves] = {}
        self._lowered_cuts: dict[frozenset[str], GraphHalves] = {}
        self.kept = ResultCache(gm, device_of(gm.graph), sorted(options.items()), holds_results, is_on=keeps)
        self.spares = self.is_default_spared = False  # whether cuts, and the default, are changed to need fewer bytes
        self.frees_at_once = False  # whether generated code does
        self.counted = frozenset[int]()  # values that the last program had to count exactly
        self.reorders, self.draws_alike = True, draws_alike(device_of(gm.graph))
        self.by_default = self._partition(self._look)

    @property
    def has_choice(self) -> bool:
        """Whether torch asked what to save; it does not where backward needs nothing."""
        return hasattr(self, "default")

    def _partition(self, choose: Callable[[fx.Graph, Any, TorchChoice], list[fx.Node]]) -> GraphHalves:
        return partition_saving(choose)(self.gm, self.inputs, **self.options)

    def _look(self, graph: fx.Graph, info: Any, own: TorchChoice) -> list[fx.Node]:
        """Make the table of the graph, and note what PyTorch would save."""
        with without_modes():  # the device's rates are measured where they are not known
            target = find_planning_device(device_of(graph).type).target
        is_backward, held = functools.partial(_is_backward, info), self._held(graph)
        self._table = functools.partial(joint_of, graph, is_backward, target, held=held)
        self._own = functools.cache(own)  # what PyTorch would save at a ratio of its memory budget
        self.seeds = {node.name: seed for node in graph.nodes if (seed := seed_of(node)) is not None}
        self.joint = dataclasses.replace(self._table(reorders=self.reorders), uses=self.uses)
        self.default = self._own_choice(1.0)
        return self._own(1.0)

    def _own_choice(self, ratio: float) -> Choice:
        """Return what PyTorch would save at a ratio of its memory budget."""
        return judged(self.joint, self.joint.values_of(node.name for node in self._own(ratio)))

    def _held(self, graph: fx.Graph) -> list[fx.Node]:
        """List the results of forward that the caller holds through backward."""
        results = graph.find_nodes(op="output")[0].args[0][: self.options["num_fwd_outputs"]]
        return [each for each in results if isinstance(each, fx.Node)] if self.holds_results else []

    @functools.cached_property
    def portfolio(self) -> list[Choice]:
        """Return the values that PyTorch's own memory budget would save, at every ratio."""
        return [self._own_choice(ratio) for ratio in RATIOS]

    def cut(self, choice: Choice) -> GraphHalves:
        """Cut into (forward, backward), saving the values of `choice` and those that take nothing."""
        if choice.saved == self.default.saved:
            return self.by_default

        def choose(graph: fx.Graph, info: Any, own: TorchChoice) -> list[fx.Node]:
            chosen = [node for node in graph.nodes if node.name in choice.saved or _is_size(node, info)]
            return list(dict.fromkeys([*info.inputs, *chosen]))

        forward, backward = self._partition(choose)
        if self.spares:
            _spare(forward, backward)
        return forward, backward

    def handed_out(self, choice: Choice) -> GraphHalves:
        """Cut as `cut` does, into halves that draw the same random numbers; once, if their code was made here."""
        if choice.saved in self._lowered_cuts:
            return self._lowered_cuts[choice.saved]
        forward, backward = self.cut(choice)
        if self._repeats_draws(choice):
            draw_again(backward, self.lower(choice).redrawn or {})
        return forward, backward

    def _repeats_draws(self, choice: Choice) -> bool:
        return not self.draws_alike and choice.saved != self.default.saved

    def lower(self, choice: Choice, *, is_draft: bool = False) -> Halves:
        """Return the bytes that the compiled code of a choice needs.

        Where they exceed the limit, that is before the last of its draws are as forward has them.
        A choice that will hardly be handed out is a draft, whose code is not kept.
        """
        if choice.saved not in self.lowered:

            def make() -> tuple[Any, ...]:
                results, repeats = self.options["num_fwd_outputs"], self._repeats_draws(choice)
                cut = self._lowered_cuts[choice.saved] = self.cut(choice)
                redraws = {seed for each in self.lowered.values() for seed in each.redrawn or ()} if repeats else ()
                found = halves(
                    *cut,
                    results,
                    self.holds_results,
                    static=self.options.get("static_lifetime_input_indices") or (),
                    repeats_draws=repeats,  # and backward then draws as forward does, if the bytes fit
                    redraws=redraws,
                    may_fit=self._may_fit,
                    is_draft=is_draft,
                )
                if found.redrawn is not None:
                    self.note(choice, self.needs(self._beside_earlier(found)))
                return dataclasses.astuple(found)

            is_default = choice.saved == self.default.saved
            of = is_default, self.is_default_spared if is_default else self.spares, self.frees_at_once
            found = Halves(*self.kept.get(make, "halves", *of, sorted(choice.saved)))
            if not found.agrees and self._may_fit(found):  # it did not in an earlier search, with other limits
                limits = self.most_bytes, self.uses, self.earlier
                found = Halves(*self.kept.get(make, "halves within", *limits, *of, sorted(choice.saved)))
            self.lowered[choice.saved] = self._beside_earlier(found)
        return self.lowered[choice.saved]

    def note(self, choice: Choice, needs: int) -> None:
        """Hear that the code of a choice was made, and the bytes that it needs."""

    def _may_fit(self, found: Halves) -> bool:
        return self.needs(self._beside_earlier(found)) <= self.most_bytes

    def _beside_earlier(self, found: Halves) -> Halves:
        """Return the bytes of halves, with results that the loop holds and those of earlier graphs in its forward."""
        return dataclasses.replace(found, forward=max(found.forward + found.held, self.earlier))

    def solve(self, most_bytes: int, more: CompiledBytes, start: Choice, **how: bool) -> Solved:
        """Solve the program, `least` or `quick`."""

        def make() -> tuple[Any, ...]:
            solved = solve(self.joint, most_bytes, more, start=start.saved, counted=self.counted, **how)
            return solved.choice and sorted(solved.choice.saved), solved.bound_us, sorted(solved.counted)

        of = self.joint, most_bytes, more, sorted(start.saved), sorted(how.items()), sorted(self.counted)
        saved, bound, counted = self.kept.get(make, "solve", *of)
        self.counted = frozenset(counted)
        return Solved(None if saved is None else judged(self.joint, frozenset(saved)), bound, self.counted)

    def needs(self, lowered: Halves) -> int:
        """Return the peak bytes of a step's runs of the graph; no limit suffices where it would draw other numbers."""
        return NO_LIMIT if lowered.redrawn is None else lowered.peak + (self.uses - 1) * lowered.kept

    def fits(self, choice: Choice) -> bool:
        lowered = self.lower(choice)
        return lowered.agrees and self.needs(lowered) <= self.most_bytes

    def fits_by_default(self) -> bool:
        """Return whether PyTorch's own choice fits; where what it saves does not, its code is not lowered to know.

        On a GPU, code frees its buffers at once from here on if it does not fit otherwise.
        """
        may_fit = self.default.kept_bytes <= self.most_bytes
        return (may_fit and self.fits(self.default)) or (self._free_at_once() and may_fit and self.fits(self.default))

    def _free_at_once(self) -> bool:
        """Let generated code free its buffers at once from now on; return whether it did not before.

        Not on a CPU: its allocator returns large buffers to the system, which clears new ones.
        """
        if self.frees_at_once or device_of(self.gm.graph).type == "cpu":
            return False
        self.frees_at_once = True
        if changes := free_at_once():
            self.lowered.pop(self.default.saved, None)
        return changes

    @property
    def default_bytes(self) -> tuple[int, bool]:
        """Return what PyTorch's own choice needs, and True; what it saves, and False, where its code is not lowered."""
        lowered = self.lowered.get(self.default.saved)
        return (self.default.kept_bytes, False) if lowered is None else (self.needs(lowered), True)

    def follow(self, lowered: Halves) -> None:
        """Give the table the order in which code runs calls, as traced or gradients of weights early. (Rule 7)"""
        if apart := _disorder(self.joint, lowered):
            joint = dataclasses.replace(self._table(reorders=not self.reorders), uses=self.uses)
            if _disorder(joint, lowered) < apart:
                self.joint, self.reorders = joint, not self.reorders
                self.default = self._own_choice(1.0)

    def save_unread(self, ways: Mapping[str, bool]) -> None:
        """Save random numbers whose draw in a forward's code is not understood, where a checkpoint lets them."""
        unread = {name for name, seed in self.seeds.items() if not self.draws_alike and seed not in ways}

        def corrected(value: Value) -> Value:
            is_saved = value.name in unread and value.can_save
            return dataclasses.replace(value, can_remake=value.can_remake and not is_saved)

        self.joint = dataclasses.replace(self.joint, values=tuple(map(corrected, self.joint.values)))

    def spare_bytes(self) -> bool:
        """Change all cuts to need fewer bytes, PyTorch's own too; return whether that changes."""
        self.spares = True
        if _spare(*self.by_default):
            self.is_default_spared = True
            self.lowered.pop(self.default.saved, None)
        return self.is_default_spared


def _spare(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Give sums that would wait kernels of their own, and backward no copies of inputs; return whether that changes."""
    late, has_copies = late_sums(backward.graph), keep_layouts(forward)
    keep_apart(backward, late)
    return has_copies or bool(late)


def _disorder(joint: Joint, lowered: Halves) -> int:
    """Count the calls of backward that code runs after one of a later stage."""
    stages = [joint.calls[name] for name in lowered.calls if name in joint.calls]
    return sum(stage < latest for stage, latest in zip(stages, itertools.accumulate(stages, max), strict=True))


def _is_backward(info: Any, node: fx.Node) -> bool:
    return info.is_required_bw(node) and not info.is_required_fw(node)


def _is_size(node: fx.Node, info: Any) -> bool:
    return not info.is_required_bw(node) and isinstance(node.meta.get("val"), torch.SymInt)
