"""Offload: memory is what was planned whatever the link does, no number changes, and a bound holds for every plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region, device_overhead, to_refs
from remat.execution.apply import apply, planned_forward
from remat.execution.eager.offloading import _Packed
from remat.execution.eager.replay import replay
from remat.execution.executions import load as execution
from remat.formulation import check
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.host.copies import Copies, InstantCopies
from remat.models import gpt2
from remat.offloading.link import Link
from remat.offloading.refs import from_offload_refs, require_kept, to_offload_refs
from remat.offloading.relief import Relief
from remat.offloading.schedule import all_offloads, fewest_offloads, stall_us, stashed_offloads
from remat.offloading.timeline import Timeline
from remat.planning.budget import parse_budget
from remat.planning.links import link_of, require_offloads
from remat.planning.profiling import fake_step, profile_step
from remat.planning.strategies import NO_OFFLOAD, OFFLOAD_ALL, OFFLOAD_INPUTS
from remat.recording import layouts
from remat.recording.fake_step import FakeStep
from remat.solvers import HEURISTICS, load
from remat.solvers.least_peak import least_peak
from remat.validation.validating import validate
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests.cached import cached
from tests.devices import DEVICE, WHERE_LATE
from tests.examples import examples
from tests.fuzzing import verdicts
from tests.graphs import spaces, toy_graph, toys
from tests.offloads import FAULTS, Fault, LateCopies, late_copies, random_offloads
from tests.oracle import every_plan
from tests.small_models import TEST_SIZES
from tests.studies import compared, plan_profile
from tests.toys import CHOICES, SHORT, WORKLOADS, plan_by_hand, planned_graphs, recorded, tokens
from tests.toys import every_block as every_block_of
from tests.toys import step as step_of

AMPLE = 1 << 50


@cached
def toy(name: str = "transformer") -> tuple[FakeStep, Graph]:
    return recorded({**WORKLOADS, "short": SHORT}[name])


@functools.cache
def profiled() -> tuple[FakeStep, Profile]:
    """A toy transformer of two layers, for a GPU elsewhere."""
    place = PlanningDevice(TARGETS["h100-80gb"], None)
    step = fake_step(SHORT, place)
    return step, profile_step(step, place)


def priced(graph: Graph) -> np.ndarray:
    return estimated_costs(graph, TARGETS["h100-80gb"]).per_op_us(graph)


def link_that_carries(graph: Graph, share: float) -> Link:
    """A link that carries so much of what autograd keeps while the forward runs."""
    times, memory = priced(graph), Memory(graph)
    kept = Timeline(memory, (), times).kept_bytes
    return Link(share * kept / float(times[: graph.forward_end].sum()), AMPLE, latency_us=0.0)


# Memory


@pytest.mark.often(
    "convnet-nothing", "convnet-every-block", "transformer-nothing", "transformer-nested", "transformer-amp-half-saved"
)
@pytest.mark.fast("convnet-nothing")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_replay_of_any_offloads_is_what_the_evaluator_says_at_every_operator(workload: str, choice: str) -> None:
    step, graph = toy(workload)
    regions, draw = tuple(CHOICES[choice](graph)), random.Random(f"{workload} {choice}")
    memory = Memory(graph)
    timeline = Timeline(memory, regions, priced(graph))
    for share in (0.3, 1.0):
        offloads = random_offloads(draw, timeline, share)
        refs = to_offload_refs(memory, regions, offloads)
        replayed = replay(step, to_refs(graph, regions), offloads=refs) + graph.unseen_bytes
        curve = memory.offloading(offloads).curve(regions)
        assert replayed.max() == curve.peak_bytes
        if workload != "convnet":  # whose batch normalisation copies its statistics, which no record has
            np.testing.assert_array_equal(replayed, curve.alive_bytes[curve.executed])


@pytest.mark.exhaustive
@pytest.mark.often("resnet50-h100-80gb")
@pytest.mark.parametrize("target", ["cpu", "a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("model", TEST_SIZES)
def test_the_replay_of_any_offloads_is_what_the_evaluator_says_in_every_model(model: str, target: str) -> None:
    place = PlanningDevice(TARGETS[target], None) if target != "cpu" else find_planning_device("cpu")
    step = fake_step(TEST_SIZES[model](), place)
    profile = profile_step(step, place)
    graph, memory = profile.graph, Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    blocks, draw = every_block_of(graph), random.Random(model)
    for regions in ((), tuple(blocks), tuple(blocks[::2])):
        offloads = random_offloads(draw, Timeline(memory, regions, profile.costs.per_op_us(graph)))
        assert offloads or regions
        replayed = execution("eager").replay(
            step,
            graph,
            to_refs(graph, regions),
            alignment_bytes=place.target.alignment_bytes,
            workspace_of=profile.workspace_of(),
            offloads=to_offload_refs(memory, regions, offloads),
        )
        curve = memory.offloading(offloads).curve(regions)
        assert replayed.max() == curve.peak_bytes
        if model != "resnet50":
            np.testing.assert_array_equal(replayed, curve.alive_bytes[curve.executed])


def test_offloads_are_named_and_found_again() -> None:
    _, graph = toy()
    memory = Memory(graph)
    regions = tuple(every_block_of(graph)[:2])
    offloads = random_offloads(random.Random(0), Timeline(memory, regions, priced(graph)), 1.0)
    refs = to_offload_refs(memory, regions, offloads)
    assert {ref.save is None for ref in refs} == {True, False}  # values, and what only autograd has
    assert from_offload_refs(graph, refs) == offloads


def test_no_two_offloads_share_a_place_on_the_host() -> None:
    _, graph = toy()
    memory = Memory(graph)
    offloads = all_offloads(memory, (), priced(graph), link_that_carries(graph, 1.0))
    refs = sorted(to_offload_refs(memory, (), offloads), key=lambda ref: ref.host_offset)
    ends = [ref.host_offset + ref.size_bytes for ref in refs]
    assert [ref.host_offset for ref in refs[1:]] == ends[:-1]


# Numbers


def trained(model: nn.Module, step: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a larger batch, say
        step(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def offloading_all(
    copies: Copies | None = None, choice: str = "every-block", **options: Any
) -> tuple[nn.Module, nn.Module, Plan]:
    """(a model without a plan, its copy under one that offloads all that may be, that plan)

    The first region of `choice` alone, and behind it what autograd keeps.
    """
    _, graph = toy("short")
    memory, chosen = Memory(graph), tuple(CHOICES[choice](graph)[:1])
    offloads = random_offloads(random.Random(0), Timeline(memory, chosen, priced(graph)), 1.0)
    made = dataclasses.replace(plan_by_hand(graph, chosen), offloads=to_offload_refs(memory, chosen, offloads))
    torch.manual_seed(0)
    plain = SHORT.build().to(DEVICE)
    planned = apply(copy.deepcopy(plain), made, **options)
    planned_graphs(planned).copies = copies
    planned_forward(planned).watch(observe=False)
    return plain, planned, made


def on_device(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(DEVICE) for each in batch)


BATCH, OTHER, LARGER, SMALLER = (on_device(tokens(samples, 8)) for samples in (4, 4, 9, 2))


def twice(model: nn.Module) -> None:
    loss = model(*BATCH)
    loss.backward(retain_graph=True)
    loss.backward()


def with_evaluation_between(model: nn.Module) -> None:
    loss = model(*BATCH)
    with torch.no_grad():
        model.eval()(BATCH[0])
    model.train()
    loss.backward()


def forgetting_a_forward(model: nn.Module) -> None:
    model(*OTHER)
    model(*BATCH).backward()


STEPS: dict[str, Callable[[nn.Module], None]] = {
    "one forward": lambda model: model(*BATCH).backward(),
    "two forwards before a backward": lambda model: (model(*BATCH) + model(*OTHER)).backward(),
    "two backwards of a forward": twice,
    "an evaluation between": with_evaluation_between,
    "a forward without a backward": forgetting_a_forward,
    "a larger batch": lambda model: model(*LARGER).backward(),
    "a smaller batch": lambda model: model(*SMALLER).backward(),
}


@pytest.mark.any_device
@pytest.mark.fast(
    "one forward-every-block",
    "two forwards before a backward-saved-matmuls",
    "two backwards of a forward-every-block",
    "an evaluation between-saved-matmuls",
    "a forward without a backward-every-block",
    "a larger batch-saved-matmuls",
    "a smaller batch-every-block",
)
@pytest.mark.parametrize("choice", ["every-block", "saved-matmuls"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_bitwise_however_late_copies_are(name: str, choice: str) -> None:
    plain, planned, made = offloading_all(late_copies(), choice)
    saved = {node for region in made.regions for node in region.saved}
    assert any(each.node in saved for each in made.offloads) == (choice == "saved-matmuls")
    for _ in range(2):
        for left, right in zip(trained(plain, STEPS[name]), trained(planned, STEPS[name]), strict=True):
            assert torch.equal(left, right)
    offloader = planned_forward(planned).offloader
    assert offloader is not None and offloader.counts.out >= 2 * len(made.offloads) > 0


@WHERE_LATE
@pytest.mark.any_device
@pytest.mark.fast(*(f"{fault}-every-block" for fault in FAULTS))
@pytest.mark.parametrize("choice", ["every-block", "saved-matmuls"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_executor_that_forgets_to_wait_is_caught(fault: Fault, choice: str) -> None:
    plain, planned, _ = offloading_all(late_copies(fault), choice, verify_first_step=False)
    step = STEPS["one forward"]
    assert any(not torch.equal(a, b) for a, b in zip(trained(plain, step), trained(planned, step), strict=True))


class Conjugated(nn.Module):
    """Products of conjugated matrices, whose conjugation is only noted."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.real(x), self.imaginary(x))
        u = z * torch.sigmoid(z.abs())
        return ((u.mH @ (u.conj() * u)).abs() ** 2).sum() + F.mse_loss(u.real, y)


class Cells(nn.Module):
    """A cell that writes to its gates after it has saved them."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.enter, self.cell, self.leave = nn.Linear(8, 8), cell(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = self.cell(self.enter(x))
        hidden = state[0] if isinstance(state, tuple) else state
        state = self.cell(self.enter(hidden), state)
        return F.mse_loss(self.leave(state[0] if isinstance(state, tuple) else state), y)


class Squashed(nn.Module):
    """Its softmax and its rectifier save what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x).softmax(-1), y)


class Turned(nn.Module):
    """Its rectifier gives rows of what it takes in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 64), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        columns = self.enter(x).unflatten(-1, (8, 8)).transpose(1, 2)
        return F.mse_loss(self.leave(F.rrelu(columns, training=True)).squeeze(-1), y)


def pairs(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 8), torch.randn(samples, 8)


def offloading(build: Callable[[], nn.Module], copies: Copies | None) -> tuple[nn.Module, nn.Module]:
    """(a model without a plan, its copy under one that recomputes nothing and offloads all that may be)"""
    _, graph = recorded(Workload("tricky", build, pairs, step_of, batch_size=4))
    memory = Memory(graph)
    offloads = random_offloads(random.Random(0), Timeline(memory, (), priced(graph)), 1.0)
    made = dataclasses.replace(plan_by_hand(graph, ()), offloads=to_offload_refs(memory, (), offloads))
    assert made.offloads
    torch.manual_seed(0)
    plain = build().train().to(DEVICE)
    planned = apply(copy.deepcopy(plain), made)
    planned_graphs(planned).copies = copies
    planned_forward(planned).watch(observe=False)
    return plain, planned


TRICKY: dict[str, Callable[[], nn.Module]] = {
    "conjugated": Conjugated,
    "LSTM cell": functools.partial(Cells, nn.LSTMCell),
    "GRU cell": functools.partial(Cells, nn.GRUCell),
    "squashed": Squashed,
}


@pytest.mark.any_device
@pytest.mark.fast("conjugated-late", "LSTM cell-late", "squashed-at once")
@pytest.mark.parametrize("copies", [None, late_copies()], ids=["at once", "late"])
@pytest.mark.parametrize("name", TRICKY)
def test_what_a_node_does_to_what_it_saved_arrives_too(name: str, copies: Copies | None) -> None:
    """Conjugation that is only noted; writes after the save: a copy must begin neither too early nor lose a bit."""
    plain, planned = offloading(TRICKY[name], copies)
    torch.manual_seed(1)
    batch = on_device(pairs(4, None))
    for left, right in zip(*(trained(m, lambda m: m(*batch).backward()) for m in (plain, planned)), strict=True):
        assert torch.equal(left, right)


def test_who_writes_to_what_is_saved_is_told_as_without_a_plan() -> None:
    """torch leaves its own check out where saved tensors are packed."""
    for model in offloading(Squashed, None):
        loss = model(*pairs(4, None))
        with torch.no_grad():
            next(p for p in model.parameters() if p.shape == (64, 64)).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Remembering(InstantCopies):
    """Knows of every storage that went to the host, as long as it is there."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []

    def out(self, flat: torch.Tensor, host: torch.Tensor, offset: int) -> None:
        self.seen.append(weakref.ref(flat.untyped_storage()))
        super().out(flat, host, offset)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.seen)


def test_nothing_stays_of_a_forward_whose_loss_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes at once: a cycle would keep the device's memory until Python looks for cycles."""
    made: list[weakref.ref[_Packed]] = []
    init = _Packed.__init__

    def noted(self: _Packed, *args: Any) -> None:
        init(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(_Packed, "__init__", noted)
    _, planned = offloading(Squashed, None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            planned(*pairs(4, None))
        assert len(made) > 3 and not [each for each in made if each() is not None]
    finally:
        gc.enable()


def test_a_forward_that_fails_lets_go_of_what_it_was_moving() -> None:
    class Full(Remembering):
        def wait(self, copy: object) -> None:
            if len(self.seen) < 3:
                return
            raise MemoryError

    _, planned = offloading(Squashed, copies := Full())
    with pytest.raises(MemoryError):
        planned(*pairs(4, None))
    assert len(copies.seen) >= 3 and copies.alive == 0


def test_a_copy_of_a_planned_model_offloads_too() -> None:
    plain, planned, made = offloading_all()
    again, step = copy.deepcopy(planned), STEPS["one forward"]
    assert all(map(torch.equal, trained(plain, step), trained(again, step)))
    offloader = planned_forward(again).offloader
    assert offloader is not None and offloader.counts.out == len(made.offloads)


def test_host_memory_is_used_again_when_nothing_of_its_forward_is_left() -> None:
    _, planned, _ = offloading_all()

    class Counting(LateCopies):
        taken = 0

        def host(self, size_bytes: int) -> torch.Tensor:
            self.taken += 1
            return super().host(size_bytes)

    copies = Counting()
    planned_graphs(planned).copies = copies
    planned_forward(planned).watch(observe=False)
    for _ in range(3):
        trained(planned, STEPS["one forward"])
    assert copies.taken == 1
    trained(planned, STEPS["two forwards before a backward"])
    assert copies.taken == 2


@pytest.mark.any_device
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(3))
def test_a_random_model_keeps_its_promises_under_random_offloads(number: int) -> None:
    rows = verdicts(number, 4, copies=late_copies())
    assert all(not row["failures"] for row in rows), rows
    assert sum(row["offloads"] for row in rows)


def test_a_save_that_is_an_input_here_and_a_copy_on_fakes_is_refused_and_never_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result has another layout on fakes, unknown to us: the linear layer behind it copies it there, not here."""
    monkeypatch.delitem(layouts._LAYOUTS["cpu"], torch.ops.aten.rrelu_with_noise.default)
    _, planned = offloading(Turned, LateCopies())
    with pytest.raises(PlanMismatch, match="brings to the host what autograd saves at node"):
        planned(*pairs(4, None))


@pytest.mark.any_device
def test_a_saved_node_that_writes_to_what_it_made_runs_again_from_what_came_back() -> None:
    """Alpha dropout writes to its noise, which must not be a view of the memory that came from the host."""
    rows = verdicts(123, 6, copies=late_copies())
    assert len(rows) == 6 and all(not row["failures"] for row in rows), rows


@pytest.mark.exhaustive
@pytest.mark.any_device
def test_a_value_that_leaves_its_region_where_the_graph_breaks_is_offloaded() -> None:
    """Another graph call takes it, and saves it: as that save it could not be sent, for it is an input there."""
    rows = verdicts(98, 8, copies=late_copies())
    assert len(rows) == 8 and all(not row["failures"] for row in rows), rows


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("tens", range(4))
def test_many_random_models_keep_their_promises_under_random_offloads(tens: int) -> None:
    for number in range(10 * tens + 10, 10 * tens + 20):
        rows = verdicts(number, 5, copies=LateCopies())
        assert all(not row["failures"] for row in rows), rows


# The schedule


def test_nothing_leaves_that_would_come_back_only_to_be_let_go_of() -> None:
    """Of a product that dropout takes, backward reads nothing: the region's recomputation ends before it."""
    _, graph = toy()
    memory = Memory(graph)
    product = next(i for i, node in enumerate(graph.nodes) if node.op == "dropout") - 1
    region = Region(product, product + 1, saved=(product,))
    moved = {candidate.storage for candidate in Timeline(memory, (region,), priced(graph)).candidates}
    assert memory.saved_storages(region).size and moved
    assert moved.isdisjoint(memory.saved_storages(region).tolist())


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("choice", ["nothing", "every-block", "half-saved", "nested"])
def test_nothing_waits_for_what_is_scheduled(choice: str, share: float) -> None:
    _, graph = toy("transformer-amp")
    regions, link = tuple(CHOICES[choice](graph)), link_that_carries(graph, share)
    offloads = all_offloads(Memory(graph), regions, priced(graph), link)
    assert stall_us(Timeline(Memory(graph), regions, priced(graph)), offloads, link) == pytest.approx(0.0, abs=1e-6)


def test_what_people_stash_by_hand_waits_where_the_link_is_slow() -> None:
    _, graph = toy()
    timeline = Timeline(Memory(graph), (), priced(graph))
    offloads = stashed_offloads(timeline, Link(1.0, AMPLE))
    slow, fast = (stall_us(timeline, offloads, link_that_carries(graph, share)) for share in (0.2, 50.0))
    assert slow > timeline.forward_us and fast < 0.1 * slow


def test_no_more_goes_to_the_host_than_the_budget_needs_or_the_host_holds() -> None:
    _, graph = toy()
    memory, times, link = Memory(graph), priced(graph), link_that_carries(graph, 1.0)
    everything = all_offloads(memory, (), times, link)
    most, least = memory.curve(()).peak_bytes, memory.offloading(everything).curve(()).peak_bytes
    some = fewest_offloads(memory, (), times, link, (most + least) // 2)
    assert 0 < len(some) < len(everything)
    assert memory.offloading(some).curve(()).peak_bytes <= (most + least) // 2
    small = dataclasses.replace(link, host_bytes=3000)
    sizes = graph.storages.size_bytes
    assert 0 < sum(int(sizes[each.storage]) for each in all_offloads(memory, (), times, small)) <= 3000


def test_a_link_of_no_bandwidth_to_speak_of_carries_nothing() -> None:
    _, graph = toy()
    assert all_offloads(Memory(graph), (), priced(graph), link_that_carries(graph, 1e-6)) == ()


# The program


def posed(graph: Graph, budget_bytes: int, link: Link | None) -> Problem:
    return Problem(graph, estimated_costs(graph, TARGETS["h100-80gb"]), find_space(graph), budget_bytes, link)


@pytest.mark.often("0.6-milp")
@pytest.mark.fast("0.2-chain-dp", "0.6-chain-dp")
@pytest.mark.parametrize("solver", ["chain-dp", "cp-sat", "milp", "exact"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_no_plan_with_offloads_beats_the_bound(share: float, solver: str) -> None:
    """Plans of all strategies and at random, every one with all that the link carries."""
    _, graph = toy()
    link = link_that_carries(graph, share)
    most, draw = Memory(graph).peak_without_regions, random.Random(solver)
    for percent in (65, 80, 92):
        problem = posed(graph, most * percent // 100, link)
        found = load(solver)(problem, Limits(time_s=20))
        if found.fits:
            found = dataclasses.replace(found, offloads=problem.offloads_of(found.regions))
            assert check.check(problem, found) == []
        others = [load(name)(problem, Limits()).regions for name in HEURISTICS]
        others += [tuple(draw.sample(every_block_of(graph), k)) for k in (1, 2, 3)]
        for regions in map(tuple, map(sorted, others)):
            if problem.curve(regions).peak_bytes <= problem.budget_bytes:
                assert found.status != "infeasible"
                assert problem.objective_ns(regions) / 1000 >= found.bound_us - 1e-6


@st.composite
def linked_problems(draw: st.DrawFn) -> Problem:
    graph, costs = toy_graph(draw(toys()))
    link = Link(draw(st.sampled_from((0.5, 2.0, 8.0, 1e6))), draw(st.sampled_from((4, 9, AMPLE))), latency_us=0.0)
    return Problem(graph, costs, draw(spaces(graph)), AMPLE, link)


def assert_no_plan_beats(solver: str, problem: Problem, percent: int) -> None:
    """Of all plans of a small space, every one with what the link carries."""
    unlimited = problem.with_budget(0)
    plans = list(every_plan(problem))
    peaks = [unlimited.curve(regions).peak_bytes for regions in plans]
    at = problem.with_budget(sorted(peaks)[percent * (len(peaks) - 1) // 100])
    found = load(solver)(at, Limits(gap=0.0, workers=1, time_s=10))
    times_us = at.liveness.op_time_ns / 1000
    fitting = [plan for plan in plans if at.curve(plan).peak_bytes <= at.budget_bytes]
    fastest_us = min(at.memory.recompute_time_us(plan, times_us) for plan in fitting)
    assert found.status != "infeasible"
    assert found.bound_us <= fastest_us + 1e-6
    if found.fits:
        assert at.curve(found.regions).peak_bytes <= at.budget_bytes
        assert found.objective_us >= fastest_us - 1e-6
    tight = load(solver)(at.recomputing_at_most(fastest_us), Limits(gap=0.0, workers=1, time_s=10))
    assert tight.status != "infeasible" and tight.bound_us <= fastest_us + 1e-6
    least = least_peak(at, Limits(time_s=10))
    assert least.bound_bytes <= min(peaks) <= least.peak_bytes


SOLVERS = pytest.mark.parametrize("solver", ["chain-dp", "cp-sat", "milp", "exact"])


@pytest.mark.exhaustive
@SOLVERS
@given(problem=linked_problems(), percent=st.integers(0, 100))
@settings(max_examples=examples(8, 25), deadline=None)
def test_no_plan_of_a_space_that_can_be_searched_beats_the_bound(solver: str, problem: Problem, percent: int) -> None:
    """Skip connections, late readers, links that are slow and hosts that are full."""
    assert_no_plan_beats(solver, problem, percent)


@pytest.mark.exhaustive
@pytest.mark.nightly
@SOLVERS
@given(problem=linked_problems(), percent=st.integers(0, 100))
@settings(max_examples=examples(20, 1500), deadline=None)
def test_no_plan_of_many_spaces_beats_the_bound(solver: str, problem: Problem, percent: int) -> None:
    assert_no_plan_beats(solver, problem, percent)


def test_offloads_never_cost_and_the_bound_of_all_plans_is_lower() -> None:
    _, graph = toy("short")
    budget = Memory(graph).peak_without_regions * 80 // 100
    alone = load("exact")(posed(graph, budget, None), Limits(time_s=5))
    linked = load("exact")(posed(graph, budget, link_that_carries(graph, 0.5)), Limits(time_s=5))
    assert linked.objective_us < alone.objective_us
    assert linked.bound_us <= alone.bound_us


def test_a_problem_whose_link_carries_nothing_is_the_problem_without() -> None:
    _, graph = toy()
    budget = Memory(graph).peak_without_regions * 70 // 100
    alone, linked = posed(graph, budget, None), posed(graph, budget, Link(1e-9, AMPLE))
    assert max(linked.floor_bytes) <= 1 and alone.fixed_bytes - linked.fixed_bytes <= 1  # rounded up to a byte
    assert load("exact")(linked, Limits()).objective_us == load("exact")(alone, Limits()).objective_us


def test_relief_grows_in_forward_and_shrinks_in_backward_and_floors_grow_to_it() -> None:
    _, graph = toy()
    link = link_that_carries(graph, 0.5)
    relief, problem = Relief(graph, priced(graph), link), posed(graph, AMPLE, link)
    assert relief.in_forward[0] == 0 and relief.in_forward[-1] == relief.most_bytes
    assert (np.diff(relief.in_forward) >= 0).all()
    brings = [relief.in_backward(op, 0.0) for op in range(graph.forward_end, graph.backward_end)]
    assert brings == sorted(brings, reverse=True) and brings[-1] > 0
    assert problem.floor_bytes[0] == 0 and 0 < problem.floor_bytes[-2] <= relief.most_bytes
    full = dataclasses.replace(link, host_bytes=relief.most_bytes // 2)
    assert not any(posed(graph, AMPLE, full).floor_bytes)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("choice", ["nothing", "every-block", "half-saved", "nested", "saved-matmuls"])
def test_no_more_is_off_the_device_than_relief_allows(choice: str, share: float) -> None:
    """At any operator: what the link has carried when its node began, what it can still bring back from it on."""
    _, graph = toy()
    regions, times_us, memory = tuple(CHOICES[choice](graph)), priced(graph), Memory(graph)
    link = link_that_carries(graph, share)
    without = memory.curve(regions)
    moved = memory.offloading(all_offloads(memory, regions, times_us, link)).curve(regions)
    off = without.alive_bytes - moved.alive_bytes
    again_us = np.where(without.executed & (without.region >= 0), times_us[without.op], 0.0)
    again_us = np.cumsum(again_us[::-1])[::-1]
    relief = Relief(graph, times_us, link, float(again_us[0]))
    allowed = [
        relief.in_forward[op] if op < graph.forward_end else relief.in_backward(op, left_us)
        for op, left_us in zip(without.op.tolist(), again_us.tolist(), strict=True)
    ]
    stepping = (without.region < 0) & (without.op < graph.backward_end)
    assert (off[stepping] <= np.array(allowed)[stepping]).all()
    assert off.max() > 0 and off.max() <= relief.most_bytes
    backward = stepping & (without.op >= graph.forward_end)
    left_us = np.array([times_us[op : graph.backward_end].sum() for op in without.op[backward].tolist()])
    brings = np.ceil(link.bytes_per_us * (left_us + again_us[backward]))
    np.testing.assert_allclose(np.array(allowed)[backward], brings, atol=1)


def test_who_recomputes_for_less_gives_the_link_less_time_to_bring_things_back() -> None:
    _, graph = toy()
    link, times_us = link_that_carries(graph, 1.0), priced(graph)
    backward_us = times_us[graph.forward_end : graph.backward_end].sum()
    fast = dataclasses.replace(link, bytes_per_us=link.bytes_per_us * 100)
    for time_us in (0.0, 10.0, 1e9):
        found = Relief(graph, times_us, fast, time_us).most_bytes
        assert found == min(Relief(graph, times_us, fast).most_bytes, fast.moved_within(backward_us + time_us))
    assert posed(graph, AMPLE, None).recomputing_at_most(0.0).fixed_bytes == graph.fixed_total


# Plans


def planned_here(share: float, bytes_per_us: float) -> tuple[FakeStep, Plan]:
    """For a small GPT-2."""
    place = find_planning_device("cpu")
    workload = gpt2.workload("gpt2", n_embd=64, n_layer=2, n_head=4, batch_size=8, n_positions=64, vocab_size=512)
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    peak = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_regions
    budget = parse_budget(int(share * peak), None, AMPLE)
    link = Link(bytes_per_us, AMPLE)
    return step, plan_profile(profile, budget, step=step, link=link, exact=True, limits=Limits(time_s=5))


@pytest.mark.exhaustive
def test_a_plan_with_offloads_is_measured_as_predicted_and_bitwise() -> None:
    step, made = planned_here(0.6, 500.0)
    assert made.offloads and made.predicted["offloaded_bytes"] == made.host_bytes
    report = validate(step.workload, made, repeats=1)
    assert report.passed and report.gradients_bitwise
    assert set(report.offloads.values()) == {len(made.offloads)}
    assert report.measured["peak_bytes"] <= made.budget_bytes
    assert report.measured["peak_bytes"] == pytest.approx(made.predicted["peak_bytes"], rel=5e-4)


def test_a_plan_whose_offloads_are_not_kept_here_is_refused() -> None:
    """Another device's kernels save other things."""
    _, graph = toy()
    memory = Memory(graph)
    timeline = Timeline(memory, (), priced(graph))
    offloads = all_offloads(memory, (), priced(graph), link_that_carries(graph, 1.0))
    refs = to_offload_refs(memory, (), offloads)
    saved = next(each for each in refs if each.save is not None)
    with pytest.raises(PlanMismatch, match="here it keeps something else"):
        from_offload_refs(graph, [dataclasses.replace(saved, save=99)])
    require_kept(memory, (), offloads)
    kept = {each.storage for each in timeline.candidates}
    other = next(u for u in range(len(graph.storages.birth)) if u not in kept)
    with pytest.raises(PlanMismatch, match="here it keeps something else"):
        require_kept(memory, (), [dataclasses.replace(offloads[0], storage=other)])


def test_a_plan_file_with_offloads_is_of_a_version_that_older_readers_refuse(tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, _, made = offloading_all()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 4
    dataclasses.replace(made, offloads=()).save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 3


@pytest.mark.exhaustive
def test_a_comparison_shows_what_offloading_by_hand_takes() -> None:
    step, profile = profiled()
    graph = profile.graph
    alone = Problem(graph, profile.costs, find_space(graph), AMPLE)
    budget = (2 * least_peak(alone, Limits()).peak_bytes + alone.memory.peak_without_regions) // 3
    given = parse_budget(budget, None, AMPLE)
    times = profile.costs.per_op_us(graph)
    link = Link(0.3 * Timeline(Memory(graph), (), times).kept_bytes / float(times[: graph.forward_end].sum()), AMPLE, 0)
    found = compared(
        profile, given, step=step, strategies=["every-block", "exact"], exact=True, link=link, limits=Limits(time_s=2)
    )
    rows = {row.strategy: row for row in found.rows}
    assert {"exact", NO_OFFLOAD, OFFLOAD_ALL, OFFLOAD_INPUTS, "every-block"} == set(rows)
    best, kept = rows["exact"].step_time_us, rows[NO_OFFLOAD].step_time_us
    assert best is not None and kept is not None and best < kept
    stalled = rows[OFFLOAD_ALL]
    assert stalled.plan is not None and device_overhead(stalled.plan) > 0 and stalled.recompute_time_us == 0
    offloads = {name: row.plan.offloads for name, row in rows.items() if row.plan is not None}
    assert offloads["exact"] and not offloads[NO_OFFLOAD]


@pytest.mark.exhaustive
def test_an_infeasible_budget_names_the_least_with_offloads() -> None:
    step, profile = profiled()
    budget = parse_budget(Memory(profile.graph).graph.fixed_total + 1, None, AMPLE)
    with pytest.raises(Infeasible) as error:
        plan_profile(profile, budget, step=step, link=Link(50e3, AMPLE), exact=True)
    least = error.value.minimum_budget_bytes
    assert least is not None
    enough = parse_budget(least, None, AMPLE)
    made = plan_profile(profile, enough, step=step, link=Link(50e3, AMPLE), exact=True, limits=Limits(time_s=2))
    assert made.predicted["peak_bytes"] <= least


# Refusals


def test_a_cpu_has_no_link_and_what_is_no_offload_is_refused() -> None:
    with pytest.raises(UsageError, match="nowhere to offload to"):
        link_of(find_planning_device("cpu"), "activations")
    elsewhere = PlanningDevice(TARGETS["h100-80gb"], None)
    with pytest.raises(UsageError, match="offload is activations, optimizer"):
        link_of(elsewhere, "gradients")
    with pytest.raises(UsageError, match="cannot be offloaded together"):
        link_of(elsewhere, "weights,activations")
    assert link_of(elsewhere, "weights") is None
    with pytest.raises(UsageError, match="host budget"):
        link_of(elsewhere, None, "3GiB")
    assert link_of(elsewhere, "none") is None
    assert link_of(elsewhere, "activations") == Link(50e3, 64 << 30)
    assert link_of(elsewhere, "activations", "3GiB") == Link(50e3, 3 << 30)


def test_an_execution_that_moves_nothing_says_so() -> None:
    with pytest.raises(UsageError, match='under `execution="modules"`'):
        require_offloads(execution("modules"), None)


def test_a_plan_whose_saves_are_not_there_is_a_mismatch() -> None:
    _, planned, made = offloading_all()
    saved = next(each for each in made.offloads if each.save is not None)
    wrong = dataclasses.replace(saved, save=99)
    apply(planned, dataclasses.replace(made, offloads=(wrong,)))
    with pytest.raises(remat.PlanMismatch, match="saves less there"):
        trained(planned, STEPS["one forward"])
