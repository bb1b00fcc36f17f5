"""Settings of remat in axolotl's YAML, read or refused by name; and its plugin, if axolotl is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from remat.errors import UsageError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from remat.integrations.axolotl_settings import PLUGIN, asks_for_a_plan, callback_of, refuse

OURS: dict[str, Any] = {"plugins": [PLUGIN]}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param({}, "exactly one of the two", id="neither"),
        pytest.param({"remat_budget": "1GiB", "remat_plan": "a.plan.json"}, "exactly one of the two", id="both"),
        pytest.param({"remat_plan": "a.plan.json", "remat_exact": True}, "remat_exact goes with", id="exact-plan"),
        pytest.param(
            {"remat_budget": "1GiB", "activation_offloading": "hidden_states"},
            "`activation_offloading: hidden_states` cannot go with a plan: it moves what the plan would count",
            id="activations",
        ),
        pytest.param(
            {"remat_plan": "a.plan.json", "gradient_checkpointing": "offload"},
            "`gradient_checkpointing: offload` cannot go with a plan",
            id="activations-by-their-old-name",
        ),
        pytest.param(
            {"remat_budget": "1GiB", "layer_offloading": True}, "`layer_offloading: true` cannot", id="layers"
        ),
        pytest.param({"remat_plan": "a.plan.json", "deepspeed": "zero3.json"}, "`deepspeed: zero3.json`", id="engine"),
        pytest.param(
            {"remat_budget": "1GiB", "fsdp_config": {"reshard_after_forward": True}},
            "`fsdp_config` shards the states of training.*give that as remat_plan",
            id="sharded",
        ),
    ],
)
def test_what_cannot_go_with_a_plan_is_refused_before_a_model_is_loaded(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse(OURS | keys)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"remat_budget": "1GiB", "gradient_checkpointing": True}, id="checkpointing-gives-way"),
        pytest.param({"remat_budget": "1GiB", "activation_offloading": False}, id="off"),
        pytest.param({"remat_plan": "a.plan.json", "fsdp_config": {"a": 1}}, id="a-plan-may-be-of-shards"),
        pytest.param({"plugins": ["another.Plugin"], "deepspeed": "zero3.json"}, id="a-later-run-without-the-plugin"),
    ],
)
def test_what_can_go_with_a_plan_is_let_be(keys: dict[str, Any]) -> None:
    refuse(OURS | keys)


def test_a_budget_and_whether_losses_stay_whole_reach_the_callback() -> None:
    made = callback_of({"remat_budget": "1GiB", "remat_exact": True})
    assert (made._budget, made._options, made.plan) == ("1GiB", {"exact": True}, None)
    assert callback_of({"remat_budget": "1GiB", "remat_exact": None})._options == {}
    assert not asks_for_a_plan({"plugins": ["another.Plugin"], "remat_budget": None})


def test_a_file_that_is_no_plan_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.plan\.json"):
        callback_of({"remat_plan": str(tmp_path / "nothing.plan.json")})


def test_axolotl_finds_the_plugin_and_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = pytest.importorskip("axolotl.integrations.base")
        config = pytest.importorskip("axolotl.integrations.config")
        monkeypatch.setattr(base.PluginManager, "_instance", None)
        manager = base.PluginManager.get_instance()
        manager.register(PLUGIN)
        merged = config.merge_input_args()[1]
    assert merged.model_fields.keys() >= {"remat_budget", "remat_plan", "remat_exact"}
    plugin = manager.plugins[PLUGIN]
    with pytest.raises(UsageError, match="exactly one of the two"):
        plugin.register(OURS)
    (callback,) = manager.add_callbacks_pre_trainer({"remat_budget": "1GiB"}, None)
    assert callback._budget == "1GiB"
    assert manager.add_callbacks_pre_trainer({}, None) == []
