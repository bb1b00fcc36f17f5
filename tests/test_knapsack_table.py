"""PyTorch's own example of choosing saves, a knapsack with known optima, as one region of a graph.

The numbers are those of `TestOptimalCheckpointingPolicy` in PyTorch's test/distributed/_tools/test_sac_ilp.py (2024),
which has them from xformers: eight operators with time and bytes, and which of them to save at seven budgets, given as
shares of the 420 bytes that saving everything takes. The objective there is the time of what is saved, here that of
what is not: 63 in all, less what is saved. What is said there beside the knapsack is said here in this way:

* `t` makes a view and is never saved: it is not among the nodes that may be.
* `relu_` works in place on the output of `linear` and shares its fate: the two are one node of 9 + 5 microseconds.
* `copy_` has to be saved because it is in place on an input: it takes no bytes, so the best plan saves it anyway.
* the one random operator follows no other, so it may be saved or not.

The step is those nodes, one region, and a loss whose kernel takes 20000 bytes beside what the region keeps: that is the
peak whatever is saved, so a budget of 20000 and some leaves some for saves. To do without the region is no way out:
autograd would keep 5000 bytes that `t` makes.
"""

from __future__ import annotations

import dataclasses

import pytest

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.search_space import Segment, Space
from tests.graphs import ToyNode, toy_graph
from tests.oracle import Oracle
from tests.test_exact_solvers import EXACT, PROVERS

OPERATORS = (  # name, microseconds, bytes
    ("copy_", 5, 0),
    ("add", 5, 100),
    ("div", 8, 100),
    ("mm", 15, 120),
    ("native_dropout", 15, 0),
    ("linear, relu_", 9 + 5, 100),
    ("t", 1, 0),
)
LOSS_BYTES = 20_000
ALL_BYTES = 420


def problem_with(saves_bytes: int) -> Problem:
    """The step under a budget that leaves `saves_bytes` for what the region saves."""
    last = len(OPERATORS) - 1
    nodes = [ToyNode(size, (i - 1,) if i else (), time_us=time) for i, (_, time, size) in enumerate(OPERATORS)]
    nodes[last] = dataclasses.replace(nodes[last], extra=5_000, keeps=frozenset({"extra"}))
    loss = ToyNode(0, (last,), workspace_bytes=LOSS_BYTES)
    graph, costs = toy_graph([*nodes, loss])
    space = Space((Segment(0, len(nodes), False), Segment(len(nodes), len(nodes) + 1, True)), tuple(range(last)), 1)
    return Problem(graph, costs, space, LOSS_BYTES + saves_bytes)


def test_the_loss_is_the_peak_whatever_is_saved() -> None:
    problem = problem_with(0)
    for saved in [(), (1,), (1, 3), (0, 1, 2, 3, 4, 5)]:
        bytes_saved = sum(OPERATORS[i][2] for i in saved)
        assert problem.memory.curve((Region(0, 7, saved=saved),)).peak_bytes == LOSS_BYTES + bytes_saved
    assert problem.memory.curve(()).peak_bytes > LOSS_BYTES + ALL_BYTES


@pytest.mark.parametrize("solver", PROVERS)
@pytest.mark.parametrize(
    ("share", "paid_for", "time_us"),
    [
        pytest.param(0, set(), 43, id="0"),  # 63 - 5 - 15
        pytest.param(100 / 420, {"linear, relu_"}, 29, id="100"),  # 43 - 14
        pytest.param(120 / 420, {"mm"}, 28, id="120"),  # 43 - 15
        pytest.param(200 / 420, {"div", "linear, relu_"}, 21, id="200"),  # 43 - 8 - 14
        pytest.param(220 / 420, {"mm", "linear, relu_"}, 14, id="220"),  # 43 - 15 - 14
        pytest.param(320 / 420, {"div", "mm", "linear, relu_"}, 6, id="320"),  # 43 - 8 - 15 - 14
        pytest.param(1, {"add", "div", "mm", "linear, relu_"}, 1, id="420"),  # 43 - 5 - 8 - 15 - 14
    ],
)
def test_the_saves_are_those_of_pytorchs_table(solver: str, share: float, paid_for: set[str], time_us: int) -> None:
    problem = problem_with(round(share * ALL_BYTES))
    solution = PROVERS[solver](problem, EXACT)
    (region,) = solution.regions
    assert (solution.status, solution.objective_us) == ("optimal", time_us)
    assert {OPERATORS[v][0] for v in region.saved} == {"copy_", "native_dropout"} | paid_for
    assert Oracle(problem).least_time_us(problem.budget_bytes) == time_us
