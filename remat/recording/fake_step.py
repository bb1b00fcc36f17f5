"""A workload's step on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from remat._torch.dynamo import tracebacks_unwritten
from remat._torch.recording import transforms_left
from remat._torch.step_fakes import StepFakes
from remat.capture.allowed_functions import FunctionsWatched, functions_in
from remat.capture.anchors import Signature
from remat.capture.attention_masks import Masks, OnesSeen, masks_of
from remat.capture.beside_parameters import tensors_beside
from remat.capture.causal_masks import causal_masks, note_batch
from remat.capture.circumstances import given_to
from remat.capture.composites_on_fakes import composites_on_fakes
from remat.capture.dynamo import named_tensors, without_cache
from remat.capture.eager_answers import Answers
from remat.capture.elsewhere import CaptureDevice
from remat.capture.fake_model import fake_model
from remat.capture.grouped_products import grouped_products
from remat.capture.kernels_on_fakes import kernels_on_fakes
from remat.capture.model_state import Numbers
from remat.capture.opaque_functions import known_functions
from remat.capture.settling import EarlyObservations, settle
from remat.errors import CaptureError, RematError
from remat.evaluation.form import CAPTURED_FORM, Form
from remat.evaluation.forwards import Forward
from remat.evaluation.graph import OPTIMIZER_STATE, Parameter
from remat.host.weights import AT_ONCE, Layer, layers_of, spread
from remat.recording.copied_fakes import copied_fakes
from remat.recording.deferred import DeferredPasses, states_counted
from remat.recording.finish import Finish
from remat.recording.inner_nodes import InnerNodes
from remat.recording.kept_here import KeptHere
from remat.recording.known_values import KnownValues
from remat.recording.optimizer_forms import forms_of
from remat.recording.remedies import not_a_loss
from remat.recording.repeated_step import RepeatedStep
from remat.recording.sequences import sequences_of_known_lengths
from remat.recording.sources import Sources
from remat.recording.state_on_fakes import NumbersOnFakes, StateOnFakes, flags_of
from remat.recording.step_contexts import StepContexts, autocast_dtype
from remat.recording.step_graphs import StepGraphs
from remat.recording.step_refusals import (
    CodeRaises,
    backward_fails,
    batch_fails,
    batch_is_empty,
    batch_raises,
    calls_differ,
    forward_fails,
    is_no_loss,
    optimizer_fails,
)
from remat.recording.traced_forwards import ParametersSeen, TracedForwards, outermost_calls
from remat.recording.tracked_copies import TrackedStateCopies
from remat.recording.tracker import Tracker
from remat.recording.trails import Trail, reads_of, said_of, trail_of
from remat.workload.any_optimizer import AnyOptimizer
from remat.workload.batches import Anew, tensors_of
from remat.workload.held_outputs import HeldOutputs, keeps_output, parameters_reached
from remat.workload.reference import references_run_by
from remat.workload.replaced_forward import CopiedAsOriginal, ReplacedForward, modules_under_plans
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload, trainable

WRAPPED_NUMBER_BYTES = 16  # eight in forward, eight more while it is recomputed
REPEATED_STEP = "optimizer's step"  # in `Graph.fixed_bytes`: held by an optimizer while it repeats the step
LAYERS_ON_HOST = "layers_on_host"  # key of `Graph.about`
ExecuteCall = Callable[[int, fx.GraphModule, tuple[Any, ...]], Any]  # graph call, its graph, its arguments


class FakeStep:
    """A workload's training step on fake tensors: captured once, run as often as needed.

    device     the device that tensors pretend to be on
    form       its present form; set by `in_form`
    loop       the training loop around forward and backward, which may change between records; its shards are not run,
               see `sharding.py`
    graphs     its captured graphs; `prepare` changes each before it first runs in an autocast dtype (for its kernels)
    contexts   in which its parts run. Arguments are `elsewhere`, the device whose kernels run and for which the forward
               is captured, if that is not `device`, and `recompute_context`: the emulated cache of weight casts, if
               kernels are substituted
    trails         of the captured forwards that ran so far under the same answers
    early          how the first steps differ; known once one has run
    held_numbers   values of the model's counters at the beginning of a step, so that no new value is traced anew; lists
                   that it reads as they grow are put back as well
    evaluates      whether a backward goes through forwards of evaluation mode too, which a plan leaves alone
    trained        the parameters that required a gradient as the model was built, or after a first forward
    looks          whether forwards without gradients run between a forward and its backward
    """

    calls: TracedForwards

    def __init__(
        self,
        workload: Workload,
        *,
        device: torch.device,
        loop: TrainingLoop | None = None,
        prepare: Callable[[fx.GraphModule, torch.dtype | None], None] | None = None,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        elsewhere: CaptureDevice | None = None,
    ):
        torch.distributions.Distribution.set_default_validate_args(False)  # reads numbers; Dynamo's first trace does so
        self.workload = workload
        self.device = device
        self.mode = StepFakes()
        self.loop = loop or TrainingLoop()
        self.graphs = StepGraphs(prepare)
        self.form = CAPTURED_FORM
        self.contexts = StepContexts(device, workload.autocast, elsewhere, recompute_context)
        self.known = KnownValues()
        self.model, self.shared = fake_model(
            workload.build, self.mode, device, workload.step, self.known.note_buffer, self.known.of_model
        )
        if modules_under_plans(self.model):
            raise CaptureError(
                "`build` returned a model that a plan is applied to: plan the model without it (`remat.remove(model)`)."
            )
        with self.mode, torch.device(device), self.known.of_batch(), (seen := OnesSeen()):
            self.batch = self._made_batch()
        self._anew, self._held_batch = BatchOnFakes(self.batch, self.known), None
        note_batch(tensors_of(self.batch), lambda: tensors_of(workload.batch(1, workload.seq_len)))
        self._execute: ExecuteCall = _execute_plainly
        self._beside_bytes = 0  # held by an optimizer while it repeats the step, beside its state
        self._begun: tuple[ParametersSeen, torch.Tensor] | None = None  # a forward that no backward has followed yet
        self._replaced = {"": ReplacedForward(self.model)}
        self._ones = seen
        self._settled = self._has_state = False
        self._touched: list[torch.Tensor] = []  # tensors that code names beside the model's state, in the first step
        self.early, self.held_numbers = EarlyObservations(), Numbers(None, ())
        self._is_untraced = self._in_backward = False
        self.deferred: DeferredPasses | None = None
        self.trails: list[Trail] = []
        self.evaluates = self.looks = False
        self.known_functions = known_functions(self.model)
        self.capture_anew(Answers())
        self.kernels_of = (device if elsewhere is None else elsewhere.device).type
        self.trained = trainable(self.model)
        self._repeated = RepeatedStep(self.trained, device)
        self.finish = Finish(self.loop, self.model, AnyOptimizer(None, ()), self._repeated)
        self._begin_training()
        self.held_outputs = HeldOutputs()

    @property
    def optimizer(self) -> AnyOptimizer:
        return self.finish.optimizer

    @property
    def product_dtype(self) -> torch.dtype:
        """In which the model multiplies matrices."""
        dtypes = (self.workload.autocast, *self.graphs.autocasts)
        return next(filter(None, dtypes), None) or next(
            p.dtype for p in self.model.parameters() if p.is_floating_point()
        )

    @property
    def computes_in_float16(self) -> bool:
        autocast = (self.workload.autocast, *self.graphs.autocasts)
        return torch.float16 in (*autocast, *(p.dtype for p in self.model.parameters()))

    def capture_anew(self, answers: Answers | None) -> None:
        """Discard the captured graphs, and capture with `answers` from now on."""
        self.graphs.clear()
        self._begun = None
        self._seen_calls: set[tuple[str, ...]] = set()
        if self.trails and answers is not None and not answers.are_those_of(self.calls.answers):
            self.trails.clear()
        padded = self.deferred is not None and self.deferred.padded
        self.calls = TracedForwards(
            self._replaced,
            self._execute_call,
            answers=answers,
            elsewhere=self.contexts.elsewhere,
            is_ones=self._ones.hold,
            planned=Masks().with_explicit_masks() if padded else Masks(),
            device_type=self.device.type,
        )
        for path, replaced in self._replaced.items():
            forward = CopiedAsOriginal(self._called_at, path)
            forward.replaced = replaced
            replaced.put(forward)

    @contextlib.contextmanager
    def _on_fakes(self) -> Iterator[None]:
        """Enter all modes that a step on fake tensors runs under."""
        here = contextlib.nullcontext() if self.contexts.elsewhere is None else KeptHere(self.contexts.elsewhere)
        with (
            torch.set_grad_enabled(torch.is_grad_enabled()),  # a graph that fails half way leaves it changed
            torch.autograd.set_multithreading_enabled(False),  # one thread numbers all nodes, whatever the device
            self.shared.borrowed(),
            self.mode,
            self.known.followed(),
            here,
            grouped_products(),
            causal_masks(),
            kernels_on_fakes(),
            composites_on_fakes(),
            sequences_of_known_lengths(),
            copied_fakes(),
            tracebacks_unwritten(),
        ):
            yield

    def _settle(self, alignment_bytes: int) -> None:
        if not self._settled:
            with self._on_fakes():
                built = self.state()
                settle(self, lambda: self._begin_step(alignment_bytes))
                if self._calls_elsewhere():
                    if self.early.is_any:
                        built.put_back()
                    settle(self, lambda: self._begin_step(alignment_bytes))
                self._require_no_counting()
                self._has_state = bool(self.state().unregistered)
        self._settled = True

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """Those of the graph calls of the last step."""
        return self.graphs.signatures(self.calls.made)

    def _begin_step(self, alignment_bytes: int) -> None:
        """Run the forward of a first step; `warm_up` continues the last one that settling ran."""
        self.held_outputs.let_go()
        self.model.zero_grad(set_to_none=True)
        with ParametersSeen(alignment_bytes, self.model, self.calls, self.state().named) as tracker:
            self._begun = tracker, self._forward_under(tracker)
        self.trails.append(trail_of(tracker))

    def _require_no_counting(self) -> None:
        """Raise CaptureError if a function that is left whole in a graph changes state each time that it runs."""
        functions = functions_in(self.graphs.captured, {type(module).__module__ for module in self.model.modules()})
        if not functions or self.calls.answers is None:  # a compiler traces what is in them
            return
        self._begun, before, watched = None, self.state(), FunctionsWatched(functions)
        with self.executing(watched.execute):
            self.forward()
        before.put_back()
        watched.require_no_change()

    def state(self) -> StateOnFakes:
        """Return the current state of the model and of the step function; called on fakes."""
        return StateOnFakes(self.model, self.workload.step, self.known)

    @property
    def flags(self) -> dict[str, list[Any]]:
        """Values of the buffers that code reads numbers of, by path."""
        return flags_of(self.model, self.known, self.known.of_buffers())

    def numbers(self) -> Numbers:
        """Return the numbers of the model that every step changes, with their present values."""
        with self.shared.borrowed():
            state = self.state() if self.early.carried else None
            return NumbersOnFakes(state, self.early.carried, lists=self.early.grown_and_read)

    def run_untraced(self) -> None:
        """Run one more forward without a plan, untraced."""
        with self._on_fakes(), self.untraced():
            self.forward()

    def run_alone(self, tracker: Tracker, way: Callable[[], contextlib.AbstractContextManager[Any]]) -> bool | None:
        """Run one more forward untraced under `tracker`, in the context `way`, and restore the state.

        Return whether it came to its end; None if it changes something for good, and did not run.
        """
        with self._on_fakes(), self.untraced():
            before = self.state()
            if before.only_once:
                return None
            self.fix_state(tracker)
            try:
                with tracker, way():
                    self.forward()
                return True
            except CaptureError:
                return False
            finally:
                before.put_back()

    @contextlib.contextmanager
    def between_steps(self, tracker: Tracker) -> Iterator[None]:
        """Enter the context of a loop's work between steps without gradients, under `tracker`; nothing is traced."""
        self.fix_state(tracker)
        self.calls.begin()
        with self._on_fakes(), self.untraced(), self.contexts.outside(), torch.no_grad(), tracker:
            yield

    def _calls_elsewhere(self) -> bool:
        """Return whether the step calls modules that are not traced yet; if so, trace them from now on."""
        if self._begun is None or not self._begun[0].outside or self.deferred is not None:
            return False
        with self.untraced():
            paths = outermost_calls(self.model, self.forward)
        if not paths:
            raise CaptureError(
                f"the step of {self.workload.name!r} computes with parameters of the model, and calls neither the "
                "model nor a module of it: nothing of it can be in a region. Plan with `workload.with_planned_step()`."
            )
        if paths == list(self._replaced):
            return False
        for replaced in self._replaced.values():
            replaced.take_out()
        self._replaced = {path: ReplacedForward(self.model.get_submodule(path)) for path in paths}
        self.capture_anew(self.calls.answers)
        return True

    def _begin_training(self) -> None:
        """Make the optimizer and everything else that exists when training begins."""
        make = self.workload.optimizer
        with self.mode, Tracker() as tracker, self._after_backward(tracker):
            self.finish.let_go()
            optimizer = AnyOptimizer.of(make, self.trained)
            self.finish = Finish(self.loop, self.model, optimizer, self._repeated, TrackedStateCopies(tracker))

    def train_by(self, loop: TrainingLoop, optimizer: Callable[..., Any] | None) -> None:
        """Train in another loop and by another `Workload.optimizer`, from the next warm-up on."""
        self.workload, self.loop = dataclasses.replace(self.workload, optimizer=optimizer), loop
        self.trails.clear()  # also of other forms, if the loop holds outputs
        self._begin_training()

    @contextlib.contextmanager
    def _after_backward(self, tracker: Tracker) -> Iterator[None]:
        """Enter the modes in which optimizers are made and stepped, so that they choose the device's kernels."""
        if self.finish.offloaded is not None:
            self.finish.offloaded.copies = TrackedStateCopies(tracker)
        self._repeated.begin(tracker)
        with tracker.answering(), forms_of(self.kernels_of, self.device.type):
            try:
                yield
            except RematError:
                raise
            except Exception as error:
                raise optimizer_fails(self.workload, self.trained, error) from error

    @contextlib.contextmanager
    def executing(self, execute: ExecuteCall) -> Iterator[None]:
        """Run captured graphs by `execute` while the context is open."""
        before, self._execute = self._execute, execute
        try:
            yield
        finally:
            self._execute = before

    @contextlib.contextmanager
    def in_form(self, form: Form) -> Iterator[None]:
        """Run the step in `form` while the context is open."""
        before, self.form = self.form, form
        try:
            yield
        finally:
            self.form = before

    def _execute_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        self.graphs.note(call, graph_module, autocast_dtype(self.device.type))
        with self.contexts.graph():
            return self.contexts.views.renewed(self._execute(call, self.graphs.ready(call, self.form), args))

    def run(self, function: Callable[..., Any], tracker: Tracker, args: Sequence[Any]) -> Any:
        """Run the forward of the function that a node calls, on `args`."""
        with self._on_fakes(), tracker, self.contexts.forward(), self.contexts.graph():
            return function(*args)

    def _made_batch(self) -> Any:
        try:
            batch = self.workload.batch(self.workload.batch_size, self.workload.seq_len)
        except CodeRaises as error:
            raise batch_raises(error) from error
        except RematError:
            raise
        except Exception as error:
            raise batch_fails(self.workload, error) from error
        tensors = tensors_of(batch)
        if any(tensor.ndim > 1 for tensor in tensors) and not any(tensor.numel() for tensor in tensors):
            raise batch_is_empty(self.workload)
        return batch

    def forward(self) -> torch.Tensor:
        """Return the loss of one forward. Raises CaptureError if `step` fails or returns something else."""
        self.calls.begin()
        self.held_numbers.put_back()
        try:
            with (
                self.contexts.forward(),
                self._holding(),
                references_run_by(self._run_reference),
                self._states_seen(),
                self.contexts.outside(),
                transforms_left(),
            ):
                loss = self._loss()
        except RematError:
            raise
        except Exception as error:
            raise forward_fails(self.workload, self.batch, error) from error
        self._note_calls()
        if said := not_a_loss(loss):
            raise is_no_loss(self.workload, said)
        return loss

    def _backward(self, loss: torch.Tensor, tracker: Tracker) -> None:
        """Run the backward of the step. Raises CaptureError if it fails."""
        if self.finish.stepping is not None:
            self.finish.stepping.around = functools.partial(self._stepping, tracker)
        self._in_backward = True
        try:
            with self.contexts.own_autocast(), self.contexts.outside():
                if self.deferred is None:
                    loss.backward()
                else:
                    self.deferred.go_on()
        except RematError:
            raise
        except Exception as error:
            raise backward_fails(self.workload, self.model, error) from error
        finally:
            self._in_backward = False

    def _stepping(self, tracker: Tracker, parameter: nn.Parameter) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a parameter is stepped in backward."""
        tracker.note_gradient(parameter)
        return self._after_backward(tracker)

    def _batch_of_a_run(self) -> Any:
        """Return the batch for one more run, which the loop holds until the next one."""
        self._held_batch = None
        self._held_batch = self._anew.for_a_run()
        return self._held_batch

    def _loss(self) -> torch.Tensor:
        """Run the step's forward and return its loss, or the end of its largest pass if forwards run in backward."""
        loss = self.workload.step(self.model, self._batch_of_a_run())
        if self.deferred is None:
            if self._is_untraced or self.calls.made or not isinstance(loss, torch.Tensor):
                return loss
            if parameters_reached(self.model, [loss]) or not_a_loss(
                loss
            ):  # by other modules than those that are traced
                return loss
            self.deferred = DeferredPasses(trainable(self.model))
            with torch.autocast(self.device.type, enabled=False):  # where backward runs
                self.deferred.find(loss)
            if not self.deferred.count:
                raise CaptureError(f"no backward of the loss of {self.workload.name!r} reaches its model's parameters.")
            self.capture_anew(self.calls.answers)
            loss = self.workload.step(self.model, self._batch_of_a_run())
        with torch.autocast(self.device.type, enabled=False):
            return self.deferred.reach(loss)

    def _note_calls(self) -> None:
        """Raise CaptureError if the step calls its model more often than before, or in another order."""
        if self._is_untraced:
            return
        if self.evaluates and not self.calls.made:
            raise CaptureError(
                f"the step of {self.workload.name!r} runs its model in evaluation mode, and a plan is for training "
                "mode: call model.train() in the step before the forward that is to be planned."
            )
        self._seen_calls.add(tuple(forward.module for forward in self.calls.made))
        if len(self._seen_calls) == 1:
            return
        counts = " and ".join(str(len(calls)) for calls in sorted(self._seen_calls, key=len))
        reads = said_of(reads_of(self.run_untraced, Sources.of(self.model, self.workload.step)))
        raise calls_differ(self.workload, counts, reads)

    def _states_seen(self) -> contextlib.AbstractContextManager[None]:
        """Return the context that tracks generator states of mini-batches, if they are on the device (a CPU)."""
        on_host = self.deferred is not None and self.kernels_of == "cpu"
        return states_counted() if on_host else contextlib.nullcontext()

    def _let_go(self) -> None:
        """Note that the step has dropped its loss."""
        if self.deferred is not None:
            self.deferred.let_go()

    def _holding(self) -> contextlib.AbstractContextManager[None]:
        return self.held_outputs.catching(self.model) if self.loop.holds_outputs else contextlib.nullcontext()

    def _called_at(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module at `path` as the step does."""
        if self._in_backward:
            raise CaptureError(
                f"the step of {self.workload.name!r} runs {path or 'its model'} again in backward, as "
                "`torch.utils.checkpoint` around it does: a plan decides what is recomputed, so leave that out."
            )
        if self.deferred is None:
            return self._forward_at(path, args, kwargs)
        run = functools.partial(self._forward_at, path, args, kwargs, traced=self.deferred.is_at_largest)
        self.deferred.padded |= self.calls.look(path, args, kwargs).padded
        given = tuple(given_to(self._replaced[path].original, args, kwargs).items())
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return self.deferred.forward((path, given), sum(tensor.numel() for tensor in tensors), run)

    def _forward_at(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool = True) -> Any:
        with without_cache(self.model):
            if traced and not self._is_untraced and self._learns(path, args, kwargs):
                return self.calls.run(path, args, kwargs)
            self.looks |= bool(self.calls.made) and not torch.is_grad_enabled()
            with self.contexts.untraced(self.calls.look(path, args, kwargs)), self.calls.alone():
                return self._replaced[path].original(*args, **kwargs)

    def _learns(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a backward can reach the forward of the module at `path`, which is in training mode.

        A plan leaves other forwards alone.
        """
        module = self._replaced[path].module
        learns = torch.is_grad_enabled() and any(
            leaf.requires_grad
            for leaf in itertools.chain(module.parameters(), tree_leaves((args, kwargs)))
            if isinstance(leaf, torch.Tensor)
        )
        self.evaluates |= learns and not module.training
        return learns and module.training

    @contextlib.contextmanager
    def untraced(self) -> Iterator[None]:
        """Trace nothing of the step while the context is open."""
        self._is_untraced = True
        try:
            yield
        finally:
            self._is_untraced = False

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """The forwards of the last step."""
        graphs = list(map(self.graphs.of, self.calls.made))
        return tuple(
            dataclasses.replace(forward, like=graphs.index(graphs[number]))
            for number, forward in enumerate(self.calls.made)
        )

    def _run_reference(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.contexts.untraced(masks_of(named_tensors(forward, args, kwargs), self._ones.hold)):
            return forward(*args, **kwargs)

    def warm_up(self, alignment_bytes: int = 1) -> tuple[int, Tracker]:
        """Capture, and bring the optimizer and the gradients to their steady state.

        Returns the tracker of the first step, and the peak bytes alive after the first backward above those alive
        before it. What the forward made is not counted: only what Dynamo stores in its graphs and what the loop holds
        is left of it.
        """
        self._begun = None
        self._settle(alignment_bytes)
        with self._on_fakes():
            if self._begun is None:
                self._begin_step(alignment_bytes)
        assert self._begun is not None
        (tracker, loss), self._begun = self._begun, None
        self._touched = tracker.touched
        self._has_state |= bool(tracker.touched)
        known = set(map(id, self.trained))
        self.trained = [p for p in self.model.parameters() if p.requires_grad or id(p) in known]
        self._repeated = RepeatedStep(self.trained, self.device)
        self._begin_training()
        forward_end = tracker.op_count
        with self._on_fakes(), tracker:
            self._backward(loss, tracker)
            del loss
            self._let_go()
            backward_end = tracker.op_count
            with self._after_backward(tracker):
                self.finish()
            self._beside_bytes = self._repeated.beside_bytes(self.finish.state)
        return int(tracker.alive(since=forward_end)[backward_end:].max(initial=0)), tracker

    def _forward_under(self, tracker: Tracker) -> torch.Tensor:
        tracker.inner_nodes = inner = InnerNodes()
        try:
            loss = self.forward()
        finally:
            tracker.inner_nodes = None
        if self.kernels_of != "cpu":
            inner.run_last(loss)
        return loss

    def execute(self, tracker: Tracker, after_forward: Callable[[], None], after_backward: Callable[[], None]) -> int:
        """Run one whole step under `tracker`: forward, backward, optimizer.

        Return the bytes that its loss, if it is no mere number, and the graph of it keep until a loop lets go of that
        loss, as the next forward ends.
        """
        with self._on_fakes(), self.graphs.slices_repeated(tracker), tracker:
            if self._has_state:
                tracker.follow_older([*self.state().unregistered, *self._touched])
            loss = self._forward_under(tracker)
            after_forward()
            self._backward(loss, tracker)
            after_backward()
            held = [loss.grad_fn, loss if keeps_output(loss) else None] if self.deferred is None else []
            del loss
            self._let_go()
            with self._after_backward(tracker):
                self.finish()
            return tracker.freed_by(held.clear)

    def fix_state(self, tracker: Tracker) -> dict[str, int]:
        """Tell `tracker` the tensors from before the step; return their bytes by category."""
        parameters = list(self.model.parameters())
        beside = [list(tensors_beside(each)) for each in (*parameters, *self.model.buffers())]
        fixed = {
            "parameters": self._here_of(parameters, tracker) + tracker.fix(beside),
            "buffers": tracker.fix(list(self.model.buffers())),
            "batch": tracker.fix(tensors_of(self.batch)),
            "gradients": tracker.fix([p.grad for p in parameters if p.grad is not None]),
            OPTIMIZER_STATE: tracker.fix(self.finish.state),
            REPEATED_STEP: self._beside_bytes,
            "running average": tracker.fix(self.finish.averages),
            "gradient buckets": sum(map(tracker.bytes_of, self.trained)) if self.loop.ddp else 0,
        }
        return {name: size for name, size in fixed.items() if size}

    def _here_of(self, parameters: list[nn.Parameter], tracker: Tracker) -> int:
        """Return the bytes of `parameters` on the device, including the streamed layers that are there at once."""
        size_bytes = tracker.fix(parameters)
        elsewhere = self._on_host[AT_ONCE:]
        return size_bytes - sum(tracker.bytes_of(weight) for layer in elsewhere for weight in layer.weights)

    @property
    def _on_host(self) -> list[Layer]:
        return spread(layers_of(self.model), count) if (count := self.loop.weights_on_host) else []

    @property
    def layers_on_host(self) -> dict[str, int]:
        """Path -> bytes of every layer whose frozen weights are on the host."""
        return {layer.path: layer.size_bytes for layer in self._on_host}

    def parameters(self, tracker: Tracker) -> Iterator[Parameter]:
        """Yield the parameters with the sizes of their optimizer states and gradients."""
        parameters, trained = dict(self.model.named_parameters()), set(map(id, self.trained))
        states = self.optimizer.states_of(parameters.values())
        for (name, p), state in zip(parameters.items(), states, strict=True):
            size, sizes = tracker.bytes_of(p), tuple(map(tracker.bytes_of, state))
            yield Parameter(name, size, size if id(p) in trained else 0, sum(sizes), state_tensors=sizes)


class BatchOnFakes(Anew):
    """A batch on fakes for several runs: its known values are what is put back."""

    def __init__(self, batch: Any, known: KnownValues):
        self._known = known
        super().__init__(batch)

    def _kept(self, tensor: torch.Tensor) -> Any:
        return self._known.views_of(tensor)

    def _restore(self, tensor: torch.Tensor, kept: Any) -> None:
        self._known.give_views(tensor, kept)


def _execute_plainly(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    return graph_module.forward(*args)
