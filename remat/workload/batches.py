"""The tensors of a batch, in tuples, lists and dicts, and in objects with attributes.

torch's trees know tuples, lists and dicts. Batches are also dataclasses, objects of a user's own, and mappings of a
library (`transformers.BatchEncoding`), whose tensors take memory like others.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from remat.workload.held_outputs import DEEPEST, output_tensors


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a batch."""
    return [tensor for leaf in tree_leaves(batch) for _, tensor in output_tensors(leaf)]


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with the tensors of `tensors_of` on `device`, in containers of their own; or itself, if all are.

    A container of a kind that cannot be copied stays, with its tensors where they are.
    """
    found = {id(tensor): tensor for tensor in tensors_of(batch)}
    if all(tensor.device == device for tensor in found.values()):
        return batch
    there = {key: tensor.to(device) for key, tensor in found.items()}

    def moved(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return there.get(id(value), value)
        if depth == DEEPEST or isinstance(value, (nn.Module, type)):
            return value
        inside = functools.partial(moved, depth=depth + 1)
        if isinstance(value, dict):
            container = copy.copy(value)
            container.update({key: tree_map(inside, inner) for key, inner in value.items()})
        elif hasattr(value, "__dict__"):
            container = copy.copy(value)
            vars(container).update({name: tree_map(inside, inner) for name, inner in vars(value).items()})
        else:
            return value
        return container

    return tree_map(moved, batch)
