"""The host's time: the time to launch kernels, and what is said of a step that the host bounds."""

from __future__ import annotations

import numpy as np
import pytest

from remat.costing.host_time import LAUNCH_US, host_time_us, launches_us
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import bound_by_host, device_overhead
from remat.planning.comparison import compare
from remat.planning.estimate import estimate_of
from remat.planning.planner import plan
from remat.planning.profiling import fake_step, profile_step
from remat.recording.record import record
from tests.toys import TRANSFORMER

H100, CPU = find_planning_device("h100-80gb"), find_planning_device("cpu")


@pytest.mark.exhaustive
def test_what_only_allocates_and_what_a_cpu_runs_is_not_launched() -> None:
    graph = record(fake_step(TRANSFORMER, H100))
    host = launches_us(graph, H100.target)
    moves = np.array([bool(kind.moved_bytes or kind.flops) for kind in graph.kinds])[graph.op_kind]
    assert host.sum() == LAUNCH_US * moves.sum() > 0
    assert launches_us(graph, CPU.target).sum() == 0


@pytest.mark.exhaustive
def test_a_plan_of_tiny_kernels_says_that_the_host_bounds_it_and_what_it_adds() -> None:
    found = plan(TRANSFORMER, budget="64.45MiB", target="h100-80gb")
    predicted = found.predicted
    assert predicted["host_us"] > 3 * predicted["device_us"]
    assert 0 < predicted["host_again_us"] < predicted["host_us"]
    assert found.without_checkpointing["step_time_us"] == predicted["host_us"]
    assert predicted["step_time_us"] == predicted["host_us"] + predicted["host_again_us"]
    assert predicted["overhead"] == pytest.approx(predicted["host_again_us"] / predicted["host_us"])
    assert device_overhead(found) == pytest.approx(predicted["recompute_time_us"] / predicted["device_us"])
    (sentence,) = bound_by_host(found)
    assert sentence.startswith("bound by the host: launching kernels takes") and sentence in str(found)


@pytest.mark.exhaustive
def test_strategies_are_compared_by_the_time_that_the_host_needs() -> None:
    found = compare(TRANSFORMER, budget="64.45MiB", target="h100-80gb", strategies=["none", "every-block"])
    rows = {row.strategy: row for row in found.rows}
    none, every_block = rows["none"], rows["every-block"]
    assert none.step_time_us is not None
    assert found.without_checkpointing["step_time_us"] == none.step_time_us
    assert none.samples_per_s == pytest.approx(1e6 * TRANSFORMER.batch_size / none.step_time_us)
    assert every_block.plan is not None and every_block.overhead is not None
    assert every_block.step_time_us == none.step_time_us + every_block.plan.predicted["host_again_us"]
    assert every_block.overhead > device_overhead(every_block.plan)  # of a tiny kernel, launching it is the most


@pytest.mark.exhaustive
def test_an_estimate_has_the_hosts_time_on_cuda_alone() -> None:
    cuda, cpu = (estimate_of(profile_step(fake_step(TRANSFORMER, place), place)).speed for place in (H100, CPU))
    assert cuda.update_time_us == cuda.host_us > cuda.device_us
    assert (cpu.update_time_us, cpu.host_us) == (cpu.device_us, 0.0)


def test_micro_batches_are_launched_one_by_one_and_the_optimizer_once() -> None:
    memory = Memory(record(fake_step(TRANSFORMER, H100)))
    one, two, three = (host_time_us(memory, H100.target, micro_batches=n) for n in (1, 2, 3))
    assert two - one == three - two < one
    assert host_time_us(memory, CPU.target, micro_batches=3) == 0.0
