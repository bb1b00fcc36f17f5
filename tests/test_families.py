"""Hugging Face models beyond the registry, tiny, from their configurations: planned, applied, equal bit by bit.

Three of the cheapest, two of them exhaustive; all of them are in `python -m benchmarks architectures`.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")
architectures: Any = importlib.import_module("benchmarks.architectures")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "OPTForCausalLM",
        "AlbertForMaskedLM",
        "DistilBertForMaskedLM",
    ],
)
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_model_from_its_configuration_trains_under_a_tight_budget_as_without(name: str) -> None:
    (found,) = [each for each in architectures.ALL if each.model == name]
    row = architectures.verdict(architectures.workload_of(found))
    assert (row["failure"], row["equal"]) == ("", True)
    assert row["regions"] > 0 and row["predicted_mib"] <= row["budget_mib"] < row["without_mib"]
