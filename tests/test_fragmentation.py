"""Bytes that a step reserves: worked out by hand, and laws over models and plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from remat.cli.screen import reserved_rows
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import CAPTURED_FORM
from remat.evaluation.graph import OPTIMIZER_STATE, Graph, Parameter
from remat.evaluation.plan import AllocatorPeaks, Plan, from_refs
from remat.formulation.solution import Limits, Solution
from remat.planning.budget import Budget, parse_budget, usable_bytes
from remat.planning.card import reserving_at_most
from remat.planning.estimate import estimate_of
from remat.planning.forms import StepForm
from remat.planning.portfolio import BestPlan
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import FoundPlan
from remat.planning.timeline import timeline
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import Block, CachingAllocator
from remat.reservation.fragmentation import CONTEXT_BYTES, Footprint, before_first_step, footprint, footprints, states
from remat.units import GIB, MIB
from remat.validation.prediction import simulated
from remat.workload.target import Target
from remat.workload.training_loop import TrainingLoop
from tests.cached import cached
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile

EXPANDABLE = AllocatorSettings(expandable_segments=True)
H100 = find_planning_device("h100-80gb")


@cached
def profile_of(name: str, loop: TrainingLoop | None = None) -> Profile:
    return profile_step(fake_step(TEST_SIZES[name](), H100, loop=loop), H100)


def memory_of(profile: Profile) -> Memory:
    return Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))


# What is fed, and in which order


def with_states(graph: Graph, fixed: dict[str, int], *parameters: Parameter) -> Graph:
    return dataclasses.replace(graph, fixed_bytes=fixed, parameters=parameters)


def graph_of_two() -> Graph:
    """Two parameters of 3 and 5 MiB with two moments each, and a batch of 1 MiB."""
    moments = ((3 * MIB, 3 * MIB), (5 * MIB, 5 * MIB))
    fixed = {"batch": MIB, "parameters": 8 * MIB, OPTIMIZER_STATE: 16 * MIB}
    rows = [Parameter(str(i), a, a, a + b, state_tensors=(a, b)) for i, (a, b) in enumerate(moments)]
    return with_states(profile_of("gpt2").graph, fixed, *rows)


@pytest.mark.exhaustive
def test_libraries_take_a_workspace_a_thread_where_it_first_multiplies_and_only_once() -> None:
    """Backward's is cut out of what forward has let go of by then, and stays there."""
    profile, asked = profile_of("gpt2"), list[int]()

    class Noting(CachingAllocator):
        def malloc(self, size: int) -> Block:
            asked.append(size)
            return super().malloc(size)

    graph = profile.graph
    found = footprint(memory_of(profile), (), allocator=Noting())
    forward, backward = (i for i, size in enumerate(asked) if size == 32 * MIB)
    state = next(i for i, size in enumerate(asked) if asked[i : i + 4] == states(graph)[:4] and i > backward)
    before = len(list(before_first_step(graph))) - 2
    assert before < forward < backward < state
    assert found.requested_bytes == memory_of(profile).peak_without_regions


@pytest.mark.exhaustive
def test_parameters_come_first_and_states_one_by_one() -> None:
    graph = graph_of_two()
    assert list(before_first_step(graph)) == [3 * MIB, 5 * MIB, MIB]
    assert states(graph) == [3 * MIB, 3 * MIB, 5 * MIB, 5 * MIB]


@pytest.mark.exhaustive
def test_a_share_is_in_proportion_and_loses_nothing() -> None:
    graph = graph_of_two()
    shared = dataclasses.replace(graph, fixed_bytes={"parameters": 2 * MIB + 1, OPTIMIZER_STATE: 4 * MIB})
    assert list(before_first_step(shared)) == [3 * (2 * MIB + 1) // 8, 5 * (2 * MIB + 1) // 8, 1]
    assert sum(states(shared)) == 4 * MIB and len(states(shared)) == 4


@pytest.mark.exhaustive
def test_what_is_fixed_beyond_the_parameters_is_one_block_more() -> None:
    graph = with_states(graph_of_two(), {"parameters": 3 * MIB, "gradients": 2 * MIB}, Parameter("a", MIB, MIB))
    assert list(before_first_step(graph)) == [MIB, 2 * MIB, MIB, MIB]


@pytest.mark.fast("None")
@pytest.mark.parametrize("loop", [None, TrainingLoop(accumulation=2), TrainingLoop(ranks=4, shard="zero3")], ids=str)
def test_what_is_fed_is_what_is_fixed(loop: TrainingLoop | None) -> None:
    graph = profile_of("gpt2", loop).graph
    assert sum(before_first_step(graph)) + sum(states(graph)) == graph.fixed_total


def test_the_states_of_adamw_are_its_moments() -> None:
    """Of every parameter a copy of each of the two moments; what else it keeps is less than 512 bytes."""
    graph = profile_of("gpt2").graph
    for parameter in graph.parameters:
        assert [size for size in parameter.state_tensors if size > 512] == [parameter.size_bytes] * 2 or (
            parameter.size_bytes <= 512
        )
        assert sum(parameter.state_tensors) == parameter.state_bytes


def test_parameters_are_read_back_from_a_file() -> None:
    graph = profile_of("gpt2").graph
    assert Graph.from_json(graph.to_json()).parameters == graph.parameters


# What comes out


@pytest.mark.fast("gpt2-default")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("gpt2", AllocatorSettings(), id="gpt2-default"),
        pytest.param("resnet50", EXPANDABLE, id="resnet50-expandable"),
        pytest.param("gpt2", EXPANDABLE, id="gpt2-expandable", marks=pytest.mark.exhaustive),
        pytest.param("resnet50", AllocatorSettings(), id="resnet50-default", marks=pytest.mark.exhaustive),
    ],
)
def test_requested_is_the_peak_of_the_evaluator(name: str, settings: AllocatorSettings) -> None:
    """Two computations of one number: the curve, and what the simulated allocator counted."""
    profile = profile_of(name)
    memory = memory_of(profile)
    budget = int(0.9 * memory.peak_without_checkpointing)
    made = plan_profile(profile, Budget(budget, budget), limits=Limits(time_s=20))
    for regions in ((), from_refs(profile.graph, made.regions)):
        found = footprint(memory, regions, settings)
        assert found.requested_bytes == memory.curve(regions).peak_bytes
        assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes
        assert found.settings == str(settings)
        assert found.reserved_bytes % (2 * MIB) == 0


def test_workspaces_are_requested_while_their_operator_runs() -> None:
    profile = profile_of("gpt2")
    workspace = np.zeros(profile.graph.op_count, dtype=np.int64)
    memory = Memory(profile.graph, workspace)
    at = memory.curve(()).peak_at
    plain = footprint(memory, ())
    workspace[at] = 64 * MIB  # no recomputation: positions are operators
    assert footprint(memory, ()).requested_bytes == plain.requested_bytes + 64 * MIB


def test_a_steady_state_reserves_nothing_more() -> None:
    memory, allocator = memory_of(profile_of("gpt2")), CachingAllocator()
    found = footprint(memory, (), allocator=allocator)
    assert allocator.allocated_bytes == memory.graph.fixed_total  # what a step makes has gone
    assert 2 <= found.steps < 12


# The product


def test_auto_is_the_card_less_the_context_and_judged_by_what_is_reserved() -> None:
    usable = H100.target.memory_bytes - CONTEXT_BYTES
    assert usable_bytes(H100) == usable
    assert parse_budget("auto", None, H100.target.memory_bytes, usable) == Budget(usable, usable, usable)
    assert parse_budget("auto", "1GiB", H100.target.memory_bytes, usable) == Budget(usable, usable - GIB, usable - GIB)
    assert parse_budget("auto", None, 100) == Budget(100, 90)  # nothing to simulate
    assert parse_budget("20GiB", None, H100.target.memory_bytes, usable) == Budget(20 * GIB, 20 * GIB)
    assert usable_bytes(find_planning_device("cpu")) is None


def test_a_plan_names_all_three_and_the_settings_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_of("gpt2")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    made = plan_profile(profile, Budget(GIB, GIB))
    assumed, other = made.predicted["allocator"]
    assert assumed["settings"] == "max_split_size_mb:64"
    assert other["settings"] == "expandable_segments:True,max_split_size_mb:64"
    assert assumed["requested_bytes"] == made.predicted["peak_bytes"]
    given = plan_profile(profile, Budget(GIB, GIB), allocator="")
    plain, _ = footprints(memory_of(profile), (), AllocatorSettings())
    assert given.predicted["allocator"][0] == plain.to_json()
    assert Plan.from_json(given.to_json()).predicted == given.predicted
    assert "PyTorch's default allocator" in reserved_rows(given.predicted["allocator"])[0][2]
    with pytest.raises(UsageError, match="not simulated"):
        plan_profile(profile, Budget(GIB, GIB), allocator="backend:cudaMallocAsync")


def test_estimate_and_timeline_say_the_same() -> None:
    profile = profile_of("gpt2")
    found = footprints(memory_of(profile), (), EXPANDABLE)
    assert estimate_of(profile, allocator="expandable_segments:True").allocator == found
    made = timeline(profile, allocator="expandable_segments:True")
    assert made.allocator == found
    assert made.to_json()["allocator"] == [each.to_json() for each in found]


def test_validation_predicts_what_the_allocator_makes_of_the_replays_peak() -> None:
    """The replay may need more than the evaluator says; then all three are as much larger."""
    memory = memory_of(profile_of("gpt2"))
    found = footprint(memory, (), AllocatorSettings.from_environment())
    more = simulated(memory, (), found.requested_bytes + 100, H100)
    assert more == {
        "allocated_bytes": found.allocated_bytes + 100,
        "reserved_bytes": found.reserved_bytes + 100,
    }
    assert simulated(memory, (), found.requested_bytes, find_planning_device("cpu")) == {}


def test_where_there_is_no_cuda_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that the environment has settings which are not simulated."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    profile = dataclasses.replace(profile_of("gpt2"), target=Target("cpu", "cpu", 64 * GIB, 1e5, {"float32": 1e6}))
    assert "allocator" not in plan_profile(profile, Budget(GIB, GIB)).predicted
    assert estimate_of(profile).allocator == timeline(profile).allocator == ()


def enlarged(profile: Profile, times: int) -> Profile:
    """The step with all of its tensors so many times as large: at its own size a few segments hold everything."""
    graph = profile.graph
    columns = ("size_bytes", "gradient_bytes", "state_bytes")
    parameters = tuple(
        dataclasses.replace(
            p,
            **{name: getattr(p, name) * times for name in columns},
            state_tensors=tuple(size * times for size in p.state_tensors),
        )
        for p in graph.parameters
    )
    larger = dataclasses.replace(
        graph,
        storages=dataclasses.replace(graph.storages, size_bytes=graph.storages.size_bytes * times),
        fixed_bytes={name: size * times for name, size in graph.fixed_bytes.items()},
        parameters=parameters,
    )
    return dataclasses.replace(profile, graph=larger)


@pytest.mark.fast("0.85")
@pytest.mark.parametrize("share", [0.97, 0.85, 0.7])
def test_a_plan_for_a_card_reserves_no_more_than_it_has(share: float) -> None:
    """Requested bytes that fit are not enough: the first plan reserves too much, one that requests less does not."""
    profile = enlarged(profile_of("gpt2"), 64)
    card = int(share * memory_of(profile).peak_without_checkpointing)
    first = plan_profile(profile, Budget(card, card), allocator="")
    made = plan_profile(profile, Budget(card, card, card), allocator="")
    assert first.predicted["allocator"][0]["reserved_bytes"] > card
    assert made.predicted["allocator"][0]["reserved_bytes"] <= card == made.budget_bytes
    assert made.predicted["peak_bytes"] < first.predicted["peak_bytes"]
    # what is promised is still about the budget that was asked for
    assert made.solver["status"] == "feasible"
    assert made.solver["bound_us"] == first.solver["bound_us"] <= made.solver["objective_us"]
    assert made.solver["gap"] == pytest.approx(1 - made.solver["bound_us"] / made.solver["objective_us"])


def test_a_footprint_is_in_the_plan_file_as_it_is() -> None:
    assert [field.name for field in dataclasses.fields(Footprint)] == list(AllocatorPeaks.__annotations__)


def outcome(peak_bytes: int, price_us: float = 1.0) -> BestPlan:
    """The outcome of a search, with nothing else of interest."""
    study: Any = None
    at = StepForm(CAPTURED_FORM, study, 0.0)
    found = FoundPlan(at, Solution("by hand", "optimal", objective_us=price_us, bound_us=1.0), Limits())
    return BestPlan(found, peak_bytes, 1.0, 0.0, "optimal", 1.0)


def test_the_gap_of_a_plan_that_reserves_less_is_a_share_of_its_price_beyond_the_cheapest_form() -> None:
    """Fused groups may make a step faster than captured: 800 us at most, 500 within the budget, 450 on the card."""
    first = dataclasses.replace(outcome(1000, -500.0), bound_us=-800.0, floor_us=-800.0, cheapest_us=-800.0)
    made = reserving_at_most(
        1000, first, lambda asked: outcome(asked, -450.0), lambda each: under_two_settings(1, each.peak_bytes + 9, 0)
    )
    assert made.gap == (-450 + 800) / (-450 + 800) == 1.0
    assert made.floor_us == -800.0


def under_two_settings(peak_bytes: int, reserved: int, other: int) -> tuple[Footprint, ...]:
    settings = (("", reserved), ("other:1", other))
    return tuple(Footprint(peak_bytes, peak_bytes, size, name, 2) for name, size in settings)


def test_the_search_halves_between_what_reserves_too_much_and_what_does_not() -> None:
    """Reserved are 1.5 times what is requested: 90 reserve 135 of 100, 35 too much; 55 do; 72 do not ..."""
    asked = []

    def within(limit_bytes: int) -> BestPlan:
        asked.append(limit_bytes)
        return outcome(limit_bytes, 200.0 - limit_bytes)

    made = reserving_at_most(
        100, outcome(90), within, lambda each: under_two_settings(each.peak_bytes, each.peak_bytes * 3 // 2, 0)
    )
    assert asked == [55, 72, 63, 67]
    assert made.peak_bytes == 67  # 100 of 100: close enough, and the fastest of those that fit
    assert (made.bound_us, made.status) == (1.0, "feasible")


@pytest.mark.parametrize(
    ("other", "says"), [(90, "With PYTORCH_CUDA_ALLOC_CONF=other:1 it reserves"), (110, "Reduce the batch")]
)
def test_a_refusal_says_whether_other_settings_would_do(other: int, says: str) -> None:
    def within(limit_bytes: int) -> BestPlan:
        raise Infeasible(f"{limit_bytes} is too small", 95)

    with pytest.raises(NoPlanInTime, match=r"more than the .* that the card can give") as refusal:
        reserving_at_most(100, outcome(95), within, lambda each: under_two_settings(95, 130, other))
    assert says in str(refusal.value)
