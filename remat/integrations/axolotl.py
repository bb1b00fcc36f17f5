"""A plan in axolotl, by two lines of its YAML.

    plugins: [remat.integrations.axolotl.RematPlugin]
    remat_budget: 20GiB        # or remat_plan: FILE; remat_exact: true leaves losses whole

axolotl trains with a Trainer of transformers or TRL, so the plugin hands it the callback of `transformers.py`. It does
so before the Trainer is built: a callback that is added later is not told that it was.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from remat.integrations.axolotl_settings import RematArgs, asks_for_a_plan, callback_of, refuse
from remat.integrations.transformers import RematCallback

__all__ = ["RematArgs", "RematPlugin"]


class RematPlugin(BasePlugin):
    """Trains with a plan for `remat_budget`, or with the plan in the file `remat_plan`.

    Raises UsageError if the YAML asks for something that a plan excludes; later what `RematCallback` raises.
    """

    def register(self, cfg: dict[str, Any]) -> None:
        refuse(cfg)

    def get_input_args(self) -> str:
        return f"{RematArgs.__module__}.{RematArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[RematCallback]:
        return [callback_of(cfg)] if asks_for_a_plan(cfg) else []
