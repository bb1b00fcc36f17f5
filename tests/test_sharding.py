"""A rank's share of a step: the closed forms of ZeRO, and what is gathered for a while."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph, block_of
from remat.evaluation.sharding import shard, share
from remat.formulation.search_space import find_space
from remat.planning.search import share_of_peak
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.training_loop import SHARDS, Shard, TrainingLoop
from tests.cached import cached
from tests.toys import TRANSFORMER, every_block

RANKS = 4
LAST = "layers.3"


@cached
def whole(accumulation: int = 1) -> Graph:
    loop = TrainingLoop(accumulation=accumulation)
    return record(FakeStep(TRANSFORMER, device=torch.device("cpu"), loop=loop))


def of(kind: Shard, accumulation: int = 1, ranks: int = RANKS) -> Graph:
    return shard(whole(accumulation), TrainingLoop(accumulation=accumulation, ranks=ranks, shard=kind))


def total(graph: Graph) -> int:
    return sum(p.size_bytes for p in graph.parameters)


def test_without_shards_the_graph_is_the_same() -> None:
    assert shard(whole(), TrainingLoop(ranks=8)) is whole()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", SHARDS)
def test_what_lasts_is_the_table_of_the_paper(kind: Shard, accumulation: int) -> None:
    before, after = whole(accumulation).fixed_bytes, of(kind, accumulation).fixed_bytes
    shared = {"zero1": 1, "zero2": 2, "zero3": 3}[kind]
    for level, name in ((1, "optimizer state"), (2, "gradients"), (3, "parameters")):
        if name in before:
            assert after[name] == (share(before[name], RANKS) if shared >= level else before[name])
    assert after["batch"] == before["batch"]


@pytest.mark.parametrize("kind", SHARDS)
def test_more_is_shared_less_is_alive(kind: Shard) -> None:
    order = [whole(), *(of(kind) for kind in SHARDS[: SHARDS.index(kind) + 1])]
    ends = [int(Memory(graph).curve(()).alive_bytes[graph.backward_end - 1]) for graph in order]
    assert ends == sorted(ends, reverse=True)


def test_gradients_are_whole_until_their_layers_backward_ends_and_shares_after() -> None:
    graph = of("zero2")
    parts = breakdown.over_time(Memory(graph), ()).parts["gradients"]
    largest = max(sum(p.gradient_bytes for p in graph.parameters if block_of(p.name) == unit) for unit in units(graph))
    shares = sum(
        share(sum(p.gradient_bytes for p in graph.parameters if block_of(p.name) == u), RANKS) for u in units(graph)
    )
    assert parts[graph.backward_end :].max() == shares
    assert parts.max() < total(graph)
    assert parts.max() >= largest


def test_the_buffer_that_gradients_are_scattered_from_stays_until_the_next_layers_are() -> None:
    graph = of("zero2")
    storages, shares = graph.storages, graph.parameter_gradients
    layers = [unit for unit in units(graph) if unit is not None]
    whole = {sum(p.gradient_bytes for p in graph.parameters if block_of(p.name) == unit) for unit in layers}
    scattered = sorted(
        int(storages.birth[u]) for u in shares if int(storages.size_bytes[u]) in {share(w, RANKS) for w in whole}
    )
    buffers = [
        (int(birth), int(death))
        for size, birth, death in zip(storages.size_bytes, storages.birth, storages.death, strict=True)
        if size in whole and birth - 1 in scattered
    ]
    assert len(buffers) == len(layers)
    assert [death for _, death in sorted(buffers)][:-1] == scattered[1:]


def units(graph: Graph) -> set[str | None]:
    return {block_of(p.name) for p in graph.parameters}


def test_a_layer_and_the_next_are_gathered_and_the_root_throughout() -> None:
    graph = of("zero3")
    parts = breakdown.over_time(Memory(graph), ()).parts["gathered shards"]
    size = {u: sum(p.size_bytes for p in graph.parameters if block_of(p.name) == u) for u in units(graph)}
    layers = [size[u] for u in size if u is not None]
    assert parts[: graph.backward_end].min() >= size[None]
    assert parts.max() == size[None] + 2 * max(layers)
    assert not parts[graph.backward_end :].any()


def test_the_last_layer_gathered_stays_in_its_buffer_until_forward_ends_and_is_fetched_as_backward_begins() -> None:
    graph = of("zero3")
    root, last = (sum(p.size_bytes for p in graph.parameters if block_of(p.name) == unit) for unit in (None, LAST))
    regions = every_block(graph)
    stack = breakdown.over_time(Memory(graph), regions)
    gathered, op = stack.parts["gathered shards"], stack.curve.op
    end = max(node.end for node in graph.nodes if block_of(node.module) == LAST)
    begin = min(op[(op >= graph.forward_end) & (gathered > root + last)])
    assert begin > graph.forward_end
    after = (op >= end) & (op < begin) & (stack.curve.region < 0)
    assert after.any() and (gathered[after] == root + last).all()
    assert gathered.max() == root + 2 * last, "layers are alike, and what is recomputed has no such buffer"


def test_a_region_gathers_again_what_it_runs_again() -> None:
    graph = of("zero3")
    regions = every_block(graph)
    stack = breakdown.over_time(Memory(graph), regions)
    again = stack.curve.region >= 0
    root = sum(p.size_bytes for p in graph.parameters if block_of(p.name) is None)
    assert stack.parts["gathered shards"][again].min() > root


def test_nothing_gathered_is_ever_saved() -> None:
    graph = of("zero3")
    for region in every_block(graph):
        nodes = tuple(v for v in find_space(graph).saveable if v in region)
        saved = Memory(graph).saved_storages(dataclasses.replace(region, saved=nodes))
        assert not set(saved.tolist()) & set(graph.gathered)


@pytest.mark.parametrize("kind", SHARDS)
def test_more_ranks_never_need_more(kind: Shard) -> None:
    peaks = [Memory(of(kind, ranks=ranks)).curve(every_block(whole())).peak_bytes for ranks in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("kind", SHARDS)
def test_the_optimizer_steps_on_its_share(kind: Shard) -> None:
    def needs(graph: Graph) -> int:
        return int(Memory(graph).curve(()).alive_bytes[graph.backward_end :].max())

    assert needs(of(kind)) < needs(whole())
    assert Memory(of(kind)).first_step_peak(()) <= Memory(of(kind)).curve(()).peak_bytes


def test_a_replay_of_the_whole_step_charges_the_share_where_it_is_above_the_evaluator_and_nowhere_else() -> None:
    """As where all ranks' gradients end the whole step's peak, and the share's is amid backward."""
    regions = every_block(whole())
    full, part = (Memory(graph).curve(regions) for graph in (whole(), of("zero3")))
    evaluated, seen = full.alive_bytes[full.executed], part.alive_bytes[part.executed]
    lowest, highest = int(seen.argmin()), int(seen.argmax())
    for at, expected in ((lowest, part.peak_bytes), (highest, part.peak_bytes + 512)):
        replayed = evaluated.copy()
        replayed[at] += 512
        assert share_of_peak(replayed, full, part) == expected
    longer = np.append(evaluated, evaluated.max() + 512)
    assert share_of_peak(longer, full, part) == part.peak_bytes + 512, "at an operator that the evaluator does not know"
