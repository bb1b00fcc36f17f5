"""Read from an operator's schema whether its results are new memory, views of an argument, or written in place.

Everyone who asks, asks here. "Is every return a tensor?" is the wrong question: flash and cuDNN attention return two
integers beside their tensors. Where a schema can be wrong (`aten._unsafe_view` returns its argument's storage and does
not say so), look at the tensors instead, as `saving.py` and `tracker.py` do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx


def _holds_tensor(returned: Any) -> bool:
    return "Tensor" in str(returned.type)  # Tensor, Tensor?, Tensor[], Tensor?[]


@functools.cache
def makes_nothing(func: Any) -> bool:
    """Return whether `func` neither writes nor makes a tensor: it returns views of arguments, or numbers."""
    schema = func._schema
    tensors = [returned for returned in schema.returns if _holds_tensor(returned)]
    return not schema.is_mutable and all(returned.alias_info is not None for returned in tensors)


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether `func` returns only views of arguments, and writes nothing."""
    return makes_nothing(func) and any(map(_holds_tensor, func._schema.returns))


_GIVES_OTHER_MEMORY = {"aten::resize_", "aten::resize_as_", "aten::set_"}


@functools.cache
def relabels(func: Any) -> bool:
    """Return whether `func` is a view in place, as `as_strided_` and `t_` are: sizes and strides change, not data."""
    return torch.Tag.inplace_view in func.tags and func._schema.name not in _GIVES_OTHER_MEMORY


def calls_view(node: fx.Node) -> bool:
    """Return whether a node of a traced graph calls a view operator."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the arguments that `func` writes to: `self` of an in-place operator, `out`, tensors in lists."""
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else (kwargs or {}).get(name)
        yield from tensors_of((value,), {})


def tensors_of(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operator, in order; schemas have no deeper lists than this."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (leaf for leaf in value if isinstance(leaf, torch.Tensor))


@functools.cache
def is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class Traits(NamedTuple):
    """Properties of an operator that a saved node needs; computed once."""

    makes_nothing: bool
    relabels: bool
    writes: bool
    returns: bool
    is_seeded: bool


@functools.cache
def traits_of(func: Any) -> Traits:
    schema = func._schema
    return Traits(makes_nothing(func), relabels(func), schema.is_mutable, bool(schema.returns), is_seeded(func))


def draws_random_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this call of `func` advances the generator; attention without dropout does not."""
    if not is_seeded(func):
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True
