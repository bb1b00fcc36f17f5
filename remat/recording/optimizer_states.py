"""States: what training keeps for every parameter, read off the real optimizer.

One parameter of the wanted size is stepped once on fake tensors; what the optimizer's class then holds is what is
counted, by its own names (`exp_avg`, `momentum_buffer`, `state1`, ...). No table of optimizers, nothing to go out of
date. How ranks share the states is Rajbhandari et al. 2020, table 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from remat.evaluation.sharding import share
from remat.recording.tracker import Tracker
from remat.workload.training_loop import Shard

SMALL_BYTES = 64  # step counters and the like are not worth a name


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of the states of training, on one rank.

    optimizer  by the optimizer's own names of its states
    """

    parameters: int
    gradients: int
    optimizer: dict[str, int]

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + sum(self.optimizer.values())

    def per_rank(self, ranks: int, shard: Shard | None) -> States:
        """Return the states that one of `ranks` keeps, without temporarily gathered ones."""
        of_all = {"zero1": 1, "zero2": 2, "zero3": 3}.get(shard or "", 0)
        return States(
            share(self.parameters, ranks) if of_all >= 3 else self.parameters,
            share(self.gradients, ranks) if of_all >= 2 else self.gradients,
            {name: share(size, ranks) if of_all >= 1 else size for name, size in self.optimizer.items()},
        )


def states_of(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
) -> States:
    """Return the states of parameters of `shapes` and `dtype` after the first step of `optimizer`."""
    tracker = Tracker()
    with FakeTensorMode(), tracker, tracker.answering():
        parameters = [nn.Parameter(torch.empty(*shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        made = optimizer(parameters) if optimizer is not None else None
        if made is not None:
            made.step()
    found: dict[str, int] = {}
    for parameter in parameters if made is not None else ():
        assert made is not None
        for name, value in made.state.get(parameter, {}).items():
            size = sum(tracker.bytes_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
            if size > SMALL_BYTES:
                found[name] = found.get(name, 0) + size
    size = sum(map(tracker.bytes_of, parameters))
    return States(size, sum(tracker.bytes_of(p.grad) for p in parameters if p.grad is not None), found)
