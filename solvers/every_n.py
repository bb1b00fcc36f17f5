"""Every n: the two rules that share the name, for every n.

* Regions of n consecutive layers each (Megatron-LM, `--recompute-method uniform --recompute-num-layers n`).
* Every n-th layer a region by itself, the others plain (torchtitan, `selective_ac_option = "n"`).

With n = 1 both are every-block. Encoder and decoder are grouped each by itself, and counted through.
"""

from __future__ import annotations

import itertools

from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import grouped, joined, judge, layers, plan_of


def solve(problem: Problem, limits: Limits) -> Solution:
    found = layers(problem)
    singly = list(itertools.chain.from_iterable(found))
    numbers = range(1, max(len(singly), 1) + 1)
    uniform = (plan_of(problem, grouped(found, n)) for n in numbers)
    selective = (plan_of(problem, (joined([layer]) for layer in singly[n - 1 :: n])) for n in numbers)
    return judge(problem, "every-n", uniform, selective)
