"""The evaluator says what the executor does: byte for byte, at every operator, for any plan.

Anchors worked out by hand come first; they guard the builder of toy graphs as much as the evaluator.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import CAST
from remat.evaluation.plan import Region, to_refs
from remat.execution.eager import replay as replaying
from remat.execution.eager.replay import replay
from remat.recording.tracker import Tracker
from remat.workload.workload import Workload
from tests.examples import examples
from tests.graphs import (
    BATCH_NORM,
    BRACKETS,
    CONSTANTS,
    DYNAMO_LOOKS_AT_GRAD,
    TOYS,
    ToyNode,
    autocast_left_as_found,
    chain,
    plans,
    recorded,
    toy_graph,
    toys,
)

# A replay takes 30 to 100 ms: few examples of each toy, the same ones every time.
PLANS = settings(
    max_examples=examples(4, 8),
    phases=(Phase.explicit, Phase.generate),  # shrinking would replay hundreds of plans
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

# Three nodes of 4, 4 and 8 bytes; each saves its output; the last is the loss, held through backward.
# Columns: forward a, b, c; [recomputed operators]; gradient of the loss; backward c, b, a; optimizer.
ANCHORS = [
    pytest.param(
        (),
        # a | a+b | a+b+c | +gc | +gb | gc and c's save gone, c held, +ga | b's save gone
        [4, 4 + 4, 4 + 4 + 8, 16 + 8, 16 + 8 + 4, 16 + 4 + 4, 4 + 8 + 4, 0],
        id="none",
    ),
    pytest.param(
        (Region(0, 2),),
        # a | a+b | b+c: a is dropped | c+gc: b is dropped | c+gc+gb | again a | again b | +ga | b gone
        [4, 4 + 4, 4 + 8, 8 + 8, 8 + 8 + 4, 8 + 4 + 4, 8 + 4 + 4 + 4, 8 + 4 + 4 + 4 + 4, 8 + 4 + 4, 0],
        id="region",
    ),
    pytest.param(
        (Region(0, 2, saved=(1,)),),
        # the same, and b is there all the time: 4 more from c on until it would be made again
        [4, 4 + 4, 4 + 8, 12 + 8, 12 + 8 + 4, 8 + 4 + 4 + 4, 8 + 4 + 4 + 4, 8 + 4 + 4 + 4 + 4, 8 + 4 + 4, 0],
        id="saving",
    ),
    pytest.param(
        (Region(0, 3),),
        # c is held anyway, so it is there twice when made again: 8 + gc 8 | a | a+b | a+b+c | +gb | c gone, +ga | ...
        [4, 4 + 4, 4 + 8, 8 + 8, 16 + 4, 16 + 8, 16 + 16, 16 + 16 + 4, 8 + 8 + 4 + 4, 8 + 4 + 4, 0],
        id="everything",
    ),
]


@pytest.mark.parametrize(("regions", "expected"), ANCHORS)
def test_a_chain_by_hand(regions: tuple[Region, ...], expected: list[int]) -> None:
    graph, _ = toy_graph(chain(4, 4, 8))
    assert Memory(graph).curve(regions).alive_bytes.tolist() == expected


def test_a_diamond_by_hand() -> None:
    """a (4) is taken by b (8) and c (2), which d (6) joins; inputs are saved, so a is kept once for both."""
    nodes = [
        ToyNode(4, keeps=frozenset()),
        ToyNode(8, (0,), frozenset({"inputs"})),
        ToyNode(2, (0,), frozenset({"inputs"})),
        ToyNode(6, (1, 2), frozenset({"inputs"}), workspace_bytes=100),
    ]
    graph, _ = toy_graph(nodes)
    # forward: a | a+b | a+b+c | all and d's workspace; then seed 6 | gb 8 + gc 2 | b's and c's saves gone ...
    forward = [4, 4 + 8, 4 + 8 + 2, 4 + 8 + 2 + 6 + 100]
    # ... d: 20 + 6 + 10 | c makes ga: a 4 + d 6 + gb, gc 10 + 4 | b makes ga: gc gone | a: d 6 and both ga | optimizer
    backward = [20 + 6, 20 + 6 + 10, 4 + 6 + 10 + 4, 4 + 6 + 8 + 4 + 4, 6 + 4 + 4, 0]
    memory = Memory(graph, np.array([0, 0, 0, 100, *[0] * 6]))
    assert memory.curve(()).alive_bytes.tolist() == forward + backward


def test_what_is_there_before_the_step_is_always_counted() -> None:
    plain, with_fixed = toy_graph(chain(4, 8))[0], toy_graph(chain(4, 8), fixed_bytes=1000)[0]
    for regions in ((), (Region(0, 1),)):
        assert (Memory(with_fixed).curve(regions).alive_bytes == Memory(plain).curve(regions).alive_bytes + 1000).all()


def test_recomputation_stops_after_the_last_save() -> None:
    """The last node of the region saves its input only: it is not run again. (Rule 4)"""
    nodes = [ToyNode(4, time_us=3), ToyNode(4, (0,), frozenset({"inputs"}), time_us=50), ToyNode(4, (1,))]
    graph, costs = toy_graph(nodes)
    assert Memory(graph).recompute_time_us((Region(0, 2),), costs.per_op_us(graph)) == 3


def test_saving_a_node_takes_its_time_out_of_the_recomputation() -> None:
    graph, costs = toy_graph([ToyNode(4, (i - 1,) if i else (), time_us=10**i) for i in range(4)])
    memory, times = Memory(graph), costs.per_op_us(graph)
    assert memory.recompute_time_us((Region(0, 3),), times) == 1 + 10 + 100
    assert memory.recompute_time_us((Region(0, 3, saved=(1,)),), times) == 1 + 100


def test_inner_regions_are_recomputed_once_more() -> None:
    """First all up to the last inner region, which waits for its own request; then every inner one for itself."""
    graph, costs = toy_graph([ToyNode(4, (i - 1,) if i else (), time_us=10**i) for i in range(4)])
    nested = Region(0, 4, inner=(Region(0, 2), Region(2, 4)))
    # outer: nodes 0 and 1; inner: nodes 2 and 3, then 0 and 1
    assert Memory(graph).recompute_time_us((nested,), costs.per_op_us(graph)) == 11 + 1100 + 11


def test_a_recomputation_goes_up_to_an_inner_region_that_has_nothing_to_recompute() -> None:
    """Node 0 saves its output; nodes 1 and 2 save nothing, and node 2 is an inner region, whose input is node 1's."""
    keeps = [frozenset({"output"}), frozenset[str](), frozenset[str](), frozenset({"output"})]
    graph, _ = toy_graph([ToyNode(4, (i - 1,) if i else (), kept) for i, kept in enumerate(keeps)])
    assert Memory(graph).recomputed_nodes((Region(0, 3),)) == 1
    assert Memory(graph).recomputed_nodes((Region(0, 3, inner=(Region(2, 3),)),)) == 2


@given(toys(), st.data())
@settings(max_examples=examples(30, 100))
def test_every_operator_runs_in_its_order_whatever_the_plan(nodes: list[ToyNode], data: st.DataObject) -> None:
    graph, _ = toy_graph(nodes)
    curve = Memory(graph).curve(data.draw(plans(graph)))
    assert curve.op[curve.region < 0].tolist() == list(range(graph.op_count))
    assert (curve.alive_bytes >= 0).all() and curve.alive_bytes[-1] == sum(
        graph.storages.size_bytes[list(graph.parameter_gradients)]
    )


# Against the executor


def assert_replay_agrees(workload: Workload, regions: tuple[Region, ...], accumulation: int = 1) -> None:
    found = recorded(workload, accumulation)
    curve = Memory(found.graph).curve(regions)
    # Python numbers that autograd keeps as tensors are counted when recording; no tracker of tensors sees them.
    predicted = curve.alive_bytes[curve.executed] - found.graph.unseen_bytes
    np.testing.assert_array_equal(replay(found.step, to_refs(found.graph, regions)), predicted)


def without_idle_saves(workload: Workload, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """`regions` less those that save though nothing of them is ever recomputed; no solver makes such a region."""
    memory = Memory(recorded(workload).graph)
    return tuple(region for region in regions if not region.saved or memory.recomputation(region))


@pytest.mark.fast("broken", "two-outputs")
@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@PLANS
def test_the_curve_is_the_replay_byte_for_byte(name: str, data: st.DataObject) -> None:
    regions = data.draw(plans(recorded(TOYS[name]).graph, nested=False))
    assert_replay_agrees(TOYS[name], without_idle_saves(TOYS[name], regions))


@pytest.mark.fast("residual")
@pytest.mark.parametrize("name", ["chain", "residual", "skip", "tied", "reused", "between"])
@given(data=st.data())
@PLANS
def test_the_curve_of_nested_regions_is_the_replay_byte_for_byte(name: str, data: st.DataObject) -> None:
    regions = data.draw(plans(recorded(TOYS[name]).graph))
    assert_replay_agrees(TOYS[name], without_idle_saves(TOYS[name], regions))


def test_an_inner_region_keeps_its_inputs_until_it_has_been_recomputed() -> None:
    assert_replay_agrees(TOYS["chain"], (Region(0, 8, inner=(Region(0, 2), Region(2, 8))),))


def test_an_inner_region_that_nothing_is_asked_of_keeps_its_inputs_while_it_runs() -> None:
    """Nodes 3 to 5 save nothing, and would let go of node 2 at once."""
    assert_replay_agrees(CONSTANTS, (Region(0, 8, inner=(Region(3, 6),)),))


def test_a_weight_that_autocast_has_cast_before_a_region_is_cast_again_in_it() -> None:
    """In memory (the toy "reused" above) and in time."""
    graph = recorded(TOYS["reused"]).graph
    casts = np.array([kind.name == CAST for kind in graph.kinds])[graph.op_kind]
    first = next(node for node, found in enumerate(graph.nodes) if found.reused)
    assert Memory(graph).recompute_time_us((Region(first, first + 2),), casts) == 2  # weight and bias


@given(data=st.data())
@PLANS
def test_the_curve_is_the_replay_where_regions_hold_contexts(data: st.DataObject) -> None:
    with autocast_left_as_found():
        assert_replay_agrees(BRACKETS, data.draw(plans(recorded(BRACKETS).graph, nested=False)))


@pytest.mark.parametrize("regions", [(), (Region(0, 6),), (Region(3, 9, saved=(4,)), Region(12, 18))])
def test_gradients_that_accumulate_are_there_from_the_start(regions: tuple[Region, ...]) -> None:
    once, often = (recorded(TOYS["residual"], accumulation) for accumulation in (1, 2))
    assert_replay_agrees(TOYS["residual"], regions, accumulation=2)
    gradients = once.graph.storages.size_bytes[list(once.graph.parameter_gradients)].sum()
    assert often.graph.fixed_bytes["gradients"] == gradients
    assert often.graph.parameter_gradients == ()


class SeenTracker(Tracker):
    """Remembered, so that a test can look at what the replay ran."""

    last: SeenTracker

    def __init__(self, alignment_bytes: int = 1) -> None:
        super().__init__(alignment_bytes)
        SeenTracker.last = self


@given(data=st.data())
@PLANS
def test_batch_normalisation_copies_its_statistics_and_is_exact_otherwise(data: st.DataObject) -> None:
    """Copies of running statistics are made again by operators that the record does not have. (Rule 6)"""
    found = recorded(BATCH_NORM)
    regions = without_idle_saves(BATCH_NORM, data.draw(plans(found.graph, nested=False)))
    with mock.patch.object(replaying, "Tracker", SeenTracker):
        replayed = replay(found.step, to_refs(found.graph, regions))
    curve = Memory(found.graph).curve(regions)
    kinds = list(SeenTracker.last.kinds.values())
    copies = np.array([kinds[kind].name == "aten.clone.default" for kind in SeenTracker.last.op_kinds])
    predicted = curve.alive_bytes[curve.executed] - found.graph.unseen_bytes
    assert int(replayed.max()) == int(predicted.max())
    np.testing.assert_array_equal(replayed[~copies], predicted)
