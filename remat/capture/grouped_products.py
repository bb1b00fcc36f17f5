"""Grouped products on fake tensors, of every floating type that their kernels take.

`torch.nn.functional.grouped_mm` multiplies rows by the expert that they belong to. Its kernels take float32, float16
and bfloat16; torch's shape function for fake tensors still asks for bfloat16 (torch 2.13, `_meta_grouped_mm_common`
in `torch/_meta_registrations.py`). Mixtures of experts in float32, autocast or not, could not be captured with the
kernel that their eager step runs. While this context is open the shape function takes what the kernels take.

Registering a shape function of our own was rejected: it would stay for the life of the process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SHAPES: Any = torch._meta_registrations
_ASKS, _MAKES = "_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"
_TAKEN = (torch.float32, torch.float16)

_lock = threading.Lock()
_open = 0
_original: Callable[..., Any] | None = None


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Let fake tensors of all of `_TAKEN` be multiplied in groups; does nothing where this torch has no such check."""
    global _open, _original
    if not (hasattr(_SHAPES, _ASKS) and hasattr(_SHAPES, _MAKES)):
        yield
        return
    with _lock:
        if _open == 0:
            _original = getattr(_SHAPES, _ASKS)
            setattr(_SHAPES, _ASKS, _shape)
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                setattr(_SHAPES, _ASKS, _original)


def _shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    scaled = any(kwargs.get(name) is not None for name in ("scale_a", "scale_b"))
    plain = kwargs.get("bias") is None and kwargs.get("out_dtype") in (None, mat_a.dtype)
    if args or scaled or not plain or mat_a.dtype not in _TAKEN or mat_a.dtype != mat_b.dtype:
        assert _original is not None
        return _original(mat_a, mat_b, *args, **kwargs)
    return getattr(_SHAPES, _MAKES)(mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype"))
