"""Solvers: each file is one strategy or formulation, and every one has the same shape.

`solve(problem, limits) -> Solution`. A solver chooses among the plans of the problem's space; it promises nothing
about memory that `remat.check` has not seen.

`STRATEGIES` lists them by the names that people type: the strategy `every-block` is the file `every_block.py`. The
other files here are parts that several share. Importing this package loads none of them; OR-tools comes with those
that need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from remat.errors import UsageError
from remat.problem import Problem
from remat.solution import Limits, Solution

Solver = Callable[[Problem, Limits], Solution]

HEURISTICS = (
    "none",
    "every-block",
    "every-n",
    "first-k",
    "sqrt-n",
    "chen-greedy",
    "save-matmuls",
    "greedy",
)
WITHOUT = "none"  # the one that is never applied: the step as it is
EXACT = ("exact", "chain-dp", "cp-sat", "milp")  # those that prove a bound
STRATEGIES = (*HEURISTICS, *EXACT)


def load(name: str) -> Solver:
    """The strategy called `name`; UsageError where there is none."""
    if name not in STRATEGIES:
        raise UsageError(f"there is no strategy {name!r}; there are {', '.join(STRATEGIES)}.")
    solve: Solver = importlib.import_module(f"remat.solvers.{name.replace('-', '_')}").solve
    return solve
