"""The surroundings of a forward: they decide its graph and its kernels, and Dynamo's guards do not see them.

Dynamo guards on a model's modules, on their attributes, and on the globals that their code reads. It sees neither a
method that is replaced on a class of them, nor a hook on all modules (`register_module_forward_hook`), nor which
kernels of attention are on. So a graph is kept for the surroundings that it was traced in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from remat._torch.training import hooks_on_all_modules
from remat.execution.kernel_settings import kernel_settings

_Values = tuple[tuple[bool, ...], tuple[int, ...], tuple[Any, ...]]


class Surroundings:
    """The surroundings of the forwards of a model.

    first  as the first forward was traced; None before
    """

    def __init__(self, model: nn.Module):
        self._model = model  # perhaps a copy that is not whole yet
        self.first: _Values | None = None

    @functools.cached_property
    def _methods(self) -> list[tuple[type, str]]:
        kinds = dict.fromkeys(map(type, self._model.modules()))
        return [(kind, name) for kind in kinds for name in dict.fromkeys(_methods(kind))]

    def now(self) -> _Values:
        """Return the present surroundings; equal where a trace still holds."""
        values = kernel_settings(), hooks_on_all_modules(), tuple(getattr(*method, None) for method in self._methods)
        self.first = self.first or values
        return values

    def changes(self) -> list[str]:
        """List in words the changes since the first forward, but for hooks (see `circumstances.differences`)."""
        now, first = self.now(), self.first
        if first is None or now == first:
            return []
        (kernels, _, methods), (kernels_first, _, methods_first) = now, first
        said = ["other kernels of attention, cuDNN or oneDNN are on than in the first forward"]
        pairs = zip(self._methods, methods, methods_first, strict=True)
        replaced = [f"{kind.__name__}.{name}" for (kind, name), one, other in pairs if one != other]
        return said[kernels == kernels_first :] + [
            f"{name} was replaced since the first forward" for name in replaced[:3]
        ]


def _methods(kind: type) -> Iterator[str]:
    """Yield the names of the methods and properties of a class of modules, less those that every module has."""
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            for name, value in vars(base).items():
                if name == "__call__" or (not name.startswith("__") and (callable(value) or hasattr(value, "__get__"))):
                    yield name
    yield "forward"
