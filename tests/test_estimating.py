"""Estimates, timelines and levers of toys: the numbers are the evaluator's, and what is promised is what is found."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from remat.costing.costs import estimated_costs
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.planning.advice import CHUNKS, Lever, advise, with_chunked_loss, with_fused_attention
from remat.planning.estimate import estimate_of
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import FormChoice
from remat.planning.timeline import POINTS, StepTimeline, save_snapshot, timeline
from remat.workload.training_loop import TrainingLoop
from tests.cached import cached
from tests.studies import forms_of
from tests.toys import TRANSFORMER, Transformer, every_block

WIDE = dataclasses.replace(TRANSFORMER, build=functools.partial(Transformer, layers=3, width=64), seq_len=32)


@cached
def profiled(accumulation: int = 1, batch_size: int = 4) -> Profile:
    place = find_planning_device("h100-80gb")
    return profile_step(fake_step(WIDE.sized(batch_size), place, loop=TrainingLoop(accumulation=accumulation)), place)


def unfused() -> Profile:
    """As the CPU runs it with dropout: attention by many operators."""
    place = PlanningDevice(find_planning_device("h100-80gb").target, torch.device("cpu"))
    step = fake_step(WIDE, place)
    from remat.recording.record import record

    graph = record(step)
    return Profile(graph, estimated_costs(graph, place.target), place.target)


# Estimates


def test_an_estimate_is_what_the_evaluator_finds() -> None:
    profile = profiled()
    memory, regions = Memory(profile.graph), every_block(profile.graph)
    for plan in ((), regions):
        found = estimate_of(profile, plan).peaks
        assert found.peak_bytes == memory.curve(plan).peak_bytes == max(found.phases.values())
        assert found.parts == breakdown.at_peak(memory, plan)
        assert found.first_step_bytes == memory.first_step_peak(plan)


def test_recomputation_raises_hfu_and_not_the_models_operations() -> None:
    profile = profiled()
    plain, planned = estimate_of(profile).speed, estimate_of(profile, every_block(profile.graph)).speed
    assert plain.model_flops == planned.model_flops
    assert plain.mfu == plain.hfu
    assert planned.mfu is not None and planned.hfu is not None and plain.mfu is not None
    assert planned.hfu > planned.mfu and planned.mfu < plain.mfu
    again = planned.device_us - plain.device_us
    assert again == pytest.approx(planned.recompute_time_us)


def test_backward_is_twice_forward_so_recomputing_all_is_four_thirds() -> None:
    """(F + B + F) / (F + B) = 4/3 with B = 2F, counted in operations of the layers."""
    graph = profiled().graph
    flops = np.array([kind.flops for kind in graph.kinds])[graph.op_kind]
    inside = np.isin(graph.op_node, [v for region in every_block(graph) for v in range(region.first, region.end)])
    forward = int(flops[: graph.forward_end][inside[: graph.forward_end]].sum())
    both = int(flops[: graph.backward_end][inside[: graph.backward_end]].sum())
    assert (both + forward) / both == pytest.approx(4 / 3, rel=0.01)


def test_accumulation_counts_every_micro_batch_and_the_optimizer_once() -> None:
    once, often = estimate_of(profiled(1)).speed, estimate_of(profiled(4)).speed
    assert (often.samples, often.tokens) == (4 * once.samples, 4 * (once.tokens or 0))
    assert often.model_flops == 4 * once.model_flops
    graph, costs = profiled(4).graph, profiled(4).costs
    times = costs.per_op_us(graph)
    expected = 4 * times[: graph.backward_end].sum() + times[graph.backward_end :].sum()
    assert often.device_us == pytest.approx(expected)
    assert estimate_of(profiled(4)).peaks.peak_bytes > estimate_of(profiled(1)).peaks.peak_bytes


def test_an_estimate_is_a_document() -> None:
    found = estimate_of(profiled()).to_json()
    assert json.loads(json.dumps(found))["peaks"]["phases"].keys() == {"forward", "backward", "optimizer"}


def test_local_variables_of_untraced_code_are_in_the_eager_peak() -> None:
    class Hoarding(Transformer):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            kept = torch.zeros(64, 32, 64).exp()  # nobody's, but alive until the forward ends
            return super().forward(ids, labels) + 0 * len(kept)

    place = find_planning_device("h100-80gb")
    step = fake_step(dataclasses.replace(WIDE, build=lambda: Hoarding(layers=3, width=64)), place)
    profile = profile_step(step, place)
    peaks = estimate_of(profile).peaks
    assert peaks.eager_bytes is not None
    assert (
        0 < peaks.eager_bytes - peaks.peak_bytes <= 64 * 32 * 64 * 4
    )  # until the forward ends: backward may need more
    assert estimate_of(profile, every_block(profile.graph)).peaks.eager_bytes is None


# Timelines


@cached
def drawn(planned: bool = True) -> StepTimeline:
    profile = profiled()
    return timeline(profile, every_block(profile.graph) if planned else (), budget_bytes=1 << 22)


@pytest.mark.parametrize("planned", [True, False])
def test_a_timeline_adds_up_to_the_peak_and_lasts_as_long_as_the_step(planned: bool) -> None:
    profile, found = profiled(), drawn(planned)
    assert found.alive_bytes.max() == found.peak_bytes
    regions = every_block(profile.graph) if planned else ()
    again = Memory(profile.graph).recompute_time_us(regions, profile.costs.per_op_us(profile.graph))
    assert found.phases["optimizer"][1] == pytest.approx(profile.costs.step_time_us(profile.graph) + again)
    assert found.phases["forward"][1] == pytest.approx(found.phases["backward"][0])
    assert found.recomputing.any() == planned


def test_a_long_step_is_thinned_and_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.planning.timeline.POINTS", 50)
    found = timeline(profiled())
    assert len(found.time_us) == 50 < POINTS
    assert found.alive_bytes.max() == found.peak_bytes


def test_the_snapshot_replays_to_the_predicted_peak(tmp_path: Path) -> None:
    profile = profiled()
    regions = every_block(profile.graph)
    save_snapshot(profile, tuple(regions), tmp_path / "step.pickle")
    with (tmp_path / "step.pickle").open("rb") as file:
        trace = pickle.load(file)["device_traces"][0]
    alive: dict[int, int] = {}
    level = peak = 0
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
            level += event["size"]
        else:
            assert alive.pop(event["addr"]) == event["size"]
            level -= event["size"]
        peak = max(peak, level)
    assert peak == Memory(profile.graph).curve(regions).peak_bytes


# Levers


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_levers_are_what_recording_again_finds() -> None:
    place = find_planning_device("h100-80gb")
    profile = profiled()
    found = advise(WIDE, place, TrainingLoop(), profile.graph, lambda graph, costs: Memory(graph).curve(()).peak_bytes)
    peak = Memory(profile.graph).peak_without_checkpointing
    by_name = {lever.what.split(" (")[0]: lever for lever in found}
    assert [lever.frees_bytes for lever in found] == sorted((lever.frees_bytes for lever in found), reverse=True)
    assert all(lever.peak_bytes + lever.frees_bytes == peak for lever in found)
    assert by_name["micro-batch 2"].peak_bytes == Memory(profiled(1, 2).graph).peak_without_checkpointing
    assert {"micro-batch 2", "weights, gradients and state in bf16", f"a loss in {CHUNKS} chunks"} <= set(by_name)
    assert any("zero3" in lever.what for lever in found)


@pytest.mark.exhaustive
def test_levers_are_the_same_of_a_step_that_ran_in_another_form() -> None:
    place, loop = find_planning_device("h100-80gb"), TrainingLoop(holds="outputs", accumulation=2)
    step = fake_step(WIDE, place, loop=loop)
    profile = profile_step(step, place)

    def levers() -> list[Lever]:
        return advise(
            *(WIDE, place, loop, profile.graph, lambda graph, costs: Memory(graph).curve(()).peak_bytes), step=step
        )

    expected = levers()
    step.train_by(loop, WIDE.optimizer)
    profile_step(step, place)
    forms_of(step, profile, FormChoice(large=0.0)).in_slices(2)
    assert levers() == expected


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_loss_in_slices_is_no_lever_where_it_runs_in_slices() -> None:
    place, profile = find_planning_device("h100-80gb"), profiled()
    cut = dataclasses.replace(profile.graph.nodes[-1], op="chunked_loss(4)")
    graph = dataclasses.replace(profile.graph, nodes=(*profile.graph.nodes[:-1], cut))

    def judge(graph: Graph, costs: object) -> int:
        return Memory(graph).curve(()).peak_bytes

    for levers in (
        advise(WIDE, place, TrainingLoop(), profile.graph, judge, losses_are_cut=True),
        advise(WIDE, place, TrainingLoop(), graph, judge),
    ):
        assert levers and not any("chunks" in lever.what for lever in levers)


def test_a_chunked_loss_leaves_the_layers_alone() -> None:
    graph = profiled().graph
    end = graph.forward_end - 1
    before, after = (breakdown.at(Memory(g), (), end) for g in (graph, with_chunked_loss(graph, 8)))
    assert after["activations"] == before["activations"]
    assert after["logits and loss"] < before["logits and loss"]


def test_fused_attention_frees_the_scores_where_they_are_written_down() -> None:
    def after_forward(graph: Graph) -> int:
        return int(Memory(graph).curve(()).alive_bytes[graph.forward_end - 1])

    graph = unfused().graph
    scores_bytes = 3 * 4 * 32 * 32 * 4  # layers x batch x queries x keys in fp32: one copy for one head
    assert after_forward(graph) - after_forward(with_fused_attention(graph)) >= scores_bytes
    fused = profiled().graph
    assert after_forward(with_fused_attention(fused)) == after_forward(fused)
