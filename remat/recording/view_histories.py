"""Views of fake tensors get the history that views of real ones have.

Once a tensor has been written in place, autograd gives each of its views a new history. For a real tensor that is
always `as_strided` of the base, whose backward makes a tensor of the base's size. For a tensor that dispatches to
Python, as every fake one does, it is the view's own operator, whose backward is often a view and takes nothing
(`CopySlices` and `view_fn` in torch/csrc/autograd). `Linear` followed by `ReLU(inplace=True)` is enough to see it:
what a linear layer gives for more than two dimensions is a view.

So on fakes every view whose base has changed since it was made is replaced by `as_strided` of the base where it is
next used. What is computed outside captured graphs is not looked at.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from remat._torch.recording import beside_functions, is_batched
from remat.recording import in_place

_ADDING = {
    F.scaled_dot_product_attention: "attention",
    F.linear: "linear",
    F.multi_head_attention_forward: "linear",
}  # in place, on real tensors
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class ViewHistories(TorchFunctionMode):
    """Renew the views that fake tensors are computed from, in forward and recomputation. May be entered again."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()  # view -> (its version when last seen, its replacement since)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype and the like
            return func(*args, **(kwargs or {}))
        with beside_functions():
            args, kwargs = self.renewed((args, kwargs or {}))
        adding = _ADDING.get(func)
        if adding is None or any(isinstance(each, torch.Tensor) and is_batched(each) for each in args):
            out = func(*args, **kwargs)
        else:
            with in_place.within(adding):
                out = func(*args, **kwargs)
        with beside_functions():
            return self.renewed(out)

    def __enter__(self) -> Self:
        in_place.count("model", 1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        in_place.count("model", -1)

    def renewed(self, value: Any) -> Any:
        """Renew the views in `value` whose base has been written since the view was first seen.

        Plain containers are traversed here: `tree_map` takes ten times as long, at every call of every step.
        """
        if isinstance(value, torch.Tensor):
            return self._renewed(value)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list:
            return kind(map(self.renewed, value))
        if kind is dict:
            return {key: self.renewed(each) for key, each in value.items()}
        return tree_map(self._renewed, value)

    def _renewed(self, value: Any) -> Any:
        if not (isinstance(value, FakeTensor) and value._is_view() and value.requires_grad and torch.is_grad_enabled()):
            return value
        version, renewed = self._known.get(value, (value._version, value))
        if version != value._version:
            assert value._base is not None
            renewed = value._base.as_strided(value.size(), value.stride(), value.storage_offset())
            self._known[renewed] = (value._version, None)
        self._known[value] = (value._version, None if renewed is value else renewed)
        return value if renewed is None else renewed
