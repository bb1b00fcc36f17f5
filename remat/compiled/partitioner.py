"""The partitioner: of the ways to cut a joint graph, the cheapest whose compiled code keeps the budget.

torch's partitioner cuts, and all that it does afterwards is its own; only the choice of saved values is ours:

1. PyTorch's own choice is lowered. Where it fits, it is kept. On a GPU, code that would exceed frees its buffers at
   once, here and in what follows.
2. Otherwise sums that would wait for their readers get kernels of their own, and the program is solved. Its table is
   corrected, stage by stage, by the bytes that the lowered code of a choice needs. Its answer is lowered. Where that
   code exceeds the budget, the missing bytes of its highest stage (of every stage, where code frees at once) are
   counted to the values that the answer makes again there. Where the program has no answer, the choice that needs
   least, and PyTorch's at every ratio of its memory budget, are lowered instead; where the former needs what the table
   says, no others are. After `ROUNDS` of this at most, the cheapest that really fits is handed out.
3. Where the first `MISSES` choices exceed, and the last comes no nearer, the default's table is solved for lower limits
   than asked, if it has an answer at all. Where these exceed too, PyTorch's choices at every ratio are lowered until
   one fits, but for those that need more by the table than what was seen.

So no choice is handed out whose compiled code exceeds the budget. Where nothing fits, `NoPlanInTime` names the least
peak that was seen: another choice may need less. Where the budget is too small for the bytes that no choice changes,
`Infeasible` is raised before any search.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat._torch import compiled_draws
from remat._torch.compiled_draws import draw_again, draws_alike, seed_of
from remat._torch.inductor import (
    free_at_once,
    hash_of,
    keep_apart,
    keeps_joint_graphs,
    partition_saving,
    partitioner_class,
)
from remat._torch.training import without_modes
from remat.compiled.joint import Joint, Value, device_of, joint_of, late_sums
from remat.compiled.kept import ResultCache
from remat.compiled.outside import Outside
from remat.compiled.peak import Halves, halves
from remat.compiled.program import Choice, CompiledBytes, Solved, judged, solve
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, NoPlanInTime
from remat.units import gib, gib_above, ms

log = logging.getLogger(__name__)
RATIOS = tuple(tenth / 10 for tenth in range(10))
ROUNDS = 6
MISSES = 3
HALVINGS = 6
NEAR = 0.01  # of what a graph may need: limits that are not told apart
EQUAL_SHARE = 0.002  # of what a graph may need: where table and code differ by less, the table's answer is the last
LEAST_SAVING = 0.005  # of the price: an answer that saves less is not lowered
WORTH_A_WORD = 0.02  # of the least peak that was seen: outputs of so many bytes are named
NO_LIMIT = 1 << 62
_HOMES = ("joint", "peak", "program", "partitioner")


@dataclasses.dataclass(frozen=True)
class Cut:
    """A graph as it was cut.

    peak_bytes   predicted, of the whole step           kept_bytes  between forward and backward
    halves       what one run of the graph needs
    choice       what is saved, and its price           default  what PyTorch would save
    bound_us     below which no choice of the program's is priced; None where PyTorch's own was kept
    seconds      that planning took beyond compiling
    """

    peak_bytes: int
    kept_bytes: int
    halves: Halves
    choice: Choice
    default: Choice
    bound_us: float | None
    seconds: float

    @property
    def gap(self) -> float:
        """How far the price may be above the least one, as a share of it."""
        return 0.0 if self.bound_us is None else max(1 - self.bound_us / max(self.choice.price_us, 1e-9), 0.0)

    def __str__(self) -> str:
        more = self.choice.remade_us - self.default.remade_us
        how = "PyTorch's own choice fits" if self.bound_us is None else f"gap {self.gap:.1%}"
        return (
            f"peak {gib(self.peak_bytes)}, {ms(more)} more recomputation than by default, {how}; "
            f"planned in {self.seconds:.1f} s"
        )


class DefaultExceeds(Exception):
    """PyTorch's own choice of saved values exceeds the budget."""


class BudgetPartitioner(partitioner_class()):  # type: ignore[misc]
    """A partitioner for Inductor that keeps a budget.

    budget_bytes  of the whole step           outside  what is not in the graphs
    uses          how often a step runs the graph
    cuts          the graphs of the step that were cut, by their keys (`CompiledStep.adding`)
    key           of this graph
    searches      whether another choice is looked for where PyTorch's own exceeds the budget
    """

    def __init__(
        self,
        budget_bytes: int,
        outside: Outside,
        uses: int = 1,
        cuts: dict[Any, Cut] | None = None,
        key: Any = None,
        *,
        searches: bool = True,
    ):
        self.keeps = keeps_joint_graphs()
        self.budget_bytes, self.outside, self.uses, self.searches = budget_bytes, outside, uses, searches
        self.cuts, self.key = {} if cuts is None else cuts, key

    def __getstate__(self) -> dict[str, Any]:
        # It is in settings, which are copied.
        return {"asked": (self.budget_bytes, self.outside, self.uses, self.searches)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        (self.budget_bytes, self.outside, self.uses, self.searches), self.cuts = state["asked"], {}
        self.key, self.keeps = None, False

    def uuid(self) -> Any:
        homes = (compiled_draws.__file__, *(__file__.replace("partitioner", home) for home in _HOMES))
        return hash_of(*homes) + repr(self.__getstate__()).encode()

    @property
    def _beside_bytes(self) -> int:
        """The bytes beside the graph while it runs: those that earlier graphs of the step saved, among others."""
        return self.outside.during_graphs + sum(cut.kept_bytes for key, cut in self.cuts.items() if key != self.key)

    @property
    def _earlier_bytes(self) -> int:
        """The most bytes that an earlier graph needs beside what it saves.

        Where a step runs its graphs several times, an earlier one's last run has what later ones saved beside it.
        """
        earlier = [cut.halves for key, cut in self.cuts.items() if key != self.key] if self.uses > 1 else []
        return max((each.peak - each.kept for each in earlier), default=0)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        """Cut into (forward, backward).

        Raises Infeasible where none can keep the budget, NoPlanInTime where none was found, and DefaultExceeds where
        none was looked for.
        """
        started = time.monotonic()
        self._require_room()
        beside, held = self._beside_bytes, self.outside.holds_results
        most = self.budget_bytes - beside
        search = Search(gm, joint_inputs, options, most, self.uses, held, self._earlier_bytes, keeps=self.keeps)
        search.on_try = lambda needs: _tell(f"try {len(search.tried)}: {gib(beside + needs)}")
        if not search.has_choice:
            return search.by_default
        if not self.searches and not search.fits_by_default():
            raise DefaultExceeds
        if not search.fits_by_default():
            default, known = search.default_bytes
            needed = f"{'' if known else 'more than '}{gib(beside + default)}"
            _tell(f"planning a compiled step within {gib(self.budget_bytes)}; PyTorch's own choice needs {needed}")
        found = search.run()
        if found is None:
            raise self._nothing_found(beside, min(search.lowered.values(), key=search.needs), search)
        choice, bound = found
        lowered = search.lower(choice)
        self._require_room_to_step(lowered.held)
        peak = max(beside + search.needs(lowered), self.outside.while_stepping + lowered.held)
        seconds = time.monotonic() - started
        cut = Cut(peak, self.uses * lowered.kept, lowered, choice, search.default, bound, seconds)
        self.cuts[self.key] = cut
        (log.info if bound is None else _tell)(str(cut))
        return search.handed_out(choice)

    def _require_room(self) -> None:
        """Raise Infeasible where the bytes that no choice changes exceed the budget."""
        if (least := max(self.outside.during_graphs, self.outside.while_stepping)) > self.budget_bytes:
            raise Infeasible(
                f"the compiled step does not fit {gib(self.budget_bytes)}: it needs more than {gib(least)}, whatever "
                f"forward saves. {self._fixed}. Raise the budget, or train with an optimizer that keeps less."
            )

    def _require_room_to_step(self, held: int) -> None:
        """Raise Infeasible where the optimizer's step exceeds the budget beside outputs that the loop holds meanwhile.

        Where losses may still run in chunks, there may be fewer of them: DefaultExceeds.
        """
        if (least := self.outside.while_stepping + held) <= self.budget_bytes:
            return
        if not self.searches:
            raise DefaultExceeds
        raise Infeasible(
            f"the compiled step does not fit {gib(self.budget_bytes)}: the optimizer's step needs {gib(least)}, with "
            f"{gib(held)} of outputs that the loop holds until the next forward returns. {self._fixed}. Raise the "
            'budget, or let go of the outputs after backward (`del`) and say `holds="loss"`.'
        )

    def _nothing_found(self, beside: int, lowered: Halves, search: Search) -> NoPlanInTime:
        least = max(beside + search.needs(lowered), self.outside.while_stepping)
        held = ""
        if lowered.held > WORTH_A_WORD * least:
            held = (
                f". {gib(lowered.held)} are outputs that the loop is taken to hold until the next forward returns: let "
                'the model give fewer (`use_cache=False`), or let go of them and say `holds="loss"`'
            )
        return NoPlanInTime(
            f"no plan was found that keeps the compiled step within {gib(self.budget_bytes)}, and nothing proves that "
            f"there is none: the least peak that was seen is {gib_above(least, self.budget_bytes)}. {self._fixed}"
            f"{self._earlier}{held}. Raise the budget, or reduce the batch.",
            least,
        )

    @property
    def _earlier(self) -> str:
        """The words on graphs before this one: their bytes, and how a step has fewer of them."""
        if not (saved := self._beside_bytes - self.outside.during_graphs):
            return ""
        of_ddp = (
            "; DistributedDataParallel cuts the model at its buckets, and `torch._dynamo.config.optimize_ddp = False` "
            "leaves it whole, to be planned as one graph"
        )
        is_cut = len({frame for frame, _ in (*self.cuts, self.key)}) < len({*self.cuts, self.key})
        return f". {gib(saved)} of it were saved by graphs before this one{of_ddp if is_cut else ''}"

    @property
    def _fixed(self) -> str:
        of = self.outside
        return (
            f"{gib(of.always)} of it are parameters, optimizer state, batch and workspaces, {gib(of.gradients)} "
            f"gradients, and {gib(of.stepping)} the optimizer's temporaries"
        )


TorchChoice = Callable[[float], list[fx.Node]]  # what PyTorch would save itself at a ratio of its memory budget
GraphHalves = tuple[fx.GraphModule, fx.GraphModule]


class Search:
    """Choices for one joint graph; `lowered` has what their compiled code needs."""

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
        self.earlier = earlier  # bytes that earlier graphs of the step need while this one's are saved
        self.gm, self.inputs, self.options = gm, joint_inputs, options
        self.most_bytes, self.uses, self.holds_results = most_bytes, uses, holds_results
        self.lowered: dict[frozenset[str], Halves] = {}
        self._lowered_cuts: dict[frozenset[str], GraphHalves] = {}
        self.kept = ResultCache(gm, device_of(gm.graph), sorted(options.items()), holds_results, is_on=keeps)
        self.has_sums_apart = self.is_default_apart = False  # whether sums that would wait have kernels of their own
        self.frees_at_once = False  # whether generated code does
        self.reorders, self.draws_alike = True, draws_alike(device_of(gm.graph))
        self.by_default = self._partition(self._look)
        self.tried: list[Choice] = []
        self.has_answer = False  # whether the default's table has a choice that keeps the budget
        self.on_try: Callable[[int], None] = lambda needs: None  # given the bytes of what was tried last

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
        is_backward = functools.partial(_is_backward, info)
        joint = joint_of(graph, is_backward, target, reorders=self.reorders, held=self._held(graph))
        self.seeds = {node.name: seed for node in graph.nodes if (seed := seed_of(node)) is not None}
        self.joint = dataclasses.replace(joint, uses=self.uses)
        chosen = own(1.0)
        self.default = judged(self.joint, self.joint.values_of(node.name for node in chosen))
        return chosen

    def _held(self, graph: fx.Graph) -> list[fx.Node]:
        """List the results of forward that the caller holds through backward."""
        results = graph.find_nodes(op="output")[0].args[0][: self.options["num_fwd_outputs"]]
        return [each for each in results if isinstance(each, fx.Node)] if self.holds_results else []

    @functools.cached_property
    def portfolio(self) -> list[Choice]:
        """Return the values that PyTorch's own memory budget would save, at every ratio."""
        found: list[Choice] = []

        def note(graph: fx.Graph, info: Any, own: TorchChoice) -> list[fx.Node]:
            for nodes in map(own, RATIOS):
                found.append(judged(self.joint, self.joint.values_of(node.name for node in nodes)))
            return nodes

        self._partition(note)
        return found

    def cut(self, choice: Choice) -> GraphHalves:
        """Cut into (forward, backward), saving the values of `choice` and those that take nothing."""
        if choice.saved == self.default.saved:
            return self.by_default

        def choose(graph: fx.Graph, info: Any, own: TorchChoice) -> list[fx.Node]:
            chosen = [node for node in graph.nodes if node.name in choice.saved or _is_size(node, info)]
            return list(dict.fromkeys([*info.inputs, *chosen]))

        forward, backward = self._partition(choose)
        if self.has_sums_apart:
            keep_apart(backward, late_sums(backward.graph))
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

    def lower(self, choice: Choice) -> Halves:
        """Return the bytes that the compiled code of a choice needs.

        Where they exceed the limit, that is before the last of its draws are as forward has them.
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
                    repeats_draws=repeats,  # and backward then draws as forward does, if the bytes fit
                    redraws=redraws,
                    may_fit=self._may_fit,
                )
                if choice in self.tried and found.redrawn is not None:
                    self.on_try(self.needs(self._beside_earlier(found)))
                return dataclasses.astuple(found)

            is_default = choice.saved == self.default.saved
            of = is_default, self.is_default_apart if is_default else self.has_sums_apart, self.frees_at_once
            found = Halves(*self.kept.get(make, "halves", *of, sorted(choice.saved)))
            if not found.agrees and self._may_fit(found):  # it did not in an earlier search, with other limits
                limits = self.most_bytes, self.uses, self.earlier
                found = Halves(*self.kept.get(make, "halves within", *limits, *of, sorted(choice.saved)))
            self.lowered[choice.saved] = self._beside_earlier(found)
        return self.lowered[choice.saved]

    def _may_fit(self, found: Halves) -> bool:
        return self.needs(self._beside_earlier(found)) <= self.most_bytes

    def _beside_earlier(self, found: Halves) -> Halves:
        """Return the bytes of halves, with results that the loop holds and those of earlier graphs in its forward."""
        return dataclasses.replace(found, forward=max(found.forward + found.held, self.earlier))

    def solve(self, most_bytes: int, more: CompiledBytes, start: Choice, *, least: bool = False) -> Solved:
        """Solve the program."""

        def make() -> tuple[Any, ...]:
            solved = solve(self.joint, most_bytes, more, start=start.saved, least=least)
            return solved.choice and sorted(solved.choice.saved), solved.bound_us

        of = self.joint, most_bytes, more, sorted(start.saved), least
        saved, bound = self.kept.get(make, "solve", *of)
        return Solved(None if saved is None else judged(self.joint, frozenset(saved)), bound)

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

    def run(self) -> tuple[Choice, float | None] | None:
        """Search, and return (the cheapest choice that fits, the bound); None where none was found.

        The bound is for a table that is corrected by the code of one choice: of PyTorch's own, or of one that fits.
        """
        if self.fits_by_default() or (self._keep_sums_apart() and self.fits_by_default()):
            return self.default, None
        self._follow(self.lower(self.default))
        self._save_unread(self.lower(self.default).ways)
        first = self._more(self.default)
        bound = self._learn(first)
        if self._cheapest() is None:
            self._tighten(first)
        if (best := self._cheapest()) is None:
            return None
        if bound is None:
            bound = self.solve(self.most_bytes, self._more(best), best).bound_us
        return best, bound if math.isfinite(bound) else 0.0  # the code needs less than its table

    def _follow(self, lowered: Halves) -> None:
        """Give the table the order in which code runs calls, as traced or gradients of weights early. (Rule 7)"""
        before = self.joint, self.default
        if apart := _disorder(self.joint, lowered):
            self.reorders = not self.reorders
            self._partition(self._look)
            if _disorder(self.joint, lowered) >= apart:
                self.reorders = not self.reorders
                self.joint, self.default = before

    def _save_unread(self, ways: Mapping[str, bool]) -> None:
        """Save random numbers whose draw in a forward's code is not understood, where a checkpoint lets them."""
        unread = {name for name, seed in self.seeds.items() if not self.draws_alike and seed not in ways}

        def corrected(value: Value) -> Value:
            is_saved = value.name in unread and value.can_save
            return dataclasses.replace(value, can_remake=value.can_remake and not is_saved)

        self.joint = dataclasses.replace(self.joint, values=tuple(map(corrected, self.joint.values)))

    def _keep_sums_apart(self) -> bool:
        """Give sums that would wait kernels of their own, in the default's code too; return whether it has any."""
        _, backward = self.by_default
        self.has_sums_apart = True
        if late := late_sums(backward.graph):
            keep_apart(backward, late)
            self.is_default_apart = True
            self.lowered.pop(self.default.saved, None)
        return self.is_default_apart

    def _learn(self, more: CompiledBytes) -> float | None:
        """Lower the program's answers, and correct its table by the code of each.

        Returns the last bound; None where the table was corrected by the code of several choices.
        """
        last, is_of_one, bound = self.default, True, 0.0
        for number in range(ROUNDS):
            solved = self.solve(self.most_bytes, more, last)
            self.has_answer |= number == 0 and solved.choice is not None
            bound = solved.bound_us
            if (found := self._next(self._answers(solved, more), more)) is None:
                break
            last = found
            self.tried.append(last)
            is_as_said = abs(more.peak_bytes(last) - self.needs(self.lower(last))) <= EQUAL_SHARE * self.most_bytes
            if not self.fits(last):
                if is_as_said and solved.choice is None:  # the least that any choice needs
                    break
                if (lowered := self.lower(last)).redrawn is None:
                    self._save_unread(lowered.ways)
                more, is_of_one = self._corrected(more, last), False
                needed = [self.needs(self.lower(each)) for each in self.tried]
                if len(needed) >= MISSES and self._cheapest() is None and needed[-1] >= min(needed[:-1]):
                    break
            elif is_as_said:
                break
            else:  # what was learned of other choices stays
                more, is_of_one = dataclasses.replace(self._more(last), making=more.making), not more.making
        else:
            is_of_one = False
        return bound if is_of_one else None

    def _tighten(self, more: CompiledBytes) -> None:
        """Solve a table for lower limits than asked, whose answers need more bytes than it says.

        First for as much less as an answer exceeds, then halfway between a limit that is met and one that is not.
        """
        low, high, last = 0, self.most_bytes, self.default
        limit = high - min((self.needs(self.lower(each)) - high for each in self.tried), default=0)
        for _ in range(HALVINGS if self.has_answer else 0):
            solved = self.solve(limit, more, last)
            if solved.choice is not None:
                last = solved.choice
                self.tried.append(last)
            if solved.choice is None or self.fits(last):
                low = limit
            else:
                high = limit
            if high - low <= NEAR * self.most_bytes:
                break
            limit = (low + high) // 2
        if self._cheapest() is None and (least := self._least(more)) is not None:
            self.tried.append(least)
        if self._cheapest() is None:  # tables are off by less than what tells the choices of most ratios apart
            seen = min((self.needs(self.lower(each)) for each in self.tried), default=NO_LIMIT)
            may_fit = (each for each in self.portfolio if each.kept_bytes <= self.most_bytes)
            hopeful = {each.saved: each for each in may_fit if more.peak_bytes(each) < seen}
            for choice in sorted(hopeful.values(), key=more.peak_bytes):
                self.tried.append(choice)
                if self.fits(choice):
                    break

    def _answers(self, solved: Solved, more: CompiledBytes) -> list[Choice]:
        """List the choices that may be lowered next: the program's, or while nothing fits those that need least."""
        if solved.choice is not None:
            return [solved.choice]
        if self._cheapest() is not None:
            return []
        return [*([least] if (least := self._least(more)) else []), *self.portfolio]

    def _least(self, more: CompiledBytes) -> Choice | None:
        """Return the choice that needs least by the table."""
        return self.solve(NO_LIMIT, more, self.default, least=True).choice

    def _more(self, choice: Choice) -> CompiledBytes:
        """Return the bytes that compiled code needs beside the table's: by stage, but no more than overall.

        A stage may need more because of what this choice saves, and another would not; and code that has room lets
        buffers wait for others of their size.
        """
        seen, by_stage = self.lower(choice), self._by_stage(choice)
        overall = max(by_stage.values(), default=0) - max(choice.alive_bytes, default=0)
        found, backward = overall, list[int]()
        for stage, alive in reversed(list(enumerate(choice.alive_bytes))):
            if stage in by_stage:
                found = min(by_stage[stage] - alive, overall)
            backward.insert(0, found)
        forward = (self.uses - 1) * seen.kept + seen.forward - choice.kept_bytes
        more = CompiledBytes(forward, tuple(backward))
        is_said = self.fits(choice) or more.peak_bytes(choice) > self.most_bytes
        return more if is_said else self._corrected(more, choice)

    def _by_stage(self, choice: Choice) -> Mapping[int, int]:
        """Return what the code of a choice needs in the stages of backward that call libraries."""
        seen = self.lower(choice)
        others = (self.uses - 1) * seen.kept
        found, remade, latest = defaultdict[int, int](int), 0, 0
        for name, size in seen.calls.items():
            stage = self.joint.calls.get(name, -1) if name else 0
            if stage < 0:  # it makes a value again for the next stage
                remade = max(remade, size)
                continue
            latest = max(latest, stage)  # a call that was moved counts where it runs
            found[latest] = max(found[latest], others + max(size, remade))
            remade = 0
        found[latest] = max(found[latest], others + remade)
        return found

    def _corrected(self, more: CompiledBytes, choice: Choice) -> CompiledBytes:
        """Say of a choice whose code exceeds the budget that it does.

        Where a stage needs more than was thought, values that it makes again in that stage are why, or before the call
        of the next one; if there are none, every choice needs that. Where buffers may wait for others of their size
        below the peak, this is known of the highest stage alone.
        """
        seen, backward, making = self.lower(choice), list(more.backward), dict(more.making)
        expected, by_stage = more.in_stages(choice), self._by_stage(choice)
        highest = 0 if self.frees_at_once else max(by_stage.values())
        again = set(choice.made_again.values())
        known = defaultdict[int, int](int)
        for stage, size in by_stage.items():
            if size >= highest:
                is_of_next = stage not in again and stage + 1 in again and size > expected[stage]
                known[stage + is_of_next] = max(known[stage + is_of_next], size)
        for stage, size in sorted(known.items()):
            if (missing := size - expected[stage]) <= 0:
                continue
            made = {v: self.joint.values[v].size_bytes for v, when in choice.made_again.items() if when == stage}
            if not (total := sum(made.values())):
                backward[stage] += missing
            for v, size_bytes in made.items():
                making[v, stage] = making.get((v, stage), 0) + -(-missing * size_bytes // total)
        forward = max(more.forward, (self.uses - 1) * seen.kept + seen.forward - choice.kept_bytes)
        return CompiledBytes(forward, tuple(backward), making)

    def _next(self, choices: Sequence[Choice], more: CompiledBytes) -> Choice | None:
        """Choose what to lower next: the cheapest that should fit, else the one that needs least."""
        cheapest = self._cheapest()
        untried = [choice for choice in choices if choice.saved not in self.lowered]
        hopeful = [choice for choice in untried if more.peak_bytes(choice) <= self.most_bytes]
        if cheapest is not None:
            better = (choice for choice in hopeful if choice.price_us < (1 - LEAST_SAVING) * cheapest.price_us)
            return min(better, key=_price, default=None)
        return min(hopeful, key=_price) if hopeful else min(untried, key=more.peak_bytes, default=None)

    def _cheapest(self) -> Choice | None:
        return min((choice for choice in self.tried if self.fits(choice)), key=_price, default=None)


def _tell(text: str) -> None:
    """Report a search that takes minutes: to the log where it is on, else on stderr of the first process."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif log.isEnabledFor(logging.WARNING) and os.environ.get("RANK", "0") == "0":
        print(f"remat: {text}", file=sys.stderr, flush=True)


def _disorder(joint: Joint, lowered: Halves) -> int:
    """Count the calls of backward that code runs after one of a later stage."""
    stages = [joint.calls[name] for name in lowered.calls if name in joint.calls]
    return sum(stage < latest for stage, latest in zip(stages, itertools.accumulate(stages, max), strict=True))


def _price(choice: Choice) -> float:
    return choice.price_us


def _is_backward(info: Any, node: fx.Node) -> bool:
    return info.is_required_bw(node) and not info.is_required_fw(node)


def _is_size(node: fx.Node, info: Any) -> bool:
    return not info.is_required_bw(node) and isinstance(node.meta.get("val"), torch.SymInt)
