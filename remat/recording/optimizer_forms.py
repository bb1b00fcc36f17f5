"""Forms: which kernels an optimizer and clipping run, chosen by torch itself, for fake tensors as for real ones.

A form is a for-loop over parameters, one call for all of them (foreach, whose temporaries may be a copy of the
parameters) or a fused kernel. Without a request for one, torch decides in the middle of a step, by the device and by
the *type* of the tensors: a subclass of Tensor gets the loop, because it may not know the foreach operators. A
FakeTensor is a subclass, and one that stands for a tensor on a GPU may say that it is on the CPU. So torch's lists
are changed for as long as a fake step runs what comes after backward, and every rule of torch's holds by itself:
optimizers without a foreach form by default, `foreach=False`, `differentiable`, a learning rate that is a tensor,
`capturable`, gradient clipping, averaged models.

Setting `foreach` in the optimizer's groups was rejected: it repeats those rules, and says nothing of clipping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensor

from remat._torch.recording import devices_with_foreach, foreach_takes


@contextlib.contextmanager
def forms_of(device_type: str, fakes_on: str) -> Iterator[None]:
    """Let torch choose for fake tensors on `fakes_on` the kernels that `device_type` gives real ones."""
    told = device_type != fakes_on and device_type in devices_with_foreach()
    with foreach_takes(FakeTensor, fakes_on if told else None):
        yield
