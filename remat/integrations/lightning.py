"""A plan in the Trainer of Lightning.

    Trainer(callbacks=[RematCallback("net.plan.json", module="net")], ...)

Lightning sets autocast around `training_step` and wraps the LightningModule, never what it holds, so any moment before
the first step is early enough. `setup` is the first; a module that is only made in `configure_model`, as for sharded
training, is not there yet, and gets its plan in `on_fit_start`.

The package is installed under two names, `lightning` and `pytorch_lightning`, whose classes are not each other's.
The callback belongs to the one that is imported already, by preference the first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.errors import UsageError
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.execution.reports import OnLarger
from remat.integrations.settings import (
    optimizer_as_planned,
    require_autocast,
    require_no_clipping,
    warn_of_accumulation,
)

NAMES = ("lightning.pytorch", "pytorch_lightning")
AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


def _library() -> Any:
    present = [name for name in NAMES if name in sys.modules]
    installed = [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not present + installed:
        raise ModuleNotFoundError("Lightning is not installed: pip install lightning", name="lightning")
    return importlib.import_module((present + installed)[0])


if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = _library().Callback


class RematCallback(Callback):
    """Applies `plan` to the module at path `module` of the LightningModule, "" for itself.

    It must be the one that the Workload builds: whose forward `training_step` calls. See `remat.apply` for `on_larger`
    and `verify_first_step`.

    Automatic optimization keeps the last step's gradients in forward. Where nothing is accumulated, and the module has
    no `optimizer_zero_grad` of its own, they are let go of as a batch begins, before Lightning would set them to None.

    Raises UsageError if there is no such module, PlanMismatch if `precision` is not the plan's.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        module: str,
        on_larger: OnLarger = "warn",
        verify_first_step: bool = True,
    ):
        self.plan = Plan.of(plan)
        self.module = module
        self.on_larger, self.verify_first_step = on_larger, verify_first_step
        self._planned: nn.Module | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        if stage != "fit":
            return
        precision = str(trainer.precision)
        require_autocast(self.plan, AUTOCAST.get(precision), f"Trainer(precision={precision!r})")
        warn_of_accumulation(self.plan, trainer.accumulate_grad_batches, "the Trainer")
        if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
            require_no_clipping(self.plan, f"Trainer(gradient_clip_val={trainer.gradient_clip_val})")
        self._planned = None
        if self._find(pl_module) is not None:
            self._apply(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if self._planned is None or self._planned is not self._find(pl_module):
            self._apply(pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for optimizer in trainer.optimizers:
            optimizer_as_planned(self.plan, optimizer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        hook = _library().LightningModule.optimizer_zero_grad
        if type(pl_module).optimizer_zero_grad is not hook:  # the module decides when
            return
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches == 1:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def _apply(self, pl_module: nn.Module) -> None:
        found = self._find(pl_module)
        if found is None:
            raise UsageError(
                f"{type(pl_module).__name__} has no module {self.module!r} to apply the plan to; "
                "name the one that the plan's workload builds with RematCallback(plan, module=...)."
            )
        options: dict[str, Any] = {"on_larger": self.on_larger, "verify_first_step": self.verify_first_step}
        self._planned = apply(found, self.plan, **options)

    def _find(self, pl_module: nn.Module) -> nn.Module | None:
        found: Any = pl_module
        for name in filter(None, self.module.split(".")):
            found = getattr(found, name, None)
        return found if isinstance(found, nn.Module) else None
