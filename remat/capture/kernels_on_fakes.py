"""Kernels in Triton on fake tensors: none runs.

A kernel allocates nothing and returns nothing; it writes into tensors that its caller made. So of a fake step it is no
part, and a Function that calls one (TRL's fused head, Liger's) is recorded as what surrounds it. Triton would ask fakes
for addresses, which they do not have. Kernels on real tensors run as ever. In code that Dynamo traces, a launch is an
operator of torch's own, which has no rule for a mode that it does not know.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from remat._torch.dynamo import traced_triton_launch
from remat.shared import Shared

_LAUNCHERS = {"triton.runtime.jit": "JITFunction", "triton.runtime.autotuner": "Autotuner"}


@contextlib.contextmanager
def _unlaunched() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name in _LAUNCHERS.items():
            if (launcher := getattr(sys.modules.get(module), name, None)) is not None:
                stack.enter_context(mock.patch.object(launcher, "run", _launched(launcher.run)))
        if all(module in sys.modules for module in _LAUNCHERS):
            traced = traced_triton_launch()
            stack.enter_context(mock.patch.object(traced, "__call__", _launched(traced.__call__)))
        yield


def _launched(run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, FakeTensor) for arg in tree_leaves((args, kwargs))):
            return None
        return run(self, *args, **kwargs)

    return launch


kernels_on_fakes = Shared(_unlaunched)  # no kernel in Triton is launched on fake tensors
