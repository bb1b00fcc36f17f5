"""Fakes of a recorded step: torch's own, with a quicker key to torch's memory of results.

torch remembers which fakes an operator makes of which arguments. A step on fakes asks for that hundreds of thousands of
times, and half of the time goes into the description of the arguments. Here plain tensors and numbers, which are nearly
all that a step has, are described at once; everything else is described by torch. As of torch 2.13
(`FakeTensorMode._cache_key`); `tests/test_step_fakes.py` compares.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from remat._torch.training import without_modes

_KEY: Any = getattr(fake_tensor, "_DispatchCacheKey", None)  # without it, and without the method, torch's key is used
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class StepFakes(FakeTensorMode):
    """The mode of a recorded step's fakes; compilers trace with modes of their own."""

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        around = (torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled())
        values: list[Any] = [StepFakes, func, *around]
        named = (*kwargs, *kwargs.values())
        if _KEY is None or self.shape_env is not None or get_proxy_mode() is not None:
            return super()._cache_key(state, func, args, kwargs)
        if not self._describe(values, args) or not self._describe(values, named):
            return super()._cache_key(state, func, args, kwargs)
        return _KEY(tuple(values))

    def _describe(self, values: list[Any], given: Any) -> bool:
        """Append to `values` all that a result depends on; return False if one of `given` is not plain."""
        values.append(len(given))
        for each in given:
            kind = type(each)
            if kind is FakeTensor:
                if each.fake_mode is not self or each.constant is not None or each.layout is not torch.strided:
                    return False
                values += (
                    each.dtype,
                    each.shape,
                    each.stride(),
                    each.storage_offset(),
                    each.untyped_storage().nbytes(),
                    each.fake_device,
                    each.requires_grad,
                    each.is_quantized,
                    each.is_conj(),
                    each.is_neg(),
                    each.is_inference(),
                )
            elif kind in _PLAIN:
                values += (kind, each)
            elif kind is list or kind is tuple:
                values.append(kind)
                if not self._describe(values, each):
                    return False
            else:
                return False
        return True


@functools.cache
def names_of_fakes() -> frozenset[str]:
    """Return the attributes that torch gives every fake tensor, or a parameter that is one."""
    with without_modes(), FakeTensorMode():
        return frozenset(vars(torch.nn.Parameter(torch.empty(1, device="cpu"))))
