"""Isomorphic runs share the shape that each of them has: every shape against the run computed for itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from remat.costing.costs import Costs, estimated_costs
from remat.costing.planning_device import find_planning_device
from remat.evaluation.graph import Graph
from remat.formulation.choices import Run
from remat.formulation.problem import Problem
from remat.formulation.search_space import Space, find_space
from remat.models import gpt2, t5
from remat.planning.profiling import fake_step, profile_step
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests import small_models
from tests.examples import examples
from tests.graphs import TOYS, ToyNode, chain, every_cut, recorded, toy_graph, toys

AMPLE = 10**12
MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: gpt2.workload("gpt2", n_embd=32, n_layer=5, n_head=2, batch_size=2, n_positions=16, vocab_size=64),
    "t5": lambda: t5.workload("t5", d_model=32, num_layers=3, num_heads=2, batch_size=2, seq_len=16, vocab_size=64),
    "bert": small_models.bert,
    "qwen3-moe": small_models.qwen3_moe,
    "resnet50": small_models.resnet,
}


def shape_by_itself(problem: Problem, run: Run) -> object:
    """The shape of `run` as a problem finds it that has seen no other run."""
    if run.region is None:
        return dataclasses.replace(run.shape, highest=problem._points(run)[0])
    return problem._find_region_shape(run.a, run.b, run.region)


def assert_shared_shapes_are_right(graph: Graph, costs: Costs, space: Space, *, every: int = 1) -> None:
    problem = Problem(graph, costs, space, AMPLE)
    wrong = [run for run in problem.runs[::every] if shape_by_itself(problem, run) != run.shape]
    assert wrong == []


@pytest.mark.exhaustive
@pytest.mark.often("resnet50")
@pytest.mark.parametrize(
    "name",
    MODELS,
)
def test_runs_of_real_models(name: str) -> None:
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(MODELS[name](), place), place)
    assert_shared_shapes_are_right(profile.graph, profile.costs, find_space(profile.graph), every=3)


def test_runs_of_layers_that_share_weights() -> None:
    """Autocast casts a weight once: runs with its first use make the copy, all others make it again."""
    graph = recorded(TOYS["reused"]).graph
    costs = estimated_costs(graph, TARGETS["h100-80gb"])
    assert_shared_shapes_are_right(graph, costs, every_cut(graph, depth=2))
    found = segment_classes(graph, costs)
    assert len(set(found)) < len(found)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.exhaustive
def test_runs_of_a_step_that_differentiates_inside() -> None:
    def penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        at = batch.detach().requires_grad_(True)
        value = model(at).sum()
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        return value + slope.square().sum()

    workload = Workload("penalty", Residual, lambda rows, _: torch.zeros(rows, 8), penalty, 4)
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(workload, place), place)
    assert profile.graph.inner
    assert_shared_shapes_are_right(profile.graph, profile.costs, every_cut(profile.graph, depth=2))


def repeated(pattern: list[ToyNode], times: int) -> list[ToyNode]:
    """`pattern` again and again, each copy taking what the pattern takes, one copy further, and its neighbour's end."""
    nodes = []
    for copy in range(times):
        shift = copy * len(pattern)
        for i, node in enumerate(pattern):
            inputs = {source + shift for source in node.inputs} | ({shift - 1} if copy and i == 0 else set())
            nodes.append(dataclasses.replace(node, inputs=tuple(sorted(inputs)), kind="new"))
    return nodes


def with_casts_to_the_end(graph: Graph) -> Graph:
    """`graph` with all its casts alive until the forward ends."""
    storages = graph.storages
    ends = np.where(storages.cast, np.maximum(storages.death, graph.forward_end - 1), storages.death)
    return dataclasses.replace(graph, storages=dataclasses.replace(storages, death=ends))


@pytest.mark.exhaustive
@given(toys(most=4), st.integers(3, 6), st.sampled_from((1, 2)))
@settings(max_examples=examples(25, 80))
def test_runs_of_repeated_toys(pattern: list[ToyNode], times: int, depth: int) -> None:
    graph, costs = toy_graph(repeated(pattern, times), fixed_bytes=5)
    for each in (graph, with_casts_to_the_end(graph)):
        assert_shared_shapes_are_right(each, costs, every_cut(each, depth=depth))


@given(toys(most=7), st.sampled_from((1, 2)))
@settings(max_examples=examples(15, 40))
def test_runs_of_toys(nodes: list[ToyNode], depth: int) -> None:
    graph, costs = toy_graph(nodes)
    assert_shared_shapes_are_right(graph, costs, every_cut(graph, depth=depth))


def segment_classes(graph: Graph, costs: Costs) -> list[int]:
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    return problem._segment_classes


def test_the_inner_layers_of_a_chain_are_isomorphic() -> None:
    found = segment_classes(*toy_graph(chain(4, 4, 4, 4, 4, 4, 4, 4)))
    # the first takes nothing, the last is held by the caller, and the one before it feeds the last
    assert len(set(found[1:6])) == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"size": 8}, id="size"),
        pytest.param({"time_us": 5}, id="time"),
        pytest.param({"workspace_bytes": 5}, id="workspace"),
        pytest.param({"parameter": 7}, id="gradient"),
        pytest.param({"keeps": frozenset({"inputs"})}, id="saves"),
    ],
)
def test_a_layer_that_differs_is_not_isomorphic(change: dict[str, Any]) -> None:
    nodes = chain(4, 4, 4, 4, 4, 4, 4, 4)
    nodes[3] = dataclasses.replace(nodes[3], **change)
    found = segment_classes(*toy_graph(nodes))
    assert found[3] not in found[:3] + found[4:]


@pytest.mark.exhaustive
def test_iterations_whose_state_lives_to_their_end_are_isomorphic() -> None:
    """As the stages of a Runge-Kutta step, whose last sum takes all of them."""
    stages = chain(*itertools.repeat(4, 6))
    stages[5] = dataclasses.replace(stages[5], inputs=(0, 1, 2, 3, 4))
    graph, costs = toy_graph(repeated(stages, 6))
    found = segment_classes(graph, costs)
    assert found[12:18] == found[18:24]
    assert_shared_shapes_are_right(graph, costs, every_cut(graph, depth=2))


def test_what_is_taken_from_afar_is_named_itself() -> None:
    """Layers that take a mask made by the first node are isomorphic, however far from it."""
    nodes = [
        dataclasses.replace(node, inputs=tuple(sorted({0, *node.inputs}))) if i else node
        for i, node in enumerate(chain(*itertools.repeat(4, 12)))
    ]
    graph, costs = toy_graph(nodes)
    found = segment_classes(graph, costs)
    assert len(set(found[5:10])) == 1
    assert_shared_shapes_are_right(graph, costs, every_cut(graph, depth=2))


def test_layers_whose_casts_all_end_with_the_forward_are_isomorphic_to_the_last() -> None:
    """As weights that autocast casts once: their copies go when its context ends, near the last layers too."""
    graph, costs = toy_graph(chain(*itertools.repeat(4, 24), cast=2))
    graph = with_casts_to_the_end(graph)
    found = segment_classes(graph, costs)
    assert len(set(found[1:21])) == 1
    assert_shared_shapes_are_right(graph, costs, every_cut(graph, depth=2))
