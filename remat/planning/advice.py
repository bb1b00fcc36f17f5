"""Advice: which lever frees how much of a step's peak, each found by recording the step again with it.

A lever is something that a person can change without another model: a smaller micro-batch, another optimizer or
another form of it, bf16 weights, states shared over ranks, the optimizer's state or frozen weights on the host. Two
more are computed on the recorded graph, because the model would have to change: a loss in chunks (the logits shrink by
the number of chunks), and fused attention (the scores are never written down); those are labelled as such.

What counts is the *judge*: a function from a graph to a peak. Asked about a step as it is, it is the peak without
checkpointing; asked because nothing fits, the least peak of all plans.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from remat.capture.generators import generators_kept
from remat.costing.costs import Costs, estimated_costs, with_library_workspaces
from remat.costing.planning_device import PlanningDevice
from remat.evaluation.breakdown import HEAD, codes_of_storages
from remat.evaluation.graph import Graph
from remat.evaluation.sharding import shard
from remat.formulation.clock import Clock
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.host.optimizer_state import can_be_offloaded
from remat.host.weights import FEWEST, layers_of
from remat.planning.layers_on_host import graph_with_layers
from remat.planning.links import state_wait_us
from remat.planning.profiling import fake_step
from remat.planning.refused_sizes import error_at
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.solvers.least_peak import least_peak
from remat.units import ms
from remat.workload.optimizers import optimizer_named
from remat.workload.training_loop import SHARDS, TrainingLoop
from remat.workload.workload import Workload

Judge = Callable[[Graph, Costs], int]

RANKS = 8  # over which sharding is tried
CHUNKS = 8  # of the loss
SLICED = "chunked_loss"  # in the operator of a loss that runs in slices
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
EIGHT_BIT = ("Adam", "AdamW")
SOFTMAXES = ("aten._softmax.default", "aten._safe_softmax.default")
BESIDE_SOFTMAX = 6  # operators between the scores of an attention and its output


@dataclasses.dataclass(frozen=True)
class Lever:
    """A change to the step, the peak after it, and the bytes that it frees (negative: it costs bytes)."""

    what: str
    peak_bytes: int
    frees_bytes: int


@generators_kept()
def advise(
    workload: Workload,
    place: PlanningDevice,
    loop: TrainingLoop,
    whole: Graph,
    judge: Judge,
    *,
    step: FakeStep | None = None,
    losses_are_cut: bool = False,
) -> list[Lever]:
    """Return the levers that lower the peak, the largest gain first.

    whole           the step as recorded, before any sharding
    step            of `workload`, captured already; it is left with another optimizer and in another loop
    losses_are_cut  its losses run in slices already, or were tried in slices: cutting them is no lever
    """
    peak = judge(shard(whole, loop), estimated_costs(whole, place.target, place.table))
    found = []
    step = fake_step(workload, place) if step is None else step
    for what, graph in _changed(step, workload, place, loop, whole, losses_are_cut or _is_cut(whole)):
        left = judge(graph, estimated_costs(graph, place.target, place.table))
        found.append(Lever(what, left, peak - left))
    return sorted((lever for lever in found if lever.frees_bytes > 0), key=lambda lever: -lever.frees_bytes)


def least_peak_of(graph: Graph, costs: Costs) -> int:
    """Return the least peak that any plan of the step has, or one close to it; serves as a judge."""
    problem = Problem(graph, costs, find_space(graph), 1)
    return least_peak(problem, Limits().at_most(Clock().lever_s)).peak_bytes


def _is_cut(graph: Graph) -> bool:
    return any(SLICED in node.op for node in graph.nodes)


def _changed(
    step: FakeStep, workload: Workload, place: PlanningDevice, loop: TrainingLoop, whole: Graph, losses_are_cut: bool
) -> Iterator[tuple[str, Graph]]:
    """Yield each lever with one rank's graph under it."""
    changed = ((what, _step_of(other, place)) for what, other in _workloads(workload, whole))
    for what, other in itertools.chain(changed, _optimized(step, whole)):
        if other is None:
            continue
        if not (loop.offload_optimizer or loop.step_in_backward) or can_be_offloaded(other.optimizer.alone):
            yield what, shard(_recorded(other, place, loop), loop)
    if loop.shard is None:
        ranks = RANKS if loop.ranks == 1 else loop.ranks
        for kind in SHARDS:
            shared = dataclasses.replace(loop, ddp=False, ranks=ranks, shard=kind)
            yield f"states shared over {ranks} ranks (--ranks {ranks} --shard {kind})", shard(whole, shared)
    if not losses_are_cut:
        yield f"a loss in {CHUNKS} chunks (computed)", shard(with_chunked_loss(whole, CHUNKS), loop)
    yield "fused attention (computed)", shard(with_fused_attention(whole), loop)
    step.train_by(TrainingLoop(), workload.optimizer)
    is_known = can_be_offloaded(step.optimizer.alone)
    if is_known and place.target.host_bytes_per_us and loop.shard is None and not loop.offload_optimizer:
        yield _state_on_host(step, place, loop)
    if is_known and not loop.step_in_backward and loop.gradients_may_go:
        graph = _recorded(step, place, dataclasses.replace(loop, step_in_backward=True))
        yield "parameters stepped in backward (--optimizer-step backward)", graph
    if place.target.host_bytes_per_us and not (loop.shard or loop.ddp or loop.ema or loop.weights_on_host):
        yield from _weights_on_host(step, place, loop, whole)


def _step_of(workload: Workload, place: PlanningDevice) -> FakeStep | None:
    """Return the step on fake tensors; None if its own code refuses it, as batch normalization does one sample."""
    return fake_step(workload, place) if error_at(workload, place) is None else None


def _recorded(step: FakeStep, place: PlanningDevice, loop: TrainingLoop) -> Graph:
    step.loop = loop
    return with_library_workspaces(record(step, alignment_bytes=place.target.alignment_bytes), place.target)


def _state_on_host(step: FakeStep, place: PlanningDevice, loop: TrainingLoop) -> tuple[str, Graph]:
    graph = _recorded(step, place, dataclasses.replace(loop, offload_optimizer=True))
    waits = ms(state_wait_us(graph, estimated_costs(graph, place.target, place.table)))
    return f"optimizer state on the host (--offload optimizer; each optimizer step waits {waits})", graph


def _weights_on_host(
    step: FakeStep, place: PlanningDevice, loop: TrainingLoop, whole: Graph
) -> Iterator[tuple[str, Graph]]:
    """Yield keeping all layers' frozen weights on the host, if there are enough such layers."""
    step.loop = loop
    if len(layers := layers_of(step.model)) >= FEWEST:
        graph = graph_with_layers(whole, step, len(layers), place.target.alignment_bytes)
        yield "frozen weights on the host but for two layers (--offload weights)", graph


def _workloads(workload: Workload, whole: Graph) -> Iterator[tuple[str, Workload]]:
    if workload.batch_size > 1:
        size = workload.batch_size // 2
        yield f"micro-batch {size} (and twice the accumulation)", workload.sized(size)
    if whole.about["parameter_dtypes"] == ["float32"]:
        yield "weights, gradients and state in bf16 (--dtype bf16)", workload.with_dtype("bf16")


def _optimized(step: FakeStep, whole: Graph) -> Iterator[tuple[str, FakeStep]]:
    """Yield `step` with other optimizers."""
    name = whole.about["optimizer"]
    if name in FUSED and _has_fused(name):
        step.train_by(TrainingLoop(), optimizer_named(f"{name.lower()}:fused"))
        yield f"the fused optimizer (--optimizer {name.lower()}:fused)", step
    if name in EIGHT_BIT and importlib.util.find_spec("bitsandbytes") is not None:
        step.train_by(TrainingLoop(), optimizer_named(f"{name.lower()}8bit"))
        yield f"an 8-bit optimizer (--optimizer {name.lower()}8bit)", step


def _has_fused(name: str) -> bool:
    """Return whether the optimizer class of torch takes `fused`."""
    return "fused" in inspect.signature(getattr(torch.optim, name)).parameters


# Levers that are computed on the graph


def with_chunked_loss(graph: Graph, chunks: int) -> Graph:
    """Divide logits, loss and everything else after the last layer by `chunks`, in forward and backward."""
    storages = graph.storages
    made_in = np.where(storages.birth < graph.backward_end, graph.op_node[storages.birth], -1)
    head = codes_of_storages(graph) == HEAD
    first = storages.node[head].min(initial=len(graph.nodes))
    in_backward = (storages.node < 0) & (made_in >= first)
    in_backward[list(graph.parameter_gradients)] = False
    return _resized(graph, head | in_backward, chunks)


def with_fused_attention(graph: Graph) -> Graph:
    """Set the sizes of attention scores to 0: inputs, outputs and neighbours of 4-dimensional softmaxes."""
    storages, small = graph.storages, np.zeros(len(graph.storages.birth), dtype=bool)
    for op in _softmaxes(graph):
        own = storages.size_bytes[(storages.birth == op)].max(initial=0)
        near = (np.abs(storages.birth - op) <= BESIDE_SOFTMAX) & (storages.size_bytes * 4 >= own)
        node = graph.op_node[op]
        small |= near & (own > 0)
        if op < graph.forward_end:
            again = (storages.node < 0) & (storages.birth < graph.backward_end)
            again &= np.abs(graph.op_node[np.minimum(storages.birth, graph.op_count - 1)] - node) <= BESIDE_SOFTMAX
            small |= again & (storages.size_bytes == own)
    small[list(graph.parameter_gradients)] = False
    return _resized(graph, small, 0)


def _softmaxes(graph: Graph) -> list[int]:
    """List the forward operators that are the softmax of an attention, over queries times keys of each head."""

    def attends(kind: int) -> bool:
        signature = graph.kinds[kind].signature
        if graph.kinds[kind].name not in SOFTMAXES or not signature[0]:
            return False
        shape = signature[0][0].get("tensor", [[]])[0] if isinstance(signature[0][0], dict) else []
        return len(shape) == 4

    wanted = {kind for kind in range(len(graph.kinds)) if attends(kind)}
    return [op for op in range(graph.forward_end) if int(graph.op_kind[op]) in wanted]


def _resized(graph: Graph, chosen: np.ndarray, pieces: int) -> Graph:
    """Divide the sizes of the `chosen` storages by `pieces`; 0 pieces makes them 0."""
    size = graph.storages.size_bytes.copy()
    size[chosen] = -(-size[chosen] // pieces) if pieces else 0
    return dataclasses.replace(graph, storages=dataclasses.replace(graph.storages, size_bytes=size))
