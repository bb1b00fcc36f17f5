"""Training for real: run a workload's steps on the device at hand, always from the same start.

This is what predictions are held against: `validating.py` compares a planned step with the untouched one, `timeline.py`
is drawn beside the allocator's own curve, and benchmarks run every optimizer. Steps are whole: forward, backward, and
what the loop does after it (`Finish`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat._torch.training import clear_cublas_workspaces
from remat.capture.beside_parameters import tensors_beside
from remat.capture.causal_masks import causal_masks
from remat.capture.dynamo import cache_builders
from remat.capture.model_state import ModelState
from remat.capture.settling import EARLY_BY_TRACES
from remat.costing.device_allocator import Measurement, allocation_events, measure_peak, measure_step, time_once_us
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, remove
from remat.execution.second_step import CudaCounter
from remat.host.weights import bring_weights_back, offload_weights, weights_on_host
from remat.recording.finish import Finish
from remat.recording.step_contexts import autocast_context
from remat.recording.tracker import Tracker
from remat.workload.any_optimizer import AnyOptimizer
from remat.workload.batches import Anew, on_device, tensors_of
from remat.workload.held_outputs import HeldLoss, HeldOutputs
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

MOST_STEPS_OF_STATE = 8
LONG_STEP_S = 5.0  # a step that takes longer is timed once


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Make `device` current, and restore the caller's random states afterwards."""
    states = random.getstate(), np.random.get_state()
    on_cuda = device.type == "cuda"
    try:
        with (
            torch.random.fork_rng(devices=[device] if on_cuda else []),
            torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
        ):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Training:
    """A workload's model, batch and optimizer on the device.

    trained         the parameters that required a gradient as the model was built, or after a forward
    early_forwards  number of a new model's forwards, unlike the repeating ones, that run before its steps begin
    keeps           whether planning has seen tensors of a step that exist in the next one
    """

    def __init__(
        self, workload: Workload, device: torch.device, seed: int, loop: TrainingLoop, early_forwards: int = 0
    ):
        self.workload, self.device, self.loop = workload, device, loop
        self._early_forwards, self.keeps = early_forwards, False
        self._seed_of_steps = seed + 2
        seed_all(seed)
        with torch.device(device):
            self.model = workload.build().to(device).train()
        self._libraries_keep = False  # workspaces, from the first step on
        self._state = ModelState(self.model, step=workload.step)
        self._cacheless: list[Any] = []  # configurations that say so until the end
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._trained_as_built = frozenset(self.trained)
        self._parameters = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        self.finish, self.held_outputs, self.held_loss = self._finish_with(None), HeldOutputs(), HeldLoss()
        self.set_batch(workload.batch_size, seed + 1)

    def apply(self, plan: Plan) -> None:
        """Prepare the model as `plan` expects, and apply the plan."""
        if layers := self.loop.weights_on_host:
            offload_weights(self.model, layers)
        apply(self.model, plan, verify_first_step=False)  # validation compares more
        if self._early_forwards and (EARLY_BY_TRACES in plan.about or not plan.about.get("carried")):
            self._trace()

    def _trace(self) -> None:
        """Run a forward that leaves nothing behind but its traces: the first one is traced more than once."""
        before = ModelState(self.model, step=self.workload.step)
        with autocast_context(self.device, self.workload.autocast):
            self.workload.step(self.model, self._batch_of_a_run())
        self.model.zero_grad(set_to_none=True)
        before.put_back()
        collect(self.device)

    def set_batch(self, batch_size: int, seed: int) -> None:
        seed_all(seed)
        self.batch: Any = None
        self._held_batch: Any = None
        with torch.device(self.device):
            batch = self.workload.batch(batch_size, self.workload.seq_len)
        self.batch = on_device(batch, self.device)
        self._anew, self._held_batch = Anew(self.batch), None

    def _batch_of_a_run(self) -> Any:
        """Return the batch for one more run, which the loop holds until the next one."""
        self._held_batch = None
        self._held_batch = self._anew.for_a_run()
        return self._held_batch

    def leave_cache_out(self) -> bool:
        """Build no key-value cache; return whether the model asked for one."""
        self._cacheless += cache_builders(self.model)
        self._turn_caches_off()
        return bool(self._cacheless)

    def _turn_caches_off(self) -> None:
        for config in self._cacheless:
            config.use_cache = False

    def begin_again(self) -> None:
        """Restore the model as built, except for a plan in it, and the random state; make a new optimizer."""
        self._put_back()
        self._turn_caches_off()
        self._run_early_forwards()
        release_memory(self.device)
        self._libraries_keep = False
        if self.workload.optimizer is not None:
            self.finish = self._finish_with(self.workload.optimizer(list(self.trained.values())))
        seed_all(self._seed_of_steps)

    def end(self) -> None:
        """Restore the model as built: it may share its state with others."""
        remove(self.model)
        self._put_back()

    def _put_back(self) -> None:
        bring_weights_back(self.model)
        self.finish.let_go()
        self.finish = self._finish_with(None)
        self.let_go()
        self.model.zero_grad(set_to_none=True)
        self._state.put_back()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self._trained_as_built)
            with torch.no_grad():
                parameter.copy_(self._parameters[name])

    def _run_early_forwards(self) -> None:
        with torch.enable_grad(), autocast_context(self.device, self.workload.autocast):
            for _ in range(self._early_forwards):
                self.workload.step(self.model, self._batch_of_a_run())  # which may run backward itself
        self.model.zero_grad(set_to_none=True)

    def _finish_with(self, made: Any) -> Finish:
        return Finish(self.loop, self.model, AnyOptimizer(made, list(self.trained.values())), self._again)

    def _again(self) -> torch.Tensor:
        """Run forward and backward once more, for an optimizer that asks for it in its step."""
        self.model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            return self.forward_and_backward()

    def gradients_of(self, run: Callable[[], Any]) -> tuple[Any, list[torch.Tensor | None]]:
        """Return the result of `run`, which runs a backward, and all gradients, on the host."""
        found: dict[int, torch.Tensor] = {}

        def note(parameter: nn.Parameter) -> contextlib.AbstractContextManager[None]:
            if parameter.grad is not None:
                found[id(parameter)] = on_host(parameter.grad)
            return contextlib.nullcontext()

        with self.finish.stepping.noting(note) if self.finish.stepping else contextlib.nullcontext():
            result = run()
        for parameter in self.trained.values():
            note(parameter)
        return result, [found.get(id(parameter)) for parameter in self.trained.values()]

    @property
    def holds(self) -> bool:
        """Whether a step has tensors of the step before, as far as is known by now."""
        return self.loop.holds_outputs or self.keeps or self.held_loss.keeps_tensors(self.model)

    def let_go(self) -> None:
        """Let go of what the loop holds of the last step."""
        self.held_outputs.let_go()
        self.held_loss.let_go()
        self._held_batch = None
        self._anew.put_back()

    def forward_and_backward(self) -> torch.Tensor:
        holding = self.held_outputs.catching(self.model) if self.loop.holds_outputs else contextlib.nullcontext()
        with autocast_context(self.device, self.workload.autocast), holding, causal_masks():
            loss = self.workload.step(self.model, self._batch_of_a_run())
        self._note_trained()
        self.held_loss.hold(loss)
        loss.backward()
        self._libraries_keep = True
        return loss.detach()

    def _note_trained(self) -> None:
        """Give the optimizer, before its first step, the parameters too that require a gradient since a forward."""
        named, count = self.model.named_parameters(), len(self.trained)
        self.trained = {name: p for name, p in named if p.requires_grad or name in self.trained}
        if len(self.trained) > count and self.workload.optimizer is not None and self.finish.optimizer.steppers:
            self.finish.let_go()
            self.finish = self._finish_with(self.workload.optimizer(list(self.trained.values())))

    def step(self) -> None:
        self.forward_and_backward()
        self.finish()

    def update(self) -> None:
        """Run one optimizer step over all its micro-batches; free the gradients at its end."""
        for _ in range(self.loop.accumulation):
            self.forward_and_backward()
        self.finish()
        self.model.zero_grad(set_to_none=True)

    def peak_of_update(self, alignment_bytes: int) -> int:
        """Measure the peak of the next optimizer step, with the bytes that exist before it."""
        update, kept = self.from_nothing_held(self.update), self._libraries_keep
        before = self._released(alignment_bytes)
        rise = measure_peak(update, self.device, requested=True, collect=False)
        return self._bytes_in(before) + rise + (self._release_libraries() if kept else 0)

    def _released(self, alignment_bytes: int) -> tuple[int, Tracker]:
        """Free what no step keeps; return what is left (`_before`) without libraries' workspaces."""
        self.let_go()
        before = self._before(alignment_bytes)
        collect(self.device)
        return before

    def _release_libraries(self) -> int:
        """Free libraries' workspaces; return their bytes."""
        self._libraries_keep = False
        return release_libraries(self.device)

    def from_nothing_held(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run `step` after enough steps whose outputs, loss, or state, it holds.

        The profiler sees memory freed only if it saw it allocated.
        """
        steps = max(2 if self.holds else 1, self._steps_of_state(step))

        def repeated() -> None:
            for _ in range(steps):
                step()

        return repeated if steps > 1 else step

    def _steps_of_state(self, step: Callable[[], None]) -> int:
        """Run steps until everything that they may replace is new; return their number."""
        if not self._replaceable:
            return 1
        tracker = Tracker()
        tracker.follow_older(self._replaceable)
        alive = -1
        for count in range(1, MOST_STEPS_OF_STATE):
            step()
            before, alive = alive, sum(each.death is None for each in tracker.older.values())
            if alive == before:
                return count
        return MOST_STEPS_OF_STATE

    def bytes_before(self, alignment_bytes: int) -> int:
        """Return the bytes that exist before a step: parameters, buffers, batch, and state that lasts between steps."""
        return self._bytes_in(self._before(alignment_bytes))

    def _before(self, alignment_bytes: int) -> tuple[int, Tracker]:
        """Return the bytes of lasting tensors, and a tracker of the tensors that a step may replace."""
        kept = (
            [(p, p.grad) for p in self.model.parameters()],
            list(self.model.buffers()),
            [list(tensors_beside(each)) for each in (*self.model.parameters(), *self.model.buffers())],
            tensors_of(self.batch),
            self.finish.state,
            self.finish.averages,
        )
        if (weights := weights_on_host(self.model)) is not None:
            weights.rest()  # the tracker sees only those weights freed that it saw allocated
        tensors = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
        tracker = Tracker(alignment_bytes)
        tracker.follow_older(self._replaceable)
        lasting = tracker.fix([t for t in tensors if t.device.type == self.device.type])
        return lasting, tracker

    @property
    def _replaceable(self) -> list[torch.Tensor]:
        """State of the model outside its buffers; with an optimizer that is not torch's, its state and the weights."""
        found = list(ModelState(self.model, data=False, step=self.workload.step).unregistered)
        if self.finish.state and not type(self.finish.optimizer.alone).__module__.startswith("torch.optim."):
            found += [*self.finish.state, *self.model.parameters()]
        return [tensor for tensor in found if tensor.device.type == self.device.type]

    def _bytes_in(self, before: tuple[int, Tracker]) -> int:
        """Count the bytes that existed before a step that has run; on the CPU including those that it has freed."""
        lasting, tracker = before
        on_cpu = self.device.type == "cpu"
        return lasting + sum(each.size_bytes for each in tracker.older.values() if each.death is None or not on_cpu)

    def measure_steady_step(self, alignment_bytes: int, repeats: int) -> tuple[Measurement, int]:
        """Measure memory and time of a steady step, and the peak of requested bytes with those from before it.

        Libraries' workspaces exist before it, as from the second step of training on.
        """
        if self.device.type == "cuda" and not self._libraries_keep:
            self.step()
        step = self.from_nothing_held(self.step)
        before = self._released(alignment_bytes)
        measured = measure_step(step, self.device, warm_up=0, repeats=0, collect=False)
        before_bytes = self._bytes_in(before) + self._release_libraries()
        times = [time_once_us(self.step, self.device)]
        if times[0] < 1e6 * LONG_STEP_S:
            times += [time_once_us(self.step, self.device) for _ in range(repeats - 1)]
        measured = dataclasses.replace(measured, time_us=statistics.median(times))
        return measured, before_bytes + measured.requested_bytes


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach().to("cpu", copy=True)


def release_memory(device: torch.device) -> None:
    """Collect garbage, and give unused memory back to the card.

    cuBLAS frees its workspaces too: the next step allocates them again, and they count as its own.
    """
    release_libraries(device)
    collect(device)


def collect(device: torch.device) -> None:
    """Collect garbage, and give unused memory back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_libraries(device: torch.device) -> int:
    """Free the workspaces that cuBLAS keeps from one step to the next; return their bytes."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    counter = CudaCounter(device)
    before = counter.current_bytes()
    clear_cublas_workspaces()
    return before - counter.current_bytes()


def alive_over_step(workload: Workload, plan: Plan | None, about: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Measure (microseconds, bytes alive) over one steady step on the CPU, under `plan` if there is one."""
    device = torch.device("cpu")
    with undisturbed(device):
        loop, early = TrainingLoop.of(about), about.get("early_forwards", 0)
        training = Training(workload, device, 0, loop, early)
        training.begin_again()
        if plan is not None:
            training.apply(plan)
        training.step()
        before = training.bytes_before(1)
        release_memory(device)
        holds = training.holds
        training.let_go()
        alone = len(allocation_events(training.step)) if holds else 0
        training.let_go()
        events = allocation_events(training.from_nothing_held(training.step))
    times, sizes = np.array([e[0] for e in events]), np.array([e[1] for e in events], dtype=np.int64)
    times, alive = times[alone:], before + np.cumsum(sizes)[alone:]
    return (times - times[:1]) / 1000, alive
