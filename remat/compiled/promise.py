"""The promise at run time: check the runs and sizes of compiled graphs against the plan.

Rule 1  A run is alive from its forward until its backward begins, or until autograd lets go of it. A plan counts on
        `uses` runs of each graph at once. Whatever a step runs, a forward is refused that would exceed the budget
        beside what all runs that are alive have saved.
Rule 2  Open sizes are planned for as the batch had them that the graph was compiled for. A batch with more elements
        brings a warning, or is refused, unless it keeps the budget even if all that grows does so with the square of
        its elements, as the scores of attention may. After a graph for one size, the first smaller batch has a graph of
        its own, as the last of an epoch: the others would run one with open sizes, planned for the smaller.
Rule 3  A budget knows one compiled model. If others have runs that are alive, and what these have saved exceeds the
        budget and `outside=` together with a run's own peak, a warning says so.
        A backward that runs a second time (`retain_graph=True`) brings one too: what forward saved stayed meanwhile.
Rule 4  Gradients count as backward makes them, from the beginning where micro-batches accumulate. Where others are
        there as a forward begins, a warning says so.

Runs under saved-tensor hooks are not counted: `torch.utils.checkpoint` around a block keeps nothing that it saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from remat._torch.dynamo import compilation
from remat._torch.symbols import close, hinted
from remat._torch.training import saved_tensors_are_hooked
from remat.compiled.asked import CompileArguments
from remat.errors import PlanMismatch, UsageError
from remat.units import first_few, gib
from remat.warn import warn
from remat.workload.held_outputs import output_tensors, parameters_reached

if TYPE_CHECKING:
    from remat.compiled.outside import Outside
    from remat.compiled.partitioner import Cut


_SKIPPED_FUNCTION = (
    "A graph break inside a loop makes Dynamo skip the whole function: compile with `fullgraph=True` to see the place, "
    "or compile the blocks of the loop one by one, with `uses=`"
)
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_NO_GRAPH = "Dynamo captured no graph of this forward, so the step runs uncompiled and no budget is kept"


class _Run:
    """One run of a graph whose backward has not begun; its nodes of autograd hold it."""

    def __init__(self, key: Any, kept_bytes: int, step: CompiledStep, device: torch.device):
        self.key, self.kept_bytes, self.step, self.device = key, kept_bytes, step, device


_ALIVE: weakref.WeakSet[_Run] = weakref.WeakSet()  # of all steps


@dataclasses.dataclass
class CompiledStep:
    """A step's graphs, which share its budget.

    cuts  how each was cut, by its key: its frame, and its place among the graphs of one compilation
    runs  those that are alive
    parameters  that its graphs are given
    batch_bytes  of what its first graph is given beside parameters and buffers
    looks  whether its first forward is looked at, for parts that no graph has
    has_gradients  whether a warning was given for those that are there as a forward begins
    is_retained    whether one was given for a backward that runs a second time
    closed  by key, the elements that inputs of a graph without open sizes have, until there is another for it
    """

    cuts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    runs: weakref.WeakSet[_Run] = dataclasses.field(default_factory=weakref.WeakSet)
    parameters: WeakIdKeyDictionary = dataclasses.field(default_factory=WeakIdKeyDictionary, compare=False)
    batch_bytes: int = dataclasses.field(default=0, compare=False)
    looks: bool = dataclasses.field(default=False, compare=False)
    has_gradients: bool = dataclasses.field(default=False, compare=False)
    is_retained: bool = dataclasses.field(default=False, compare=False)
    closed: dict[Any, int] = dataclasses.field(default_factory=dict, compare=False)
    _has_met: bool = dataclasses.field(default=False, compare=False)
    _first: Any = None
    _last: Any = None
    _place: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy a compiled model as one that is not compiled yet, as `torch.compile` itself does."""
        return CompiledStep, ()

    @contextlib.contextmanager
    def adding(self, *, is_smaller: bool = False) -> Iterator[Any]:
        """Give a graph that is compiled its key: the one that it had, where its frame is compiled again.

        is_smaller  whether it is for a smaller batch than the graph before it, which stays

        A compilation has several graphs where DistributedDataParallel cuts them at its buckets. Its id is compared by
        identity: `torch._dynamo.reset` counts from the beginning.
        """
        key = self._next_key
        before = self.cuts.pop(key, None)
        try:
            yield key
        finally:
            if is_smaller and before is not None:
                self.cuts[key] = before
        self._last, self._place = compilation()[1], key[1] + 1

    @property
    def _next_key(self) -> tuple[Any, int]:
        frame, last = compilation()
        return frame, self._place if last is self._last else 0

    def close_a_smaller(self, graph: fx.Graph, inputs: Sequence[Any]) -> bool:
        """Close the sizes of a captured graph for the first batch smaller than its first. Return whether. (Rule 2)"""
        key = self._next_key
        elements = sum(hinted(each.numel()) for each in inputs if isinstance(each, Tensor))
        if not _opened(graph):
            self.closed[key] = elements
            return False
        is_marked = any(getattr(each, "_dynamo_dynamic_indices", None) for each in inputs)  # by `mark_dynamic`
        if elements >= self.closed.pop(key, 0) or is_marked:
            return False
        for each in inputs:
            close(each)
        return True

    def warn_where_none_of(self, compiled: nn.Module, model: nn.Module, *, is_set_aside: bool) -> None:
        """Warn after the first training forward of a compiled `model` if Dynamo captured no graph of it, or of parts.

        is_set_aside  whether the user knows of parts that run uncompiled, and has set bytes aside for them
        """

        def look(module: nn.Module, inputs: Any, results: Any) -> None:
            learning = [tensor for _, tensor in output_tensors(results) if tensor.requires_grad]
            if not (module.training and learning):
                return
            looking.remove()
            self.looks = False
            told = "" if self._last is not None else f"{_NO_GRAPH}. {_why_skipped(model.modules())}."
            if not told and not is_set_aside:
                told = self._told_of_parts(model, parameters_reached(model, learning))
            if told:
                warn(told)

        looking, self.looks = compiled.register_forward_hook(look), True

    def note_parameters(self, inputs: Iterable[Any]) -> None:
        self.parameters.update((each, None) for each in inputs if isinstance(each, nn.Parameter))

    def note_batch(self, inputs: Iterable[Any], state: Collection[int]) -> None:
        """Note the bytes of the batch, which the first graph is given. `state` has ids of parameters and buffers.

        DistributedDataParallel has parts compiled one after another, on fakes with ids of their own.
        """
        frame, compiled = compilation()
        if compiled is not self._last and (self._first is None or frame == self._first):
            self._first = frame
            batch = [each for each in inputs if isinstance(each, Tensor) and id(each) not in state]
            sizes = {id(each.untyped_storage()): each.nbytes for each in batch if not each.requires_grad}
            self.batch_bytes = sum(map(hinted, sizes.values()))

    def _told_of_parts(self, model: nn.Module, reached: Iterable[str]) -> str:
        """Say which of the parameters that a backward reaches no graph was given; nothing where all were."""
        compiled = {id(parameter) for parameter in self.parameters}
        named = dict(model.named_parameters())
        outside = sorted(name for name in reached if id(named[name]) not in compiled)
        if not outside:
            return ""
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in outside]
        return (
            f"Dynamo left parts of this forward out of its graphs, with {first_few(outside)}. They run uncompiled: "
            f"what they save for backward is in no plan, and may exceed the budget. {_why_skipped(owners)}. "
            "Or set bytes aside with `outside=`."
        )

    def warn_of_others(self, peak_bytes: int, asked: CompileArguments, device: torch.device) -> None:
        """Warn once if other compiled models keep so much that a run of `peak_bytes` exceeds its budget. (Rule 3)"""
        there = sum(run.kept_bytes for run in list(_ALIVE) if run.step is not self and run.device == device)
        more = max(there - asked.outside_bytes, 0)
        if self._has_met or peak_bytes + more <= asked.budget_bytes:
            return
        self._has_met = True
        warn(
            f"models that were compiled apart have saved {gib(there)} for backward as this one runs. The budget of "
            f"{gib(asked.budget_bytes)} counts nothing of other models: the peak may be {gib(peak_bytes + more)}, and "
            "more with their weights and gradients. Compile one module that runs all of them, or set what the others "
            "need aside with `outside=`.",
        )

    @property
    def kept_bytes(self) -> int:
        """The bytes that all runs that are alive have saved."""
        return sum(run.kept_bytes for run in self.runs)


class Promise:
    """A graph's promise, with which each of its runs is compared.

    key  of the graph in its step; the promise is made while it is compiled, before the compiler changes it
    """

    def __init__(
        self,
        key: Any,
        step: CompiledStep,
        asked: CompileArguments,
        outside: Outside,
        graph: fx.Graph,
        inputs: Sequence[Any],
    ):
        self.key, self.step, self.outside = key, step, outside
        self.asked = dataclasses.replace(asked, model=None, optimizer=None)  # which Dynamo would keep for good
        self.place, self.opened = place_of(graph), _opened(graph)
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        self.device = max(tensors, key=lambda each: hinted(each.numel())).device if tensors else torch.device("cpu")
        self.planned = sum(hinted(inputs[i].numel()) for i in self.opened)
        self.largest = self.planned  # that a warning was given for

    def kept_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled graph with a comparison before each run; itself where it has nothing to save."""
        cut = self.step.cuts.get(self.key)
        return run if cut is None else functools.partial(self._run, run, cut)

    def _run(self, run: Callable[..., Any], cut: Cut, *inputs: Any) -> Any:
        if self.step.looks:
            self.step.note_parameters(inputs)
        if self.opened:
            self._compare_sizes(cut, inputs)
        if not torch.is_grad_enabled() or saved_tensors_are_hooked():
            return run(*inputs)
        self._compare_runs(cut)
        self._compare_gradients(cut, inputs)
        results = run(*inputs)
        self._note(cut, results)
        return results

    def _compare_runs(self, cut: Cut) -> None:
        """Refuse a run that exceeds the budget beside others that are alive. (Rule 1)"""
        peak = self.outside.during_graphs + self.step.kept_bytes + cut.halves.peak
        if len(_ALIVE) > len(self.step.runs):
            self.step.warn_of_others(peak, self.asked, self.device)
        if self.step.runs and peak > self.asked.budget_bytes:
            count = 1 + sum(run.key == self.key for run in self.step.runs)
            raise UsageError(
                f"a step runs the compiled graph at {self.place} {count} times or more before the first "
                f"backward, and the plan is for `uses={self.asked.uses}`: the peak would be {gib(peak)} or more, and "
                f"the budget is {gib(self.asked.budget_bytes)}. Compile with `uses=` as often as a step runs it."
            )

    def _compare_gradients(self, cut: Cut, inputs: Sequence[Any]) -> None:
        """Warn once of gradients that are there as a forward begins, and that no plan counts. (Rule 4)"""
        if self.outside.are_kept or self.step.has_gradients:
            return
        alive = sum(p.grad.nbytes for p in inputs if isinstance(p, nn.Parameter) and p.grad is not None)
        others = sum(other.kept_bytes for key, other in self.step.cuts.items() if key != self.key)
        in_graphs = cut.halves.peak + (self.asked.uses - 1) * cut.halves.kept
        budget, peak = self.asked.budget_bytes, self.outside.during_graphs + others + in_graphs + alive
        if alive and peak > budget:
            self.step.has_gradients = True
            warn(
                f"{gib(alive)} of gradients are there as a forward begins, and the budget is for a loop without: the "
                f"peak may be {gib(peak)}, and the budget is {gib(budget)}. Set gradients to None before the forward "
                "(optimizer.zero_grad(set_to_none=True)), or compile with `accumulation=2`.",
            )

    def _note(self, cut: Cut, results: Iterable[Any]) -> None:
        """Note that a run is alive; its nodes of autograd say when that ends. (Rule 1)

        Graphs that DistributedDataParallel cuts run on fakes while the next is compiled, which keep nothing.
        """
        run = _Run(self.key, cut.halves.kept, self.step, self.device)
        made = (each for each in results if isinstance(each, Tensor) and not isinstance(each, FakeTensor))
        nodes = {each.grad_fn for each in made if each.grad_fn is not None}
        for node in nodes:  # it is called before what is saved is taken apart
            node.register_prehook(functools.partial(self._begins, cut, run, itertools.count()))
        if nodes:
            self.step.runs.add(run)
            _ALIVE.add(run)

    def _begins(self, cut: Cut, run: _Run, before: Iterator[int], _: Any) -> None:
        """Note that a backward begins, and warn once if it is another through the same run. (Rule 3)"""
        _over(run)
        peak, budget = cut.peak_bytes + cut.halves.kept, self.asked.budget_bytes
        if next(before) and peak > budget and not self.step.is_retained:
            self.step.is_retained = True
            warn(
                f"backward runs a second time through the compiled graph at {self.place} (`retain_graph=True`): what "
                f"forward saved stays until the last one, which no plan counts. The peak may be {gib(peak)}, and the "
                f"budget is {gib(budget)}. Add the losses up and call backward once.",
            )

    def _compare_sizes(self, cut: Cut, inputs: Sequence[Any]) -> None:
        """Warn of a batch larger than planned, or refuse it. (Rule 2)"""
        found, planned = sum(inputs[i].numel() for i in self.opened), self.planned
        if found <= self.largest:
            return
        times = found / planned
        if self._peak_of(cut, times**2) <= self.asked.budget_bytes:
            return
        text = (
            f"this batch has {found} elements, the compiled step was planned for {planned} ({self.place}): its peak "
            f"will exceed the planned {gib(cut.peak_bytes)} and be about {gib(self._peak_of(cut, times))}; the budget "
            f"is {gib(self.asked.budget_bytes)}. Compile with `dynamic=True` and run the largest batch first, or with "
            "`dynamic=False`, which plans each size by itself."
        )
        if self.asked.on_larger == "refuse":
            raise PlanMismatch(text)
        self.largest = found
        warn(text)

    def _peak_of(self, cut: Cut, times: float) -> int:
        """Estimate the peak of a batch `times` as large. Gradients of parameters do not grow; backward makes them."""
        fixed, backward = self.outside.during_graphs, [*cut.halves.calls.values()] or [cut.halves.backward]
        own = max(self.outside.gradients - self.outside.others, 0)  # of what this graph is given
        made = np.linspace(0, 0 if self.outside.are_kept else own, len(backward) + 1)[:-1]
        grown = [times * max(size - of, 0) + of for size, of in zip(backward, made, strict=True)]
        beside = max(cut.peak_bytes - fixed - cut.halves.peak, 0)
        return int(fixed + times * beside + max(times * cut.halves.forward, *grown))


def _why_skipped(modules: Iterable[nn.Module]) -> str:
    """Return the words on why Dynamo may have left out code of `modules`, and what to do."""
    there = list(modules)
    kinds = [kind for kind in _RECURRENT if any(isinstance(each, kind) for each in there)]
    if not kinds:
        return _SKIPPED_FUNCTION
    names = first_few([f"nn.{kind.__name__}" for kind in kinds])
    return (
        f"Dynamo captures no {names}, nor what follows in a forward that calls one: compile the modules around it by "
        "themselves, or give the budget to the uncompiled step (`remat.plan` and `remat.apply`)"
    )


def _opened(graph: fx.Graph) -> tuple[int, ...]:
    """Return the positions of the inputs of a captured graph that have open sizes."""
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    return tuple(
        i
        for i, value in enumerate(values)
        if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
    )


def _over(run: _Run) -> None:
    run.step.runs.discard(run)
    _ALIVE.discard(run)


def place_of(graph: fx.Graph) -> str:
    """Return the line of the model's code that the last operator of a captured graph comes from."""
    traces = [node.meta["stack_trace"] for node in graph.nodes if node.meta.get("stack_trace")]
    lines = [line.strip() for line in traces[-1].splitlines() if line.strip().startswith("File ")] if traces else []
    return lines[-1].removeprefix("File ") if lines else "a place that is not known"
