"""Copies of fake tensors: `copy.deepcopy(module)` in a step, as a target network is made in a first forward.

torch copies what a tensor has among its attributes too. A fake tensor has its mode there, and a copy of the mode is
another, whose tensors do not mix with those of the step.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from remat._torch.recording import untraced
from remat.shared import Shared


@untraced
def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # says why not
    made = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    for name in vars(tensor).keys() - vars(made).keys():
        setattr(made, name, copy.deepcopy(vars(tensor)[name], memo))
    return made


copied_fakes = Shared(lambda: mock.patch.object(FakeTensor, "__deepcopy__", _copied, create=True))
