"""Door to torch: look up private names, report missing ones, and share a change to torch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat.errors import RematError


@functools.cache
def internal(path: str, purpose: str) -> Any:
    """Return the object at a dotted `path` below torch. Raises RematError if there is none."""
    found: Any = torch
    done = "torch"
    for name in path.split("."):
        done = f"{done}.{name}"
        try:  # some packages take the names of their modules away
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(done)
        except ImportError:
            raise RematError(
                f"torch {torch.__version__} has no {done}, which remat needs to {purpose}; use torch 2.11 to 2.15."
            ) from None
    return found


class Shared:
    """A change that holds while any thread needs it: the first makes it, the last undoes it."""

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[Any]]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._made = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._made.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._made.close()
