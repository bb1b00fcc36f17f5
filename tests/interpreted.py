"""Fused groups without a compiler: tests of what they compute need not wait for Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from remat.fusion import fused_group, kernels
from remat.fusion.kernels import Kernel


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run fused groups operator by operator while the context is open; none that was compiled is taken."""
    with contextlib.ExitStack() as patched:
        for home, name in ((kernels, "_KERNELS"), (fused_group, "_LOWERED"), (fused_group, "_OPEN")):
            patched.enter_context(mock.patch.object(home, name, {}))
        patched.enter_context(mock.patch.object(Kernel, "begin", lambda kernel: None))
        patched.enter_context(mock.patch.object(Kernel, "_ended", _by_operator))
        yield


def _by_operator(kernel: Kernel) -> Callable[[list[Any]], Any]:
    return lambda given: kernel.graph(*given)
