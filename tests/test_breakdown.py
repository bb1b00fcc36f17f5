"""Where every byte goes: the parts add up, and the first step lacks what only later ones have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.training_loop import TrainingLoop
from tests import toys as workloads
from tests.cached import cached
from tests.examples import examples
from tests.graphs import TOYS, ToyNode, plans, toy_graph, toys
from tests.toys import CONVNET, Transformer, every_block

WIDTH_BYTES = 4
TRANSFORMER = dataclasses.replace(workloads.TRANSFORMER, build=lambda: Transformer(layers=2))
WORKLOADS = {
    "transformer": TRANSFORMER,
    "transformer-amp": dataclasses.replace(TRANSFORMER, autocast=torch.bfloat16),
    "convnet": CONVNET,
}


@cached
def recorded(loop: TrainingLoop, optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW) -> Memory:
    workload = dataclasses.replace(TRANSFORMER, optimizer=optimizer)
    return Memory(record(FakeStep(workload, device=torch.device("cpu"), loop=loop)))


@given(toys(), st.data())
@settings(max_examples=examples(30, 100))
def test_the_parts_add_up_to_what_is_alive_at_every_operator(nodes: list[ToyNode], data: st.DataObject) -> None:
    graph, costs = toy_graph(nodes, fixed_bytes=7)
    regions = data.draw(plans(graph))
    memory = Memory(graph, costs.workspace_per_op(graph))
    stack = breakdown.over_time(memory, regions)
    assert np.array_equal(np.sum(list(stack.parts.values()), axis=0), stack.curve.alive_bytes)
    assert sum(breakdown.at_peak(memory, regions).values()) == stack.curve.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_point_of_the_stack_is_the_breakdown_there(name: str) -> None:
    graph = record(FakeStep(WORKLOADS[name], device=torch.device("cpu")))
    memory, regions = Memory(graph), every_block(graph)
    stack = breakdown.over_time(memory, regions)
    for position in range(0, len(stack.curve.op), 17):
        there = {part: int(size[position]) for part, size in stack.parts.items() if size[position]}
        assert breakdown.at(memory, regions, position) == there


@pytest.mark.exhaustive
def test_recomputed_activations_are_told_from_kept_ones() -> None:
    memory = recorded(TrainingLoop())
    graph = memory.graph
    assert "recomputed activations" not in breakdown.over_time(memory, ()).parts
    assert breakdown.over_time(memory, every_block(graph)).parts["recomputed activations"].max() > 0


def test_modules_share_the_activations_and_layers_are_taken_together() -> None:
    memory = recorded(TrainingLoop())
    graph = memory.graph
    end = graph.forward_end - 1
    modules, parts = breakdown.by_module(memory, (), end), breakdown.at(memory, (), end)
    assert sum(modules.values()) == parts["activations"] + parts["logits and loss"]
    assert "layers.*.up" in modules and not any(name.startswith("layers.0") for name in modules)


# The loop around the step


def numel() -> int:
    return sum(p.numel() for p in TRANSFORMER.build().parameters())


@pytest.mark.exhaustive
def test_a_running_average_is_another_copy_of_the_parameters() -> None:
    plain, averaged = recorded(TrainingLoop()), recorded(TrainingLoop(ema=True))
    assert averaged.graph.fixed_bytes["running average"] == numel() * WIDTH_BYTES
    rise = averaged.peak_without_checkpointing - plain.peak_without_checkpointing
    assert rise >= numel() * WIDTH_BYTES


@pytest.mark.exhaustive
def test_gradient_buckets_are_another_copy_of_the_gradients() -> None:
    assert recorded(TrainingLoop(ddp=True)).graph.fixed_bytes["gradient buckets"] == numel() * WIDTH_BYTES


@pytest.mark.exhaustive
def test_clipping_runs_before_the_optimizer() -> None:
    plain, clipped = recorded(TrainingLoop(), None), recorded(TrainingLoop(clip_grad_norm=True), None)
    assert plain.graph.op_count == plain.graph.backward_end
    assert clipped.graph.op_count > clipped.graph.backward_end


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "accumulation"),
    [
        (torch.optim.AdamW, 4),
        (torch.optim.SGD, 1),
        (torch.optim.Adafactor, 1),
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in ((torch.optim.AdamW, 1), (torch.optim.SGD, 4), (torch.optim.Adafactor, 4), (None, 1), (None, 4))
        ),
    ],
)
def test_the_first_step_lacks_the_optimizers_state_until_the_optimizer_makes_it(
    optimizer: type[torch.optim.Optimizer] | None, accumulation: int
) -> None:
    memory = recorded(TrainingLoop(accumulation=accumulation), optimizer)
    graph = memory.graph
    state = graph.fixed_bytes.get("optimizer state", 0)
    for regions in ((), every_block(graph)):
        curve = memory.curve(regions)
        before = int(curve.alive_bytes[curve.op < graph.backward_end].max()) - state
        first = memory.first_step_peak(regions)
        assert before <= first <= curve.peak_bytes
        assert first >= state + graph.fixed_bytes["parameters"]


def test_every_parameter_has_its_gradient_and_its_state() -> None:
    graph = recorded(TrainingLoop()).graph
    names = [name for name, _ in TRANSFORMER.build().named_parameters()]
    assert [parameter.name for parameter in graph.parameters] == names
    sizes = {int(graph.storages.size_bytes[p.gradient]) == p.size_bytes == p.gradient_bytes for p in graph.parameters}
    assert sizes == {True}
    assert sum(p.state_bytes for p in graph.parameters) == graph.fixed_bytes["optimizer state"]
    assert sum(p.size_bytes for p in graph.parameters) == graph.fixed_bytes["parameters"]
    assert {p.gradient for p in graph.parameters} == set(graph.parameter_gradients)


@pytest.mark.exhaustive
def test_gradients_that_accumulate_are_there_before_the_step() -> None:
    graph = recorded(TrainingLoop(accumulation=2)).graph
    assert {p.gradient for p in graph.parameters} == {-1}
    assert sum(p.gradient_bytes for p in graph.parameters) == graph.fixed_bytes["gradients"]


@pytest.mark.exhaustive
def test_a_step_is_recorded_again_under_another_loop_as_if_it_were_new() -> None:
    step = FakeStep(TOYS["residual"], device=torch.device("cpu"))
    first = record(step)
    step.loop = TrainingLoop(accumulation=2, clip_grad_norm=True)
    between = record(step)
    step.loop = TrainingLoop()
    again = record(step)
    assert between.fixed_bytes["gradients"] and "gradients" not in first.fixed_bytes
    assert again.fixed_bytes == first.fixed_bytes and again.first_step_bytes == first.first_step_bytes
    assert np.array_equal(Memory(again).curve(()).alive_bytes, Memory(first).curve(()).alive_bytes)


def test_the_loop_of_a_plan_is_read_back() -> None:
    loop = TrainingLoop(accumulation=4, ema=True, ranks=8, shard="zero2")
    assert TrainingLoop.of({**loop.to_json(), "workload": "any"}) == loop
    assert TrainingLoop().to_json() == {"accumulation": 1}
