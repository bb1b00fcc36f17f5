"""The tensors of a batch, in whichever containers a step takes them.

torch's trees know tuples, lists and dicts. Batches are also dataclasses, objects of a user's own, and mappings of a
library (`transformers.BatchEncoding`), whose tensors take memory like others.
"""

from __future__ import annotations

import copy
import types
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from remat.workload.held_outputs import output_tensors

_NO_CONTAINERS = (nn.Module, type, types.FunctionType, types.ModuleType, torch.Generator)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a batch."""
    return [tensor for leaf in tree_leaves(batch) for _, tensor in output_tensors(leaf)]


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on `device`; what is there already is not copied."""
    if all(tensor.device == device for tensor in tensors_of(batch)):
        return batch

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, _NO_CONTAINERS) or not (isinstance(value, MutableMapping) or hasattr(value, "__dict__")):
            return value
        container = copy.copy(value)
        if isinstance(container, MutableMapping):
            container.update({key: tree_map(moved, inner) for key, inner in value.items()})
        else:
            vars(container).update({name: tree_map(moved, inner) for name, inner in vars(value).items()})
        return container

    return tree_map(moved, batch)
