"""Traffic: the bytes that one operator's kernel has to read and write at least.

A tensor that is read counts once, one that is written once more, be it new or changed in place. Some operators are
handed tensors of which they read little or nothing; they have a rule each:

Rule 1  Look-ups (`embedding`, `gather`, `index`, ...) read of their table what they give back.
Rule 2  The loss of class indices reads one score a row, its gradient none: it is a write of zeros and one number a row.
Rule 3  What only overwrites (`zero_`, `fill_`, `copy_`, random numbers) does not read what it overwrites.
Rule 4  What only allocates (`empty`, ...) moves nothing; what fills what it makes (`zeros_like`, ...) reads nothing.
Rule 5  Scattering in place reads and writes as much of its target as it is given.
Rule 6  A fused kernel reads and writes what the compiler says of its loops.

What a kernel reads again because its caches are too small is no traffic of the operator; `roofline.py` knows of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from remat.capture import schemas
from remat.fusion.kernels import FUSED_KERNEL, kernel

aten = torch.ops.aten

_LOOKUPS = {aten.embedding, aten.gather, aten.index, aten.index_select, aten._unsafe_index}  # Rule 1
_PICKING = {aten.nll_loss_forward, aten.nll_loss2d_forward}  # Rule 2
_PLACING = {aten.nll_loss_backward, aten.nll_loss2d_backward}  # Rule 2
_OVERWRITING = {
    aten.zero_,
    aten.fill_,
    aten.copy_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
    aten.exponential_,
    aten.log_normal_,
    aten.cauchy_,
    aten.geometric_,
}  # Rule 3
_ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}  # Rule 4
_FILLING = {
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}  # Rule 4
_SCATTERING = {aten.index_put_, aten._index_put_impl_, aten.index_add_, aten.scatter_, aten.scatter_add_}  # Rule 5


def moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that one call of `func` with result `out` reads and writes."""
    packet = func._overloadpacket
    if func is FUSED_KERNEL:
        return kernel(args[0]).moved_bytes
    if packet in _ALLOCATING:
        return 0
    changed = _tensors(tuple(schemas.written(func, args, kwargs)))
    read, old = _tensors((args, kwargs)), {id(tensor) for tensor in changed}
    written = [*changed, *(tensor for tensor in _tensors(out) if id(tensor) not in old)]
    if packet in _FILLING:
        return _total(written)
    if packet in _LOOKUPS:
        return _total(read[1:]) + 2 * _total(written)
    if packet in _PICKING:
        return _total(read[1:]) + _total(read[1:2]) // read[1].element_size() * read[0].element_size() + _total(written)
    if packet in _PLACING:
        return _total(read[2:]) + _total(written)
    if packet in _SCATTERING:
        given = [tensor for tensor in read if id(tensor) not in old]
        return _total(given) + 2 * max((_size(t) for t in given if t.is_floating_point()), default=0)
    if packet in _OVERWRITING:
        read = [tensor for tensor in read if id(tensor) not in old]
    return _total(read) + _total(written)


def workspace_bytes(func: Any, args: Any) -> int:
    """Return the bytes that a fused kernel allocates beyond its results, by its compiler; 0 for other operators."""
    return kernel(args[0]).workspace_bytes if func is FUSED_KERNEL else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    """List every tensor in `values` once."""
    return list({id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}.values())


def _size(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(map(_size, tensors))
