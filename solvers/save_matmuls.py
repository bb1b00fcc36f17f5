"""Save the matmuls: a layer is a region that recomputes what is cheap and saves what is not.

Two policies of selective checkpointing, both torchtitan's (`selective_ac_option = "op"`):

* Save every matrix product, convolution and attention.
* Recompute every second matrix product of a layer, the second first; attention is always saved. It was torchtitan's
  default until it named tensors instead.

Either for the first k layers, the others plain (see `first_k.py`). Expensive is what PyTorch's own FLOP counter counts:
`mm`, `addmm`, `bmm`, `convolution`, the kernels of scaled dot-product attention, and their kin.
"""

from __future__ import annotations

import dataclasses

from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Solution
from remat.solvers.heuristic import Proposal, grouped, judge, layers, plan_of


def solve(problem: Problem, limits: Limits) -> Solution:
    families = ([regions[:k] for k in range(len(regions) + 1)] for regions in policies(problem))
    return judge(problem, "save-matmuls", *families)


def policies(problem: Problem) -> list[Proposal]:
    """Return the plan of each policy for all layers."""
    plain = grouped(layers(problem), 1)
    return [plan_of(problem, (saving(problem, region, every) for region in plain)) for every in (1, 2)]


def saving(problem: Problem, region: Region, every: int) -> Region:
    """Save the attentions and products of `region`; with `every` 2, without every second product."""
    nodes = [node for node in range(region.first, region.end) if is_expensive(problem, node)]
    products = [node for node in nodes if not is_attention(problem, node)]
    dropped = set(products[1::2]) if every == 2 else set()
    return dataclasses.replace(region, saved=tuple(node for node in nodes if node not in dropped))


def is_expensive(problem: Problem, node: int) -> bool:
    graph = problem.graph
    return any(graph.kinds[kind].flops for kind in graph.op_kind[graph.nodes[node].first : graph.nodes[node].end])


def is_attention(problem: Problem, node: int) -> bool:
    """Return whether an expensive node is attention, by one kernel or by many; else it is a product."""
    return "attention" in problem.graph.nodes[node].op
