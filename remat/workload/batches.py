"""The tensors of a batch, in tuples, lists and dicts, and in objects with attributes.

torch's trees know tuples, lists and dicts. Batches are also dataclasses, objects of a user's own, and mappings of a
library (`transformers.BatchEncoding`), whose tensors take memory like others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from remat._torch.training import give_version, is_wrapper, without_modes
from remat.workload.held_outputs import DEEPEST, fields_of, output_tensors


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
    return _in_copies(batch, lambda tensor: there.get(id(tensor), tensor))


def in_own_containers(given: Any) -> Any:
    """Return the same tensors in copies of their containers, which a step or a forward may write into.

    A container of a kind that cannot be copied stays.
    """
    return _in_copies(given, lambda tensor: tensor)


def _in_copies(given: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `given` in copies of its containers, with `of(tensor)` for each tensor."""

    def copied(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return of(value)
        if depth == DEEPEST or isinstance(value, (nn.Module, type)):
            return value
        inside = functools.partial(copied, depth=depth + 1)
        attributes = fields_of(value)
        if not isinstance(value, MutableMapping) and not tensors_of(attributes):
            return value
        try:
            container = copy.copy(value)
        except Exception:
            return value
        if isinstance(value, dict):
            container.update({key: tree_map(inside, inner) for key, inner in value.items()})
            return container
        own = getattr(container, "__dict__", {})
        for name, inner in attributes.items():
            if name in own:
                own[name] = tree_map(inside, inner)
            else:
                object.__setattr__(container, name, tree_map(inside, inner))  # in a slot, of a frozen dataclass too
        return container

    return tree_map(copied, given)


class Anew:
    """A batch, or the arguments of a forward, for several runs: each gets them as they were before the first.

    A step may take entries out of its batch, and a forward may write into its arguments. A loop has a new batch for
    every step; runs of one batch have to see the same. So each gets containers of its own, and tensors put back.
    """

    def __init__(self, given: Any):
        self._given = given
        tensors = {id(t): t for t in tensors_of(given) if not is_wrapper(t) and not t.is_inference()}
        with without_modes():
            self._were = [(t, t._version, t.requires_grad, _gradient_of(t), self._kept(t)) for t in tensors.values()]

    def for_a_run(self) -> Any:
        """Return what the next run gets; what the run before has changed is put back."""
        self.put_back()
        return in_own_containers(self._given)

    def put_back(self) -> None:
        """Give the tensors the values, flags and gradients that they had."""
        with torch.no_grad(), without_modes():
            for tensor, version, learns, gradient, kept in self._were:
                if tensor.requires_grad and not learns:
                    _learn_no_more(tensor)
                if tensor.is_leaf and tensor.grad is not gradient:
                    tensor.grad = gradient
                if tensor._version != version:
                    self._restore(tensor, kept)
                    give_version(tensor, version)

    def _kept(self, tensor: torch.Tensor) -> Any:
        """Return what restores the values of `tensor`."""
        return tensor.detach().to("cpu", copy=True)

    def _restore(self, tensor: torch.Tensor, kept: Any) -> None:
        tensor.copy_(kept)


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _learn_no_more(tensor: torch.Tensor) -> None:
    """Let a tensor require no gradient, in place."""
    if tensor.is_leaf:
        tensor.grad = None
        tensor.requires_grad_(False)
    elif not tensor._is_view():  # torch detaches no view in place
        tensor.detach_()
