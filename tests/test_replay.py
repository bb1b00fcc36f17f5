"""The evaluator's peak is the replay's, to the byte: every model, every target, plans that save attention among them.

And every operator that the models dispatch on the way is one that a saved node can keep and give back.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from remat._torch.training import UnseenMode
from remat.capture.schemas import makes_nothing
from remat.cli import screen
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import MADE_AGAIN, Graph
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.eager.replay import replay
from remat.execution.eager.saving import Replay, Save
from remat.formulation.problem import Problem
from remat.formulation.search_space import blocks, find_space, saveable
from remat.formulation.solution import Limits
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.search import Judge
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.tracker import Tracker
from remat.solvers import load
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from tests import toys
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

TARGETS = ("cpu", "a100-80gb", "h100-80gb")  # where attention is the CPU's, flash, and cuDNN's
SHARES = (0.6, 0.7, 0.8, 0.9)  # of what the step takes without a plan
ATTENTION = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    yield
    torch._dynamo.reset()
    gc.collect()


def step_of(model: str, target: str, accumulation: int = 1) -> tuple[FakeStep, Graph, int]:
    """The step at a batch of one, recorded; and the target's alignment."""
    place_ = find_planning_device(target)
    step = fake_step(TEST_SIZES[model]().sized(1), place_, loop=TrainingLoop(accumulation=accumulation))
    return step, record(step, alignment_bytes=place_.target.alignment_bytes), place_.target.alignment_bytes


def saving_attention(graph: Graph) -> tuple[Region, ...]:
    """Every layer a region that saves its attention and every third output besides."""
    can_save = saveable(graph)
    found = []
    for first, end in blocks(graph):
        inside = [v for v in can_save if first <= v < end]
        attention = {v for v in inside if ATTENTION in graph.nodes[v].op}
        found.append(Region(first, end, tuple(sorted(attention | {*inside[::3]}))))
    return tuple(found)


def nested(graph: Graph) -> tuple[Region, ...]:
    """Two neighbouring layers in one region, each a region in it."""
    layers = blocks(graph)
    pairs = zip(layers[::2], layers[1::2], strict=False)
    return tuple(Region(a[0], b[1], inner=(Region(*a), Region(*b))) for a, b in pairs if a[1] == b[0])


def planned(graph: Graph, target: str) -> Iterator[tuple[Region, ...]]:
    """Iterate over the greedy strategy's plans by budget; the nearest one if none fits."""
    costs = estimated_costs(graph, find_planning_device(target).target)
    peak = Memory(graph).peak_without_checkpointing
    for share in SHARES:
        problem = Problem(graph, costs, find_space(graph), int(share * peak))
        yield load("greedy")(problem, Limits(time_s=10)).regions


def assert_equal(model: str, target: str, accumulation: int = 1) -> Graph:
    """At every operator; where batch normalisation copies its statistics, which no record has, at the peak."""
    step, graph, alignment_bytes = step_of(model, target, accumulation)
    memory, copies = Memory(graph), any(node.effect == "batch_norm" for node in graph.nodes)
    for regions in (saving_attention(graph), nested(graph), *planned(graph, target)):
        kept = tuple(region for region in regions if not region.saved or memory.recomputation(region))
        replayed = replay(step, to_refs(graph, kept), alignment_bytes=alignment_bytes) + graph.unseen_bytes
        curve = memory.curve(kept)
        assert int(replayed.max()) == curve.peak_bytes, kept
        if not copies:
            np.testing.assert_array_equal(replayed, curve.alive_bytes[curve.executed])
    return graph


@pytest.mark.exhaustive
@pytest.mark.often("resnet50-cpu", "qwen3-moe-h100-80gb", "swin-base-h100-80gb")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", TEST_SIZES)
def test_the_evaluator_s_peak_is_the_replay_s(model: str, target: str) -> None:
    assert_equal(model, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "target", "accumulation"),
    [("gpt2", "h100-80gb", 4), ("gpt2", "a100-80gb", 1)],
)
def test_the_evaluator_s_peak_is_the_replay_s_for_gpt2(model: str, target: str, accumulation: int) -> None:
    graph = assert_equal(model, target, accumulation)
    saved = [v for region in saving_attention(graph) for v in region.saved]
    assert sum(ATTENTION in graph.nodes[v].op for v in saved) == len(blocks(graph)) > 0


# Every operator


@dataclasses.dataclass
class Walk(UnseenMode):
    """Keeps and gives back every single operator; whoever cannot be is in `failures`."""

    tracker: Tracker
    failures: list[str] = dataclasses.field(default_factory=list)
    kept: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or str(func) in MADE_AGAIN:
            return func(*args, **kwargs)
        made = len(self.tracker.storages)
        with (save := Save()):
            out = func(*args, **kwargs)
        if makes_nothing(func):
            if save.tape.results or len(self.tracker.storages) > made:
                self.failures.append(f"{func} makes a tensor, and its schema denies it")
            return out
        made = len(self.tracker.storages)
        with Replay(save.tape, again=False):
            again = func(*args, **kwargs)
        self.kept.add(str(func))
        if len(self.tracker.storages) > made or described(again) != described(out):
            self.failures.append(f"{func} is not given back as it was")
        return again  # what follows gets what a recomputation would


def described(value: Any) -> Any:
    leaves, structure = tree_flatten(value)
    return structure, [
        (t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata) if isinstance(t, torch.Tensor) else t for t in leaves
    ]


def walked(model: str, target: str) -> Walk:
    place_ = find_planning_device(target)
    step = fake_step(dataclasses.replace(TEST_SIZES[model]().sized(1), optimizer=None), place_)
    step.warm_up()
    tracker = Tracker(place_.target.alignment_bytes)
    step.fix_state(tracker)
    walk = Walk(tracker)
    with step.executing(lambda call, graph_module, args: _under(walk, functools.partial(graph_module, *args))):
        step.execute(tracker, lambda: None, lambda: None)
    return walk


def _under(walk: Walk, function: Any) -> Any:
    with walk:
        return function()


def assert_kept(model: str, target: str) -> None:
    walk = walked(model, target)
    assert walk.failures == []
    assert len(walk.kept) > 5


@pytest.mark.often("t5-base-cpu", "swin-base-a100-80gb", "qwen3-moe-h100-80gb", "resnet50-cpu")
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", TEST_SIZES)
def test_every_operator_can_be_kept_and_given_back(model: str, target: str) -> None:
    assert_kept(model, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "attention"),
    [
        ("cpu", "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("a100-80gb", "aten._scaled_dot_product_flash_attention.default"),
        ("h100-80gb", "aten._scaled_dot_product_cudnn_attention.default"),
    ],
)
def test_attention_is_among_what_is_kept(target: str, attention: str) -> None:
    walk = walked("vit-l16", target)
    assert walk.failures == []
    assert attention in walk.kept
    assert {name for name in walk.kept if "attention" in name} == {attention}


# In production


@pytest.mark.fast("512")
@pytest.mark.parametrize("more_bytes", [0, 512])
def test_a_plan_s_peak_is_the_replay_s_and_says_what_the_evaluator_says_else(
    more_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the replay is made to find more than there is; the budget is still kept."""
    place_ = find_planning_device("h100-80gb")
    step = fake_step(toys.TRANSFORMER.sized(64), place_)
    profile = profile_step(step, place_)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    least = memory.curve(toys.every_block(profile.graph)).peak_bytes
    limit = (least + memory.peak_without_checkpointing) // 2
    budget = Budget(limit, limit)
    replayed = Judge.peak
    monkeypatch.setattr(Judge, "peak", lambda *args: replayed(*args) + more_bytes)
    plan = plan_profile(profile, budget, limits=Limits(time_s=10), step=step)
    evaluated = plan.predicted.get("evaluator_peak_bytes", plan.predicted["peak_bytes"])
    assert plan.predicted["peak_bytes"] - evaluated == more_bytes
    assert ("evaluator_peak_bytes" in plan.predicted) == bool(more_bytes)
    assert plan.predicted["peak_bytes"] <= budget.limit_bytes
    shown = screen._promise(plan)
    assert [row for row in shown if "evaluator" in row[2]] == [
        ("", f"-{more_bytes} B", "error of the evaluator; the predicted peak is the replay's")
    ] * bool(more_bytes)


@pytest.mark.exhaustive
def test_the_least_budget_that_a_refusal_names_is_kept_in_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every plan needs more as it runs than by the evaluator, by bytes of its own."""
    place_ = find_planning_device("h100-80gb")
    step = fake_step(toys.TRANSFORMER.sized(64), place_)
    profile = profile_step(step, place_)
    replayed = Judge.peak
    monkeypatch.setattr(Judge, "peak", lambda *args: replayed(*args) + 512 * (3 + len(args[2]) % 5))

    def planned(limit: int) -> Plan:
        return plan_profile(profile, Budget(limit, limit), limits=Limits(time_s=10), step=step, numerics="bitwise")

    with pytest.raises(Infeasible, match="As it runs, the plan of this peak needs") as refused:
        planned(1 << 10)
    least = refused.value.minimum_budget_bytes
    assert least is not None
    assert planned(least).predicted["peak_bytes"] <= least
    with pytest.raises(NoPlanInTime, match=rf"A budget of {least}B \({re.escape(gib(least))}\) will do") as late:
        planned(least - 512)
    assert f"Best replayed peak: {gib(least)}." in str(late.value)
