"""The judge of random models under random plans, for the tests and for `python -m benchmarks fuzzing`.

A model is recorded once, and trained for two steps under each plan. Judged are

    gradients   loss, gradients, parameters, buffers and generator equal, bit for bit, to the untouched model's
    regions     entered, and nodes recomputed, as often as planned
    evaluator   its peak against the replay's: equal
    peak        bytes that the CPU's allocator saw against the replay, with kernels' workspaces as measured, kind by
                kind; a case fails where the measured peak is above the predicted one by more than 0.5 %. Reading the
                state of the generator, as a region with random nodes does, takes 5 KB: nothing in a model, and 8 % of a
                toy, so here it is added to the prediction.

A step in another form (groups fused, MLPs in slices) is judged by that form under no plan; and that by the untouched
model's, to which it must be `NEAR`.

On the card streams run plan after plan by another schedule, where what was expected was computed by none.

Toys are small: a kernel's workspace that the prediction does not know weighs much more in them than in a model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from remat.chunking import chunked_rows
from remat.costing.device_allocator import measure_peak
from remat.costing.operator_timing import time_operator
from remat.costing.timing_cache import NotMeasurable
from remat.errors import RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import CAPTURED_FORM, Form
from remat.evaluation.graph import Graph, OpKind
from remat.evaluation.plan import Offload, Region, to_refs
from remat.execution.apply import apply
from remat.execution.eager.replay import replay
from remat.host.copies import Copies
from remat.offloading.refs import to_offload_refs
from remat.offloading.timeline import Timeline
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.step_contexts import autocast_context
from remat.recording.tracker import Tracker
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import DEVICE, SCHEDULES, streams
from tests.offloads import random_offloads
from tests.random_models import recipe, regions, workload_of
from tests.toys import plan_by_hand, planned_graphs

SAMPLES = 16
STEPS = 2
TOLERANCE = 0.005
NEAR = {None: 1e-3, torch.bfloat16: 0.1}  # of a tensor's norm, or a hundredth of the largest gradient's, by autocast
generator_state = torch.cuda.get_rng_state if DEVICE.type == "cuda" else torch.get_rng_state
GENERATOR_BYTES = torch.get_rng_state().nbytes if DEVICE.type == "cpu" else 0  # CUDA's is read on the host


def verdicts(number: int, plans: int, form: Form = CAPTURED_FORM, copies: Copies | None = None) -> list[dict[str, Any]]:
    """Judge model `number` in `form` under each of its plans; with `copies`, plans have offloads."""
    draw = random.Random(number)
    made = dataclasses.replace(recipe(draw), has_mlps=bool(form.rows))
    about = {"model": number, "of": str(made)}
    workload = workload_of(made, f"random-{number}", SAMPLES)
    try:
        with warnings.catch_warnings():  # a plan that is drawn need not have room for the check of its first step
            warnings.filterwarnings("ignore", "the first step under the plan is not verified: .* no room")
            subject = Subject(workload, made.accumulation, form)
            rows = []
            for plan in range(plans):
                with streams(SCHEDULES[plan % len(SCHEDULES)]):
                    rows.append({**about, "plan": plan, **subject.judge(draw, copies)})
            return rows
    except (RematError, RuntimeError) as error:
        return [{**about, "failures": [f"refused: {type(error).__name__}: {str(error)[:300]}"]}]
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def few_rows() -> Iterator[None]:
    """Slices of rows may be as short as toys are."""
    with mock.patch.object(chunked_rows, "FEWEST_ROWS", 8), mock.patch.object(chunked_rows, "ALIGNED_ROWS", 8):
        yield


def sensible(graph: Graph, chosen: tuple[Region, ...]) -> tuple[Region, ...]:
    """`chosen` without what no solver makes, and the evaluator makes no claims of.

    That is inner regions of nothing but counters.
    """

    def counters(part: Region) -> bool:
        return all(node.effect == "counter" for node in graph.nodes[part.first : part.end])

    return tuple(dataclasses.replace(r, inner=tuple(p for p in r.inner if not counters(p))) for r in chosen)


class Subject:
    """One model: recorded, and trained without a plan; then to be judged under any."""

    def __init__(self, workload: Workload, accumulation: int, form: Form = CAPTURED_FORM) -> None:
        self.workload, self.accumulation = workload, accumulation
        self.step = FakeStep(workload, device=DEVICE, loop=TrainingLoop(accumulation=accumulation))
        self.step.form = form
        self.graph = record(self.step)
        self.workspace_of = workspaces(self.graph)
        per_kind = [self.workspace_of.get(kind.key, 0) for kind in self.graph.kinds]
        self.memory = Memory(self.graph, np.array(per_kind)[self.graph.op_kind])
        gc.collect()  # cyclic garbage must not be freed while a peak is measured
        gc.freeze()  # and the next collection need not look at all this again
        torch.manual_seed(0)
        untouched = workload.build().to(DEVICE)
        self.state = copy.deepcopy(untouched.state_dict())
        self.model = apply(copy.deepcopy(untouched), plan_by_hand(self.graph, ()))
        self.expected = Trained(self, untouched).values
        self.far: list[str] = []
        if form != CAPTURED_FORM:
            found = Trained(self, self.model).values
            self.far, self.expected = far(self.expected, found, workload.autocast), found

    def judge(self, draw: random.Random, copies: Copies | None = None) -> dict[str, Any]:
        chosen = sensible(self.graph, regions(draw, self.graph))
        offloads: tuple[Offload, ...] = ()
        if copies is not None:
            offloads = random_offloads(draw, Timeline(self.memory, chosen, np.ones(self.graph.op_count)))
        refs = to_offload_refs(self.memory, chosen, offloads)
        planned = planned_graphs(self.model)
        planned.plan = dataclasses.replace(plan_by_hand(self.graph, chosen), offloads=refs)
        planned.copies = copies
        self.model.load_state_dict(self.state)
        self.model.zero_grad(set_to_none=True)
        counts = planned.watch(observe=True)
        found = Trained(self, self.model)
        failures = [*self.far[:3], *(f"{name} differs" for name in different(self.expected, found.values)[:3])]
        steps, wanted = STEPS * self.accumulation, (len(chosen), self.memory.recomputed_nodes(chosen))
        if (counts.regions, counts.recomputed_nodes) != tuple(steps * count for count in wanted):
            failures.append(f"entered {counts.regions}, recomputed {counts.recomputed_nodes}, planned {wanted}")
        row = {"regions": counts.regions, "recomputed": counts.recomputed_nodes, "offloads": len(refs)}
        if (offloader := planned.offloader) is not None and offloader.counts.out != steps * len(refs):
            failures.append(f"{offloader.counts.out} went to the host, planned {steps * len(refs)}")
        predicted, difference = self._predicted(chosen, offloads)
        failures += difference
        planned.watch(observe=False)
        measured = found.peak_bytes()
        error = 100 * (measured - predicted) / predicted
        if error > 100 * TOLERANCE:
            failures.append(f"measured {measured} is above the predicted {predicted} by {error:.2f} %")
        return {**row, "error_percent": round(error, 3), "failures": failures}

    def _predicted(self, chosen: tuple[Region, ...], offloads: tuple[Offload, ...]) -> tuple[int, list[str]]:
        """Peak by the replay, workspaces included; and where the evaluator differs from it."""
        numbers = self.graph.unseen_bytes
        refs = to_refs(self.graph, chosen)
        curve = self.memory.offloading(offloads).curve(chosen)
        evaluated = int(curve.alive_bytes[curve.executed].max())  # between operators the replay does not look
        moved = to_offload_refs(self.memory, chosen, offloads)
        alive = replay(self.step, refs, workspace_of=self.workspace_of, offloads=moved)
        replayed = int(alive.max()) + numbers
        differs = replayed != evaluated
        draws = any(self.graph.nodes[v].draws for region in chosen for v in range(region.first, region.end))
        said = [f"evaluator {evaluated}, replay {replayed}"] * differs
        return max(replayed, curve.peak_bytes) + GENERATOR_BYTES * draws, said


class Trained:
    """A model after a few steps: all that training changed, by name; and the peak of one step more."""

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        self._subject, self._model = subject, model
        make = subject.workload.optimizer
        self._optimizer = make([p for p in model.parameters() if p.requires_grad]) if make else None
        torch.manual_seed(1)
        self._batch = subject.workload.batch(SAMPLES, None).to(DEVICE)
        self.values: dict[str, torch.Tensor] = {}
        for number in range(STEPS):
            self._micro_batches(number)
            self._finish(number)

    def _micro_batches(self, number: int) -> None:
        for micro in range(self._subject.accumulation):
            torch.manual_seed(10 * number + micro)
            loss = self._forward_and_backward()
            self.values[f"loss {number}.{micro}"] = loss
        self.values[f"generator {number}"] = generator_state()
        named = self._model.named_parameters()
        self.values |= {f"gradient of {n} {number}": p.grad.clone() for n, p in named if p.grad is not None}

    def _forward_and_backward(self) -> torch.Tensor:
        with autocast_context(DEVICE, self._subject.workload.autocast):
            loss = self._subject.workload.step(self._model, self._batch)
        loss.backward()
        return loss.detach()

    def _finish(self, number: int) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        if self._subject.accumulation == 1:
            self._model.zero_grad(set_to_none=True)
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        dense = ((name, tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()) for name, tensor in named)
        self.values |= {f"{name} {number}": tensor.clone() for name, tensor in dense}

    def peak_bytes(self) -> int:
        """Of one more step in the steady state, with what existed before it."""
        self.values.clear()
        state = dict(self._optimizer.state) if self._optimizer else None
        model = [(p, p.grad) for p in self._model.parameters()], list(self._model.buffers())
        before = Tracker().fix(model, self._batch, state)
        return before + measure_peak(self._step, DEVICE, requested=True)

    def _step(self) -> None:
        self._forward_and_backward()
        if self._optimizer is not None:
            self._optimizer.step()
        if self._subject.accumulation == 1:
            self._model.zero_grad(set_to_none=True)


def far(untouched: dict[str, torch.Tensor], fused: dict[str, torch.Tensor], autocast: torch.dtype | None) -> list[str]:
    """List the results of the first step, before anything could add up, that are not near."""
    first = [n for n in untouched if n.startswith("loss 0.0") or (n.startswith("gradient") and n.endswith(" 0"))]
    largest = max(float(untouched[n].double().norm()) for n in first)
    return [
        f"{n} is far from the untouched one"
        for n in first
        if _apart(untouched[n], fused[n]) > NEAR[autocast] * max(float(untouched[n].double().norm()), 0.01 * largest)
    ]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm())


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    missing = sorted(left.keys() ^ right.keys())
    return missing + [n for n in left if n in right and not torch.equal(left[n], right[n])]


_WORKSPACES: dict[tuple[str, str], int] = {}


def workspaces(graph: Graph) -> dict[tuple[str, str], int]:
    """Kernels' own bytes by operator and signature, each kind measured once for all cases."""
    return {key: size for kind in graph.kinds for key, size in [_workspace(kind)] if size}


def _workspace(kind: OpKind) -> tuple[tuple[str, str], int]:
    key = kind.key
    if key not in _WORKSPACES:
        try:
            with torch.no_grad(), torch.random.fork_rng():
                _WORKSPACES[key] = time_operator(kind, DEVICE, repeats=3, seconds_per_kind=0.0).workspace_bytes
        except NotMeasurable:
            _WORKSPACES[key] = 0
    return key, _WORKSPACES[key]
