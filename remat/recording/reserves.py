"""Reserves: what a library's forward keeps for its backward, whose size no fake knows.

oneDNN and cuDNN lay the gates of a recurrent layer into memory of their own, several times the layer's result. Autograd
saves it (cuDNN calls it the reserve space, oneDNN the workspace), so it lives as long as an activation. Its size is the
library's secret: torch's fakes make it empty. So the kernel runs once for each kind of call, on zeros of the right
shapes, on the device at hand, and the record takes the size that it gave.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat._torch.training import without_modes
from remat.errors import CaptureError

# Forwards of recurrent layers; of each the fourth result is the reserve.
_RECURRENT_LAYERS = {
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten.miopen_rnn.default,
}
_RESERVE = 3


def with_reserve(func: Any, args: Any, out: Any) -> Any:
    """Give `out` a reserve as large as the real kernel's, if `func` keeps one."""
    if func not in _RECURRENT_LAYERS or not isinstance(out[_RESERVE], FakeTensor):
        return out
    leaves, structure = tree_flatten(args)
    size_bytes = _size_bytes(func, structure, tuple(map(_described, leaves)), torch.is_grad_enabled())
    reserve = out[_RESERVE].new_empty(size_bytes, dtype=torch.uint8)
    return (*out[:_RESERVE], reserve, *out[_RESERVE + 1 :])


def _described(leaf: Any) -> Any:
    """Describe a tensor as (shape, strides, dtype, device); return anything else unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device


@functools.cache
def _size_bytes(func: Any, structure: Any, described: tuple[Any, ...], grad_enabled: bool) -> int:
    with without_modes(), torch.set_grad_enabled(grad_enabled):  # oneDNN asks whether a backward may follow
        try:
            out = func(*tree_unflatten([_made(leaf) for leaf in described], structure))
        except Exception as error:
            raise CaptureError(
                f"{func} keeps memory for its backward whose size only the kernel knows, and the kernel does not run "
                f"here ({error}). Plan on the device that trains, or build the layer of its cells."
            ) from error
    reserve = out[_RESERVE]
    return 0 if reserve is None else int(reserve.untyped_storage().nbytes())


def _made(leaf: Any) -> Any:
    if not isinstance(leaf, tuple):
        return leaf
    shape, strides, dtype, device = leaf
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
