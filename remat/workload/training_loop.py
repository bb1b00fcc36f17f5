"""The loop around a step: what training does besides forward and backward, as far as it takes memory.

A `TrainingLoop` is data: the record (`record.py`) runs what it names for real on fake tensors, sharding
(`sharding.py`) computes what a rank keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from remat.errors import UsageError, require_argument

Shard = Literal["zero1", "zero2", "zero3"]
SHARDS: tuple[Shard, ...] = ("zero1", "zero2", "zero3")
Holds = Literal["loss", "outputs"]
HOLDS: tuple[Holds, ...] = ("loss", "outputs")


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """Everything around forward and backward that takes memory.

    Attributes:
        accumulation: Micro-batches of an optimizer step; with more than one, gradients are alive through forward.
        clip_grad_norm: `torch.nn.utils.clip_grad_norm_` runs before the optimizer.
        ema: The loop keeps a running average of parameters and buffers, as `torch.optim.swa_utils` does.
        ddp: Gradients pass through buckets of DistributedDataParallel, which hold a second copy of them.
        ranks: Number of data-parallel devices, each with its own micro-batch.
        shard: State sharded over ranks (Rajbhandari et al. 2020): "zero1" the optimizer's, "zero2" also gradients,
            "zero3" also parameters (FSDP); None for none.
        offload_optimizer: The optimizer's state is on the host between its steps (`remat.offload_optimizer`).
        step_in_backward: The optimizer steps each parameter in backward (`remat.step_in_backward`).
        weights_on_host: Number of layers whose frozen weights are streamed (`remat.offload_weights`).
        holds: Tensors that the loop keeps until the next forward returns: "loss", with leaves that the step has made,
            or "outputs" of the model too, as in `logits, loss = model(x, y)`.

    Raises:
        UsageError: Two fields contradict each other.

    Example:
        >>> loop = remat.TrainingLoop(accumulation=4, clip_grad_norm=True)
    """

    accumulation: int = 1
    clip_grad_norm: bool = False
    ema: bool = False
    ddp: bool = False
    ranks: int = 1
    shard: Shard | None = None
    offload_optimizer: bool = False
    step_in_backward: bool = False
    weights_on_host: int = 0
    holds: Holds = "loss"

    def __post_init__(self) -> None:
        for name in ("accumulation", "ranks"):
            require_argument(name, getattr(self, name), int, "a whole number")
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.holds not in HOLDS:
            raise UsageError(f"`holds=` is {' or '.join(map(repr, HOLDS))}, not {self.holds!r}.")
        if self.shard is not None and self.shard not in SHARDS:
            raise UsageError(f"shard {self.shard!r} is not known; choose one of {', '.join(SHARDS)}.")
        if self.shard is not None and self.ranks == 1:
            raise UsageError(f'`shard="{self.shard}"` over one rank shares nothing; say how many with `ranks=`.')
        if self.shard is not None and self.offload_optimizer:
            raise UsageError("the optimizer's state is shared by `shard=` already, and cannot be offloaded too.")
        if self.weights_on_host and (self.shard is not None or self.ddp or self.ema):
            raise UsageError(
                "weights cannot be on the host with `shard=`, `ddp=` or `ema=`: these need all of them at once."
            )
        if self.shard is not None and self.ddp:
            raise UsageError(f'`ddp=` and `shard="{self.shard}"` exclude each other: shards have no gradient buckets.')

        if self.step_in_backward and (why := self._needs_all_gradients):
            raise UsageError(f"an optimizer cannot step in backward with {why}; leave one of them out.")

    @property
    def gradients_may_go(self) -> bool:
        """Whether a parameter may be stepped before all gradients exist."""
        return self._needs_all_gradients is None

    @property
    def _needs_all_gradients(self) -> str | None:
        """Why all gradients must exist before the optimizer steps; None if they need not."""
        if self.accumulation > 1:
            return f"`accumulation={self.accumulation}`: gradients of micro-batches are summed before the step"
        if self.clip_grad_norm:
            return "`clip_grad_norm=True`: the norm of all gradients is known when backward has ended"
        if self.ddp or self.shard is not None:
            return f"{'`ddp=True`' if self.ddp else f'`shard={self.shard!r}`'}: ranks sum gradients before the step"
        return None

    @property
    def accumulates(self) -> bool:
        return self.accumulation > 1

    @property
    def holds_outputs(self) -> bool:
        return self.holds == "outputs"

    def to_json(self) -> dict[str, Any]:
        """Return the entries of `Graph.about`: differences from the plain loop, and always the accumulation."""
        plain = TrainingLoop()
        changed = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return {"accumulation": self.accumulation, **changed}

    @staticmethod
    def of(about: dict[str, Any]) -> TrainingLoop:
        """Read the loop in `about` of a graph or plan."""
        names = {field.name for field in dataclasses.fields(TrainingLoop)}
        return TrainingLoop(**{name: value for name, value in about.items() if name in names})


def is_power_of_two(count: int) -> bool:
    """Return whether `count` micro-batches divide a loss without rounding."""
    return not count & (count - 1)


def require_loop(value: Any) -> None:
    """Raise UsageError where `value`, given as `loop`, is no TrainingLoop."""
    require_argument("loop", value, TrainingLoop | None, "a remat.TrainingLoop")
