"""The second step's peak is held against the prediction, where a device counts: a counter stands in for one."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from remat.evaluation.plan import Plan
from remat.execution.apply import apply, planned_forward
from remat.execution.second_step import SecondStep
from remat.warn import warn
from remat.workload.training_loop import TrainingLoop
from tests.toys import TRANSFORMER, plan_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

MIB = 1 << 20


@dataclasses.dataclass
class Counted:
    """An allocator's counts: `there` between steps, `peak` since the last reset."""

    there: int = 40 * MIB
    peak: int = 0
    resets: int = 0

    def current_bytes(self) -> int:
        return self.there

    def peak_bytes(self) -> int:
        return self.peak

    def reset(self) -> None:
        self.peak, self.resets = self.there, self.resets + 1

    def step_takes(self, peak_bytes: int) -> None:
        self.peak = max(self.peak, peak_bytes)


def plan(**about: Any) -> Plan:
    """One that predicts 100 MiB, of which 40 are there before the step."""
    made = plan_for(TRANSFORMER, target="h100-80gb", budget_bytes=110 * MIB)
    predicted: Any = {**made.predicted, "peak_bytes": 100 * MIB}
    predicted["breakdown"] = {"parameters": 10 * MIB, "optimizer state": 30 * MIB, "activations": 60 * MIB}
    return dataclasses.replace(made, predicted=predicted, about={**made.about, **about})


def said_of(peaks: list[int], counted: Counted, made: Plan | None = None) -> list[str]:
    """Return the warnings as each step begins, and after the last; a peak of 0 is an evaluation."""
    model = TRANSFORMER.build()
    watched = SecondStep(model, made or plan(), is_on=True, counter_for=lambda model, plan: counted)
    said = []
    for peak in peaks:
        if peak:
            said.append(watched.begins())
        else:
            watched.interrupted()
        counted.step_takes(peak * MIB or 900 * MIB)
    return [each for each in (*said, watched.begins()) if each]


@pytest.mark.parametrize(
    ("peaks", "step", "found"),
    [
        pytest.param([90, 100, 100], None, 0, id="as-predicted"),
        pytest.param([300, 100, 100], None, 0, id="only-the-first-step"),  # traces, and is verified
        pytest.param([90, 120, 120], 2, 120, id="above"),
        pytest.param([300, 120, 120], 2, 120, id="above-and-the-first-too"),
        pytest.param([90, 120], 2, 120, id="as-the-third-begins"),
        pytest.param([120], None, 0, id="one-step"),
        pytest.param([90, 0, 100, 100], None, 0, id="evaluated-before"),
        pytest.param([90, 100, 0, 100, 100], None, 0, id="evaluated-between"),
        pytest.param([90, 100, 0, 120, 120], 3, 120, id="evaluated-between-and-above"),
    ],
)
def test_a_step_above_the_prediction_is_told_of_once(peaks: list[int], step: int | None, found: int) -> None:
    said = said_of(peaks, Counted())
    assert len(said) == (step is not None)
    for each in said:
        assert each.startswith(f"step {step} took {found}.00 MiB, and the plan predicted 100.00 MiB, 20.00 MiB less")
        assert "the budget is 110.00 MiB" in each


def test_the_allocators_peak_is_reset_only_where_it_hides_the_second_steps() -> None:
    low, high = Counted(), Counted()
    said_of([90, 100, 100], low)
    said_of([300, 100, 100], high)
    assert (low.resets, high.resets) == (0, 1)


def test_micro_batches_are_no_steps() -> None:
    accumulated = plan(**TrainingLoop(accumulation=3).to_json())
    assert accumulated.about["accumulation"] == 3
    assert not said_of([90, 90, 90, 100, 100, 100], Counted(), accumulated)
    assert said_of([90, 90, 90, 100, 100, 120], Counted(), accumulated)
    assert not said_of([90, 90, 120], Counted(), accumulated)


def test_it_says_what_differs() -> None:
    (said,) = said_of([90, 120], Counted(there=55 * MIB))
    assert "55.00 MiB were there as it began, planned 40.00 MiB" in said
    (said,) = said_of([90, 120], Counted(), plan(versions={"torch": "2.0"}))
    assert f"torch {torch.__version__}, planned 2.0" in said
    (said,) = said_of([90, 120], Counted())
    assert "`remat.validate` measures the step by itself" in said


@pytest.mark.parametrize("verify_first_step", [False, True])
def test_training_tells_of_it(verify_first_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(peak=120 * MIB)
    model: nn.Module = apply(TRANSFORMER.build(), plan(), verify_first_step=verify_first_step)
    monkeypatch.setattr(planned_forward(model).second_step, "_counter_for", lambda model, plan: counted)
    monkeypatch.setattr(counted, "reset", lambda: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            TRANSFORMER.step(model, TRANSFORMER.batch(4, 8)).backward()
            model.zero_grad()
    found = [each for each in told if "the plan predicted" in str(each.message)]
    assert len(found) == verify_first_step
    assert all(each.filename.endswith(("test_second_step.py", "toys.py")) for each in found)


def test_a_plan_for_the_cpu_is_not_compared() -> None:
    watched = SecondStep(TRANSFORMER.build(), plan_for(TRANSFORMER), is_on=True)
    assert not any(watched.begins() for _ in range(3)) and not watched._is_on


def test_warnings_can_be_left_out_by_the_module_of_the_script() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn("one")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        warn("another")
    assert [str(each.message) for each in told] == ["one"]
    assert told[0].filename == __file__
