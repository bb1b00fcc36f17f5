"""Fit: sizes from two records are the recorded ones, the joint optimum beats the ladder, and the answer is the edge."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.costing.costs import estimated_costs, with_library_workspaces
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import chunks_of
from remat.evaluation.graph import Graph
from remat.evaluation.scaling import UnroundedRecord, family
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.fit import JOINT, BatchFit, largest_batch, longest_sequence, samples_of_rank
from remat.planning.forms import StepForms
from remat.planning.micro_batches import OFFLOAD_RUNG, RUNGS, MicroBatches
from remat.planning.profiling import VariantProfiles, fake_step, profile_step
from remat.planning.request import FormChoice
from remat.planning.windows import Window, between, divisors, largest, samples_that_fit
from remat.recording.record import record
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached
from tests.studies import fit_all, micro_batches
from tests.test_chunking import LANGUAGE
from tests.test_fusion import workload as decoder
from tests.toys import CONVNET, TRANSFORMER, WIDTH, Transformer, every_block

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TARGET = "h100-80gb"


class Noisy(Transformer):
    """Adds noise that it draws in its first forward and keeps, for every sample."""

    noise: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.noise is None:
            self.noise = torch.randn(*ids.shape, WIDTH, device=ids.device)
        return super().forward(ids, labels) + self.noise.mean()


WIDE = dataclasses.replace(TRANSFORMER, build=functools.partial(Transformer, layers=2, width=64), seq_len=32)
KEEPING = dataclasses.replace(TRANSFORMER, build=functools.partial(Noisy, layers=2))
MODELS = {"transformer": WIDE, "convnet": CONVNET, "keeping": KEEPING}
DECODER = decoder().sized(24)  # whose norms and gates are groups
LIMITS = Limits(time_s=20)


@cached
def at(batch_size: int, model: str = "transformer", accumulation: int = 1) -> Graph:
    workload, place = MODELS[model].sized(batch_size), find_planning_device(TARGET)
    step = fake_step(workload, place, loop=TrainingLoop(accumulation=accumulation))
    return with_library_workspaces(record(step, alignment_bytes=place.target.alignment_bytes), place.target)


def search(
    budget_bytes: int, workload: Workload = WIDE, loop: TrainingLoop | None = None, **wanted: Any
) -> MicroBatches:
    budget, place = Budget(budget_bytes, budget_bytes), find_planning_device(TARGET)
    return micro_batches(workload, place, budget, loop, limits=LIMITS, **wanted)


@pytest.fixture(scope="module", autouse=True)
def recorded_once() -> Iterator[None]:
    """A step is the same under every budget: the searches of this file share their records."""

    def shared(find: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[tuple[Any, ...], Any] = {}

        def look_up(self: MicroBatches, size: int, how: Any) -> Any:
            key = (self.workload, self.loop, size, how)
            if key not in known:
                known[key] = find(self, size, how), self._to_record.get(size)
            found, step = known[key]
            if step is not None:
                self._to_record[size] = step
            return found

        return look_up

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_to_scale", "recorded"):
            patch.setattr(MicroBatches, name, shared(getattr(MicroBatches, name)))
        yield


def beside_states(graph: Graph, share: float) -> int:
    """A budget: what the optimizer needs, and a share of what the step needs beyond it."""
    alive = Memory(graph).curve(()).alive_bytes
    floor = int(alive[graph.backward_end :].max())
    return floor + int(share * (int(alive.max()) - floor))


# Sizes from two records


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "accumulates", "sizes"),
    [
        ("transformer", False, (3, 27)),
        ("transformer", True, (13,)),
        ("convnet", False, (13,)),
        ("convnet", True, (3, 27)),
        ("keeping", False, (13,)),
    ],
)
def test_two_records_give_the_step_at_any_batch(model: str, accumulates: bool, sizes: tuple[int, ...]) -> None:
    look = search(GIB, MODELS[model])
    assert look._family(accumulates) is not None  # else each size would have a record of its own
    for size in sizes:
        scaled, real = look.profile(size, accumulates).graph, at(size, model, 2 if accumulates else 1)
        assert scaled.nodes == real.nodes
        for regions in ((), every_block(real)):
            assert np.array_equal(Memory(scaled).curve(regions).alive_bytes, Memory(real).curve(regions).alive_bytes)
        for what in ("flops", "moved_bytes"):
            ours, theirs = ([getattr(graph.kinds[k], what) for k in graph.op_kind] for graph in (scaled, real))
            assert ours == theirs
        assert (scaled.about["batch_size"], scaled.fixed_bytes) == (size, real.fixed_bytes)


@pytest.mark.exhaustive
@pytest.mark.often("64-slices4-accumulates")
@pytest.mark.parametrize("accumulates", [False, True], ids=["plain", "accumulates"])
@pytest.mark.parametrize("slices", [1, 4], ids=["slices1", "slices4"])
@pytest.mark.parametrize("sizes", [(64,), (3, 11)], ids=["64", "others"])
def test_two_records_give_the_step_in_slices_at_any_batch(
    sizes: tuple[int, ...], slices: int, accumulates: bool
) -> None:
    look, place = search(GIB, LANGUAGE, forms=FormChoice(large=0.0)), find_planning_device(TARGET)
    loop, other = TrainingLoop(accumulation=2 if accumulates else 1), TrainingLoop(accumulation=1 if accumulates else 2)
    look.profile(3, accumulates)
    for step in look._to_record.values():  # as where the other family was recorded last
        step.loop = other
        record(step)
    for size in sizes:
        forms = look.study(size, accumulates).forms
        assert forms is not None
        scaled = forms.in_slices(slices)
        step = fake_step(LANGUAGE.sized(size), place, loop=loop)
        whole = profile_step(step, place)
        real = VariantProfiles(step, place, whole).profile(scaled.form)
        assert scaled.form.chunks
        for regions in ((), every_block(real.graph)):
            ours, theirs = (Memory(each.graph).curve(regions).alive_bytes for each in (scaled.profile, real))
            assert np.array_equal(ours, theirs)
        kinds = [[each.graph.kinds[k] for k in each.graph.op_kind] for each in (scaled.profile, real)]
        assert len({tuple((k.name, k.flops, k.moved_bytes) for k in each) for each in kinds}) == 1
        assert scaled.profile.costs.step_time_us(scaled.profile.graph) == real.costs.step_time_us(real.graph)
        assert scaled.profile.graph.fixed_bytes == real.graph.fixed_bytes
    assert not look._steps  # else each size would have a record of its own


def test_steps_of_different_models_are_no_family() -> None:
    one, other = (UnroundedRecord(at(size, model), {}, ()) for size, model in ((2, "transformer"), (4, "convnet")))
    assert family(one, other, 1) is None


# Windows


@given(st.integers(1, 400), st.integers(1, 400))
def test_a_window_holds_every_sample_once(samples: int, size: int) -> None:
    window = Window(samples, min(size, samples))
    assert (window.accumulation - 1) * window.micro_batch + window.last == samples
    assert 1 <= window.last <= window.micro_batch
    assert sum(window.weights) == pytest.approx(1.0)


def test_a_global_batch_is_micro_batch_times_accumulation_times_ranks() -> None:
    window = Window(samples_of_rank(256, 8), 4)
    assert (window.micro_batch, window.accumulation, window.last) == (4, 8, 4)
    assert window.micro_batch * window.accumulation * 8 == 256


def test_the_loss_is_averaged_over_samples_and_the_last_micro_batch_counts_with_its_own() -> None:
    assert Window(10, 4).weights == (0.4, 0.4, 0.2)
    losses = torch.arange(10.0)
    parts = [part.mean() * weight for part, weight in zip(losses.split(4), Window(10, 4).weights, strict=True)]
    assert torch.stack(parts).sum().item() == pytest.approx(losses.mean().item())


@pytest.mark.parametrize(
    ("global_batch", "ranks", "message"),
    [(4, 8, "choose at least 8"), (250, 8, "choose 248 or 256"), (9, 8, "choose 8 or 16")],
)
def test_what_does_not_divide_over_ranks_is_refused_with_what_does(global_batch: int, ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        samples_of_rank(global_batch, ranks)


def test_divisors_from_the_largest() -> None:
    assert divisors(12) == [12, 6, 4, 3, 2, 1]


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 400))
def test_the_largest_that_fits_is_found_from_any_guess(edge: int, most: int, guess: int) -> None:
    assert largest(lambda size: size <= edge, most, guess) == min(edge, most)
    assert between(0, edge + 1, lambda size: size <= edge) == edge


@pytest.mark.parametrize(("ranks", "samples"), [(1, 0), (4, 1), (8, 2)])
def test_samples_of_llama_8b_beside_its_states_on_80_gib(ranks: int, samples: int) -> None:
    """Headroom of 10 %, 119.2 GiB of states over the ranks, 28.5 GiB a sample of 2048 tokens."""
    assert samples_that_fit(int(0.9 * 80 * GIB), 119.2 * GIB / ranks, 28.5 * GIB) == samples


# The answer


@cached
def fitted(budget_share: float = 0.4, global_batch: int = 24) -> BatchFit:
    budget = beside_states(at(global_batch), budget_share)
    return fit_all(WIDE, find_planning_device(TARGET), Budget(budget, budget), global_batch, limits=LIMITS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.15, 0.4, 0.8, 1.5])
def test_the_joint_optimum_is_never_slower_than_a_rung_of_the_ladder(share: float) -> None:
    found = fitted(share)
    times = [rung.time_us for rung in found.rungs.values() if rung is not None and rung.time_us is not None]
    assert found.best.time_us == min(times)
    assert all(c.peak_bytes <= found.budget_bytes for c in found.candidates if c.fits)
    assert tuple(found.rungs) == (*RUNGS, JOINT)


@pytest.mark.exhaustive
def test_with_a_link_to_the_host_nothing_is_slower_and_the_ladder_has_a_rung_more() -> None:
    alone, place = fitted(), find_planning_device(TARGET)
    times_us = estimated_costs(at(24), place.target).per_op_us(at(24))
    link = Link(10 * at(24).storages.size_bytes.sum() / times_us.sum(), 1 << 40, latency_us=0.0)
    found = fit_all(WIDE, place, Budget(alone.budget_bytes, alone.budget_bytes), 24, link=link, limits=LIMITS)
    assert tuple(found.rungs) == (*RUNGS, OFFLOAD_RUNG, JOINT)
    assert (found.best.time_us or 0.0) < (alone.best.time_us or 0.0)
    assert found.best.offloaded_bytes and found.plan.offloads
    assert found.best.peak_bytes <= found.budget_bytes and found.plan.predicted["peak_bytes"] <= found.budget_bytes
    for rung in RUNGS:  # those that move nothing
        there, here = found.rungs[rung], alone.rungs[rung]
        assert (there is None) == (here is None)
        assert there is None or here is None or there.to_json() == here.to_json()
    offload = found.rungs[OFFLOAD_RUNG]
    assert offload is not None and offload.offloaded_bytes > found.best.offloaded_bytes


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_where_groups_are_fused_the_step_is_faster_at_every_size_and_the_ladder_is_as_it_was() -> None:
    place = find_planning_device(TARGET)
    size = beside_states(search(1 << 50, DECODER).profile(8, False).graph, 0.4)
    budget = Budget(size, size)
    alone, found = (fit_all(DECODER, place, budget, 8, limits=LIMITS, fuse=fuse) for fuse in (False, True))
    assert found.best.fused and found.plan.about["fused"]
    assert (found.best.time_us or 0.0) < (alone.best.time_us or 0.0)
    assert found.best.peak_bytes == found.plan.predicted["peak_bytes"] <= size
    assert [rung and rung.to_json() for rung in found.rungs.values()][:-1] == [
        rung and rung.to_json() for rung in alone.rungs.values()
    ][:-1]
    look = search(size, DECODER, fuse=True)
    for other in set(divisors(8)) - {candidate.micro_batch for candidate in found.candidates}:
        fits = look.best(Window(8, other))
        assert fits is None or fits.time_us is None or fits.time_us >= (found.best.time_us or 0.0)
    with pytest.raises(UsageError, match="exclude each other"):
        fit_all(DECODER, place, budget, 8, exact=True, fuse=True)


@pytest.mark.exhaustive
def test_with_room_for_all_it_runs_as_it_is() -> None:
    found = fitted(1.5)
    assert (found.best.micro_batch, found.best.accumulation, found.best.regions) == (24, 1, ())


@pytest.mark.exhaustive
def test_the_plan_is_recorded_at_the_chosen_size_and_keeps_the_budget() -> None:
    found = fitted()
    assert found.plan.about["batch_size"] == found.best.micro_batch
    assert found.plan.about["accumulation"] == found.best.accumulation
    assert found.plan.predicted["judged_by"] == "replay"
    assert found.plan.predicted["peak_bytes"] <= found.budget_bytes
    assert found.best.time_us is not None
    again_us = found.best.accumulation * found.plan.predicted["host_again_us"]  # which takes longer than the device
    plain_us = found.best.time_us / (1 + (found.best.overhead or 0.0))
    assert plain_us + again_us == pytest.approx(found.best.time_us)


@pytest.mark.exhaustive
def test_no_candidate_that_was_not_solved_could_have_been_better() -> None:
    found = fitted()
    assert found.best.time_us is not None
    tried = {candidate.micro_batch for candidate in found.candidates}
    look = search(found.budget_bytes)
    for size in set(divisors(24)) - tried:
        window = Window(24, size)
        fits = look.best(window)
        assert fits is None or fits.time_us is None or fits.time_us >= found.best.time_us


def test_an_uneven_last_micro_batch_is_costed_at_its_own_size() -> None:
    look = search(1 << 40)
    even, uneven = look.best(Window(24, 12)), look.best(Window(23, 12))
    assert even is not None and uneven is not None
    assert (uneven.last, uneven.accumulation) == (11, 2)
    assert uneven.time_us is not None and even.time_us is not None and uneven.time_us <= even.time_us


HOWEVER_LITTLE = FormChoice(slices=(2,), most_row_slices=0, worth=0.0)


def captured_problem(look: MicroBatches) -> Problem:
    study = look.study(64, False)
    return study.problem(study.captured, 1 << 40)


@pytest.fixture
def slices_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a toy, slices that are many and small would take most of the time; here it is memory that counts."""
    recorded = StepForms._recorded
    free = lambda self, form: dataclasses.replace(recorded(self, form), extra_us=0.0)  # noqa: E731
    monkeypatch.setattr(StepForms, "_recorded", free)


@pytest.mark.exhaustive
@pytest.mark.parametrize("exact", [False, True], ids=["slices", "exact"])
@pytest.mark.usefixtures("slices_cost_nothing")
def test_the_loss_runs_in_slices_where_that_makes_room(exact: bool) -> None:
    place, limits = find_planning_device(TARGET), Limits(time_s=20)
    least = search(1 << 40, LANGUAGE)
    budget_bytes = least_peak(captured_problem(least), limits).peak_bytes
    budget = Budget(budget_bytes, budget_bytes)
    found = fit_all(LANGUAGE, place, budget, 64, limits=limits, exact=exact, forms=HOWEVER_LITTLE)
    assert found.best.micro_batch == 64
    assert found.best.slices == (0 if exact else 2)
    assert [chunk.slices for chunk in chunks_of(found.plan.about)] == ([] if exact else [2])
    assert found.best.peak_bytes == found.plan.predicted["peak_bytes"] <= budget_bytes


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.usefixtures("slices_cost_nothing")
def test_the_largest_batch_is_larger_where_the_loss_may_run_in_slices() -> None:
    limits = Limits(time_s=20)
    budget_bytes = least_peak(captured_problem(search(1 << 40, LANGUAGE)), limits).peak_bytes
    made = largest_batch(LANGUAGE, target=TARGET, budget=budget_bytes, limits=limits, forms=HOWEVER_LITTLE)
    assert made.about["batch_size"] > 64


@pytest.mark.usefixtures("slices_cost_nothing")
def test_the_loss_stays_whole_where_it_would_be_multiplied_by_what_rounds() -> None:
    """Three micro-batches, or a last one that is smaller. (Rule 4)"""
    look = search(1 << 40, LANGUAGE)
    assert look.study_of(Window(64, 32)).has_forms
    assert not look.study_of(Window(96, 32)).has_forms
    assert not look.study_of(Window(63, 32)).has_forms


def test_the_guess_is_what_fits_as_it_is() -> None:
    budget = beside_states(at(13), 1.0)
    guess, most = search(budget).guess(accumulates=False), Memory(at(14)).peak_without_checkpointing
    assert guess == 13 and most > budget


@pytest.mark.exhaustive
def test_one_more_sample_than_the_largest_batch_does_not_fit() -> None:
    budget = beside_states(at(16), 0.5)
    plan = largest_batch(WIDE, target=TARGET, budget=budget, limits=LIMITS)
    found = plan.about["batch_size"]
    assert found > 8  # of 16, half of which would fit without recomputation
    look = search(budget)
    assert look.feasible(found, accumulates=False)
    assert not look.feasible(found + 1, accumulates=False)
    with pytest.raises(Infeasible):
        look.plan(Window(found + 1, found + 1))


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_longer_sequence_than_the_longest_does_not_fit() -> None:
    budget = beside_states(at(4), 0.85)
    plan = longest_sequence(WIDE.sized(4), target=TARGET, budget=budget, limits=LIMITS)
    found = plan.about["seq_len"]
    assert plan.predicted["peak_bytes"] <= budget
    longer = search(budget, WIDE.sized(4, found + 2))  # a sixteenth of 32
    assert not longer.feasible(4, accumulates=False)


def test_images_have_no_longest_sequence() -> None:
    with pytest.raises(UsageError, match="has no sequences"):
        longest_sequence(CONVNET, target=TARGET, budget=GIB)


def test_where_not_one_sample_fits_the_least_budget_is_named() -> None:
    with pytest.raises(Infeasible) as refused:
        fit_all(WIDE, find_planning_device(TARGET), Budget(1 << 10, 1 << 10), 8, limits=LIMITS)
    assert refused.value.minimum_budget_bytes


@pytest.mark.parametrize(
    "function",
    [remat.plan, functools.partial(remat.fit, global_batch=2), remat.largest_batch],
    ids=["plan", "fit", "largest-batch"],
)
def test_a_state_that_the_host_has_no_room_for_is_refused_by_every_function(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="the optimizer's state takes"):
        function(WIDE, target=TARGET, budget=GIB, offload="optimizer", host_budget=1024)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_sharing_states_makes_room_for_a_larger_micro_batch() -> None:
    budget = int(1.2 * Memory(at(1)).peak_without_checkpointing)
    alone, shared = search(budget), search(budget, loop=TrainingLoop(ranks=8, shard="zero3"))
    sizes = [largest(lambda size, look=look: look.feasible(size, accumulates=False)) for look in (alone, shared)]  # type: ignore[misc]
    assert sizes[1] > sizes[0] > 0
