"""Offloads that are let go of between slices of a loss: predicted to the byte, and gradients stay what they are."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from remat.cli.screen import offloads_text
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import find_planning_device
from remat.errors import PlanMismatch
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Chunk, Form
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, to_refs
from remat.execution.apply import apply, planned_forward
from remat.execution.eager.replay import replay
from remat.offloading.link import Link
from remat.offloading.refs import from_offload_refs, to_offload_refs
from remat.offloading.relief import Relief
from remat.offloading.schedule import all_offloads, offload
from remat.offloading.timeline import Timeline
from remat.planning.profiling import fake_step
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.target import TARGETS
from tests.cached import cached
from tests.offloads import FAULTS, Fault, LateCopies, random_offloads
from tests.test_chunking import LANGUAGE, MIXED, batch
from tests.toys import CHOICES, plan_by_hand, planned_graphs

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread")]

IN_SLICES = Form((Chunk(0, 0, 4),))
WORKLOADS = {workload.name: workload.sized(12) for workload in (LANGUAGE, MIXED)}
AMPLE = 1 << 50


@cached
def sliced(name: str) -> tuple[FakeStep, Graph]:
    """A toy whose loss runs in four slices."""
    step = fake_step(WORKLOADS[name], find_planning_device("cpu"))
    step.warm_up()
    with step.in_form(IN_SLICES):
        return step, record(step)


def priced(graph: Graph) -> np.ndarray:
    return estimated_costs(graph, TARGETS["h100-80gb"]).per_op_us(graph)


def link_that_carries(graph: Graph, share: float) -> Link:
    """A link that carries so much of what autograd keeps while the forward runs."""
    times = priced(graph)
    kept = Timeline(Memory(graph), (), times).kept_bytes
    return Link(share * kept / float(times[: graph.forward_end].sum()), AMPLE, latency_us=0.0)


def loss_of(graph: Graph) -> int:
    (found,) = (i for i, node in enumerate(graph.nodes) if node.slice_ends)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_record_says_where_the_slices_of_a_loss_end(name: str) -> None:
    _, graph = sliced(name)
    loss = graph.nodes[loss_of(graph)]
    assert [loss.end_after(slices) for slices in (1, 2, 3)] == list(loss.slice_ends)
    assert loss.first < loss.slice_ends[0] < loss.slice_ends[1] < loss.slice_ends[2] < loss.end == loss.end_after(0)
    second, third = np.diff(loss.slice_ends)
    assert second == third
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).nodes == graph.nodes


@pytest.mark.exhaustive
@pytest.mark.often("language-nothing", "language-half-saved", "language-amp-every-block", "language-amp-nested")
@pytest.mark.parametrize("choice", ["nothing", "every-block", "half-saved", "nested"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_replay_is_what_the_evaluator_says_at_every_operator(name: str, choice: str) -> None:
    step, graph = sliced(name)
    regions, memory = tuple(CHOICES[choice](graph)), Memory(graph)
    timeline = Timeline(memory, regions, priced(graph))
    for seed in range(3):
        offloads = random_offloads(random.Random(seed), timeline, 0.8)
        with step.in_form(IN_SLICES):
            refs = to_offload_refs(memory, regions, offloads)
            replayed = replay(step, to_refs(graph, regions), offloads=refs) + graph.unseen_bytes
        curve = memory.offloading(offloads).curve(regions)
        np.testing.assert_array_equal(replayed, curve.alive_bytes[curve.executed])
        assert tuple(sorted(from_offload_refs(graph, refs))) == offloads
    is_in_region = any(loss_of(graph) in region for region in regions)
    assert any(border.after_slices for border in timeline.borders) != is_in_region


def between_slices(name: str, copies: LateCopies | None = None) -> tuple[nn.Module, nn.Module, Plan]:
    """(a model whose loss runs in slices, its copy that lets go of all it can between them, the plan of that)"""
    _, graph = sliced(name)
    memory, loss = Memory(graph), loss_of(graph)
    timeline = Timeline(memory, (), priced(graph))
    _, event = timeline.events[0]
    slices = [border for border in timeline.borders if border.node == loss and border.after_slices]
    assert [border.after_slices for border in slices] == [1, 2, 3]
    moved = [each for each in timeline.candidates if each.local_end <= slices[0].op]
    offloads = tuple(sorted(offload(each, slices[i % 3], event) for i, each in enumerate(moved)))
    plain = plan_by_hand(graph, ())
    made = dataclasses.replace(plain, offloads=to_offload_refs(memory, (), offloads))
    torch.manual_seed(0)
    one = WORKLOADS[name].build()
    two = apply(copy.deepcopy(one), made)
    apply(one, plain)
    planned_graphs(two).copies = copies
    planned_forward(two).watch(observe=False)
    return one, two, made


def trained(model: nn.Module, samples: int) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    given = batch(samples, None)
    loss = model(*given)["loss"]
    with torch.no_grad():
        model.eval()(*given)  # lets go of nothing
    model.train()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:.*samples.*", "ignore:.*batch.*", "ignore:a forward without gradients")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_gradients_are_bitwise_however_late_copies_are_and_however_few_slices_there_are(share: float) -> None:
    plain, planned, made = between_slices("language", LateCopies())
    samples = max(int(share * WORKLOADS["language"].batch_size), 1)
    assert {each.after_slices for each in made.offloads} == {1, 2, 3}
    for _ in range(2):
        for one, two in zip(trained(plain, samples), trained(planned, samples), strict=True):
            assert torch.equal(one, two)
    offloader = planned_forward(planned).offloader
    assert offloader is not None and offloader.counts.out == offloader.counts.back == 2 * len(made.offloads) > 0


@pytest.mark.filterwarnings("ignore:a forward without gradients")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_executor_that_forgets_to_wait_is_caught(fault: Fault) -> None:
    plain, planned, _ = between_slices("language", LateCopies(fault))
    samples = WORKLOADS["language"].batch_size
    pairs = zip(trained(plain, samples), trained(planned, samples), strict=True)
    assert not all(torch.equal(one, two) for one, two in pairs)


def test_a_schedule_lets_go_between_slices_what_would_stay_until_the_loss_is_there() -> None:
    _, graph = sliced("language")
    blind = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, slice_ends=()) for n in graph.nodes))
    link, times_us = link_that_carries(graph, 1.0), priced(graph)
    found = all_offloads(Memory(graph), (), times_us, link)
    loss = loss_of(graph)
    assert any(each.release == loss and each.after_slices for each in found)
    peaks = []
    for each in (graph, blind):
        memory = Memory(each)
        curve = memory.offloading(all_offloads(memory, (), times_us, link)).curve(())
        end = graph.nodes[loss].slice_ends[-1]
        peaks.append(int(curve.alive_bytes[end - 1]))
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 2.0])
def test_no_more_is_off_the_device_than_relief_allows(share: float) -> None:
    _, graph = sliced("language")
    link, times_us, memory = link_that_carries(graph, share), priced(graph), Memory(graph)
    without = memory.curve(())
    off = without.alive_bytes - memory.offloading(all_offloads(memory, (), times_us, link)).curve(()).alive_bytes
    relief = Relief(graph, times_us, link, 0.0)
    forward = without.op < graph.forward_end
    allowed = relief.in_forward[without.op[forward]]
    assert (off[forward] <= allowed).all()
    loss = graph.nodes[loss_of(graph)]
    assert relief.in_forward[loss.first] < relief.in_forward[loss.slice_ends[0]] <= relief.most_bytes
    assert (np.diff(relief.in_forward) >= 0).all()


def test_a_plan_file_that_needs_slices_is_of_a_version_that_older_readers_refuse(tmp_path: Path) -> None:
    _, _, made = between_slices("language")
    made.save(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["version"] == 5 and Plan.load(tmp_path / "plan.json") == made
    assert "freed after slice 2 of " in offloads_text(made)
    behind = dataclasses.replace(
        made, offloads=tuple(dataclasses.replace(each, after_slices=0) for each in made.offloads)
    )
    behind.save(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["version"] == 4 and "after_slices" not in written["offloads"][0]


def test_a_plan_for_more_slices_than_there_are_is_refused() -> None:
    _, graph = sliced("language")
    _, _, made = between_slices("language")
    changed = functools.partial(dataclasses.replace, after_slices=4)
    with pytest.raises(PlanMismatch, match="here it keeps something else"):
        from_offload_refs(graph, [changed(made.offloads[0])])


@pytest.mark.filterwarnings("ignore:the first step under the plan is not verified. the plan is of an older version")
def test_a_plan_file_of_version_5_applies() -> None:
    made = Plan.load(Path(__file__).parent / "golden" / "toy-language.v5.plan.json")
    assert {each.after_slices for each in made.offloads} == {1, 2, 3}
    torch.manual_seed(0)
    planned = apply(WORKLOADS["language"].build(), made)
    trained(planned, WORKLOADS["language"].batch_size)
    offloader = planned_forward(planned).offloader
    assert offloader is not None and offloader.counts.out == len(made.offloads)
