"""The rows of the program are exact: evaluated at a plan they are `Memory.curve` at that operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from remat.costing.costs import Costs
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.search_space import Segment, Space, find_space
from tests.examples import examples
from tests.graphs import (
    DYNAMO_LOOKS_AT_GRAD,
    TOYS,
    ToyNode,
    chain,
    deciding,
    every_cut,
    recorded,
    spaces,
    toy_graph,
    toys,
)
from tests.oracle import chosen_runs, plans_of, value_of

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

MANY = settings(max_examples=examples(40, 150))
FEW = settings(
    max_examples=5,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def toy_costs(graph: Graph) -> Costs:
    """Times and workspaces that differ from kind to kind."""
    count = len(graph.kinds)
    return Costs(
        "estimated", "toy", tuple(float(1 + i % 7) for i in range(count)), tuple(i * 37 % 5 * 64 for i in range(count))
    )


def row_by_row(problem: Problem, regions: tuple[Region, ...]) -> Iterator[tuple[str, int, int]]:
    """(what and where, value of the row at the plan, bytes of the evaluator) for every row of a plan's runs."""
    whole = problem.memory.curve(regions)
    for op in range(problem.graph.forward_end):
        yield f"forward {op}", value_of(problem, problem.forward_row(op), regions), int(whole.alive_bytes[op])
    step = {int(whole.op[k]): int(k) for k in np.flatnonzero(whole.region < 0)}
    tops = {(region.first, region.end): top for top, region in enumerate(regions)}
    for index in chosen_runs(problem, regions):
        run = problem.runs[index]
        own = problem.curve_of(run)
        again = (
            iter(())
            if run.region is None
            else iter(np.flatnonzero(whole.region == tops[run.region.first, run.region.end]).tolist())
        )
        for position in problem.positions_of(run, own).tolist():
            op = int(own.op[position])
            at = step[op] if own.region[position] < 0 else next(again)
            assert whole.op[at] == op
            value = value_of(problem, problem.row(index, own, position), regions)
            yield f"run {index} operator {op}", value, int(whole.alive_bytes[at])


def assert_rows_exact(problem: Problem, regions: tuple[Region, ...]) -> None:
    assert [row for row in row_by_row(problem, regions) if row[1] != row[2]] == []


@given(toys(), st.data())
@MANY
def test_rows_of_toy_graphs_are_exact(nodes: list[ToyNode], data: st.DataObject) -> None:
    graph, costs = toy_graph(nodes, fixed_bytes=5)
    graph = data.draw(deciding(graph))
    space = data.draw(spaces(graph))
    not_caller_held = tuple(v for v in space.saveable if v != len(nodes) - 1)
    problem = Problem(graph, costs, dataclasses.replace(space, saveable=not_caller_held), 10**6)
    assert_rows_exact(problem, data.draw(plans_of(problem)))


def rows_never_overstate(nodes: list[ToyNode], data: st.DataObject) -> None:
    late = [dataclasses.replace(node, lingers=data.draw(st.integers(0, 4))) for node in nodes]
    graph, costs = toy_graph(late)
    graph = data.draw(deciding(graph))
    space = data.draw(spaces(graph))
    not_caller_held = tuple(v for v in space.saveable if v != len(nodes) - 1)
    problem = Problem(graph, costs, dataclasses.replace(space, saveable=not_caller_held), 10**6)
    rows = row_by_row(problem, data.draw(plans_of(problem)))
    assert [row for row in rows if row[1] > row[2]] == []


@given(toys(), st.data())
@MANY
def test_no_row_ever_overstates_a_plan(nodes: list[ToyNode], data: st.DataObject) -> None:
    """Autograd lets saves go late; rows leave out what later regions keep for so long."""
    rows_never_overstate(nodes, data)


@pytest.mark.exhaustive
@given(toys(), st.data())
@settings(MANY, max_examples=examples(300, 4000))
def test_no_row_overstates_any_of_many_plans(nodes: list[ToyNode], data: st.DataObject) -> None:
    rows_never_overstate(nodes, data)


def test_what_the_caller_holds_is_no_candidate_for_saving() -> None:
    """Saving it would spare the copy that recomputation makes, which the rows do not say."""
    graph, _ = toy_graph(chain(20, 20, 60))
    memory = Memory(graph)
    # unsaved, the held 60 are there once more when the region is recomputed: 240; saved, they are not: 180
    assert memory.curve((Region(0, 3),)).peak_bytes == 240
    assert memory.curve((Region(0, 3, saved=(2,)),)).peak_bytes == 180
    assert 2 not in find_space(graph).saveable


def test_forward_rows_count_the_inputs_of_inner_regions() -> None:
    """Nodes of 4 bytes each; 2 takes 1, and its region, {2, 3}, keeps 1 while 3 runs."""
    nodes = [dataclasses.replace(node, keeps=frozenset({"inputs"})) for node in chain(4, 4, 4, 4, 4)]
    graph, costs = toy_graph(nodes)
    problem = Problem(graph, costs, every_cut(graph, depth=2), 10**6)
    nested = next(run.region for run in problem.runs if run.region and len(run.region.inner) == 2 and run.b == 4)
    assert_rows_exact(problem, (nested,))


def recorded_problem(name: str) -> Problem:
    """Of a recorded toy; what the caller holds through backward is not to be saved (see the test above)."""
    graph = recorded(TOYS[name]).graph
    caller_held = {int(v) for v in graph.storages.node[graph.storages.death >= graph.forward_end]}
    space = find_space(graph, depth=2)
    not_caller_held = tuple(v for v in space.saveable if v not in caller_held)
    return Problem(graph, toy_costs(graph), dataclasses.replace(space, saveable=not_caller_held), 10**9)


@pytest.mark.fast("autocast", "reused")
@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@FEW
def test_rows_of_recorded_steps_are_exact(name: str, data: st.DataObject) -> None:
    problem = recorded_problem(name)
    rows = list(row_by_row(problem, data.draw(plans_of(problem))))
    assert [row for row in rows if row[1] > row[2]] == []
    if name != "reused":  # what a region saves outlives there the region's last gradient function
        assert [row for row in rows if row[1] != row[2]] == []


def test_rows_count_saves_of_later_runs_that_are_let_go_late() -> None:
    """The loss's second result, 40 bytes, is still there while the region before it begins its backward."""
    nodes = [*chain(10, 10, 10), ToyNode(4, (2,), frozenset({"extra"}), extra=40, lingers=1)]
    graph, costs = toy_graph(nodes)
    space = Space((Segment(0, 3, False), Segment(3, 4, False)), (), 1)
    assert_rows_exact(Problem(graph, costs, space, 10**6), (Region(0, 3),))


@given(data=st.data())
@FEW
def test_the_objective_counts_casts_that_are_made_again(data: st.DataObject) -> None:
    problem = recorded_problem("reused")
    regions = data.draw(plans_of(problem))
    time_us = problem.memory.recompute_time_us(regions, problem.liveness.op_time_ns / 1000)
    assert problem.objective_ns(regions) == round(1000 * time_us)


@given(toys(), st.data())
@MANY
def test_the_objective_is_the_evaluators_recompute_time(nodes: list[ToyNode], data: st.DataObject) -> None:
    graph, costs = toy_graph(nodes)
    problem = Problem(graph, costs, data.draw(spaces(graph)), 10**6)
    regions = data.draw(plans_of(problem))
    time_us = problem.memory.recompute_time_us(regions, costs.per_op_us(graph))
    assert problem.objective_ns(regions) == round(1000 * time_us)


def test_the_runs_of_three_segments() -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    runs = Problem(graph, costs, every_cut(graph), 100).runs
    assert [(run.a, run.b, run.time_ns) for run in runs if run.region is None] == [(0, 1, 0), (1, 2, 0), (2, 3, 0)]
    # one microsecond a node
    expected = {(0, 1): 1000, (0, 2): 2000, (0, 3): 3000, (1, 2): 1000, (1, 3): 2000, (2, 3): 1000}
    assert {(run.a, run.b): run.time_ns for run in runs if run.region} == expected


def test_no_run_holds_what_must_stay_plain() -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    space = Space((Segment(0, 1, False), Segment(1, 2, True), Segment(2, 3, False)), (), 1)
    runs = Problem(graph, costs, space, 100).runs
    assert {(run.a, run.b) for run in runs if run.region} == {(0, 1), (2, 3)}


def test_the_optimizer_step_is_under_every_plan_the_same() -> None:
    # gradients of 2, 2 and 2 bytes, 100 of the optimizer's own, 7 that were there before
    graph, costs = toy_graph(chain(4, 4, 8, parameter=2), fixed_bytes=7, optimizer_bytes=100)
    problem = Problem(graph, costs, every_cut(graph), 1000)
    assert problem.optimizer_peak_bytes == 7 + 3 * 2 + 100
    assert problem.memory.curve((Region(0, 2),)).alive_bytes[-1] == 7 + 3 * 2 + 100


def test_no_region_spans_two_graph_calls() -> None:
    graph, costs = toy_graph(chain(4, 4, 4, 4))
    nodes = tuple(dataclasses.replace(node, call=i // 2) for i, node in enumerate(graph.nodes))
    problem = Problem(dataclasses.replace(graph, nodes=nodes), costs, every_cut(graph), 10**6)
    assert {(run.region.first, run.region.end) for run in problem.runs if run.region} <= {
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 3),
        (2, 4),
        (3, 4),
    }
