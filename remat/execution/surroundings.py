"""The surroundings of a forward: they decide its graph and its kernels, and Dynamo's guards do not see them.

Dynamo guards on a model's modules, on their attributes, and on the globals that their code reads. It sees neither a
method that is replaced on a class of them, nor a hook on all modules (`register_module_forward_hook`), nor which
kernels of attention are on. So a graph is kept for the surroundings that it was traced in.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

from remat._torch.training import hooks_on_all_modules
from remat.execution.kernel_settings import kernel_settings

_Values = tuple[tuple[bool, ...], tuple[int, ...], tuple[Any, ...]]


class Surroundings:
    """The surroundings of the forwards of a model."""

    def __init__(self, model: nn.Module):
        self._model = model  # perhaps a copy that is not whole yet
        self._seen: dict[Hashable, _Values] = {}  # the first one's first; methods are kept, so that an id stays its own

    @functools.cached_property
    def _methods(self) -> list[tuple[type, str]]:
        kinds = dict.fromkeys(map(type, self._model.modules()))
        return list(dict.fromkeys(found for kind in kinds for found in _methods(kind)))

    def now(self) -> Hashable:
        """Return the present surroundings; equal where a trace still holds."""
        values = kernel_settings(), hooks_on_all_modules(), tuple(vars(of).get(name) for of, name in self._methods)
        key = *values[:2], tuple(map(id, values[2]))
        self._seen.setdefault(key, values)
        return key

    def forget(self) -> None:
        """Forget what was seen, but for the surroundings of the first forward and the present ones."""
        first = next(iter(self._seen))
        self._seen = {first: self._seen[first]}
        self.now()

    def changes(self) -> list[str]:
        """List in words the changes since the first forward, but for hooks (see `circumstances.differences`)."""
        (kernels_first, _, first), (kernels, _, methods) = next(iter(self._seen.values())), self._seen[self.now()]
        said = ["other kernels of attention, cuDNN or oneDNN are on than in the first forward"]
        pairs = zip(self._methods, methods, first, strict=True)
        replaced = [f"{of.__name__}.{name}" for (of, name), one, other in pairs if one is not other]
        return said[kernels == kernels_first :] + [
            f"{name} was replaced since the first forward" for name in replaced[:3]
        ]


def _methods(kind: type) -> Iterator[tuple[type, str]]:
    """Yield where a class of modules and its bases have methods and properties, less those that every module has.

    One of a base may be replaced on the class too.
    """
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items():
            if name == "__call__" or (not name.startswith("__") and (callable(value) or hasattr(value, "__get__"))):
                yield base, name
                yield kind, name
    yield kind, "forward"
