"""On fakes, what has been written in place is differentiated by the kernels that real tensors take."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_structure

from remat.recording.view_histories import ViewHistories


def _relu_of_a_linear_layer(x: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, torch.ones(3, 4), torch.ones(3))  # a view, for three dimensions
    return torch.relu_(y) + y


def _written_through_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    rows, column = y.transpose(0, 1), y[:, 0]
    rows.mul_(0.5)
    rows.add_(column.clone())
    return rows.sum() * column.sum()


def _base_written(x: Tensor) -> Tensor:
    y = x.cos()
    flat = y.view(-1)
    y[0] = 0.5
    return (flat * 2).exp() + flat


def _written_before_it_is_viewed(x: Tensor) -> Tensor:
    return x.sin().mul_(2).transpose(0, 1)


def _without_gradient(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        flat = y.view(-1)
    y.mul_(2)
    with torch.no_grad():
        return y * flat.max()


class _Kernels(TorchDispatchMode):
    """Operators that allocate or write: which view a gradient is written through takes nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)
        if func.namespace == "aten" and not is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _backward_kernels(function: Callable[[Tensor], Tensor], *contexts: contextlib.AbstractContextManager[Any]) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        y = function(torch.ones(2, 3, 4, requires_grad=True))
        if not y.requires_grad:
            return []
        with _Kernels() as kernels:
            y.sum().backward()
        return kernels.names


FUNCTIONS = [_relu_of_a_linear_layer, _written_through_a_view, _base_written, _written_before_it_is_viewed]


@pytest.mark.parametrize("function", [*FUNCTIONS, _without_gradient])
def test_backward_runs_what_it_runs_on_real_tensors(function: Callable[[Tensor], Tensor]) -> None:
    assert _backward_kernels(function, FakeTensorMode(), ViewHistories()) == _backward_kernels(function)


def test_without_it_a_written_view_is_differentiated_otherwise() -> None:
    """Should torch treat both alike one day, this module can go."""
    fake = _backward_kernels(_relu_of_a_linear_layer, FakeTensorMode())
    assert fake != _backward_kernels(_relu_of_a_linear_layer)


def test_views_are_replaced_wherever_a_call_holds_them() -> None:
    """In tuples, lists, dicts and in what only torch knows to go through; all else stays itself."""
    histories = ViewHistories()
    with FakeTensorMode(), histories:
        base = torch.ones(2, 3, requires_grad=True).sin()
        view = base.view(-1)
        held = (view, [view, {"one": view}], torch.max(torch.ones(2, 3), 0), OrderedDict(other=view), 3, "text", None)
        assert tree_leaves(histories.renewed(held)) == tree_leaves(held)
        base.mul_(2)
        renewed = histories.renewed(held)
        assert tree_structure(renewed) == tree_structure(held)
        for before, after in zip(tree_leaves(held), tree_leaves(renewed), strict=True):
            assert (after is before) == (before is not view)
