"""Forms: which kernels an optimizer and clipping run, chosen by torch itself, for fake tensors as for real ones.

A form is a for-loop over parameters, one call for all of them (foreach, whose temporaries may be a copy of the
parameters) or a fused kernel. Where nobody asked for one, torch decides in the middle of a step, by the device and by
the *type* of the tensors: a subclass of Tensor gets the loop, because it may not know the foreach operators. A
FakeTensor is a subclass, and one that stands for a tensor on a GPU may say that it lies on the CPU. So torch's lists
are told for as long as a fake step runs what comes after backward, and every rule of torch's holds by itself:
optimizers without a foreach form by default, `foreach=False`, `differentiable`, a learning rate that is a tensor,
`capturable`, gradient clipping, averaged models.

Setting `foreach` in the optimizer's groups was rejected: it repeats those rules, and says nothing of clipping.

What is relied on, in torch 2.11 to 2.13: both lists of types are called `_foreach_supported_types`, and the lists of
devices with foreach, fused and capturable kernels (`torch/utils/_foreach_utils.py`, `torch/optim/optimizer.py`) all
name what `torch._C._get_privateuse1_backend_name()` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils as foreach_utils


@contextlib.contextmanager
def forms_of(device_type: str, fakes_on: str) -> Iterator[None]:
    """While it lasts, torch chooses for fake tensors on `fakes_on` the form that `device_type` gives to real ones."""
    lists: tuple[list[Any], ...] = (optimizers._foreach_supported_types, foreach_utils._foreach_supported_types)
    spare_backend = torch._C._get_privateuse1_backend_name
    for supported in lists:
        supported.append(FakeTensor)
    if device_type != fakes_on and device_type in foreach_utils._get_foreach_kernels_supported_devices():
        torch._C._get_privateuse1_backend_name = lambda: fakes_on
    try:
        yield
    finally:
        torch._C._get_privateuse1_backend_name = spare_backend
        for supported in lists:
            supported.remove(FakeTensor)
