"""Apply: install a plan in a model, in place.

The model keeps its class, parameters and `state_dict`. Its `forward` becomes a `PlannedForward`: a training forward is
traced by Dynamo and run with the plan's regions, everything else (evaluation, `no_grad`, `generate`) runs the
original forward. A plan that does not belong to the model raises `PlanMismatch` at the first training forward: a plan
that silently does nothing would be worse than an error.

Under `torch.compile` the outer trace stops at a training forward, which then runs as planned, uncompiled: a compiler
would drop its regions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from remat._torch.dynamo import ddp_around, frames_traced, try_again
from remat._torch.training import function_modes, own_saved_tensor_hook
from remat.capture.attention_masks import PADDED_BATCH, Masks, takes_mask
from remat.capture.circumstances import differences, given_to, hooked, state_of, versions, without_shapes
from remat.capture.dynamo import (
    GraphCalls,
    SizesNotOpen,
    element_counts,
    named_tensors,
    without_cache,
)
from remat.capture.eager_answers import Answers
from remat.capture.model_state import ModelState
from remat.capture.settling import UnsettledForward, install_recording_hooks
from remat.chunking.chunk import chunked_losses, chunked_rows
from remat.chunking.chunked_loss import Watch
from remat.chunking.chunked_rows import RowsWatch
from remat.errors import CaptureError, PlanMismatch, is_out_of_memory
from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.forwards import DIFFERENTIATES, EVALUATES, LOOKS, PASSES
from remat.evaluation.graph import FORWARD_ALONE, LIBRARY_WORKSPACES, OPTIMIZER_STATE
from remat.evaluation.identity import Fit
from remat.evaluation.plan import TOKEN_CAP, Plan
from remat.execution.eager.rewrite import Counts, RegionWatch
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.execution.early_forwards import EarlyForwards, complete
from remat.execution.first_step import FirstStep, in_own_containers
from remat.execution.forwards import CurrentForward, ModuleForward, StepForwards, holds, modules_of
from remat.execution.optimizer_as_planned import unlike_planned
from remat.execution.placing import Placer
from remat.execution.second_step import SMALL_CHANGE, SecondStep
from remat.execution.surroundings import Surroundings
from remat.fusion.formed import formed, groups_in
from remat.fusion.fused_group import GroupWatch
from remat.host.copies import Copies
from remat.host.weights import HostWeights, weights_on_host
from remat.units import first_few, gib
from remat.workload.held_outputs import LastOutputs
from remat.workload.replaced_forward import UnderPlan, modules_under_plans, own_forwards
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import trainable

OnLarger = Literal["warn", "refuse"]

MANY_TRACES, MANY_SURROUNDINGS = 16, 4
MUCH_LARGER = 1.5  # of a batch: told again

# Attributes in copies and pickles of a planned forward.
_COPIED_ATTRIBUTES = (
    "model",
    "plan",
    "on_larger",
    "observe",
    "verify_first_step",
    "replaced",
    "_root",
    "_modules",
    "main",
    "shorter",
)

_NOT_COMPILED = (
    "a planned model runs uncompiled, within its budget: torch.compile would drop the plan's regions. For a compiled "
    "step within a budget leave the plan out and use remat.compile(model, budget=...)"
)


OTHER_MODEL = 0.02  # of the planned peak: what makes that much more than planned is refused, and less is told


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


def _largest_of(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(f"`{name}` {gib(sizes[name])}" for name in largest[:3]) + (", ..." if largest[3:] else "")


class _FirstGradient:
    """A hook on a parameter of a planned model; it waits for the first gradient."""

    __torch_unserializable__ = True

    def __init__(self, planned: PlannedForward):
        self._planned = weakref.ref(planned)

    def __call__(self, gradient: torch.Tensor) -> None:
        if (planned := self._planned()) is not None:
            planned.let_go_of_gradients()
            if not planned.has_begun:
                planned.warn_of_modules()


class PlannedForward(UnderPlan):
    """The forward of a model that has a plan.

    copies   makes copies between device and host; None: chosen for the device at hand
    shorter  forwards of the same model under the plan's plans for shorter batches
    main     the one that this is a shorter one of, or itself
    has_begun  whether a forward has run under the plan
    """

    copies: Copies | None = None
    has_begun = False
    _first_gradient: RemovableHandle | None = None
    _largest = 0.0  # elements of the largest batch that a warning told of

    def __init__(self, model: nn.Module, plan: Plan, on_larger: OnLarger, observe: bool, verify_first_step: bool):
        self.model = model
        self.plan = plan
        self.on_larger = on_larger
        self.observe = observe
        self.verify_first_step = verify_first_step
        self.replaced = model.__dict__.get("forward")
        self._root, self._modules = ModuleForward(self, "", model), modules_of(self, model)
        self.main = self
        self.shorter = [type(self)(model, each, on_larger, observe, verify_first_step) for each in plan.shorter]
        self._prepare()

    def install(self) -> None:
        """Install the forwards of modules that the step calls in place of the model."""
        for module in self._modules:
            module.replaced.put(module)
        parameters = trainable(self.model)
        if parameters and not is_lazy(parameter := parameters[len(parameters) // 2]):  # at the ends some are shared
            self._first_gradient = parameter.register_hook(_FirstGradient(self))

    def take_out(self) -> None:
        """Undo `install`."""
        for module in self._modules:
            module.replaced.take_out()
        self.let_go_of_gradients()

    def let_go_of_gradients(self) -> None:
        """Remove the hook that waits for the first gradient."""
        if self._first_gradient is not None:
            self._first_gradient.remove()
            self._first_gradient = None

    def _prepare(self) -> None:
        self._placer = Placer(self.plan)
        self._early = EarlyForwards(self.plan)
        self._is_early = False  # whether the forward that is running is one of them
        self.rows_watch, self.group_watch = RowsWatch(), GroupWatch()
        self._begin_verifying()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # of the forward that is running
        self._weights: HostWeights | None = None  # which of them are on the host is seen at the first forward
        self.calls = self._rewritten(observe=self.observe)
        self._fitting: dict[tuple[int, int], fx.GraphModule] = {}  # by call and id; kept, so that an id stays its own
        self._warned: set[str] = set()
        self._sizes: set[tuple[int, ...]] = set()  # of batches that were traced
        self._is_first_forward = True
        self._last_outputs = LastOutputs()
        self._mismatch: PlanMismatch | None = None
        self._more: str = ""  # the excess of a graph that fits over the planned one
        self._before: ModelState | None = None  # the forward that is running
        self._count_forwards()
        self._surroundings = Surroundings(self.model)
        # By the first forward with the same trace, and its surroundings.
        self._graphs: dict[tuple[int, Hashable], GraphCalls] = {}
        self._running: GraphCalls | None = None  # the one whose forward is on
        for each in self.shorter:
            each.main, each.forwards.counted, each._last_outputs = self, self.forwards.counted, self._last_outputs
            each._warned = self._warned

    def _begin_verifying(self) -> None:
        self.head_watch, self.region_watch = Watch(), RegionWatch()
        is_on = self.verify_first_step
        self.first_step = FirstStep(self.model, self.plan, self.region_watch, self.head_watch, is_on=is_on)
        self.second_step = SecondStep(self.model, self.plan, is_on=is_on)

    def _count_forwards(self) -> None:
        self.forwards, self._at = StepForwards(self.plan), self._root
        self.forwards.counted.notify(weakref.WeakMethod(self._note_kept))
        self._now = CurrentForward(
            0, self.forwards.planned[0], begins=True, repeats=False
        )  # the forward that is running

    def _rewritten(self, **options: Any) -> RewrittenCalls:
        placer = self._placer
        offloads: dict[str, Any] = {"offloads": self.plan.offloads, "find_offloads": placer.offloads}
        offloads |= {"copies": self.copies, "watch": self.region_watch}
        found = RewrittenCalls(self.plan.regions, find=placer.regions, **offloads, **options)
        found.bring(self._weights)
        return found

    @property
    def original(self) -> Any:
        """The forward without the plan: of the model, or of the module of it that is called."""
        return self._at.original

    @property
    def __signature__(self) -> inspect.Signature:
        return self._root.__signature__

    @property
    def __func__(self) -> Callable[..., Any]:
        return self._root.__func__

    @property
    def __code__(self) -> types.CodeType:  # which torch.export reads
        code: types.CodeType = self._root.original.__code__
        return code

    @contextlib.contextmanager
    def called_at(self, at: ModuleForward) -> Iterator[None]:
        """Treat calls as forwards of the module `at` while the context is open."""
        self._at = at
        try:
            yield
        finally:
            self._at = self._root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._at.module.training):
            for each in (self._at, *(shorter._root for shorter in self.shorter)):
                each.settled = False  # some models change themselves for evaluation, and back in the next forward
            return self._unplanned(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, args, kwargs)
        if not self._learns(args, kwargs):
            return self._alone(*args, **kwargs)
        if inspect.isgeneratorfunction(self.original) and not self.forwards.are_at(self._at.path):
            return self.original(*args, **kwargs)  # its modules are called, as planned, once this has returned
        if (chosen := self._for_batch(args, kwargs)) is not self:
            return chosen(*args, **kwargs)
        self.main.has_begun = True
        self._now = self.forwards.now(self._at.path)
        graphs = self._current_graphs()
        self._compare_autocast()
        self._compare_batch(args, kwargs)
        self._compare_loop()
        run = functools.partial(self._run_traced, graphs, args, kwargs)
        return self._verified(run, args, kwargs)

    def _for_batch(self, args: Any, kwargs: Any) -> PlannedForward:
        """Return the forward under the first plan that holds the batch, this one if none does."""
        if not self.shorter:
            return self
        given = given_to(self.original, args, kwargs)
        fits = (each for each in self.shorter if holds(each.forwards.planned[0].given, given))
        chosen = next(fits, self)
        for each in (self, *self.shorter):
            if each is not chosen:
                each.second_step.interrupted()
        return chosen

    def _verified(self, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run `run`, verified as in `FirstStep.run`; an early forward leaves the verification to a later one."""
        given = args, kwargs
        result = self.first_step.run(self._now.number, run, self._untouched, given, lambda: self._masks_round)
        if self._is_early:
            self.first_step.expect(self._now.number)
        return result

    def _run_traced(self, graphs: GraphCalls, args: Any, kwargs: Any) -> Any:
        """Run the forward with as many sizes and numbers left open as possible."""
        while True:
            try:
                return self._run(graphs, args, kwargs)
            except (SizesNotOpen, CaptureError):
                if not graphs.opens_any or graphs.count:
                    self._raise_own_error(args, kwargs)
                    raise
            graphs = self._current_graphs(less_open=graphs)

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without the plan, in the model and in its modules."""
        original = self.original
        if not self._modules:  # Dynamo breaks its graph at a context of ours
            return original(*args, **kwargs)
        with own_forwards(module.replaced for module in self._modules):
            return original(*args, **kwargs)

    def _untouched(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without the plan, also where it calls the model again."""
        with self._own_forwards():
            return self.original(*args, **kwargs)

    def _untouched_on_copies(self, args: Any, kwargs: Any) -> Any:
        """Run `_untouched` on copies of the containers among its arguments."""
        args, kwargs = in_own_containers((args, kwargs))
        return self._untouched(*args, **kwargs)

    def _raise_own_error(self, args: Any, kwargs: Any) -> None:
        """Raise the error that the forward also raises without the plan, if it does."""
        before = ModelState(self.model)
        try:
            self._untouched_on_copies(args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise error from None
        finally:
            before.put_back()

    def _own_forwards(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model and its modules have their own forwards."""
        return own_forwards(at.replaced for at in (self._root, *self._modules))

    def _current_graphs(self, *, less_open: GraphCalls | None = None) -> GraphCalls:
        """Return the graphs that the current forward is traced to.

        less_open  graph calls with open sizes or numbers, as which the forward cannot be traced
        """
        key = self.forwards.traced_with(self._now), self._surroundings.now()
        if key in self._graphs and less_open is None:
            return self._graphs[key]
        if key not in self._graphs:
            if len(self._graphs) >= MANY_SURROUNDINGS * len(self.forwards.planned):
                self._start_over()
            self._find_weights()
            self._compare_model()
            self._settle()
        # A forward that is one graph can be traced again as long as nothing of it has run.
        fits = self._placer.fits_some if self.forwards.are_single_graphs and less_open is None else None
        numbers = self._early.carries_numbers and (less_open is None or less_open.opens_sizes)
        self._graphs[key] = self._traced(execute_call=self._execute_call, fits=fits, opens_numbers=numbers)
        return self._graphs[key]

    def _start_over(self) -> None:
        """Let go of all traces, since what is around the forwards changes all the time."""
        self._graphs.clear()
        self._forget_fitting()
        self._surroundings.forget()
        self._warn(
            "surroundings",
            "what is around this model's forwards (kernels of attention that are on, methods of its classes, hooks on "
            f"all modules) has changed in more than {MANY_SURROUNDINGS} ways, and each is traced by itself, which "
            "takes seconds. Set it once, before training.",
            frames=8,
        )

    def _forget_fitting(self) -> None:
        """Let go of the graphs that fit, rewritten ones too; those that still run are judged again."""
        self._fitting.clear()
        self.calls.let_go()

    def _unplanned(self, args: Any, kwargs: Any) -> Any:
        """Run the forward of a model in evaluation mode; warn if it is trained all the same."""
        for each in (self, *self.shorter):
            each.second_step.interrupted()
        if not torch.is_grad_enabled() and self.forwards.are_under_way:
            self._compare_look()
        result = self._alone(*args, **kwargs)
        known = self.plan.about.get(EVALUATES) or "eval" in self._warned
        if torch.is_grad_enabled() and not known and not torch.compiler.is_compiling():
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._warn_of_eval)
                    break
        return result

    def _weights_here(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which graphs run while some weights of the model are on the host."""
        return contextlib.nullcontext() if self._weights is None else self._weights.planned()

    def warn_of_compiler(self) -> None:
        """Warn that the model is compiled, and that its training forward is not."""
        self._warn("compiler", f"{_NOT_COMPILED}.", frames=5)

    def warn_of_modules(self) -> None:
        """Warn that a backward reaches the model's parameters, and no forward has run under the plan."""
        if "eval" in self._warned:
            return
        called = ", ".join(dict.fromkeys(forward.module or "the model itself" for forward in self.forwards.planned))
        self._warn(
            "modules",
            "a backward reaches the parameters of this model, and no forward has run under the plan, which is for "
            f"calls of {called}: modules that are called by themselves run without it, and the budget of "
            f"{gib(self.plan.budget_bytes)} is not kept. Call what was planned, or make a plan with a workload whose "
            "`step` calls the modules as training does.",
            frames=2,
        )

    def _warn_of_eval(self, gradient: torch.Tensor) -> None:
        self._warn(
            "eval",
            "a backward goes through a forward that ran without the plan, because the model is in evaluation mode "
            f"(as `from_pretrained` leaves it): call model.train() before training. The budget of "
            f"{gib(self.plan.budget_bytes)} is not kept.",
            frames=2,
        )

    def _settle(self) -> None:
        install_recording_hooks(self.model, self.plan.about.get("recording_models", ()))

    def _judge_or_leave(self, call: int) -> None:
        """Raise Unsettled in a first training forward with another graph than planned: it may change the model."""
        is_late = call > self._now.forward.first and self._before is None
        if self._at.settled or is_late or not self._early.may_complete:
            return
        self._before = self._before or ModelState(self.model)
        raise UnsettledForward("the model may not be complete before its first forward.")

    def _traced(self, **given: Any) -> GraphCalls:
        """Trace the forward under the plan's answers and masks."""
        traced = self.plan.about.get("traced_branches")
        answers = None if traced is None else Answers(traced, self.plan.about.get("opaque_functions", ()))
        change = None if form_of(self.plan.about) == CAPTURED_FORM else self._formed
        given = {"opens_numbers": self._early.carries_numbers, **given, "under": self._at.path}
        return GraphCalls(self.original, answers=answers, planned=self._planned_masks, change=change, **given)

    def _formed(self, call: int, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite a captured graph into the plan's form; an early graph stays unchanged."""
        if self._early.has(graph_module):
            return graph_module
        seen_first = self.forwards.call_as_planned(self._now, call)
        found = formed(graph_module, form_of(self.plan.about), seen_first)
        for head in chunked_losses(found):
            head.watch = self.head_watch
        for rows in chunked_rows(found):
            rows.watch = self.rows_watch
        for group in groups_in(found):
            group.watch = self.group_watch
        return found

    @property
    def _planned_masks(self) -> Masks:
        """The masks of the planned batches."""
        return Masks(**self._now.forward.masks)

    @property
    def _is_unpacked(self) -> bool:
        """Whether a batch without packed rows runs with the mask of packed ones."""
        graphs = self._running
        assert graphs is not None
        seen = graphs.seen
        return "position_ids" in graphs.elements and graphs.masks.packed and not (seen.packed or seen.padded)

    @property
    def _masks_round(self) -> bool:
        """Whether a batch runs with an explicit mask that it would do without."""
        assert self._running is not None
        return self._is_unpacked or self._running.masks.padded != self._running.seen.padded

    def _learns(self, args: Any, kwargs: Any) -> bool:
        """Return whether anything gets a gradient; nothing does with adapters disabled (`disable_adapter` of peft)."""
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return any(tensor.requires_grad for tensor in itertools.chain(self._at.module.parameters(), given))

    def _note_fit(self, call: int, graph_module: fx.GraphModule) -> None:
        self._fitting[call, id(graph_module)] = graph_module
        self._at.fits = True

    def _run(self, graphs: GraphCalls, args: Any, kwargs: Any) -> Any:
        known, traced, self._mismatch, self._is_early = len(self._fitting), frames_traced(), None, False
        unsettled: UnsettledForward | None = None
        self._running, graphs.first = graphs, self._now.forward.first
        may_complete = self._early.may_complete and not (self._at.settled or self._at.fits)
        self._before = ModelState(self.model) if may_complete else None
        self._arguments = args, kwargs
        try:
            with (
                without_cache(self.model),
                self._weights_here(),
                self._own_forwards(),
                self._early.appended_in(self.model),
            ):
                result = graphs(*args, **kwargs)
        except UnsettledForward as error:
            unsettled = error
        except Exception as error:
            if frames_traced() > traced:
                graphs.forget(error)
            if self._mismatch is None or not is_out_of_memory(error):
                raise
            raise self._mismatch from error
        finally:
            self._arguments = (), {}
        self._at.settled = True
        if frames_traced() > traced:
            gc.collect()  # Dynamo leaves cycles behind, which hold activations
        if unsettled is not None:
            return self._run_completed(unsettled, graphs, args, kwargs)
        if self._mismatch is None and not self._is_early:
            self._mismatch = self._calls_mismatch(graphs.count)
        if self._mismatch is not None:
            graphs.forget()  # hooks of modules are not guarded: the trace would be taken again without them
            self._forget_fitting()
            try_again(None, (getattr(type(module), "forward", None) for module in self.model.modules()))
            raise self._mismatch
        if len(self._fitting) > known:
            self._compare_parameters(self.model)
            self._compare_trainable()
            self._warn_of_traces()
            if self._more:
                self._not_as_planned("more", self._more, frames=9)
        if self._is_unpacked:
            self._warn("unpacked", UNPACKED_BATCH, 9)
        elif self._masks_round:
            self._warn("unpadded", UNPADDED_BATCH, 9)
        self._note_outputs(result, args, kwargs)
        self.forwards.returned(self._now, result)
        return result

    def _run_completed(self, unsettled: UnsettledForward, graphs: GraphCalls, args: Any, kwargs: Any) -> Any:
        """Run `_run`, after the model's own forward has had the chance to complete the model."""
        assert self._before is not None
        try:
            complete(self._before, functools.partial(self._untouched_on_copies, args, kwargs))
        finally:
            if not self._at.fits:  # later, its guards see changes
                graphs.forget(unsettled)
        return self._run(graphs, args, kwargs)

    def watch(
        self,
        *,
        observe: bool,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Counts:
        """Set options of the regions, without tracing again; return their new counts.

        observe  see `apply`        recompute_context  context of recomputations and chunked losses
        """
        watch = self.head_watch
        watch.unseen, watch.on_sums, watch.on_backward = recompute_context or contextlib.nullcontext, None, None
        self.rows_watch.on_run = self.group_watch.on_run = None
        self._placer = Placer(self.plan)
        self.calls = self._rewritten(observe=observe, recompute_context=recompute_context)
        return self.calls.counts

    def _execute_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        if (call, id(graph_module)) not in self._fitting:
            # A forward that is about to raise has another graph: its own error counts, so this one waits for the end.
            is_first, mismatch = self._mismatch is None, self._mismatch or self._graph_mismatch(call, graph_module)
            if mismatch is not None:
                self._judge_or_leave(call)
                if is_first and self._weights is None and self._early.has(graph_module):
                    return self._run_early(graph_module, args)
                self._mismatch = mismatch
                if self._weights is not None:
                    raise self._mismatch  # since its weights are not fetched
                return graph_module.forward(*args)
            self._note_fit(call, graph_module)
        return self.calls(call, graph_module, args)

    def _run_early(self, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        """Run the graph of an early call, and note that the forward is an early one."""
        self._is_early = True
        if text := self._early.warning:
            self._not_as_planned("early", text, frames=11)
        return graph_module.forward(*args)

    # What the plan is compared with

    def _compare_model(self) -> None:
        self._refuse_sharded()
        self._refuse_other_plans()
        if unknown := without_shapes(self.model):
            raise PlanMismatch(
                f"the plan is for a model whose parameters have shapes, and {first_few(unknown)} get theirs in the "
                "first forward of a lazy module: run the model once under torch.no_grad() before training."
            )
        self._compare_parameters(self.model)
        self._compare_device(frames=8)

    @property
    def _device_type(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def _compare_device(self, frames: int) -> None:
        device = self._device_type
        if self.plan.target == "cpu" != device:
            self._not_as_planned(
                "device",
                f"the plan is for a CPU, and this model is on {device}, whose kernels allocate other bytes: the budget "
                f"of {gib(self.plan.budget_bytes)} may not be kept. Make a plan there, or for the card by name "
                "(`--target h100-80gb`).",
                frames,
            )

    def _refuse_sharded(self) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in self.model.modules()):
            raise PlanMismatch(
                "this model is sharded by fully_shard, whose hooks the regions of this plan would run past; "
                'plan with `execution="modules"`.'
            )

    def _refuse_other_plans(self) -> None:
        others = [path for path, forward in modules_under_plans(self.model).items() if forward is not self.main]
        if others:
            raise PlanMismatch(
                f"other plans are applied inside of this model (on {first_few(others)}), and no region holds them: "
                "take them out (`remat.remove(module)`), or take the plan of the whole model out."
            )

    def _graph_mismatch(self, call: int, graph_module: fx.GraphModule) -> PlanMismatch | None:
        given = given_to(self.original, *self._arguments)
        fit = self._placer.fit(call, graph_module, same_shapes=given == self._now.forward.given)
        if isinstance(fit, Fit):
            return self._larger_mismatch(fit, graph_module)
        return self._mismatch_of(f"whose graph differs from this model's {fit}", given, graph_module)

    def _mismatch_of(self, what: str, given: dict[str, str], graph_module: fx.GraphModule) -> PlanMismatch:
        """Make the error from `what`, everything known to differ, and a remedy."""
        found = {"batch": given, "versions": versions(), **state_of(self.model)}
        planned = {**self.plan.about, "batch": self._now.forward.given}
        said = [f"the plan was made for {self.plan.about['workload']!r}, {what}", *differences(planned, found)]
        said += self._surroundings.changes()
        if modes := function_modes():
            said.append(
                f"a torch function mode is on ({', '.join(modes)}): under some, Dynamo leaves out operators of a model "
                "that is as planned"
            )
        return PlanMismatch(f"{'; '.join([*said, self._remedy(graph_module)])}.")

    def _larger_mismatch(self, fit: Fit, graph_module: fx.GraphModule) -> PlanMismatch | None:
        """Return the refusal of a graph that needs more memory than the budget; only note an excess of a few percent.

        A plan for a GPU says nothing of bytes on a CPU, whose kernels allocate others.
        """
        device = next((p.device.type for p in self.model.parameters()), None)
        if device is not None and (device == "cpu") != (self.plan.target == "cpu"):
            return None
        peak_bytes = self.plan.predicted["peak_bytes"]
        if peak_bytes + fit.more_bytes <= max(self.plan.budget_bytes, peak_bytes):
            return None
        text = (
            f"the forward makes up to {gib(fit.more_bytes)} more than when planned ({fit.more_of}), and the plan has "
            f"{gib(max(self.plan.budget_bytes - peak_bytes, 0))} to spare"
        )
        if self._early.is_any and not self._early.may_complete:
            self._more = f"{text}. What the model keeps is not there yet; later forwards are as planned."
            return None
        given = given_to(self.original, *self._arguments)
        sees_sizes = holds(given, given)  # of a batch within an object none are known: it may just be larger
        if sees_sizes and fit.more_bytes > OTHER_MODEL * peak_bytes:
            return self._mismatch_of(text, given, graph_module)
        self._more = f"{text}; make a plan for this model{'' if sees_sizes else ' and a batch of this size'}."
        return None

    def _remedy(self, graph_module: fx.GraphModule) -> str:
        """Suggest a remedy for a graph that differs from the planned one, by its probable cause."""
        if (grown := self._grown()) is not None:
            return grown
        if (masked := self._masked(graph_module)) is not None:
            return masked
        planned, given = self._now.forward.elements, element_counts(named_tensors(self.original, *self._arguments))
        if any(not given.get(name, 1) for name, count in planned.items() if count):
            return "this batch has no rows, for which Dynamo traces another graph: leave it out"
        if checkpoints_itself(self.model):
            return "turn gradient_checkpointing off in this model, the plan decides what is recomputed, or plan with it"
        if new := [path for path in hooked(self.model) if path not in self.plan.about.get("hooked", ())]:
            return (
                f"make a plan for this model with its hooks (on {', '.join(new[:3])}). A hook that reads a number off "
                "a tensor (`float()`, `item()`) has no plan: let it keep the tensor, detached, and read it later"
            )
        return "use the model as planned, or make a plan for it as it is"

    def _grown(self) -> str | None:
        """Suggest a remedy if the model has another number of parameters than planned; None if it has the same."""
        planned, found = self.plan.about.get("parameter_count"), sum(p.numel() for p in self.model.parameters())
        if planned in (None, found):
            return None
        return (
            f"it has {found} parameters, and had {planned} when planned: make a plan with a workload whose `build` "
            "returns the model as it is trained, adapters (LoRA) included"
        )

    def _masked(self, graph_module: fx.GraphModule) -> str | None:
        """Suggest a remedy if the batch needs another attention mask than planned; None if it does not."""
        assert self._running is not None
        seen, planned = self._running.seen, self._planned_masks
        if seen.packed and not planned.packed:
            return (
                "the position ids of this batch do not count up (several sequences are packed in a row), and so "
                "attention takes an explicit mask, which needs another kernel and other bytes: plan with a workload "
                "whose batch has them"
            )
        if seen.padded and not planned.padded:
            return PADDED_BATCH
        if seen.ones and not (planned.ones or planned.padded) and takes_mask(graph_module):
            return (
                "this batch has an attention mask, and the plan is for batches without; this model uses it, though it "
                "is of ones only. Leave it out, or plan with --padded"
            )
        return None

    def _calls_mismatch(self, count: int) -> PlanMismatch | None:
        if count == (planned := self._now.forward.calls):
            return None
        return PlanMismatch(
            f"the plan is for a model of {planned} graph calls, this forward made {count}; "
            + (
                "make a plan for this model."
                if count
                else "it ran where nothing is captured: under a torch.func transform or a dispatch mode "
                "(FlopCounterMode is one), or with Dynamo disabled. Run that without the plan, on "
                "`remat.remove(copy.deepcopy(model))` for example."
            )
        )

    def _compare_parameters(self, model: nn.Module) -> None:
        found, planned = dtypes_of(model), self.plan.about["parameter_dtypes"]
        if found != planned:
            raise PlanMismatch(f"the plan is for parameters of {planned}, this model has {found}.")

    def _compare_autocast(self) -> None:
        device = self._device_type
        enabled, planned = torch.is_autocast_enabled(device), self._now.forward.autocast
        autocast = _name(torch.get_autocast_dtype(device)) if enabled else None
        if autocast != planned:
            raise PlanMismatch(
                f"the plan is for {_policy(planned)}, this forward runs {_policy(autocast)}; "
                "use the same torch.autocast context or plan for the other dtype."
            )

    def _compare_batch(self, args: Any, kwargs: Any) -> None:
        tensors = named_tensors(self.original, args, kwargs)
        elements = element_counts(tensors)
        inputs: Mapping[str, int] = self._now.forward.elements
        names = [name for name in inputs if name in elements]
        if names and TOKEN_CAP in self.plan.about:
            tokens = max(names, key=lambda name: inputs[name])
            rows = {name: tensor.shape[0] for name, tensor in tensors if name != tokens and tensor.dim()}
            # A target whose length is a rounded share of the row's has up to one element more in each row.
            names = [name for name in names if elements[name] > inputs[name] + rows.get(name, 0)]
            planned, found = (sum(of[name] for name in names) for of in (inputs, elements))
        elif names:  # other inputs, such as a mask, do not make it large
            planned, found = (sum(of[name] for name in names) for of in (inputs, elements))
        else:
            planned, found = sum(inputs.values()) or self.plan.about.get("batch_elements", 0), sum(elements.values())
        if not planned or found <= planned:
            return
        if found > MUCH_LARGER * self._largest:
            self._largest = found
            self._warned.discard("batch")
        self._not_as_planned(
            "batch",
            f"this batch has {found} elements, the plan was made for {planned} "
            f"(batch size {self.plan.about['batch_size']}): its peak will exceed the planned "
            f"{gib(self.plan.predicted['peak_bytes'])} and be about {gib(self._peak_of(found / planned))}; "
            "reduce the batch or make a plan for this one.",
        )

    def _note_outputs(self, outputs: Any, args: Any, kwargs: Any) -> None:
        if "held" not in self._warned:
            peak = self.plan.predicted.get("backward_peak_bytes", self.plan.predicted["peak_bytes"])
            self._last_outputs.note(outputs, (args, kwargs), peak, self.plan.budget_bytes)

    def _compare_loop(self) -> None:
        """Warn if the last step left something behind that the planned loop does not keep."""
        loop = TrainingLoop.of(self.plan.about)
        if (packs := own_saved_tensor_hook()) is not None:
            self._warn(
                "hooks",
                f"hooks on saved tensors (`{packs}`) are on around this forward. Under the plan they are given other "
                "tensors than without it, so where they change values, gradients differ from those without the plan.",
                frames=6,
            )
        if self._now.repeats:
            self._not_as_planned("forwards", self.forwards.too_many(self.plan))
        if not self._now.begins:
            return
        if said := self.second_step.begins(holds_outputs="held" in self._warned):
            self._warn("peak", said, 6)
        parameters = trainable(self.model)
        if PASSES not in self.plan.about:  # of which the second and later ones have gradients
            self._compare_gradients(loop, parameters)
        self._compare_backwards()
        self._compare_held(loop.holds_outputs)
        self._compare_buckets(loop)
        self._compare_optimizer(parameters)

    def _compare_look(self) -> None:
        """Warn of a forward without gradients before the backward of another, where the plan does not know of any."""
        about, peak, budget = self.plan.about, self.plan.predicted["peak_bytes"], self.plan.budget_bytes
        if LOOKS in about or PASSES in about or torch.compiler.is_compiling():
            return
        if (alone := about.get(FORWARD_ALONE, 0)) and peak + alone > budget:
            self._not_as_planned(
                "look",
                "a forward without gradients runs between a forward and its backward, and the plan is for a step "
                f"without: the peak may exceed the planned {gib(peak)} by up to {gib(alone)}, and with it the budget "
                f"of {gib(budget)}. Evaluate after backward, or make a plan with a workload whose `step` does so.",
            )

    def _compare_gradients(self, loop: TrainingLoop, parameters: Sequence[nn.Parameter]) -> None:
        if loop.accumulates or loop.ddp or loop.shard is not None or "gradients" in self._warned:
            return
        alive = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        if alive and (peak := self.plan.predicted["peak_bytes"]) + alive > self.plan.budget_bytes:
            self._not_as_planned(
                "gradients",
                f"{gib(alive)} of gradients are there as a forward begins, and the plan is for a loop without: the "
                f"peak may exceed the planned {gib(peak)} by as much, and with it the budget of "
                f"{gib(self.plan.budget_bytes)}. Set gradients to None after each step "
                "(optimizer.zero_grad(set_to_none=True)), or plan for the loop (`accumulation=`).",
                frames=8,
            )

    def _compare_buckets(self, loop: TrainingLoop) -> None:
        if loop.ddp or loop.shard is not None or "buckets" in self._warned or (around := ddp_around()) is None:
            return
        peak, budget = self.plan.predicted["peak_bytes"], self.plan.budget_bytes
        buckets = 0 if around.gradient_as_bucket_view else sum(p.nbytes for p in trainable(self.model))
        if buckets and peak + buckets > budget:
            self._not_as_planned(
                "buckets",
                f"DistributedDataParallel has {gib(buckets)} of gradient buckets, and the plan is for a loop without: "
                f"the peak may exceed the planned {gib(peak)} by as much, and with it the budget of {gib(budget)}. "
                "Plan with `--ddp` (`TrainingLoop(ddp=True)`), or wrap with `gradient_as_bucket_view=True`.",
                frames=8,
            )

    def _compare_backwards(self) -> None:
        peak, budget = self.plan.predicted["peak_bytes"], self.plan.budget_bytes
        if self.forwards.were_in_autocast:
            self._compare_casts()
        if DIFFERENTIATES in self.plan.about:
            return
        untouched = self.plan.without_checkpointing.get("peak_bytes", peak)
        if self.forwards.were_differentiated_twice and 2 * untouched > budget:
            self._not_as_planned(
                "twice",
                "the last step differentiated a gradient (create_graph=True), and the plan is for a step of one "
                "backward: recomputed activations stay for the second, and the peak may exceed the planned "
                f"{gib(peak)}, and with it the budget of {gib(budget)}. Make a plan with a workload whose `step` does "
                "so.",
                frames=7,
            )
        if not self.forwards.were_kept or "kept" in self._warned:
            return
        if peak + sum(p.nbytes for p in trainable(self.model)) > budget:
            self._not_as_planned(
                "kept",
                "the last backward kept its graph for another one (retain_graph=True), and the plan is for a step of "
                "one backward: the gradients that the first leaves are there in the second, and the peak may exceed "
                f"the planned {gib(peak)}, and with it the budget of {gib(budget)}. Run one backward through the sum "
                "of the losses.",
                frames=7,
            )

    def _compare_casts(self) -> None:
        peak, budget = self.plan.predicted["peak_bytes"], self.plan.budget_bytes
        casts = sum(2 * p.numel() for p in trainable(self.model) if p.dtype == torch.float32)
        if self.plan.regions and peak + casts > budget:
            self._not_as_planned(
                "autocast",
                "the last backward ran inside of torch.autocast, which keeps its casts of the weights until it ends, "
                f"and the plan is for a backward outside of it: the peak may exceed the planned {gib(peak)} by the "
                f"casts ({gib(casts)} of weights), and with it the budget of {gib(budget)}. Call backward() after the "
                "`with torch.autocast(...)` block.",
                frames=8,
            )

    def _find_weights(self) -> None:
        """Find weights on the host. Raises PlanMismatch if the plan counts on others."""
        planned = TrainingLoop.of(self.plan.about).weights_on_host
        self._weights = weights_on_host(self.model)
        self.calls.bring(self._weights)
        if planned == (0 if self._weights is None else len(self._weights.layers)):
            return
        say = f"`remat.offload_weights(model, {planned})`, before the plan is applied"
        raise PlanMismatch(
            f"the plan counts on the frozen weights of {planned} layers being on the host: say {say}."
            if planned
            else "frozen weights of this model are on the host, and the plan does not know: plan with them "
            '(`offload="weights"`), or leave `remat.offload_weights` out.'
        )

    def _compare_optimizer(self, parameters: list[nn.Parameter]) -> None:
        """Warn if the optimizer is not as planned; checked from the second forward on."""
        first, self._is_first_forward = self._is_first_forward, False
        if first or "optimizer" in self._warned:
            return
        if text := unlike_planned(self.plan, parameters):
            self._not_as_planned("optimizer", text, frames=8)

    def _note_kept(self) -> None:
        """Note the outputs that the loop holds as a backward has ended, and that no plan counts there.

        A step that differentiates inside, or in several passes, may hold the outputs of its own forwards.
        """
        about = self.plan.about
        if not ("held" in self._warned or PASSES in about or DIFFERENTIATES in about or self._declares_outputs):
            self._last_outputs.backward_ends(self.model)

    @property
    def _declares_outputs(self) -> bool:
        return TrainingLoop.of(self.plan.about).holds_outputs or any(each.ended for each in self.forwards.planned)

    def _compare_held(self, declared: bool) -> None:
        peak, budget = self.plan.predicted["peak_bytes"], self.plan.budget_bytes
        reached, through = self._last_outputs.kept_through_backward()
        sizes = self._last_outputs.alive(self.model, but_last=declared)
        held_bytes = sum(sizes.values())
        remedy = "let go of them before backward (`del` the names that hold them)"
        if not declared:
            remedy = f'make a plan for a loop that holds them (`holds="outputs"`), or {remedy}'
        if held_bytes >= SMALL_CHANGE * peak and peak + held_bytes > budget:
            which = "forwards before the last" if declared else "the last forward"
            self._not_as_planned(
                "held",
                f"{gib(held_bytes)} of outputs of {which} are still held as the next begins ({_largest_of(sizes)}): "
                f"the peak may reach {gib(peak + held_bytes)}, and exceed the budget of {gib(budget)}. To keep it, "
                f"{remedy}.",
                frames=7,
            )
            self._last_outputs.forget()
        elif (kept_bytes := sum(through.values())) >= SMALL_CHANGE * peak:
            self._warn(
                "held",
                f"{gib(kept_bytes)} of outputs were held until the last backward had ended ({_largest_of(through)}), "
                "longer than the plan counts them: the peak may reach "
                f"{gib(reached)}, and exceed the budget of {gib(budget)}. To keep it, {remedy}.",
                frames=6,
            )
            self._last_outputs.forget()

    def _compare_trainable(self, frames: int = 10) -> None:
        planned = self.plan.about.get("trainable_count")
        found = sum(p.numel() for p in trainable(self.model))
        if planned is not None and found > planned:
            self._not_as_planned(
                "trainable",
                f"{found} parameters require gradients, {planned} did when the plan was made: the peak will exceed "
                f"the planned {gib(self.plan.predicted['peak_bytes'])}; make a plan for the model as it is now.",
                frames=frames,
            )

    def _warn_of_traces(self) -> None:
        traces = len(self._fitting) // len(self.plan.fingerprints)
        if self._running is not None:
            self._sizes.add(tuple(self._running.elements.values()))
        if traces < MANY_TRACES:
            return
        if len(self._sizes) < traces // 2 and (text := self._early.why_traced(traces)):
            self._warn("traces", text, frames=10)
            return
        self._warn(
            "traces",
            f"this forward was traced {traces} times, because batches of so many shapes came and its graph depends "
            "on them: each takes seconds and stays in memory. Pad batches to a few lengths (buckets).",
            frames=10,
        )

    def _not_as_planned(self, what: str, text: str, frames: int = 6) -> None:
        """Warn of something that may need more memory than planned, at the caller `frames` above, or refuse it."""
        if self.on_larger == "refuse":
            raise PlanMismatch(text)
        self._warn(what, text, frames + 1)

    def _warn(self, what: str, text: str, frames: int) -> None:
        """Warn of `what`, once."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(text, stacklevel=frames + (self is not self.main))

    def _peak_of(self, times: float) -> int:
        """Return the predicted peak of a batch `times` as large, if everything but the model's state grows with it."""
        peak, parts = self.plan.predicted["peak_bytes"], self.plan.predicted.get("breakdown", {})
        same = "parameters", "buffers", OPTIMIZER_STATE, "gradients", LIBRARY_WORKSPACES
        state = sum(parts.get(name, 0) for name in same)
        return int(state + (peak - state) * times)

    # Copies and pickles hold the model and the plan; graphs are traced again.

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COPIED_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


@torch.compiler.disable(reason=f"{_NOT_COMPILED}.")
def _uncompiled(planned: PlannedForward, args: Any, kwargs: Any) -> Any:
    """Run a training forward that an outer trace has come to."""
    planned.warn_of_compiler()
    return planned(*args, **kwargs)


def dtypes_of(model: nn.Module) -> list[str]:
    return sorted({_name(p.dtype) for p in model.parameters()})


def checkpoints_itself(model: nn.Module) -> bool:
    """Return whether a transformers model's own checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _policy(autocast: str | None) -> str:
    return f"autocast to {autocast}" if autocast else "no autocast"
