"""Hugging Face models beyond the registry, tiny, from their configurations: planned, applied, equal bit by bit.

Three of the cheapest; all of them are in `python -m benchmarks architectures`. That planning leaves no trace holds for
all.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

import remat
from tests.fingerprints import left_by

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")
architectures: Any = importlib.import_module("benchmarks.architectures")


@pytest.mark.exhaustive
@pytest.mark.often("OPTForCausalLM")
@pytest.mark.parametrize("name", ["OPTForCausalLM", "AlbertForMaskedLM", "DistilBertForMaskedLM"])
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_model_from_its_configuration_trains_under_a_tight_budget_as_without(name: str) -> None:
    (found,) = [each for each in architectures.ALL if each.model == name]
    row = architectures.verdict(architectures.workload_of(found))
    assert (row["failure"], row["equal"]) == ("", True)
    assert row["regions"] > 0 and row["predicted_mib"] <= row["budget_mib"] < row["without_mib"]


@pytest.mark.often("OPTForCausalLM")
@pytest.mark.parametrize("name", [each.model for each in architectures.ALL])
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_profiling_planning_and_applying_leave_no_trace_in_a_model(name: str) -> None:
    (found,) = [each for each in architectures.ALL if each.model == name]
    workload = architectures.workload_of(found)
    torch.manual_seed(0)
    model = workload.build().train()
    own = dataclasses.replace(workload, build=lambda: model)

    def planned() -> None:
        try:
            profile = remat.profile(own, target="h100-80gb")
            plan = remat.plan(own, target="h100-80gb", budget=profile.peak_without_checkpointing + 1, exact=True)
        except remat.RematError:  # as the table of architectures says
            return
        remat.apply(model, plan)

    assert left_by(model, planned) == {}
