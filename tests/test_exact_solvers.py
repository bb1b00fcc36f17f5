"""Every exact solver against exhaustive search, and laws that they all keep.

Hypothesis draws graphs, spaces and budgets. Infeasible is an answer, and must be the oracle's as well. The rows of the
program are held to the oracle without a solver, too: where a row is relaxed, no plan within the budget may break it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import types
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.costing.costs import Costs
from remat.evaluation.graph import Graph, Node
from remat.evaluation.plan import Region
from remat.formulation.check import check
from remat.formulation.liveness import NS
from remat.formulation.problem import Problem
from remat.formulation.search_space import Segment, Space, find_space
from remat.formulation.solution import Limits, Solution
from remat.planning.profiling import profile
from remat.solvers import chain_dp, cp_sat, exact, milp, program
from remat.solvers.least_peak import least_peak
from remat.solvers.program import Constraint, Outcome, Program
from remat.streams import stdout_to_stderr
from tests.examples import examples
from tests.graphs import ToyNode, chain, crossing_toys, deciding, every_cut, spaces, toy_graph, toys
from tests.oracle import Oracle, decides_again, every_plan, is_kept
from tests.small_models import TEST_SIZES

HIGHS = functools.partial(milp.solve, engine="highs")
SCIP = functools.partial(milp.solve, engine="scip")
BACKENDS: dict[str, program.MakeBackend] = {
    "cp-sat": cp_sat.CpSat,
    "milp-highs": functools.partial(milp.Milp, engine="highs"),
    "milp-scip": functools.partial(milp.Milp, engine="scip"),
}
OF_THE_PROGRAM: dict[str, Callable[..., Solution]] = {"cp-sat": cp_sat.solve, "milp-highs": HIGHS, "milp-scip": SCIP}
PROVERS = {**OF_THE_PROGRAM, "exact": exact.solve}
SOLVERS = {**PROVERS, "chain-dp": chain_dp.solve}  # a bound always, but not always the best plan

EXACT = Limits(gap=0.0, workers=1, time_s=20)
AMPLE = 10**6
MANY = settings(max_examples=examples(15, 50))
SOME = settings(max_examples=examples(5, 12))

every_solver = pytest.mark.parametrize("solver", SOLVERS)
every_prover = pytest.mark.parametrize("solver", PROVERS)
every_backend = pytest.mark.parametrize("solver", BACKENDS)


def solve(solver: str, problem: Problem, budget_bytes: int) -> Solution:
    return SOLVERS[solver](problem.with_budget(budget_bytes), EXACT)


def assert_right(solver: str, problem: Problem, oracle: Oracle, budget_bytes: int) -> None:
    """The solver's verdict is the oracle's, and its plan keeps what it claims."""
    solution, expected = solve(solver, problem, budget_bytes), oracle.least_time_us(budget_bytes)
    if solver in PROVERS:
        assert solution.status == ("infeasible" if expected is None else "optimal")
    if expected is None:
        assert solution.status in ("infeasible", "unknown")
        return
    assert solution.status != "infeasible"
    assert solution.bound_us <= expected + 1e-6
    assert not decides_again(problem, solution.regions)
    if solution.status != "unknown":
        assert check(problem.with_budget(budget_bytes), solution) == []
    if solution.status == "optimal":
        assert solution.objective_us == pytest.approx(expected)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Toy problems in which some nodes take no time or no bytes, draw at random, or count."""
    nodes = draw(toys() | crossing_toys(most=6))
    alone = [i for i, node in enumerate(nodes) if node.kind == "new" and (nodes[i + 1 :] or nodes)[0].kind == "new"]
    free, empty = draw(st.sets(st.sampled_from(range(len(nodes))))), draw(st.sets(st.sampled_from(alone), max_size=2))
    nodes = [
        dataclasses.replace(node, time_us=0 if i in free else node.time_us, size=0 if i in empty else node.size)
        for i, node in enumerate(nodes)
    ]
    graph, costs = toy_graph(nodes, fixed_bytes=3)
    marks = draw(st.lists(st.sampled_from(MARKS), min_size=len(nodes), max_size=len(nodes)))
    graph = draw(deciding(dataclasses.replace(graph, nodes=tuple(map(marked, graph.nodes, marks)))))
    return Problem(graph, costs, draw(spaces(graph)), AMPLE)


MARKS = ("", "", "", "random", "batch_norm", "counter", "tuple")


def marked(node: Node, mark: str) -> Node:
    """`node`, drawing at random, changing the state of a module, or with several outputs."""
    effect = mark if mark in ("batch_norm", "counter") else ""
    return dataclasses.replace(node, random=mark == "random", effect=effect, single_tensor=mark != "tuple")


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


@every_prover
@pytest.mark.parametrize(
    ("budget", "regions", "time_us"),
    [
        pytest.param(28, (), 0, id="no-checkpointing"),  # 4 + 4 + 8, its gradient 8, and the next one 4
        pytest.param(27, (Region(0, 2, saved=(1,)),), 1, id="one-short"),  # without a in the meantime: 24
        pytest.param(24, (Region(0, 2, saved=(1,)),), 1, id="least"),
        pytest.param(23, None, None, id="one-below-the-least"),  # backward of b: 8 held + 4 + 4 and both gradients
    ],
)
def test_a_chain_by_hand(solver: str, budget: int, regions: tuple[Region, ...] | None, time_us: int | None) -> None:
    graph, costs = toy_graph(chain(4, 4, 8))
    space = Space((Segment(0, 2, False), Segment(2, 3, True)), (1,), 1)
    problem = Problem(graph, costs, space, AMPLE)
    assert Oracle(problem).least_time_us(budget) == time_us
    solution = solve(solver, problem, budget)
    assert solution.status == ("infeasible" if regions is None else "optimal")
    assert solution.regions == (regions or ())
    assert solution.objective_us == (time_us or 0)


@every_solver
@given(problem=problems(), percent=st.integers(0, 100))
@MANY
def test_no_plan_of_the_space_is_better(solver: str, problem: Problem, percent: int) -> None:
    """At the budgets that bite: the least peak, one below it, no checkpointing, one below it, and a peak between."""
    oracle = Oracle(problem)
    without, least = problem.memory.peak_without_checkpointing, oracle.least_peak()
    peaks = sorted(set(oracle.peaks))
    between = peaks[percent * (len(peaks) - 1) // 100]
    for budget in sorted({least - 1, least, between, without - 1, without}):
        assert_right(solver, problem, oracle, budget)


@every_backend
@given(problem=problems())
@MANY
def test_the_least_peak_is_the_oracles(solver: str, problem: Problem) -> None:
    """Peaks here are below 1000 bytes, so the gap of a thousandth at which the search stops is less than a byte."""
    highest = problem.with_budget(problem.memory.peak_without_checkpointing)
    peak, regions, bound = program.least_peak(BACKENDS[solver], highest, EXACT)
    assert peak == Oracle(problem).least_peak(saves=False)
    assert problem.memory.curve(regions).peak_bytes == peak
    assert bound <= peak + 1e-6


@given(problem=problems(), percent=st.integers(0, 100))
@MANY
def test_a_search_for_the_least_peak_tells_whether_a_budget_can_be_kept(problem: Problem, percent: int) -> None:
    oracle, most = Oracle(problem), problem.memory.peak_without_checkpointing
    budget = oracle.least_peak() - 1 + percent * (most - oracle.least_peak() + 1) // 100
    found = least_peak(problem, EXACT, fits_bytes=budget)
    assert found.peak_bytes == problem.memory.curve(found.regions).peak_bytes
    assert found.bound_bytes <= oracle.least_peak() <= found.peak_bytes
    assert found.decides(budget) or not least_peak(problem, EXACT).proved


@given(problem=problems())
@MANY
def test_the_least_peak_is_exact_or_said_to_be_at_most(problem: Problem) -> None:
    """Saves that spare a workspace included: what is proved is the least of all plans."""
    found, least = least_peak(problem, EXACT), Oracle(problem).least_peak()
    assert problem.memory.curve(found.regions).peak_bytes == found.peak_bytes
    assert found.bound_bytes <= least <= found.peak_bytes
    assert found.peak_bytes <= Oracle(problem).least_peak(saves=False)
    assert (found.peak_bytes == least) or not found.proved


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5-base", "qwen3-moe"])
def test_a_real_model_fits_its_least_peak_and_not_a_byte_less(name: str) -> None:
    """One whose storages cross the chain, and one whose least peak no layer boundary gives."""
    found = profile(TEST_SIZES[name](), target="h100-80gb")
    problem = Problem(found.graph, found.costs, find_space(found.graph), AMPLE)
    least = least_peak(problem, Limits())
    assert least.proved
    at_least = exact.solve(problem.with_budget(least.peak_bytes), Limits(time_s=10))
    assert at_least.status in ("optimal", "feasible")
    assert check(problem.with_budget(least.peak_bytes), at_least) == []
    assert exact.solve(problem.with_budget(least.peak_bytes - 1), Limits()).status == "infeasible"


@every_prover
@given(problem=problems(), percents=st.lists(st.integers(0, 120), min_size=2, max_size=4))
@SOME
def test_more_budget_never_costs_more(solver: str, problem: Problem, percents: list[int]) -> None:
    without = problem.memory.peak_without_checkpointing
    solutions = [solve(solver, problem, percent * without // 100) for percent in sorted(percents)]
    times = [float("inf") if s.status == "infeasible" else s.objective_us for s in solutions]
    assert times == sorted(times, reverse=True)


@every_prover
@given(problem=problems(), percent=st.integers(60, 99), factor=st.integers(2, 1000))
@SOME
def test_scaling_all_times_scales_the_objective(solver: str, problem: Problem, percent: int, factor: int) -> None:
    budget = percent * problem.memory.peak_without_checkpointing // 100
    costs = costs_of(problem)
    scaled = dataclasses.replace(costs, time_us=tuple(factor * time for time in costs.time_us))
    one, other = (solve(solver, Problem(problem.graph, c, problem.space, AMPLE), budget) for c in (costs, scaled))
    assert other.status == one.status
    assert other.objective_us == pytest.approx(factor * one.objective_us)


@every_prover
@given(problem=problems(), percent=st.integers(60, 99), factor=st.sampled_from([2, 1000, 2**20, 10**8]))
@SOME
def test_scaling_all_bytes_and_the_budget_changes_no_time(
    solver: str, problem: Problem, percent: int, factor: int
) -> None:
    """A graph of a few bytes is solved in bytes, one of many GiB in grains of several KiB."""
    budget = percent * problem.memory.peak_without_checkpointing // 100
    larger = magnified(problem, factor)
    assert larger.memory.peak_without_checkpointing == factor * problem.memory.peak_without_checkpointing
    one, other = solve(solver, problem, budget), solve(solver, larger, factor * budget)
    assert other.status == one.status
    assert other.objective_us == pytest.approx(one.objective_us)


def magnified(problem: Problem, factor: int) -> Problem:
    """All bytes times `factor`."""
    graph, costs = problem.graph, costs_of(problem)
    storages = dataclasses.replace(graph.storages, size_bytes=graph.storages.size_bytes * factor)
    fixed = {name: size * factor for name, size in graph.fixed_bytes.items()}
    larger = dataclasses.replace(graph, storages=storages, fixed_bytes=fixed)
    workspaces = tuple(factor * size for size in costs.workspace_bytes)
    return Problem(larger, dataclasses.replace(costs, workspace_bytes=workspaces), problem.space, AMPLE)


@every_prover
@given(problem=problems(), percent=st.integers(60, 99))
@SOME
def test_renaming_nodes_changes_nothing(solver: str, problem: Problem, percent: int) -> None:
    budget = percent * problem.memory.peak_without_checkpointing // 100
    other_names = Problem(renamed(problem.graph), costs_of(problem), problem.space, AMPLE)
    one, other = (solve(solver, p, budget) for p in (problem, other_names))
    assert (other.status, other.objective_us) == (one.status, pytest.approx(one.objective_us))


def costs_of(problem: Problem) -> Costs:
    """The Costs that a toy problem was made of."""
    times = tuple(float(time) for time in problem.liveness.op_time_ns / NS)
    return Costs("estimated", "toy", times, tuple(problem.memory.workspace_bytes.tolist()))


def renamed(graph: Graph) -> Graph:
    """`graph` with the names of its nodes and operators in reverse alphabetical order."""
    nodes = tuple(dataclasses.replace(node, name=f"z{len(graph.nodes) - i}") for i, node in enumerate(graph.nodes))
    return dataclasses.replace(graph, nodes=nodes)


@pytest.mark.parametrize("solver", ["exact", "chain-dp"])
@given(problems(), st.integers(0, 100), st.sampled_from([0.5, 0.99, 1.0, 1.01, 2.0]))
@MANY
def test_what_is_given_up_is_no_better_than_asked_for(
    solver: str, problem: Problem, percent: int, share: float
) -> None:
    """A plan of less than `below_us`, if there is one, is found as without it; else the bound may say that none is."""
    oracle = Oracle(problem)
    peaks = sorted(set(oracle.peaks))
    budget = peaks[percent * (len(peaks) - 1) // 100]
    least = oracle.least_time_us(budget)
    assert least is not None
    below_us = share * least
    limits = dataclasses.replace(EXACT, below_us=below_us, start=oracle.plans[oracle.peaks.index(min(oracle.peaks))])
    solution = SOLVERS[solver](problem.with_budget(budget), limits)
    assert solution.bound_us <= least + 1e-6
    assert check(problem.with_budget(budget), solution) == []
    if solver == "exact":
        assert solution.status == "optimal" or solution.bound_us >= below_us
        assert solution.objective_us == pytest.approx(least) or least >= below_us


@every_prover
@pytest.mark.parametrize("budget", [67, 68, 87, 88])
def test_saves_that_are_let_go_late_are_no_obstacle(solver: str, budget: int) -> None:
    """Peaks of the five plans: 94, 88, 94, 68 and 88."""
    nodes = [*chain(10, 10, 10), ToyNode(4, (2,), frozenset({"extra"}), extra=40, lingers=1)]
    graph, costs = toy_graph(nodes)
    problem = Problem(graph, costs, Space((Segment(0, 3, False), Segment(3, 4, False)), (), 1), AMPLE)
    assert_right(solver, problem, Oracle(problem), budget)


@pytest.mark.parametrize("solver", OF_THE_PROGRAM)
def test_a_budget_below_the_optimizers_peak_is_refused(solver: str) -> None:
    """4 + 4 + 8 and gradients take less than the step of the optimizer: 500, whatever the plan."""
    graph, costs = toy_graph(chain(4, 4, 8), optimizer_bytes=500)
    problem = Problem(graph, costs, every_cut(graph), AMPLE)
    assert solve(solver, problem, 499).status == "infeasible"
    assert solve(solver, problem, 500).status == "optimal"


@pytest.mark.exhaustive
def test_no_bound_exceeds_another_solvers_plan_on_a_real_model() -> None:
    """A convolutional network, which no toy resembles: half way from the least peak to no checkpointing."""
    found = profile(TEST_SIZES["resnet50"](), target="h100-80gb")
    problem = Problem(found.graph, found.costs, find_space(found.graph), AMPLE)
    without = problem.memory.peak_without_checkpointing
    least = least_peak(problem, Limits()).peak_bytes
    tight = problem.with_budget((least + without) // 2)
    solutions = [SOLVERS[solver](tight, Limits(time_s=30)) for solver in ("milp-highs", "chain-dp")]
    plans = [solution for solution in solutions if solution.regions]
    assert plans
    assert all(check(tight, solution) == [] for solution in plans)
    assert max(solution.bound_us for solution in solutions) <= min(plan.objective_us for plan in plans) + 1e-3


# What the program is told besides: which runs to keep, and where to start.


@pytest.mark.parametrize("solver", OF_THE_PROGRAM)
@given(problem=problems(), percent=st.integers(60, 99))
@SOME
def test_keeping_every_run_or_only_the_best_changes_nothing(solver: str, problem: Problem, percent: int) -> None:
    tight = problem.with_budget(percent * problem.memory.peak_without_checkpointing // 100)
    one = OF_THE_PROGRAM[solver](tight, EXACT)
    all_kept = OF_THE_PROGRAM[solver](tight, EXACT, keep=set(range(len(problem.runs))))
    assert (all_kept.status, all_kept.objective_us) == (one.status, pytest.approx(one.objective_us))
    if one.status == "optimal":
        best_kept = OF_THE_PROGRAM[solver](tight, EXACT, keep=problem.runs_of(one.regions))
        assert (best_kept.status, best_kept.objective_us) == ("optimal", pytest.approx(one.objective_us))


@pytest.mark.parametrize("solver", OF_THE_PROGRAM)
def test_nothing_kept_is_infeasible_unless_there_is_a_plan_to_start_from(solver: str) -> None:
    problem = by_hand(24)
    start = Solution("somebody", "feasible", (Region(0, 2, saved=(1,)),), 1.0)
    assert OF_THE_PROGRAM[solver](problem, EXACT, keep=set()).status == "infeasible"
    found = OF_THE_PROGRAM[solver](problem, EXACT, keep=set(), start=start)
    assert (found.status, found.regions) == ("optimal", start.regions)


@pytest.mark.parametrize("solver", OF_THE_PROGRAM)
def test_without_time_the_plan_to_start_from_is_the_answer(solver: str) -> None:
    """Whether it comes with a bound from another solver, or from a neighbouring budget; the better of the two."""
    start, near = (Region(0, 2),), (Region(0, 2, saved=(1,)),)
    given_by = Solution("somebody", "feasible", start, 2.0, 0.5)
    found = OF_THE_PROGRAM[solver](by_hand(24), Limits(time_s=0.0), start=given_by)
    assert (found.solver, found.status, found.regions, found.bound_us) == ("somebody", "feasible", start, 0.5)
    found = OF_THE_PROGRAM[solver](by_hand(24), Limits(time_s=0.0, start=near), start=given_by)
    assert (found.status, found.regions, found.objective_us, found.bound_us) == ("feasible", near, 1.0, 0.5)
    found = OF_THE_PROGRAM[solver](by_hand(23), Limits(time_s=0.0, start=near))
    assert (found.status, found.regions) == ("unknown", ())


def by_hand(budget_bytes: int) -> Problem:
    """The chain above: 28 bytes without checkpointing, at least 24."""
    graph, costs = toy_graph(chain(4, 4, 8))
    return Problem(graph, costs, Space((Segment(0, 2, False), Segment(2, 3, True)), (1,), 1), budget_bytes)


class Scripted:
    """A backend that proposes plans one after the other, and is then interrupted."""

    precision = 0.0

    def __init__(self, made: Program, plans: Sequence[tuple[Region, ...]]):
        self.program, self.plans = made, list(plans)

    def run(self, limits: Limits, time_s: float | None, on_progress: program.Progress | None) -> Outcome:
        if not self.plans:
            raise KeyboardInterrupt
        return Outcome("feasible", values_at(self.program, self.plans.pop(0)), bound=500.0)


def test_an_interrupted_search_gives_what_it_has() -> None:
    problem, over, fits = by_hand(24), (), (Region(0, 2),)
    start = Solution("somebody", "feasible", fits, 2.0)
    found = program.solve("scripted", lambda made: Scripted(made, [over]), problem, EXACT, start=start)
    assert (found.status, found.regions, found.bound_us, found.interrupted) == ("feasible", fits, 0.5, True)
    found = program.solve("scripted", lambda made: Scripted(made, [over]), problem, EXACT)
    assert (found.status, found.bound_us, found.interrupted) == ("unknown", 0.5, True)
    found = program.solve("scripted", lambda made: Scripted(made, [over, fits]), problem, EXACT)
    assert (found.status, found.objective_us, found.interrupted) == ("feasible", 2.0, False)


def test_what_a_solver_prints_by_itself_is_no_part_of_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """SCIP says on stdout that it was interrupted, where a document may be expected."""
    with stdout_to_stderr():
        os.write(1, b"pressed CTRL-C")
    print("answer")
    assert capfd.readouterr() == ("answer\n", "pressed CTRL-C")


class Slow:
    """A solver that ends when it is told to."""

    def __init__(self) -> None:
        self.parameters = types.SimpleNamespace(catch_sigint_signal=True)
        self.told = threading.Event()

    def solve(self, model: object, watch: object) -> int:
        assert self.told.wait(60)
        return 1

    def stop_search(self) -> None:
        self.told.set()


class Pressed(threading.Event):
    """Waiting for it is interrupted, once."""

    pressed = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_ctrl_c_ends_the_search_and_a_limit_is_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT takes the one for the other: so it does not hear of Ctrl-C."""
    engine, solver = cp_sat.CpSat(program.Program(by_hand(24))), Slow()
    solver.told.set()
    assert engine._solve(solver, None) == (1, False)  # type: ignore[arg-type]
    assert not solver.parameters.catch_sigint_signal
    monkeypatch.setattr(cp_sat, "threading", types.SimpleNamespace(Thread=threading.Thread, Event=Pressed))
    assert engine._solve(Slow(), None) == (1, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("raised_by", ["_by_heuristics", "_searched"])
def test_an_interrupt_after_the_chain_keeps_its_plan(raised_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages after the chain only improve on it."""

    def interrupted(*about: object) -> Solution:
        raise KeyboardInterrupt

    def unproved(problem: Problem, limits: Limits) -> tuple[chain_dp.Incumbent, Solution]:
        found = chain_dp.explore(problem, limits)
        return found, dataclasses.replace(found.solution(limits), status="feasible", bound_us=0.0)

    monkeypatch.setattr(exact, "_by_chain", unproved)
    monkeypatch.setattr(exact, "_by_heuristics", lambda problem, limits, solution, started: solution)
    monkeypatch.setattr(exact, raised_by, interrupted)
    found = exact.solve(by_hand(24), EXACT)
    assert found.interrupted
    assert (found.regions, found.objective_us) == ((Region(0, 2, saved=(1,)),), 1.0)


def test_a_leftover_is_searched_from_the_best_heuristic_in_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chain knows a plan of 2 us and no bound; a heuristic knows one of 1 us."""
    seen: list[tuple[Solution | None, float | None]] = []

    def searched(problem: Problem, limits: Limits, start: Solution | None = None, **about: object) -> Solution:
        seen.append((start, limits.time_s))
        assert start is not None
        return start

    def unproved(problem: Problem, limits: Limits) -> tuple[chain_dp.Incumbent, Solution]:
        return chain_dp.explore(problem, limits), Solution("chain-dp", "feasible", (Region(0, 2),), 2.0)

    better = Solution("somebody", "feasible", (Region(0, 2, saved=(1,)),), 1.0)
    monkeypatch.setattr(exact, "_by_chain", unproved)
    monkeypatch.setattr(exact, "QUICK", (lambda problem, limits: better,))
    for name in ("milp", "cp_sat"):
        monkeypatch.setattr(f"remat.solvers.{name}.solve", searched)
    exact.solve(by_hand(24), dataclasses.replace(EXACT, time_s=20.0))
    ((start, time_s),) = seen
    assert start is not None and start.objective_us == 1.0
    assert time_s is not None and time_s < 20.0


def test_progress_is_told_in_microseconds() -> None:
    told: list[tuple[float, float]] = []
    limits = dataclasses.replace(EXACT, on_progress=lambda objective, bound: told.append((objective, bound)))
    found = cp_sat.solve(by_hand(24), limits)
    assert told
    assert all(bound <= objective for objective, bound in told)
    assert told[-1][0] == found.objective_us


class Boasting(cp_sat.CpSat):
    """Claims that what lies outside of all regions saves time, as SCIP has done where a row forbids it."""

    def run(self, *_: object) -> Outcome:
        values = values_at(self.program, ())
        for saved in self.program.s.values():
            values[saved] = 1
        return Outcome("optimal", values, 0.0)


def test_a_plan_costs_what_it_takes_whatever_a_solver_claims() -> None:
    problem = by_hand(AMPLE)
    found = program.solve("boasting", Boasting, problem, EXACT)
    assert found.regions == () and found.objective_us == problem.objective_us(()) == 0.0


# The program itself, without a solver.


def values_at(made: Program, regions: Sequence[Region]) -> list[int]:
    """Every variable of the program at a plan: k no larger than it must be, the prefixes as (5) defines them."""
    problem = made.problem
    runs = [problem.runs[i] for i in problem.runs_of(regions)]
    saved = {v for region in regions for v in region.saved}
    values = [0] * len(made.variables)
    for i in problem.runs_of(regions):
        values[made.x[i]] = 1
    for v in saved & set(made.s):
        values[made.s[v]] = 1
    for (storage, site), k in made.k.items():
        values[k] = max(values[k], int(is_kept(problem.liveness.shared[storage], site, runs, saved)))
    for constraint in made.constraints:
        if constraint.equal and any(coefficient == -1 for _, coefficient in constraint.terms):
            *terms, (prefix, _) = constraint.terms
            values[prefix] = sum(coefficient * values[variable] for variable, coefficient in terms)
    return values


def holds(constraint: Constraint, values: Sequence[int], *, relaxed: bool) -> bool:
    total = sum(factor * values[variable] for variable, factor in constraint.terms)
    most = constraint.most
    if constraint.when is not None:
        if not relaxed and not values[constraint.when]:
            return True
        most += constraint.slack * (1 - values[constraint.when])
    return total == most if constraint.equal else total <= most


@pytest.mark.parametrize("least_peak", [False, True])
@given(problem=problems(), percent=st.integers(0, 100), factor=st.sampled_from([1, 10**8 + 7]))
@settings(max_examples=examples(20, 60))
def test_every_plan_within_the_budget_keeps_every_row(
    least_peak: bool, problem: Problem, percent: int, factor: int
) -> None:
    """Rows with a condition are kept with it and, given their slack, without; rounded and exact ones."""
    problem = magnified(problem, factor)
    plans = [regions for regions in every_plan(problem) if gains(problem, regions)]
    peaks = [problem.memory.curve(regions).peak_bytes for regions in plans]
    budget = sorted(peaks)[percent * (len(peaks) - 1) // 100]
    tight = problem.with_budget(budget)
    made = Program(tight, least_peak=least_peak)
    for index in made.x:
        for row in tight.first_rows(index):
            made.add_exact(row)
    for regions, peak in zip(plans, peaks, strict=True):
        if peak <= budget and not (least_peak and any(region.saved for region in regions)):
            values = values_at(made, regions)
            if made.peak is not None:
                values[made.peak] = peak // made.grain
            for constraint in made.constraints:
                assert holds(constraint, values, relaxed=False), constraint
                assert holds(constraint, values, relaxed=True), constraint
            assert all(0 <= v <= variable.most for v, variable in zip(values, made.variables, strict=True))


def gains(problem: Problem, regions: Sequence[Region]) -> bool:
    """Whether every save gains time: the program knows no others."""
    never = {v for i in problem.runs_of(regions) for v in problem.runs[i].never_again}
    return all(v in problem.liveness.save_time_ns and v not in never for region in regions for v in region.saved)
