"""Layers on the host: how many layers have their frozen weights there, and what the step waits for them.

The weights themselves are a constant of the step (`host/weights.py`): the more layers are on the host, the more room is
left for what would be recomputed, and the less the link keeps up. So the same problem is solved for a few numbers of
layers, each with a budget that is larger by what leaves, and the number that costs least is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.problem import Problem
from remat.formulation.solution import Solution
from remat.host.weights import AT_ONCE, FEWEST, Layer, layers_of, spread
from remat.offloading.link import Link
from remat.planning.links import pinned_bytes
from remat.planning.request import PlanRequest
from remat.recording.fake_step import LAYERS_ON_HOST, FakeStep
from remat.recording.tracker import Tracker
from remat.units import gib

PARTS = 8  # numbers of layers that are tried, beside none and those half way from the best to the next


def with_layers_on_host(
    profile: Profile, step: FakeStep, request: PlanRequest, budget_bytes: int, host_bytes: int
) -> Profile:
    """Put frozen layers on the host: as many as give the best plan; changes `step` accordingly.

    Raises UsageError if the model has too few such layers, or the host has no room.
    """
    layers = movable_layers(step)
    if (least_bytes := pinned_bytes(_sizes(layers[:FEWEST]))) > host_bytes:
        raise UsageError(
            f"the host budget is {gib(host_bytes)}, and the frozen weights of {FEWEST} layers, which is the least, "
            f"take {gib(least_bytes)}; give more with `host_budget` (--host-budget)."
        )
    counts = [count for count in _counts(len(layers)) if pinned_bytes(_sizes(layers[:count])) <= host_bytes]
    how, limits = request.how, request.limits.at_most(request.limits.clock.layers_s)
    problem = how.pose(profile, how.space(profile.graph, request.depth), budget_bytes)
    best = np.inf, counts[-1]

    def try_with(count: int) -> float:
        """Return the time that the step waits with `count` layers on the host; 0 if no plan fits."""
        nonlocal best
        on_host = spread(layers, count) if count else []
        freed_bytes = sum(layer.size_bytes for layer in on_host[AT_ONCE:])
        found = request.solve(problem.with_budget(budget_bytes + freed_bytes), limits)
        if found.interrupted:
            raise KeyboardInterrupt
        if not found.fits:
            return 0.0
        wait_us = _wait_us(problem, found, on_host, profile.target.host_bytes_per_us)
        best = min(best, (found.objective_us + wait_us, count))
        return wait_us

    for count in counts:
        if try_with(count) >= best[0]:
            break
    for between in _between(counts, best[1]) if best[0] > 0 else ():
        try_with(between)
    return with_layers(profile, step, best[1])


def _counts(layers: int) -> list[int]:
    return [0, *sorted({max(round(part * layers / PARTS), FEWEST) for part in range(1, PARTS + 1)})]


def _between(counts: Sequence[int], best: int) -> list[int]:
    """List the counts half way from the best of `counts` to its neighbours."""
    at = counts.index(best)
    ways = {(best + other) // 2 for other in counts[max(at - 1, 0) : at + 2]}
    return sorted(count for count in ways - {*counts} if count >= FEWEST)


def _sizes(layers: Sequence[Layer]) -> list[int]:
    return [layer.size_bytes for layer in layers]


def movable_layers(step: FakeStep) -> list[Layer]:
    """List the layers whose weights may be on the host. Raises UsageError if they are too few."""
    layers = layers_of(step.model)
    return spread(layers, max(len(layers), FEWEST))


def with_layers(profile: Profile, step: FakeStep, count: int) -> Profile:
    """Return `profile` with `count` layers on the host; changes `step` accordingly."""
    graph = graph_with_layers(profile.graph, step, count, profile.target.alignment_bytes)
    return dataclasses.replace(profile, graph=graph)


def graph_with_layers(graph: Graph, step: FakeStep, count: int, alignment_bytes: int) -> Graph:
    """Return the graph with `count` layers on the host; changes `step` accordingly."""
    before = step.fix_state(Tracker(alignment_bytes))["parameters"]
    step.loop = dataclasses.replace(step.loop, weights_on_host=count)
    freed_bytes = before - step.fix_state(Tracker(alignment_bytes))["parameters"]
    fixed = {**graph.fixed_bytes, "parameters": graph.fixed_bytes["parameters"] - freed_bytes}
    about = {**graph.about, "weights_on_host": count, LAYERS_ON_HOST: step.layers_on_host} if count else graph.about
    return dataclasses.replace(
        graph,
        fixed_bytes=fixed,
        first_step_bytes=graph.first_step_bytes - freed_bytes,
        untraced_bytes=graph.untraced_bytes - freed_bytes if len(graph.untraced_bytes) else graph.untraced_bytes,
        about=about,
    )


def _wait_us(problem: Problem, found: Solution, layers: Sequence[Layer], bytes_per_us: float) -> float:
    sizes = {layer.path: layer.size_bytes for layer in layers}
    return wait_us(problem.memory, found.regions, problem.liveness.op_time_us, sizes, bytes_per_us)


def weights_wait_us(profile: Profile, memory: Memory, regions: Sequence[Region]) -> float:
    """Return the time that a step under `regions` waits for the weights that its record has on the host."""
    layers = profile.graph.about.get(LAYERS_ON_HOST, {})
    return wait_us(memory, regions, profile.costs.per_op_us(profile.graph), layers, profile.target.host_bytes_per_us)


def wait_us(
    memory: Memory, regions: Sequence[Region], op_time_us: np.ndarray, layers: dict[str, int], bytes_per_us: float
) -> float:
    """Return the time that a step under `regions` waits for weights, by the estimated times.

    layers  path -> bytes of each that is on the host
    """
    if not layers or bytes_per_us <= 0:  # of a CPU, whose memory is the host's
        return 0.0
    lives = memory.lives(regions)
    starts = np.concatenate([[0.0], np.cumsum(np.where(lives.executed, op_time_us[lives.op], 0.0))])
    nodes = memory.graph.op_node[lives.op]
    used = np.where(nodes >= 0, _layer_of_node(memory.graph, list(layers))[nodes], -1)
    at = np.flatnonzero(used >= 0)
    changes = at[np.flatnonzero(np.diff(used[at], prepend=-1))]
    uses = [(float(starts[i]), int(used[i])) for i in changes]
    copy_us = [Link(bytes_per_us, 0).copy_us(size) for size in layers.values()]
    return _waited_us(uses, float(starts[-1]), copy_us)


def _layer_of_node(graph: Graph, paths: Sequence[str]) -> np.ndarray:
    """Return for every node the layer whose weights it may use, -1 for none."""
    number = {path: i for i, path in enumerate(paths)}

    def layer(module: str) -> int:
        parts = module.split(".")
        return next((number[head] for k in range(len(parts)) if (head := ".".join(parts[: k + 1])) in number), -1)

    return np.array([layer(node.module) for node in graph.nodes], dtype=np.int64)


def _waited_us(uses: Sequence[tuple[float, int]], step_us: float, copy_us: Sequence[float]) -> float:
    """Return the time that computation waits in a step that uses layers in this order, each next layer prefetched.

    uses  (when compute gets there if it never waits, layer) of every change from one to another
    """
    there: dict[int, float] = {}
    free_us = waited_us = before_us = 0.0
    for step in range(2):  # the first step begins with no layer on the device
        before_us = waited_us
        for i, (start_us, layer) in enumerate(uses):
            following = uses[(i + 1) % len(uses)][1]
            there = {each: time_us for each, time_us in there.items() if each in (layer, following)}
            for each in (layer, following):
                now_us = step * step_us + start_us + waited_us
                if each not in there:
                    free_us = there[each] = max(free_us, now_us) + copy_us[each]
                if each == layer:
                    waited_us += max(there[each] - now_us, 0.0)
    return waited_us - before_us
