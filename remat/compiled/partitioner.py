"""The partitioner: of the ways to cut a joint graph, the cheapest whose compiled code keeps the budget.

torch's partitioner cuts, and all that it does afterwards is its own; only the choice of saved values is ours. It is
looked for by `search.py` among the cuts of `lowered_cuts.py`. No choice is handed out whose compiled code exceeds the
budget. Where nothing fits, `NoPlanInTime` names the least peak that was seen: another choice may need less. Where the
budget is too small for the bytes that no choice changes, `Infeasible` is raised before any search.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch import fx

from remat._torch import compiled_draws, inductor
from remat._torch.inductor import hash_of, keeps_joint_graphs, partitioner_class
from remat.compiled.outside import Outside
from remat.compiled.peak import Halves
from remat.compiled.program import Choice
from remat.compiled.search import Search
from remat.errors import Infeasible, NoPlanInTime
from remat.garbage import searched_rarely
from remat.units import gib, gib_above, ms

log = logging.getLogger(__name__)
WORTH_A_WORD = 0.02  # of the peak: held outputs of so many bytes are named
_HOMES = ("joint", "peak", "program", "lowered_cuts", "search", "partitioner")


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


class OtherDefault(Exception):
    """PyTorch's own choice of saved values exceeds the budget where it should fit, or fits where it should exceed."""


class BudgetPartitioner(partitioner_class()):  # type: ignore[misc]
    """A partitioner for Inductor that keeps a budget.

    budget_bytes  of the whole step           outside  what is not in the graphs
    uses          how often a step runs the graph
    cuts          the graphs of the step that were cut, by their keys (`CompiledStep.adding`)
    key           of this graph
    only_if       "fits" or "exceeds": cut only if PyTorch's own choice does
    """

    def __init__(
        self,
        budget_bytes: int,
        outside: Outside,
        uses: int = 1,
        cuts: dict[Any, Cut] | None = None,
        key: Any = None,
        *,
        only_if: str = "",
    ):
        self.keeps = keeps_joint_graphs()
        self.budget_bytes, self.outside, self.uses, self.only_if = budget_bytes, outside, uses, only_if
        self.cuts, self.key = {} if cuts is None else cuts, key

    def __getstate__(self) -> dict[str, Any]:
        # It is in settings, which are copied.
        return {"asked": (self.budget_bytes, self.outside, self.uses, self.only_if)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        (self.budget_bytes, self.outside, self.uses, self.only_if), self.cuts = state["asked"], {}
        self.key, self.keeps = None, False

    def uuid(self) -> Any:
        homes = (
            compiled_draws.__file__,
            inductor.__file__,
            *(__file__.replace("partitioner", home) for home in _HOMES),
        )
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

    @searched_rarely()
    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        """Cut into (forward, backward).

        Raises Infeasible where none can keep the budget, NoPlanInTime where none was found, and OtherDefault where
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
        if self.only_if and (self.only_if == "fits") != search.fits_by_default():
            raise OtherDefault
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
        (log.info if bound is None else _tell)(f"{cut}{_held(lowered, peak)}")
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

        Where losses may still run in chunks, there may be fewer of them: OtherDefault.
        """
        if (least := self.outside.while_stepping + held) <= self.budget_bytes:
            return
        if self.only_if == "fits":
            raise OtherDefault
        raise Infeasible(
            f"the compiled step does not fit {gib(self.budget_bytes)}: the optimizer's step needs {gib(least)}, with "
            f"{gib(held)} of outputs that the loop holds until the next forward returns. {self._fixed}. Raise the "
            'budget, or let go of the outputs after backward (`del`) and say `holds="loss"`.'
        )

    def _nothing_found(self, beside: int, lowered: Halves, search: Search) -> NoPlanInTime:
        least = max(beside + search.needs(lowered), self.outside.while_stepping)
        return NoPlanInTime(
            f"no plan was found that keeps the compiled step within {gib(self.budget_bytes)}, and nothing proves that "
            f"there is none: the least peak that was seen is {gib_above(least, self.budget_bytes)}. {self._fixed}"
            f"{self._earlier}{_held(lowered, least)}. Raise the budget, or reduce the batch.",
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
        of_break = (
            ", planned before this one was known: a smaller budget may make them keep less. `remat.compile` of the "
            "whole model plans all as one, if its graph does not break (`fullgraph=True` names the place)"
        )
        is_cut = len({frame for frame, _ in (*self.cuts, self.key)}) < len({*self.cuts, self.key})
        return f". {gib(saved)} of it were saved by graphs before this one{of_ddp if is_cut else of_break}"

    @property
    def _fixed(self) -> str:
        of = self.outside
        return (
            f"{gib(of.always)} of it are parameters, optimizer state, batch and workspaces, {gib(of.gradients)} "
            f"gradients, and {gib(of.stepping)} the optimizer's temporaries"
        )


def _held(lowered: Halves, peak_bytes: int) -> str:
    """Return the words on outputs that the loop holds, where they are much of the peak."""
    if lowered.held <= WORTH_A_WORD * peak_bytes:
        return ""
    return (
        f". {gib(lowered.held)} are outputs that the loop is taken to hold until the next forward returns: let the "
        'model give fewer (`use_cache=False`), or let go of them and say `holds="loss"`'
    )


def _tell(text: str) -> None:
    """Report a search that takes minutes: to the log where it is on, else on stderr of the first process."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif log.isEnabledFor(logging.WARNING) and os.environ.get("RANK", "0") == "0":
        print(f"remat: {text}", file=sys.stderr, flush=True)
