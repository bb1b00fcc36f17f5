"""A Graph is a file, and knows whose it is."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import OUTSIDE, Graph, block_of
from tests.examples import examples
from tests.graphs import (
    BATCH_NORM,
    BRACKETS,
    DYNAMO_LOOKS_AT_GRAD,
    TOYS,
    ToyNode,
    chain,
    plans,
    recorded,
    toy_graph,
    toys,
)

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)


def through_json(graph: Graph) -> Graph:
    return Graph.from_json(json.loads(json.dumps(graph.to_json())))


def assert_same(one: Graph, other: Graph) -> None:
    for field in dataclasses.fields(Graph):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(left) and not isinstance(left, type):
            for column in dataclasses.fields(left):
                np.testing.assert_array_equal(getattr(left, column.name), getattr(right, column.name))
        elif isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right, field.name


@pytest.mark.fast("broken", "two-outputs", "transformer")
@pytest.mark.parametrize("name", [*TOYS, BATCH_NORM.name])
def test_a_recorded_graph_survives_json(name: str) -> None:
    graph = recorded(TOYS.get(name, BATCH_NORM)).graph
    again = through_json(graph)
    assert_same(graph, again)
    assert again.fingerprints == graph.fingerprints
    assert str(again) == str(graph)


@given(toys(), st.data())
@settings(max_examples=examples(20, 50))
def test_a_graph_from_a_file_is_judged_alike(nodes: list[ToyNode], data: st.DataObject) -> None:
    graph, _ = toy_graph(nodes)
    regions = data.draw(plans(graph))
    expected = Memory(graph).curve(regions).alive_bytes
    np.testing.assert_array_equal(Memory(through_json(graph)).curve(regions).alive_bytes, expected)


@pytest.mark.parametrize("key", ["nodes", "kinds", "op_kind", "storages", "packs", "forward_end", "fixed_bytes"])
def test_an_incomplete_file_is_an_error(key: str) -> None:
    data = toy_graph(chain(4, 4, 8))[0].to_json()
    del data[key]
    with pytest.raises(KeyError):
        Graph.from_json(data)


@pytest.mark.exhaustive
def test_fingerprints_tell_models_apart() -> None:
    found = {name: recorded(toy).graph.fingerprints for name, toy in TOYS.items()}
    del found["held-logits"], found["autocast"]  # the same models as "tied" and "transformer"
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(("one", "other"), [("tied", "held-logits"), ("transformer", "autocast")])
def test_a_fingerprint_is_of_the_model_and_not_of_its_step(one: str, other: str) -> None:
    assert recorded(TOYS[one]).graph.fingerprints == recorded(TOYS[other]).graph.fingerprints


@pytest.mark.parametrize("name", ["chain", "tied"])
def test_a_fingerprint_is_the_same_for_another_batch(name: str) -> None:
    larger = recorded(TOYS[name].sized(batch_size=7, seq_len=3)).graph
    assert larger.fingerprints == recorded(TOYS[name]).graph.fingerprints
    assert larger.about["batch_size"] == 7


def test_a_fingerprint_sees_what_is_called_where_and_on_what() -> None:
    graph = toy_graph(chain(4, 4, 8))[0]
    changes = [{"op": "other"}, {"module": "layers.1"}, {"graph_inputs": (0, 1)}]
    fingerprints = {graph.fingerprints}
    for change in changes:
        nodes = (*graph.nodes[:2], dataclasses.replace(graph.nodes[2], **change))  # type: ignore[arg-type]
        fingerprints.add(dataclasses.replace(graph, nodes=nodes).fingerprints)
    assert len(fingerprints) == 1 + len(changes)


def test_two_graph_calls_have_two_fingerprints() -> None:
    assert len(recorded(TOYS["broken"]).graph.fingerprints) == 2


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("layers.3.mlp", "layers.3"),
        ("encoder.layers.3.blocks.1.norm", "encoder.layers.3"),
        ("0.conv", "0"),
        ("layers.12", "layers.12"),
        ("conv2d", None),
        ("head", None),
        ("", None),
    ],
)
def test_a_block_is_the_outermost_numbered_module(module: str, block: str | None) -> None:
    assert block_of(module) == block


@pytest.mark.parametrize("name", [*TOYS, BRACKETS.name, BATCH_NORM.name])
def test_a_recorded_graph_is_in_order(name: str) -> None:
    """Every reader of a Graph relies on this."""
    workload = {**TOYS, BRACKETS.name: BRACKETS, BATCH_NORM.name: BATCH_NORM}[name]
    graph = recorded(workload).graph
    storages, saved = graph.storages, graph.saved_tensors
    assert graph.nodes[0].first == 0 and graph.nodes[-1].end == graph.forward_end
    assert all(a.end == b.first for a, b in itertools.pairwise(graph.nodes))
    assert (np.diff(storages.birth) >= 0).all() and (storages.death >= storages.birth).all()
    assert (np.diff(saved.node) >= 0).all() and (np.diff(saved.at) >= 0).all()
    asked = saved.unpack >= 0
    assert (saved.unpack[asked] >= graph.forward_end).all()
    assert (saved.used[asked] >= saved.unpack[asked]).all() and (saved.release[asked] >= saved.used[asked]).all()
    assert all(i < n for n, node in enumerate(graph.nodes) for i in (*node.inputs, *node.mutates))


def test_a_node_outside_the_graphs_has_all_its_operators() -> None:
    graph = recorded(TOYS["tied"]).graph
    assert graph.nodes[-1].call == OUTSIDE
    assert graph.nodes[-1].first == graph.nodes[-2].end
