"""Read the settings of remat in axolotl's YAML and refuse those that cannot go with a plan; needs no axolotl.

What moves or shards what a plan counts is refused when the plugin is registered, before a model is loaded. All else is
left to `RematCallback`, which sees the Trainer that axolotl built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from remat.errors import UsageError
from remat.integrations.transformers import RematCallback

PLUGIN = "remat.integrations.axolotl.RematPlugin"


class RematArgs(BaseModel):
    """The keys that the plugin adds to axolotl's YAML."""

    remat_budget: str | None = None  # such as 20GiB: plan the Trainer's own step when training begins
    remat_plan: str | None = None  # a file: apply a plan that was made before
    remat_exact: bool | None = None  # with a budget: leave every loss whole, and so bitwise


def asks_for_a_plan(cfg: Mapping[str, Any]) -> bool:
    """Return whether `cfg` asks for a plan: axolotl keeps plugins for later runs of a process, which may not."""
    return bool(cfg.get("remat_budget") or cfg.get("remat_plan"))


def refuse(cfg: Mapping[str, Any]) -> None:
    """Raise UsageError for a YAML, as it was written, that a plan excludes."""
    if PLUGIN not in (cfg.get("plugins") or ()):
        return
    if bool(cfg.get("remat_budget")) == bool(cfg.get("remat_plan")):
        raise UsageError(
            "the plugin of remat takes `remat_budget: 20GiB`, to plan when training begins, or `remat_plan: FILE`, a "
            "plan that was made: exactly one of the two."
        )
    if cfg.get("remat_plan") and cfg.get("remat_exact") is not None:
        raise UsageError("remat_exact goes with remat_budget, and not with a plan that was made.")
    for key, why in REFUSED.items():
        if (value := cfg.get(key)) and (key not in VALUES or value in VALUES[key]):
            raise UsageError(f"`{key}: {_short(value)}` cannot go with a plan: {why}.")
    if cfg.get("remat_budget") and (shards := [name for name in SHARDS if cfg.get(name)]):
        raise UsageError(
            f"`{shards[0]}` shards the states of training, and a plan from the Trainer itself does not: plan with a "
            "Workload and `loop=TrainingLoop(ranks=..., shard=...)`, and give that as remat_plan."
        )


REFUSED = {
    "activation_offloading": "it moves what the plan would count to the host; leave it out",
    "gradient_checkpointing": "it moves what the plan would count to the host; leave it out",
    "layer_offloading": "it moves weights that the plan counts to the host; leave it out",
    "deepspeed": "DeepSpeed's engine takes the model's forward and parameters away from it",
}
VALUES = {"gradient_checkpointing": ("offload", "offload_disk")}  # the plan overrides others
SHARDS = ("fsdp", "fsdp_config")


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else "..."


def callback_of(cfg: Mapping[str, Any]) -> RematCallback:
    """Make the callback that `cfg` asks for."""
    if plan := cfg.get("remat_plan"):
        return RematCallback(plan)
    options: dict[str, Any] = {"exact": True} if cfg.get("remat_exact") else {}
    return RematCallback(budget=cfg["remat_budget"], **options)
