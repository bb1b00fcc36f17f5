"""The exact solver against exhaustive search, and laws that every exact solver keeps.

Hypothesis draws graphs, spaces and budgets. Infeasible is an answer, and must be the oracle's as well.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.check import check
from remat.costs import Costs
from remat.graph import Graph
from remat.plans import Region
from remat.problem import Problem
from remat.solution import Limits, Solution
from remat.solvers import cp_sat
from remat.space import Segment, Space
from tests.graphs import ToyNode, chain, every_cut, spaces, toy_graph, toys
from tests.oracle import Oracle, every_plan

EXACT = Limits(gap=0.0, workers=1, time_s=20)
AMPLE = 10**6
MANY = settings(max_examples=120, deadline=None, derandomize=True)


def solve(problem: Problem, budget_bytes: int) -> Solution:
    return cp_sat.solve(problem.with_budget(budget_bytes), EXACT)


def assert_optimal(problem: Problem, oracle: Oracle, budget_bytes: int) -> None:
    """The solver's verdict is the oracle's, and its plan keeps what it claims."""
    solution, expected = solve(problem, budget_bytes), oracle.least_time_us(budget_bytes)
    if expected is None:
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    assert solution.objective_us == pytest.approx(expected)
    assert solution.bound_us <= expected + 1e-6
    assert check(problem.with_budget(budget_bytes), solution) == []


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    graph, costs = toy_graph(draw(toys()), fixed_bytes=3)
    return Problem(graph, costs, draw(spaces(graph)), AMPLE)


# The oracle, by hand: a chain of 4, 4 and 8 bytes (its curves stand in test_memory.py), a microsecond a node, every
# cut, nothing to save. Plans: the compositions of three segments into runs, each single segment plain or a region.


def test_the_oracle_knows_every_plan_of_three_segments() -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    space = dataclasses.replace(every_cut(graph), saveable=())
    plans = set(every_plan(Problem(graph, costs, space, AMPLE)))
    # 2 x 2 x 2 of single segments, 2 of [0, 2) and a single one, 2 of a single one and [1, 3), 1 of [0, 3)
    assert len(plans) == 8 + 2 + 2 + 1
    assert {(), (Region(0, 2),), (Region(0, 1), Region(1, 3)), (Region(0, 3),)} <= plans


def test_the_oracle_knows_every_set_of_saves() -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    space = Space((Segment(0, 2, False), Segment(2, 3, True)), (0, 1), 1)
    saved = {regions[0].saved for regions in every_plan(Problem(graph, costs, space, AMPLE)) if regions}
    assert saved == {(), (0,), (1,), (0, 1)}


@pytest.mark.parametrize(
    ("budget", "regions", "time_us"),
    [
        pytest.param(28, (), 0, id="no-checkpointing"),  # 4 + 4 + 8, its gradient 8, and the next one 4
        pytest.param(27, (Region(0, 2, saved=(1,)),), 1, id="one-short"),  # without a in the meantime: 24
        pytest.param(24, (Region(0, 2, saved=(1,)),), 1, id="least"),
        pytest.param(23, None, None, id="one-below-the-least"),  # backward of b: 8 held + 4 + 4 and both gradients
    ],
)
def test_a_chain_by_hand(budget: int, regions: tuple[Region, ...] | None, time_us: int | None) -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    space = Space((Segment(0, 2, False), Segment(2, 3, True)), (1,), 1)
    problem = Problem(graph, costs, space, AMPLE)
    assert Oracle(problem).least_time_us(budget) == time_us
    solution = solve(problem, budget)
    assert solution.status == ("infeasible" if regions is None else "optimal")
    assert solution.regions == (regions or ())
    assert solution.objective_us == (time_us or 0)


@given(problems(), st.integers(0, 100))
@MANY
def test_no_plan_of_the_space_is_better(problem: Problem, percent: int) -> None:
    """At the budgets that bite: the least peak, one below it, no checkpointing, one below it, and a peak between."""
    oracle = Oracle(problem)
    without, least = problem.memory.peak_without_checkpointing, oracle.least_peak()
    peaks = sorted(set(oracle.peaks))
    between = peaks[percent * (len(peaks) - 1) // 100]
    for budget in sorted({least - 1, least, between - 1, between, without - 1, without}):
        assert_optimal(problem, oracle, budget)


@given(problems())
@MANY
def test_the_least_peak_is_the_oracles(problem: Problem) -> None:
    """Peaks here are below 1000 bytes, so the gap of a thousandth at which the search stops is less than a byte."""
    peak, regions, bound = cp_sat.least_peak(problem.with_budget(problem.memory.peak_without_checkpointing), EXACT)
    assert peak == Oracle(problem).least_peak(saves=False)
    assert problem.memory.curve(regions).peak_bytes == peak
    assert bound <= peak + 1e-6


@given(problems(), st.lists(st.integers(0, 120), min_size=2, max_size=4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_more_budget_never_costs_more(problem: Problem, percents: list[int]) -> None:
    without = problem.memory.peak_without_checkpointing
    solutions = [solve(problem, percent * without // 100) for percent in sorted(percents)]
    times = [float("inf") if s.status == "infeasible" else s.objective_us for s in solutions]
    assert times == sorted(times, reverse=True)


@given(problems(), st.integers(60, 99), st.integers(2, 1000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_scaling_all_times_scales_the_objective(problem: Problem, percent: int, factor: int) -> None:
    budget = percent * problem.memory.peak_without_checkpointing // 100
    costs = Costs("estimated", "toy", tuple(problem.op_time_ns / 1000), tuple(problem.memory.workspace_bytes.tolist()))
    scaled = dataclasses.replace(costs, time_us=tuple(factor * time for time in costs.time_us))
    one, other = (solve(Problem(problem.graph, c, problem.space, AMPLE), budget) for c in (costs, scaled))
    assert other.status == one.status
    assert other.objective_us == pytest.approx(factor * one.objective_us)


def renamed(graph: Graph) -> Graph:
    """`graph` with the names of its nodes and operators in reverse alphabetical order."""
    nodes = tuple(dataclasses.replace(node, name=f"z{len(graph.nodes) - i}") for i, node in enumerate(graph.nodes))
    return dataclasses.replace(graph, nodes=nodes)


@given(problems(), st.integers(60, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_renaming_nodes_changes_nothing(problem: Problem, percent: int) -> None:
    budget = percent * problem.memory.peak_without_checkpointing // 100
    costs = Costs("estimated", "toy", tuple(problem.op_time_ns / 1000), tuple(problem.memory.workspace_bytes.tolist()))
    one, other = (
        solve(Problem(g, costs, problem.space, AMPLE), budget) for g in (problem.graph, renamed(problem.graph))
    )
    assert (other.status, other.objective_us) == (one.status, one.objective_us)


@pytest.mark.parametrize("budget", [67, 68, 87, 88])
def test_saves_that_are_let_go_late_are_no_obstacle(budget: int) -> None:
    """Peaks of the five plans: 94, 88, 94, 68 and 88."""
    nodes = [*chain(10, 10, 10), ToyNode(4, (2,), frozenset({"extra"}), extra=40, lingers=1)]
    graph, costs = toy_graph(nodes)
    problem = Problem(graph, costs, Space((Segment(0, 3, False), Segment(3, 4, False)), (), 1), AMPLE)
    assert_optimal(problem, Oracle(problem), budget)
