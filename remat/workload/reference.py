"""A reference: a model whose forward a step calls beside that of the model that it trains (DPO's, a teacher).

Nothing of it is planned. On fake tensors it must still choose the masks and kernels that it chooses on the device, and
cannot tell: who runs a step on fakes answers for it, as for the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

Forward = Callable[..., Any]
Run = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]

_RUN: ContextVar[Run | None] = ContextVar("run", default=None)


def call_reference(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` of a reference model as the step around it is run."""
    run = _RUN.get()
    return forward(*args, **kwargs) if run is None else run(forward, args, kwargs)


@contextlib.contextmanager
def references_run_by(run: Run) -> Iterator[None]:
    """Let `run` call the forwards of references while the context is open."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)
