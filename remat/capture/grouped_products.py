"""Grouped products on fake tensors, of every floating type that their kernels take.

`torch.nn.functional.grouped_mm` multiplies rows by the expert that they belong to. Its kernels take float32, float16
and bfloat16; torch's shape function for fake tensors still asks for bfloat16 (torch 2.13, `_meta_grouped_mm_common`
in `torch/_meta_registrations.py`). Mixtures of experts in float32, autocast or not, could not be captured with the
kernel that their eager step runs. While this context is open the shape function takes what the kernels take.

Registering a shape function of our own was rejected: it would stay for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat._torch.recording import shape_of_grouped_products
from remat.shared import Shared

_DTYPES = (torch.float32, torch.float16)


def _shape(
    original: Callable[..., Any],
    make: Callable[..., Any],
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    scaled = any(kwargs.get(name) is not None for name in ("scale_a", "scale_b"))
    plain = kwargs.get("bias") is None and kwargs.get("out_dtype") in (None, mat_a.dtype)
    if args or scaled or not plain or mat_a.dtype not in _DTYPES or mat_a.dtype != mat_b.dtype:
        return original(mat_a, mat_b, *args, **kwargs)
    return make(mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype"))


# Lets fake tensors of all of `_DTYPES` be multiplied in groups; does nothing where this torch has no such check.
grouped_products = Shared(lambda: shape_of_grouped_products(_shape))
