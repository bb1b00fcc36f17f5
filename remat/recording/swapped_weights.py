"""Swapped weights: parameters and buffers that a forward gives another storage.

`target.data = target.data * m + weight.data * (1 - m)` makes a tensor and frees the one that was there. So does
`self.average = ...` with a buffer. Both exist for a while within a step, and one of them between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.capture.kept_tensors import strided_parts


class Weights:
    """The storages of a model's parameters and buffers at the moment of construction; it keeps none alive."""

    def __init__(self, model: nn.Module):
        self._were = _references(model)

    def swapped(self, model: nn.Module) -> frozenset[str]:
        """Return the names of those that have another storage now."""
        now = _references(model)
        return frozenset(name for name, were in self._were.items() if name in now and _keys(now[name]) != _keys(were))


def _references(model: nn.Module) -> dict[str, list[StorageWeakRef]]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: [StorageWeakRef(part.untyped_storage()) for part in strided_parts(tensor)] for name, tensor in named}


def _keys(references: list[StorageWeakRef]) -> list[int]:
    return [reference.cdata for reference in references]


def parts_of(model: nn.Module, names: Collection[str]) -> list[torch.Tensor]:
    """List the strided tensors that the parameters and buffers of these names consist of."""
    named = itertools.chain(model.named_parameters(), model.named_buffers()) if names else ()
    return [part for name, tensor in named if name in names for part in strided_parts(tensor)]
