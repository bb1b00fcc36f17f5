"""Random models under random plans keep every promise: dozens here, two thousand in `python -m benchmarks fuzzing`."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from tests.devices import DEVICE
from tests.examples import examples
from tests.fuzzing import verdicts
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.random_models import recipe, workload_of

PLANS = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recorded(number: int) -> str:
    made = recipe(random.Random(number))
    return json.dumps(record(FakeStep(workload_of(made, f"random-{number}"), device=DEVICE)).to_json())


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_what_was_planned_before_in_a_process_changes_nothing() -> None:
    """Models share the code of their forward, and Dynamo remembers what it traced by code."""
    numbers = (7, 173, 0)
    try:
        first, again = ([recorded(number) for number in order] for order in (numbers, numbers[::-1]))
    finally:
        torch._dynamo.reset()
    assert first == again[::-1]
    assert len(set(first)) == len(numbers)


@given(number=st.integers(0, 10**9))
@settings(
    max_examples=examples(3, 8),
    phases=(Phase.explicit, Phase.generate),  # a smaller number is no smaller model
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_random_model_keeps_its_promises_under_random_plans(number: int) -> None:
    rows = verdicts(number, PLANS)
    assert len(rows) == PLANS
    assert [failure for row in rows for failure in row["failures"]] == []
    assert sum(row["regions"] for row in rows) > 0
