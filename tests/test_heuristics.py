"""Heuristics propose plans of the problem's own space, keep the budget that they claim, and do what their names say.

No heuristic is better than exhaustive search.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import solvers
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import find_planning_device
from remat.evaluation.plan import Region
from remat.formulation.check import check
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.search_space import Segment, Space, blocks, find_space
from remat.formulation.solution import Limits, Solution
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import chen_greedy, greedy, heuristic, save_matmuls
from remat.workload.target import TARGETS
from tests import toys as small
from tests.examples import examples
from tests.graphs import (
    BATCH_NORM,
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
from tests.oracle import Oracle, decides_again
from tests.small_models import TEST_SIZES

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

AMPLE = 1 << 62
MANY = settings(max_examples=examples(15, 40))

RECORDED = ("in-place", "transformer", "broken", "frozen", "batch-norm", "toy-transformer-amp", "toy-convnet")
MODELS = ("gpt2",)


def solve(name: str, problem: Problem, budget_bytes: int) -> Solution:
    return solvers.load(name)(problem.with_budget(budget_bytes), Limits())


def peak(problem: Problem, regions: tuple[Region, ...]) -> int:
    return problem.memory.curve(regions).peak_bytes


@functools.cache
def recorded_problem(name: str) -> Problem:
    """Of a toy or a model at test size, recorded and costed for an H100."""
    if name in MODELS:
        place = find_planning_device("h100-80gb")
        profile = profile_step(fake_step(TEST_SIZES[name](), place), place)
        return Problem(profile.graph, profile.costs, find_space(profile.graph), AMPLE)
    workloads = {**TOYS, BATCH_NORM.name: BATCH_NORM, **{w.name: w for w in small.WORKLOADS.values()}}
    graph = recorded(workloads[name]).graph
    return Problem(graph, estimated_costs(graph, TARGETS["h100-80gb"]), find_space(graph), AMPLE)


def layered(count: int, *nodes: ToyNode) -> Problem:
    """A chain of `count` layers of `nodes` each, then a loss of one byte outside all layers; every cut, every save."""
    toys = [dataclasses.replace(node, module=f"layers.{layer}") for layer in range(count) for node in nodes]
    toys.append(ToyNode(1))
    linked = [dataclasses.replace(node, inputs=(i - 1,) if i else ()) for i, node in enumerate(toys)]
    graph, costs = toy_graph(linked)
    return Problem(graph, costs, every_cut(graph), AMPLE)


# An interior of 8 bytes that takes 1 us, one of 2 that takes 8 us, and a boundary of 1.
LAYER = (ToyNode(8), ToyNode(2, time_us=8), ToyNode(1))


def budgets(problem: Problem) -> list[int]:
    """One that no plan keeps, every layer's, and some between that and no checkpointing's."""
    least = peak(problem, solve("every-block", problem, 1).regions)
    without = problem.memory.peak_without_checkpointing
    return [1, least, *np.linspace(least, without, 5).astype(int).tolist()[1:-1], without]


def assert_of_the_space(problem: Problem, regions: tuple[Region, ...]) -> None:
    """The exact solvers know every run and every save of the plan."""
    starts = {segment.first for segment in problem.space.segments if not segment.plain}
    ends = {segment.end for segment in problem.space.segments if not segment.plain}
    for region in regions:
        assert region.first in starts
        assert region.end in ends
        assert not any(s.plain for s in problem.space.segments if region.first <= s.first < region.end)
        assert all(v in region and v in problem.liveness.save_time_ns for v in region.saved)
    chosen = [problem.runs[i] for i in problem.runs_of(regions)]
    never_again = {v for run in chosen for v in run.never_again}
    assert not never_again & {v for region in regions for v in region.saved}


def assert_kept(problem: Problem, solution: Solution) -> None:
    """Assert that a solution's claims hold, and that its plan is one of the space."""
    assert_of_the_space(problem, solution.regions)
    assert problem.objective_ns(solution.regions) == pytest.approx(solution.objective_us * NS, abs=1)
    assert not decides_again(problem, solution.regions)
    if solution.status == "feasible":
        assert check(problem, solution) == []
    else:
        assert solution.status == "unknown"
        assert check(problem.with_budget(AMPLE), solution) == []
        assert peak(problem, solution.regions) > problem.budget_bytes


@pytest.mark.fast("batch-norm", "toy-convnet", "transformer")
@pytest.mark.parametrize("name", [*RECORDED, *MODELS])
def test_every_strategy_proposes_plans_of_the_space(name: str) -> None:
    problem = recorded_problem(name)
    for budget, strategy in itertools.product(budgets(problem), solvers.HEURISTICS):
        solution = solve(strategy, problem, budget)
        assert solution.solver == strategy
        assert_kept(problem.with_budget(budget), solution)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A toy in layers, with a space small enough to enumerate."""
    nodes, width = draw(toys()), draw(st.integers(1, 3))
    nodes = [dataclasses.replace(node, module=f"layers.{i // width}") for i, node in enumerate(nodes)]
    nodes[-1] = dataclasses.replace(nodes[-1], module="")
    graph, costs = toy_graph(nodes, fixed_bytes=3)
    kinds = [dataclasses.replace(kind, flops=draw(st.integers(0, 1))) for kind in graph.kinds]
    graph = draw(deciding(dataclasses.replace(graph, kinds=tuple(kinds))))
    return Problem(graph, costs, draw(spaces(graph)), AMPLE)


@given(problems(), st.integers(0, 100))
@MANY
def test_no_strategy_is_better_than_exhaustive_search(problem: Problem, percent: int) -> None:
    oracle = Oracle(problem)
    peaks = sorted(set(oracle.peaks))
    for budget in (peaks[0], peaks[percent * (len(peaks) - 1) // 100], peaks[-1]):
        least = oracle.least_time_us(budget)
        assert least is not None
        for strategy in solvers.HEURISTICS:
            solution = solve(strategy, problem, budget)
            assert_kept(problem.with_budget(budget), solution)
            if solution.status == "feasible":
                assert solution.objective_us >= least - 1e-6


@given(problems())
@MANY
def test_no_strategy_fits_where_nothing_does(problem: Problem) -> None:
    least = Oracle(problem).least_peak()
    assert {solve(name, problem, least - 1).status for name in solvers.HEURISTICS} == {"unknown"}


def test_without_layers_there_is_nothing_to_propose() -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    for name in ("every-block", "every-n", "first-k", "sqrt-n", "save-matmuls"):
        assert solve(name, problem, AMPLE).regions == ()


def test_what_is_not_recomputed_is_no_region() -> None:
    """The toy's first layers are frozen: nothing of them is kept for backward, and so nothing recomputed."""
    problem = recorded_problem("frozen")
    layers = layer_regions(problem)
    again = [region for region in layers if problem.memory.recomputation(region)]
    assert 0 < len(again) < len(layers)
    assert solve("every-block", problem, 1).regions == tuple(again)


# The judge


def test_the_cheapest_that_fits_is_chosen_and_else_the_nearest() -> None:
    problem = layered(4, *LAYER)
    proposals = [heuristic.plan_of(problem, [Region(0, 3 * k)]) for k in (1, 2, 3)]
    peaks = [peak(problem, regions) for regions in proposals]
    times = [heuristic.recompute_ns(problem, regions) for regions in proposals]
    assert (times[0] < times[1] < times[2], min(peaks)) == (True, peaks[1])  # in 3 layers more is alive than 2 spare
    found = heuristic.judge(problem.with_budget(peaks[1]), "any", proposals)
    assert (found.status, found.regions) == ("feasible", proposals[1])
    found = heuristic.judge(problem.with_budget(peaks[1] - 1), "any", proposals)
    assert (found.status, found.regions) == ("unknown", proposals[1])


@pytest.mark.exhaustive
@given(st.integers(1, 250), st.sampled_from((0, 1)))
@settings(max_examples=8)
def test_the_best_of_a_long_family_is_found(count: int, off: int) -> None:
    """Of 250 layers, with a budget that just the first `count` keep as regions."""
    problem, regions = many_layers()
    budget = peak(problem, regions[:count])
    found = heuristic.judge(problem.with_budget(budget - off), "any", [regions[:k] for k in range(len(regions) + 1)])
    assert len(found.regions) == count + off or (count + off > len(regions) and found.status == "unknown")


@functools.cache
def many_layers() -> tuple[Problem, tuple[Region, ...]]:
    problem = layered(250, ToyNode(8), ToyNode(1))
    return problem, heuristic.plan_of(problem, heuristic.grouped(heuristic.layers(problem), 1))


# Strategies by layers


def layer_regions(problem: Problem) -> tuple[Region, ...]:
    return tuple(Region(first, end) for first, end in blocks(problem.graph))


@pytest.mark.fast("toy-convnet")
@pytest.mark.parametrize("name", ["gpt2", "toy-convnet"])
def test_every_block_makes_each_layer_a_region(name: str) -> None:
    problem = recorded_problem(name)
    assert solve("every-block", problem, 1).regions == layer_regions(problem)


@pytest.mark.parametrize(("count", "widths"), [(16, [4, 4, 4, 4]), (12, [3, 3, 3, 3]), (7, [3, 3, 1]), (1, [1])])
def test_sqrt_n_makes_about_sqrt_n_regions_of_as_many_layers(count: int, widths: list[int]) -> None:
    regions = solve("sqrt-n", layered(count, *LAYER), AMPLE).regions
    assert [(region.end - region.first) // len(LAYER) for region in regions] == widths


def test_no_region_spans_encoder_and_decoder() -> None:
    """Two layers, what follows the last, and two layers again."""
    modules = ["encoder.0", "encoder.1", "norm", "decoder.0", "decoder.1"]
    nodes = [dataclasses.replace(node, module=name) for node, name in zip(chain(4, 4, 4, 4, 4), modules, strict=True)]
    graph, costs = toy_graph([*nodes, ToyNode(1, inputs=(4,))])
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    assert heuristic.layers(problem) == [[(0, 1), (1, 2)], [(3, 4), (4, 5)]]
    assert heuristic.grouped(heuristic.layers(problem), 3) == [Region(0, 2), Region(3, 5)]


def test_no_region_spans_two_graphs() -> None:
    """The toy's second graph begins with a layer, right after the last layer of its first."""
    problem = recorded_problem("broken")
    calls = [node.call for node in problem.graph.nodes]
    for found in (heuristic.layers(problem), heuristic.free_segments(problem)):
        regions = heuristic.grouped(found, len(calls))
        assert [(calls[region.first], calls[region.end - 1]) for region in regions] == [(0, 0), (1, 1)]


@pytest.mark.fast("1", "5", "12")
@pytest.mark.parametrize("n", range(1, 13))
def test_every_n_knows_both_groupings(n: int) -> None:
    """At the budget that a grouping needs, nothing slower than it is chosen."""
    problem = layered(12, *LAYER)
    layers = layer_regions(problem)
    uniform = tuple(Region(layers[i].first, layers[min(i + n, 12) - 1].end) for i in range(0, 12, n))
    every_nth = layers[n - 1 :: n]  # layers n, 2n, 3n, ...
    for regions in (uniform, every_nth):
        solution = solve("every-n", problem, peak(problem, regions))
        assert solution.status == "feasible"
        assert solution.objective_us * NS <= problem.objective_ns(regions)


@pytest.mark.fast("toy-transformer-amp")
@pytest.mark.parametrize("name", ["gpt2", "toy-transformer-amp"])
def test_first_k_recomputes_as_few_first_layers_as_fit(name: str) -> None:
    problem = recorded_problem(name)
    layers = layer_regions(problem)
    for budget in budgets(problem)[1:]:
        solution = solve("first-k", problem, budget)
        k = len(solution.regions)
        assert solution.regions == layers[:k]
        assert solution.status == "feasible"
        assert all(peak(problem, layers[:fewer]) > budget for fewer in range(k))


# Intervals


def test_intervals_are_those_of_algorithm_3() -> None:
    """Segments of 4, 4, 8, 2 and 2 bytes: a cut after the first at which the sum exceeds b."""
    graph, costs = toy_graph(chain(4, 4, 8, 2, 2))
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    found = [[region.end for region in regions] for regions in chen_greedy.intervals(problem)]
    assert found == [
        [1, 2, 3, 4, 5],  # b = 0
        [1, 2, 3, 5],  # 2: 2 no longer exceeds it, 2 + 2 does
        [2, 3, 5],  # 4: 4 + 4 > 4
        [3, 5],  # 8: 4 + 4 no longer exceeds it, 4 + 4 + 8 does
        [4, 5],  # 16: 16 + 2 does
        [5],  # 18: only 18 + 2 would
    ]


def test_intervals_respect_what_must_stay_plain() -> None:
    graph, costs = toy_graph(chain(4, 4, 8, 2, 2))
    space = Space((Segment(0, 2, False), Segment(2, 3, True), Segment(3, 5, False)), (), 1)
    found = list(chen_greedy.intervals(Problem(graph, costs, space, AMPLE)))
    assert found == [[Region(0, 2), Region(3, 5)]]


@pytest.mark.parametrize("all_but", [0, 1])
def test_the_last_interval_is_recomputed_or_left_plain(all_but: int) -> None:
    """At the budget that either needs, nothing slower is chosen."""
    problem = layered(9, *LAYER)
    for every in chen_greedy.intervals(problem):
        regions = tuple(every[: len(every) - all_but])
        solution = solve("chen-greedy", problem, peak(problem, regions))
        assert solution.status == "feasible"
        assert solution.objective_us * NS <= heuristic.recompute_ns(problem, regions)


def test_intervals_are_finer_than_layers_where_a_layer_is_too_large() -> None:
    problem = layered(2, *LAYER * 4)
    least = peak(problem, solve("every-block", problem, 1).regions)
    assert solve("every-n", problem, least - 1).status == "unknown"
    assert solve("chen-greedy", problem, least - 1).status == "feasible"


# Selective saving


def with_policy(problem: Problem, every: int) -> tuple[Region, ...]:
    layers = (save_matmuls.saving(problem, region, every) for region in layer_regions(problem))
    return heuristic.plan_of(problem, layers)


def recomputed_kinds(problem: Problem, regions: tuple[Region, ...]) -> list[str]:
    """The operators with FLOPs that run again."""
    curve, graph = problem.memory.curve(regions), problem.graph
    again = curve.op[(curve.region >= 0) & curve.executed]
    return [graph.kinds[k].name for k in graph.op_kind[again] if graph.kinds[k].flops]


def products(problem: Problem, region: Region) -> list[int]:
    """The nodes of a region that multiply matrices, attention aside, and would be recomputed."""
    again = problem.memory.recomputation(region)
    assert again is not None
    return [
        v
        for v in range(region.first, region.end)
        if "attention" not in problem.graph.nodes[v].op
        and save_matmuls.is_expensive(problem, v)
        and problem.memory.node_end[v] <= again.stop
    ]


SAVING = ["gpt2", "toy-convnet", "toy-transformer-amp"]


@pytest.mark.fast("toy-transformer-amp")
@pytest.mark.parametrize("name", SAVING)
def test_save_matmuls_recomputes_no_matmul(name: str) -> None:
    problem = recorded_problem(name)
    assert recomputed_kinds(problem, layer_regions(problem))
    assert recomputed_kinds(problem, with_policy(problem, 1)) == []


@pytest.mark.fast("toy-transformer-amp")
@pytest.mark.parametrize("name", SAVING)
def test_every_second_product_of_a_layer_is_recomputed(name: str) -> None:
    problem = recorded_problem(name)
    for region in with_policy(problem, 2):
        counted = products(problem, region)
        assert [v for v in counted if v in region.saved] == counted[::2]
    assert not any("attention" in kind for kind in recomputed_kinds(problem, with_policy(problem, 2)))


@pytest.mark.exhaustive
def test_gpt2_saves_attention_and_its_products_by_name() -> None:
    problem = recorded_problem("gpt2")
    ops = [[problem.graph.nodes[v].op for v in with_policy(problem, every)[0].saved] for every in (1, 2)]
    # query-key-value, attention, output, up, down; of the four products the first and the third
    assert ops == [
        ["addmm", "scaled_dot_product_attention", "addmm", "addmm", "addmm"],
        ["addmm", "scaled_dot_product_attention", "addmm"],
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", [1, 2])
def test_save_matmuls_knows_either_policy_for_the_first_layers(every: int) -> None:
    problem = recorded_problem("gpt2")
    regions = with_policy(problem, every)
    for k in range(1, len(regions) + 1):
        solution = solve("save-matmuls", problem, peak(problem, regions[:k]))
        assert solution.status == "feasible"
        assert solution.objective_us * NS <= problem.objective_ns(regions[:k]) + 1
        assert [(r.first, r.end) for r in solution.regions] == blocks(problem.graph)[: len(solution.regions)]


# Greedy


def test_greedy_gives_up_first_the_save_that_keeps_most_bytes_per_microsecond() -> None:
    """A layer makes 8 bytes in 1 us, 2 in 8 us, and its boundary of 1 in 1 us: 8, 1/4 and 1 bytes per us.

    Being plain it keeps 8 + 2 of its own; the boundary is kept for what takes it.
    """
    problem = layered(4, *LAYER)
    found = list(greedy.ways(problem, greedy.FreedBytes(problem), (3, 6)))
    assert found == [
        greedy.Way(None),
        greedy.Way(Region(3, 6, saved=(3, 4, 5)), time_ns=0, freed_bytes=10 - 11),
        greedy.Way(Region(3, 6, saved=(4, 5)), time_ns=1000, freed_bytes=10 - 3),
        greedy.Way(Region(3, 6, saved=(4,)), time_ns=2000, freed_bytes=10 - 2),
        greedy.Way(Region(3, 6), time_ns=10_000, freed_bytes=10),
    ]


def test_greedy_takes_back_what_is_not_needed() -> None:
    """One step less for any layer, and the plan exceeds the budget."""
    problem = layered(6, *LAYER)
    least = peak(problem, solve("every-block", problem, 1).regions)
    for budget in range(least, problem.memory.peak_without_checkpointing, 5):
        regions = greedy.greedy(problem.with_budget(budget), heuristic.layers(problem)[0])
        assert peak(problem, regions) <= budget
        assert all(peak(problem, tuple(r for r in regions if r != left)) > budget for left in regions)


ways = st.lists(st.tuples(st.integers(1, 50), st.integers(-20, 50)), max_size=8)


@given(ways)
@MANY
def test_ways_on_the_hull_free_ever_less_per_microsecond(increments: list[tuple[int, int]]) -> None:
    times = itertools.accumulate(time for time, _ in increments)
    freed = itertools.accumulate(bytes_ for _, bytes_ in increments)
    found = [greedy.Way(None), *(greedy.Way(Region(0, 1), t, b) for t, b in zip(times, freed, strict=True))]
    kept = greedy.hull(found)
    ratios = [greedy.ratio(left, right) for left, right in itertools.pairwise(kept)]
    assert ratios == sorted(ratios, reverse=True)
    assert all(r > 0 for r in ratios)
    assert kept[-1].freed_bytes == max(way.freed_bytes for way in found)
    for way in found:  # none lies above the hull
        after = [point for point in kept if point.time_ns >= way.time_ns]
        before = [point for point in kept if point.time_ns <= way.time_ns]
        if after:
            reach = before[-1].freed_bytes + greedy.ratio(before[-1], after[0]) * (way.time_ns - before[-1].time_ns)
            assert way.freed_bytes <= reach + 1e-9


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_no_slower_than_whole_layers(name: str) -> None:
    problem = recorded_problem(name)
    for budget in budgets(problem)[1:]:
        solution = solve("greedy", problem, budget)
        assert solution.status == "feasible"
        for other in ("every-block", "every-n", "first-k"):
            assert solution.objective_us <= solve(other, problem, budget).objective_us + 1e-6


@pytest.mark.parametrize("count", [4, 32, 128])
def test_greedy_judges_few_plans_however_many_layers_there_are(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, judged = layered(count, *LAYER), []
    least = peak(problem, solve("every-block", problem, 1).regions)
    budget = (least + problem.memory.peak_without_checkpointing) // 2

    def excess_bytes(problem: Problem, regions: tuple[Region, ...]) -> int:
        judged.append(regions)
        return heuristic.excess_bytes(problem, regions)

    monkeypatch.setattr(greedy, "excess_bytes", excess_bytes)
    assert solve("greedy", problem, budget).status == "feasible"
    bisections = np.ceil(np.log2(3 * count))  # a layer has three steps
    assert 0 < len(judged) <= 2 * (greedy.PREFIXES + 1 + bisections + greedy.MOST_REMOVALS_JUDGED)
