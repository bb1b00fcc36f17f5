"""The forward of a model whose plan has regions of nodes: traced by Dynamo, and run with the plan's regions.

Under `torch.compile` the outer trace stops at a training forward, which then runs as planned, uncompiled: a compiler
would drop its regions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from remat._torch.dynamo import frames_traced, try_again
from remat.capture.attention_masks import Masks
from remat.capture.circumstances import given_to
from remat.capture.dynamo import GraphCalls, SizesNotOpen, named_tensors, without_cache
from remat.capture.eager_answers import Answers
from remat.capture.model_state import ModelState
from remat.capture.settling import UnsettledForward, install_recording_hooks
from remat.chunking.chunk import chunked_losses, chunked_rows
from remat.errors import CaptureError, is_out_of_memory
from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.plan import Plan
from remat.execution.eager.fitting_graphs import FittingGraphs
from remat.execution.eager.graph_as_planned import GraphAsPlanned
from remat.execution.eager.offloading import Offloader
from remat.execution.eager.region_tape import Counts
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.execution.eager.running_forward import RunningForward
from remat.execution.early_forwards import EarlyForwards, complete, rehearse
from remat.execution.forwards import Apart, CurrentForward, ModuleForward, holds, modules_of
from remat.execution.placing import Placer
from remat.execution.planned_forward import NOT_COMPILED, PlannedForward
from remat.execution.reports import OnLarger
from remat.execution.surroundings import Surroundings
from remat.fusion.formed import formed, groups_in
from remat.host.copies import Copies
from remat.host.weights import HostWeights, weights_on_host
from remat.units import gib
from remat.workload.batches import in_own_containers
from remat.workload.replaced_forward import own_forwards
from remat.workload.workload import trainable

MANY_SURROUNDINGS = 4

UNPACKED_BATCH = (
    "each row of this batch holds one sequence, and the plan is for packed rows: attention takes an explicit mask, "
    "and none without the plan. This is correct and needs no more memory, but losses are not bitwise those without the "
    "plan. Where attention has dropout, other random numbers are drawn from this batch on. For bitwise losses leave "
    "such batches out."
)
UNPADDED_BATCH = (
    "this batch has no padding, and the plan is for batches with padding: attention takes an explicit mask, which a "
    "model may leave out without the plan. This is correct and needs no more memory, but losses may not be bitwise "
    "those without the plan. Where attention has dropout, other random numbers may be drawn from this batch on."
)


class _FirstGradient:
    """A hook on a parameter of a planned model; it waits for the first gradient."""

    __torch_unserializable__ = True

    def __init__(self, planned: PlannedGraphs):
        self._planned = weakref.ref(planned)

    def __call__(self, gradient: torch.Tensor) -> None:
        if (planned := self._planned()) is not None:
            planned.gradient_comes()


class PlannedGraphs(PlannedForward):
    """The forward of a model, run as graphs with the regions of its plan.

    calls    runs each graph with its regions
    copies   makes copies between device and host; None: chosen for the device at hand
    main     the one that this is a shorter one of, or itself
    apart    how often each forward of a step was another graph; of `main`
    """

    copies: Copies | None = None
    _shorter: Sequence[PlannedGraphs] = ()
    _first_gradient: RemovableHandle | None = None
    _has_begun = False  # whether a forward has run under the plan

    def __init__(self, model: nn.Module, plan: Plan, on_larger: OnLarger, observe: bool, verify_first_step: bool):
        super().__init__(model, plan, on_larger, observe, verify_first_step)
        self._modules = modules_of(self, model)
        self.main = self
        self._shorter = [type(self)(model, each, on_larger, observe, verify_first_step) for each in plan.shorter]
        self._prepare()

    def _prepare(self) -> None:
        super()._prepare()
        self._placer, self._early = Placer(self.plan), EarlyForwards(self.plan)
        self.apart = defaultdict[int, Apart](Apart)
        self._surroundings = Surroundings(self.model)
        self._judge = GraphAsPlanned(
            self.model, self.plan, self._placer, self._early, self._surroundings, self._as_planned
        )
        self._weights: HostWeights | None = None  # which of them are on the host is seen at the first forward
        self.calls = self._rewritten(observe=self.observe)
        self._fitting = FittingGraphs(self.model, self.plan, self._judge, self._placer, self._early, self.reports)
        # By the first forward with the same trace, and its surroundings.
        self._graphs: dict[tuple[int, Hashable], GraphCalls] = {}
        self._running: RunningForward | None = None  # the last one, which may have returned
        for each in self._shorter:
            each.main, each.forwards.counted, each.loop.outputs = self, self.forwards.counted, self.loop.outputs
            each.reports.made = self.reports.made

    def _rewritten(self, **options: Any) -> RewrittenCalls:
        placer = Placer(self.plan)
        offloads: dict[str, Any] = {"offloads": self.plan.offloads, "find_offloads": placer.offloads}
        offloads |= {"copies": self.copies, "watch": self.region_watch}
        found = RewrittenCalls(self.plan.regions, find=placer.regions, **offloads, **options)
        found.bring(self._weights)
        return found

    @property
    def shorter(self) -> Sequence[PlannedGraphs]:
        return self._shorter

    @property
    def counts(self) -> Counts:
        return self.calls.counts

    @property
    def offloader(self) -> Offloader | None:
        return self.calls.offloader

    def watch(
        self,
        *,
        observe: bool,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Counts:
        watch = self.chunk_watch
        watch.unseen = recompute_context or contextlib.nullcontext
        watch.on_sums = watch.on_rows = self.group_watch.on_run = None
        self.calls = self._rewritten(observe=observe, recompute_context=recompute_context)
        return self.calls.counts

    # Installing

    def install(self) -> None:
        """Install the forwards of modules that the step calls in place of the model."""
        for module in self._modules:
            module.replaced.put(module)
        parameters = trainable(self.model)
        if parameters and not is_lazy(parameter := parameters[len(parameters) // 2]):  # at the ends some are shared
            self._first_gradient = parameter.register_hook(_FirstGradient(self))

    def take_out(self) -> None:
        for module in self._modules:
            module.replaced.take_out()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        """Remove the hook that waits for the first gradient."""
        if self._first_gradient is not None:
            self._first_gradient.remove()
            self._first_gradient = None

    def gradient_comes(self) -> None:
        """Report a first gradient that comes before a forward has run under the plan."""
        self._stop_waiting()
        if self._has_begun or "eval" in self.reports.made:
            return
        called = ", ".join(dict.fromkeys(forward.module or "the model itself" for forward in self.forwards.planned))
        self.reports.warn(
            "modules",
            "a backward reaches the parameters of this model, and no forward has run under the plan, which is for "
            f"calls of {called}: modules that are called by themselves run without it, and the budget of "
            f"{gib(self.plan.budget_bytes)} is not kept. Call what was planned, or make a plan with a workload whose "
            "`step` calls the modules as training does.",
        )

    # Which forward runs, and how

    def run(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and at.module.training):
            for each in (at, *(shorter._root for shorter in self.shorter)):
                each.settled = False  # some models change themselves for evaluation, and back in the next forward
            for shorter in self.shorter:
                shorter.second_step.interrupted()
            return self._run_unplanned(at, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, at, args, kwargs)
        if not _learns(at.module, args, kwargs):
            return self._run_alone(at, args, kwargs)
        if inspect.isgeneratorfunction(at.original) and not self.forwards.are_at(at.path):
            return at.original(*args, **kwargs)  # its modules are called, as planned, once this has returned
        if (chosen := self._for_batch(at, args, kwargs)) is not self:
            return chosen.run(chosen._root, args, kwargs)
        self.main._has_begun = True
        now = self.forwards.now(at.path)
        graphs = self._graphs_for(at, now)
        self._as_planned.require_autocast(now.forward.autocast)
        self._as_planned.compare_batch(now.forward, named_tensors(at.original, args, kwargs))
        self.loop.forward_begins(now)
        return self._run_verified(at, now, graphs, args, kwargs)

    def _for_batch(self, at: ModuleForward, args: Any, kwargs: Any) -> PlannedGraphs:
        """Return the forward under the first plan that holds the batch, this one if none does."""
        if not self.shorter:
            return self
        given = given_to(at.original, args, kwargs)
        fits = (each for each in self.shorter if holds(each.forwards.planned[0].given, given))
        chosen = next(fits, self)
        for each in (self, *self.shorter):
            if each is not chosen:
                each.second_step.interrupted()
        return chosen

    def _run_verified(self, at: ModuleForward, now: CurrentForward, graphs: GraphCalls, args: Any, kwargs: Any) -> Any:
        """Run a forward, verified as in `FirstStep.run`; an early one leaves the verification to a later one."""
        run = functools.partial(self._run_open, at, now, graphs, args, kwargs)
        untouched = functools.partial(self._untouched, at)
        result = self.first_step.run(now.number, run, untouched, (args, kwargs), lambda: self._ran.has_other_mask)
        if self._ran.is_early:
            self.first_step.expect(now.number)
        return result

    @property
    def _ran(self) -> RunningForward:
        assert self._running is not None
        return self._running

    def _run_open(self, at: ModuleForward, now: CurrentForward, graphs: GraphCalls, args: Any, kwargs: Any) -> Any:
        """Run a forward with as many sizes and numbers left open as possible."""
        while True:
            try:
                return self._run(RunningForward(at, now, args, kwargs, graphs))
            except (SizesNotOpen, CaptureError):
                if not graphs.opens_any or graphs.has_begun:
                    self._raise_own_error(at, args, kwargs)
                    raise
            graphs = self._graphs_for(at, now, less_open=graphs)

    def _run(self, running: RunningForward) -> Any:
        known, traced, graphs = len(self._fitting), frames_traced(), running.graphs
        unsettled: UnsettledForward | None = None
        self._running, graphs.first = running, running.now.forward.first
        if self._early.may_complete and not (running.at.settled or running.at.fits):
            running.before = ModelState(self.model, named=False)
        given = running.args, running.kwargs
        try:
            with without_cache(self.model), self._weights_here(), self._own_forwards():
                result = graphs(*running.args, **running.kwargs)
        except UnsettledForward as error:
            unsettled = error
        except Exception as error:
            if frames_traced() > traced:
                graphs.forget(error)
            if running.mismatch is None or not is_out_of_memory(error):
                raise
            raise running.mismatch from error
        finally:
            running.let_go()
        running.at.settled = True
        if frames_traced() > traced:
            gc.collect()  # Dynamo leaves cycles behind, which hold activations
        if unsettled is not None:
            return self._run_completed(unsettled, running, *given)
        if running.mismatch is None and not running.is_early:
            running.mismatch = self._judge.of_calls(running)
        if running.mismatch is not None and not self._takes_another_way(running):
            self._trace_anew(graphs)  # hooks of modules are not guarded: the trace would be taken again without them
            raise running.mismatch
        if running.is_early and not running.at.is_anew and frames_traced() == traced:
            running.at.is_anew = True  # once: its graphs stay, and are not the planned ones as long as they do
            self._trace_anew(graphs)
        if running.mismatch is None and not running.is_early:
            self.main.apart[running.now.number].note_planned()
        if len(self._fitting) > known:
            self._as_planned.require_dtypes()
            self._as_planned.compare_trainable()
            self._fitting.report_new(running)
        if running.is_unpacked:
            self.reports.warn("unpacked", UNPACKED_BATCH)
        elif running.has_other_mask:
            self.reports.warn("unpadded", UNPADDED_BATCH)
        self.loop.returned(result, given)
        self.forwards.returned(running.now, result)
        return result

    def _trace_anew(self, graphs: GraphCalls) -> None:
        """Trace the next forward anew, also code that Dynamo gave up because of what a first forward alone does."""
        graphs.forget()
        self._forget_fitting()
        try_again(None, (getattr(type(module), "forward", None) for module in self.model.modules()))

    def _takes_another_way(self, running: RunningForward) -> bool:
        """Return whether a forward of another graph is one now and then, by a number that the model changes; report it.

        It ran as traced, without regions. Nothing else may be known to differ, and most forwards have to be as planned.
        """
        is_able = self._early.carries_numbers and self._weights is None and not self.plan.offloads
        is_able = is_able and bool(running.unexplained) and self._on_larger != "refuse"
        if not is_able or not self.main.apart[running.now.number].takes_one_more():
            return False
        self.reports.warn("apart", self._early.warning_apart(running.unexplained))
        return True

    def _run_completed(self, unsettled: UnsettledForward, running: RunningForward, args: Any, kwargs: Any) -> Any:
        """Run a forward again, after the model's own forward has had the chance to complete the model."""
        assert running.before is not None
        try:
            complete(running.before, functools.partial(self._untouched_on_copies, running.at, args, kwargs))
        finally:
            if not running.at.fits:  # later, its guards see changes
                running.graphs.forget(unsettled)
            unsettled.with_traceback(None)  # its frames hold activations
        running = dataclasses.replace(running, args=args, kwargs=kwargs, before=None, excess="")
        if self._weights is None:
            self._rehearse(running)
        return self._run(running)

    def _rehearse(self, running: RunningForward) -> None:
        """Trace a forward once, so that Dynamo gives up what it will; an error comes again when it runs."""
        args, kwargs = in_own_containers((running.args, running.kwargs))
        self._running, running.is_rehearsed = running, True
        try:
            with without_cache(self.model), self._own_forwards():
                rehearse(self.model, functools.partial(running.graphs, *args, **kwargs))
        except Exception as error:
            running.graphs.forget(error)
        running.is_rehearsed = False
        gc.collect()  # as behind every trace

    # The model without its plan

    def _run_alone(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run a forward without the plan, in the model and in its modules."""
        original = at.original
        if not self._modules:  # Dynamo breaks its graph at a context of ours
            return original(*args, **kwargs)
        with own_forwards(module.replaced for module in self._modules):
            return original(*args, **kwargs)

    def _untouched(self, at: ModuleForward, *args: Any, **kwargs: Any) -> Any:
        """Run a forward without the plan, also where it calls the model again, and uncompiled, as under the plan."""
        with self._own_forwards(), torch.compiler.set_stance("force_eager"):
            return at.original(*args, **kwargs)

    def _untouched_on_copies(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run `_untouched` on copies of the containers among its arguments."""
        args, kwargs = in_own_containers((args, kwargs))
        return self._untouched(at, *args, **kwargs)

    def _raise_own_error(self, at: ModuleForward, args: Any, kwargs: Any) -> None:
        """Raise the error that the forward also raises without the plan, if it does."""
        before = ModelState(self.model, named=False)
        try:
            self._untouched_on_copies(at, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise error from None
        finally:
            before.put_back()

    def _own_forwards(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model and its modules have their own forwards."""
        return own_forwards(at.replaced for at in (self._root, *self._modules))

    # The graphs of a forward

    def _graphs_for(self, at: ModuleForward, now: CurrentForward, *, less_open: GraphCalls | None = None) -> GraphCalls:
        """Return the graphs that a forward is traced to.

        less_open  graph calls with open sizes or numbers, as which the forward cannot be traced
        """
        key = self.forwards.traced_with(now), self._surroundings.now()
        known, may_break = self._graphs.get(key), less_open is not None and less_open.may_break
        if known is not None and less_open is None:
            # A forward that breaks for given sizes too is not traced for each: it may break with open ones.
            may_break = known.has_broken and not (known.opens_any or known.may_break)
            if not may_break:
                return known
        if key not in self._graphs:
            if len(self._graphs) >= MANY_SURROUNDINGS * len(self.forwards.planned):
                self._start_over()
            self._weights = weights_on_host(self.model)
            self.calls.bring(self._weights)
            self._as_planned.require_on_host(self._weights)
            self._as_planned.require_regions_run(self.main)
            install_recording_hooks(self.model, self.plan.about.get("recording_models", ()))
            if self._early.is_any:  # they come again with new traces
                at.settled = at.fits = False
        traced = self.plan.about.get("traced_branches")
        self._graphs[key] = GraphCalls(
            at.original,
            execute_call=self._execute_call,
            # A forward that is one graph can be traced again as long as nothing of it has run.
            fits=self._placer.fits_some if self.forwards.are_single_graphs and less_open is None else None,
            answers=None if traced is None else Answers(traced, self.plan.about.get("opaque_functions", ())),
            planned=Masks(**now.forward.masks),
            change=None if form_of(self.plan.about) == CAPTURED_FORM else self._formed,
            under=at.path,
            opens_numbers=self._early.carries_numbers and (less_open is None or less_open.opens_sizes),
            may_break=may_break,
        )
        return self._graphs[key]

    def _start_over(self) -> None:
        """Let go of all traces, since what is around the forwards changes all the time."""
        self._graphs.clear()
        self._forget_fitting()
        self._surroundings.forget()
        self.reports.warn(
            "surroundings",
            "what is around this model's forwards (kernels of attention that are on, methods of its classes, hooks on "
            f"all modules) has changed in more than {MANY_SURROUNDINGS} ways, and each is traced by itself, which "
            "takes seconds. Set it once, before training.",
        )

    def _forget_fitting(self) -> None:
        """Let go of the graphs that fit, rewritten ones too."""
        self._fitting.forget()
        self.calls.let_go()

    def _formed(self, call: int, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite a captured graph into the plan's form; an early graph stays unchanged."""
        if self._early.has(graph_module):
            return graph_module
        seen_first = self.forwards.call_as_planned(self._ran.now, call)
        found = formed(graph_module, form_of(self.plan.about), seen_first)
        for head in chunked_losses(found):
            head.watch = self.chunk_watch
        for rows in chunked_rows(found):
            rows.watch = self.chunk_watch
        for group in groups_in(found):
            group.watch = self.group_watch
        return found

    def _execute_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        return self._fitting.execute(self._ran, self.calls, call, graph_module, args)

    def _weights_here(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which graphs run while some weights of the model are on the host."""
        return contextlib.nullcontext() if self._weights is None else self._weights.planned()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_modules": self._modules, "main": self.main, "_shorter": self._shorter}
        return {**super().__getstate__(), **own}


def _learns(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether anything gets a gradient; nothing does with adapters disabled (`disable_adapter` of peft)."""
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return any(tensor.requires_grad for tensor in itertools.chain(module.parameters(), given))


@torch.compiler.disable(reason=f"{NOT_COMPILED}.")
def _uncompiled(planned: PlannedGraphs, at: ModuleForward, args: Any, kwargs: Any) -> Any:
    """Run a training forward that an outer trace has come to."""
    planned.reports.warn("compiler", f"{NOT_COMPILED}.")
    return planned.run(at, args, kwargs)
