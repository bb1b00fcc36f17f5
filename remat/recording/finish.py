"""The part of a training step after backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from remat.errors import UsageError
from remat.host.copies import Copies
from remat.host.optimizer_state import OffloadedState
from remat.host.step_in_backward import StepInBackward, stepping_of
from remat.workload.any_optimizer import AnyOptimizer, Closure
from remat.workload.training_loop import TrainingLoop

LARGEST_NORM = 1.0  # of gradients that are clipped; any number takes the same memory
EMA_DECAY = 0.999  # likewise


class Finish:
    """Clipping, the optimizer, the running average, freeing gradients.

    again      runs forward and backward once more, and returns the loss: for optimizers that ask for it
    copies     copies the optimizer's state to the host and back; chosen for the device by default
    averages   the running average's tensors, parameters first; none before the first step
    offloaded  the optimizer's state, if the loop has it on the host
    stepping   the optimizer's stepping in backward, if the loop asks for it
    """

    def __init__(
        self,
        loop: TrainingLoop,
        model: nn.Module,
        optimizer: AnyOptimizer,
        again: Closure,
        copies: Copies | None = None,
    ):
        self.loop, self.model, self.optimizer, self._again = loop, model, optimizer, again
        self.averages: list[torch.Tensor] = []
        self.offloaded: OffloadedState | None = None
        if optimizer.steppers and loop.offload_optimizer:
            self.offloaded = OffloadedState(optimizer.made, copies)
        self.stepping: StepInBackward | None = stepping_of(optimizer.alone)
        if self.stepping is not None and not loop.step_in_backward:
            raise UsageError("the optimizer steps in backward: plan with `TrainingLoop(step_in_backward=True)`.")
        if optimizer.steppers and loop.step_in_backward and self.stepping is None:
            self.stepping = StepInBackward(optimizer.made)

    @property
    def state(self) -> list[Any]:
        """The optimizer's state on the device."""
        if self.offloaded is not None:
            return self.offloaded.on_device()
        return self.optimizer.state

    def let_go(self) -> None:
        """Remove the hooks of this optimizer, since another one takes over."""
        if self.stepping is not None:
            self.stepping.let_go()

    def __call__(self) -> None:
        if self.loop.clip_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step(self._again)
        if self.loop.ema:
            self._update_averages()
        if not self.loop.accumulates:
            self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _update_averages(self) -> None:
        current = [p.detach() for p in self.model.parameters()]
        if not self.averages:
            self.averages = [tensor.clone() for tensor in (*current, *self.model.buffers())]
        get_ema_multi_avg_fn(EMA_DECAY)(self.averages[: len(current)], current, 1)
