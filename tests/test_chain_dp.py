"""The chain's bound is a bound, its verdict is the oracle's, and what it hands out keeps the budget.

Hypothesis draws graphs, spaces and budgets; `tests/oracle.py` knows every plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import crossings
from remat.costing.planning_device import find_planning_device
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.check import check
from remat.formulation.clock import Clock
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import chain_dp, every_block
from remat.solvers.chain import Case, Chain, Transition
from remat.solvers.chain_labels import Limit, Optimum, optimum
from remat.solvers.chain_table import Table, admits, choose_grain, regions_of
from remat.solvers.least_peak import least_peak
from remat.solvers.reduced_costs import useful_runs
from tests.examples import examples
from tests.graphs import ToyNode, chain, crossing_toys, deciding, every_cut, saveable, spaces, toy_graph, toys
from tests.oracle import Oracle, plans_of
from tests.small_models import TEST_SIZES

AMPLE = 10**6
EXACT = Limits(gap=0.0)
MANY = settings(max_examples=examples(40, 150))
TOO_MANY = settings(MANY, max_examples=examples(150, 4000))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    graph, costs = toy_graph(draw(toys() | crossing_toys(most=6)), fixed_bytes=3)
    graph = draw(deciding(graph))
    return Problem(graph, costs, draw(spaces(graph)), AMPLE)


def table_of(chain: Chain, levels: tuple[int, int] = (3000, 10000)) -> Table:
    return Table(chain, choose_grain(chain, levels))


def with_labels(problem: Problem, grain: int, limit_ns: float) -> None:
    """Labels agree with a table of single bytes, and their plan has that time."""
    of_bytes = Table(Chain(problem), 1).least_time_ns()
    if Table(Chain(problem), grain).least_time_ns() is None:
        assert of_bytes is None
        return
    found = optimum([Limit.of(Table(Chain(problem), grain))], limit_ns)
    if of_bytes is None or of_bytes >= limit_ns:
        assert found == Optimum(limit_ns)
        return
    assert found.bound_ns == of_bytes
    assert found.legs is not None and admits(Chain(problem), found.legs, 1)
    assert max(problem.objective_ns(regions_of(problem, found.legs)), 0) == of_bytes


def outside_the_state(problem: Problem) -> list[int]:
    """Shared storages that are no part of the chain's state."""
    in_state = {shared.storage for shared in Chain(problem).state_storages if shared is not None}
    return sorted(set(problem.liveness.shared) - in_state)


@st.composite
def tight_problems(draw: st.DrawFn) -> tuple[Problem, tuple[Region, ...]]:
    """A larger problem, and a plan of it that its budget just allows."""
    graph, costs = toy_graph(draw(toys(most=9)), fixed_bytes=3)
    graph = draw(deciding(graph))
    problem = Problem(graph, costs, draw(spaces(graph, most_segments=8, most_saves=6)), AMPLE)
    regions = draw(plans_of(problem))
    return problem.with_budget(problem.memory.curve(regions).peak_bytes), regions


@given(tight_problems(), st.integers(1, 40), st.data())
@MANY
def test_labels_find_the_optimum_of_the_chain_to_the_byte(
    problem_and_plan: tuple[Problem, tuple[Region, ...]], grain: int, data: st.DataObject
) -> None:
    problem, regions = problem_and_plan
    time_ns = problem.objective_ns(regions)
    with_labels(problem, grain, data.draw(st.sampled_from([math.inf, time_ns + 1.0, time_ns, 0.8 * time_ns])))


@pytest.mark.exhaustive
@given(tight_problems(), st.integers(1, 400))
@TOO_MANY
def test_labels_find_the_optimum_of_many_chains(
    problem_and_plan: tuple[Problem, tuple[Region, ...]], grain: int
) -> None:
    problem, regions = problem_and_plan
    with_labels(problem, grain, math.inf)
    with_labels(problem, grain, float(problem.objective_ns(regions)))


def least_time_within(chains: list[Chain]) -> float:
    """Of all sequences of runs with all sets of saves, the least time of those that keep every chain's limits.

    What is set aside is counted where there is the first reason to keep it.
    """
    first = chains[0]

    @functools.cache
    def least(cut: int, k: int, kept: tuple[int, ...], aside: int) -> float:
        kept = tuple(max(bytes_, first.problem.floor_bytes[cut]) for bytes_ in kept)
        if any(bytes_ > chain.most_at(cut, k) for chain, bytes_ in zip(chains, kept, strict=True)):
            return math.inf
        if cut == first.count:
            return 0.0
        ends = (b for b in range(cut + 1, first.count + 1))
        runs = ((b, i) for b in ends for i, each in first.all_into[b].items() if each.a == cut)
        return min(
            (through(b, i, k, kept, aside) for b, i in runs if all(i in c.all_into[b] for c in chains)),
            default=math.inf,
        )

    def counted(chain: Chain, bits: int) -> int:
        each = [chain.problem.liveness.shared[u] for i, u in enumerate(chain.case.aside) if bits >> i & 1]
        return sum(chain._counted(shared) for shared in each)

    def through(b: int, index: int, k: int, kept: tuple[int, ...], aside: int) -> float:
        each = [chain.all_into[b][index] for chain in chains]
        entries = [chain.entry(transition, k, aside) for chain, transition in zip(chains, each, strict=True)]
        if any(bytes_ > most for bytes_, (_, _, most) in zip(kept, entries, strict=True)):
            return math.inf
        kept = tuple(bytes_ + adds for bytes_, (_, adds, _) in zip(kept, entries, strict=True))
        goes_on, transition = entries[0][0], each[0]
        aside |= transition.wants_aside
        if not transition.saves:
            return transition.time_ns + least(b, goes_on, kept, aside)
        return transition.time_ns + saving(transition, transition.a, goes_on, kept, aside)

    def saving(transition: Transition, segment: int, k: int, kept: tuple[int, ...], aside: int) -> float:
        b = transition.b
        if segment == b:
            fits = all(bytes_ <= chain.most_after_saves(b, k) for chain, bytes_ in zip(chains, kept, strict=True))
            return least(b, k, kept, aside) if fits else math.inf
        if any(bytes_ > chain.inside[segment] for chain, bytes_ in zip(chains, kept, strict=True)):
            return math.inf
        items = [*zip(*(chain.items(segment, b, transition.never_again) for chain in chains), strict=True)]
        found = math.inf
        for chosen in itertools.chain.from_iterable(itertools.combinations(items, n) for n in range(len(items) + 1)):
            of_chains = [*zip(*chosen, strict=True)] or [()] * len(kept)
            saved = functools.reduce(operator.or_, (item.aside for item, *_ in chosen), 0)
            more = [
                sum(item.bytes for item in items) + counted(chain, saved & ~aside)
                for chain, items in zip(chains, of_chains, strict=True)
            ]
            to = int(k or any(item.passes_on for item, *_ in chosen))
            then = saving(transition, segment + 1, to, tuple(map(operator.add, kept, more)), aside | saved)
            found = min(found, then - sum(item.time_ns for item, *_ in chosen))
        return found

    return least(0, 0, (0,) * len(chains), 0)


class Lopsided(Chain):
    """Counts of every storage no more than a share of its own, in percent."""

    def __init__(
        self, problem: Problem, percent: list[int], held_at: list[int], case: Case, keep: set[int] | None = None
    ) -> None:
        self.percent = percent
        super().__init__(problem, case, keep, held_at=tuple(held_at))

    def counting_as(self, case: Case, keep: set[int]) -> Chain:
        return Lopsided(self.problem, self.percent, [*self.held_at], case, keep)

    @functools.cached_property
    def _uncounted_bytes(self) -> np.ndarray:
        sizes = self.problem.graph.storages.size_bytes
        found = sizes - sizes * np.resize(self.percent, len(sizes)) // 100
        found[self._always_kept] = sizes[self._always_kept]  # limits count them
        return found


@st.composite
def several_chains(draw: st.DrawFn, problem: Problem, case: Case) -> list[Chain]:
    """Chains that agree on little: what one counts another leaves out."""
    percent = st.just([100]) | st.lists(st.sampled_from([0, 50, 100]), min_size=3, max_size=12)
    held_at = st.lists(st.integers(0, problem.graph.forward_end - 1), max_size=2)
    lopsided = st.builds(lambda percent, held_at: Lopsided(problem, percent, held_at, case), percent, held_at)
    shared_out = st.builds(
        lambda share, held_at: Chain(problem, case, forward_held_percent=share, held_at=tuple(held_at)),
        st.integers(0, 100),
        held_at,
    )
    return draw(st.lists(lopsided | shared_out, min_size=1, max_size=3))


@st.composite
def held_problems(draw: st.DrawFn) -> tuple[Problem, tuple[Region, ...]]:
    """As `tight_problems`, where some of what is made is local for longer in forward, and some may go to a host."""
    graph, costs = toy_graph(draw(toys(most=9)), fixed_bytes=3)
    graph = draw(deciding(graph))
    death = graph.storages.death.copy()
    for u in np.flatnonzero((graph.storages.node >= 0) & (death < graph.forward_end)):
        death[u] = draw(st.integers(int(death[u]), graph.forward_end - 1))
    graph = dataclasses.replace(graph, storages=dataclasses.replace(graph.storages, death=death))
    link = st.builds(Link, st.sampled_from((0.5, 8.0)), st.sampled_from((9, AMPLE)), latency_us=st.just(0.0))
    space = draw(spaces(graph, most_segments=8, most_saves=6))
    problem = Problem(graph, costs, space, AMPLE, draw(st.none() | link))
    regions = draw(plans_of(problem))
    return problem.with_budget(problem.with_budget(0).curve(regions).peak_bytes), regions


@st.composite
def crossing_problems(draw: st.DrawFn) -> tuple[Problem, tuple[Region, ...]]:
    """As `tight_problems`, where most is outside the state."""
    graph, costs = toy_graph(draw(crossing_toys()), fixed_bytes=3)
    saves = draw(st.sets(st.sampled_from(saveable(graph)), max_size=3)) if saveable(graph) else ()
    problem = Problem(graph, costs, dataclasses.replace(every_cut(graph), saveable=tuple(sorted(saves))), AMPLE)
    regions = draw(plans_of(problem))
    return problem.with_budget(problem.memory.curve(regions).peak_bytes), regions


def counts_in_part(chain: Chain) -> bool:
    every = (1 << len(chain.case.aside)) - 1
    return chain.forward_held_percent < 100 or chain.counted_aside(every) < chain.bytes_aside(every)


def labels_find_the_best_within_all_limits(
    drawn: tuple[Problem, tuple[Region, ...]], grain: int, data: st.DataObject
) -> None:
    """And it bounds the plan that the budget allows, whichever storages they set aside and tables count anywhere."""
    problem, regions = drawn
    outside, shared = outside_the_state(problem), problem.liveness.shared
    case = Case().counting({u: data.draw(st.sampled_from(shared[u].sites)) for u in outside})
    aside = tuple(data.draw(st.sampled_from([outside, outside[::2], outside[1::2]])))
    chains = data.draw(several_chains(problem, case))
    limits = [Limit.of(Table(chain, grain), aside) for chain in chains]
    found = optimum(limits, math.inf)
    within = max(least_time_within([limit.chain for limit in limits]), 0)
    assert within <= found.bound_ns <= problem.objective_ns(regions)
    # Of what is set aside and counted in part a label may allow more than its table does: that is deducted in full.
    if not aside or not any(counts_in_part(limit.chain) for limit in limits):
        assert least_time_within(chains) <= found.bound_ns == within
    assert found.legs is not None
    assert max(problem.objective_ns(regions_of(problem, found.legs)), 0) == found.bound_ns


@given(held_problems() | crossing_problems(), st.integers(1, 40), st.data())
@MANY
def test_labels_of_several_chains_find_the_best_within_all_limits(
    drawn: tuple[Problem, tuple[Region, ...]], grain: int, data: st.DataObject
) -> None:
    labels_find_the_best_within_all_limits(drawn, grain, data)


@pytest.mark.exhaustive
@given(held_problems() | crossing_problems(), st.integers(1, 40), st.data())
@TOO_MANY
def test_labels_of_several_chains_find_the_best_of_hundreds(
    drawn: tuple[Problem, tuple[Region, ...]], grain: int, data: st.DataObject
) -> None:
    labels_find_the_best_within_all_limits(drawn, grain, data)


@given(problems(), st.data())
@MANY
def test_bound_and_verdict_hold_against_every_plan(problem: Problem, data: st.DataObject) -> None:
    oracle = Oracle(problem)
    budget = data.draw(st.sampled_from(sorted({*oracle.peaks, min(oracle.peaks) - 1})))
    solution = chain_dp.solve(problem.with_budget(budget), EXACT)
    least = oracle.least_time_us(budget)
    if solution.status == "infeasible":
        assert least is None
    if least is not None:
        assert solution.bound_us <= least + 1e-6
    if solution.status in ("optimal", "feasible"):
        assert check(problem.with_budget(budget), solution) == []
        assert solution.status == "feasible" or solution.objective_us == pytest.approx(least)


def proved_from_a_start(problem: Problem, data: st.DataObject) -> None:
    """Labels are asked only then, and with what is outside the state set aside."""
    oracle = Oracle(problem)
    budget = data.draw(st.sampled_from(sorted(set(oracle.peaks))))
    start = oracle.plans[oracle.peaks.index(min(oracle.peaks))]
    solution = chain_dp.solve(problem.with_budget(budget), dataclasses.replace(EXACT, start=start))
    least = oracle.least_time_us(budget)
    assert least is not None
    assert solution.bound_us <= least + 1e-6
    assert check(problem.with_budget(budget), solution) == []
    assert solution.status == "feasible" or solution.objective_us == pytest.approx(least)


@given(problems(), st.data())
@MANY
def test_what_is_proved_from_a_start_is_the_oracles(problem: Problem, data: st.DataObject) -> None:
    proved_from_a_start(problem, data)


@pytest.mark.exhaustive
@given(problems(), st.data())
@TOO_MANY
def test_what_is_proved_from_a_start_is_the_oracles_in_hundreds(problem: Problem, data: st.DataObject) -> None:
    proved_from_a_start(problem, data)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_the_first_table_that_shows_a_problem_to_be_of_no_use_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    place = find_planning_device("h100-80gb")
    found = profile_step(fake_step(TEST_SIZES["t5-base"](), place), place)
    problem = Problem(found.graph, found.costs, find_space(found.graph), AMPLE * AMPLE)
    least = least_peak(problem, EXACT)
    problem = problem.with_budget((4 * least.peak_bytes + problem.memory.peak_without_checkpointing) // 5)
    table, tables = chain_dp._ChainSearch._table, list[Table]()

    def noted(self: chain_dp._ChainSearch, *args: Any) -> Table:
        tables.append(table(self, *args))
        return tables[-1]

    monkeypatch.setattr(chain_dp._ChainSearch, "_table", noted)
    asked = dataclasses.replace(EXACT, start=least.regions, time_s=20)
    proved = chain_dp.solve(problem, asked)
    assert len(tables) > 1 and proved.objective_us > 0
    tables.clear()
    left = chain_dp.solve(problem, dataclasses.replace(asked, below_us=proved.bound_us / 2))
    assert len(tables) == 1
    assert left.status == "feasible"
    assert proved.bound_us / 2 <= left.bound_us < proved.objective_us <= left.objective_us


@pytest.mark.parametrize(
    ("plan", "time_s", "ends"),
    [
        pytest.param((), None, True, id="with a plan"),
        pytest.param(None, None, False, id="without a plan"),
        pytest.param((), 60.0, False, id="within a time limit"),
    ],
)
def test_the_clock_ends_a_search_that_has_a_plan_and_no_time_limit(
    plan: tuple[Region, ...] | None, time_s: float | None, ends: bool
) -> None:
    graph, costs = toy_graph(chain(4, 4, 4))
    limits = Limits(time_s=time_s, clock=Clock(chain_s=0.5, stalls_s=60))
    found = chain_dp.Incumbent(Problem(graph, costs, every_cut(graph), AMPLE), limits.now() - 1)
    if plan is not None:
        found.regions, found.objective_ns = plan, 5
    assert chain_dp._ChainSearch(found.problem, limits, found)._stalls() == ends


def test_a_plan_of_labels_that_oversteps_a_limit_twice_is_no_error() -> None:
    """Its legs count nothing of what is set aside: the table's chain cannot read them."""
    nodes = [
        ToyNode(4, (), frozenset({"output", "fixed"}), workspace_bytes=8, lingers=1),
        ToyNode(5, (0,), frozenset(), cast=5, parameter=4, time_us=6),
        ToyNode(4, (0, 1), frozenset({"cast", "inputs"}), parameter=1, time_us=9, lingers=2),
    ]
    graph, costs = toy_graph(nodes, fixed_bytes=3)
    problem = Problem(graph, costs, dataclasses.replace(every_cut(graph), saveable=()), 30)
    found = chain_dp.solve(problem, dataclasses.replace(EXACT, start=(Region(0, 3),)))
    assert found.bound_us <= min(time for time in [Oracle(problem).least_time_us(30)] if time is not None)


def test_what_a_start_saves_in_vain_is_no_time_gained() -> None:
    """Early stop leaves the last nodes of a region out, saved or not."""
    graph, costs = toy_graph(chain(*[4] * 4))
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    saved = tuple(v for v in problem.liveness.save_time_ns if v in Region(0, 4))
    assert problem.objective_ns((Region(0, 4, saved),)) >= 0


@given(tight_problems(), st.data())
@MANY
def test_every_table_bounds_every_plan_of_its_case(
    drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject
) -> None:
    tables_bound_every_plan(drawn, data)


@pytest.mark.exhaustive
@given(tight_problems(), st.data())
@TOO_MANY
def test_tables_of_hundreds_bound_every_plan(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    tables_bound_every_plan(drawn, data)


def tables_bound_every_plan(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    """Whatever share is counted of what is local at whichever operators of the forward."""
    tight, regions = drawn
    held_at = data.draw(st.lists(st.integers(0, tight.graph.forward_end - 1), max_size=3))
    percent, grains = data.draw(st.integers(0, 100)), data.draw(st.sampled_from([(10, 30), (3000, 10000)]))
    chain = Chain(tight, forward_held_percent=percent, held_at=tuple(held_at))
    bound = table_of(chain, grains).least_time_ns()
    assert bound is not None
    assert bound <= tight.objective_ns(regions)


@given(tight_problems(), st.data())
@MANY
def test_cases_hold_every_plan(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    halves_bound_every_plan(drawn, data)


@pytest.mark.exhaustive
@given(tight_problems(), st.data())
@TOO_MANY
def test_cases_hold_every_plan_of_hundreds(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    halves_bound_every_plan(drawn, data)


def halves_bound_every_plan(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    """Of the two halves of a split, one bounds the plan: it keeps the storage at that site or before, or it does not.

    What other storages are counted at makes no difference to that.
    """
    tight, regions = drawn
    if shared := outside_the_state(tight):
        storage = data.draw(st.sampled_from(shared))
        site = data.draw(st.sampled_from(tight.liveness.shared[storage].sites))
        counted = {u: data.draw(st.sampled_from(tight.liveness.shared[u].sites)) for u in shared}
        halves = Case().counting(counted).split(storage, site)
        bounds = [table_of(Chain(tight, case)).least_time_ns() for case in halves]
        assert min((bound for bound in bounds if bound is not None), default=math.inf) <= tight.objective_ns(regions)


@given(tight_problems(), st.data())
@MANY
def test_runs_of_a_better_plan_are_useful(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    runs_of_a_better_plan_are_useful(drawn, data)


@pytest.mark.exhaustive
@given(tight_problems(), st.data())
@TOO_MANY
def test_runs_of_a_better_plan_are_useful_in_hundreds(
    drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject
) -> None:
    runs_of_a_better_plan_are_useful(drawn, data)


def runs_of_a_better_plan_are_useful(drawn: tuple[Problem, tuple[Region, ...]], data: st.DataObject) -> None:
    tight, regions = drawn
    shared = tight.liveness.shared
    case = Case().counting({u: data.draw(st.sampled_from(shared[u].sites)) for u in outside_the_state(tight)})
    held_at = tuple(data.draw(st.lists(st.integers(0, tight.graph.forward_end - 1), max_size=2)))
    percent = data.draw(st.sampled_from([100, 40, 0]))
    table = table_of(Chain(tight, case, forward_held_percent=percent, held_at=held_at))
    bound = table.least_time_ns()
    assert bound is not None and bound <= tight.objective_ns(regions)
    assert tight.runs_of(regions) <= useful_runs(table, tight.objective_ns(regions) + 1)


@given(tight_problems(), st.integers(1, 40), st.sampled_from([1, 2, 3, 7]))
@MANY
def test_a_table_that_allows_a_plan_says_no_more_than_its_time(
    drawn: tuple[Problem, tuple[Region, ...]], coarse: int, finer: int
) -> None:
    """Whatever the grain: so no finer table is asked where it would repeat what is known."""
    tight, _ = drawn
    chain = Chain(tight)
    table = Table(chain, coarse)
    legs = table.legs()
    assert legs is not None and admits(chain, legs, coarse)
    bound = table.least_time_ns()
    assert tight.objective_ns(regions_of(tight, legs)) == bound
    finer_bound = Table(chain, finer).least_time_ns()
    assert finer_bound is not None and bound is not None
    assert finer_bound <= bound or not admits(chain, legs, finer)


@given(problems())
@settings(max_examples=40)
def test_more_budget_never_raises_the_bound(problem: Problem) -> None:
    peaks = sorted({*Oracle(problem).peaks})
    bounds = [chain_dp.solve(problem.with_budget(peak), EXACT).bound_us for peak in peaks]
    assert bounds == sorted(bounds, reverse=True)


def long_chain(layers: int) -> tuple[Graph, Problem]:
    """A chain of `layers` nodes of 4 bytes, a microsecond each, every cut, nothing to save."""
    graph, costs = toy_graph(chain(*[4] * layers))
    space = dataclasses.replace(every_cut(graph), saveable=())
    return graph, Problem(graph, costs, space, AMPLE)


def test_a_start_that_keeps_the_budget_is_never_lost() -> None:
    _, problem = long_chain(9)
    start = (Region(0, 3), Region(3, 6), Region(6, 9))
    tight = problem.with_budget(problem.memory.curve(start).peak_bytes)
    found = chain_dp.solve(tight, dataclasses.replace(EXACT, start=start))
    assert found.objective_us <= problem.objective_ns(start) / NS


def test_no_time_still_gives_a_bound() -> None:
    _, problem = long_chain(9)
    budget = problem.memory.peak_without_checkpointing - 4
    found = chain_dp.solve(problem.with_budget(budget), Limits(gap=0.0, time_s=1e-9))
    assert found.status in ("optimal", "feasible", "unknown")
    assert found.bound_us >= 0


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5-base", "gpt2", "bert-large", "llama-1b"])
def test_a_plan_of_a_real_model_is_never_below_the_bound_at_its_own_peak(name: str) -> None:
    """Autocast's copies, an encoder's output and a position bias, which toys have not: whatever counts them."""
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(TEST_SIZES[name](), place), place)
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), AMPLE)
    most = problem.memory.peak_without_checkpointing
    least = problem.memory.curve(every_block.solve(problem, Limits()).regions).peak_bytes
    for share in (0.2, 0.8):
        found = chain_dp.solve(problem.with_budget(int(least + share * (most - least))), Limits())
        tight = problem.with_budget(problem.memory.curve(found.regions).peak_bytes)
        rows = [row.op for row in tight.forward_rows]
        for percent, held_at in itertools.product((100, 60, 30, 0), ((), (rows[0],), (rows[0], rows[-1], rows[-1]))):
            table = table_of(Chain(tight, forward_held_percent=percent, held_at=held_at))
            bound, legs = table.least_time_ns(), table.legs()
            assert bound is not None and legs is not None
            assert bound <= problem.objective_ns(found.regions)
            # What a table says of time is true, also where one region stops early and another runs to its end.
            assert bound == problem.objective_ns(regions_of(tight, legs))


@pytest.mark.exhaustive
def test_the_chain_proves_what_skip_connections_need() -> None:
    """Labels say which of them are kept; without, 3 to 5 % were left at this budget."""
    place = find_planning_device("h100-80gb")
    workload = next(each for each in crossings.WORKLOADS if each.name == "segmentation-unet")
    profile = profile_step(fake_step(workload, place), place)
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), AMPLE)
    most, least = problem.memory.peak_without_checkpointing, least_peak(problem, Limits()).peak_bytes
    tight = problem.with_budget(least + (most - least) // 10)
    found = chain_dp.solve(tight, Limits(start=least_peak(problem, Limits()).regions))
    assert found.status == "optimal"
    assert found.bound_us == found.objective_us > 0


@pytest.mark.exhaustive
@pytest.mark.often("vit-l16")
@pytest.mark.parametrize("name", ["vit-l16", "llama-1b", "swin-base"])
def test_the_chain_proves_what_real_models_need(name: str) -> None:
    """Held weights, skip connections, a peak where the forward ends: no gap is left, and no other solver is asked."""
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(TEST_SIZES[name](), place), place)
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), AMPLE)
    most, least = problem.memory.peak_without_checkpointing, least_peak(problem, Limits()).peak_bytes
    for share in (0.2, 0.5, 0.8):
        tight = problem.with_budget(int(least + share * (most - least)))
        start = every_block.solve(tight, Limits()).regions
        found = chain_dp.solve(tight, Limits(start=start))
        assert found.status == "optimal"
        assert found.bound_us >= (1 - 0.001) * found.objective_us > 0
