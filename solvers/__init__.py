"""Solvers: each file is one strategy or formulation, and every one has the same shape.

`solve(problem, limits) -> Solution`. A solver chooses among the plans of the problem's space; it promises nothing
about memory that `remat.formulation.check` has not seen.

`STRATEGIES` lists them by the names that people type: the strategy `every-block` is the file `every_block.py`. The
other files here are parts that several share. Importing this package loads none of them; OR-tools comes with those
that need it (`cp-sat`, `milp`), and with `exact` where the chain does not prove its plan. Without it all others work.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from remat.errors import UsageError
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution

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
NO_CHECKPOINTING = "none"  # the strategy that is never applied: the step without a plan
EXACT = ("exact", "chain-dp", "cp-sat", "milp")  # those that prove a bound
NEED_ORTOOLS = ("cp-sat", "milp")
STRATEGIES = (*HEURISTICS, *EXACT)


def load(name: str) -> Solver:
    """Load the strategy `name`. Raises UsageError if it is unknown, or needs OR-tools that are not installed."""
    if name not in STRATEGIES:
        raise UsageError(f"there is no strategy {name!r}; there are {', '.join(STRATEGIES)}.")
    if name in NEED_ORTOOLS and not has_ortools():
        raise UsageError(f"the strategy {name} needs OR-tools: `pip install ortools`, or choose exact or chain-dp.")
    solve: Solver = importlib.import_module(f"remat.solvers.{name.replace('-', '_')}").solve
    return solve


@functools.cache
def has_ortools() -> bool:
    """Return whether OR-tools can be imported, which takes a second."""
    try:
        importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        return False
    return True
