"""The host's time: how launching and running combine, and what is said of a step that the host bounds."""

from __future__ import annotations

import numpy as np
import pytest

from remat.costing.host_time import LAUNCH_US, along, launches_us
from remat.costing.planning_device import find_planning_device
from remat.evaluation.plan import bound_by_host
from remat.planning.estimate import estimate_of
from remat.planning.planner import plan
from remat.planning.profiling import fake_step, profile_step
from remat.recording.recorder import record
from tests.toys import TRANSFORMER

H100, CPU = find_planning_device("h100-80gb"), find_planning_device("cpu")


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        pytest.param([5, 5, 5], [1, 1, 1], 16, id="device"),  # the first waits for its launch
        pytest.param([1, 1, 1], [5, 5, 5], 16, id="host"),  # the last runs after its launch
        pytest.param([1, 1, 9, 1], [5, 5, 1, 1], 21, id="in-turns"),  # 11 launched + 9 + 1
        pytest.param([], [], 0, id="nothing"),
    ],
)
def test_a_kernel_starts_when_it_is_launched_and_the_one_before_has_ended(
    device: list[float], host: list[float], expected: float
) -> None:
    assert along(np.array(device, dtype=float), np.array(host, dtype=float)) == expected


def test_along_is_at_least_either_and_at_most_both() -> None:
    rng = np.random.default_rng(0)
    device, host = rng.exponential(size=(2, 50))
    assert max(device.sum(), host.sum()) <= along(device, host) <= device.sum() + host.sum()


def test_what_only_allocates_and_what_a_cpu_runs_is_not_launched() -> None:
    graph = record(fake_step(TRANSFORMER, H100))
    host = launches_us(graph, H100.target)
    moves = np.array([bool(kind.moved_bytes or kind.flops) for kind in graph.kinds])[graph.op_kind]
    assert host.sum() == LAUNCH_US * moves.sum() > 0
    assert launches_us(graph, CPU.target).sum() == 0


def test_a_plan_of_tiny_kernels_says_that_the_host_bounds_it_and_what_it_adds() -> None:
    found = plan(TRANSFORMER, budget="64.45MiB", target="h100-80gb")
    predicted = found.predicted
    assert predicted["host_us"] > 3 * found.without_checkpointing["step_time_us"]
    assert 0 < predicted["host_again_us"] < predicted["host_us"]
    (sentence,) = bound_by_host(found)
    added = 100 * predicted["host_again_us"] / predicted["host_us"]
    assert sentence.startswith("bound by the host") and sentence.endswith(f"{added:+.1f} %")
    assert sentence in str(found)


def test_an_estimate_has_the_hosts_time_on_cuda_alone() -> None:
    cuda, cpu = (estimate_of(profile_step(fake_step(TRANSFORMER, place), place)).speed for place in (H100, CPU))
    assert cuda.host_us is not None and cuda.host_us > cuda.update_time_us
    assert cpu.host_us is None
