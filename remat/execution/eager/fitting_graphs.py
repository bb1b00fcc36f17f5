"""The graphs of a model's forwards that fit the plan. A new one is judged before it runs for the first time."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from remat.capture.model_state import ModelState
from remat.capture.settling import UnsettledForward
from remat.evaluation.plan import Plan
from remat.execution.eager.graph_as_planned import GraphAsPlanned
from remat.execution.eager.open_sizes import OpenSizes
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.execution.eager.running_forward import RunningForward
from remat.execution.early_forwards import EarlyForwards
from remat.execution.placing import Placer
from remat.execution.reports import Reports

MANY_TRACES = 16


class FittingGraphs:
    """Runs the graph calls of forwards of `model`, and knows which graphs fit `plan`.

    judge  compares a graph with the plan's
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        judge: GraphAsPlanned,
        placer: Placer,
        early: EarlyForwards,
        reports: Reports,
    ):
        self._model, self._plan, self._judge = model, plan, judge
        self._placer, self._early, self._reports = placer, early, reports
        self._known: dict[tuple[int, int], fx.GraphModule] = {}  # by call and id; kept, so that an id stays its own
        self._open: dict[tuple[int, int], OpenSizes] = {}  # of those with any
        self._sizes: set[tuple[int, ...]] = set()  # of batches that were traced

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        """Let go of all graphs; those that still run are judged again."""
        self._known.clear()
        self._open.clear()

    def execute(
        self, running: RunningForward, calls: RewrittenCalls, call: int, graph_module: fx.GraphModule, args: Any
    ) -> Any:
        """Run graph call number `call` of the plan, by `calls` where it fits, and note a mismatch where it does not.

        Raises PlanMismatch for another graph while weights are on the host, UnsettledForward as `_complete_first` does.
        """
        if running.is_rehearsed:
            return graph_module.forward(*args)
        key = call, id(graph_module)
        if key not in self._known:
            # A forward that is about to raise has another graph: its own error counts, so this one waits for the end.
            is_first = running.mismatch is None
            mismatch = running.mismatch or self._judge.mismatch(running, call, graph_module)
            if mismatch is not None or running.excess:
                self._complete_first(running, call)
            if mismatch is not None:
                if is_first and calls.weights is None and self._is_early(running, graph_module):
                    return self._run_early(running, graph_module, args)
                running.mismatch = mismatch
                if calls.weights is not None:
                    raise mismatch  # since its weights are not fetched
                return graph_module.forward(*args)
            self._note_sizes(running, call, graph_module, args)
            self._known[key] = graph_module
            running.at.fits = True
            if call + 1 == running.now.forward.first + running.now.forward.calls:
                running.before = None  # the model is complete, and copies would be there beside all that is saved
        if (sizes := self._open.get(key)) is not None and sizes.are_larger(args):
            self._compare_sizes(sizes, running, call, graph_module, args)
        return calls(call, graph_module, args)

    def _note_sizes(self, running: RunningForward, call: int, graph_module: fx.GraphModule, args: Any) -> None:
        """Note the open sizes of a graph that fits, and report one that needs more for a batch of another shape."""
        sizes = OpenSizes(graph_module)
        if running.given == running.now.forward.given:
            sizes.note_compared(args)
        else:
            self._compare_sizes(sizes, running, call, graph_module, args)
        if sizes:
            self._open[call, id(graph_module)] = sizes

    def _compare_sizes(
        self, sizes: OpenSizes, running: RunningForward, call: int, graph_module: fx.GraphModule, args: Any
    ) -> None:
        """Report a graph that needs more at the sizes among `args` than planned, and note that it was compared."""
        if self._judge.compare_sizes(running, call, graph_module, sizes.values(args)):
            sizes.note_compared(args)

    def _complete_first(self, running: RunningForward, call: int) -> None:
        """Raise UnsettledForward in a first forward with another or a larger graph than planned.

        It may make what the model keeps.
        """
        is_late = call > running.now.forward.first and running.before is None
        if running.at.settled or is_late or not self._early.may_complete:
            return
        running.before = running.before or ModelState(self._model, named=False)
        raise UnsettledForward("the model may not be complete before its first forward.")

    def _is_early(self, running: RunningForward, graph_module: fx.GraphModule) -> bool:
        """Return whether a graph belongs to an early forward, where a planned one may come as another call."""
        return self._early.has(graph_module) or (running.is_early and self._placer.fits_some(graph_module))

    def _run_early(self, running: RunningForward, graph_module: fx.GraphModule, args: Any) -> Any:
        """Run the graph of an early forward, and note that it is one."""
        running.is_early = True
        if text := self._early.warning:
            self._reports.excess("early", text)
        return graph_module.forward(*args)

    def report_new(self, running: RunningForward) -> None:
        """Report a forward that is traced again and again, and one that needs more than planned."""
        self._sizes.add(tuple(running.graphs.elements.values()))
        traces = len(self) // len(self._plan.fingerprints)
        if traces >= MANY_TRACES:
            carried = self._early.why_traced(traces) if len(self._sizes) < traces // 2 else ""
            self._reports.warn(
                "traces",
                carried
                or f"this forward was traced {traces} times, because batches of so many shapes came and its graph "
                "depends on them: each takes seconds and stays in memory. Pad batches to a few lengths (buckets).",
            )
        if running.excess:
            self._reports.excess("more", running.excess)
