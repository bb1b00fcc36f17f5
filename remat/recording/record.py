"""Record: run a workload's step on fake tensors once, and write down the Graph.

The step runs exactly as it would in training (Dynamo's guards, autograd's engine, the real optimizer class), but no
tensor has data. Forward and backward are recorded in one pass: a saved-tensors hook gives autograd a private copy
of everything that it saves, so that the life of a storage without autograd and every single save can be told
apart, and a region's behaviour follows from the record.

A step is recorded in its steady state: the optimizer's state exists, and with gradient accumulation so do the
gradients. That is the larger of the two cases. Of the first step, the part that differs is noted: the optimizer making
its state.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from remat._torch.recording import transforms_left
from remat.capture.circumstances import state_of, versions
from remat.capture.settling import recording_models
from remat.evaluation.forwards import EVALUATES, FORWARDS, LOOKS, PASSES, is_plain
from remat.evaluation.graph import (
    CALLED_MODULES,
    DRAWN_LENGTHS,
    DRAWN_OUTSIDE,
    FORWARD_ALONE,
    GRAPH_CALLS,
    KEPT_OUTSIDE,
    OPTIMIZER_STATE,
    OUTSIDE,
    STATE,
    WITH_STEP,
    WRAPPED_NUMBERS,
    Graph,
    forward_alone_bytes,
)
from remat.recording.fake_step import LAYERS_ON_HOST, REPEATED_STEP, WRAPPED_NUMBER_BYTES, FakeStep
from remat.recording.instrumented import execute_call
from remat.recording.recorder import Recorder
from remat.recording.repeats import Repeats
from remat.recording.trails import trail_of
from remat.workload.workload import StepModule

MUCH_OUTSIDE = 0.05  # of the bytes alive as backward begins: values between graphs that keep more are named


def record(step: FakeStep, *, alignment_bytes: int = 1, whole: Graph | None = None) -> Graph:
    """Record the Graph of `step`. Raises `CaptureError` for a model that cannot be captured, naming the operator.

    whole  an earlier graph of the same step in another form: the step is in its steady state, and its first
           optimizer step needs the same memory
    """
    return record_with(step, alignment_bytes=alignment_bytes, whole=whole)[0]


@transforms_left()
def record_with(step: FakeStep, *, alignment_bytes: int, whole: Graph | None) -> tuple[Graph, Recorder]:
    """Run `record`; return its Graph and its Recorder."""
    if whole is None or step.loop.holds_outputs:
        first_step_rise, first = step.warm_up(alignment_bytes)
    repeats = Repeats(step) if whole is None else None
    numbers = step.numbers()
    recorder = Recorder(alignment_bytes, step.model.buffers(), step.known)
    recorder.kernels_of = step.kernels_of
    fixed = step.fix_state(recorder)
    made = ("gradients", OPTIMIZER_STATE, REPEATED_STEP, "running average")  # by the first step itself
    before = sum(size for name, size in fixed.items() if name not in made)
    held: list[tuple[int, int]] = []

    def note(replace: Callable[[], None]) -> None:
        before_bytes = first.alive_now
        replace()
        held.append((before_bytes - first.alive_now, recorder.op_count))

    with (
        step.executing(functools.partial(execute_call, recorder)),
        step.held_outputs.told(note),
        torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
    ):
        kept_bytes = step.execute(recorder, recorder.after_forward, lambda: recorder.after_backward(step.model))
    lasting, replaced = recorder.state_of_the_step_before()
    if lasting:
        fixed[STATE] = lasting
        before += lasting
    on_cpu = step.device.type == "cpu" and alignment_bytes == 1  # elsewhere they are not on the device
    if recorder.wrapped_numbers and on_cpu:
        fixed[WRAPPED_NUMBERS] = WRAPPED_NUMBER_BYTES * recorder.wrapped_numbers
    paths = {path for path, _ in step.model.named_modules()}  # others, kept in a list say, have no path to be found by
    graph = recorder.graph(
        fixed, {**_about(step), CALLED_MODULES: [path for path in recorder.modules if path in paths]}
    )
    if whole is None:
        graph = dataclasses.replace(graph, about={**graph.about, FORWARD_ALONE: forward_alone_bytes(graph)})
        first_step_bytes = before + first_step_rise + kept_bytes
    else:  # its gradients are all made in backward, where they are counted
        first_step_bytes = whole.first_step_bytes - sum(size for size, _ in whole.held_outputs[: len(held)])
    graph = dataclasses.replace(
        graph,
        parameters=tuple(recorder.parameters_of(step)),
        first_step_bytes=first_step_bytes + sum(size for size, _ in held),
        held_outputs=(*held, *replaced, *[(kept_bytes, recorder.forward_end)] * (kept_bytes > 0)),
    )
    if (calls := step.forwards[-1].first + step.forwards[-1].calls) > len(graph.call_nodes):
        graph = dataclasses.replace(graph, about={**graph.about, GRAPH_CALLS: calls})
    if kept := _kept_outside(graph):
        graph = dataclasses.replace(graph, about={**graph.about, KEPT_OUTSIDE: kept})
    if repeats is not None:
        forwards = step.forwards
        step.trails.append(trail_of(recorder, recorder.forward_end))
        repeats.require()
        if drawn := repeats.drawn_outside(forwards):
            graph = dataclasses.replace(graph, about={**graph.about, DRAWN_OUTSIDE: drawn})
        step.held_numbers = numbers  # every other record, and every replay, is of the same step
        step.shared.require_kept()
    return graph, recorder


def _kept_outside(graph: Graph) -> list[tuple[str, int]]:
    """List (line, bytes that autograd keeps) of the lines between graphs, largest first; empty if they keep little."""
    kept = np.unique(graph.saved_tensors.storage)
    kept = kept[kept >= 0]
    sizes = collections.Counter[str]()
    for storage in kept:
        node = graph.storages.node[storage]
        if node >= 0 and graph.nodes[node].call == OUTSIDE:
            sizes[graph.nodes[node].op] += int(graph.storages.size_bytes[storage])
    is_much = sizes.total() > MUCH_OUTSIDE * (sum(graph.fixed_bytes.values()) + graph.storages.size_bytes[kept].sum())
    return sizes.most_common() if is_much else []


def _about(step: FakeStep) -> dict[str, Any]:
    workload, forwards = step.workload, step.forwards
    first = forwards[0]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in step.model.parameters()})
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "batch_elements": sum(first.elements.values()),
        "batch_inputs": first.elements,
        "masks": first.masks,
        "autocast": first.autocast,
        "parameter_dtypes": dtypes,
        "parameter_count": sum(p.numel() for p in step.model.parameters()),
        "trainable_count": sum(p.numel() for p in step.trained),
        "optimizer": step.optimizer.name,
        "traced_branches": None if (answers := step.calls.answers) is None else answers.given_up,
        "opaque_functions": sorted(answers.opaque) if (answers := step.calls.answers) else [],
        "recording_models": recording_models(step.model),
        **step.early.to_json(step.signatures),
        "own_checkpoints": step.calls.own_checkpoints,
        **({WITH_STEP: True} if isinstance(step.model, StepModule) else {}),
        **step.form.to_json(),
        **step.loop.to_json(),
        **({LAYERS_ON_HOST: found} if (found := step.layers_on_host) else {}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": versions(),
        "batch": first.given,
        **({DRAWN_LENGTHS: True} if step.known.drawn_lengths else {}),
        **({EVALUATES: True} if step.evaluates else {}),
        **({LOOKS: True} if step.looks else {}),
        **({PASSES: step.deferred.count} if step.deferred is not None else {}),
        **({} if is_plain(forwards) else {FORWARDS: [forward.to_json() for forward in forwards]}),
        **state_of(step.model),
    }
